"""A layout file to a checked ``Layout``: names, streams, buffers and slots."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvgen.axes import Axis
from kvgen.diagnostics import Diagnostic, KvgenError
from kvgen.encodings import Encodings
from kvgen.functions import objections
from kvgen.fuse import Fusing
from kvgen.layout import Buffer, FewHints, KernelHints, Layout, Leaf, ScheduleHints, Shard, Slots, Stream
from kvgen.limits import LARGEST, too_large
from kvgen.names import TWICE, argument_objection, module_objection, name_hint, param_objection
from kvgen.packing import BITS, pack_of
from kvgen.places import Known, Places, bits_apart, orders_over
from kvgen.source import Location, Sequence, Source, parse, read
from kvgen.spec import KernelSpec, PlaceSpec, Reading, Spec, StreamSpec, read_spec
from kvgen.stages import Fuse
from kvgen.suggest import suggestion
from kvgen.values import ITEMSIZE, STORED_ITEMSIZE


def load(path: Path | str) -> Layout:
    """Read a layout file. Raises KvgenError with everything that is wrong with it, in the order of the file."""
    return load_source(read(path))


def load_text(text: str | bytes, path: str = "<string>") -> Layout:
    """Read a layout from text; ``path`` is what diagnostics call it. Raises as ``load`` does."""
    return load_source(parse(text, path))


def load_source(source: Source) -> Layout:
    """The layout that a document says. Raises as ``load`` does."""
    reading = read_spec(source)
    resolver = _Resolver(source, reading)
    layout = resolver.layout() if () not in reading.wrong else None
    problems = _distinct([*source.problems, *reading.problems, *resolver.problems])
    if problems or layout is None:
        raise KvgenError(*problems)
    return layout


def _distinct(problems: list[Diagnostic]) -> list[Diagnostic]:
    """In the order of the file; of mistakes that begin at one character, the one found first.

    What is missing somewhere is told completely.
    """
    kept: dict[tuple[int, int, str], Diagnostic] = {}
    for problem in problems:
        missing = problem.message if problem.code == "KV202" else ""
        kept.setdefault((problem.span.line, problem.span.column, missing), problem)
    return [kept[position] for position in sorted(kept)]


class _Resolver:
    """One file's way from spec to layout; ``problems`` collects what is wrong."""

    def __init__(self, source: Source, reading: Reading) -> None:
        self.source = source
        self.spec: Spec = reading.spec
        self.wrong = reading.wrong
        self.problems: list[Diagnostic] = []

    def report(self, code: str, message: str, location: Location, hint: str | None = None, key: bool = False) -> None:
        span = self.source.at_key(location) if key else self.source.at(location)
        self.problems.append(Diagnostic(code, message, span, hint))

    def layout(self) -> Layout | None:
        """The layout, or None where something it rests on is wrong."""
        spec = self.spec
        self.names()
        streams = tuple(self.streams())
        known = self.known(streams)
        places = Places(self.source, known)
        buffers = tuple(self.buffers(places))
        slots = self.slots()
        layered = any(places.layered.values())
        if not layered and not places.problems and not self.broken("buffers"):
            self.layered_scales(streams)
        self.scale_names(streams)
        fuse, query = self.fuse(streams)
        self.problems += places.problems
        if self.problems or self.wrong:
            return None
        layout = Layout(
            name=spec.name,
            summary=spec.summary,
            block_size=_extent(spec.block_size),
            contiguous=places.contiguous,
            layers=known.layers if layered else None,
            regions=known.layers if any("layer" in place.regions for place in spec.buffers.values()) else None,
            streams=streams,
            leaves=tuple(known.leaves.values()),
            buffers=buffers,
            slots=slots,
            schedule=ScheduleHints(_hints(spec.schedule.append), _hints(spec.schedule.gather)),
            fuse=fuse,
            query=query,
            functions=spec.functions,
        )
        self.functions(layout)
        self.sizes(layout)
        return layout

    def functions(self, layout: Layout) -> None:
        """What is asked for must be what the module can have."""
        _, node = self.source.node(("functions",)) if layout.functions else (None, None)
        for index, message, hint in objections(layout, layout.functions):
            where = ("functions", index) if isinstance(node, Sequence) else ("functions",)
            self.report("KV223", message, where, hint)

    def sizes(self, layout: Layout) -> None:
        """Nothing may be larger than a program can hold."""
        for found in too_large(layout):
            where: Location = ("axes",)
            if found.wished:
                where = ("schedule", found.kind)
            elif found.buffer is not None:
                where = ("buffers", next(one.of for one in self.allocations() if one.name == found.buffer))
            elif "streams" in self.source:
                where = ("streams", found.what.strip("`"))
            message = (
                f"a program would hold {found.values} values of {found.what}, and none can hold more than {LARGEST}"
            )
            self.report("KV409", message, where, "fewer tokens or heads" if found.wished else None, key=True)

    def fuse(self, streams: tuple[Stream, ...]) -> tuple[Fuse | None, Stream | None]:
        """What a fused append does, and the query it works on."""
        spec = self.spec
        if spec.fuse is None or self.wrong & {("fuse",), ("streams",), ("axes",)}:
            return None, None
        known = {stream.name: stream for stream in streams}
        fusing = Fusing(self.source, spec.fuse, known, tuple(spec.streams))
        found = fusing.resolve()
        self.problems += fusing.problems
        return found

    def names(self) -> None:
        spec = self.spec
        if ("name",) not in self.wrong and (why := module_objection(spec.name)):
            self._report_name(
                f"the layout's name `{spec.name}` {why}", ("name",), spec.name, "layout", module_objection
            )
        arguments = [(name, ("streams", name), "stream") for name in spec.streams]
        arguments += [(one.name, ("buffers", one.of), "buffer") for one in self.allocations()]
        if spec.slots.remap is not None:
            arguments.append((spec.slots.remap, ("slots", "remap"), "table"))
        for i, (name, location, kind) in enumerate(arguments):
            # Of two that are equal the second is at fault; a name made from another is, wherever it stands.
            others = [other for j, (other, *_) in enumerate(arguments) if j < i or other.casefold() != name.casefold()]
            why = argument_objection(name, others)
            if why == TWICE:
                first = next(what for other, _, what in arguments if other == name)
                why = TWICE if first == kind else f"is the name of a {first} already"
            if why:
                message, taken = f"the {kind} name `{name}` {why}", [other for other, *_ in arguments]
                self._report_name(message, location, name, kind, partial(argument_objection, others=taken))
        for name in spec.params:
            if why := param_objection(name):
                self._report_name(f"the param name `{name}` {why}", ("params", name), name, "param", param_objection)

    def _report_name(
        self, message: str, location: Location, name: str, kind: str, why_not: Callable[[str], str | None]
    ) -> None:
        hint = name_hint(name, kind, why_not)
        self.report("KV205", message, location, hint, key=kind not in ("layout", "table"))

    def scale_names(self, streams: tuple[Stream, ...]) -> None:
        """What a layout names must differ from what its scales are called, as arguments and inside of kernels."""
        named = [(name, ("streams", name), "stream") for name in self.spec.streams]
        named += [(one.name, ("buffers", one.of), "buffer") for one in self.allocations()]
        if self.spec.slots.remap is not None:
            named.append((self.spec.slots.remap, ("slots", "remap"), "table"))
        for stream in streams:
            for what, argument in _parameters(stream):
                for name, location, kind in named:
                    if argument_objection(name, [argument]):
                        message = f"the {kind} name `{name}` is taken: {what} of `{stream.name}` is called `{argument}`"
                        self.report("KV205", message, location, key=kind != "table")

    def streams(self) -> Iterator[Stream]:
        """The streams that are right; the others join ``wrong``."""
        if not self.spec.streams and not self.wrong:
            self.report("KV202", "no streams: there is nothing to store", ("streams",))
        for name in self.spec.streams:
            stream = self.stream(name)
            if stream is None:
                self.wrong |= {("streams", name)}
            else:
                yield stream

    def stream(self, name: str) -> Stream | None:
        spec, axes = self.stream_spec(name), self.spec.axes
        if spec is None or self.wrong & {("streams",), ("axes",)}:
            return None
        if spec is self.spec.streams[name]:
            self.check_dtypes(name, spec)
        has_head, dim = spec.head is None, spec.dim or axes.dim
        unsure = any(where[0] == "axes" or where[0] not in Spec.model_fields for where in self.wrong)
        if unsure and (dim is None or (has_head and axes.head is None)):
            return None  # a misspelt key may have said it
        if dim is None:
            where = ("streams", name) if "streams" in self.source else ("axes",)
            self.report("KV208", f"stream `{name}` has no `dim`", where, "write `axes: {dim: ...}`", key=True)
            return None
        found = [Axis("dim", _extent(dim))]
        if has_head and axes.head is not None:
            found.insert(0, Axis("head", _extent(axes.head)))
        if self.wrong & {("block_size",), ("params",), ("axes", "layer")} and (spec.quant or spec.store):
            return None  # what its encoding may rest on
        encodings = Encodings(
            self.source,
            name,
            spec,
            {axis.name: axis for axis in (*self.common(), *found, self.layers())},
            self.spec.params,
            self.broken("params"),
            {other: self.stream_spec(other) for other in self.spec.streams} if spec.quant else {},
            self.stream,
        )
        encoding = encodings.encoding()
        if encodings.failed:
            if spec is self.spec.streams[name]:
                self.problems += encodings.problems
            return None
        return Stream(name, tuple(found), spec.dtype, max(ITEMSIZE[dtype] for dtype in spec.dtype), encoding)

    def check_dtypes(self, name: str, stream: StreamSpec) -> None:
        """What is stored as it comes takes one number of bytes; what is encoded may come in several sizes."""
        sizes = [f"{dtype} takes {ITEMSIZE[dtype]}" for dtype in stream.dtype]
        plain = stream.quant is None and stream.store is None
        if plain and len({ITEMSIZE[dtype] for dtype in stream.dtype}) > 1:
            message = (
                f"values of `{name}` are stored as they come, and its dtypes differ in size: {', '.join(sizes)} bytes"
            )
            hint = "`store: TYPE` casts all of them to one type; or a layout for each size"
            self.report("KV207", message, ("streams", name, "dtype"), hint)
        elif len(set(stream.dtype)) < len(stream.dtype):
            self.report("KV207", f"a dtype of `{name}` is given twice", ("streams", name, "dtype"))

    def stream_spec(self, name: str) -> StreamSpec | None:
        """What a stream says, or what the one says that it is like."""
        seen = [name]
        while isinstance(like := self.spec.streams.get(seen[-1]), str):
            location = ("streams", seen[-1])
            if like in seen:
                self.report("KV206", f"stream `{like}` is like itself", location)
                return None
            if like not in self.spec.streams:
                if ("streams", like) not in self.wrong and seen[-1] == name:
                    hint = suggestion(like, [n for n in self.spec.streams if n != name])
                    self.report("KV206", f"unknown stream `{like}`", location, hint)
                return None
            seen.append(like)
        return like

    def known(self, streams: tuple[Stream, ...]) -> Known:
        leaves = {leaf.name: leaf for stream in streams for leaf in self.leaves(stream)}
        plain = {stream.name for stream in streams if stream.encoding is None}
        scales = [scale for stream in streams for scale in (stream.scale, stream.scale and stream.scale.scale) if scale]
        codes = {s.name: s.encoding.code for s in streams if s.encoding}
        return Known(
            leaves=leaves,
            coded=frozenset(leaves.keys() - plain),
            packs={
                name: pack_of(1 if name in self.bits_apart() else BITS[code])
                for name, code in codes.items()
                if code in BITS
            },
            arguments=frozenset(scale.name for scale in scales) - leaves.keys(),
            broken=self.broken("streams"),
            layers=self.layers(),
            params=self.spec.params,
            broken_params=self.broken("params"),
        )

    def bits_apart(self) -> frozenset[str]:
        return bits_apart(self.spec.buffers.values())

    def common(self) -> tuple[Axis, Axis]:
        """The axes that everything stored for a token has."""
        return Axis("block", None), Axis("slot", _extent(self.spec.block_size))

    def layers(self) -> Axis:
        return Axis("layer", _extent(self.spec.axes.layer or "dynamic"))

    def leaves(self, stream: Stream) -> Iterator[Leaf]:
        """The values or codes of a stream, then its scale if that is stored, and its zero."""
        axes, encoding = (*self.common(), *stream.axes), stream.encoding
        if encoding is None:
            yield Leaf(stream.name, stream.name, axes, stream.dtypes, stream.itemsize)
            return
        code = "uint8" if encoding.code in BITS else encoding.code
        if encoding.code in BITS and stream.name in self.bits_apart():
            axes = (*axes[:-1], Axis("bit", BITS[encoding.code]), axes[-1])
        yield Leaf(stream.name, stream.name, axes, (code,), STORED_ITEMSIZE[code])
        scale, zero = encoding.scale, encoding.zero
        if scale is not None and scale.stored:
            yield Leaf(scale.name, stream.name, scale.axes, (scale.dtype,), STORED_ITEMSIZE[scale.dtype])
        if zero is not None:
            yield Leaf(zero.name, stream.name, scale.axes, (zero.dtype,), STORED_ITEMSIZE[zero.dtype])

    def broken(self, section: str) -> frozenset[str]:
        """The entries of a section that were wrong."""
        return frozenset(str(where[1]) for where in self.wrong if len(where) == 2 and where[0] == section)

    def buffers(self, places: Places) -> Iterator[Buffer]:
        """Every buffer that is right; none where what all of them rest on is wrong."""
        if not self.spec.buffers and not self.wrong:
            self.report("KV403", "no buffers: there is nothing to store in", ("buffers",))
        if self.wrong & {("axes",), ("block_size",), ("params",), ("streams",), ("buffers",), ("axes", "layer")}:
            return
        self.regions()
        built = [places.buffer(one.name, one.place, one.of, one.half) for one in self.allocations()]
        self.stored(places)
        yield from (buffer for buffer in built if buffer is not None)

    def allocations(self) -> Iterator[Allocation]:
        """The tensors that buffers are: one each, or one of each half of a pair."""
        for name, place in self.spec.buffers.items():
            pair = place.holds is not None and len(place.holds) == 2
            if "kv" not in place.regions or not pair or orders_over(place, "kv"):
                yield Allocation(name, name, place)
                continue
            for half, leaf in enumerate(place.holds):
                of_one = place.model_copy(update={"holds": (leaf,)})
                yield Allocation(f"{name}_{leaf.replace('.', '_')}", name, of_one, half)

    def regions(self) -> None:
        """Every buffer is one allocation a layer, or none is; the halves of a pair may be allocations too."""
        without = [name for name, place in self.spec.buffers.items() if "layer" not in place.regions]
        for name, place in self.spec.buffers.items():
            location = ("buffers", name, "regions")
            others = [axis for axis in place.regions if axis not in ("layer", "kv")]
            if others:
                self.report("KV408", f"regions over `{others[0]}`: {_no_region(others[0])}", location, _REGIONS_HINT)
            elif len(set(place.regions)) < len(place.regions):
                self.report("KV408", f"`{place.regions[0]}` is named twice", location)
            elif "kv" in place.regions and (place.holds is None or len(place.holds) == 1):
                message = "regions over `kv`, and the buffer holds no pair"
                self.report("KV408", message, location, "`holds: [key, value]` is a pair")
            elif "layer" in place.regions and without:
                message = f"`{name}` has an allocation for each layer, `{without[0]}` has not"
                self.report("KV408", message, location, "all buffers of a layout have the same regions")

    def stored(self, places: Places) -> None:
        """Every leaf must be stored, in the same words, with layers or without, as all the others."""
        for leaf in places.known.leaves.values():
            found, codes = places.stored.get(leaf.name, []), places.stored.get(leaf.stream, [])
            if len(found) > 1 and leaf.name != leaf.stream and len(found) != len(codes):
                message = f"`{leaf.name}` lies in {len(found)} places, `{leaf.stream}` in {len(codes) or 'none'}"
                hint = "once for all places of the codes, or once for each"
                self.report("KV402", message, found[1], hint)
            if not found and self.spec.buffers and not places.misnamed and not self.broken("buffers"):
                self.stored_nowhere(leaf)
        if len(places.vocabulary) == 2:
            contiguous, paged = places.vocabulary[True], places.vocabulary[False]
            later = max(contiguous, paged, key=lambda span: (span.line, span.column))
            message = "`block` and `slot` here, `request` and `position` there: a layout uses one of the two"
            self.problems.append(Diagnostic("KV312", message, later))
        without = [place for place, layered in places.layered.items() if not layered]
        if without and len(without) < len(places.layered):
            name, location = without[0]
            message = f"`{name}` has no `layer`, other streams have: all of a layout have it or none"
            self.report("KV313", message, next(at for at in places.stored[name] if at[: len(location)] == location))
        dynamic = self.spec.block_size == "dynamic" and not places.problems and not self.broken("buffers")
        if dynamic and self.spec.buffers and not places.slot_alone:
            message = "a dynamic block_size is read from a dimension that is `slot` alone, and no buffer has one"
            self.report("KV308", message, ("block_size",))

    def stored_nowhere(self, leaf: Leaf) -> None:
        where = ("streams", leaf.stream) if "streams" in self.source else ("buffers",)
        if leaf.name == leaf.stream:
            self.report("KV401", f"stream `{leaf.name}` is stored nowhere", where, "name it in a buffer", key=True)
        else:
            hint = f"codes mean nothing without it: name `{leaf.name}` in a buffer, beside the codes or with them"
            self.report("KV401", f"`{leaf.name}` is stored nowhere", where, hint, key=True)

    def layered_scales(self, streams: tuple[Stream, ...]) -> None:
        """A scale of each layer is an argument that ``layer`` is looked up in: functions without it have none."""
        for stream in streams:
            where = ("streams", stream.name, "quant", "scale")
            outer = stream.scale and stream.scale.scale
            for scale, location in ((stream.scale, (*where, "per")), (outer, (*where, "scale", "per"))):
                if scale and any(axis.name == "layer" for axis in scale.axes):
                    message = f"`layer` in `per` of `{stream.name}`, and no buffer has that axis"
                    self.report("KV306", message, location)

    def slots(self) -> Slots:
        slots, block_size = self.spec.slots, self.spec.block_size
        shard = slots.shard
        if shard is not None and not self.wrong & {("block_size",), ("slots",)}:
            location = ("slots", "shard", "interleave")
            if block_size == "dynamic" and shard.interleave != 1:
                self.report("KV209", "an interleave other than 1 needs a constant block_size", location)
            elif block_size != "dynamic" and block_size % shard.interleave:
                message = f"interleave {shard.interleave} does not divide block_size {block_size}"
                self.report("KV209", message, location)
        return Slots(slots.dtype, slots.skip, slots.remap, shard and Shard(shard.world, shard.interleave))


