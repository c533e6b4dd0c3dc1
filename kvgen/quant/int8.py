"""8-bit integers: rounded, then clamped, then stored; NaN is 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgen.quant.mode import Mode

if TYPE_CHECKING:
    from torch import Tensor

    from kvgen.layout import Encoding

CLAMP = (-127, 127)


def round_away(values: Tensor) -> Tensor:
    """To the nearest whole number, halves away from zero. Adding a half first would round 0.49999997 up."""
    import torch

    whole = values.trunc()
    return torch.where((values - whole).abs() >= 0.5, whole + values.sign(), whole)


def encode(encoding: Encoding, values: Tensor) -> Tensor:
    """Codes (int8) of float32 values."""
    import torch

    whole = values.round() if encoding.rounding == "even" else round_away(values)
    low, high = encoding.clamp or CLAMP
    return torch.where(whole.isnan(), 0.0, whole.clamp(low, high)).to(torch.int8)


def decode(codes: Tensor) -> Tensor:
    """Values (float32) of codes."""
    import torch

    return codes.view(torch.int8).float()


MODES = (Mode("int8", "int8", 127.0, 127.0, "float32", 1e-6, encode, decode, clamp=CLAMP),)
