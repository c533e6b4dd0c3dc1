"""What the kernel template of transfers is handed: two sides of a cache, and what happens to values between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvgen.axes import Axis
from kvgen.emit.args import Arg, pointer, stride_factors
from kvgen.emit.encoding import casts
from kvgen.emit.index import Variable, subscript
from kvgen.emit.kernel import Builder
from kvgen.emit.names import block_size_name, num_blocks_name
from kvgen.emit.packing import repack, word_type
from kvgen.emit.sections import CopyContext, FillContext, Masks, Side
from kvgen.layout import Layout, Leaf, Scale
from kvgen.lower import SLOT_NUMBER, coalesce
from kvgen.plan import Copy, Params, Plan, View
from kvgen.schedule import Schedule, Tile, padded_side, worked_on_together
from kvgen.schedule_transfer import TransferSchedule, most_heads, moves_bytes, schedule_transfer
from kvgen.transfer import Transfer, shared_by_tokens, tokens_together

HINT = ', eviction_policy="evict_first"'
"""What is moved is used once: it is not to displace what compute keeps in the caches."""


@dataclass(frozen=True, slots=True)
class Move:
    """One view to another. ``decoded`` and ``encoded`` hold one context each where codes are read or made.

    ``inside``: the lanes that have a value, where others would count in a scale.
    """

    name: str
    comment: str
    read: Side
    read_masks: Masks
    write: Side
    write_masks: Masks
    raw: bool
    mask_definition: str = ""
    decoded: tuple[CopyContext, ...] = ()
    encoded: tuple[CopyContext, ...] = ()
    inside: str = ""
    rounded: str = ""
    unpacked: tuple[CopyContext, ...] = ()
    packed: tuple[CopyContext, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelSide:
    """How one side finds its tokens: names of arguments and variables begin with ``prefix``.

    ``group_*``: where the first token of a tile lies, and with it what its tokens share.
    """

    prefix: str
    block_size: str
    num_blocks: str
    layer: bool
    block: bool
    slot: bool
    slot_number: bool
    scalar_block: bool
    runs: bool
    run_slot: bool
    run_number: bool
    aligned: bool
    tables: tuple[str, ...]
    first_slot: str  # of a tile that lies in one block
    group_block: bool = False
    group_slot: bool = False
    group_number: bool = False


@dataclass(frozen=True, slots=True)
class TransferKernel:
    """One kernel, ready to print, and what it does with a tile. ``definitions`` are index variables.

    ``raw`` are the moves of bytes, all of which are read before any is written, so that more is under way; so are those
    ``coded`` ones, where registers allow.
    """

    name: str
    summary: str
    plan: Plan
    schedule: TransferSchedule
    args: tuple[Arg, ...]
    constants: tuple[tuple[str, str], ...]
    definitions: tuple[tuple[str, str], ...]
    sides: tuple[KernelSide, ...]
    moves: tuple[Move, ...]
    head_tile: int
    step: str  # tokens from one tile to the next
    end: str  # where the tokens of a tile end
    fills: tuple[FillContext, ...]
    present: str
    valid: str
    stride_units: tuple[int, int]
    uses: dict[str, bool]

    @property
    def unspecialized(self) -> str:
        return ", ".join(f'"{arg.name}"' for arg in self.args if arg.role in ("count", "index"))

    @property
    def tile_summary(self) -> str:
        heads = f"{self.schedule.heads} heads" if self.schedule.heads else "all heads"
        return f"Move {' and '.join(self.plan.streams)} of a tile: TOKENS tokens, {heads}."

    @property
    def tile_name(self) -> str:
        return f"_{self.plan.name}_tile"

    @property
    def tile_args(self) -> tuple[Arg, ...]:
        """What moving one tile takes, behind the tile's number."""
        return tuple(arg for arg in self.args if arg.role != "stages")

    @property
    def tile_arguments(self) -> str:
        return ", ".join(["item", *(arg.name for arg in self.tile_args)])

    @property
    def raw(self) -> tuple[Move, ...]:
        return tuple(move for move in self.moves if move.raw)

    @property
    def coded(self) -> tuple[Move, ...]:
        return tuple(move for move in self.moves if not move.raw)


