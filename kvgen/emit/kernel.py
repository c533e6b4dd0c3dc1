"""What the kernel template is handed: every name, expression and flag of one copying kernel, decided."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.axes import padded_side
from kvgen.emit.args import Arg, data_args, placement_args, position_args, rotated
from kvgen.emit.copying import Copying
from kvgen.emit.encoding import casts, encodes_natively
from kvgen.emit.index import Variable, subscript
from kvgen.emit.names import block_size_name
from kvgen.emit.query import QueryContext, build_query, in_table
from kvgen.emit.rows import RowsContext, build_rows, in_words
from kvgen.emit.sections import CopyContext, FillContext, PositionContext
from kvgen.emit.stages import AXES
from kvgen.layout import Layout
from kvgen.lower import SLOT_NUMBER, coalesce
from kvgen.plan import Plan
from kvgen.rows import Rows
from kvgen.schedule import Schedule, schedule
from kvgen.tiles import LANES

WAYS, FEW_WAYS = 64, 8
"""Entries that a search looks at in a step, for one token and for several."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One copying kernel, ready to print. ``definitions`` are index variables: name and expression."""

    name: str
    summary: str
    plan: Plan
    schedule: Schedule
    args: tuple[Arg, ...]
    constants: tuple[tuple[str, str], ...]
    definitions: tuple[tuple[str, str], ...]
    copies: tuple[CopyContext, ...]
    fills: tuple[FillContext, ...]
    rows: tuple[RowsContext, ...]
    block_size: str
    remap: str
    stride_unit: int  # elements that strides are counted in, if the layout's own strides are multiples of it
    extra: str  # what _slot_of takes beside the table: a dynamic block size, the rank
    valid: str
    mapped: str  # the condition on what a remap table has for a slot number
    run_slot: str
    run_number: str
    program: str  # which of the tiles of tokens is a program's
    ways: str  # how many entries are looked at in a step of the search for a token's request
    in_range: str  # mask of the loads per token
    positions: tuple[PositionContext, ...]
    known: str  # whether a token's positions have angles
    near: str  # whether all scales that are handed in are near 1
    measured: str  # the largest magnitudes of two streams, where they are found at once
    query: QueryContext | None
    uses: dict[str, bool]

    @property
    def queries(self) -> tuple[QueryContext, ...]:
        return (self.query,) if self.query else ()

    @property
    def unspecialized(self) -> str:
        return ", ".join(f'"{arg.name}"' for arg in self.args if arg.role in ("count", "index"))


def slot_of_extra(layout: Layout) -> str:
    """The tail of a call of ``_slot_of``."""
    names = [block_size_name(layout)] if layout.block_size is None else []
    names += ["rank"] if layout.slots.shard else []
    return "".join(f", {name}" for name in names)


def build_kernel(layout: Layout, plan: Plan) -> Kernel:
    """The context of the kernel that carries out ``plan``."""
    return Builder(layout, plan, schedule(layout, plan)).build()


