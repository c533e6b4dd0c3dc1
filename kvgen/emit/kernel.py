"""What the kernel template is handed: every name, expression and flag of one copying kernel, decided."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.axes import Axis
from kvgen.emit.args import Arg, data_args, placement_args, stride_factors, stride_unit
from kvgen.emit.index import Variable, address, dim_name, subscript
from kvgen.emit.names import block_size_name, extent_name, extents_of, index_name
from kvgen.layout import Layout
from kvgen.lower import SLOT_NUMBER, coalesce
from kvgen.plan import Copy, Fill, Plan, Step, View
from kvgen.schedule import Schedule, Tile, padded_side, schedule


@dataclass(frozen=True, slots=True)
class Piece:
    """One access, but the first, of a value that is reached in pieces: its index and its shift in bits."""

    index: int
    shift: int


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a copy: a pointer in tensor elements, and what is added once it points to values."""

    elements: str
    values: str


@dataclass(frozen=True, slots=True)
class CopyContext:
    """One stream's section of a kernel."""

    stream: str
    comment: str
    value_type: str
    source: Side
    destination: Side
    mask_definition: str
    load_mask: str
    store_mask: str
    read_runs: bool
    write_runs: bool
    run: Side  # the cache's side where the tokens are a run of slots in one block
    run_load_mask: str
    run_store_mask: str
    read_cast: bool
    write_cast: bool
    read_pieces: bool
    write_pieces: bool
    pieces: tuple[Piece, ...]
    piece_type: str
    bits_type: str


@dataclass(frozen=True, slots=True)
class FillContext:
    """Padding that is written with its token."""

    comment: str
    pointers: str
    side: int
    value: int
    subscript: str
    mask: str


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
    bytewise: tuple[str, ...]  # pointers to values of one byte, whatever their type
    copies: tuple[CopyContext, ...]
    fills: tuple[FillContext, ...]
    block_size: str
    remap: str
    stride_unit: int  # elements that strides are counted in, if the layout's own strides are multiples of it
    extra: str  # what _slot_of takes beside the table: a dynamic block size, the rank
    valid: str
    run_slot: str
    run_number: str
    in_range: str  # mask of the loads per token
    uses: dict[str, bool]

    @property
    def unspecialized(self) -> str:
        return ", ".join(f'"{arg.name}"' for arg in self.args if arg.role in ("count", "index"))


def slot_of_extra(layout: Layout) -> str:
    """The tail of a call of ``_slot_of``."""
    names = [block_size_name(layout)] if layout.block_size is None else []
    names += ["rank"] if layout.slots.shard else []
    return "".join(f", {name}" for name in names)


def _leaves_32_bits(step: Step) -> bool:
    """Whether a digit times its constant factor can pass the largest int32; a size known at launch may be anything."""
    return step.factor * (step.digit.size or 2**31) >= 2**31 and step.factor > 1


def build_kernel(layout: Layout, plan: Plan) -> Kernel:
    """The context of the kernel that carries out ``plan``."""
    return _Builder(layout, plan, schedule(layout, plan)).build()


