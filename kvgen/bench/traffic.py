"""The bytes that a function reads and writes, counted from the layout.

Counted are values, codes, the scales and zeros that go with them, and padding that is filled. Not counted are slot
numbers and tables (8 bytes a token or fewer), and scales that are handed in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction

from kvgen.axes import Digit
from kvgen.layout import Holds, Layout, Pad, Place, Stream
from kvgen.values import ITEMSIZE

POOL_AXES = ("block", "layer", "kv")


def appended(layout: Layout, sizes: Mapping[str, int], tokens: int, dtypes: Mapping[str, str]) -> int:
    """Bytes that ``append`` of so many tokens moves: streams of ``dtypes`` read, and everything of a token written.

    ``sizes`` are the extents that the layout leaves open, and that of ``slot``.
    """
    static = {s.scale.name for s in layout.streams if s.scale and not s.scale.dynamic}
    written = {leaf.name for leaf in layout.leaves} - static
    return _total(tokens, dense(layout, sizes, dtypes) + stored(layout, sizes, written) + _filled(layout, sizes))


def gathered(layout: Layout, sizes: Mapping[str, int], tokens: int, dtypes: Mapping[str, str]) -> int:
    """Bytes that ``gather`` of so many tokens moves: one place of every leaf read, streams of ``dtypes`` written."""
    leaves = {leaf.name for leaf in layout.leaves}
    return _total(tokens, dense(layout, sizes, dtypes) + stored(layout, sizes, leaves, once=True))


def pages(layout: Layout, sizes: Mapping[str, int], blocks: int, layers: int) -> int:
    """Bytes of whole blocks in all layers and places: all that tokens have there, and padding that is filled."""
    leaves = {leaf.name for leaf in layout.leaves}
    token = stored(layout, sizes, leaves) + _filled(layout, sizes)
    return _total(blocks * sizes["slot"] * layers, token)


def one_side(layout: Layout, sizes: Mapping[str, int], tokens: int, *, source: bool) -> int:
    """Bytes that a transfer reads, one place of every leaf, at the source, or writes to all of them."""
    token = stored(layout, sizes, {leaf.name for leaf in layout.leaves}, once=source)
    return _total(tokens, token + (0 if source else _filled(layout, sizes)))


def dense(layout: Layout, sizes: Mapping[str, int], dtypes: Mapping[str, str]) -> Fraction:
    """Bytes of a token outside the cache."""
    return Fraction(sum(values(stream, sizes) * ITEMSIZE[dtypes[stream.name]] for stream in layout.streams))


def values(stream: Stream, sizes: Mapping[str, int]) -> int:
    """Values of a token of a stream."""
    return math.prod(axis.extent if axis.extent is not None else sizes[axis.name] for axis in stream.axes)


def stored(layout: Layout, sizes: Mapping[str, int], leaves: Collection[str], *, once: bool = False) -> Fraction:
    """Bytes of a token and layer in the cache, in every place or ``once``; what tokens share counts in parts."""
    total, seen = Fraction(0), set()
    for buffer in layout.buffers:
        for content, digits in _parts(buffer.place, ()):
            if isinstance(content, Pad):
                continue
            wanted = [leaf for leaf in content.leaves if leaf in leaves and not (once and leaf in seen)]
            seen |= set(wanted)
            total += len(wanted) * content.itemsize * _per_token(digits, sizes)
    return total


def _filled(layout: Layout, sizes: Mapping[str, int]) -> Fraction:
    parts = [part for buffer in layout.buffers for part in _parts(buffer.place, ())]
    filled = [(pad.size, digits) for pad, digits in parts if isinstance(pad, Pad) and pad.fill is not None]
    return sum((size * _per_token(digits, sizes) for size, digits in filled), Fraction(0))


def _parts(place: Place, outer: tuple[Digit, ...]) -> Iterator[tuple[Holds | Pad, tuple[Digit, ...]]]:
    digits = (*outer, *(digit for dim in place.dims for digit in dim.digits))
    if isinstance(place.content, Holds):
        yield place.content, digits
        return
    for field in place.content.fields:
        if isinstance(field.content, Pad):
            yield field.content, digits
        else:
            yield from _parts(field.content, digits)


def _per_token(digits: tuple[Digit, ...], sizes: Mapping[str, int]) -> Fraction:
    """How often something that repeats over ``digits`` occurs for each token of a layer."""
    counts = [d.size if d.size is not None else sizes[d.axis] // d.div for d in digits if d.axis not in POOL_AXES]
    return Fraction(math.prod(counts), sizes["slot"])


def _total(tokens: int, each: Fraction) -> int:
    return round(tokens * each)
