"""The sections of a kernel, one for each copy and padding: what is read when, under which masks, how it is encoded."""

from __future__ import annotations

import math
from dataclasses import replace

from kvgen.axes import Digit
from kvgen.emit.args import Arg, position_args
from kvgen.emit.codebook import groups, rotation, scales, sides
from kvgen.emit.encoding import (
    NATIVE,
    Loaded,
    build_scale,
    build_zero,
    code_type,
    codes_of,
    decoder,
    describe,
    divided,
    divides_itself,
    encoder,
    in_words,
    lifted,
    pairs_at_once,
    reduced,
    scale_type,
)
from kvgen.emit.index import Variable, subscript
from kvgen.emit.names import index_name, tuple_text
from kvgen.emit.packing import build_pack, repack, word_type
from kvgen.emit.pairs import pairs_of
from kvgen.emit.sections import (
    CopyContext,
    FillContext,
    Masks,
    PairContext,
    PartContext,
    PlaneContext,
    ScaleContext,
    Side,
    ZeroContext,
)
from kvgen.emit.stages import Staging
from kvgen.layout import Scale
from kvgen.lower import SLOT_NUMBER, planes
from kvgen.plan import Copy, Fill, View
from kvgen.quant import MODES
from kvgen.schedule import Tile, padded_side


