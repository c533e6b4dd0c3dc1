"""Rotations: a Walsh-Hadamard transform along ``dim``, which makes the values of a row alike and is its own inverse."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def hadamard(values: Tensor) -> Tensor:
    """The last axis of float32 values, a power of two wide, turned: sums and differences, then times 1 / sqrt(dim).

    Values one apart come first, then those 2, 4, ... apart, each step in float32; the root is a float32 number.
    """
    import torch

    dims = values.shape[-1]
    for apart in (1 << step for step in range(dims.bit_length() - 1)):
        low, high = values.unflatten(-1, (-1, 2, apart)).unbind(-2)
        values = torch.stack([low + high, low - high], dim=-2).flatten(-3)
    return values * values.new_tensor(1 / math.sqrt(dims))
