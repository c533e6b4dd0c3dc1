"""When a kernel reads what, under which masks; and its scales and zeros."""

from __future__ import annotations

import math
from dataclasses import replace

from kvgen.axes import Digit
from kvgen.emit.args import Arg, position_args
from kvgen.emit.codebook import by_group, eights, groups, sides
from kvgen.emit.encoding import Loaded, build_scale, build_zero, lifted, reduced, scale_type, shares_one
from kvgen.emit.index import Variable, subscript
from kvgen.emit.names import index_name, tuple_text
from kvgen.emit.sections import Masks, PairContext, ScaleContext, Side, ZeroContext
from kvgen.emit.stages import Staging
from kvgen.layout import Scale
from kvgen.lower import planes
from kvgen.plan import Copy, View
from kvgen.quant import MODES
from kvgen.tiles import Tile


class Scaling(Staging):
    """Works out what is read when, and the sections of scales and zeros."""

    def _loads_first(self) -> bool:
        """Whether all loads come before all work and stores; what is worked on twice is loaded for each.

        Codes of codebooks are not gathered so where several streams have them: what waits for its turn is spilled.
        """
        if self.plan.kind == "transfer":
            return False
        if self.plan.kind == "gather" and sum(map(self._by_norm, self.plan.streams)) > 1:
            return False
        return len(self.plan.streams) == sum(not again for again in self._again())

    def _again(self) -> list[bool]:
        """Which copies store what the one before has left: a stream's second ones in the same tile, under one scale."""
        seen: dict[str, tuple] = {}
        found = []
        for copy, tile in zip(self.plan.copies, self.sched.tiles, strict=True):
            view = self.plan.cache_view(copy)
            left = tile.order, tile.sides, view.pack, copy.scale, copy.zero, copy.outer
            apart = copy.stages or self._by_norm(copy.stream) or len(planes(view)) > 1
            found.append(not apart and left == seen.get(copy.stream))
            seen[copy.stream] = left
        return found

    @property
    def _ahead(self) -> bool:
        """Whether a token's rows are read before its slot is known: a decode waits for memory once then, not twice."""
        return self.plan.kind == "append" and not self.layout.slots.selective

    @property
    def _together(self) -> bool:
        """Whether loads are kept together: as scheduled, where all come first."""
        return self.sched.together and self._loads_first()

    @property
    def _masked(self) -> bool:
        """Whether nothing is written for a skipped token by masks; else its program, which has no other, has ended."""
        return self.tiled or (self._ahead and not self._together)

    @property
    def _slot_last(self) -> bool:
        """Whether slots and positions are looked at behind the loads of rows: compilers keep to that where they can."""
        return self._together or (self._ahead and bool(self.plan.staged) and self._loads_first())

    @property
    def _slot_behind(self) -> bool:
        """Whether the slot number is asked for behind rows that wait for positions: where they are rounded on their
        way to codes that was quicker.
        """
        rounded = any(stage.rounds for copy in self.plan.copies for stage in copy.stages)
        return self._any_ready and rounded and self.plan.placement == "slots"

    def _kept(self, token: str) -> list[str]:
        """The condition on what lies at a token's slot; none where skipped tokens have left before."""
        return [f"valid{token}"] if self._masked else []

    def _read(self, token: str) -> list[str]:
        """The condition on a token's own rows."""
        if not self._ahead:
            return self._kept(token)
        return [f"in_range{token}"] if self.tiled else []

    @property
    def _bounded(self) -> bool:
        """Whether angles come from a table, which ends somewhere."""
        return any(arg.name == "num_positions" for arg in position_args(self.plan))

    @property
    def _by_row(self) -> bool:
        """Whether angles are read before it is known which tokens are skipped."""
        return self._bounded and self._ahead

    def _scale(self, copy: Copy, tile: Tile, variables: dict[str, Variable]) -> ScaleContext:
        """Where the scale lies and what it is made of."""
        scale = self.layout.stream(copy.stream).scale
        side, masks, kept = self._param(copy, copy.scale, scale, scale_type(scale.dtype), "scale", tile, variables)
        outer, outer_masks = Side(""), Masks()
        if scale.scale:
            found = self._param(copy, copy.outer, scale.scale, "tl.float32", "outer", tile, variables)
            outer, outer_masks = found[:2]
        mode = self.layout.stream(copy.stream).encoding.mode
        largest, norm = f"_amax({reduced('tl.max', f'_counted({copy.stream})', tile, kept)})", ()
        largest = f"{copy.stream}_amax" if self._measures_first else largest
        if self._by_norm(copy.stream):
            stretch, stored = (by_group(name, tile, kept) for name in ("stretch", "stored"))
            largest = "_amax(_largest(group))"
            norm = (groups(tile), stretch, stored, f"_{mode}_scales", f"_{mode}_table(NATIVE)", eights(mode))
        zeroed, loaded = copy.zero is not None, self._loaded(copy, scale.scale or scale)
        lift = self._source_type(copy) if lifted(self.layout.stream(copy.stream).encoding) else ""
        found = build_scale(scale, copy.stream, side, masks, largest, outer, outer_masks, zeroed, loaded, lift, *norm)
        written = zeroed and self.plan.kind == "append" and self._pair(copy, tile, variables)
        if written:
            return replace(found, kept="stored_scale")
        if not self._ready(copy):
            return found
        handed = f"{found.decode}({found.given})"
        handed = f"tl.div_rn(1.0, {handed})" if found.inverse else handed
        native = "NATIVE" if self._natively else "False"
        return replace(found, handed=handed, divisor=f"_divisor({handed}, near, {self._source_type(copy)}, {native})")

    def _ready(self, copy: Copy) -> bool:
        """Whether what values are divided by is found while they wait for positions: of a scale that all share."""
        encoding = self.layout.stream(copy.stream).encoding
        shared = encoding is not None and shares_one(encoding)
        return self._waits and shared and self._loads_first() and self._loaded(copy, encoding.scale) == "early"

    @property
    def _any_ready(self) -> bool:
        """Whether that is so of any stream."""
        return any(map(self._ready, self.plan.copies))

    @property
    def _measures_first(self) -> bool:
        """Whether the largest magnitudes of two streams are found at once, before anything else is made of them.

        They are those of all heads of a token: warps wait for each other to find them, once then.
        """
        plan, (tile, *others) = self.plan, self.sched.tiles
        if not self._ahead or plan.staged or self.tiled or len(plan.streams) != 2 or not self._loads_first():
            return False
        return others == [tile] and all(map(self._by_whole_rows, plan.copies))

    def _by_whole_rows(self, copy: Copy) -> bool:
        """Whether all heads of a token share a scale that is made of their largest magnitude as it comes."""
        encoding, scale = self.layout.stream(copy.stream).encoding, self.layout.stream(copy.stream).scale
        plain = scale is not None and scale.dynamic and copy.zero is None and not encoding.rotation
        return plain and not self._by_norm(copy.stream) and {a.name for a in scale.axes}.isdisjoint(("head", "dim"))

    def _measured(self) -> str:
        """The statement that does so."""
        first, second = self.plan.streams
        largest = f"tl.join(_counted({first}), _counted({second}))"
        for axis in reversed(range(len(self.sched.tiles[0].order))):
            largest = f"tl.max({largest}, axis={axis})"
        return f"{first}_amax, {second}_amax = tl.split(_amax({largest}))"

    def _loaded(self, copy: Copy, handed: Scale) -> Loaded:
        """When the scale that is handed in is loaded; of a gather all is."""
        if self.plan.kind == "gather":
            return "placed" if self._loads_first() else "late"
        if self._ahead and not self._by_token(copy, handed):
            return "early"
        return "placed" if self._ahead and self._loads_first() and not handed.dynamic else "late"

    def _source_type(self, copy: Copy) -> str:
        """The type whose values are to be divided by a scale: short ones are divided more easily."""
        encoding = self.layout.stream(copy.stream).encoding
        widened = copy.stages and not copy.stages[-1].rounds
        if widened or (encoding and (encoding.rotation or (encoding.zero and encoding.zero.kind == "minimum"))):
            return "tl.float32"
        return f"{self.plan.dense_view(copy).tensor}_ptr.dtype.element_ty"

    def _by_norm(self, stream: str) -> bool:
        encoding = self.layout.stream(stream).encoding
        return encoding is not None and encoding.scale is not None and MODES[encoding.mode].by_norm

    def _zero(self, copy: Copy, tile: Tile, variables: dict[str, Variable]) -> ZeroContext:
        """Where the zero lies, and the extremes of a group that it is made of."""
        encoding = self.layout.stream(copy.stream).encoding
        kind = scale_type(encoding.zero.dtype)
        side, masks, kept = self._param(copy, copy.zero, encoding.scale, kind, "zero", tile, variables)
        _, bounds = self._variables(copy.stream, tile)
        bounds = self._counted(copy, subscript(variables["token"].position, len(tile.order)), bounds)
        own = "zero" if self._loaded(copy, encoding.scale) == "late" else f"{copy.stream}_zero"
        twos = "" if bounds else self._extremes_by_twos(copy, tile, kept)
        return build_zero(encoding, copy.stream, side, masks, tile, kept, " & ".join(bounds), own, twos)

    def _extremes_by_twos(self, copy: Copy, tile: Tile, kept: list[str]) -> str:
        """What finds the extremes of groups of 16-bit values that a thread has all of, two in a word."""
        over = [i for i, name in enumerate(tile.order) if name not in kept]
        plain = self.plan.kind == "append" and not copy.stages and self.plan.dense_view(copy).itemsize == 2
        if not (plain and tile.held) or len(over) != 1 or tile.order[-1] != "dim":
            return ""
        self.native = True
        *lead, last = sides(tile)
        twos, groups = [*lead, str(int(last) // 2), "2"], [*lead, last]
        groups[over[0]] = "1"
        return f"_extremes_by_twos({copy.stream}, {over[0]}, {tuple_text(twos)}, {tuple_text(groups)}, NATIVE)"

    def _pair(self, copy: Copy, tile: Tile, variables: dict[str, Variable]) -> PairContext | None:
        """Scales and zeros of a row, where they lie side by side: one row has all of both."""
        view, zero = copy.scale, self.layout.stream(copy.stream).encoding.zero
        beside = replace(copy.zero, offset=view.offset) == view and abs(copy.zero.offset - view.offset) == 1
        last = view.steps[-1] if view.steps else None
        if not beside or last is None or last.digit.axis != "dim" or last.dim is None or view.unit != view.itemsize:
            return None
        if self.plan.kind == "gather":
            return self._pair_read(copy, tile, variables)
        return self._pair_written(copy, tile, variables) if zero.dtype == self._own(copy).dtype else None

    def _pair_read(self, copy: Copy, tile: Tile, variables: dict[str, Variable]) -> PairContext | None:
        """Of each value of a row."""
        dim, rank = self.layout.stream(copy.stream).axes[-1], len(tile.order)
        each = copy.scale.steps[-1].digit == Digit("dim", 1, dim.extent)
        whole = tile.order[-1:] == ("dim",) and "group" not in tile.order and tile.sides[-1] == dim.extent
        if not (each and whole):
            return None
        side = self._row_of_both(copy, dim.extent, variables, rank)
        _, masks, kept = self._param(copy, copy.scale, self._own(copy), "", "scale", tile, variables)
        names = [f"{copy.stream}_scale", f"{copy.stream}_zero"]
        if self._loaded(copy, self._own(copy)) == "late":
            names = ["scale", "zero"]
        shape = [text if axis in kept else "1" for axis, text in zip(tile.order, sides(tile), strict=True)]
        return PairContext(side, masks, self._as_they_lie(copy, names), tuple_text([*shape, "2"]))

    def _pair_written(self, copy: Copy, tile: Tile, variables: dict[str, Variable]) -> PairContext | None:
        """Of each value or group: their tile has one axis in the place of those of dims."""
        own = self._own(copy)
        _, _, kept = self._param(copy, copy.scale, own, "", "scale", tile, variables)
        dims = [i for i, name in enumerate(tile.order) if name in ("group", "dim")]
        count = math.prod(tile.sides[i] for i in dims if tile.order[i] in kept) if dims else 0
        if not dims or dims[-1] != len(tile.order) - 1 or count != copy.scale.steps[-1].digit.size:
            return None
        rank, rows = dims[0] + 1, tile.order[: dims[0]]
        side = self._row_of_both(copy, count, self._of_scale(copy, own, variables), rank)
        heads = self._bound(copy.stream, "head") if "head" in rows and "head" in kept else None
        name = index_name(self.layout, copy.stream, "head")
        bounds = [f"({name} < {heads}){subscript(rows.index('head'), rank)}"] if heads else []
        guarded = self._present(copy, own, subscript(variables["token"].position, rank), kept)
        _, masks = self._masks(f"{copy.stream}_params", guarded, guarded, bounds, named=False)
        shape = [text if axis in kept else "1" for axis, text in zip(rows, sides(tile), strict=False)]
        return PairContext(
            side, masks, self._as_they_lie(copy, ["stored_scale", "stored"]), tuple_text([*shape, str(2 * count)])
        )

    def _own(self, copy: Copy) -> Scale:
        return self.layout.stream(copy.stream).scale

    def _as_they_lie(self, copy: Copy, names: list[str]) -> str:
        return ", ".join(names if copy.scale.offset < copy.zero.offset else reversed(names))

    def _row_of_both(self, copy: Copy, count: int, variables: dict[str, Variable], rank: int) -> Side:
        """A row of so many scales and as many zeros, along the last axis."""
        view, count = copy.scale, 2 * count
        name, dense = f"{view.tensor}_pair", f"{view.tensor}_dense".upper()
        stride, row = self._stride(view, copy.stream, view.steps[-1].dim, self._own(copy)), f"tl.arange(0, {count})"
        self.tiles[dense] = Arg(dense, "constexpr", f"{self.strides[stride].value} == 2", "aligned", compiled=True)
        self.definitions[name] = f"{row} if {dense} else {row}.to(tl.int64) // 2 * {stride} + {row} % 2"
        first = replace(view, steps=view.steps[:-1], offset=min(view.offset, copy.zero.offset))
        side = self._side(first, copy.stream, variables, rank, "")
        return replace(side, elements=f"{side.elements} + {name}{subscript(rank - 1, rank)}")

    def _of_scale(self, copy: Copy, scale: Scale, variables: dict[str, Variable]) -> dict[str, Variable]:
        """The variables that a scale is found by."""
        return variables

    def _by_token(self, copy: Copy, scale: Scale) -> bool:
        """Whether the tokens of a tile have scales of their own."""
        return scale.dynamic or not {axis.name for axis in scale.axes}.isdisjoint(("block", "slot"))

    def _counted(self, copy: Copy, token: str, bounds: list[str]) -> list[str]:
        """Which values the extremes are taken of: of what lies within ``bounds``, and not all tokens if they share."""
        return bounds

    def _present(self, copy: Copy, scale: Scale, token: str, kept: list[str]) -> list[str]:
        """Where there is a scale to be read or written: a token's own, where that is not skipped."""
        return self._kept(token) if self._by_token(copy, scale) else []

    def _param(
        self,
        copy: Copy,
        view: View,
        scale: Scale,
        value_type: str,
        what: str,
        tile: Tile,
        variables: dict[str, Variable],
    ) -> tuple[Side, Masks, list[str]]:
        """A scale or a zero: its tile has sides of one where the values' has others; the axes that it keeps."""
        rank = len(tile.order)
        own = {("group" if a.name == "dim" and a.step > 1 else a.name) for a in scale.axes}
        by_token = self._by_token(copy, scale)
        by_channel = "group" in tile.order and "dim" in own  # each value of what the tile takes in groups
        own |= {"group"} if by_channel else set()
        kept = [name for name in tile.order if name in own or (name == "token" and by_token)]
        seen = dict(variables)
        bounds = self._variables(copy.stream, tile, self.layout.stream(copy.stream).axes[-1:])[1] if by_channel else []
        for name in kept:
            if by_channel and name in ("group", "dim"):
                continue
            if name == "group":
                extent = -(-self.layout.stream(copy.stream).axes[-1].extent // self.layout.stream(copy.stream).group)
                index = f"{index_name(self.layout, copy.stream, 'dim')}_group"
                seen["dim"] = Variable(index, tile.order.index("group"))
                if tile.sides[tile.order.index("group")] != extent:
                    bounds.append(f"({index} < {extent}){subscript(tile.order.index('group'), rank)}")
            elif bound := self._bound(copy.stream, name):
                index = index_name(self.layout, copy.stream, name)
                bounds.append(f"({index} < {bound}){subscript(tile.order.index(name), rank)}")
        guarded = self._present(copy, scale, subscript(variables["token"].position, rank), kept)
        _, masks = self._masks(f"{copy.stream}_{what}", guarded, guarded, bounds, named=False)
        side = self._side(view, copy.stream, seen, rank, value_type, scale)
        return replace(side, made=True), masks, kept

    def _bound(self, stream: str, axis: str) -> str | None:
        return self.bounds.get((stream, axis))