class Half(Builder):
    """One side of a transfer: addresses and sections of its cache, over tiles that both sides share."""

    def __init__(self, transfer: Transfer, layout: Layout, plan: Plan, sched: TransferSchedule) -> None:
        heads = sched.heads or padded_side(most_heads(transfer))
        tiles = Schedule(
            2, True, heads, sched.plain.num_warps, sched.plain.num_warps, sched.tiles
        )  # more than one token: masked
        super().__init__(layout, plan, tiles)
        self.transfer, self.groups, self.divided = transfer, sched.groups, sched.heads is not None
        self.stride_unit = _stride_unit(layout, plan)
        self.scalar_block = plan.placement == "blocks" and self._whole_blocks(sched)
        # Tokens of a block that are not moved can be read with the others; without a mask on them accesses are wide.
        self.reads_blocks = plan.kind == "gather" and self.scalar_block and sched.together in (None, sched.plain.tokens)
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
        elif "head" in variables:
            variables["head"] = Variable(f"{self.layout.prefix}head")
        return variables, masks

    def _define(self, stream: str, axis: Axis, name: str, side: int | None) -> str | None:
        if axis.name != "head":
            return super()._define(stream, axis, name, side)
        if most_heads(self.transfer) == 1:
            return None
        if side is None:
            self.tiles["HEADS_TILE"] = Arg("HEADS_TILE", "constexpr", "triton.next_power_of_2(heads)", "tile")
        first = "first_head + " if self.divided else ""
        self.definitions[name] = f"{first}tl.arange(0, {'HEADS_TILE' if side is None else side}).to(tl.int64)"
        return "HEADS"

    def _group(self, stream: str) -> int | None:
        return self.groups.get(stream)  # what is moved as it is has none

    def _by_token(self, copy: Copy, scale: Scale) -> bool:
        return super()._by_token(copy, scale) and not (scale.dynamic and self._together(copy))

    def _counted(self, copy: Copy, token: str) -> list[str]:
        return [f"valid{token}"] if self._together(copy) else []

    def _present(self, copy: Copy, scale: Scale, token: str, kept: list[str]) -> list[str]:
        """What tokens share is written where any of them is moved."""
        if not (scale.dynamic and self._together(copy)):
            return super()._present(copy, scale, token, kept)
        return [f"moved{token}" if kept else "(tl.max(moved.to(tl.int32), axis=0) == 1)"]

    def _param(self, copy: Copy, view: View, scale, value_type: str, what: str, tile: Tile, variables):
        """A scale whose groups are not those of the tile is read once for each value."""
        if scale.dynamic and self._together(copy):
            first = {"block": "group_block", "slot": "group_slot", SLOT_NUMBER: "group_number"}
            variables = variables | {axis: Variable(self.layout.prefix + name) for axis, name in first.items()}
        own = next((a.step for a in scale.axes if a.name == "dim" and a.step > 1 and a.count != 1), None)
        if own is None or own == self.groups[copy.stream]:
            return super()._param(copy, view, scale, value_type, what, tile, variables)
        _, bounds = self._variables(copy.stream, tile)
        masks = self._guarded(f"{copy.stream}_{what}", variables, tile, bounds)
        side = self._side(view, copy.stream, variables, len(tile.order), value_type, scale, grouped=False)
        return replace(side, made=True), masks, list(tile.order)

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
            found = self._copy(_half_copies(copy)[self.plan.kind == "append"], tile)
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


def build_transfer_kernel(transfer: Transfer, plan: Plan) -> TransferKernel:
    """The context of the kernel that carries out one plan of a transfer."""
    return _Builder(transfer, plan).build()


