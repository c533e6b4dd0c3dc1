"""The modes of ``quant`` and what each one's codes and scale are where a layout does not say.

Not an implementation: what the modes compute is in ``kvgen.quant``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mode:
    """``code`` is the element type, ``largest`` the largest code, which amax meets.

    Integers have a ``clamp``, and a choice of rounding. ``floor`` is one on the scale, None where there is none.
    ``per`` is what the scale varies over, as a layout spells it, or None where it must be said; ``fixed`` scales have
    no other type than ``scale_dtype``.
    """

    code: str
    largest: float
    floor: float | None
    clamp: tuple[int, int] | None = None
    scale_dtype: str = "float32"
    per: str | None = None
    fixed: bool = False


SMALLEST_NORMAL = 2.0**-126
"""Of float32: below 2^-128 the inverse of a scale is infinite."""

MODES = {
    "fp8_e4m3": Mode("float8_e4m3fn", 448.0, SMALLEST_NORMAL),
    "fp8_e5m2": Mode("float8_e5m2", 57344.0, SMALLEST_NORMAL),
    "fp8_e4m3fnuz": Mode("float8_e4m3fnuz", 240.0, SMALLEST_NORMAL),
    "fp8_e5m2fnuz": Mode("float8_e5m2fnuz", 57344.0, SMALLEST_NORMAL),
    "int8": Mode("int8", 127.0, 1e-6, clamp=(-127, 127)),
    "mxfp8": Mode("float8_e4m3fn", 448.0, None, scale_dtype="float8_e8m0fnu", per="token head dim//32", fixed=True),
}

RESERVED_MODES = ("int4", "int4_asymmetric", "nvfp4", "mxfp4", "turbo2", "turbo3", "turbo4")
"""Modes the language keeps for what this version does not do."""

SCALE_DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "e8m0": "float8_e8m0fnu",
    "e4m3": "float8_e4m3fn",
}
"""The types of a scale: a layout's word and the element type it stands for."""

CASTS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""The types that ``store`` takes."""

STORED_ITEMSIZE = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
}
"""Bytes of each element type that codes and scales are stored in."""
