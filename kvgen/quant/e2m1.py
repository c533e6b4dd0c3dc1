"""4-bit floats, e2m1: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, a sign above them; NaN is 0.

Codes are one a byte here: how two of them share one is the layout's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgen.quant.mode import Mode

if TYPE_CHECKING:
    from torch import Tensor

    from kvgen.layout import Encoding

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By code; the sign is bit 3."""


def encode(encoding: Encoding, values: Tensor) -> Tensor:
    """Codes (uint8, the low four bits) of float32 values: to the nearest, ties to the even code, past 6 to 6."""
    import torch

    magnitude = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for below in range(7):
        bound = (VALUES[below] + VALUES[below + 1]) / 2
        code += magnitude >= bound if below % 2 else magnitude > bound
    code = torch.where(values.signbit(), code | 8, code)
    return torch.where(values.isnan(), 0, code).to(torch.uint8)


def decode(codes: Tensor) -> Tensor:
    """Values (float32) of codes."""
    import torch

    table = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.float32, device=codes.device)
    return table[codes.long() & 15]


MODES = (
    Mode("nvfp4", "e2m1", 6.0, 6.0, "float8_e4m3fn", 0.0, encode, decode, group=16, bits=4, counted=True),
    Mode("mxfp4", "e2m1", 6.0, 6.0, "float8_e8m0fnu", 0.0, encode, decode, group=32, bits=4),
)
