"""The keys of ``fuse`` in a layout file."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)

from kvgen.model import Model
from kvgen.values import choice, fail, number, positive, shown


class RmsNormSpec(Model):
    eps: Annotated[float, *positive()] = Field(1e-6, description="Added to the mean of the squares.")
    weight: Annotated[str, *choice("plain", "plus_one", "none")] = Field(
        "plain", description="What values are multiplied by: the weight, one plus the weight, or nothing."
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_said(cls, data: object) -> object:
        return {} if data is None else data


class ThetaSpec(Model):
    theta: Annotated[float, *positive()] = Field(description="The base whose powers are the frequencies.")


def _source(value: object) -> str:
    return "(theta)" if isinstance(value, dict) else "(table)"


CosSin = Annotated[
    Annotated[ThetaSpec, Tag("(theta)")] | Annotated[str, *choice("joined", "split"), Tag("(table)")],
    Discriminator(_source),
]


class RopeSpec(Model):
    style: Annotated[str, *choice("neox", "interleaved")] = Field(
        "neox", description="Which values make a pair: i and i + rotary_dim / 2, or neighbours."
    )
    rotary_dim: Annotated[int | None, *number(2)] = Field(
        None, description="How many values are turned, all where nothing is said; the others are copied."
    )
    rotary: Annotated[str, *choice("first", "last")] = Field(
        "first", description="Whether the first or the last values of a row are turned."
    )
    cos_sin: CosSin = Field(
        "joined", description="A table with cosines and sines in one row, two tables, or `{theta: ...}`: computed."
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_said(cls, data: object) -> object:
        return {} if data is None else data


class StageSpec(Model):
    rms_norm: RmsNormSpec | None = Field(None, description="RMS norm over `dim`.")
    rope: RopeSpec | None = Field(None, description="Rotary embedding.")

    @model_validator(mode="before")
    @classmethod
    def _word(cls, data: object) -> object:
        """``rope`` alone is ``{rope: {}}``."""
        if isinstance(data, str):
            return {data: {}}
        return {key: {} if value is None else value for key, value in data.items()} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _one(self) -> StageSpec:
        if (self.rms_norm is None) == (self.rope is None):
            raise fail("KV202", "a stage is either `rms_norm` or `rope`", "write one a line, in the order they happen")
        return self


def _stages(value: object) -> object:
    if not isinstance(value, list):
        hint = "`key: [rms_norm, rope]`; other keys here are " + ", ".join(f"`{key}`" for key in KEYS)
        raise fail("KV203", f"expected a list of stages, got {shown(value)}", hint)
    return value


Stages = Annotated[list[StageSpec], BeforeValidator(_stages)]


def _stages_kind(value: object) -> str:
    return "(like)" if isinstance(value, str) else "(stages)"


LikeOrStages = Annotated[
    Annotated[Stages, Tag("(stages)")] | Annotated[str, Tag("(like)")], Discriminator(_stages_kind)
]


class QuerySpec(Model):
    heads: Annotated[int, *number(1)] = Field(description="Query heads.")
    stages: LikeOrStages | None = Field(
        None, description="The stream whose stages the query goes through too, or stages of its own."
    )


def _sections(value: object) -> tuple[int, ...]:
    if isinstance(value, list) and len(value) == 3 and all(type(part) is int and part >= 0 for part in value):
        return tuple(value)
    hint = "how many pairs turn by time, height and width: `[24, 20, 20]`"
    raise fail("KV203", f"expected three integers, got {shown(value)}", hint)


class PositionsSpec(Model):
    mrope: Annotated[
        tuple[int, ...],
        PlainValidator(_sections),
        WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 3, "maxItems": 3}),
    ] = Field(description="Three positions a token: how many pairs turn by time, height and width.")
    assign: Annotated[str, *choice("sections", "interleaved", "modulo")] = Field(
        "sections", description="Which position turns pair i: runs of pairs, i % 3 within its section, or i % 3."
    )


class SumSpec(Model):
    sum: Annotated[str, *choice("float64", "float32")] = Field(
        "float64", description="The type in which squares are summed: exact, or quicker and not the same everywhere."
    )


class FuseSpec(Model):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Stages]

    input: Annotated[str, *choice("separate", "packed_qkv")] = Field(
        "separate", description="A tensor for each stream, or one that holds the query and all streams."
    )
    query: QuerySpec | None = Field(None, description="Query heads that are worked on in the same launch.")
    positions: PositionsSpec | None = Field(None, description="One position a token where nothing is said.")
    rounding: Annotated[str, *choice("once", "chain")] = Field(
        "once", description="Rounded once, when it is stored, or to the source's type after each stage."
    )
    norm: SumSpec = Field(SumSpec(), description="How norms add up.")

    @property
    def stages(self) -> dict[str, list[StageSpec]]:
        """The stages of each stream."""
        return dict(self.model_extra or {})


KEYS = tuple(FuseSpec.model_fields)


def model_at(location: tuple[Any, ...]) -> type[Model]:
    """The model that has the key at a location inside ``fuse``."""
    *owners, _ = (step for step in location[1:] if not isinstance(step, int))
    named = {"query": QuerySpec, "positions": PositionsSpec, "norm": SumSpec, "rms_norm": RmsNormSpec, "rope": RopeSpec}
    if not owners:
        return FuseSpec
    if owners[-1] == "cos_sin":
        return ThetaSpec
    return StageSpec if (owners[0] not in KEYS and len(owners) == 1) or owners[-1] == "stages" else named[owners[-1]]
