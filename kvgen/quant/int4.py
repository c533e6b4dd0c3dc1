"""4-bit integers: two's complement around zero, or steps above the lowest value; NaN is 0.

Codes are one a byte here: how two of them share one is the layout's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgen.quant.int8 import round_away
from kvgen.quant.mode import Mode

if TYPE_CHECKING:
    from torch import Tensor

    from kvgen.layout import Encoding

CLAMP = (-7, 7)
STEPS = 15


def rounded(encoding: Encoding, values: Tensor) -> Tensor:
    """Float32 values to the nearest whole numbers; NaN stays."""
    return values.round() if encoding.rounding == "even" else round_away(values)


def encode(encoding: Encoding, values: Tensor) -> Tensor:
    """Codes (uint8, the low four bits) of float32 values."""
    import torch

    whole = rounded(encoding, values)
    low, high = encoding.clamp
    return torch.where(whole.isnan(), 0.0, whole.clamp(low, high)).to(torch.int8).view(torch.uint8) & 15


def decode_signed(codes: Tensor) -> Tensor:
    """Values (float32) of two's complement codes."""
    return ((codes.int() & 15) ^ 8).float() - 8


def decode_unsigned(codes: Tensor) -> Tensor:
    """Values (float32) of codes from 0 to 15."""
    return (codes.int() & 15).float()


MODES = (
    Mode("int4", "int4", 7.0, 7.0, "float16", 0.0, encode, decode_signed, clamp=CLAMP, bits=4),
    Mode(
        "int4_asymmetric",
        "uint4",
        float(STEPS),
        float(STEPS),
        "float16",
        0.0,
        encode,
        decode_unsigned,
        clamp=(0, STEPS),
        bits=4,
        asymmetric=True,
    ),
)
