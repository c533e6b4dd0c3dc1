"""The kernel of a transfer: what its two halves, and what happens to values between them, come to."""

from __future__ import annotations

from dataclasses import replace

from kvgen.emit.args import Arg, pointer
from kvgen.emit.encoding import casts, encodes_natively
from kvgen.emit.names import block_size_name, num_blocks_name
from kvgen.emit.packing import word_type
from kvgen.emit.sections import CopyContext, Side
from kvgen.emit.transfer_half import Half, half_copies, halves, head_tile
from kvgen.emit.transfer_sections import KernelSide, Move, TransferKernel
from kvgen.lower import SLOT_NUMBER
from kvgen.plan import Copy, Plan, View
from kvgen.schedule_transfer import most_heads, schedule_transfer
from kvgen.tiles import Tile, worked_on_together
from kvgen.transfer import Transfer

HINT = ', eviction_policy="evict_first"'
"""What is moved is used once: it is not to displace what compute keeps in the caches.

A hint takes instructions of its own; where threads have many accesses, and all the work, there are none.
"""


FEW_PROGRAMS = 1024
"""So many are under way at once on the largest GPUs, each with all that it reads."""


def build_transfer_kernel(transfer: Transfer, plan: Plan) -> TransferKernel:
    """The context of the kernel that carries out one plan of a transfer."""
    return _Builder(transfer, plan).build()


class _Builder:
    def __init__(self, transfer: Transfer, plan: Plan) -> None:
        self.transfer, self.plan = transfer, plan
        self.sched = schedule_transfer(transfer, plan)
        read, write = halves(plan)
        self.source = Half(transfer, transfer.source, read, self.sched)
        self.destination = Half(transfer, transfer.destination, write, self.sched)
        self.halves = (self.source, self.destination)
        wide = self.source.wide | self.destination.wide | {"head"}
        self.source.wide = self.destination.wide = wide
        self.source.reads_first = self._reads_first()

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
            head_tile=head_tile(self.sched),
            step=str(self.sched.together) if self._padded else "TOKENS",
            end=self._end,
            fills=fills,
            present=present,
            valid=valid,
            stride_units=(self.source.stride_unit, self.destination.stride_unit),
            uses={
                "in_range": plan.placement == "slots" or any(side.each_block for side in sides),
                "token": not any(side.whole_blocks for side in sides) or any(side.each_block for side in sides),
                "by_slots": plan.placement == "slots",
                "by_blocks": plan.placement == "blocks",
                "all_layers": transfer.layers == "all",
                "tables": any(side.tables for side in sides),
                "heads": self._has_heads,
                "divided": self.sched.heads is not None,
                "stride_unit": any(half.stride_unit > 1 for half in self.halves),
                "native": self._native(),
                "reads_first": self.source.reads_first,
                "reads_each": not self.source.reads_first,
                "chooses_first": self._chooses_first,
                "reads_blocks": any("held" in move.read_masks.read for move in moves),
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
            whole_blocks=half.whole_blocks,
        )

    def _valid(self, sides: tuple[KernelSide, ...]) -> tuple[str, str]:
        """The condition on blocks that hold whole tiles, empty where none does, and the one on pairs of places."""
        whole, each, counts = [], [], []
        for half, side in zip(self.halves, sides, strict=True):
            what, count = ("slot_number", "num_slots") if self.plan.placement == "slots" else ("block", "num_blocks")
            terms = whole if side.scalar_block else each
            if side.whole_blocks:
                counts.append(f"{side.prefix}count")
            else:
                terms += [f"({side.prefix}{what} >= 0)", f"({side.prefix}{what} < {side.prefix}{count})"]
            if half.layout.slots.skip is not None:
                each.append(f"({side.prefix}slot_number != {side.prefix.upper()}SKIP)")
        first = f"(token < tl.where(present, {self._end}, 0))" if whole else "in_range"
        if counts:
            left = "tl.minimum(num_tokens - first, TOKENS).to(tl.int32)"
            first = f"tl.where(present, {left}, 0)" if whole else left
            for count in counts:
                first = f"tl.minimum({first}, {count})"
            first = f"(tl.arange(0, TOKENS) < {first})"
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
        read, write = half_copies(copy)
        decoded = replace(self.source._copy(read, tile), value_type="tl.float32")
        filled = not decoded.encoded and copy.onto.zero is not None and not self.source.reads_blocks
        if filled:  # what is no number is not counted
            self.destination.filled.add(copy.stream)
        encoded = self.destination._copy(write, tile)
        parts = replace(decoded, cache=decoded.dense, cache_masks=decoded.masks) if decoded.together else decoded
        masks = replace(parts.cache_masks, other='float("nan")') if filled else parts.cache_masks
        hint = "" if tile.held else HINT
        return Move(
            name=copy.stream,
            comment=route,
            read=self._typed(self.source, copy, copy.source, parts, tile),
            read_masks=replace(masks, hint=hint),
            together=decoded.together,
            write=replace(
                self._typed(self.destination, copy, copy.destination, encoded, tile), made=not encoded.packed
            ),
            write_masks=replace(encoded.cache_masks, hint=hint),
            raw=False,
            mask_definition=encoded.mask_definition if f"{copy.stream}_mask" in encoded.cache_masks.write else "",
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
            read_masks=replace(read_masks, hint=HINT),
            write=write,
            write_masks=replace(write_masks, hint=HINT),
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

    @property
    def _chooses_first(self) -> bool:
        """Whether a few programs read all first, and many each stream where it is worked on: registers allow either."""
        return not self.source.reads_first and all(tile.held for tile in self.sched.tiles) and len(self.plan.copies) > 1

    def _native(self) -> bool:
        names = [copy.stream for copy in self.plan.copies if not copy.leaf]
        source, destination = (half.layout for half in self.halves)
        return self.destination.native or any(
            casts(source.stream(name).encoding) or encodes_natively(destination.stream(name).encoding) for name in names
        )

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
        args.append(Arg("num_tokens", "i32", "num_tokens", "count"))
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
        args = [Arg(f"{side.prefix}{what}", "i32", value, "count")]
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
        if self._chooses_first:
            args.append(Arg("FIRST", "constexpr", f"programs is None and items <= {FEW_PROGRAMS}", "flag"))
        if self._has_heads:
            args.append(Arg("HEADS", "constexpr", "heads", "heads", compiled=most_heads(self.transfer)))
        if self.sched.heads != self.sched.capped.heads:
            args.append(Arg("HEAD_TILE", "constexpr", "head_tile", "head_tile"))
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
