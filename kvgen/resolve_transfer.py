"""A transfer's file to a checked ``Transfer``: two layouts, and a rule for everything that lies in them."""

from __future__ import annotations

from pathlib import Path

from kvgen import named, resources
from kvgen.axes import Axis
from kvgen.derive import derive
from kvgen.diagnostics import Diagnostic, KvgenError
from kvgen.functions import objections
from kvgen.layout import Layout, Scale, Stream
from kvgen.names import module_objection, name_hint
from kvgen.packing import BITS
from kvgen.resolve import load_source
from kvgen.source import Location, Mapping, Scalar, Source, read
from kvgen.spec_transfer import TransferSpec, read_transfer
from kvgen.suggest import suggestion
from kvgen.transfer import (
    DESTINATION,
    SOURCE,
    Transfer,
    leaves_of_stream,
    shared_by_tokens,
    side,
    write_refusal,
)

RESERVED = ("slots", "blocks", "head", "layer", "num_blocks", "num_requests", "num_slots", "num_layers", "block_size")
"""What generated functions call things of a side, its prefix aside."""


def load(source: Source) -> Transfer:
    """Resolve a document that has the key ``transfer``. Raises KvgenError with everything that is wrong."""
    reading = read_transfer(source)
    problems = [*source.problems, *reading.problems]
    found = None
    if reading.spec is not None:
        resolver = _Resolver(source, reading.spec)
        found = resolver.transfer()
        problems += resolver.problems
    if problems or found is None:
        raise KvgenError(*sorted(problems, key=lambda p: (p.span is None, p.span and (p.span.line, p.span.column))))
    return found


