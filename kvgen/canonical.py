"""A layout back to YAML, in its one canonical spelling: params put in, aliases and shorthands resolved."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from kvgen import stages
from kvgen.axes import Digit
from kvgen.layout import Buffer, Dim, Encoding, Holds, KernelHints, Layout, Pad, Place, Scale, Stream, Zero, leaves_of
from kvgen.packing import unpacked
from kvgen.quant import MODES, Mode
from kvgen.values import DEFAULT_DTYPES, SCALE_DTYPES, ZERO_DTYPES

_CONTIGUOUS = {"block": "request", "slot": "position"}


def canonical(layout: Layout) -> str:
    """The canonical text of a layout, with a final newline; ``load_text`` gives the layout back."""
    sections = [
        f"name: {_text(layout.name)}",
        *([f"summary: {_text(layout.summary)}"] if layout.summary else []),
        *_axes(layout),
        f"block_size: {_extent(layout.block_size)}",
        *_streams(layout),
        "buffers:",
        *(line for buffer in layout.buffers for line in _buffer(layout, buffer)),
        *_slots(layout),
        *_fuse(layout),
        *_schedule(layout),
        *([f"functions: [{', '.join(layout.functions)}]"] if layout.functions else []),
    ]
    return "\n".join(sections) + "\n"


def order(layout: Layout, place: Place, above: tuple[Dim, ...] = ()) -> str:
    """The order of a place as text; ``above`` are the dimensions of the places around it."""
    axes = [axis for name in leaves_of(place) for axis in layout.leaf(name).axes]
    if layout.layers is not None:
        axes.append(layout.layers)
    extents: dict[str, int | None] = {"kv": 2}
    for axis in axes:  # of several extents the largest: what is topmost there is topmost in all
        extents[axis.name] = None if axis.reach is None else max(axis.reach, extents.get(axis.name) or 0)
    seen = {digit.axis for dim in above for digit in dim.digits}
    return " ".join(_dim(layout, dim, extents, seen) for dim in unpacked(place))


def _dim(layout: Layout, dim: Dim, extents: dict[str, int | None], seen: set[str]) -> str:
    terms = []
    for digit in dim.digits:
        terms.append(_term(layout, digit, extents[digit.axis], digit.axis in seen))
        seen.add(digit.axis)
    if len(terms) == 1:
        return terms[0]
    return f"({' '.join(terms)})" if terms else "1"


def _term(layout: Layout, digit: Digit, extent: int | None, again: bool) -> str:
    term = digit.term(extent)
    if term == digit.axis and digit.size == 1 and again:
        term += "%1"  # a second bare term would read as a mistake
    if layout.contiguous and digit.axis in _CONTIGUOUS:
        return _CONTIGUOUS[digit.axis] + term.removeprefix(digit.axis)
    return term


def _axes(layout: Layout) -> Iterator[str]:
    """Heads and layers as all streams have them, and the head size if all have the same."""
    heads = {axis for stream in layout.streams for axis in stream.axes if axis.name == "head"}
    dims = {stream.axes[-1] for stream in layout.streams}
    axes = {axis.name: _extent(axis.extent) for axis in (*heads, *(dims if len(dims) == 1 else ()))}
    if layers := layout.layers or layout.regions:
        axes["layer"] = _extent(layers.extent)
    if axes:
        yield f"axes: {_flow(axes)}"


def _streams(layout: Layout) -> Iterator[str]:
    parts = {stream.name: _stream(layout, stream) for stream in layout.streams}
    if list(parts) == ["key", "value"] and not any(parts.values()):
        return  # what a layout without the key has
    yield "streams:"
    seen: list[str] = []
    for name, part in parts.items():
        like = next((other for other in seen if parts[other] == part), None)
        yield f"  {name}: {like or _flow(part)}"
        seen.append(name)


def _stream(layout: Layout, stream: Stream) -> dict[str, str]:
    parts = {}
    if len({other.axes[-1] for other in layout.streams}) > 1:
        parts["dim"] = _extent(stream.axes[-1].extent)
    if "head" not in [axis.name for axis in stream.axes]:
        parts["head"] = "none"
    if stream.dtypes != DEFAULT_DTYPES:
        parts["dtype"] = f"[{', '.join(stream.dtypes)}]"
    if stream.encoding is not None:
        parts |= {"rotate": stream.encoding.rotation} if stream.encoding.rotation else {}
        parts |= _encoding(layout, stream, stream.encoding)
    return parts


def _encoding(layout: Layout, stream: Stream, encoding: Encoding) -> dict[str, str]:
    if encoding.scale is None:
        return {"store": encoding.code}
    mode = MODES[encoding.mode]
    parts = {"mode": encoding.mode}
    if encoding.rounding != "even":
        parts["round"] = encoding.rounding
    if encoding.clamp != mode.clamp:
        parts["clamp"] = f"[{encoding.clamp[0]}, {encoding.clamp[1]}]"
    if encoding.zero is not None and (zero := _zero(encoding.zero)):
        parts["zero"] = _flow(zero)
    other = _owner(stream, encoding.scale)
    return {"quant": _flow(parts | {"scale": other or _flow(_scale(layout, stream, encoding.scale, mode))})}


def _owner(stream: Stream, scale: Scale) -> str | None:
    """The other stream whose scale it is, None of the stream's own."""
    owner = scale.name.partition(".")[0]
    return None if owner == stream.name else owner


