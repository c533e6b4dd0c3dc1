"""Stages in kernels: what norms and rotations are handed, and where the other value of each pair lies."""

from __future__ import annotations

import math

from kvgen.emit.encoding import reduced
from kvgen.emit.index import Variable, subscript
from kvgen.emit.indexing import Indexing
from kvgen.emit.names import extent_name, index_name, tuple_text
from kvgen.emit.sections import (
    FactorContext,
    NormContext,
    RopeContext,
    ScaledContext,
    StageContext,
    StagesContext,
)
from kvgen.plan import Copy, Norm, Rotary, View
from kvgen.schedule import Tile
from kvgen.stages import Mrope, Rope

NAMES = ("pair", "first", "other", "position", "frequency", "angle", "cos", "sin")
"""What a rotation works out, each called after its stream."""


class Staging(Indexing):
    """Works out the stages of a section."""

    def _stages(self, copy: Copy, tile: Tile, variables: dict[str, Variable], guards: list[str]) -> StagesContext:
        """The stages of a copy; ``guards`` say which tokens of the tile anything is loaded for."""
        turns = next((i for i, stage in enumerate(copy.stages) if isinstance(stage, Rotary)), None)
        partner, rank = f"{copy.stream}_partner", len(tile.order)
        other = variables | {"dim": Variable(f"{copy.stream}_other", variables["dim"].position)}
        kind, found = f"{copy.source.tensor}_ptr.dtype.element_ty", []
        for i, stage in enumerate(copy.stages):
            live = {copy.stream: variables} | ({partner: other} if turns is not None and i < turns else {})
            norms = (self._norm(copy, stage, tile, live),) if isinstance(stage, Norm) else ()
            ropes = (self._rope(copy, stage, tile, variables, guards),) if isinstance(stage, Rotary) else ()
            # What is stored as it comes is rounded then.
            last = i == len(copy.stages) - 1 and self.layout.stream(copy.stream).encoding is None
            found.append(StageContext(norms, ropes, tuple(live) if stage.rounds and not last else ()))
        return StagesContext(
            value=copy.stream,
            value_type=kind,
            turned=turns is not None,
            partner=partner,
            partner_at="" if turns is None else self._side(copy.source, copy.stream, other, rank, kind).elements,
            stages=tuple(found),
        )

    def _norm(self, copy: Copy, stage: Norm, tile: Tile, at: dict[str, dict[str, Variable]]) -> NormContext:
        dims, name = self.layout.stream(copy.stream).axes[-1].extent, copy.stream
        kept = [axis for axis in tile.order if axis not in ("group", "dim")]
        exact = stage.sum == "float64"
        wide = f"{name}_wide" if exact else name
        return NormContext(
            comment=f"RMS norm over {dims} values, squares summed in {stage.sum}",
            value=name,
            inverse=f"{name}_inverse",
            widened=exact,
            wide=wide,
            total=reduced("tl.sum", f"{wide} * {wide}", tile, kept),
            share=repr(1.0 / dims),
            eps=repr(stage.eps),
            scaled=tuple(self._scaled(copy, stage, value, tile, variables) for value, variables in at.items()),
        )

    def _scaled(self, copy: Copy, stage: Norm, value: str, tile: Tile, variables: dict[str, Variable]) -> ScaledContext:
        """A value, and the weight of its place in the row."""
        if stage.weight is None:
            return ScaledContext(value)
        dim, rank = variables["dim"], len(tile.order)
        side = self._side(stage.weight, copy.stream, variables, rank, "tl.float32")
        # A tile's padded side reaches past the row; the other value of a pair always lies in it.
        extent = self.layout.stream(copy.stream).axes[-1].extent
        padded = math.prod(s for n, s in zip(tile.order, tile.sides, strict=True) if n in ("group", "dim")) > extent
        at = subscript(dim.position, rank)
        mask = f", mask=({dim.name} < {extent}){at}, other=0" if padded and value == copy.stream else ""
        found = self._spread(side.elements, tile, copy.stream) + mask
        return ScaledContext(value, f"{value}_weight", found, not stage.plus_one, stage.plus_one)

    def _spread(self, pointers: str, tile: Tile, stream: str) -> str:
        """Pointers of a row, or of one for each token, as a whole tile: every thread loads what it needs itself."""
        open_sides = {"token": "TOKENS", "head": f"{extent_name(self.layout, stream, 'head')}_TILE"}
        known = zip(tile.order, tile.sides, strict=True)
        sides = [open_sides[name] if name == "token" or side is None else str(side) for name, side in known]
        return f"tl.broadcast_to({pointers}, {tuple_text(sides)})" if len(sides) > 1 else pointers

    def _rope(
        self, copy: Copy, stage: Rotary, tile: Tile, variables: dict[str, Variable], guards: list[str]
    ) -> RopeContext:
        rope, rank = stage.rope, len(tile.order)
        names = {name: f"{copy.stream}_{name}" for name in NAMES}
        place, index = variables["dim"].position, index_name(self.layout, copy.stream, "dim")
        at = subscript(place, rank)
        extent = self.layout.stream(copy.stream).axes[-1].extent
        token = subscript(variables["token"].position, rank)
        position = Variable("position", variables["token"].position)
        height, width = "", ""
        if stage.mrope:  # one for each pair: a tile of its own
            position = Variable(names["position"])
            height, width = _assigned(stage.mrope, names["pair"] + at)
        seen = variables | {"pair": Variable(names["pair"], place), "position": position}
        mask = f", mask={' & '.join(guards)}, other=0" if guards else ""
        return RopeContext(
            comment=_describe(rope, stage.mrope),
            value=copy.stream,
            partner=f"{copy.stream}_partner",
            names=names,
            pair=_pair(rope, index),
            first=_first(rope, index),
            other=_other(rope, index),
            first_at=names["first"] + at,
            several=stage.mrope is not None,
            height=height,
            width=width,
            positions=tuple(f"position_{axis}{token}" for axis in ("time", "height", "width")),
            computed=rope.theta is not None,
            factors=_factors(rope),
            position_at=position.name + subscript(position.position, rank),
            frequency_at=names["frequency"] + at,
            cos_at=self._table(stage.cos, copy.stream, seen, tile) + mask if stage.cos else "",
            sin_at=self._table(stage.sin, copy.stream, seen, tile) + mask if stage.sin else "",
            partial=rope.rotary_dim < extent,
            rotated=f"({index} < {rope.rotary_dim}){at}" if rope.start == 0 else f"({index} >= {rope.start}){at}",
        )

    def _table(self, view: View, stream: str, variables: dict[str, Variable], tile: Tile) -> str:
        pointers = self._side(view, stream, variables, len(tile.order), "tl.float32").elements
        return self._spread(pointers, tile, stream)