class _Resolver:
    def __init__(self, source: Source, spec: TransferSpec) -> None:
        self.source, self.spec = source, spec
        self.problems: list[Diagnostic] = []

    def report(self, code: str, message: str, location: Location, hint: str | None = None) -> None:
        self.problems.append(Diagnostic(code, message, self.source.at(location), hint))

    def transfer(self) -> Transfer | None:
        spec = self.spec
        if why := module_objection(spec.name):
            hint = name_hint(spec.name, "transfer", module_objection)
            self.report("KV205", f"the transfer's name `{spec.name}` {why}", ("name",), hint)
        first = self.end("from", None)
        second = self.end("to", first and first[0])
        if first is None or second is None:
            return None
        layouts = first[1], second[1]
        for where, layout in zip(("from", "to"), layouts, strict=True):
            self.check_names(where, layout)
        found = Transfer(
            name=spec.name,
            summary=spec.summary,
            source=side(layouts[0], SOURCE),
            destination=side(layouts[1], DESTINATION),
            layers=spec.layers,
            requantise=spec.convert == "requantise",
            programs=spec.grid.programs,
            functions=spec.functions,
        )
        if self.check_streams(found):
            self.check_layers(found)
            self.check_encodings(found)
        if not self.problems:
            for index, message, hint in objections(found, found.functions):
                self.report("KV223", message, ("functions", index), hint)
        return found

    def end(self, where: str, other: Source | None) -> tuple[Source, Layout] | None:
        """The document and the layout of one side; None after reporting why there is none."""
        location = ("transfer", where)
        _, node = self.source.node(location)
        name = node.value if isinstance(node, Scalar) else node.find("layout")[1].value
        at = location if isinstance(node, Scalar) else (*location, "layout")
        found = find_layouts(name, Path(self.source.path).parent)
        if not found and named.find(name, named.names_in(resources.folder("layouts") / "transfers")):
            self.report("KV501", f"`{name}` is a transfer itself", at, "name a layout")
            return None
        if not found:
            hint = suggestion(name, layout_names(Path(self.source.path).parent)) or "`kvgen list` names the layouts"
            self.report("KV501", f"there is no layout `{name}`", at, hint)
            return None
        if len(found) > 1:
            files = " and of ".join(path.name for path in found)
            self.report("KV501", f"`{name}` is the name of {files}", at, "every layout needs a name of its own")
            return None
        try:
            document = read(found[0])
            if "transfer" in document:
                self.report("KV501", f"`{name}` is a transfer itself", at, "name a layout")
                return None
            if isinstance(node, Mapping) and isinstance(document.root, Mapping):
                document = self.derived(document, node, where, other)
            return document and (document, load_source(document))
        except KvgenError as error:
            self.problems += [self.anchored(problem, location) for problem in error.diagnostics]
            return None

    def anchored(self, problem: Diagnostic, location: Location) -> Diagnostic:
        """A mistake that replaced keys make in a layout stands in the transfer, not in the layout's own file."""
        _, node = self.source.node(location)
        if problem.span is None or problem.span.path == self.source.path or not isinstance(node, Mapping):
            return problem
        where = f"{Path(problem.span.path).name}, line {problem.span.line}"
        return Diagnostic(problem.code, f"{problem.message} ({where})", self.source.at(location), problem.hint)

    def derived(self, base: Source, node: Mapping, where: str, other: Source | None) -> Source | None:
        streams = node.find("streams")
        if streams is None or not isinstance(streams[1], Scalar):
            return derive(base, self.source, node, None)
        location = ("transfer", where, "streams")
        if where == "from":
            self.report("KV501", "`streams` of the source are its own", location, "`streams: from` is for `to`")
        elif streams[1].value != "from":
            self.report("KV203", f"expected streams or `from`, got `{streams[1].value}`", location)
        elif other is not None:
            return derive(base, self.source, node, other)
        return None

    def check_names(self, where: str, layout: Layout) -> None:
        """Names that generated functions have for something else, since a side has its own prefix there."""
        for stream in layout.streams:
            if stream.name.startswith((SOURCE, DESTINATION)):
                message = f"the stream `{stream.name}` of `{layout.name}` has a name that transfers use themselves"
                self.report("KV205", message, ("transfer", where), "rename it in the layout")
        for buffer in layout.buffers:
            if buffer.name in RESERVED:
                message = f"the buffer `{buffer.name}` of `{layout.name}` has a name that transfers use themselves"
                self.report("KV205", message, ("transfer", where), "rename it in the layout")

    def check_streams(self, found: Transfer) -> bool:
        """The same streams on both sides, of the same extents but for heads; whether there is more to be said."""
        ours, theirs = ([stream.name for stream in layout.streams] for layout in found.sides)
        if set(ours) != set(theirs):
            named = [f"{', '.join(f'`{name}`' for name in names)}" for names in (ours, theirs)]
            message = f"the source has the streams {named[0]}, the destination {named[1]}"
            self.report("KV502", message, ("transfer", "to"), "both sides must have the same ones; `streams: from`")
            return False
        before = len(self.problems)
        for stream in found.source.streams:
            self.check_stream(stream, found.destination.stream(stream.name))
        return len(self.problems) == before

    def check_stream(self, ours: Stream, theirs: Stream) -> None:
        where = ("transfer", "to")
        if [axis.name for axis in ours.axes] != [axis.name for axis in theirs.axes]:
            message = f"`{ours.name}` has heads on one side only"
            self.report("KV503", message, where, "`head: none` is a stream that all heads share")
            return
        if ours.axes[-1] != theirs.axes[-1]:
            sizes = [stream.axes[-1].extent or "dynamic" for stream in (ours, theirs)]
            extents = f"{sizes[0]} at the source and {sizes[1]} at the destination"
            self.report("KV503", f"`dim` of `{ours.name}` is {extents}", where, "only heads may differ in number")
        if ours.encoding is None and theirs.encoding is None and not set(ours.dtypes) & set(theirs.dtypes):
            kinds = f"{' or '.join(ours.dtypes)} at the source and {' or '.join(theirs.dtypes)} at the destination"
            hint = "let the destination `store` the other type, and say `convert: requantise`"
            self.report("KV504", f"`{ours.name}` is {kinds}: values are moved as they are", where, hint)

    def check_layers(self, found: Transfer) -> None:
        ours, theirs = (layout.layers or layout.regions for layout in found.sides)
        if self.spec.layers == "all" and ours and theirs and _differ(ours, theirs):
            message = f"{ours.extent} layers at the source, {theirs.extent} at the destination"
            self.report("KV503", message, ("layers",), "`layers: one` moves single layers")

    def check_encodings(self, found: Transfer) -> None:
        """Every stream is moved as it is, or may be encoded anew; every scale has a rule."""
        for stream in found.source.streams:
            theirs = found.destination.stream(stream.name)
            if not found.raw(stream.name) and not found.requantise:
                kinds = [_stored(*pair) for pair in ((stream, theirs), (theirs, stream))]
                kinds = f"{kinds[0]} at the source and as {kinds[1]} at the destination"
                message = f"`{stream.name}` is stored as {kinds}"
                hint = "`convert: requantise` lets it be decoded and encoded anew; `streams: from` keeps it as it is"
                self.report("KV504", message, ("transfer", "to"), hint)
            elif why := write_refusal(found, stream.name):
                self.report("KV505", f"`{stream.name}` cannot be encoded at the destination: {why}", ("transfer", "to"))
            else:
                self.check_shared(found, stream)

    def check_shared(self, found: Transfer, stream: Stream) -> None:
        """What tokens or heads share must be moved, or made anew, for all of them at once."""
        where, theirs = ("transfer", "to"), found.destination.stream(stream.name)
        raw = found.raw(stream.name)
        for leaf in leaves_of_stream(found.destination, stream.name):
            tokens = shared_by_tokens(leaf)
            sizes = [layout.block_size for layout in found.sides]
            if tokens is None:
                apart = sizes[0] != sizes[1] or None in sizes
            else:
                apart = tokens > 1 and any(n is None or n % tokens for n in sizes)
            if raw and apart:
                tokens = f"{sizes[0] or 'any'} and {sizes[1] or 'any'} tokens"
                message = f"`{leaf.name}` belongs to a block, and blocks are of {tokens}"
                self.report("KV505", message, where, "give both sides one block size, or say `convert: requantise`")
            written = raw or (theirs.scale is not None and theirs.scale.dynamic)
            lacks = "head" not in [axis.name for axis in leaf.axes] and stream.axes[0].name == "head"
            if written and lacks and _differ(stream.axes[0], theirs.axes[0]):
                message = f"all heads share `{leaf.name}`, and the two sides do not have the same heads"
                self.report("KV505", message, where, "let it vary over `head`")
        narrow = any(s.encoding and s.encoding.code in BITS for s in (stream, theirs))
        group = theirs.group or stream.group or 1
        if not raw and narrow and group & (group - 1):
            message = f"groups of {group} dims: those beside codes of `{stream.name}` narrower than a byte"
            self.report("KV505", f"{message} are a power of two", where)


