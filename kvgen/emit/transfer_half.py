"""The two halves of a transfer's kernel: what it reads as a plan that gathers, what it writes as one that appends."""

from __future__ import annotations

import math
from dataclasses import replace

from kvgen.axes import Axis, padded_side
from kvgen.emit.args import Arg, stride_factors
from kvgen.emit.copying import Copying
from kvgen.emit.encoding import Loaded
from kvgen.emit.index import Variable, subscript
from kvgen.emit.packing import repack
from kvgen.emit.sections import CopyContext, Masks, Side
from kvgen.layout import Layout, Leaf, Scale
from kvgen.lower import SLOT_NUMBER, coalesce
from kvgen.plan import Copy, Params, Plan, View
from kvgen.schedule import Schedule
from kvgen.schedule_transfer import TransferSchedule, most_heads, moves_bytes
from kvgen.tiles import Tile
from kvgen.transfer import Transfer, shared_by_tokens, tokens_together


def halves(plan: Plan) -> tuple[Plan, Plan]:
    """What a transfer reads as a plan that gathers, what it writes as one that appends."""
    pairs = [half_copies(copy) for copy in plan.copies]
    read = Plan(plan.name, "gather", plan.placement, tuple(pair[0] for pair in pairs))
    return read, Plan(plan.name, "append", plan.placement, tuple(pair[1] for pair in pairs), plan.fills)


def half_copies(copy: Copy) -> tuple[Copy, Copy]:
    values = View(copy.stream, copy.source.itemsize, copy.source.itemsize, copy.source.itemsize, 0, ())
    onto: Params = copy.onto
    read = replace(copy, destination=values, onto=Params())
    return read, replace(copy, source=values, scale=onto.scale, zero=onto.zero, outer=onto.outer, onto=Params())


def head_tile(sched: TransferSchedule) -> str:
    """How many heads a tile has, where they are divided."""
    return str(sched.heads or 1) if sched.heads == sched.capped.heads else "HEAD_TILE"


