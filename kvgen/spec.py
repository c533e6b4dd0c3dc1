"""The keys of a layout file and their types: a document to a ``Spec``, and the JSON Schema of both.

Everything here is as the user wrote it, shorthand apart; what it means is decided in ``resolve``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from kvgen import fuse_spec
from kvgen.diagnostics import Diagnostic
from kvgen.fuse_spec import FuseSpec
from kvgen.model import Model as _Model
from kvgen.names import KEYS
from kvgen.source import Location, Mapping, Source
from kvgen.suggest import suggestion
from kvgen.values import (
    CASTS,
    DEFAULT_DTYPES,
    LARGEST,
    SCALE_DTYPES,
    ZERO_DTYPES,
    Clamp,
    Dtypes,
    Extent,
    Flag,
    Floor,
    Functions,
    Holds,
    Line,
    ModeName,
    NoHeads,
    Order,
    Per,
    Regions,
    SlotType,
    choice,
    dtype_of,
    fail,
    number,
    positive,
    power_of_two,
    shown,
)

OTHER_WORDS = {
    "max_seq_len": "`block_size` is the maximum length where orders say `request` and `position`",
    "page_size": "the tokens of a page are `block_size`",
    "num_kv_heads": "write `axes: {head: ...}`",
    "num_heads": "write `axes: {head: ...}`",
    "head_dim": "write `axes: {dim: ...}`",
    "head_size": "write `axes: {dim: ...}`",
    "slot": "`block_size` gives the tokens of a block",
    "position": "`block_size` gives the maximum length of a request",
    "token": "`block_size` gives the tokens of a block",
    "block": "how many blocks there are is the pool's, and read from it",
    "request": "how many requests there are is the pool's, and read from it",
    "kv": "the pair axis always counts two",
    "bit": "codes have the bits of their mode",
    "regions": "it belongs to a buffer",
}
"""What other projects call things, and keys that are none because they are given elsewhere."""

OF_TRANSFERS = ("layers", "convert", "grid")
"""Keys of a transfer, which a layout may be given by mistake."""

EXAMPLES = {
    "axes": "`{head: 8, dim: 128}`",
    "buffers": "`{key_cache: {holds: key, order: block slot head dim}, ...}`",
    "fuse": "`{key: [rms_norm, rope]}`",
    "params": "`{x: 8}`",
    "quant": "`{mode: int8, scale: {per: token head}}`",
    "schedule": "`{append: {tokens: 4}}`",
    "shard": "`{world: 4}`",
    "slots": "`{dtype: int32}`",
    "streams": "`{latent: {dim: 512, head: none}, ...}`",
}
"""What mappings look like, for those who write something else."""


class AxesSpec(_Model):
    head: Extent = Field(None, description="KV heads: a compile-time constant, or `dynamic`.")
    dim: Extent = Field(None, description="Head size: a compile-time constant, or `dynamic`.")
    layer: Extent = Field(None, description="Layers in one allocation; `dynamic` where nothing is said.")


class OuterScaleSpec(_Model):
    per: Per = Field((), description="The axes it varies over, `head` and `layer` at most: `[]` is one of all.")
    source: Annotated[str, *choice("static")] = Field("static", description="It is handed in.")
    dtype: Annotated[str, *choice("float32")] = Field("float32", description="The element type it is given in.")

    @model_validator(mode="before")
    @classmethod
    def _nothing_said(cls, data: object) -> object:
        return {} if data is None else data


OuterScale = Annotated[
    Annotated[OuterScaleSpec, Tag("(scale)")] | Annotated[str, Tag("(name)")],
    Discriminator(lambda value: "(name)" if isinstance(value, str) else "(scale)"),
]


class ScaleSpec(_Model):
    per: Per = Field(
        None, description="The axes it varies over: `[]` (one of all), `head`, `token head`, `token head dim//32`, ..."
    )
    source: Annotated[str | None, *choice("static", "dynamic")] = Field(
        None, description="An argument, or computed by append; dynamic where it varies over `token`, else static."
    )
    dtype: Annotated[str | None, *dtype_of(SCALE_DTYPES, "dtype of a scale")] = Field(
        None, description="The element type it is stored or given in."
    )
    grid: Annotated[str | None, *choice("any", "pow2")] = Field(None, description="Any number, or powers of two.")
    exponent: Annotated[str | None, *choice("ceil", "floor")] = Field(
        None, description="How a power of two is found: rounded up, or down."
    )
    range: Annotated[float | None, *positive()] = Field(None, description="The code that amax meets.")
    floor: Floor = Field(None, description="The smallest amax or scale, or `none`.")
    arithmetic: Annotated[str | None, *choice("divide", "multiply")] = Field(
        None, description="Codes are x / scale, or x * (1 / scale)."
    )
    given: Annotated[str | None, *choice("scale", "inverse")] = Field(
        None, description="What the argument of a static scale is."
    )
    encode: Annotated[str | None, *choice("stored", "exact")] = Field(
        None, description="Codes are made with the scale as it is stored, or as it was before it was rounded."
    )
    scale: OuterScale | None = Field(
        None, description="A static scale that this one is counted in; the stream whose one it shares; or `none`."
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_said(cls, data: object) -> object:
        return {} if data is None else data


ScaleOrStream = Annotated[
    Annotated[ScaleSpec, Tag("(scale)")] | Annotated[str, Tag("(name)")],
    Discriminator(lambda value: "(name)" if isinstance(value, str) else "(scale)"),
]


class ZeroSpec(_Model):
    kind: Annotated[str, *choice("minimum", "point")] = Field(
        "minimum", description="The lowest value of a group, or the code of 0."
    )
    dtype: Annotated[str | None, *dtype_of([d for kind in ZERO_DTYPES.values() for d in kind], "dtype of a zero")] = (
        Field(None, description="The element type it is stored in: float16 for a minimum, uint8 for a point.")
    )
    clamped: Flag = Field(
        False, description="A point whose range need not reach 0: it is clamped instead, as some engines do."
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_said(cls, data: object) -> object:
        return {} if data is None else data


class QuantSpec(_Model):
    mode: ModeName = Field(description="What the codes are.")
    round: Annotated[str | None, *choice("even", "away")] = Field(
        None, description="Where a tie between two integers goes: to the even one, or away from zero."
    )
    clamp: Clamp = Field(None, description="The smallest and the largest integer code.")
    zero: ZeroSpec | None = Field(None, description="What lies under codes that count from the lowest value up.")
    scale: ScaleOrStream = Field(
        ScaleSpec(), description="What codes are multiplied by to give values, or the stream whose static scale it is."
    )


class StreamSpec(_Model):
    dim: Extent = Field(None, description="Instead of the extent given in `axes`.")
    head: NoHeads = Field(None, description="`none`: one row per token, which all heads share.")
    dtype: Dtypes = Field(
        DEFAULT_DTYPES,
        description="Accepted element types, of one size where values are stored as they come; "
        "bfloat16 and float16 by default.",
    )
    store: Annotated[str | None, *dtype_of(CASTS, "dtype to store")] = Field(
        None, description="Cast to this type, without a scale."
    )
    rotate: Annotated[str | None, *choice("hadamard")] = Field(
        None, description="Turned along `dim` before it is encoded; gather turns it back."
    )
    quant: QuantSpec = Field(None, description="Stored as codes and a scale.")

    @model_validator(mode="before")
    @classmethod
    def _nothing_said(cls, data: object) -> object:
        return {} if data is None else data


def _stream_kind(value: object) -> str:
    return "(like)" if isinstance(value, str) else "(stream)"


LikeOrStream = Annotated[
    Annotated[StreamSpec, Tag("(stream)")] | Annotated[str, Tag("(like)")], Discriminator(_stream_kind)
]


class PadSpec(_Model):
    pad: Annotated[int, *number(1)] = Field(description="Bytes that hold nothing.")
    fill: Annotated[int | None, *number(0, 255)] = Field(
        None, description="The byte written there with its token; without it the padding is never written."
    )


class PlaceSpec(_Model):
    order: Order = None
    holds: Holds = Field(None, description="The stream whose values lie here, or two that take turns over `kv`.")
    fields: list[FieldSpec] | None = Field(None, description="Places laid one after the other.")
    align: Annotated[int, *number(1)] = Field(
        1, description="Bytes: it starts at a multiple of this, and each record takes a multiple of it."
    )
    regions: Regions = Field(
        (), description="Of a buffer: axes each index of which is an allocation of its own: `layer`, `kv`, or both."
    )

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, data: object) -> object:
        """``key`` and ``{key: slot dim}`` written out."""
        if isinstance(data, str):
            return {"holds": data}
        if isinstance(data, dict) and not data.keys() & {"order", "holds", "fields"}:
            names = [key for key in data if key not in ("align", "regions")]
            if len(names) == 1:
                rest = {key: value for key, value in data.items() if key != names[0]}
                return {"holds": names[0], "order": data[names[0]], **rest}
        return data

    @model_validator(mode="after")
    def _one_content(self) -> PlaceSpec:
        if (self.holds is None) == (self.fields is None):
            raise fail("KV202", "a place has either `holds` or `fields`")
        return self


def _field_kind(value: object) -> str:
    return "(pad)" if isinstance(value, dict) and value.keys() & {"pad", "fill"} else "(place)"


FieldSpec = Annotated[
    Annotated[PadSpec, Tag("(pad)")] | Annotated[PlaceSpec, Tag("(place)")], Discriminator(_field_kind)
]


class ShardSpec(_Model):
    world: Annotated[int, *number(1)] = Field(description="Ranks that share a sequence.")
    interleave: Annotated[int, *number(1)] = Field(1, description="Tokens dealt at a time; divides block_size.")


class SlotsSpec(_Model):
    dtype: SlotType = Field("int64", description="What slot_mapping writes; append takes both.")
    skip: Annotated[int | None, *number(0)] = Field(None, description="A slot to skip, besides negative ones.")
    remap: Line | None = Field(None, description="The name of an argument: a table from slot to slot.")
    shard: ShardSpec | None = Field(None, description="Context parallel: which tokens lie on this rank.")


class FewSpec(_Model):
    up_to: Annotated[int, *number(1)] = Field(64, description="Tokens of a call that count as few, at the most.")
    tokens: Annotated[int | None, *power_of_two(1024)] = Field(None, description="Tokens of one program then.")
    num_warps: Annotated[int | None, *power_of_two(32)] = Field(None, description="Warps of one program then.")


class KernelSpec(_Model):
    tokens: Annotated[int | None, *power_of_two(1024)] = Field(None, description="Tokens of one program.")
    heads: Annotated[int | Literal["all"] | None, *power_of_two(1024, "all")] = Field(
        None, description="Heads of one program, or `all`."
    )
    num_warps: Annotated[int | None, *power_of_two(32)] = Field(None, description="Warps of one program.")
    few: FewSpec | None = Field(None, description="What is different in calls of few tokens.")


class ScheduleSpec(_Model):
    append: KernelSpec = Field(KernelSpec(), description="How append is divided among programs.")
    gather: KernelSpec = Field(KernelSpec(), description="How gather is divided among programs.")


class Spec(_Model):
    name: Line = Field(description="The layout's name, and that of the module generated for it.")
    summary: Line = Field("", description="One line on what it is and where it is found.")
    axes: AxesSpec = Field(AxesSpec(), description="Extents of the axes: constants, or `dynamic`.")
    block_size: Annotated[int | str, *number(1, LARGEST, "dynamic")] = Field(
        description="Tokens of a block; the maximum length where orders say `request` and `position`."
    )
    params: dict[str, Annotated[int, *number(1)]] = Field({}, description="Named numbers for use in orders.")
    streams: dict[str, LikeOrStream] = Field(
        {"key": StreamSpec(), "value": "key"},
        description="What is stored for a token; key and value where nothing is said.",
    )
    buffers: dict[str, PlaceSpec] = Field(description="The tensors of the pool.")
    slots: SlotsSpec = Field(SlotsSpec(), description="How slot numbers are written, and which are skipped.")
    fuse: FuseSpec | None = Field(None, description="Norm and rotary embedding in the same launch as append.")
    schedule: ScheduleSpec = Field(ScheduleSpec(), description="How kernels are divided; chosen by kvgen otherwise.")
    functions: Functions = Field(
        (), description="The functions that the module has: `[append, gather]`; all without it."
    )


@dataclass(frozen=True, slots=True)
class Reading:
    """A spec without the parts that were wrong, and where those stood: a section, or an entry of one."""

    spec: Spec
    wrong: frozenset[Location]
    problems: tuple[Diagnostic, ...]


def read_spec(source: Source) -> Reading:
    """Check a document against the models. What is wrong is reported, left out, and the rest goes on to resolve."""
    data = source.plain()
    if not isinstance(data, dict):
        hint = "begin with `name:`, `axes:`, `block_size:` and `buffers:`"
        problem = Diagnostic("KV203", f"expected a mapping, got {shown(data)}", source.at(()), hint)
        return Reading(_nothing(), frozenset({()}), (problem,))
    try:
        return Reading(Spec.model_validate(data), frozenset(), ())
    except ValidationError as error:
        errors = error.errors(include_url=False)
    problems, wrong = [], set()
    for item in errors:
        location = _location(item["loc"])
        wrong.add(location[: 2 if location[0] in ("axes", "params", "streams", "buffers") else 1])
        problems.append(_diagnose(source, item, location))
    for location in wrong:
        _leave_out(data, location)
    rest = {"name": "layout", "block_size": 1, "buffers": {}} | data
    return Reading(Spec.model_validate(rest), frozenset(wrong), tuple(problems))


def _location(steps: Location) -> Location:
    """Pydantic's location without the tags it puts after the name of a stream, a scale and a field's index."""
    tags = {2} if steps[0] == "streams" else {i for i in range(1, len(steps)) if isinstance(steps[i - 1], int)}
    tags |= {i for i in (5, 7) if steps[0] == "streams" and steps[i - 1 : i] == ("scale",)}
    if steps[0] == "fuse":
        tags = {i for i, step in enumerate(steps) if isinstance(step, str) and step.startswith("(")}
    return tuple(step for i, step in enumerate(steps) if i not in tags)


def _nothing() -> Spec:
    return Spec(name="layout", block_size=1, buffers={})


def _leave_out(data: dict[str, Any], location: Location) -> None:
    for step in location[:-1]:
        data = data[step]
    data.pop(location[-1], None)


def _diagnose(source: Source, error: Any, location: Location) -> Diagnostic:
    kind, value, key = error["type"], error["input"], location[-1]
    if kind == "extra_forbidden":
        return _unknown_key(source, location)
    if kind == "missing":
        _, owner = source.node(location[:-1])
        return Diagnostic("KV202", f"`{key}` is missing{_around(location)}", source.span(owner.start, owner.end))
    if kind.startswith("KV"):
        return Diagnostic(kind, error["ctx"]["message"], source.at(location), error["ctx"]["hint"])
    expected = {"list_type": "a list", "string_type": "text"}.get(kind, "a mapping")
    example = EXAMPLES.get(str(key)) if expected == "a mapping" else None
    hint = f"such as {example}" if example else None
    return Diagnostic("KV203", f"expected {expected}, got {shown(value)}", source.at(location), hint)


def _unknown_key(source: Source, location: Location) -> Diagnostic:
    key, owners = str(location[-1]), location[:-1]
    model = _model_at(source, location)
    known = list(model.model_fields)
    hint = OTHER_WORDS.get(key) or suggestion(key, known)
    if not owners and key in OF_TRANSFERS:
        hint = "it belongs to a file with `transfer`"
    if owners == ("axes",):
        return Diagnostic("KV302", f"unknown axis `{key}`", source.at_key(location), hint)
    return Diagnostic("KV201", f"unknown key `{key}`{_around(location)}", source.at_key(location), hint)


def _around(location: Location) -> str:
    """The mapping that a key is in, as a message names it."""
    return f" in `{location[-2]}`" if len(location) > 1 and isinstance(location[-2], str) else ""


def _model_at(source: Source, location: Location) -> type[_Model]:
    """The model that has the key at a location."""
    if len(location) == 1:
        return Spec
    if location[0] == "fuse":
        return fuse_spec.model_at(location)
    if location[0] == "slots":
        return ShardSpec if len(location) == 3 else SlotsSpec
    if location[0] == "schedule":
        return {2: ScheduleSpec, 3: KernelSpec}.get(len(location), FewSpec)
    if location[0] == "buffers":
        _, place = source.node(location[:-1])
        return PadSpec if isinstance(place, Mapping) and (place.find("pad") or place.find("fill")) else PlaceSpec
    if location[0] == "streams":
        if len(location) == 5 and location[3] == "zero":
            return ZeroSpec
        return {3: StreamSpec, 4: QuantSpec, 5: ScaleSpec, 6: OuterScaleSpec}[len(location)]
    return AxesSpec


def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of layouts and transfers, for editors; it knows the shorthands too."""
    from kvgen.spec_transfer import TransferSpec

    whole = _tidy(Spec.model_json_schema())
    definitions = whole["$defs"]
    place = definitions["PlaceSpec"]
    place["oneOf"] = [{"required": ["holds"]}, {"required": ["fields"]}]
    properties = place["properties"]
    short = {
        "type": "object",
        "description": "`{key: slot dim}`, short for `{holds: key, order: slot dim}`.",
        "properties": {"align": properties["align"], "regions": properties["regions"]},
        "patternProperties": {f"^(?!({'|'.join(KEYS)})$)": properties["order"]},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    }
    bare = {"type": "string", "description": "A stream, over the one axis, or part of one, that nothing above uses."}
    definitions["PlaceSpec"] = {"anyOf": [bare, place, short]}
    definitions["StreamSpec"] = {"anyOf": [definitions["StreamSpec"], {"type": "null"}]}
    stage = definitions["StageSpec"]
    stage |= {"minProperties": 1, "maxProperties": 1}
    definitions["StageSpec"] = {"anyOf": [{"enum": list(stage["properties"])}, stage]}
    layout = {key: value for key, value in whole.items() if key != "$defs"}
    other = _tidy(TransferSpec.model_json_schema(by_alias=True))
    definitions |= other.pop("$defs") | {"Layout": layout, "Transfer": other}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kvgen layout or transfer",
        "if": {"required": ["transfer"]},
        "then": {"$ref": "#/$defs/Transfer"},
        "else": {"$ref": "#/$defs/Layout"},
        "$defs": definitions,
    }


def _tidy(node: Any) -> Any:
    """Without what an editor would show to no one's use: titles made of names, and defaults that say nothing."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    dull = {"title"} | (
        {"default"} if node.get("default") in (None, "") or isinstance(node["default"], dict) else set()
    )
    return {key: _tidy(value) for key, value in node.items() if key not in dull}