@dataclass(frozen=True, slots=True)
class Allocation:
    """A tensor of the buffer ``of``: all of it, or the ``half`` of its pair."""

    name: str
    of: str
    place: PlaceSpec
    half: int = 0


_REGIONS_HINT = "`regions` are of `layer`, `kv`, or both"


def _no_region(axis: str) -> str:
    """Why an axis has no allocations of its own."""
    words = re.split(r"[/%]", axis)[0].strip()
    if words == "head":
        return "ranks that hold some of the heads have pools of their own, between which transfers move heads"
    if words in ("block", "slot", "token", "request", "position"):
        return "a slot number is looked up in one allocation"
    return "what a program writes of a token lies in one allocation"


def _parameters(stream: Stream) -> Iterator[tuple[str, str]]:
    """What the codes of a stream come with, and what each is called in generated modules."""
    scale = stream.scale
    if scale is None:
        return
    yield "the scale", scale.argument
    if scale.scale is not None:
        yield "the scale of the scale", scale.scale.argument
    if stream.encoding.zero is not None:
        yield "the zero", stream.encoding.zero.name.replace(".", "_")


def _extent(value: int | str) -> int | None:
    return None if isinstance(value, str) else value


def _hints(spec: KernelSpec) -> KernelHints:
    few = None if spec.few is None else FewHints(spec.few.up_to, spec.few.tokens, spec.few.num_warps)
    return KernelHints(spec.tokens, spec.heads, spec.num_warps, few)