def _shifted(index: str, shift: int) -> str:
    return f"({index} + {shift})" if shift else index


def _pair(rope: Rope, index: str) -> str:
    """The number of the pair a value belongs to; of one that is not turned, that of some pair."""
    if rope.style == "neox":
        return f"{_shifted(index, -rope.start % rope.pairs)} % {rope.pairs}"
    return f"{_shifted(index, -rope.start % rope.rotary_dim)} % {rope.rotary_dim} // 2"


def _first(rope: Rope, index: str) -> str:
    """Whether a value is the first of its pair."""
    if rope.style == "neox":
        return f"{index} < {rope.start + rope.pairs}"
    return f"{_shifted(index, rope.start % 2)} % 2 == 0"


def _other(rope: Rope, index: str) -> str:
    """The index of the other value of a pair; always one that is turned."""
    shift = (rope.pairs if rope.style == "neox" else 0) - rope.start
    found = f"{_shifted(index, shift % rope.rotary_dim)} % {rope.rotary_dim}"
    if rope.style == "interleaved":
        found = f"({found}) ^ 1"
    return f"({found}) + {rope.start}" if rope.start else found


def _factors(rope: Rope) -> tuple[FactorContext, ...]:
    """theta^(−2·pair / rotary_dim), as the product over the bits of the pair's number: doubles, without a power."""
    if rope.theta is None:
        return ()
    bits = range((rope.pairs - 1).bit_length())
    return tuple(FactorContext(1 << b, repr(rope.theta ** (-2.0 * (1 << b) / rope.rotary_dim))) for b in bits)


def _assigned(mrope: Mrope, pair: str) -> tuple[str, str]:
    """The pairs that turn by height, and those that turn by width where height does not."""
    time, height, width = mrope.sections
    if mrope.assign == "sections":
        return f"({pair} >= {time}) & ({pair} < {time + height})", f"{pair} >= {time + height}"
    found = []
    for turn, section in ((1, height), (2, width)):
        limit = f" & ({pair} < {3 * section})" if mrope.assign == "interleaved" else ""
        found.append(f"({pair} % 3 == {turn}){limit}" if limit else f"{pair} % 3 == {turn}")
    return found[0], found[1]


def _describe(rope: Rope, mrope: Mrope | None) -> str:
    how = {"neox": f"i and i + {rope.pairs}", "interleaved": "2i and 2i + 1"}[rope.style]
    of = f", counted from {rope.start}," if rope.start else ""
    angles = f", three positions ({mrope.assign})" if mrope else ""
    return f"RoPE: values {how}{of} make a pair{angles}"
