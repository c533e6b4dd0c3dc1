"""Codes narrower than a byte: which of them share one, told from the order of their place."""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.axes import Digit
from kvgen.layout import Dim, Holds, Leaf, Place

BITS = {"int4": 4, "uint4": 4, "e2m1": 4}
"""Of the codes narrower than a byte, by element type."""

_HOW = "let the order end in `dim`, or in a part of it such as `dim//16%2`"


class PackingError(Exception):
    """Codes that cannot share bytes; ``hint`` says what to write instead."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


def packed(leaf: Leaf, dims: Sequence[Dim], per: int) -> tuple[tuple[Dim, ...], Digit]:
    """The dimensions of a place of codes counted in bytes, and the digit that ``per`` codes of one byte make up.

    The fastest digit is split: its lowest ``per`` share a byte, the rest stays. Raises PackingError where there is no
    such digit, and where the codes of a byte lie so far apart that no tile of a kernel puts them together.
    """
    for at in reversed(range(len(dims))):
        for index in reversed(range(len(dims[at].digits))):
            digit = dims[at].digits[index]
            if digit.size != 1:
                pack, rest = _split(leaf, digit, per)
                after = [tuple(d for d in dim.digits if d.axis != "dim") for dim in dims[at + 1 :]]
                digits = (*dims[at].digits[:index], rest, *(d for d in dims[at].digits[index + 1 :] if d.axis != "dim"))
                return (*dims[:at], Dim(digits), *map(Dim, after)), pack
    message = f"{per} codes of `{leaf.name}` share a byte, and this place holds one"
    raise PackingError(message, _HOW)


def unpacked(place: Place) -> tuple[Dim, ...]:
    """The dimensions of a place as its order says them: counted in values, not in the bytes that they share."""
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


def _split(leaf: Leaf, digit: Digit, per: int) -> tuple[Digit, Digit]:
    if digit.axis != "dim":
        other = {"block": "blocks", "slot": "tokens", "head": "heads", "kv": "streams", "layer": "layers"}[digit.axis]
        raise PackingError(f"a byte would hold codes of `{leaf.name}` of {per} {other}", _HOW)
    if digit.size is None:
        raise PackingError(f"{per} codes of `{leaf.name}` share a byte: `dim` must have a constant extent")
    if digit.size % per:
        message = f"{digit.size} codes of `{leaf.name}` do not fill bytes of {per}"
        raise PackingError(message, f"an extent that {per} divides")
    if digit.div & (digit.div - 1):
        message = (
            f"codes of `{leaf.name}` that are {digit.div} dims apart share a byte: powers of two can be put together"
        )
        raise PackingError(message, _HOW)
    return Digit("dim", digit.div, per), Digit("dim", digit.div * per, digit.size // per)