class _Builder:
    """Collects arguments, constants and index variables while the sections of a kernel are worked out."""

    def __init__(self, layout: Layout, plan: Plan, sched: Schedule) -> None:
        self.layout, self.plan, self.sched = layout, plan, sched
        self.tiled = sched.tokens > 1 or plan.kind == "gather"
        self.strides: dict[str, Arg] = {}
        self.extents: dict[str, Arg] = {}
        self.tiles: dict[str, Arg] = {}
        self.constants: dict[str, str] = {}
        self.stride_unit = stride_unit(layout, plan)
        self.definitions: dict[str, str] = {}
        views = [view for copy in plan.copies for view in (copy.source, copy.destination)]
        views += [fill.view for fill in plan.fills]
        steps = [step for view in views for step in coalesce(layout, view.steps)]
        self.axes = {step.digit.axis for step in steps}
        # Variables that strides of tensors multiply, or constants that could leave 32 bits, are widened before that.
        self.wide = {step.digit.axis for step in steps if step.dim is not None or _leaves_32_bits(step)}

    def build(self) -> Kernel:
        layout, plan = self.layout, self.plan
        if self.tiled and not self.sched.by_count:
            self.constants["TOKENS"] = str(self.sched.tokens)
        copies = tuple(self._copy(copy, tile) for copy, tile in zip(plan.copies, self.sched.tiles, strict=True))
        fills = tuple(self._fill(item) for item in plan.fills)
        runs = any(tile.runs for tile in self.sched.tiles)
        if layout.block_size is not None and (runs or self.axes & {"block", "slot"}):
            self.constants[block_size_name(layout)] = str(layout.block_size)
        if layout.slots.skip is not None:
            self.constants["SKIP"] = str(layout.slots.skip)
        uses = self._uses()
        aligned = uses["run_aligned"]
        return Kernel(
            name=f"_{plan.name}_kernel",
            summary=self._summary(),
            plan=plan,
            schedule=self.sched,
            args=tuple(self._args()),
            constants=tuple(self.constants.items()),
            definitions=tuple(self.definitions.items()),
            bytewise=self._bytewise(),
            copies=copies,
            fills=fills,
            block_size=block_size_name(layout),
            remap=layout.slots.remap or "",
            stride_unit=self.stride_unit,
            extra=slot_of_extra(layout),
            valid=self._valid(),
            run_slot="tl.multiple_of(first_slot, TOKENS)" if aligned else "first_slot",
            run_number="tl.multiple_of(first, TOKENS)" if aligned else "first",
            in_range=", mask=in_range, other=-1" if self.tiled else "",
            uses=uses,
        )

    def _bytewise(self) -> tuple[str, ...]:
        views = [view for copy in self.plan.copies for view in (copy.source, copy.destination) if view.itemsize == 1]
        return tuple(dict.fromkeys(f"{view.tensor}_ptr" for view in views if view.unit == 1))

    def _valid(self) -> str:
        """The condition on a slot number: all of it, or what comes before the remap table."""
        slots = self.layout.slots
        terms = ["in_range"] if self.tiled else []
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
            "early_return": plan.kind == "append" and not self.tiled,
            "by_slots": plan.placement == "slots",
            "by_positions": plan.placement == "positions",
            "by_requests": plan.placement == "requests",
            "by_table": plan.placement != "slots",
            "skip": slots.skip is not None,
            "remap": slots.remap is not None,
            "shard": slots.shard is not None,
            "dynamic_block_size": self.layout.block_size is None,
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
        streams = [copy.stream for copy in self.plan.copies]
        verb = "writes" if self.plan.kind == "append" else "reads"
        heads = ""
        if any(axis.name == "head" and axis.extent != 1 for axis in self.layout.stream(streams[0]).axes):
            count = self.sched.heads
            heads = ", all heads" if count is None else f", {count} head{'s' if count > 1 else ''}"
        return f"One program {verb} {' and '.join(streams)} of {tokens}{heads}."

    def _copy(self, copy: Copy, tile: Tile) -> CopyContext:
        rank = len(tile.order)
        cache = self.plan.cache_view(copy)
        variables, bounds = self._variables(copy.stream, tile)
        token = subscript(variables["token"].position, rank)
        gather = self.plan.kind == "gather"
        guarded = [f"valid{token}"] if self.tiled or gather else []
        run = dict(variables)
        if tile.runs:
            run |= {
                "block": Variable("first_block"),
                "slot": Variable("run_slot", variables["token"].position),
                SLOT_NUMBER: Variable("run_number", variables["token"].position),
            }
        bounded = f", mask={' & '.join(bounds)}" if bounds else ""
        in_pieces = cache.access < cache.itemsize
        cast = cache.unit != cache.itemsize and not in_pieces
        count = cache.itemsize // cache.access
        return CopyContext(
            stream=copy.stream,
            comment=self._comment(copy, in_pieces),
            value_type=f"{self.plan.dense_view(copy).tensor}_ptr.dtype.element_ty",
            source=self._side(copy.source, copy.stream, variables, rank),
            destination=self._side(copy.destination, copy.stream, variables, rank),
            **self._masks(copy.stream, guarded, [f"written{token}"] if gather else guarded, bounds),
            read_runs=gather and tile.runs,
            write_runs=not gather and tile.runs,
            run=self._side(cache, copy.stream, run, rank),
            run_load_mask=bounded + (", other=0" if bounded else ""),
            run_store_mask=bounded,
            read_cast=gather and cast,
            write_cast=not gather and cast,
            read_pieces=gather and in_pieces,
            write_pieces=not gather and in_pieces,
            pieces=tuple(Piece(i, 8 * i * cache.access) for i in range(1, count)),
            piece_type=f"tl.uint{8 * cache.access}",
            bits_type=f"tl.uint{8 * cache.itemsize}",
        )

    def _masks(self, stream: str, load: list[str], store: list[str], bounds: list[str]) -> dict[str, str]:
        """Mask arguments of a load and a store; one that both share and that is long gets a name."""
        loads, stores = " & ".join([*load, *bounds]), " & ".join([*store, *bounds])
        shared = loads == stores and " & " in loads
        named = f"{stream}_mask" if shared else ""
        return {
            "mask_definition": f"{named} = {loads}" if shared else "",
            "load_mask": f", mask={named or loads}, other=0" if loads else "",
            "store_mask": f", mask={named or stores}" if stores else "",
        }

    def _comment(self, copy: Copy, in_pieces: bool) -> str:
        cache = self.plan.cache_view(copy).tensor
        route = f"{copy.stream} to {cache}" if self.plan.kind == "append" else f"{copy.stream} from {cache}"
        return f"{route}, in pieces: its rows are not aligned" if in_pieces else route

    def _fill(self, fill: Fill) -> FillContext:
        """Padding is written bytewise, over the axes that its record repeats over."""
        stream = self.layout.stream(fill.stream)
        over = [axis for axis in stream.axes if axis.name in {step.digit.axis for step in fill.view.steps}]
        # A program has its tokens, all dims, and all heads unless heads are divided; sides of one are in no tile.
        known = {axis.name: padded_side(axis.extent) for axis in over}
        if "head" in known and self.sched.heads is not None:
            known["head"] = self.sched.heads
        tile = self.sched.tiles[0]
        if "token" in tile.order:
            known["token"] = tile.sides[tile.order.index("token")]
        order = [name for name in ("token", "head", "dim") if name in known and (name == "token" or known[name] != 1)]
        tile = Tile((*order, "pad"), (*(known[name] for name in order), 1 << (fill.size - 1).bit_length()))
        rank = len(tile.order)
        variables, bounds = self._variables(stream.name, tile, over)
        guards = [f"valid{subscript(variables['token'].position, rank)}"] if self.tiled else []
        side = tile.sides[-1]
        tail = subscript(rank - 1, rank)
        if side != fill.size:
            bounds.append(f"(tl.arange(0, {side}) < {fill.size}){tail}")
        return FillContext(
            comment=f"{fill.size} bytes of padding in {fill.view.tensor}",
            pointers=self._side(fill.view, stream.name, variables, rank).elements,
            side=side,
            value=fill.value,
            subscript=tail,
            mask=f", mask={' & '.join([*guards, *bounds])}" if guards or bounds else "",
        )

    def _variables(
        self, stream: str, tile: Tile, axes: list[Axis] | None = None
    ) -> tuple[dict[str, Variable], list[str]]:
        """Variables of every axis for one tile, and the masks of its padded sides."""
        rank = len(tile.order)
        token = tile.order.index("token") if "token" in tile.order else None
        variables = {name: Variable(name, token) for name in ("token", "block", "slot", SLOT_NUMBER)}
        variables["layer"] = Variable("layer")
        masks = []
        for axis in self.layout.stream(stream).axes if axes is None else axes:
            name = index_name(self.layout, stream, axis.name)
            place = tile.order.index(axis.name) if axis.name in tile.order else None
            variables[axis.name] = Variable(name, place)
            bound = self._define(stream, axis, name, 1 if place is None else tile.sides[place])
            if bound:
                masks.append(f"({name} < {bound}){subscript(place, rank)}")
        return variables, masks

    def _define(self, stream: str, axis: Axis, name: str, side: int | None) -> str | None:
        """Define the index variable of an axis; returns the bound to mask it with where its side is padded."""
        if axis.extent == 1:
            return None
        constant = extent_name(self.layout, stream, axis.name)
        wide = ".to(tl.int64)" if axis.name in self.wide else ""
        if axis.extent is None:
            tile, extent = f"{constant}_TILE", constant.lower()
            self.tiles[tile] = Arg(tile, "constexpr", f"triton.next_power_of_2({extent})", "tile")
            self.extents[extent] = Arg(extent, "i32", extent, "extent")
            self.definitions[name] = f"tl.arange(0, {tile}){wide}"
            return extent
        if axis.name == "head" and self.sched.heads is not None:
            program = f"tl.program_id(1){wide}"
            self.definitions[name] = program if side == 1 else f"{program} * {side} + tl.arange(0, {side})"
            exact = axis.extent % side == 0
        else:
            exact = side == axis.extent
            self.definitions[name] = f"tl.arange(0, {constant if exact else side}){wide}"
        if not exact or self.sched.heads is None or axis.name != "head":
            self.constants[constant] = str(axis.extent)
        return None if exact else constant

    def _side(self, view: View, stream: str, variables: dict[str, Variable], rank: int) -> Side:
        extents = extents_of(self.layout, stream)
        steps = coalesce(self.layout, view.steps)
        names = {step.dim: self._stride(view, stream, step.dim, extents) for step in steps if step.dim is not None}
        found = address(self.layout, view, variables, extents, names, rank)
        elements = " + ".join([f"{view.tensor}_ptr", *found.elements])
        return Side(elements, "".join(f" + {term}" for term in found.values))

    def _stride(self, view: View, stream: str, dim: int, extents: dict[str, int | None]) -> str:
        """The name of a tensor's stride, registered as an argument."""
        buffer = next((b for b in self.layout.buffers if b.name == view.tensor), None)
        if buffer is None:
            name = f"{view.tensor}_stride_{'head' if dim else 'token'}"
        else:
            name = f"{view.tensor}_stride_{dim_name(buffer.place.dims[dim], extents)}"
        unit = self.stride_unit
        divisible = all(factor % (16 * unit) == 0 for factor in stride_factors(self.layout, view, stream, dim))
        value = f"{view.tensor}.stride({dim})" + (" // stride_unit" if unit > 1 else "")
        self.strides[name] = Arg(name, "i64", value, "stride", divisible)
        return f"{name} * STRIDE_UNIT" if unit > 1 else name

    def _args(self) -> list[Arg]:
        plan, layout = self.plan, self.layout
        args = [*data_args(layout, plan), *placement_args(layout, plan)]
        args.append(Arg("num_slots", "i64", "num_slots", "count"))
        if self.tiled:
            args.append(Arg("num_tokens", "i64", "num_tokens", "count"))
        runs = any(tile.runs for tile in self.sched.tiles)
        if layout.block_size is None and (runs or self.axes & {"block", "slot"} or plan.placement != "slots"):
            args.append(Arg(block_size_name(layout), "i32", block_size_name(layout), "extent"))
        if "layer" in self.axes:
            args.append(Arg("layer", "i32", "layer", "index"))
        args += [*self.extents.values(), *self.strides.values(), *self.tiles.values()]
        if self.stride_unit > 1:
            args.append(Arg("STRIDE_UNIT", "constexpr", "stride_unit", "unit"))
        if self.sched.by_count:
            args.append(Arg("TOKENS", "constexpr", "tokens", "tokens"))
        if plan.kind == "gather":
            args.append(Arg("ZERO_SKIPPED", "constexpr", "zero_skipped", "flag"))
        # What changes from call to call comes first.
        return sorted(args, key=lambda arg: {"pointer": 0, "optional": 0, "index": 1}.get(arg.role, 2))
