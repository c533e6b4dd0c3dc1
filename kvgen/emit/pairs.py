"""Where the two values of a turned pair are while a section works on them.

``halves``: a row of NeoX is loaded, worked on and stored as two halves, each a tile. ``split``: a row of interleaved
pairs is split while it turns. Both values are in one thread then, and a row is worked on once. ``beside``: elsewhere
(rows that turn in part, padded rows, tiles with tokens along the lanes, groups under a scale) each value's other one is
loaded beside it, and goes through what comes before the rotation as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvgen.emit.names import tuple_text
from kvgen.layout import Layout
from kvgen.plan import Copy, Rotary
from kvgen.stages import Rope
from kvgen.tiles import Tile


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of a copy's rows; ``rope`` is None where nothing turns."""

    rope: Rope | None
    held: Literal["none", "halves", "split", "beside"]

    @property
    def halved(self) -> bool:
        return self.held == "halves"

    @property
    def split(self) -> bool:
        return self.held == "split"

    @property
    def beside(self) -> bool:
        return self.held == "beside"

    def halves(self, tile: Tile) -> Tile:
        """The tile of the first values of all pairs."""
        return tile if self.beside or self.rope is None else replace(tile, sides=(*tile.sides[:-1], self.rope.pairs))


def pairs_of(layout: Layout, copy: Copy, tile: Tile) -> Pairs:
    """How the pairs of a copy are held in ``tile``."""
    rope = next((stage.rope for stage in copy.stages if isinstance(stage, Rotary)), None)
    if rope is None:
        return Pairs(None, "none")
    stream = layout.stream(copy.stream)
    if tile.order[-1] != "dim" or not rope.rotary_dim == stream.axes[-1].extent == tile.sides[-1]:
        return Pairs(rope, "beside")
    if rope.style == "interleaved":
        return Pairs(rope, "split")
    # Codes and scales that depend on a value's place in its row need it whole.
    whole = copy.zero is not None or copy.destination.pack is not None
    whole |= stream.encoding is not None and stream.encoding.rotation is not None
    whole |= stream.scale is not None and any(axis.name == "dim" for axis in stream.scale.axes)
    return Pairs(rope, "beside" if whole else "halves")


def joined(pairs: Pairs, sides: list[str], first: str, second: str) -> str:
    """The rows of a tile of these sides, from the first and the second values of their pairs."""
    found = f"tl.join({first}, {second})"
    if pairs.rope.style == "neox":
        found = f"tl.permute({found}, {_swapped(sides)})"
    return f"tl.reshape({found}, {tuple_text(sides)})"


def parted(pairs: Pairs, sides: list[str], rows: str) -> str:
    """The first and the second values of the pairs of ``rows``."""
    count = str(pairs.rope.pairs)
    if pairs.rope.style == "interleaved":
        return f"tl.split(tl.reshape({rows}, {tuple_text([*sides[:-1], count, '2'])}))"
    apart = f"tl.reshape({rows}, {tuple_text([*sides[:-1], '2', count])})"
    return f"tl.split(tl.permute({apart}, {_swapped(sides)}))"


def _swapped(sides: list[str]) -> str:
    """The order of axes that puts the last but one, of as many as ``sides`` and one more, last."""
    rank = len(sides)
    return str((*range(rank - 1), rank, rank - 1))
