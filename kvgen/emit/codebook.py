"""Rotations, codebooks and scales by norm in kernels: the tables and shapes that their sections are printed with."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvgen.emit.names import tuple_text
from kvgen.emit.sections import Masks
from kvgen.quant.turbo import CODEBOOKS, GROUP, Codebook
from kvgen.schedule import Tile

NAMES = ("first", "second", "third")
"""Steps of a search among up to eight centroids."""


@dataclass(frozen=True, slots=True)
class Halving:
    """A step of the search for a size's centroid: its name, the bound that a size is held to, by the steps before, and
    the bit of the index that tells its outcome."""

    name: str
    bound: str
    values: str
    bit: int


@dataclass(frozen=True, slots=True)
class Book:
    """A codebook as its functions print it: its codes, how a size is found among the centroids above 0, and these.

    ``tagged`` are centroids of which the lowest bits are replaced by their codes, ``sizes`` the centroids themselves,
    ``bounds`` what lies below them. ``slope`` and ``height`` are those of ``line``.
    """

    name: str
    half: int
    halvings: tuple[Halving, ...]
    tagged: str
    sizes: str
    bounds: str
    slope: str
    height: str

    @property
    def mask(self) -> int:
        return 2 * self.half - 1


def codebooks() -> tuple[Book, ...]:
    """All codebooks."""
    return tuple(map(_book, CODEBOOKS))


def _book(book: Codebook) -> Book:
    half, steps = len(book.centroids), NAMES[: book.bits - 1]
    tagged = [f"0x{_tagged(value, half + i, 2 * half):X}" for i, value in enumerate(book.centroids)]
    halvings = []
    for i, name in enumerate(steps):
        step = half >> i + 1
        bounds = book.bounds[step - 1 :: 2 * step]
        bits = [f"0x{_bits(bound):X}" for bound in bounds]
        halvings.append(Halving(name, _chosen(steps[:i], bits), ", ".join(map(repr, bounds)), step))
    # What is found last decides last: nothing that was found before it has to wait for it.
    found = [tagged[int(f"{i:0{len(steps)}b}"[::-1], 2)] for i in range(half)]
    return Book(
        book.name,
        half,
        tuple(halvings),
        _chosen(steps[::-1], found),
        _chosen(steps, [repr(value) for value in book.centroids]),
        _chosen(steps, [repr(value) for value in (0.0, *book.bounds)]),
        *map(repr, line(book)),
    )


def line(book: Codebook) -> tuple[float, float]:
    """Slope and height of a line whose values, held to 0 and that height and rounded, are codes or one less.

    Of a value x it has ``height * (slope * x + 0.5)``. At the bound below code c it must lie between c - 1.5 and
    c - 0.5: codes above 0 bound its steepness, which is in the middle of what they allow. Rounding is monotone, so that
    it is right everywhere if it is at the bounds and before them.
    """
    height = 2.0 * len(book.centroids) - 2
    least = max((i - 0.5) / bound for i, bound in enumerate(book.bounds, 1))
    most = min(((i + 0.5) / bound for i, bound in enumerate(book.bounds[:-1], 1)), default=math.inf)
    most = min(most, 2 * least)
    if least >= most:
        raise ValueError(f"no line through the bounds of {book.name}")
    return (least + most) / 2 / height, height


def _chosen(conditions: Sequence[str], values: Sequence[str]) -> str:
    """The value whose number has the bits that the conditions are, the highest first."""
    if not conditions:
        return values[0]
    middle = len(values) // 2
    high, low = _chosen(conditions[1:], values[middle:]), _chosen(conditions[1:], values[:middle])
    return f"tl.where({conditions[0]}, {high}, {low})"


def _bits(value: float) -> int:
    """A float32 as an integer."""
    return struct.unpack("i", struct.pack("f", value))[0]


def _tagged(value: float, tag: int, tags: int) -> int:
    """The bits of the float32 nearest to ``value`` whose lowest bits are ``tag``."""
    near = _bits(value) // tags * tags + tag
    return min((near - tags, near, near + tags), key=lambda bits: abs(bits - _bits(value)))


def sides(tile: Tile) -> list[str]:
    """The sides of a tile as text."""
    return ["TOKENS" if name == "token" else str(side) for name, side in zip(tile.order, tile.sides, strict=True)]


def rotation(tile: Tile, dims: int) -> str:
    """What a rotation takes beside the values of a tile, whose last axes are all dims of a row."""
    (root,) = struct.unpack("f", struct.pack("f", 1 / math.sqrt(dims)))
    rows = [text for name, text in zip(tile.order, sides(tile), strict=True) if name not in ("group", "dim")]
    return f"{' * '.join(rows) or '1'}, {dims.bit_length() - 1}, {root!r}, {tuple_text(sides(tile))}"


def groups(tile: Tile) -> str:
    """How many groups a tile holds."""
    found = sides(tile)
    *rest, last = [side for side in found if side != "TOKENS"]
    counted = math.prod(map(int, rest)) * int(last) // GROUP
    return f"TOKENS * {counted}" if "TOKENS" in found else str(counted)


def in_rows(masks: Masks, tile: Tile, words: int, rows: str) -> Masks:
    """Masks of stores of rows that have so many words, counted through: [rows]."""
    if masks.write in ("", "valid"):
        return masks
    shape = [text for name, text in zip(tile.order, sides(tile), strict=True) if name not in ("group", "dim")]
    mask = f"tl.broadcast_to({masks.write}, {tuple_text([*shape, str(words)])})"
    return replace(masks, write=f"tl.reshape({mask}, ({rows},))")


def by_group(name: str, tile: Tile, kept: Sequence[str]) -> str:
    """A number for each group of a tile, in the shape of its scales."""
    if not kept:
        return f"tl.max({name})"  # there is one
    shape = [text if axis in kept else "1" for axis, text in zip(tile.order, sides(tile), strict=True)]
    return f"tl.reshape({name}, {tuple_text(shape)})"
