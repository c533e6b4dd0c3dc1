"""Two spellings of one tensor: a pair that takes turns within its last dimension, and a record of the two."""

from __future__ import annotations

from dataclasses import replace

from kvgen import sizes
from kvgen.layout import Holds, Layout, Place, leaves_of


def same_as(layout: Layout, place: Place) -> str | None:
    """How else a buffer may be written, ``(kv dim)`` for ``fields: [key, value]`` or that for this; None for others."""
    return _as_fields(layout, place) if isinstance(place.content, Holds) else _as_pair(layout, place)


def _as_fields(layout: Layout, place: Place) -> str | None:
    content, digits = place.content, place.dims[-1].digits
    if len(content.leaves) != 2 or content.pack or len(digits) < 2 or digits[0].axis != "kv":
        return None
    if place.align != 1 or len(place.dims) < 2 or any(digit.size is None for digit in digits):
        return None
    above = sizes.order(layout, replace(place, dims=place.dims[:-1]))
    terms = " ".join(sizes.term(layout, place, digit) for digit in digits[1:])
    return f"order: {above}, fields: [{', '.join(f'{{{leaf}: {terms}}}' for leaf in content.leaves)}]"


def _as_pair(layout: Layout, place: Place) -> str | None:
    parts = [field.content for field in place.content.fields]
    if (
        place.align != 1
        or len(parts) != 2
        or not all(_is_half(part) for part in parts)
        or parts[0].dims != parts[1].dims
    ):
        return None
    first, second = (layout.leaf(leaves_of(part)[0]) for part in parts)
    if first.name == second.name or (first.axes, first.dtypes) != (second.axes, second.dtypes):
        return None
    above, below = sizes.order(layout, place), sizes.order(layout, parts[0])
    return f"holds: [{first.name}, {second.name}], order: {above} (kv {below})"


def _is_half(part: object) -> bool:
    """Whether part of a record could be half of a pair: one leaf, a byte or more each, and nothing to align."""
    if not isinstance(part, Place) or not isinstance(part.content, Holds) or part.align != 1 or part.content.pack:
        return False
    return len(part.content.leaves) == 1 and all(len(dim.digits) == 1 for dim in part.dims)
