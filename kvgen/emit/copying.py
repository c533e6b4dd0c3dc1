"""The sections of a kernel, one for each copy and padding: where it lies, and how it is encoded."""

from __future__ import annotations

import math
from dataclasses import replace

from kvgen.axes import padded_side
from kvgen.emit.args import Arg
from kvgen.emit.codebook import groups, in_rows, rotation, sides
from kvgen.emit.encoding import (
    NATIVE,
    code_type,
    codes_of,
    decoder,
    describe,
    divided,
    divides_itself,
    encoder,
    in_words,
    pairs_at_once,
)
from kvgen.emit.index import Variable, subscript
from kvgen.emit.names import extent_name, index_name, tuple_text
from kvgen.emit.packing import build_pack, paired, repack, word_type
from kvgen.emit.pairs import pairs_of
from kvgen.emit.scaling import Scaling
from kvgen.emit.sections import BandContext, CopyContext, FillContext, PartContext, PlaneContext
from kvgen.lower import SLOT_NUMBER, planes
from kvgen.plan import Copy, Fill, View
from kvgen.rows import Part
from kvgen.tiles import Tile


class Copying(Scaling):
    """Works out the sections of a kernel, of copies and of paddings."""

    names_masks = True  # of what is read in runs: a stream has one mask

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
            decode_limits=", NATIVE" if encoding and (encoding.code in NATIVE or self._by_norm(copy.stream)) else "",
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
            staged_first=self._any_ready,
            measured=copy.scale is not None and self._measures_first,
        )
        if pairs_of(self.layout, copy, tile).halved:
            other = self._other(copy, variables)
            second = replace(self._side(cache, copy.stream, other, rank, side.value_type), made=True)
            return replace(context, halved=True, rejoined=context.stages.rejoined, second=second)
        if tile.band:
            context = replace(context, band=self._band(copy, tile, variables))
        if tile.held:
            context = self._in_runs(context, copy, tile)
            name = variables["dim"].name
            in_row = self.plan.kind == "append" and context.paired
            unused = set() if self._by_dim(copy) and not in_row else {name, f"{name}_lane"} - before
            grouped = encoding is not None and not in_row and not self._in_rows(copy, "scale")
            unused |= set() if grouped else {f"{name}_group"} - before
            for each in unused:
                self.definitions.pop(each, None)
        return self._packed(context, copy, tile, variables) if cache.pack else context

    def _divided(self, copy: Copy, name: str) -> str:
        """Values of a copy over their scale, if they have one."""
        encoding = self.layout.stream(copy.stream).encoding
        busy = bool(self.plan.staged) or any(tile.runs for tile in self.sched.tiles)
        ready = f"{copy.stream}_divisor" if self._ready(copy) else ""
        return divided(encoding, name, self._source_type(copy), busy, ready) if copy.scale else ""

    def _band(self, copy: Copy, tile: Tile, variables: dict[str, Variable]) -> BandContext:
        """Some dims of tokens that are no run: their addresses, and what is made of them."""
        rank, encoding = len(tile.order), self.layout.stream(copy.stream).encoding
        name, index, wide = "band", "band_dim", ".to(tl.int64)" if "dim" in self.wide else ""
        known, token = variables | {"dim": Variable(index, variables["dim"].position)}, variables["token"].position
        head = self.bounds.get((copy.stream, "head"))
        bounds = [f"(head < {head}){subscript(tile.order.index('head'), rank)}"] if head else []
        load, store = self._read(subscript(token, rank)), self._kept(subscript(token, rank))
        _, masks = self._masks(name, load, store, bounds, named=False)
        kind = self._source_type(copy)
        return BandContext(
            index=index,
            dims=f"tl.arange(0, {tile.band}){wide}",
            extent=extent_name(self.layout, copy.stream, "dim"),
            size=tile.band,
            source=self._side(self.plan.dense_view(copy), copy.stream, known, rank, "").elements,
            load_mask=masks.load,
            part=PartContext(
                name,
                f"{name}.to(tl.float32)" if encoding else "",
                self._divided(copy, name) if encoding else "",
                codes_of(encoding, name, kind) if encoding else "",
            ),
            target=self._side(self.plan.cache_view(copy), copy.stream, known, rank, "").elements,
            store_mask=masks.store,
        )

    def _parts(self, copy: Copy, tile: Tile) -> tuple[PartContext, ...]:
        """What becomes codes at a time: a stream's values, or those of its halves."""
        pairs, encoding = pairs_of(self.layout, copy, tile), self.layout.stream(copy.stream).encoding
        names = [copy.stream, f"{copy.stream}_partner"] if pairs.halved and not self._rejoined(copy) else [copy.stream]
        beside = bool(self.plan.staged) and self._waits and self._natively  # rows that are worked on, arithmetic counts
        kind, words = self._source_type(copy), in_words(encoding) or self._by_norm(copy.stream) or beside
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

    def _in_rows(self, copy: Copy, part: Part) -> bool:
        """Whether a part of what is written of a stream is never written alone, but in whole rows."""
        return not self.sched.by_count and any(
            (f.stream, f.part) == (copy.stream, part) for rows in self.sched.rows for f in rows.fields
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
        twos = self._packs_by_twos(copy, tile)
        places = (twos,) if twos else planes(view)
        rank = sum(name not in ("group", "dim") for name in tile.order) + 1
        per, extent = places[0].pack.size, layout.stream(copy.stream).axes[-1].extent
        side = math.prod(s for name, s in zip(tile.order, tile.sides, strict=True) if name in ("group", "dim")) // per
        name = layout.prefix + index_name(layout, copy.stream, "dim") + ("_byte" if view.itemsize == 1 else "_word")
        if not self._in_rows(copy, "values"):
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
        if self._by_norm(copy.stream):  # the last code is above 0, and times the scale of nothing it is 0
            masks = replace(masks, other="-1")
        seen = variables | {"dim": Variable(name, rank - 1)}
        first, *others = (
            self._side(repack(place), copy.stream, seen, rank, word_type(place.itemsize), dims=extent // per)
            for place in places
        )
        if twos:
            first = replace(first, rows=groups(tile), even=self._even(twos))
            masks = in_rows(masks, tile, side, first.rows)
        transposed = len(others) == 3 and per == 8
        by_norm, encoding = self._by_norm(copy.stream), layout.stream(copy.stream).encoding
        pack = build_pack(view, tile, transposed, by_norm and not others)
        pairs, (part,), source = "", context.parts, self._source_type(copy)
        alone = per == 2 and not others
        if context.scaled and self.plan.kind == "append" and (alone or transposed) and not pack.moved:
            outer = context.scale.given
            pairs = pairs_at_once(encoding, copy.stream, source, pack.apart, outer, transposed)
            part = replace(part, widened=self._widened(copy, copy.stream, True)) if pairs else part
            self.native |= bool(pairs)
        return replace(
            context,
            cache=first,
            cache_masks=masks,
            packed=True,
            pack=pack,
            in_twos=twos is not None,
            pairs=pairs,
            parts=(part,),
            divides=context.divides and not pairs,
            planed=bool(others),
            transposed=transposed,
            planes=tuple(
                PlaneContext(bit, f"{copy.stream}_bit{bit}", side, masks) for bit, side in enumerate(others, 1)
            ),
        )

    def _packs_by_twos(self, copy: Copy, tile: Tile) -> View | None:
        """Packs of several bytes that are written by twos: those that a group in one thread has, if they lie so."""
        view = self.plan.cache_view(copy)
        whole = self.plan.kind == "append" and self._by_norm(copy.stream) and tile.held
        return paired(view) if whole and view.access < view.itemsize else None

    def _even(self, view: View) -> str:
        """Whether what lies at even numbers of bytes in the layout does so in memory: a constant that launches tell."""
        if view.unit > 1:
            return str(view.access % 2 == 0)
        if any(each % 2 for each in (view.offset, *(step.factor for step in view.steps if step.dim is None))):
            return "False"
        name = f"{view.tensor}_even".upper()
        self.tiles[name] = Arg(name, "constexpr", f"_even({view.tensor})", "aligned", compiled=True)
        return name

    def _widened(self, copy: Copy, name: str, in_words: bool) -> str:
        """Values of a stream as float32, taken out of words by instructions of some processors or by Triton."""
        short = self._by_norm(copy.stream) or self._source_type(copy) != "tl.float32"
        short = short and self.plan.kind == "append" and not copy.stages
        return f"_widened({name}, NATIVE)" if in_words and short else f"{name}.to(tl.float32)"

    def _rotation(self, stream: str, tile: Tile) -> str:
        encoding = self.layout.stream(stream).encoding
        return rotation(tile, self.layout.stream(stream).axes[-1].extent) if encoding and encoding.rotation else ""

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
