"""The values a layout file may hold: annotated types with their checks, their words and their JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvgen.quant import MODES
from kvgen.suggest import suggestion

ITEMSIZE = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of each element type that is stored as it comes."""

CASTS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""The types that ``store`` takes."""

SCALE_DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "e8m0": "float8_e8m0fnu",
    "e4m3": "float8_e4m3fn",
}
"""The types of a scale: a layout's word, and the element type it stands for."""

STORED_ITEMSIZE = ITEMSIZE | {"float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1}
"""Bytes of each element type of codes and scales."""

ZERO_DTYPES = {"minimum": ("float16", "float32", "bfloat16"), "point": ("uint8",)}
"""The types of a zero by its kind, the one it has where nothing is said first."""

DEFAULT_DTYPES = ("bfloat16", "float16")

SMALLEST_FLOAT, LARGEST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Of the numbers that float32 has in full precision."""

_POSITIVE_SCHEMA = {"type": "number", "exclusiveMinimum": 0, "maximum": LARGEST_FLOAT}

LARGEST = 2**31 - 1
"""The largest extent, block size, padding or alignment: offsets inside a block are 32-bit numbers."""


def fail(code: str, message: str, hint: str | None = None) -> PydanticCustomError:
    """What a validator raises; ``diagnose`` turns it into a diagnostic of that code."""
    return PydanticCustomError(code, "{message}", {"message": message, "hint": hint})


def shown(value: object) -> str:
    """A value as a message quotes it."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`" if len(text) <= 40 else f"`{text[:37]}...`"


def shown_number(value: object) -> str:
    """A value where a number is wanted: digits in quotes are text, and a message says so."""
    quoted = isinstance(value, str) and re.fullmatch(r"[-+]?[0-9.]+", value)
    return f"the text `{shown(value).strip('`')!r}`" if quoted else shown(value)


def spelled(value: object) -> str:
    """A value as a message quotes it; a small list or mapping is written out on one line."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not items or any(isinstance(item, list | dict) for item in items):
        return shown(value)
    words = [shown(item).strip("`") for item in items]
    if isinstance(value, list):
        return shown(f"[{', '.join(words)}]")
    return shown("{" + ", ".join(f"{key}: {word}" for key, word in zip(value, words, strict=True)) + "}")


def number(low: int, high: int = LARGEST, *words: str) -> tuple[PlainValidator, WithJsonSchema]:
    """Annotations of an integer from ``low`` to ``high``, or one of some words."""
    limits = f"an integer from {low} on" if high == LARGEST else f"an integer from {low} to {high}"
    expected = " or ".join([limits, *(f"`{word}`" for word in words)])

    def check(value: object) -> object:
        number = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        if number or (isinstance(value, str) and value in words):
            return value
        if isinstance(value, int) and value > high:
            raise fail("KV203", f"expected an integer from {low} to {high}, got {shown_number(value)}")
        raise fail("KV203", f"expected {expected}, got {shown_number(value)}")

    schema: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": high}
    if words:
        schema = {"anyOf": [schema, *({"const": word} for word in words)]}
    return PlainValidator(check), WithJsonSchema(schema)


def positive() -> tuple[PlainValidator, WithJsonSchema]:
    """Annotations of a number above zero that float32 has in full precision."""

    def check(value: object) -> float:
        if _is_positive(value):
            return float(value)
        raise fail(
            "KV203", f"expected a number from {SMALLEST_FLOAT:.3g} to {LARGEST_FLOAT:.3g}, got {shown_number(value)}"
        )

    return PlainValidator(check), WithJsonSchema(_POSITIVE_SCHEMA)


def _is_positive(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and SMALLEST_FLOAT <= value <= LARGEST_FLOAT


def choice(*words: str) -> tuple[PlainValidator, WithJsonSchema]:
    """Annotations of one of some words."""
    expected = " or ".join([", ".join(f"`{word}`" for word in words[:-1]), f"`{words[-1]}`"][len(words) == 1 :])

    def check(value: object) -> object:
        if isinstance(value, str) and value in words:
            return value
        raise fail("KV203", f"expected {expected}, got {shown(value)}")

    return PlainValidator(check), WithJsonSchema({"enum": list(words)})


def dtype_of(known: Collection[str], what: str = "dtype") -> tuple[PlainValidator, WithJsonSchema]:
    """Annotations of an element type, one of those known."""

    def check(value: object) -> object:
        if isinstance(value, str) and value in known:
            return value
        raise fail("KV207", f"unknown {what} {shown(value)}", suggestion(str(value), known))

    return PlainValidator(check), WithJsonSchema({"enum": list(known)})


def power_of_two(high: int, *words: str) -> tuple[PlainValidator, WithJsonSchema]:
    """Annotations of a power of two up to ``high``, which a tile's sides and a program's warps are, or some words."""
    powers = [1 << i for i in range(high.bit_length())]
    expected = " or ".join([f"a power of two from 1 to {high}", *(f"`{word}`" for word in words)])

    def check(value: object) -> object:
        if not isinstance(value, bool) and value in [*powers, *words]:
            return value
        raise fail("KV203", f"expected {expected}, got {shown(value)}")

    return PlainValidator(check), WithJsonSchema({"enum": [*powers, *words]})


def _line(value: object) -> str:
    if not isinstance(value, str):
        raise fail("KV203", f"expected text, got {shown(value)}")
    if not value.isprintable():
        raise fail("KV203", "expected one line of printable text")
    return value


def _no_heads(value: object) -> str:
    if value == "none":
        return "none"
    hint = "all streams have the heads of `axes: {head: ...}`; `head: none` is a stream they share"
    raise fail("KV203", f"expected `none`, got {shown(value)}", hint)


def _one_as_list(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise fail("KV203", f"expected a dtype or a list of them, got {shown(value)}")
    return tuple(value)


def _mode(value: object) -> str:
    if isinstance(value, str) and value in MODES:
        return value
    raise fail("KV203", f"expected the mode of an encoding, got {shown(value)}", suggestion(str(value), MODES))


def _clamp(value: object) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2 and all(type(side) is int for side in value):
        low, high = value
        if low < 0 < high:
            return low, high
    hint = "the smallest and the largest code: `[-127, 127]`"
    raise fail("KV203", f"expected a negative and a positive integer, got {spelled(value)}", hint)


def _floor(value: object) -> tuple[str, float]:
    if value == "none":
        return "none", 0.0
    if isinstance(value, dict) and len(value) == 1:
        ((on, number),) = value.items()
        if on in ("amax", "scale") and _is_positive(number):
            return on, float(number)
    hint = f"`{{scale: 1.0e-6}}`, `{{amax: 1.0e-4}}`; numbers from {SMALLEST_FLOAT:.3g} on"
    raise fail("KV203", f"expected a floor on `scale` or on `amax`, or `none`, got {spelled(value)}", hint)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise fail("KV203", f"expected `true` or `false`, got {shown(value)}")
    return value


def _per(value: object) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    hint = "`[]` for one of the whole tensor, `head`, `token head`, `token head dim//32` and the like"
    raise fail("KV203", f"expected the axes a scale varies over, got {shown(value)}", hint)


def _regions(value: object) -> tuple[str, ...]:
    names = value.split() if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise fail("KV203", f"expected the axes of regions, got {shown(value)}", "`[layer]`: an allocation for each")
    return tuple(names)


def _names(value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        got = "an empty list" if names == [] else shown(value)
        raise fail("KV203", f"expected the name of a function or a list of such names, got {got}")
    return tuple(names)


def _holds(value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise fail("KV203", f"expected the name of a stream or a list of two, got {shown(value)}")
    if len(names) not in (1, 2):
        raise fail("KV203", f"expected one stream or two, got {len(names)}", "lay more than two out with `fields`")
    return tuple(names)


def _order(value: object) -> str | tuple[str, ...]:
    if isinstance(value, list):
        return tuple(_order_text(item) for item in value)
    return _order_text(value)


def _order_text(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        hint = "an order is `block slot head dim`, or a list of such terms"
        raise fail("KV203", f"expected an order, got {shown(value)}", hint)
    return value


Extent = Annotated[int | Literal["dynamic"] | None, *number(1, LARGEST, "dynamic")]
_DTYPE_SCHEMA = {"enum": list(ITEMSIZE)}
Dtype = Annotated[str, *dtype_of(ITEMSIZE)]
Line = Annotated[str, PlainValidator(_line), WithJsonSchema({"type": "string"})]
Order = Annotated[
    str | tuple[str, ...] | None,
    PlainValidator(_order),
    WithJsonSchema(
        {
            "description": "What it repeats over, slowest first: `block head dim//8 slot dim%8`, or a list of terms. "
            "Terms in parentheses share a dimension; `1` is a dimension of size one.",
            "anyOf": [
                {"type": "string"},
                {"const": 1},
                {"type": "array", "items": {"anyOf": [{"type": "string"}, {"const": 1}]}},
            ],
        }
    ),
]
NoHeads = Annotated[str | None, PlainValidator(_no_heads), WithJsonSchema({"const": "none"})]
Dtypes = Annotated[
    tuple[Dtype, ...],
    BeforeValidator(_one_as_list),
    WithJsonSchema({"anyOf": [_DTYPE_SCHEMA, {"type": "array", "items": _DTYPE_SCHEMA, "minItems": 1}]}),
]
Holds = Annotated[
    tuple[str, ...] | None,
    PlainValidator(_holds),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}]}
    ),
]
Regions = Annotated[
    tuple[str, ...],
    PlainValidator(_regions),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["layer", "kv", "layer kv"]},
                {"type": "array", "items": {"enum": ["layer", "kv"]}, "minItems": 1, "uniqueItems": True},
            ]
        }
    ),
]
Functions = Annotated[
    tuple[str, ...],
    PlainValidator(_names),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
]
SlotType = Annotated[Literal["int32", "int64"], *choice("int64", "int32")]
ModeName = Annotated[str, PlainValidator(_mode), WithJsonSchema({"enum": list(MODES)})]
Clamp = Annotated[
    tuple[int, int] | None,
    PlainValidator(_clamp),
    WithJsonSchema({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}),
]
Flag = Annotated[bool, PlainValidator(_flag), WithJsonSchema({"type": "boolean"})]
_FLOOR_SCHEMA = {
    "type": "object",
    "properties": {
        "scale": {"description": "The smallest scale.", **_POSITIVE_SCHEMA},
        "amax": {"description": "The smallest amax.", **_POSITIVE_SCHEMA},
    },
    "additionalProperties": False,
    "minProperties": 1,
    "maxProperties": 1,
}
Floor = Annotated[
    tuple[str, float] | None,
    PlainValidator(_floor),
    WithJsonSchema({"anyOf": [{"const": "none"}, _FLOOR_SCHEMA]}),
]
Per = Annotated[
    str | tuple[str, ...] | None,
    PlainValidator(_per),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
