"""Rotations, codebooks and scales by norm in kernels: the tables and shapes that their sections are printed with."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvgen.emit.names import tuple_text
from kvgen.quant.turbo import CODEBOOKS, GROUP
from kvgen.schedule import Tile


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound between centroids: its bits as a float32, how its count is taken in, and the centroids on its sides."""

    value: str
    bits: str
    sum: str
    centroid: str
    last: str


@dataclass(frozen=True, slots=True)
class Book:
    """A codebook as its functions print it: the bounds above 0, the innermost centroid and the others."""

    name: str
    half: int
    bounds: tuple[Bound, ...]
    innermost: str
    centroids: tuple[tuple[int, str], ...]


def codebooks() -> tuple[Book, ...]:
    """All codebooks."""
    return tuple(
        Book(
            book.name,
            len(book.centroids),
            tuple(_bound(i, bound, book.centroids) for i, bound in enumerate(book.bounds)),
            repr(book.centroids[0]),
            tuple((i, repr(value)) for i, value in enumerate(book.centroids) if i),
        )
        for book in CODEBOOKS
    )


def _bound(index: int, value: float, centroids: Sequence[float]) -> Bound:
    (bits,) = struct.unpack("i", struct.pack("f", value))
    last = "centroid" if index else repr(centroids[0])
    return Bound(repr(value), f"0x{bits:X}", "count += " if index else "count = ", repr(centroids[index + 1]), last)


def sides(tile: Tile) -> list[str]:
    """The sides of a tile as text."""
    return ["TOKENS" if name == "token" else str(side) for name, side in zip(tile.order, tile.sides, strict=True)]


def rotation(tile: Tile, dims: int) -> str:
    """What a rotation takes beside the values of a tile, whose last axes are all dims of a row."""
    (root,) = struct.unpack("f", struct.pack("f", 1 / math.sqrt(dims)))
    rows = [text for name, text in zip(tile.order, sides(tile), strict=True) if name not in ("group", "dim")]
    return f"{' * '.join(rows) or '1'}, {dims}, {dims.bit_length() - 1}, {root!r}, {tuple_text(sides(tile))}"


def groups(tile: Tile) -> str:
    """How many groups a tile holds."""
    found = sides(tile)
    *rest, last = [side for side in found if side != "TOKENS"]
    counted = math.prod(map(int, rest)) * int(last) // GROUP
    return f"TOKENS * {counted}" if "TOKENS" in found else str(counted)


def ratio(tile: Tile, kept: Sequence[str]) -> str:
    """A number for each group of a tile, in the shape of its scales."""
    if not kept:
        return "tl.sum(ratio)"  # there is one
    shape = [text if name in kept else "1" for name, text in zip(tile.order, sides(tile), strict=True)]
    return f"tl.reshape(ratio, {tuple_text(shape)})"
