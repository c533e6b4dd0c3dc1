"""Codes narrower than a byte: which of them share one, told from the order of their place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvgen.axes import Digit
from kvgen.layout import Dim, Holds, Leaf, Place

BITS = {"int4": 4, "uint4": 4, "e2m1": 4, "turbo2": 2, "turbo3": 3, "turbo4": 4}
"""Of the codes narrower than a byte, by element type."""

_HOW = "let the order end in `dim`, or in a part of it such as `dim//16%2`"


@dataclass(frozen=True, slots=True)
class Pack:
    """The fewest codes that end at a byte: ``codes`` of them in ``itemsize`` bytes, a little-endian stream of bits."""

    codes: int
    itemsize: int

    @property
    def room(self) -> str:
        return "a byte" if self.itemsize == 1 else f"{self.itemsize} bytes"


def pack_of(bits: int) -> Pack:
    """How codes of so many bits share bytes."""
    whole = math.lcm(bits, 8)
    return Pack(whole // bits, whole // 8)


class PackingError(Exception):
    """Codes that cannot share bytes; ``hint`` says what to write instead."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


def packed(leaf: Leaf, dims: Sequence[Dim], share: Pack) -> tuple[tuple[Dim, ...], Digit]:
    """The dimensions of a place of codes counted in packs, and the digit that the codes of one pack make up.

    The fastest digit is split: its lowest codes share a pack, the rest stays. Raises PackingError where there is no
    such digit, and where the codes of a pack lie so far apart that no tile of a kernel puts them together.
    """
    for at in reversed(range(len(dims))):
        for index in reversed(range(len(dims[at].digits))):
            digit = dims[at].digits[index]
            if digit.size != 1:
                pack, rest = _split(leaf, digit, share)
                after = [tuple(d for d in dim.digits if d.axis != "dim") for dim in dims[at + 1 :]]
                digits = (*dims[at].digits[:index], rest, *(d for d in dims[at].digits[index + 1 :] if d.axis != "dim"))
                return (*dims[:at], Dim(digits), *map(Dim, after)), pack
    message = f"{share.codes} codes of `{leaf.name}` share {share.room}, and this place holds one"
    raise PackingError(message, _HOW)


def unpacked(place: Place) -> tuple[Dim, ...]:
    """The dimensions of a place as its order says them: counted in values, not in the bytes that these share."""
    pack = place.content.pack if isinstance(place.content, Holds) else None
    if pack is None:
        return place.dims
    dims = list(place.dims)
    for at in reversed(range(len(dims))):
        for index in reversed(range(len(dims[at].digits))):
            digit = dims[at].digits[index]
            if (digit.axis, digit.div) == ("dim", pack.div * pack.size):
                whole = Digit("dim", pack.div, digit.size * pack.size)
                dims[at] = Dim((*dims[at].digits[:index], whole, *dims[at].digits[index + 1 :]))
                return tuple(dims)
    raise AssertionError(place)


def _split(leaf: Leaf, digit: Digit, share: Pack) -> tuple[Digit, Digit]:
    per = share.codes
    if digit.axis == "bit":
        message = f"`bit` is the fastest term above `{leaf.name}`: the bits of a code lie together without it"
        raise PackingError(message, "leave it out, or let a part of `dim` follow: `dim//32 bit dim%32`")
    if digit.axis != "dim":
        other = {"block": "blocks", "slot": "tokens", "head": "heads", "kv": "streams", "layer": "layers"}[digit.axis]
        raise PackingError(f"{share.room} would hold codes of `{leaf.name}` of {per} {other}", _HOW)
    if digit.size is None:
        raise PackingError(f"{per} codes of `{leaf.name}` share {share.room}: `dim` must have a constant extent")
    if digit.size % per:
        filled = "bytes" if share.itemsize == 1 else share.room
        message = f"{digit.size} codes of `{leaf.name}` do not fill {filled} of {per}"
        raise PackingError(message, f"an extent that {per} divides")
    if digit.div & (digit.div - 1):
        message = (
            f"codes of `{leaf.name}` that are {digit.div} dims apart share {share.room}: powers of two can be put "
            "together"
        )
        raise PackingError(message, _HOW)
    return Digit("dim", digit.div, per), Digit("dim", digit.div * per, digit.size // per)
