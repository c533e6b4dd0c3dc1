"""What the tests of encodings share: encodings with the defaults of their modes, and bytes as text."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvgen.axes import Axis
from kvgen.layout import Encoding, Scale, Stream
from kvgen.quant import MODES, fp8

INF, NAN, LARGEST = math.inf, math.nan, torch.finfo(torch.float32).max
FP8 = ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz")
GRIDS = tuple(fp8.GRIDS.values())
TOKEN = (Axis("block", None), Axis("slot", 16))


def hexes(codes: Tensor) -> str:
    return " ".join(f"{code:02X}" for code in codes.flatten().view(torch.uint8).tolist())


def numbers(text: str) -> list[float]:
    """``2^-9`` and plain numbers, also a product of both."""
    return [float(eval(word.replace("^", "**"), {"nan": NAN, "inf": INF})) for word in text.split()]


def bits(values: Tensor) -> list[int]:
    return values.contiguous().view(torch.int32).flatten().tolist()


def scale_of(mode: str, *axes: Axis, dynamic: bool = True, **options) -> Scale:
    """A scale with the defaults of its mode, for ``axes`` of the stream."""
    facts = MODES[mode]
    found = {"dtype": facts.scale_dtype, "code_range": facts.code_range}
    found |= {"floor_on": "scale", "floor": facts.floor} if facts.floor else {}
    return Scale("key.scale", (*TOKEN, *axes) if dynamic else axes, dynamic, stored=dynamic, **(found | options))


def encoding_of(mode: str, *axes: Axis, rounding: str = "even", clamp=None, **options) -> Encoding:
    clamp = clamp or MODES[mode].clamp
    return Encoding(mode, MODES[mode].code, rounding, clamp, scale_of(mode, *axes, **options))


def stream_of(encoding: Encoding, *extents: int) -> Stream:
    names = ("head", "dim")[-len(extents) :]
    axes = tuple(Axis(name, extent) for name, extent in zip(names, extents, strict=True))
    return Stream("key", axes, ("bfloat16", "float16", "float32"), 2, encoding)
