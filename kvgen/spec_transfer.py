"""The keys of a transfer's file and their types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from kvgen.diagnostics import Diagnostic
from kvgen.source import Location, Source
from kvgen.suggest import suggestion
from kvgen.values import Functions, Line, choice, fail, number, shown

OF_LAYOUTS = ("axes", "block_size", "params", "streams", "buffers", "slots", "fuse", "schedule")
"""Keys of a layout, which a transfer may be given by mistake."""

EXAMPLES = {"transfer": "`{from: one_layout, to: another}`", "grid": "`{programs: 32}`"}
"""What mappings look like, for those who write something else."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)


def _end(value: object) -> str | dict[str, Any]:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        hint = "the name of a layout, or `{layout: NAME}` with the keys that are replaced"
        raise fail("KV203", f"expected a layout, got {shown(value)}", hint)
    if not isinstance(value.get("layout"), str):
        raise fail("KV202", "`layout` is missing: the name of the one whose keys are replaced")
    return value


End = Annotated[
    str | dict[str, Any],
    PlainValidator(_end),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "description": "The name of a layout: here, in layouts/, or shipped."},
                {
                    "type": "object",
                    "description": "A layout with some of its keys replaced; those of `axes` and `params` one by one.",
                    "properties": {"layout": {"type": "string"}},
                    "required": ["layout"],
                },
            ]
        }
    ),
]


class EndsSpec(_Model):
    from_: End = Field(alias="from", description="The layout of the pools that are read.")
    to: End = Field(
        description="The layout of the pools that are written; `streams: from` in it takes the other's streams."
    )


class GridSpec(_Model):
    programs: Annotated[int | None, *number(1)] = Field(
        None, description="Programs at most, each of which strides over the work; without it there are enough for all."
    )


class TransferSpec(_Model):
    name: Line = Field(description="The transfer's name, and that of the module generated for it.")
    summary: Line = Field("", description="One line on what it is for.")
    transfer: EndsSpec = Field(description="From which layout to which.")
    layers: Annotated[str, *choice("one", "all")] = Field(
        "one", description="What a call moves: one layer, or all of them in one launch."
    )
    convert: Annotated[str | None, *choice("requantise")] = Field(
        None, description="Permission to decode and to encode anew, where the two sides store a stream differently."
    )
    grid: GridSpec = Field(GridSpec(), description="How many programs share the work.")
    functions: Functions = Field((), description="The functions that the module has: `[transfer]`; all without it.")


@dataclass(frozen=True, slots=True)
class Reading:
    """What could be made of a document; ``spec`` is None where what it rests on is wrong."""

    spec: TransferSpec | None
    problems: tuple[Diagnostic, ...]


MODELS: dict[Location, type[_Model]] = {(): TransferSpec, ("transfer",): EndsSpec, ("grid",): GridSpec}
HARMLESS = ("summary", "layers", "convert", "grid", "functions")
"""Keys whose mistakes do not keep the layouts from being looked at."""


def read_transfer(source: Source) -> Reading:
    """Check a document that has the key ``transfer`` against the models."""
    data = source.plain()
    try:
        return Reading(TransferSpec.model_validate(data), ())
    except ValidationError as error:
        errors = error.errors(include_url=False)
    problems = tuple(_diagnose(source, item) for item in errors)
    wrong = {item["loc"][0] for item in errors}
    unknown = {item["loc"][0] for item in errors if item["type"] == "extra_forbidden" and len(item["loc"]) == 1}
    rest = {"name": "transfer", **{key: value for key, value in data.items() if key not in wrong}}
    if wrong - unknown <= {*HARMLESS, "name"}:
        return Reading(TransferSpec.model_validate(rest), problems)
    return Reading(None, problems)


def _diagnose(source: Source, error: Any) -> Diagnostic:
    kind, location = error["type"], tuple(error["loc"])
    around = f" in `{location[-2]}`" if len(location) > 1 else ""
    if kind == "extra_forbidden":
        known = [field.alias or name for name, field in MODELS[location[:-1]].model_fields.items()]
        hint = suggestion(str(location[-1]), known)
        if location[0] in OF_LAYOUTS:
            hint = "a file is a layout, or a transfer between layouts: `{layout: NAME, ...}` replaces keys of a side"
        return Diagnostic("KV201", f"unknown key `{location[-1]}`{around}", source.at_key(location), hint)
    if kind == "missing":
        return Diagnostic("KV202", f"`{location[-1]}` is missing{around}", source.at_key(location[:-1]))
    if kind.startswith("KV"):
        return Diagnostic(kind, error["ctx"]["message"], source.at(location), error["ctx"]["hint"])
    message, hint = f"expected a mapping, got {shown(error['input'])}", f"such as {EXAMPLES[str(location[-1])]}"
    return Diagnostic("KV203", message, source.at(location), hint)