def _zero(zero: Zero) -> dict[str, str]:
    """What a zero says beyond a minimum in float16."""
    parts = {} if zero.kind == "minimum" else {"kind": zero.kind}
    if zero.dtype != ZERO_DTYPES[zero.kind][0]:
        parts["dtype"] = zero.dtype
    return parts | ({"clamped": "true"} if zero.clamped else {})


def _scale(layout: Layout, stream: Stream, scale: Scale, mode: Mode) -> dict[str, str]:
    """What the scale varies over and where it comes from, then whatever its mode does not imply."""
    parts = {"per": per(layout, scale) or "[]", "source": "dynamic" if scale.dynamic else "static"}
    if scale.dtype != mode.scale_dtype:
        parts["dtype"] = next(word for word, dtype in SCALE_DTYPES.items() if dtype == scale.dtype)
    if scale.grid == "pow2" and scale.dtype != "float8_e8m0fnu":
        parts["grid"] = scale.grid
    if scale.exponent != "ceil":
        parts["exponent"] = scale.exponent
    if scale.code_range != mode.code_range:
        parts["range"] = _number(scale.code_range)
    implied = ("scale", mode.floor) if mode.floor else (None, 0.0)
    if scale.dynamic and (scale.floor_on, scale.floor) != implied:
        parts["floor"] = f"{{{scale.floor_on}: {_number(scale.floor)}}}" if scale.floor_on else "none"
    if scale.dynamic and (outer := _outer(layout, stream, scale.scale, mode)):
        parts["scale"] = outer
    said = {"arithmetic": scale.arithmetic, "given": scale.given, "encode": scale.encode}
    default = {"arithmetic": "divide", "given": "scale", "encode": "stored"}
    return parts | {key: word for key, word in said.items() if word != default[key]}


def _outer(layout: Layout, stream: Stream, scale: Scale | None, mode: Mode) -> str | None:
    """The scale of a scale, where it is not what its mode implies."""
    if scale is None:
        return "none" if mode.counted else None
    if other := _owner(stream, scale):
        return other
    if scale.axes:
        return _flow({"per": per(layout, scale)})
    return None if mode.counted else "{per: []}"


def per(layout: Layout, scale: Scale) -> str:
    """The axes a scale varies over, as ``per`` spells them; nothing for one of the whole tensor."""
    terms = [axis.name if axis.step == 1 else f"{axis.name}//{axis.step}" for axis in scale.axes]
    if terms[:1] == ["block"] and len(terms) > 1 and scale.axes[1].name == "slot":
        terms[:2] = ["token" + terms[1].removeprefix("slot")]
    words = _CONTIGUOUS if layout.contiguous else {}
    return " ".join(words.get(term, term) for term in terms)


def _number(value: float) -> str:
    """A number that readers of YAML take for one: they want a point before an exponent."""
    mantissa, e, exponent = repr(value).removesuffix(".0").partition("e")
    if not e:
        return mantissa
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent):+d}"


