"""Codes narrower than a byte: how a tile of codes becomes a tile of bytes, and back."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvgen.axes import Digit
from kvgen.plan import View
from kvgen.rows import WORD
from kvgen.tiles import Tile


@dataclass(frozen=True, slots=True)
class Half:
    """A step that puts two codes together: the bits of each, and what they are told by."""

    bits: int
    mask: int


@dataclass(frozen=True, slots=True)
class Packing:
    """The functions that put codes of so many bits together, neighbours first, and take them apart."""

    bits: int
    twos: str
    type: str
    wide: bool  # whether the codes of a pack are more than a byte holds
    words: str
    halves: tuple[Half, ...]

    @property
    def wider(self) -> str:
        """What codes are put together in: at least the processor's own words."""
        return self.type if self.wide else "tl.uint32"

    @property
    def title(self) -> str:
        return self.words.capitalize()

    @property
    def unhalves(self) -> tuple[Half, ...]:
        return self.halves[::-1]


def packings() -> tuple[Packing, ...]:
    """How codes of every width share bytes: as many as fill whole ones; and how whole bytes make words of four."""
    return (*(_packing(bits, math.lcm(bits, 8) // 8) for bits in range(1, 5)), _packing(8, WORD), _packing(16, WORD))


def _packing(bits: int, itemsize: int) -> Packing:
    whole = 8 * itemsize
    sizes = [bits << i for i in range(whole.bit_length()) if bits << i < whole]
    return Packing(
        bits=bits,
        twos=", ".join(["2"] * len(sizes)),
        type=word_type(itemsize),
        wide=itemsize > 1,
        words="bytes" if itemsize == 1 else f"words of {itemsize} bytes",
        halves=tuple(Half(size, (1 << size) - 1) for size in sizes),
    )


def word_type(itemsize: int) -> str:
    """What holds so many bytes in a kernel."""
    return f"tl.uint{8 << (itemsize - 1).bit_length()}"


@dataclass(frozen=True, slots=True)
class PackContext:
    """Shapes of a tile on its way from codes to the bytes, or words of several, that they share.

    ``apart`` splits ``dim`` into what stays, the codes of a byte (as twos) and what lies between them; ``order`` puts
    the codes of a byte last and ``unorder`` undoes it from ``between``; ``codes`` is the tile itself.
    """

    function: str
    unfunction: str
    apart: str
    order: str
    unorder: str
    moved: bool
    between: str
    joined: str
    codes: str


def repack(view: View) -> View:
    """The view with ``dim`` counted in packs: what one holds is no longer told apart."""
    pack = view.pack
    steps = tuple(
        replace(s, digit=Digit("dim", s.digit.div // pack.size, s.digit.size))
        if s.digit.axis == "dim" and s.digit.div >= pack.div * pack.size
        else s
        for s in view.steps
    )
    return replace(view, steps=steps)


def paired(view: View) -> View | None:
    """The view of two packs at a time, if all lie so side by side."""
    pack, last = view.pack, view.steps[-1]
    beside = last.digit.axis == "dim" and last.dim is None and last.factor * view.unit == view.itemsize
    if pack.div > 1 or not beside or last.digit.div != pack.size or (last.digit.size or 1) % 2:
        return None
    twos = Digit("dim", 2 * last.digit.div, last.digit.size // 2)
    steps = (*view.steps[:-1], *([replace(last, digit=twos, factor=2 * last.factor)] if twos.size > 1 else []))
    return replace(view, steps=steps, itemsize=2 * view.itemsize, pack=Digit("dim", 1, 2 * pack.size))


def build_pack(view: View, tile: Tile, transposed: bool, ending: bool) -> PackContext:
    """How the tile of a stream is packed, all bits of its codes at once where they are ``transposed``.

    ``ending``: whether numbers that end in codes do for these.
    """
    pack, bits = view.pack, 8 * view.itemsize // view.pack.size
    lead = ["TOKENS" if name == "token" else str(side) for name, side in zip(tile.order, tile.sides, strict=True)]
    codes = list(lead)
    sides = [side for name, side in zip(tile.order, tile.sides, strict=True) if name in ("group", "dim")]
    lead = [text for name, text in zip(tile.order, lead, strict=True) if name not in ("group", "dim")]
    dims = math.prod(sides)
    twos = ["2"] * int(math.log2(pack.size))
    stays = dims // (pack.size * pack.div)
    apart = [*lead, str(stays), *twos, str(pack.div)]
    rank = len(apart)
    order = [*range(len(lead) + 1), rank - 1, *range(len(lead) + 1, rank - 1)]
    unorder = [order.index(i) for i in range(rank)]
    moved = pack.div > 1
    if not moved:
        apart = apart[:-1]
    return PackContext(
        function="_pack_planes" if transposed else f"_pack_{bits}",
        unfunction="_unpack_planes" if transposed else f"_spread_{bits}" if ending else f"_unpack_{bits}",
        apart=_tuple(apart),
        order=_tuple([str(i) for i in order]),
        unorder=_tuple([str(i) for i in unorder]),
        moved=moved,
        between=_tuple([*lead, str(stays), str(pack.div), *twos]),
        joined=_tuple([*lead, str(dims // pack.size), *twos]),
        codes=_tuple(codes),
    )


def _tuple(items: list[str]) -> str:
    return "(" + ", ".join(items) + ")" if len(items) > 1 else f"({items[0]},)"
