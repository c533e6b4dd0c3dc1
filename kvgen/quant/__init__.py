"""Encodings: what each says of itself, and its meaning in PyTorch. Importing this package imports no torch.

A mode is one file: its facts, ``to_codes`` and ``from_codes``. ``encode`` and ``decode`` put scales to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgen.quant import casts, e2m1, fp8, int4, int8, mx, turbo
from kvgen.quant.mode import Mode

if TYPE_CHECKING:
    from torch import Tensor

    from kvgen.layout import Encoding

__all__ = ["MODES", "Mode", "decode", "encode"]

MODES = {mode.name: mode for mode in (*fp8.MODES, *int8.MODES, *int4.MODES, *mx.MODES, *e2m1.MODES, *turbo.MODES)}
"""Every mode by name. A new one is a file and a term here."""


def encode(
    encoding: Encoding,
    values: Tensor,
    scale: Tensor | None = None,
    inverse: Tensor | None = None,
    zero: Tensor | None = None,
) -> Tensor:
    """Codes of float32 values: ``x / scale`` or ``x · (1 / scale)`` as the scale's arithmetic says, rounded, clamped.

    ``scale`` is float32 and broadcastable to the values; ``inverse`` is 1 / scale where it was handed in, and is what
    a product takes. ``zero``, as it is stored, is a minimum taken off the values, or a point put to what was rounded.
    Where the scale is 0 the codes are 0, or that point, whatever the values. float8 and 4-bit codes come as uint8.
    """
    import torch

    if encoding.mode == "cast":
        return casts.cast(encoding.code, values)
    if zero is not None and encoding.zero.kind == "minimum":
        values = values - zero
    if scale is not None:
        if encoding.scale.arithmetic == "multiply":
            scaled = values * (torch.ones_like(scale) / scale if inverse is None else inverse)
        else:
            scaled = values / scale
        values = torch.where(scale == 0, 0.0, scaled)
    if zero is not None and encoding.zero.kind == "point":
        values = int4.rounded(encoding, values) + zero
    return MODES[encoding.mode].to_codes(encoding, values)


def decode(encoding: Encoding, codes: Tensor, scale: Tensor | None = None, zero: Tensor | None = None) -> Tensor:
    """Float32 values of codes: code · scale, (code - point) · scale, or the rounded code · scale plus the minimum."""
    if encoding.mode == "cast":
        return casts.uncast(encoding.code, codes)
    values = MODES[encoding.mode].from_codes(codes)
    if zero is not None and encoding.zero.kind == "point":
        return (values - zero) * scale
    values = values if scale is None else values * scale
    return values if zero is None else values + zero
