"""Scales: made from magnitudes, put on their grid, stored, read back, and spread over the values of their groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgen.quant import fp8, mx

if TYPE_CHECKING:
    from torch import Tensor

    from kvgen.axes import Axis
    from kvgen.layout import Scale

LARGEST = {"float32": 3.4028234663852886e38, "bfloat16": 3.3895313892515355e38, "float16": 65504.0}
"""Largest finite value of each wide type a scale is stored in."""


@dataclass(frozen=True, slots=True)
class Dynamic:
    """A computed scale: ``exact`` before grid and rounding (float32), ``stored`` as the elements that are stored
    (one-byte ones as uint8), and ``value``, what those decode to (float32)."""

    exact: Tensor
    stored: Tensor
    value: Tensor


def group_amax(values: Tensor, axes: Sequence[Axis], scale: Scale) -> Tensor:
    """Largest magnitude of each group of values ``[T, *axes]``, in float32: ``[T, *counts]``, 1 where all share one.

    NaN does not count, an infinity counts as the largest finite number. The last group of an axis may be short.
    """
    import torch

    return _largest(torch.nan_to_num(values.float().abs(), nan=0.0, posinf=LARGEST["float32"]), axes, scale)


def group_extremes(values: Tensor, axes: Sequence[Axis], scale: Scale) -> tuple[Tensor, Tensor]:
    """Lowest and highest of each group, like ``group_amax``; both 0 where all are NaN, and neither ever -0."""
    import torch

    limit = LARGEST["float32"]
    bounded, missing = values.float().clamp(-limit, limit), values.isnan()
    highest = _largest(torch.where(missing, -torch.inf, bounded), axes, scale)
    lowest = -_largest(torch.where(missing, -torch.inf, -bounded), axes, scale)
    empty = lowest > highest
    return torch.where(empty | (lowest == 0), 0.0, lowest), torch.where(empty | (highest == 0), 0.0, highest)


def _largest(values: Tensor, axes: Sequence[Axis], scale: Scale) -> Tensor:
    import torch

    steps = {axis.name: axis.step for axis in scale.axes}
    for i, axis in enumerate(axes, start=1):
        if axis.name not in steps:
            values = values.amax(i, keepdim=True)
        elif steps[axis.name] > 1:
            values = torch.stack([group.amax(i) for group in values.split(steps[axis.name], i)], dim=i)
    return values


def dynamic_scale(scale: Scale, amax: Tensor, outer: Tensor | None = None) -> Dynamic:
    """The scale of groups with those largest magnitudes: amax / range, floored, on its grid, rounded to its type.

    It is counted in ``outer``: that times the range, in float32, divides then, and what is not positive is 0 before it
    is floored. A power of two is found from the quotient's exponent, in float64, where the quotient of two float32
    numbers never rounds onto one.
    """
    import torch

    # Divisors are tensors: a division by a Python number may become a product with its reciprocal.
    code_range, floor = amax.new_tensor(scale.code_range), amax.new_tensor(scale.floor)
    if outer is not None:
        code_range = code_range * outer
    if scale.floor_on == "amax":
        amax = torch.maximum(amax, floor)
    exact, quotient = amax / code_range, amax.double() / code_range.double()
    if outer is not None:  # nothing over nothing is nothing, nor is what is not positive
        exact, quotient = (torch.where(number > 0, number, 0.0) for number in (exact, quotient))
    if scale.floor_on == "scale":
        exact, quotient = torch.maximum(exact, floor), torch.maximum(quotient, floor.double())
    exact, quotient = exact.clamp(max=LARGEST["float32"]), quotient.clamp(max=2.0**128)
    if scale.dtype == "float8_e8m0fnu":
        stored = torch.where(quotient > 0, mx.e8m0_byte(exponent(quotient, scale.exponent)), 0)
    else:
        stored = store(scale.dtype, power_of_two(quotient, scale.exponent) if scale.grid == "pow2" else exact)
    return Dynamic(exact, stored, load(scale.dtype, stored))


def zero_point(lowest: Tensor, scale: Tensor, last: int) -> Tensor:
    """The code, a float32 number from 0 to ``last``, that stands for 0 above the lowest values; 0 of a scale of 0."""
    import torch

    return torch.where(scale == 0, 0.0, (-lowest / scale).round().clamp(0.0, last))


def exponent(quotient: Tensor, rounding: str) -> Tensor:
    """log2 of positive float64 numbers, exactly rounded up (``ceil``) or down (``floor``) to whole numbers."""
    import torch

    fraction, above = torch.frexp(quotient)  # fraction · 2^above, the fraction from a half to one
    return torch.where(fraction == 0.5, above - 1, above) if rounding == "ceil" else above - 1


def power_of_two(quotient: Tensor, rounding: str) -> Tensor:
    """The power of two next to float64 numbers, as float32; 0 of 0."""
    import torch

    power = ((exponent(quotient, rounding).long() + 1023) << 52).view(torch.float64)
    return torch.where(quotient > 0, power, 0.0).clamp(max=LARGEST["float32"]).float()


def store(dtype: str, scale: Tensor) -> Tensor:
    """Float32 scales and zeros as elements of a type: rounded to even, saturating; float8 as uint8.

    A power of two in one byte is the next one that is not below; 0 and what is negative are the smallest.
    """
    import torch

    if dtype == "float8_e8m0fnu":
        return torch.where(scale > 0, mx.e8m0_byte(exponent(scale.double(), "ceil")), 0)
    if dtype in fp8.GRIDS:
        return fp8.encode(fp8.GRIDS[dtype], scale)
    if dtype == "uint8":
        return scale.to(torch.uint8)
    return scale.clamp(-LARGEST[dtype], LARGEST[dtype]).to(getattr(torch, dtype))


def load(dtype: str, stored: Tensor) -> Tensor:
    """Stored scales and zeros as float32."""
    import torch

    if dtype == "float8_e8m0fnu":
        return mx.e8m0_value(stored)
    if dtype in fp8.GRIDS:
        return fp8.decode(fp8.GRIDS[dtype], stored)
    return stored.view(getattr(torch, dtype)).float()


def spread(scale: Scale, values: Tensor, axes: Sequence[Axis], shape: Sequence[int]) -> Tensor:
    """Scales ``[T, *counts]`` as one for every value, broadcastable to ``[T, *shape]``."""
    steps = {axis.name: axis.step for axis in scale.axes}
    for i, (axis, extent) in enumerate(zip(axes, shape, strict=True), start=1):
        if steps.get(axis.name, 1) > 1:
            values = values.repeat_interleave(steps[axis.name], dim=i).narrow(i, 0, extent)
    return values
