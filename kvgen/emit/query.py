"""The query of a fused append: a device function of its own, which some of a kernel's programs call."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvgen.emit.args import Arg, position_args, stage_args
from kvgen.emit.index import subscript
from kvgen.emit.names import extent_name
from kvgen.emit.pairs import pairs_of
from kvgen.emit.sections import Masks, PositionContext, StagesContext
from kvgen.emit.stages import Staging
from kvgen.layout import Layout
from kvgen.plan import Copy, Plan
from kvgen.schedule import MANY_TOKENS, Schedule, kv_parts


@dataclass(frozen=True, slots=True)
class QueryContext:
    """The function that works on some query heads of a program's tokens; ``positions`` are those that turn them.

    ``args`` are arguments of the kernel; ``taken`` are the function's parameters and ``given`` what the kernel passes.
    Programs from ``first`` on call it.
    """

    name: str
    stream: str
    summary: str
    args: tuple[Arg, ...]
    taken: tuple[str, ...]
    given: str
    first: int
    parts: int | str
    heads: str  # of one program, where that depends on how many tokens there are
    constants: tuple[tuple[str, str], ...]
    definitions: tuple[tuple[str, str], ...]
    source: str
    destination: str
    halved: bool
    second: str
    value_type: str
    mask_definition: str
    masks: Masks
    stages: StagesContext
    positions: tuple[PositionContext, ...]
    bounded: bool  # whether a position may have no angle
    known: str

    @property
    def sections(self) -> tuple[QueryContext, ...]:
        """What templates of a section go over."""
        return (self,)


def build_query(
    layout: Layout, plan: Plan, sched: Schedule, stride_unit: int, positions: tuple[PositionContext, ...]
) -> QueryContext:
    """The context of the function for the query of ``plan``, whose token has these ``positions``."""
    own = replace(plan, copies=(plan.query,), fills=(), query=None)
    own_sched = replace(sched, heads=sched.query_heads, tiles=(sched.query_tile,))
    return _Builder(layout, own, own_sched, stride_unit).build(plan, sched, positions)


class _Builder(Staging):
    _waits = False

    def __init__(self, layout: Layout, plan: Plan, sched: Schedule, stride_unit: int) -> None:
        super().__init__(layout, plan, sched)
        self.stride_unit, self.part = stride_unit, "part"

    def build(self, plan: Plan, sched: Schedule, positions: tuple[PositionContext, ...]) -> QueryContext:
        (copy,), (tile,) = self.plan.copies, self.sched.tiles
        variables, bounds = self._row_variables(copy, tile)
        token = subscript(variables["token"].position, rank := len(tile.order))
        bounded = any(arg.name == "num_positions" for arg in position_args(plan))
        live = ["in_range"] if self.tiled else []
        read = [f"{name}{token}" for name in live]
        kept = [f"known{token}"] if bounded else read
        named, masks = self._masks(copy.stream, read, kept, bounds)
        kind = f"{copy.source.tensor}_ptr.dtype.element_ty"
        source = self._side(copy.source, copy.stream, variables, rank, kind).elements
        destination = self._side(copy.destination, copy.stream, variables, rank, kind).elements
        stages = self._stages(copy, tile, variables, [])
        second = self._side(copy.destination, copy.stream, self._other(copy, variables), rank, kind).elements
        first = kv_parts(self.layout, plan, sched)
        args = self._args()
        values = ["token", *live, *(p.name for p in positions), *(["num_positions"] if bounded else [])]
        known = [*([] if self.tiled else ["True"]), *map(in_table, positions)]
        if self.tiled:
            args.append(Arg("TOKENS", "constexpr", "tokens", "tokens"))
        few, many = sched.query_heads, sched.many_query_heads
        if by_count := few != many:
            args.append(Arg(self._tile_name(copy), "constexpr", "query_heads", "run", compiled=many, few=few))
        return QueryContext(
            name=f"_{plan.name}_query",
            stream=copy.stream,
            summary=f"Stages of {self._tile_name(copy) if by_count else few} query heads.",
            args=tuple(arg for arg in args if arg.role != "tokens"),
            taken=(*values, "part", *(arg.declaration for arg in args)),
            given=", ".join([*values, f"tl.program_id(1) - {first}", *(arg.name for arg in args)]),
            first=first,
            parts=self._parts(copy, sched),
            heads=f"{few} if num_tokens < {MANY_TOKENS} else {many}" if by_count else "",
            constants=tuple(self.constants.items()),
            definitions=tuple(self.definitions.items()),
            source=source,
            destination=destination,
            halved=pairs_of(self.layout, copy, tile).halved,
            second=second,
            value_type=kind,
            mask_definition=named,
            masks=masks,
            stages=stages,
            positions=positions if self._by_row else (),
            bounded=bounded,
            known=" & ".join(known),
        )

    def _tile_name(self, copy: Copy) -> str:
        return f"{extent_name(self.layout, copy.stream, 'head')}_TILE"

    def _parts(self, copy: Copy, sched: Schedule) -> int | str:
        """How many programs divide the heads."""
        if sched.many_query_heads != sched.query_heads:
            return f"{extent_name(self.layout, copy.stream, 'head')} // query_heads"
        return -(-self.layout.stream(copy.stream).axes[0].extent // sched.query_heads)

    def _args(self) -> list[Arg]:
        (copy,) = self.plan.copies
        dtype = "bf16"
        tensors = dict.fromkeys((copy.source.tensor, copy.destination.tensor))
        args = [Arg(f"{name}_ptr", f"*{dtype}", name, "pointer") for name in tensors]
        args += [*stage_args(self.plan.copies), *self.strides.values()]
        if self.stride_unit > 1:
            args.append(Arg("STRIDE_UNIT", "constexpr", "stride_unit", "unit"))
        return args


def in_table(position: PositionContext) -> str:
    """The condition on a position that has angles."""
    return f"({position.name} >= 0) & ({position.name} < num_positions)"