class _Builder:
    def __init__(self, transfer: Transfer, plan: Plan) -> None:
        self.transfer, self.plan = transfer, plan
        self.sched = schedule_transfer(transfer, plan)
        read, write = _halves(plan)
        self.source = Half(transfer, transfer.source, read, self.sched)
        self.destination = Half(transfer, transfer.destination, write, self.sched)
        self.halves = (self.source, self.destination)
        wide = self.source.wide | self.destination.wide | {"head"}
        self.source.wide = self.destination.wide = wide

    def build(self) -> TransferKernel:
        transfer, plan = self.transfer, self.plan
        moves = tuple(self._move(i, copy) for i, copy in enumerate(plan.copies))
        fills = tuple(self.destination._fill(fill) for fill in plan.fills)
        constants, definitions = {}, {}
        for half in self.halves:
            layout = half.layout
            if layout.block_size is not None and self._counts_blocks(half):
                constants[block_size_name(layout)] = str(layout.block_size)
            if layout.slots.skip is not None:
                constants[f"{layout.prefix.upper()}SKIP"] = str(layout.slots.skip)
            constants |= half.constants
            definitions |= half.definitions
        if any(context.rotated for move in moves for context in move.decoded):
            constants["ROTATED"] = "False"
        if "head" in definitions:
            definitions |= {"src_heads": "src_head + head", "dst_heads": "dst_head + head"}
        sides = tuple(self._side(half, moves) for half in self.halves)
        present, valid = self._valid(sides)
        return TransferKernel(
            name=f"_{plan.name}_kernel",
            summary=self._summary(),
            plan=plan,
            schedule=self.sched,
            args=tuple(self._args(sides)),
            constants=tuple(constants.items()),
            definitions=tuple(definitions.items()),
            sides=sides,
            moves=moves,
            head_tile=self.sched.heads or 1,
            step=str(self.sched.together) if self._padded else "TOKENS",
            end=self._end,
            fills=fills,
            present=present,
            valid=valid,
            stride_units=(self.source.stride_unit, self.destination.stride_unit),
            uses={
                "in_range": plan.placement == "slots" or not all(side.scalar_block for side in sides),
                "by_slots": plan.placement == "slots",
                "by_blocks": plan.placement == "blocks",
                "all_layers": transfer.layers == "all",
                "tables": any(side.tables for side in sides),
                "heads": self._has_heads,
                "divided": self.sched.heads is not None,
                "stride_unit": any(half.stride_unit > 1 for half in self.halves),
                "native": self._native(),
                "reads_first": self._reads_first(),
                "reads_each": not self._reads_first(),
                "reads_blocks": any("held" in move.read_masks.load for move in moves),
                "together": bool(self.destination.group_axes),
            },
        )

    def _counts_blocks(self, half: Half) -> bool:
        """Whether the kernel has to know how many tokens a block of one side holds."""
        moved = [half.layout.leaf(copy.leaf) for copy in self.plan.copies if copy.leaf]
        found = self.plan.placement == "blocks" or half.axes & {"block", "slot"} or half.runs
        return bool(found) or any(map(half._once, moved))

    @property
    def _padded(self) -> bool:
        """Whether a tile has more lanes than tokens."""
        return self.sched.together not in (None, self.sched.plain.tokens)

    @property
    def _end(self) -> str:
        return f"tl.minimum(num_tokens, first + {self.sched.together})" if self._padded else "num_tokens"

    def _first_slot(self, block_size: str) -> str:
        """Where a tile begins in its block; whole tiles are told to be aligned, as the compiler does not see it."""
        first = f"first % {block_size}"
        return first if self._padded else f"tl.multiple_of({first}, TOKENS)"

    @property
    def _has_heads(self) -> bool:
        return self.transfer.sharded

    def _side(self, half: Half, moves: tuple[Move, ...]) -> KernelSide:
        layout, by_blocks = half.layout, self.plan.placement == "blocks"
        moved = [layout.leaf(copy.leaf) for copy in self.plan.copies if copy.leaf]
        slots = "slot" in half.axes or any(map(half._once, moved))
        number = "slot_number" in half.axes or layout.slots.skip is not None
        return KernelSide(
            prefix=layout.prefix,
            block_size=block_size_name(layout),
            num_blocks=num_blocks_name(layout),
            layer="layer" in half.axes and self.transfer.layers == "one",
            block="block" in half.axes or (by_blocks and number),
            slot=slots or (by_blocks and number),
            slot_number=number,
            scalar_block=half.scalar_block,
            runs=any(m.read.runs if half is self.source else m.write.runs for m in moves),
            run_slot="slot" in half.runs,
            run_number=SLOT_NUMBER in half.runs,
            aligned=layout.block_size is not None and layout.block_size % self.sched.most_tokens == 0,
            tables=tuple(_tables(self.transfer, half)),
            first_slot=self._first_slot(block_size_name(layout)),
            group_block=bool(half.group_axes & {"block", SLOT_NUMBER}),
            group_slot=bool(half.group_axes & {"slot", SLOT_NUMBER}),
            group_number=SLOT_NUMBER in half.group_axes,
        )

    def _valid(self, sides: tuple[KernelSide, ...]) -> tuple[str, str]:
        """The condition on blocks that hold whole tiles, empty where none does, and the one on pairs of places."""
        whole, each = [], []
        for half, side in zip(self.halves, sides, strict=True):
            what, count = ("slot_number", "num_slots") if self.plan.placement == "slots" else ("block", "num_blocks")
            terms = whole if side.scalar_block else each
            terms += [f"({side.prefix}{what} >= 0)", f"({side.prefix}{what} < {side.prefix}{count})"]
            if half.layout.slots.skip is not None:
                each.append(f"({side.prefix}slot_number != {side.prefix.upper()}SKIP)")
        first = f"(token < tl.where(present, {self._end}, 0))" if whole else "in_range"
        return " & ".join(whole), " & ".join([first, *each])

    def _summary(self) -> str:
        return f"Programs stride over the tiles of {' and '.join(self.plan.streams)}."

    def _move(self, index: int, copy: Copy) -> Move:
        tile = self.sched.tiles[index]
        again = sum(other.stream == copy.stream and other.leaf == copy.leaf for other in self.plan.copies[:index])
        name = (copy.leaf or copy.stream).replace(".", "_") + (f"_{again + 1}" if again else "")
        route = f"{copy.leaf or copy.stream} from {copy.source.tensor} to {copy.destination.tensor}"
        if copy.leaf:
            return self._raw_move(name, route, copy, tile)
        read, write = _half_copies(copy)
        decoded = replace(self.source._copy(read, tile), value_type="tl.float32")
        encoded = self.destination._copy(write, tile)
        return Move(
            name=copy.stream,
            comment=route,
            read=self._typed(self.source, copy, copy.source, decoded, tile),
            read_masks=_hinted(decoded.cache_masks),
            write=replace(
                self._typed(self.destination, copy, copy.destination, encoded, tile), made=not encoded.packed
            ),
            write_masks=_hinted(encoded.cache_masks),
            raw=False,
            mask_definition=encoded.mask_definition if f"{copy.stream}_mask" in encoded.cache_masks.store else "",
            decoded=(decoded,) if decoded.encoded else (),
            encoded=(encoded,) if encoded.encoded else (),
            inside=self._inside(copy, tile),
            rounded="" if encoded.encoded else self._plain_type(self.destination, copy.destination),
        )

    def _inside(self, copy: Copy, tile: Tile) -> str:
        """Code 0 above a minimum is no 0: lanes past the row are not to meet the amax that is taken of it."""
        ours, theirs = (half.layout.stream(copy.stream) for half in self.halves)
        makes_amax = theirs.scale is not None and theirs.scale.dynamic and not theirs.encoding.zero
        if not (copy.zero and makes_amax):
            return ""
        return " & ".join(self.source._variables(ours.name, tile)[1])

    def _raw_move(self, name: str, route: str, copy: Copy, tile: Tile) -> Move:
        value_type = self._value_type(copy)
        read, read_masks, unpacked = self.source.raw(copy, copy.source, tile, value_type)
        write, write_masks, packed = self.destination.raw(copy, copy.destination, tile, value_type)
        return Move(
            name=name,
            comment=route + (", repacked" if packed else ", its bytes"),
            read=read,
            read_masks=_hinted(read_masks),
            write=write,
            write_masks=_hinted(write_masks),
            raw=not packed,
            unpacked=(replace(unpacked, stream=name),) if unpacked else (),
            packed=(replace(packed, stream=name),) if packed else (),
        )

    def _value_type(self, copy: Copy) -> str:
        """What bytes are in the kernel: the type of the side whose tensor has one, else as many bits."""
        for view in (copy.source, copy.destination):
            if view.unit == view.itemsize:
                return f"{view.tensor}_ptr.dtype.element_ty"
        return word_type(copy.source.itemsize)

    def _plain_type(self, half: Half, view: View) -> str:
        """The type of a plain stream's values: the tensor's, or what the caller says that bytes are."""
        return f"{view.tensor}_ptr.dtype.element_ty" if view.unit == view.itemsize else "VALUE_TYPE"

    def _typed(self, half: Half, copy: Copy, view: View, context: CopyContext, tile: Tile) -> Side:
        side = half.run(context.cache, copy, view, tile)
        return side if context.encoded else replace(side, value_type=self._plain_type(half, view))

    def _reads_first(self) -> bool:
        """Whether values that are worked on are all read at the beginning: not where they take registers as it is."""
        streams = [half.layout.stream(c.stream) for half in self.halves for c in self.plan.copies if not c.leaf]
        return self.sched.together is None and not any(map(worked_on_together, streams))

    def _native(self) -> bool:
        encodings = [
            half.layout.stream(c.stream).encoding for half in self.halves for c in self.plan.copies if not c.leaf
        ]
        return any(map(casts, encodings))

    @property
    def chooses_type(self) -> bool:
        """Whether values of a plain stream lie in bytes, and are worked on."""
        return any(
            half.layout.stream(copy.stream).encoding is None and view.unit != view.itemsize
            for copy in self.plan.copies
            if not copy.leaf
            for half, view in ((self.source, copy.source), (self.destination, copy.destination))
        )

    def _args(self, sides: tuple[KernelSide, ...]) -> list[Arg]:
        args: list[Arg] = []
        for half, side in zip(self.halves, sides, strict=True):
            args += self._buffer_args(half, side)
        list_name = "slots" if self.plan.placement == "slots" else "blocks"
        args += [Arg(f"{side.prefix}{list_name}_ptr", "*i64", f"{side.prefix}{list_name}", "pointer") for side in sides]
        args.append(Arg("num_tokens", "i64", "num_tokens", "count"))
        if self.transfer.layers == "all":
            args.append(Arg("num_layers", "i32", "num_layers", "count"))
        for half, side in zip(self.halves, sides, strict=True):
            args += self._side_args(half, side)
        for half in self.halves:
            args += [*half.extents.values(), *half.strides.values()]
        args += {arg.name: arg for half in self.halves for arg in half.tiles.values()}.values()
        args += self._constants()
        args = list({arg.name: arg for arg in args}.values())
        return sorted(args, key=lambda arg: {"pointer": 0, "index": 1}.get(arg.role, 2))

    def _buffer_args(self, half: Half, side: KernelSide) -> list[Arg]:
        used = {view.tensor for copy in half.plan.copies for view in copy.views}
        args = []
        for buffer in half.layout.buffers:
            if buffer.name not in used:
                continue
            plain = pointer(buffer.name, buffer.dtypes[0])
            if buffer.name in side.tables:
                args.append(replace(plain, name=f"{buffer.name}_first_ptr"))
                args.append(Arg(f"{buffer.name}_table_ptr", "*u64", f"{buffer.name}_table.pointers", "pointer"))
            else:
                args.append(plain)
        scales = {copy.stream: half.layout.stream(copy.stream).scale for copy in self.plan.copies if not copy.leaf}
        parts = [part for scale in scales.values() if scale for part in (scale, scale.scale) if part]
        return args + [pointer(part.argument, part.dtype) for part in parts if not part.stored]

    def _side_args(self, half: Half, side: KernelSide) -> list[Arg]:
        what = "num_slots" if self.plan.placement == "slots" else "num_blocks"
        value = f"{side.prefix}num_slots" if self.plan.placement == "slots" else side.num_blocks
        args = [Arg(f"{side.prefix}{what}", "i64", value, "count")]
        if half.layout.block_size is None:
            args.append(Arg(side.block_size, "i32", side.block_size, "extent"))
        if side.layer:
            args.append(Arg(f"{side.prefix}layer", "i32", f"{side.prefix}layer", "index"))
        if self._has_heads:
            args.append(Arg(f"{side.prefix}head", "i32", f"{side.prefix}head", "index"))
        return args

    def _constants(self) -> list[Arg]:
        args = []
        for half in self.halves:
            if half.stride_unit > 1:
                args.append(Arg(half.unit_name, "constexpr", half.unit_name.lower(), "unit", compiled=half.stride_unit))
        args.append(Arg("TOKENS", "constexpr", "tokens", "tokens"))
        args.append(Arg("STAGES", "constexpr", "stages", "stages"))
        if self._has_heads:
            args.append(Arg("HEADS", "constexpr", "heads", "heads", compiled=most_heads(self.transfer)))
        if any(_tables(self.transfer, half) for half in self.halves):
            args.append(Arg("ALIGNED", "constexpr", "aligned", "aligned"))
        if self.chooses_type:
            args.append(Arg("VALUE_TYPE", "constexpr", "_TYPES[dtype]", "dtype"))
        if self._native():
            args.append(Arg("NATIVE", "constexpr", "_native(device)", "native"))
        return args


