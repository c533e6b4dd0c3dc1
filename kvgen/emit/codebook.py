"""Rotations, codebooks and scales by norm in kernels: the tables and shapes that their sections are printed with."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvgen.emit.names import tuple_text
from kvgen.emit.sections import Masks
from kvgen.quant.turbo import CODEBOOKS, GROUP, Codebook
from kvgen.tiles import Tile

NAMES = ("first", "second", "third")
"""Steps of a search among up to eight centroids."""
WORD = 8
"""Codes that are looked at together in a word, of which a group has two."""


@dataclass(frozen=True, slots=True)
class Halving:
    """A step of the search for a size's centroid: its name, the bound that a size is held to, by the steps before, and
    the bit of the index that tells its outcome."""

    name: str
    bound: str
    values: str
    bit: int

    @property
    def place(self) -> int:
        """Which bit that is."""
        return self.bit.bit_length() - 1


@dataclass(frozen=True, slots=True)
class Term:
    """What each centroid adds to a sum of squares, in 2**-24, whose number has all of some bits."""

    factor: int
    bits: str


@dataclass(frozen=True, slots=True)
class Book:
    """A codebook as its functions print it: its codes, how a size is found among the centroids above 0, and these.

    ``upper`` are numbers of 2**23 that end in the codes of these, ``sizes`` the centroids themselves, ``bounds`` what
    lies below them. ``slope`` and ``height`` are those of ``line``. Of eight codes in a word ``ones`` has the lowest
    bits, and ``both`` those beside them too; ``constant`` and ``terms`` make up the squares of 16 centroids.
    """

    name: str
    half: int
    halvings: tuple[Halving, ...]
    upper: str
    sizes: str
    bounds: str
    slope: str
    height: str
    sign: int
    ones: str
    both: str
    constant: int
    terms: tuple[Term, ...]

    @property
    def mask(self) -> int:
        return 2 * self.half - 1


def codebooks() -> tuple[Book, ...]:
    """All codebooks."""
    return tuple(map(_book, CODEBOOKS))


def _book(book: Codebook) -> Book:
    half, steps = len(book.centroids), NAMES[: book.bits - 1]
    halvings = []
    for i, name in enumerate(steps):
        step = half >> i + 1
        bounds = book.bounds[step - 1 :: 2 * step]
        bits = [f"0x{_bits(bound):X}" for bound in bounds]
        halvings.append(Halving(name, _chosen(steps[:i], bits), ", ".join(map(repr, bounds)), step))
    # What is found last decides last: nothing that was found before it has to wait for it.
    last_first = [int(f"{i:0{len(steps)}b}"[::-1], 2) for i in range(half)]
    upper = [f"0x{_bits(2.0**23) + half + code:X}" for code in last_first]
    ones = sum(1 << book.bits * i for i in range(WORD))
    constant, *factors = moments(book)
    return Book(
        book.name,
        half,
        tuple(halvings),
        _chosen(steps[::-1], upper),
        _chosen(steps, [repr(value) for value in book.centroids]),
        _chosen(steps, [repr(value) for value in (0.0, *book.bounds)]),
        *map(repr, line(book)),
        sign=book.bits - 1,
        ones=f"0x{ones:X}",
        both=f"0x{3 * ones:X}",
        constant=GROUP * constant,
        terms=tuple(
            Term(factor, " & ".join(step.name for step in halvings if i & step.bit))
            for i, factor in enumerate(factors, 1)
        ),
    )


def moments(book: Codebook) -> list[int]:
    """Of each set of bits what a centroid's square has of it, in 2**-24, where a size's number has all of them.

    A square is the sum over the sets that its number has, of which the empty one is the first.
    """
    found = [round(_short(value) ** 2 * 2**24) for value in book.centroids]
    for bit in range(book.bits - 1):
        found = [value - found[i ^ 1 << bit] if i >> bit & 1 else value for i, value in enumerate(found)]
    return found


def eights(mode: str) -> str:
    """What ``_eights`` takes of a codebook: the bits of a code, and what lies among those of a word beside them."""
    (bits,) = (book.bits for book in CODEBOOKS if book.name == mode)
    above = sum(_bits(2.0**23) << bits * i for i in range(WORD)) % 2**32
    return f"{bits}, {_signed(above) if bits * WORD == 32 else 0}"


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


def _short(value: float) -> float:
    """The float32 nearest to a number."""
    return struct.unpack("f", struct.pack("f", value))[0]


def _signed(word: int) -> int:
    """A word of 32 bits as an integer with a sign."""
    return word - (word >> 31 << 32)


def sides(tile: Tile) -> list[str]:
    """The sides of a tile as text."""
    return ["TOKENS" if name == "token" else str(side) for name, side in zip(tile.order, tile.sides, strict=True)]


def rotation(tile: Tile, dims: int) -> str:
    """What a rotation takes beside the values of a tile, whose last axes are all dims of a row."""
    rows = [text for name, text in zip(tile.order, sides(tile), strict=True) if name not in ("group", "dim")]
    root = _short(1 / math.sqrt(dims))
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
