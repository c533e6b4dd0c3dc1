"""Casts without a scale: IEEE's rounding for 16- and 32-bit floats, the integer recipe for 8-bit ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgen.quant import fp8

if TYPE_CHECKING:
    from torch import Tensor


def cast(code: str, values: Tensor) -> Tensor:
    """Float32 values as elements of type ``code``, float8 ones as uint8.

    The wider types overflow to infinity, as IEEE has it; float8 saturates. NaN stays NaN with any payload.
    """
    import torch

    return fp8.encode(fp8.GRIDS[code], values) if code in fp8.GRIDS else values.to(getattr(torch, code))


def uncast(code: str, codes: Tensor) -> Tensor:
    """Elements of type ``code`` as float32, exactly."""
    import torch

    return fp8.decode(fp8.GRIDS[code], codes) if code in fp8.GRIDS else codes.view(getattr(torch, code)).float()