def _tables(transfer: Transfer, half: Half) -> list[str]:
    """Buffers that are lists, one tensor a layer."""
    if transfer.layers == "one" or half.layout.layers is not None:
        return []
    used = {view.tensor for copy in half.plan.copies for view in copy.views} | {f.view.tensor for f in half.plan.fills}
    return [buffer.name for buffer in half.layout.buffers if buffer.name in used]


def _halves(plan: Plan) -> tuple[Plan, Plan]:
    """What a transfer reads as a plan that gathers, what it writes as one that appends."""
    pairs = [_half_copies(copy) for copy in plan.copies]
    read = Plan(plan.name, "gather", plan.placement, tuple(pair[0] for pair in pairs))
    return read, Plan(plan.name, "append", plan.placement, tuple(pair[1] for pair in pairs), plan.fills)


def _half_copies(copy: Copy) -> tuple[Copy, Copy]:
    values = View(copy.stream, copy.source.itemsize, copy.source.itemsize, copy.source.itemsize, 0, ())
    onto: Params = copy.onto
    read = replace(copy, destination=values, onto=Params())
    return read, replace(copy, source=values, scale=onto.scale, zero=onto.zero, outer=onto.outer, onto=Params())


def _hinted(masks: Masks) -> Masks:
    return Masks(masks.load + HINT, masks.store + HINT, masks.run_load + HINT, masks.run_store + HINT)


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