class Copying(Staging):
    """Works out the sections of a kernel, of copies and of paddings."""

    names_masks = True  # of what is read in runs: a stream has one mask

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
    def _masked(self) -> bool:
        """Whether nothing is written for a skipped token by masks; else its program, which has no other, has ended."""
        return self.tiled or (self._ahead and not self.sched.together)

    @property
    def _slot_last(self) -> bool:
        """Whether slots and positions are looked at behind the loads of rows: compilers keep to that where they can."""
        return self.sched.together or (self._ahead and bool(self.plan.staged) and self._loads_first())

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

    def _copy(self, copy: Copy, tile: Tile) -> CopyContext:
        rank = len(tile.order)
        cache, dense = planes(self.plan.cache_view(copy))[0], self.plan.dense_view(copy)
        before = set(self.definitions)
        variables, bounds = self._row_variables(copy, tile)
        token = subscript(variables["token"].position, rank)
        gather = self.plan.kind == "gather"
        kept, read = self._kept(token), self._read(token)
        encoding = self.layout.stream(copy.stream).encoding
        value_type = f"{dense.tensor}_ptr.dtype.element_ty"
        named, masks = self._masks(
            copy.stream, kept if gather else read, [f"written{token}"] if gather else kept, bounds
        )
        side = self._side(cache, copy.stream, variables, rank, code_type(encoding) if encoding else value_type)
        side = replace(side, made=encoding is not None or bool(copy.stages))
        if tile.runs:
            position = variables["token"].position
            run = variables | {
                "block": Variable("first_block"),
                "slot": Variable("run_slot", position),
                SLOT_NUMBER: Variable("run_number", position),
            }
            side = replace(side, runs=True, run=self._side(cache, copy.stream, run, rank, value_type).elements)
        context = CopyContext(
            stream=copy.stream,
            comment=self._comment(copy, side.in_pieces and not cache.pack),
            value_type=value_type,
            cache_masks=masks,
            packed=False,
            pack=None,
            planed=False,
            transposed=False,
            planes=(),
            dense=self._side(dense, copy.stream, variables, rank, value_type),
            cache=side,
            mask_definition=named,
            masks=masks,
            encoded=encoding is not None,
            encode=encoder(encoding) if encoding else "",
            parts=self._parts(copy, tile) if encoding else (),
            divides=bool(encoding) and not divides_itself(encoding),
            divided=self._divided(copy, copy.stream),
            decode=decoder(encoding) if encoding else "",
            decode_limits=", NATIVE" if encoding and encoding.code in NATIVE else "",
            rotated=bool(encoding and encoding.rotation),
            rotation=self._rotation(copy.stream, tile),
            valid=f"valid{token}",
            by_norm=self._by_norm(copy.stream),
            scaled=copy.scale is not None,
            scale=self._scale(copy, tile, variables) if copy.scale else None,
            zeroed=copy.zero is not None,
            zero=self._zero(copy, tile, variables) if copy.zero else None,
            params=self._pair(copy, tile, variables) if copy.zero else None,
            staged=bool(copy.stages),
            stages=self._stages(copy, tile, variables, [] if self._ahead else read) if copy.stages else None,
            rounds=bool(copy.stages) and encoding is None,
            loads=True,
        )
        if pairs_of(self.layout, copy, tile).halved:
            other = self._other(copy, variables)
            second = replace(self._side(cache, copy.stream, other, rank, side.value_type), made=True)
            return replace(context, halved=True, rejoined=context.stages.rejoined, second=second)
        if tile.held:
            context = self._in_runs(context, copy, tile)
            name = variables["dim"].name
            for unused in set() if self._by_dim(copy) else {name, f"{name}_lane"} - before:
                self.definitions.pop(unused, None)
        return self._packed(context, copy, tile, variables) if cache.pack else context

    def _divided(self, copy: Copy, name: str) -> str:
        """Values of a copy over their scale, if they have one."""
        encoding = self.layout.stream(copy.stream).encoding
        return divided(encoding, name, self._source_type(copy), self.plan.staged) if copy.scale else ""

    def _parts(self, copy: Copy, tile: Tile) -> tuple[PartContext, ...]:
        """What becomes codes at a time: a stream's values, or those of its halves."""
        pairs, encoding = pairs_of(self.layout, copy, tile), self.layout.stream(copy.stream).encoding
        names = [copy.stream, f"{copy.stream}_partner"] if pairs.halved and not self._rejoined(copy) else [copy.stream]
        kind, words = self._source_type(copy), in_words(encoding)
        return tuple(
            PartContext(
                name, self._widened(copy, name, words), self._divided(copy, name), codes_of(encoding, name, kind)
            )
            for name in names
        )

    def _in_runs(self, context: CopyContext, copy: Copy, tile: Tile) -> CopyContext:
        """The section of codes that share bytes, where what shares a byte or a scale is to lie in one thread each.

        Its values are loaded in runs of several accesses: of a tile whose first axis and last two are those of dims.
        """
        known, (*axes, dim) = dict(zip(tile.order, tile.sides, strict=True)), self.layout.stream(copy.stream).axes
        name, side = f"{index_name(self.layout, copy.stream, 'dim')}_run", known["dim"] * known.get("group", 1)
        length, rest = name.upper(), [axis for axis in tile.order if axis not in ("group", "dim")]
        few = f"{tile.few_held} if num_tokens <= {self.sched.some} else " if tile.few_held != tile.held else ""
        self.tiles[length] = Arg(length, "constexpr", f"{few}{tile.held}", "run", False, tile.held, tile.few_held)
        strided = any(step.digit.axis == "dim" and step.dim is not None for step in self._rows(copy).steps)
        self.definitions[name] = f"_runs({side}, {length})" + (".to(tl.int64)" if strided else "")
        rank, loaded = len(rest) + 3, Tile(("run", *rest, "access", "dim"), (1, *(known[axis] for axis in rest), 1, 1))
        variables, bounds = self._variables(copy.stream, loaded, axes)
        variables |= {"dim": Variable(name, (0, rank - 2, rank - 1))}
        if side != dim.extent:
            bounds.append(f"({name} < {dim.extent}){subscript((0, rank - 2, rank - 1), rank)}")
        read = self._read(subscript(variables["token"].position, rank))
        named, masks = self._masks(copy.stream, read, read, bounds, self.names_masks)
        lanes_first, lanes_last = (
            (*range(1, rank - 2), first, second, rank - 1) for first, second in ((0, rank - 2), (rank - 2, 0))
        )
        return replace(
            context,
            dense=self._side(self._rows(copy), copy.stream, variables, rank, context.value_type),
            mask_definition=named,
            masks=masks,
            together=f"tl.reshape(_by_rows({copy.stream}, {lanes_first}, {lanes_last}), {tuple_text(sides(tile))})",
        )

    def _by_dim(self, copy: Copy) -> bool:
        """Whether single dims are counted where rows are read in runs."""
        return False

    def _rows(self, copy: Copy) -> View:
        """What values are read from in runs."""
        return self.plan.dense_view(copy)

    def _packed(self, context: CopyContext, copy: Copy, tile: Tile, variables: dict[str, Variable]) -> CopyContext:
        """The section of a stream whose codes share bytes: the cache's side has a tile of bytes."""
        view, layout = self.plan.cache_view(copy), self.layout
        rank = sum(name not in ("group", "dim") for name in tile.order) + 1
        per, extent = view.pack.size, layout.stream(copy.stream).axes[-1].extent
        side = math.prod(s for name, s in zip(tile.order, tile.sides, strict=True) if name in ("group", "dim")) // per
        name = layout.prefix + index_name(layout, copy.stream, "dim") + ("_byte" if view.itemsize == 1 else "_word")
        self.definitions[name] = f"tl.arange(0, {side})" + (".to(tl.int64)" if "dim" in self.wide else "")
        bounds = (
            [f"(head < {bound}){subscript(tile.order.index('head'), rank)}"]
            if (bound := self.bounds.get((copy.stream, "head")))
            else []
        )
        if side * per != extent:
            bounds.append(f"({name} < {extent // per}){subscript(rank - 1, rank)}")
        guards = self._kept(subscript(variables["token"].position, rank))
        _, masks = self._masks(copy.stream, guards, guards, bounds, named=False)
        seen = variables | {"dim": Variable(name, rank - 1)}
        first, *others = (
            self._side(repack(plane), copy.stream, seen, rank, word_type(view.itemsize), dims=extent // per)
            for plane in planes(view)
        )
        transposed = len(others) == 3 and per == 8
        pack, encoding = build_pack(view, tile, transposed), layout.stream(copy.stream).encoding
        pairs, (part,), source = "", context.parts, self._source_type(copy)
        if context.scaled and self.plan.kind == "append" and per == 2 and not (others or pack.moved):
            pairs = pairs_at_once(encoding, copy.stream, source, pack.apart, context.scale.given)
            part = replace(part, widened=self._widened(copy, copy.stream, bool(pairs)))
            self.native |= bool(pairs)
        return replace(
            context,
            cache=first,
            cache_masks=masks,
            packed=True,
            pack=pack,
            pairs=pairs,
            parts=(part,),
            divides=context.divides and not pairs,
            planed=bool(others),
            transposed=transposed,
            planes=tuple(
                PlaneContext(bit, f"{copy.stream}_bit{bit}", side, masks) for bit, side in enumerate(others, 1)
            ),
        )

    def _scale(self, copy: Copy, tile: Tile, variables: dict[str, Variable]) -> ScaleContext:
        """Where the scale lies and what it is made of."""
        scale = self.layout.stream(copy.stream).scale
        side, masks, kept = self._param(copy, copy.scale, scale, scale_type(scale.dtype), "scale", tile, variables)
        outer, outer_masks = Side(""), Masks("", "", "", "")
        if scale.scale:
            found = self._param(copy, copy.outer, scale.scale, "tl.float32", "outer", tile, variables)
            outer, outer_masks = found[:2]
        mode = self.layout.stream(copy.stream).encoding.mode
        largest = f"_amax({reduced('tl.max', f'_counted({copy.stream})', tile, kept)})"
        norm = (groups(tile), scales(tile, kept), f"_{mode}_sizes") if self._by_norm(copy.stream) else ()
        zeroed, loaded = copy.zero is not None, self._loaded(copy, scale.scale or scale)
        lift = self._source_type(copy) if lifted(self.layout.stream(copy.stream).encoding) else ""
        return build_scale(scale, copy.stream, side, masks, largest, outer, outer_masks, zeroed, loaded, lift, *norm)

    def _loaded(self, copy: Copy, handed: Scale) -> Loaded:
        """When the scale that is handed in is loaded; of a gather all is."""
        if self.plan.kind == "gather":
            return "placed" if self._loads_first() else "late"
        if self._ahead and not self._by_token(copy, handed):
            return "early"
        return "placed" if self._ahead and self._loads_first() and not handed.dynamic else "late"

    def _widened(self, copy: Copy, name: str, in_words: bool) -> str:
        """Values of a stream as float32, taken out of words by instructions of some processors or by Triton."""
        short = self.plan.kind == "append" and not copy.stages and self._source_type(copy) != "tl.float32"
        return f"_widened({name}, NATIVE)" if in_words and short else f"{name}.to(tl.float32)"

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

    def _rotation(self, stream: str, tile: Tile) -> str:
        encoding = self.layout.stream(stream).encoding
        return rotation(tile, self.layout.stream(stream).axes[-1].extent) if encoding and encoding.rotation else ""

    def _zero(self, copy: Copy, tile: Tile, variables: dict[str, Variable]) -> ZeroContext:
        """Where the zero lies, and the extremes of a group that it is made of."""
        encoding = self.layout.stream(copy.stream).encoding
        kind = scale_type(encoding.zero.dtype)
        side, masks, kept = self._param(copy, copy.zero, encoding.scale, kind, "zero", tile, variables)
        _, bounds = self._variables(copy.stream, tile)
        bounds = self._counted(copy, subscript(variables["token"].position, len(tile.order)), bounds)
        own = "zero" if self._loaded(copy, encoding.scale) == "late" else f"{copy.stream}_zero"
        return build_zero(encoding, copy.stream, side, masks, tile, kept, " & ".join(bounds), own)

    def _pair(self, copy: Copy, tile: Tile, variables: dict[str, Variable]) -> PairContext | None:
        """Scale and zero where each value of a row has its own and they lie side by side: one row has all of both."""
        view, dim, own = copy.scale, self.layout.stream(copy.stream).axes[-1], self.layout.stream(copy.stream).scale
        *steps, last = view.steps
        beside = replace(copy.zero, offset=view.offset) == view and abs(copy.zero.offset - view.offset) == 1
        each = last.digit == Digit("dim", 1, dim.extent) and last.dim is not None and view.unit == view.itemsize
        whole = tile.order[-1:] == ("dim",) and "group" not in tile.order and tile.sides[-1] == dim.extent
        if self.plan.kind != "gather" or not (beside and each and whole):
            return None
        rank, count, name, dense = (
            len(tile.order),
            2 * dim.extent,
            f"{view.tensor}_pair",
            f"{view.tensor}_dense".upper(),
        )
        stride, row = self._stride(view, copy.stream, last.dim, own), f"tl.arange(0, {count})"
        self.tiles[dense] = Arg(dense, "constexpr", f"{self.strides[stride].value} == 2", "aligned", compiled=True)
        self.definitions[name] = f"{row} if {dense} else {row}.to(tl.int64) // 2 * {stride} + {row} % 2"
        first = replace(view, steps=tuple(steps), offset=min(view.offset, copy.zero.offset))
        side = self._side(first, copy.stream, variables, rank, "")
        _, masks, kept = self._param(copy, view, own, "", "scale", tile, variables)
        names = [f"{copy.stream}_scale", f"{copy.stream}_zero"]
        if self._loaded(copy, own) == "late":
            names = ["scale", "zero"]
        shape = [text if axis in kept else "1" for axis, text in zip(tile.order, sides(tile), strict=True)]
        return PairContext(
            replace(side, elements=f"{side.elements} + {name}{subscript(rank - 1, rank)}"),
            masks,
            ", ".join(names if view.offset < copy.zero.offset else reversed(names)),
            tuple_text([*shape, "2"]),
        )

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

    def _comment(self, copy: Copy, in_pieces: bool) -> str:
        cache = self.plan.cache_view(copy).tensor
        route = f"{copy.stream} to {cache}" if self.plan.kind == "append" else f"{copy.stream} from {cache}"
        if encoding := self.layout.stream(copy.stream).encoding:
            route += f", {describe(encoding)}"
        route += ", each bit for itself" if len(planes(self.plan.cache_view(copy))) > 1 else ""
        return f"{route}, in pieces: its rows are not aligned" if in_pieces else route

    def _fill(self, fill: Fill) -> FillContext:
        """Padding is written bytewise, over the axes that its record repeats over."""
        stream = self.layout.stream(fill.stream)
        over = [axis for axis in stream.axes if axis.name in {step.digit.axis for step in fill.view.steps}]
        # A program has its tokens, all dims, and all heads unless heads are divided; sides of one are in no tile.
        known = {axis.name: padded_side(axis.extent) for axis in over}
        if "head" in known and self.sched.heads is not None:
            known["head"] = self.sched.heads
        if "dim" in known and (size := self._group(stream.name)):
            known |= {"group": padded_side(-(-stream.axes[-1].extent // size)), "dim": padded_side(size)}
        tile = self.sched.tiles[0]
        if "token" in tile.order:
            known["token"] = tile.sides[tile.order.index("token")]
        axes = ("token", "head", "group", "dim")
        order = [name for name in axes if name in known and (name == "token" or known[name] != 1)]
        tile = Tile((*order, "pad"), (*(known[name] for name in order), 1 << (fill.size - 1).bit_length()))
        rank = len(tile.order)
        variables, bounds = self._variables(stream.name, tile, over)
        guards = self._kept(subscript(variables["token"].position, rank))
        side = tile.sides[-1]
        tail = subscript(rank - 1, rank)
        if side != fill.size:
            bounds.append(f"(tl.arange(0, {side}) < {fill.size}){tail}")
        return FillContext(
            comment=f"{fill.size} bytes of padding in {fill.view.tensor}",
            pointers=self._side(fill.view, stream.name, variables, rank, "tl.uint8").elements,
            side=side,
            value=fill.value,
            subscript=tail,
            mask=f", mask={' & '.join([*guards, *bounds])}" if guards or bounds else "",
        )