def _differ(ours: Axis, theirs: Axis) -> bool:
    return None not in (ours.extent, theirs.extent) and ours.extent != theirs.extent


def _stored(stream: Stream, other: Stream) -> str:
    """What codes of a stream are, and what they mean something by that the other side has otherwise."""
    ours, theirs = _facts(stream), _facts(other)
    return " ".join(text for what, text in ours.items() if text and (what == "codes" or text != theirs.get(what)))


def _facts(stream: Stream) -> dict[str, str]:
    """All that bytes are decoded by, in words."""
    encoding, scale = stream.encoding, stream.scale
    if encoding is None:
        return {"codes": " or ".join(stream.dtypes)}
    facts = {
        "codes": encoding.mode if scale else encoding.code,
        "rotation": "after a Hadamard rotation" if encoding.rotation else "",
        "scale": f"with {_scale_text(scale)}" if scale else "",
        "zero": f"above a {encoding.zero.dtype} {encoding.zero.kind}" if encoding.zero else "",
    }
    return facts | ({"outer": f"counted in {_scale_text(scale.scale)}"} if scale and scale.scale else {})


def _scale_text(scale: Scale) -> str:
    names = {"block": "block", "slot": "token"}
    axes = [names.get(axis.name, axis.name) + (f"//{axis.step}" if axis.step > 1 else "") for axis in scale.axes]
    per = " ".join(axes).replace("block token", "token") or "tensor"
    given = "" if scale.stored else f"given {'inverse ' if scale.given == 'inverse' else ''}"
    return f"a {given}{scale.dtype} scale per {per}"


def folders(beside: Path) -> list[Path]:
    """Where the layouts of a transfer are looked for, in this order."""
    return [beside, beside.parent, Path("layouts"), resources.folder("layouts")]


def find_layouts(name: str, beside: Path) -> list[Path]:
    """The files with that name, of the first folder that has some."""
    found = (named.find(name, named.names_in(folder)) for folder in folders(beside))
    return next(filter(None, found), [])


def layout_names(beside: Path) -> list[str]:
    return sorted({name for folder in folders(beside) for name in named.names_in(folder).values()})