class Builder(Copying):
    """Works out a kernel; what its sections need of arguments and index variables is collected on the way."""

    def build(self) -> Kernel:
        layout, plan = self.layout, self.plan
        if self.tiled and not self.sched.by_count:
            self.constants["TOKENS"] = str(self.sched.tokens)
        copies = tuple(self._copy(copy, tile) for copy, tile in zip(plan.copies, self.sched.tiles, strict=True))
        copies = tuple(c.again() if again else c for c, again in zip(copies, self._again(), strict=True))
        rows = tuple(map(self._rows_whole, self.sched.rows))
        copies = tuple(in_words(c, self.sched.rows, self.tiled, self.sched.by_count) for c in copies)
        fills = tuple(self._fill(item) for item in plan.fills)
        runs = any(tile.runs for tile in self.sched.tiles)
        if layout.block_size is not None and (runs or self.axes & {"block", "slot"}):
            self.constants[block_size_name(layout)] = str(layout.block_size)
        if layout.slots.skip is not None:
            self.constants["SKIP"] = str(layout.slots.skip)
        positions, query = self._positions(), None
        if plan.query:
            query = build_query(layout, plan, self.sched, self.stride_unit, positions)
        uses = self._uses()
        aligned, scalar = uses["run_aligned"], ["True"] if uses["scalar_mask"] else []
        return Kernel(
            name=f"_{plan.name}_kernel",
            summary=self._summary(),
            plan=plan,
            schedule=self.sched,
            args=tuple(self._args(query)),
            constants=tuple(self.constants.items()),
            definitions=tuple(self.definitions.items()),
            copies=copies,
            fills=fills,
            rows=rows,
            block_size=block_size_name(layout),
            remap=layout.slots.remap or "",
            stride_unit=self.stride_unit,
            extra=slot_of_extra(layout),
            valid=self._valid(),
            mapped=" & ".join([*scalar, "(slot_number >= 0)", "(slot_number < num_slots)"]),
            run_slot="tl.multiple_of(first_slot, TOKENS)" if aligned else "first_slot",
            run_number="tl.multiple_of(first, TOKENS)" if aligned else "first",
            program=self.program,
            ways=self._ways(),
            in_range=", mask=in_range, other=-1" if self.tiled else "",
            positions=positions,
            known=" & ".join([*scalar, *map(in_table, positions)]),
            near=" & ".join(f"_near_one({c.scale.handed})" for c in copies if c.ready),
            measured=self._measured() if uses["measured"] else "",
            query=query,
            uses=uses,
        )

    def _rows_whole(self, rows: Rows) -> RowsContext:
        """The section that stores rows whole: its tiles have the words of a token along their last axis."""
        rank, token = (2, 0) if self.tiled else (1, None)
        variables = {name: Variable(name, token) for name in ("block", "slot", SLOT_NUMBER)}
        variables |= {"layer": Variable("layer"), "head": Variable("row_head")}
        cache = self._side(rows.view, rows.fields[0].stream, variables, rank, "tl.uint32")
        kept = self._kept(subscript(token, rank))
        bounds = [f"(word < {rows.total})"] if padded_side(rows.total) > rows.total else []
        _, masks = self._masks("", kept, kept, bounds, named=False)
        return build_rows(rows, self.tiled, self.sched.by_count, cache, masks)

    def _ways(self) -> str:
        """Many where few loads of a thread do: of more steps each waits for memory."""
        if self.sched.tokens * WAYS <= 4 * LANES * self.sched.num_warps:
            return str(WAYS)
        return f"{WAYS} if TOKENS == 1 else {FEW_WAYS}" if self.sched.by_count else str(FEW_WAYS)

    def _positions(self) -> tuple[PositionContext, ...]:
        """The positions of a token, one or three."""
        rotary = self.plan.rotary
        if rotary is None:
            return ()
        if rotary.mrope is None:
            return (PositionContext("position", "", "angle_row"),)
        offsets = ("", " + positions_stride", " + 2 * positions_stride")
        found = zip(AXES, offsets, strict=True)
        return tuple(PositionContext(f"position_{axis}", offset, f"angle_row_{axis}") for axis, offset in found)

    def _valid(self) -> str:
        """The condition on a slot number: all of it, or what comes before the remap table."""
        slots = self.layout.slots
        terms = ["in_range"] if self.tiled else ["True"] if self._masked else []
        terms += ["known"] if self._bounded else []
        terms.append("(slot_number >= 0)")
        terms += ["(slot_number != SKIP)"] if slots.skip is not None else []
        terms.append(f"(slot_number < {slots.remap}_length)" if slots.remap else "(slot_number < num_slots)")
        return " & ".join(terms)

    def _uses(self) -> dict[str, bool]:
        plan, slots = self.plan, self.layout.slots
        run_axes = {
            step.digit.axis
            for copy, tile in zip(plan.copies, self.sched.tiles, strict=True)
            if tile.runs
            for step in coalesce(self.layout, plan.cache_view(copy).steps)
        }
        return {
            "tiled": self.tiled,
            "append": plan.kind == "append",
            "gather": plan.kind == "gather",
            "ahead": self._ahead,
            "together": self._together,
            "measured": self._measures_first,
            "ready": self._any_ready,
            "fenced": self._any_ready and self._natively,
            "slot_first": not self._slot_last,
            "slot_last": self._slot_last,
            "slot_ahead": plan.kind == "append" and not self._slot_behind,
            "slot_behind": self._slot_behind,
            "scalar_mask": self._masked and not self.tiled,
            "early_return": plan.kind == "append" and not self._masked,
            "known_return": self._together and not self.tiled,
            "unread": plan.kind == "append" and not self._masked and not self._ahead,
            "by_slots": plan.placement == "slots",
            "by_positions": plan.placement == "positions",
            "by_requests": plan.placement == "requests",
            "by_table": plan.placement != "slots",
            "remap": slots.remap is not None,
            "bounded": self._bounded,
            "query": plan.query is not None,
            "rows": self._by_row,
            "loads_first": self._loads_first(),
            "loads_each": not self._loads_first(),
            "layer": "layer" in self.axes,
            "block": "block" in self.axes,
            "slot": "slot" in self.axes,
            "stride_unit": self.stride_unit > 1,
            "by_count": self.sched.by_count,
            "runs": any(tile.runs for tile in self.sched.tiles),
            "run_slot": bool(run_axes & {"slot", "block"}),
            "run_number": SLOT_NUMBER in run_axes,
            "run_aligned": self.layout.block_size is not None and self.layout.block_size % self.sched.tokens == 0,
        }

    def _summary(self) -> str:
        count = "TOKENS" if self.sched.by_count else self.sched.tokens
        tokens = f"{count} tokens" if self.sched.tokens > 1 else "one token"
        streams = self.plan.streams
        verb = "writes" if self.plan.kind == "append" else "reads"
        heads = ""
        if any(axis.name == "head" and axis.extent != 1 for axis in self.layout.stream(streams[0]).axes):
            count = self.sched.heads
            heads = ", all heads" if count is None else f", {count} head{'s' if count > 1 else ''}"
        return f"One program {verb} {' and '.join(streams)} of {tokens}{heads}."

    def _args(self, query: QueryContext | None) -> list[Arg]:
        plan, layout = self.plan, self.layout
        args = [*data_args(layout, plan), *placement_args(layout, plan), *position_args(plan)]
        args.append(Arg("num_slots", "i32", "num_slots", "count"))
        if self.tiled:
            args.append(Arg("num_tokens", "i32", "num_tokens", "count"))
        runs = any(tile.runs for tile in self.sched.tiles)
        if layout.block_size is None and (runs or self.axes & {"block", "slot"} or plan.placement != "slots"):
            args.append(Arg(block_size_name(layout), "i32", block_size_name(layout), "extent"))
        if "layer" in self.axes:
            args.append(Arg("layer", "i32", "layer", "index"))
        args += [*self.extents.values(), *self.strides.values(), *self.tiles.values()]
        if self.stride_unit > 1:
            args.append(Arg("STRIDE_UNIT", "constexpr", "stride_unit", "unit", compiled=self.stride_unit))
        if self.sched.by_count:
            args.append(Arg("TOKENS", "constexpr", "tokens", "tokens"))
        if self._any_ready:
            args.append(Arg("MANY", "constexpr", f"num_tokens > {self.sched.some}", "many"))
        native = encodes_natively if plan.kind == "append" else casts
        if self.native or any(native(layout.stream(name).encoding) for name in plan.streams):
            args.append(Arg("NATIVE", "constexpr", "_native(device)", "native"))
        if plan.kind == "gather":
            args.append(Arg("ZERO_SKIPPED", "constexpr", "zero_skipped", "flag"))
            if rotated(layout, plan):
                args.append(Arg("ROTATED", "constexpr", "rotated", "flag"))
        known = {arg.name for arg in args}
        args += [arg for arg in query.args if arg.name not in known] if query else []
        # What changes from call to call comes first.
        return sorted(args, key=lambda arg: {"pointer": 0, "optional": 1, "index": 2}.get(arg.role, 3))
