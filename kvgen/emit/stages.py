"""Stages in kernels: what norms and rotations are handed, and where the other value of each pair lies."""

from __future__ import annotations

import math

from kvgen.emit.args import position_args
from kvgen.emit.encoding import encodes_natively, reduced
from kvgen.emit.index import Variable, subscript
from kvgen.emit.indexing import Indexing
from kvgen.emit.names import extent_name, index_name, tuple_text
from kvgen.emit.pairs import Pairs, joined, pairs_of, parted
from kvgen.emit.sections import (
    FactorContext,
    NormContext,
    RopeContext,
    ScaledContext,
    StageContext,
    StagesContext,
    TableContext,
    WideContext,
)
from kvgen.plan import Copy, Norm, Rotary
from kvgen.stages import Mrope, Rope
from kvgen.tiles import LANES, Tile

NAMES = ("pair", "first", "other", "turn", "position", "frequency", "angle", "cos", "sin")
"""What a rotation works out, each called after its stream."""
PAIRS = 4
"""Pairs of a row in halves that a thread has side by side."""
AXES = ("time", "height", "width")
"""Whose positions a token has where it has three."""


class Staging(Indexing):
    """Works out the stages of a section."""

    @property
    def _by_row(self) -> bool:
        """Whether angles are those of a position's row, which is one of the table where the position is none."""
        return any(arg.name == "num_positions" for arg in position_args(self.plan))

    @property
    def _waits(self) -> bool:
        """Whether rows wait for positions. Beside programs of a query, and in these, that gains nothing."""
        return self._by_row and self.plan.query is None and not self.tiled

    @property
    def _natively(self) -> bool:
        """Whether the kernel knows of processors with instructions of their own, for the codes that it makes."""
        return any(encodes_natively(self.layout.stream(name).encoding) for name in self.plan.streams)

    def _row_variables(self, copy: Copy, tile: Tile) -> tuple[dict[str, Variable], list[str]]:
        """Variables of a section, and the masks of its padded sides; ``dim`` of rows in halves is that of the first."""
        pairs, wide = pairs_of(self.layout, copy, tile), ".to(tl.int64)" if "dim" in self.wide else ""
        axes = self.layout.stream(copy.stream).axes
        variables, masks = self._variables(copy.stream, tile, list(axes[:-1] if pairs.halved else axes))
        if pairs.halved or pairs.split:
            index = f"tl.arange(0, {pairs.rope.pairs}){wide}"
            # With half as many a thread has two rows, which share weights and angles, and fewer registers in all.
            together = pairs.halved and pairs.rope.pairs % PAIRS == 0
            self.definitions[f"{copy.stream}_pair"] = f"tl.max_contiguous({index}, {PAIRS})" if together else index
        if pairs.halved:
            self.definitions[f"{copy.stream}_other"] = f"{copy.stream}_pair + {pairs.rope.pairs}"
            variables |= {"dim": Variable(f"{copy.stream}_pair", len(tile.order) - 1)}
        return variables, masks

    def _other(self, copy: Copy, variables: dict[str, Variable]) -> dict[str, Variable]:
        """Variables of the other value of each pair, or of the second half of a row."""
        return variables | {"dim": Variable(f"{copy.stream}_other", variables["dim"].position)}

    def _stages(self, copy: Copy, tile: Tile, variables: dict[str, Variable], guards: list[str]) -> StagesContext:
        """The stages of a copy; ``guards`` say which tokens of the tile anything is loaded for."""
        pairs = pairs_of(self.layout, copy, tile)
        turns = next((i for i, stage in enumerate(copy.stages) if isinstance(stage, Rotary)), None)
        partner, rank = f"{copy.stream}_partner", len(tile.order)
        other, half = self._other(copy, variables), pairs.halves(tile)
        kind, found = f"{copy.source.tensor}_ptr.dtype.element_ty", []
        for i, stage in enumerate(copy.stages):
            both = pairs.halved or (pairs.beside and i < turns)
            live = {copy.stream: variables} | ({partner: other} if both else {})
            rows = half if pairs.halved else tile
            norms = (self._norm(copy, stage, rows, live, pairs),) if isinstance(stage, Norm) else ()
            ropes = (self._rope(copy, stage, tile, variables, guards, pairs),) if isinstance(stage, Rotary) else ()
            # What is stored as it comes is rounded then.
            last = i == len(copy.stages) - 1 and self.layout.stream(copy.stream).encoding is None
            rounded = tuple((name, self._rounded(name, kind)) for name in live) if stage.rounds and not last else ()
            found.append(StageContext(norms, ropes, rounded))
        two = pairs.halved or pairs.beside
        return StagesContext(
            value=copy.stream,
            value_type=kind,
            partner=partner,
            two=two,
            partner_at=self._side(copy.source, copy.stream, other, rank, kind).elements if two else "",
            widened=self._widened_row(pairs, copy.stream),
            partner_widened=self._widened_row(pairs, partner),
            rejoined=pairs.halved and self._rejoined(copy),
            rows=joined(pairs, self._sides(tile, copy.stream), copy.stream, partner) if pairs.halved else "",
            halves=parted(pairs, self._sides(tile, copy.stream), copy.stream) if pairs.halved else "",
            stages=tuple(found),
        )

    def _widened_row(self, pairs: Pairs, name: str) -> str:
        """Values as float32. Rows in halves wait until it is known whether there are angles: else ptxas norms them
        first, and asks for angles, weights and scales behind that.
        """
        wide = f"{name}.to(tl.float32)"
        if not (pairs.halved and self._waits):
            return wide
        return f"_awaited({name}, known, NATIVE)" if self._natively else f"tl.where(known, {wide}, 0.0)"

    def _rounded(self, name: str, kind: str) -> str:
        """Values rounded to the type of the source, in float32 again."""
        return (
            f"_rounded_wide({name}, {kind}, NATIVE)" if self._natively else f"_rounded({name}, {kind}).to(tl.float32)"
        )

    def _rejoined(self, copy: Copy) -> bool:
        """Whether codes depend on a whole row, which is put together of its halves then."""
        scale = self.layout.stream(copy.stream).scale
        return scale is not None and scale.dynamic

    def _norm(
        self, copy: Copy, stage: Norm, tile: Tile, at: dict[str, dict[str, Variable]], pairs: Pairs
    ) -> NormContext:
        """A norm of the values ``at`` these places: rows, their halves, or rows and beside them the other values."""
        dims, name = self.layout.stream(copy.stream).axes[-1].extent, copy.stream
        kept = [axis for axis in tile.order if axis not in ("group", "dim")]
        exact = stage.sum == "float64"
        summed = list(at) if pairs.halved else [name]
        wide = [f"{value}_wide" if exact else value for value in summed]
        squares = " + ".join(f"{value} * {value}" for value in wide)
        # Sums in fours take fewer registers and more time: they pay where there is a code to be made, too.
        fours = exact and pairs.halved and self.layout.stream(name).encoding is not None and self._roomy(tile)
        if fours:
            squares = f"_squares({name}, {summed[1]}, {self._in_twos(tile, name)})"
        elif exact and pairs.halved:  # the squares are exact in float64: contracted or not, the sum is the same
            squares = f"tl.fma({wide[0]}, {wide[0]}, {wide[1]} * {wide[1]})"
        return NormContext(
            comment=f"RMS norm over {dims} values, squares summed in {stage.sum}",
            inverse=f"{name}_inverse",
            widened=tuple(map(WideContext, wide, summed)) if exact and not fours else (),
            total=reduced("tl.sum", squares, tile, kept),
            share=repr(1.0 / dims),
            eps=repr(stage.eps),
            scaled=tuple(self._scaled(copy, stage, value, tile, variables) for value, variables in at.items()),
        )

    def _roomy(self, tile: Tile) -> bool:
        """Whether every thread has neighbours of a row, two at the least."""
        if None in tile.sides:
            return False
        sched, values = self.sched, math.prod(tile.sides)
        few = values * sched.few_tokens // sched.tokens if sched.by_count else values
        return values >= 2 * LANES * sched.num_warps and few >= 2 * LANES * sched.few_warps

    def _in_twos(self, tile: Tile, stream: str) -> str:
        """The shape of a tile whose rows are cut in neighbours."""
        *sides, dims = self._sides(tile, stream)
        return tuple_text([*sides, str(int(dims) // 2), "2"])

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
        loaded = f"tl.load({self._spread(side.elements, tile, copy.stream)}{mask})"
        loaded = f"_widened({loaded}, NATIVE)" if self._waits and self._natively else f"{loaded}.to(tl.float32)"
        return ScaledContext(value, f"{value}_weight", loaded + (" + 1.0" if stage.plus_one else ""))

    def _spread(self, pointers: str, tile: Tile, stream: str) -> str:
        """Pointers of a row, or of one for each token, as a whole tile: every thread loads what it needs itself."""
        sides = self._sides(tile, stream)
        return f"tl.broadcast_to({pointers}, {tuple_text(sides)})" if len(sides) > 1 else pointers

    def _sides(self, tile: Tile, stream: str) -> list[str]:
        """The sides of a tile, as a kernel calls them."""
        open_sides = {"token": "TOKENS", "head": f"{extent_name(self.layout, stream, 'head')}_TILE"}
        known = zip(tile.order, tile.sides, strict=True)
        return [open_sides[name] if name == "token" or side is None else str(side) for name, side in known]

    def _rope(
        self,
        copy: Copy,
        stage: Rotary,
        tile: Tile,
        variables: dict[str, Variable],
        guards: list[str],
        pairs: Pairs,
    ) -> RopeContext:
        rope, rank = stage.rope, len(tile.order)
        names = {name: f"{copy.stream}_{name}" for name in NAMES}
        place, index = variables["dim"].position, index_name(self.layout, copy.stream, "dim")
        at = subscript(place, rank)
        extent = self.layout.stream(copy.stream).axes[-1].extent
        token = subscript(variables["token"].position, rank)
        height, width = _assigned(stage.mrope, names["pair"] + at, names["turn"] + at) if stage.mrope else ("", "")
        computed, sides, half = rope.theta is not None, self._sides(tile, copy.stream), pairs.halves(tile)
        partner = f"{copy.stream}_partner"
        return RopeContext(
            comment=_describe(rope, stage.mrope),
            value=copy.stream,
            partner=partner,
            names=names,
            beside=pairs.beside,
            pair=_pair(rope, index),
            first=_first(rope, index),
            other=_other(rope, index),
            first_at=names["first"] + at,
            several=stage.mrope is not None,
            by_turn=stage.mrope is not None and stage.mrope.assign != "sections",
            height=height,
            width=width,
            positions=tuple(f"position_{axis}{token}" for axis in AXES),
            computed=computed,
            factors=_factors(rope),
            position_at=names["position"] if stage.mrope else f"position{token}",
            frequency_at=names["frequency"] + at,
            tables=() if computed else self._tables(copy, stage, half, variables, guards),
            split=pairs.split,
            pairs=parted(pairs, sides, copy.stream) if pairs.split else "",
            rows=joined(pairs, sides, copy.stream, partner) if pairs.split else "",
            partial=rope.rotary_dim < extent,
            rotated=f"({index} < {rope.rotary_dim}){at}" if rope.start == 0 else f"({index} >= {rope.start}){at}",
        )

    def _tables(
        self, copy: Copy, stage: Rotary, tile: Tile, variables: dict[str, Variable], guards: list[str]
    ) -> tuple[TableContext, ...]:
        """Cosines and sines of all pairs; of three positions a row of each is loaded, and a pair takes what it needs.

        Rows are loaded in wide accesses, single values each in one of its own. They are read again for each layer and
        for what else turns by them, so that the cache is to keep them before rows that come by once.
        """
        mask = f", mask={' & '.join(guards)}, other=0" if guards else ""
        pair = Variable(f"{copy.stream}_pair", variables["dim"].position)
        found = []
        for table, view in (("cos", stage.cos), ("sin", stage.sin)):
            rows = []
            for axis in AXES if stage.mrope else ("",):
                name = "angle_row" if self._by_row else "position"
                position = Variable(f"{name}_{axis}" if axis else name, variables["token"].position)
                seen = variables | {"pair": pair, "position": position}
                pointers = self._side(view, copy.stream, seen, len(tile.order), "tl.float32").elements
                rows.append(self._spread(pointers, tile, copy.stream) + mask)
            found.append(TableContext(f"{copy.stream}_{table}", *rows))
        return tuple(found)


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


def _assigned(mrope: Mrope, pair: str, turn: str) -> tuple[str, str]:
    """The pairs that turn by height, and by width where height does not; ``turn`` is the pair modulo 3."""
    time, height, width = mrope.sections
    if mrope.assign == "sections":
        return f"({pair} >= {time}) & ({pair} < {time + height})", f"{pair} >= {time + height}"
    limits = (f" & ({pair} < {3 * section})" if mrope.assign == "interleaved" else "" for section in (height, width))
    found = [f"({turn} == {which}){limit}" if limit else f"{turn} == {which}" for which, limit in enumerate(limits, 1)]
    return found[0], found[1]


def _describe(rope: Rope, mrope: Mrope | None) -> str:
    how = {"neox": f"i and i + {rope.pairs}", "interleaved": "2i and 2i + 1"}[rope.style]
    of = f", counted from {rope.start}," if rope.start else ""
    angles = f", three positions ({mrope.assign})" if mrope else ""
    return f"RoPE: values {how}{of} make a pair{angles}"