class Half(Copying):
    """One side of a transfer: addresses and sections of its cache, over tiles that both sides share."""

    names_masks = False

    def __init__(self, transfer: Transfer, layout: Layout, plan: Plan, sched: TransferSchedule) -> None:
        heads = sched.heads or padded_side(most_heads(transfer))
        warps = sched.plain.num_warps
        super().__init__(layout, plan, Schedule(2, True, heads, warps, warps, sched.tiles))  # of two tokens: masked
        self.transfer, self.groups, self.divided = transfer, sched.groups, sched.heads is not None
        self.head_tile = head_tile(sched)
        self.stride_unit = _stride_unit(layout, plan)
        self.scalar_block = plan.placement == "blocks" and self._whole_blocks(sched)
        self.whole_blocks = plan.placement == "blocks" and not self.scalar_block and self._in_whole_blocks(sched)
        # Tokens of a block that are not moved can be read with the others; without a mask on them accesses are wide.
        self.reads_blocks = plan.kind == "gather" and self.scalar_block and sched.together in (None, sched.plain.tokens)
        self.reads_first = False  # whether scales are read behind all values, before anything is worked on
        self.filled: set[str] = set()  # streams that are NaN where nothing of them is read
        self.runs: set[str] = set()  # the axes along which runs of slots are told apart
        shared = [v for c in plan.copies if self._together(c) for v in (c.scale, c.zero) if v]
        self.group_axes = self._axes_of(shared)
        if shared:
            own = [v for c in plan.copies for v in c.views if not any(v is other for other in shared)]
            self.axes = self._axes_of([*own, *(fill.view for fill in plan.fills)])

    def _axes_of(self, views: list[View]) -> set[str]:
        return {step.digit.axis for view in views for step in coalesce(self.layout, view.steps)}

    def _together(self, copy: Copy) -> bool:
        """Whether the tokens of a tile share a scale that is made of them all."""
        written = self.plan.kind == "append" and not copy.leaf
        return written and tokens_together(self.transfer, copy.stream) != 1

    def _whole_blocks(self, sched: TransferSchedule) -> bool:
        """Whether the tokens of a tile lie in one block, and are told apart there in everything that is stored."""
        size, most = self.layout.block_size, sched.most_tokens
        views = [self.plan.cache_view(copy) for copy in self.plan.copies] + [fill.view for fill in self.plan.fills]
        views += [copy.scale for copy in self.plan.copies if copy.scale and "block" in copy.scale.axes]
        return size is not None and size % most == 0 and all(view.axes & {"slot", SLOT_NUMBER} for view in views)

    def _in_whole_blocks(self, sched: TransferSchedule) -> bool:
        """Whether a tile has several whole blocks, and threads have tokens of all of them."""
        size, tokens = self.layout.block_size, sched.plain.tokens
        unpadded = sched.together == tokens == sched.capped.tokens
        return unpadded and any(tile.held for tile in sched.tiles) and size is not None and tokens % size == 0

    def _variables(
        self, stream: str, tile: Tile, axes: list[Axis] | None = None
    ) -> tuple[dict[str, Variable], list[str]]:
        variables, masks = super()._variables(stream, tile, axes)
        if self.scalar_block:  # a tile lies in one block
            variables["block"] = Variable(f"{self.layout.prefix}block")
        if self.transfer.layers == "all":
            variables["layer"] = Variable("layer")
        if "head" in variables and "head" in tile.order:
            variables["head"] = Variable(f"{self.layout.prefix}heads", tile.order.index("head"))
        elif "head" in variables and self.divided:
            variables["head"] = Variable(f"{self.layout.prefix}heads")
        elif "head" in variables:
            variables["head"] = Variable(f"{self.layout.prefix}head")
        return variables, masks

    def _by_dim(self, copy: Copy) -> bool:
        return self.plan.kind == "append" and self.layout.stream(copy.stream).group is None

    def _rows(self, copy: Copy) -> View:
        return self.plan.cache_view(copy)

    def _in_runs(self, context: CopyContext, copy: Copy, tile: Tile) -> CopyContext:
        """What is read is read in runs."""
        return super()._in_runs(context, copy, tile) if self.plan.kind == "gather" else context

    def _define(self, stream: str, axis: Axis, name: str, side: int | None) -> str | None:
        if axis.name != "head":
            return super()._define(stream, axis, name, side)
        if most_heads(self.transfer) == 1:
            return None
        if self.divided and side == 1:
            self.definitions[name] = "first_head"
            return None
        if side is None:
            self.tiles["HEADS_TILE"] = Arg("HEADS_TILE", "constexpr", "triton.next_power_of_2(heads)", "tile")
        tile = self.head_tile if self.divided else "HEADS_TILE" if side is None else side
        first = "first_head + " if self.divided else ""
        self.definitions[name] = f"{first}tl.arange(0, {tile}).to(tl.int64)"
        return "HEADS"

    def _group(self, stream: str) -> int | None:
        return self.groups.get(stream)  # what is moved as it is has none

    def _by_token(self, copy: Copy, scale: Scale) -> bool:
        return super()._by_token(copy, scale) and not (scale.dynamic and self._together(copy))

    def _counted(self, copy: Copy, token: str, bounds: list[str]) -> list[str]:
        if copy.stream in self.filled:
            return []
        return [f"valid{token}", *bounds] if self._together(copy) else bounds

    @property
    def _ahead(self) -> bool:
        return False  # what is read lies at a slot

    def _loaded(self, copy: Copy, handed: Scale) -> Loaded:
        return "placed" if self.reads_first and self.plan.kind == "gather" else "late"

    def _present(self, copy: Copy, scale: Scale, token: str, kept: list[str]) -> list[str]:
        """What tokens share is written where any of them is moved."""
        if not (scale.dynamic and self._together(copy)):
            return super()._present(copy, scale, token, kept)
        return [f"moved{token}" if kept else "(tl.max(moved.to(tl.int32), axis=0) == 1)"]

    def _source_type(self, copy: Copy) -> str:
        return "tl.float32"

    def _param(self, copy: Copy, view: View, scale, value_type: str, what: str, tile: Tile, variables):
        """A scale whose groups are not those of the tile is read once for each value."""
        variables = self._of_scale(copy, scale, variables)
        own = next((a.step for a in scale.axes if a.name == "dim" and a.step > 1 and a.count != 1), None)
        if own is None or own == self.groups[copy.stream]:
            return super()._param(copy, view, scale, value_type, what, tile, variables)
        _, bounds = self._variables(copy.stream, tile)
        masks = self._guarded(f"{copy.stream}_{what}", variables, tile, bounds)
        side = self._side(view, copy.stream, variables, len(tile.order), value_type, scale, grouped=False)
        return replace(side, made=True), masks, list(tile.order)

    def _of_scale(self, copy: Copy, scale: Scale, variables: dict[str, Variable]) -> dict[str, Variable]:
        if not (scale.dynamic and self._together(copy)):
            return variables
        first = {"block": "group_block", "slot": "group_slot", SLOT_NUMBER: "group_number"}
        return variables | {axis: Variable(self.layout.prefix + name) for axis, name in first.items()}

    def run(self, side: Side, copy: Copy, view: View, tile: Tile) -> Side:
        """The side with the addresses of a run of slots, where these lie side by side."""
        fastest = view.steps[-1].digit.axis
        if fastest not in ("slot", SLOT_NUMBER) or view.unit != view.itemsize or view.pack:
            return side
        own = self.layout.prefix
        if self.plan.placement == "blocks":
            if self.reads_blocks or not self.scalar_block:
                return side
            return replace(side, runs=True, run=side.elements, whole=f"{own}whole")
        self.runs.add(fastest)
        variables, _ = self._variables(copy.stream, tile)
        place = variables["token"].position
        variables |= {
            "block": Variable(f"{own}first_block"),
            "slot": Variable(f"{own}run_slot", place),
            SLOT_NUMBER: Variable(f"{own}run_number", place),
        }
        found = self._side(view, copy.stream, variables, len(tile.order), "")
        return replace(side, runs=True, run=found.elements, whole=f"{own}whole")

    def _guarded(
        self, name: str, variables: dict[str, Variable], tile: Tile, bounds: list[str], tokens: str = "valid"
    ) -> Masks:
        guards = [f"{tokens}{subscript(variables['token'].position, len(tile.order))}"]
        return self._masks(name, guards, guards, bounds, named=False)[1]

    def raw(self, copy: Copy, view: View, tile: Tile, value_type: str) -> tuple[Side, Masks, CopyContext | None]:
        """Addresses of a leaf's bytes, and under which conditions a lane has one; how codes are put together anew."""
        rank, leaf, name = len(tile.order), self.layout.leaf(copy.leaf), copy.stream
        tokens = "held" if self.reads_blocks else "valid"
        if view.pack and not moves_bytes(copy):  # the other side puts other codes together
            found = self._copy(half_copies(copy)[self.plan.kind == "append"], tile)
            return found.cache, found.cache_masks, found
        if copy.leaf == name and not view.pack:
            variables, bounds = self._variables(name, tile)
            side = self.run(self._side(view, name, variables, rank, value_type), copy, view, tile)
            return side, self._guarded(name, variables, tile, bounds, tokens), None
        variables, bounds = self._variables(name, tile, [axis for axis in leaf.axes if axis.name == "head"])
        dims = next((axis.count for axis in leaf.axes if axis.name == "dim"), 1)
        if view.pack:
            view, dims = repack(view), dims // view.pack.size
        if "dim" in tile.order:
            place, index = tile.order.index("dim"), f"{name}_dim_{'byte' if copy.leaf == name else 'group'}"
            wide = ".to(tl.int64)" if "dim" in self.wide else ""
            self.definitions[index] = f"tl.arange(0, {tile.sides[place]}){wide}"
            variables["dim"] = Variable(index, place)
            bounds += [f"({index} < {dims}){subscript(place, rank)}"] if tile.sides[place] != dims else []
        if once := self._once(leaf):
            bounds.append(f"({once}){subscript(variables['token'].position, rank)}")
        scale = None if copy.leaf == name else self.layout.stream(name).scale
        side = self._side(view, name, variables, rank, value_type, scale, dims=None if scale else dims)
        return side, self._guarded(name, variables, tile, bounds, tokens), None

    def _once(self, leaf: Leaf) -> str:
        """What the tokens that share a value are told apart by: the first of them moves it."""
        tokens, slot = shared_by_tokens(leaf), f"{self.layout.prefix}slot"
        return "" if tokens == 1 else f"{slot} == 0" if tokens is None else f"{slot} % {tokens} == 0"


def _stride_unit(layout: Layout, plan: Plan) -> int:
    """Elements that all strides are multiples of, where these are no multiples of 16: a power of two."""
    factors = [
        factor
        for copy in plan.copies
        if copy.leaf in ("", copy.stream)
        for step in coalesce(layout, plan.cache_view(copy).steps)
        if step.dim is not None
        for factor in stride_factors(layout, plan.cache_view(copy), copy.stream, step.dim)
    ]
    largest = math.gcd(16, *factors)
    return 1 if largest == 16 else largest