def _buffer(layout: Layout, buffer: Buffer) -> Iterator[str]:
    regions = {"regions": "[layer]"} if layout.regions else {}
    if isinstance(buffer.place.content, Holds):
        yield f"  {buffer.name}: {_flow(_leaf_parts(layout, buffer.place, ()) | regions)}"
        return
    yield f"  {buffer.name}:"
    yield from (f"    {key}: {value}" for key, value in regions.items())
    yield from (f"    {line}" for line in _record(layout, buffer.place, ()))


def _record(layout: Layout, place: Place, above: tuple[Dim, ...]) -> Iterator[str]:
    if place.dims:
        yield f"order: {order(layout, place, above)}"
    if place.align != 1:
        yield f"align: {place.align}"
    yield "fields:"
    above += place.dims
    for field in place.content.fields:
        lines = list(_field(layout, field.content, above))
        yield f"  - {lines[0]}"
        yield from (f"    {line}" for line in lines[1:])


def _field(layout: Layout, content: Place | Pad, above: tuple[Dim, ...]) -> Iterator[str]:
    if isinstance(content, Pad):
        fill = {} if content.fill is None else {"fill": str(content.fill)}
        yield _flow({"pad": str(content.size)} | fill)
    elif isinstance(content.content, Holds):
        parts = _leaf_parts(layout, content, above)
        bare = list(parts) == ["holds"] and len(content.content.leaves) == 1
        yield parts["holds"] if bare else _flow(parts)
    else:
        yield from _record(layout, content, above)


def _leaf_parts(layout: Layout, place: Place, above: tuple[Dim, ...]) -> dict[str, str]:
    leaves = place.content.leaves
    if len(leaves) == 1 and place.dims:
        parts = {leaves[0]: order(layout, place, above)}
    else:
        parts = {"holds": leaves[0] if len(leaves) == 1 else f"[{', '.join(leaves)}]"}
        if place.dims:
            parts["order"] = order(layout, place, above)
    if place.align != 1:
        parts["align"] = str(place.align)
    return parts


def _slots(layout: Layout) -> Iterator[str]:
    slots = layout.slots
    parts = {} if slots.dtype == "int64" else {"dtype": slots.dtype}
    if slots.skip is not None:
        parts["skip"] = str(slots.skip)
    if slots.remap is not None:
        parts["remap"] = slots.remap
    if slots.shard is not None:
        parts["shard"] = f"{{world: {slots.shard.world}, interleave: {slots.shard.interleave}}}"
    if parts:
        yield f"slots: {_flow(parts)}"


def _fuse(layout: Layout) -> Iterator[str]:
    """A line for each key."""
    if layout.fuse is not None:
        yield "fuse:"
        yield from (f"  {key}: {_plain(value)}" for key, value in stages.describe(layout).items())


def _plain(value: object) -> str:
    """Plain data in flow style."""
    if isinstance(value, dict):
        return _flow({key: _plain(part) for key, part in value.items()})
    if isinstance(value, list):
        return f"[{', '.join(map(_plain, value))}]"
    return _number(value) if isinstance(value, float) else str(value)


def _schedule(layout: Layout) -> Iterator[str]:
    parts = {"append": hints_text(layout.schedule.append), "gather": hints_text(layout.schedule.gather)}
    given = {kind: text for kind, text in parts.items() if text != "{}"}
    if given:
        yield f"schedule: {_flow(given)}"


def hints_text(hints: KernelHints) -> str:
    """A kernel's entry of ``schedule``: ``{tokens: 4, heads: all}``."""
    parts: dict[str, object] = {"tokens": hints.tokens, "heads": hints.heads, "num_warps": hints.num_warps}
    if hints.few is not None:
        few = {"up_to": hints.few.up_to, "tokens": hints.few.tokens, "num_warps": hints.few.num_warps}
        parts["few"] = _given(few)
    return _given(parts)


def _given(parts: Mapping[str, object]) -> str:
    return _flow({name: str(value) for name, value in parts.items() if value is not None})


def _flow(parts: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in parts.items()) + "}"


def _extent(extent: int | None) -> str:
    return "dynamic" if extent is None else str(extent)


_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9 _.,;()/+=‖×-]*[A-Za-z0-9.)]")


def _text(text: str) -> str:
    """A string as YAML: plain where no reader could take it for anything else."""
    plain = _PLAIN.fullmatch(text) and text not in ("null", "true", "false")
    return text if plain else json.dumps(text, ensure_ascii=False)
