"""Transfers: two layouts of the same streams, and how each stream gets from one to the other."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from kvgen.axes import Axis
from kvgen.layout import Encoding, Layout, Leaf, Scale, Stream

SOURCE, DESTINATION = "src_", "dst_"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies from pools of one layout to pools of another.

    Buffers and arguments of the two are told apart by the prefixes ``src_`` and ``dst_``. ``layers``: one layer a call,
    or all of them. ``requantise``: encodings may change, through float32. ``programs`` caps the grid, None does not.
    ``functions`` are those that its module has, all where none is named.
    """

    name: str
    summary: str
    source: Layout
    destination: Layout
    layers: Literal["one", "all"] = "one"
    requantise: bool = False
    programs: int | None = None
    functions: tuple[str, ...] = ()

    @property
    def sides(self) -> tuple[Layout, Layout]:
        return self.source, self.destination

    def raw(self, stream: str) -> bool:
        """Whether the bytes of a stream are moved as they are."""
        return same_encoding(self.source.stream(stream), self.destination.stream(stream), self.requantise)

    @property
    def recoded(self) -> tuple[str, ...]:
        """The streams whose values are read and written anew: the others' bytes are moved, and want no scales."""
        return tuple(stream.name for stream in self.source.streams if not self.raw(stream.name))

    @property
    def sharded(self) -> bool:
        """Whether a call moves some of the heads: ``src_head``, ``dst_head`` and ``heads`` are its arguments."""
        return any(axis.name == "head" for stream in self.source.streams for axis in stream.axes)


def side(layout: Layout, prefix: str) -> Layout:
    """A layout as one side of a transfer: its buffers, and the scales that it is handed, begin with ``prefix``.

    What is fused into its append is no business of what moves.
    """
    streams = tuple(_prefixed(stream, prefix) for stream in layout.streams)
    buffers = tuple(replace(buffer, name=prefix + buffer.name) for buffer in layout.buffers)
    return replace(layout, prefix=prefix, streams=streams, buffers=buffers, fuse=None, query=None)


def _prefixed(stream: Stream, prefix: str) -> Stream:
    scale = stream.scale
    if scale is None:
        return stream
    outer = scale.scale and replace(scale.scale, prefix=prefix)
    return replace(stream, encoding=replace(stream.encoding, scale=replace(scale, prefix=prefix, scale=outer)))


def same_encoding(source: Stream, destination: Stream, requantise: bool = False) -> bool:
    """Whether bytes alone decode alike on both sides.

    Scales that lie in buffers travel with the codes. Scales that are handed in are one and the same for both sides, but
    where ``requantise`` lets them differ.
    """
    if _meaning(source) != _meaning(destination):
        return False
    scale = source.scale
    return scale is None or not requantise or (scale.stored and scale.scale is None)


def _meaning(stream: Stream) -> Encoding | None:
    """The encoding without what says how codes and scales come about, which readers of bytes need not know."""
    encoding = stream.encoding
    if encoding is None:
        return None
    zero = encoding.zero and replace(encoding.zero, clamped=False)
    scale = encoding.scale and _scale_meaning(encoding.scale)
    return replace(encoding, rounding="even", clamp=None, zero=zero, scale=scale)


def _scale_meaning(scale: Scale) -> Scale:
    return Scale(
        name=scale.name,
        axes=tuple(Axis(axis.name, None, axis.step) for axis in scale.axes),
        dynamic=False,
        dtype=scale.dtype,
        stored=scale.stored,
        given=scale.given,
        scale=scale.scale and _scale_meaning(scale.scale),
    )


def leaves_of_stream(layout: Layout, stream: str) -> tuple[Leaf, ...]:
    return tuple(leaf for leaf in layout.leaves if leaf.stream == stream)


def shared_by_tokens(leaf: Leaf) -> int | None:
    """Tokens that share a value of a leaf: 1 where each has its own, None where all of a block do."""
    return next((axis.step for axis in leaf.axes if axis.name == "slot"), None)


def tokens_together(transfer: Transfer, stream: str) -> int | None:
    """Tokens of the destination whose scale is made anew of all of them at once: 1 where each stands alone.

    None: all of a block, whose size only the launch knows.
    """
    scale = transfer.destination.stream(stream).scale
    if transfer.raw(stream) or scale is None or not scale.dynamic:
        return 1
    tokens = next((axis.step for axis in scale.axes if axis.name == "slot"), None)
    return tokens or transfer.destination.block_size


def most_together(transfer: Transfer) -> int:
    """The same of all streams: there is one such number besides 1 at the most."""
    return max(tokens_together(transfer, stream.name) or 1 for stream in transfer.source.streams)


def token_refusal(transfer: Transfer) -> str | None:
    """Why single tokens cannot be moved, only whole blocks; None where they can."""
    for stream in transfer.source.streams:
        if (tokens := tokens_together(transfer, stream.name)) != 1:
            whose = f"{tokens} tokens" if tokens else "all tokens of a block"
            return f"{whose} of the destination share `{stream.name}.scale`, which is made of them all at once"
        if not transfer.raw(stream.name):
            continue
        for leaf in leaves_of_stream(transfer.source, stream.name):
            tokens = shared_by_tokens(leaf)
            if tokens != 1:
                whose = "all tokens of a block" if tokens is None else f"{tokens} tokens"
                return f"{whose} share `{leaf.name}`, which goes with them all or with none"
    return None


MOST_TOGETHER = 1 << 15
"""Values under scales that tokens share, at the most: one program holds them all."""


def write_refusal(transfer: Transfer, stream: str) -> str | None:
    """Why a stream cannot be encoded at the destination; None where it can, or where its bytes are moved."""
    tokens = tokens_together(transfer, stream)
    if tokens == 1:
        return None
    if tokens is None:
        return "all tokens of a block share a dynamic scale, and only the launch knows how many: give `block_size`"
    for other in transfer.source.streams:
        if tokens_together(transfer, other.name) not in (1, None, tokens):
            theirs = f"that of `{other.name}` of {tokens_together(transfer, other.name)}"
            return f"its scale is made of {tokens} tokens, {theirs}: a launch makes scales of one number of tokens"
    found = transfer.destination.stream(stream)
    by_head = "head" in [axis.name for axis in found.scale.axes]
    sides = [axis.extent or 1 for axis in found.axes if axis.name == "dim" or not by_head]
    values = math.prod(sides) * tokens
    if values > MOST_TOGETHER:
        cure = "" if by_head or len(found.axes) == 1 else "; let it vary over `head`"
        return f"{tokens} tokens that share a scale have {values} values, a program holds {MOST_TOGETHER}{cure}"
    return None
