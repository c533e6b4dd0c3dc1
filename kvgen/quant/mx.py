"""Micro-scaled formats: a power of two, one byte, for every 32 values along ``dim``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvgen.quant import fp8
from kvgen.quant.mode import Mode

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 32
E8M0_BIAS = 127


def e8m0_byte(exponent: Tensor) -> Tensor:
    """The scale byte (uint8) of 2^exponent, saturating at both ends; 255 is NaN and never made."""
    import torch

    return (exponent.clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS).to(torch.uint8)


def e8m0_value(byte: Tensor) -> Tensor:
    """2^(byte - 127) as float32. Byte 0 is a subnormal, which shifting the byte into place would lose."""
    import torch

    byte = byte.view(torch.uint8).int()
    bits = torch.where(byte == 0, 0x00400000, torch.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.view(torch.float32)


_GRID = fp8.GRIDS["float8_e4m3fn"]

MODES = (
    Mode(
        "mxfp8",
        _GRID.name,
        _GRID.largest,
        _GRID.largest,
        "float8_e8m0fnu",
        0.0,
        partial(fp8.to_codes, _GRID),
        partial(fp8.decode, _GRID),
        group=GROUP,
    ),
)
