"""The four 8-bit floats, by integer operations: no cast of any compiler, device or library is asked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from kvgen.quant.mode import Mode

if TYPE_CHECKING:
    from torch import Tensor

    from kvgen.layout import Encoding


@dataclass(frozen=True, slots=True)
class Grid:
    """An 8-bit float and the numbers of its recipe, which works on the bits of a float32's magnitude.

    From ``smallest_normal`` on a code is the bits rounded to even at ``shift``, less ``rebias``; below, it is what
    adding ``magic`` in float32 leaves in the lowest bits. ``max_code`` is the code of ``largest``; from ``overflow`` on
    magnitudes would round past it. ``nan`` is what every NaN becomes. Without ``signed_zero`` there is no -0.
    """

    name: str
    largest: float
    shift: int
    rebias: int
    smallest_normal: int
    magic: int
    overflow: int
    max_code: int
    nan: int
    signed_zero: bool

    @property
    def mantissa_bits(self) -> int:
        return 23 - self.shift

    @property
    def bias(self) -> int:
        return 127 - (self.rebias >> self.mantissa_bits)

    def value(self, code: int) -> float:
        """The value of a code, 0 to 255."""
        magnitude, sign = code & 0x7F, -1.0 if code & 0x80 else 1.0
        if not self.signed_zero and code == self.nan:
            return math.nan
        if magnitude > self.max_code:
            return sign * math.inf if magnitude % (1 << self.mantissa_bits) == 0 else math.nan
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude % (1 << self.mantissa_bits)
        if exponent:
            mantissa += 1 << self.mantissa_bits
        return sign * math.ldexp(mantissa, max(exponent, 1) - self.bias - self.mantissa_bits)


_E4M3FN = Grid("float8_e4m3fn", 448.0, 20, 960, 0x3C800000, 0x46800000, 0x43E80000, 0x7E, 0x7F, True)
_E5M2 = Grid("float8_e5m2", 57344.0, 21, 448, 0x38800000, 0x43000000, 0x47700000, 0x7B, 0x7F, True)
_E4M3FNUZ = Grid("float8_e4m3fnuz", 240.0, 20, 952, 0x3C000000, 0x46000000, 0x43780000, 0x7F, 0x80, False)
_E5M2FNUZ = Grid("float8_e5m2fnuz", 57344.0, 21, 444, 0x38000000, 0x42800000, 0x47700000, 0x7F, 0x80, False)

GRIDS = {grid.name: grid for grid in (_E4M3FN, _E5M2, _E4M3FNUZ, _E5M2FNUZ)}
"""By element type."""


def encode(grid: Grid, values: Tensor) -> Tensor:
    """Codes (uint8) of float32 values: to the nearest, ties to even, past the largest to the largest."""
    import torch

    bits = values.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    finite = magnitude.clamp(max=grid.overflow)
    half, lsb = 1 << (grid.shift - 1), (finite >> grid.shift) & 1
    normal = ((finite + (half - 1) + lsb) >> grid.shift) - grid.rebias
    magic = torch.tensor(grid.magic, dtype=torch.int32, device=values.device)
    small = (finite.view(torch.float32) + magic.view(torch.float32)).view(torch.int32) - magic
    code = torch.where(finite < grid.smallest_normal, small, normal).clamp(max=grid.max_code)
    negative = (bits < 0) if grid.signed_zero else (bits < 0) & (code != 0)
    code = torch.where(negative, code | 0x80, code)
    return torch.where(is_nan, grid.nan, code).to(torch.uint8)


@cache
def _values(grid: Grid) -> tuple[float, ...]:
    return tuple(grid.value(code) for code in range(256))


def decode(grid: Grid, codes: Tensor) -> Tensor:
    """Values (float32) of codes (uint8)."""
    import torch

    table = torch.tensor(_values(grid), dtype=torch.float32, device=codes.device)
    return table[codes.view(torch.uint8).long()]


def to_codes(grid: Grid, encoding: Encoding, values: Tensor) -> Tensor:
    return encode(grid, values)


def _mode(name: str, grid: Grid) -> Mode:
    codes = (partial(to_codes, grid), partial(decode, grid))
    return Mode(name, grid.name, grid.largest, grid.largest, "float32", 2.0**-126, *codes)


MODES = (
    _mode("fp8_e4m3", _E4M3FN),
    _mode("fp8_e5m2", _E5M2),
    _mode("fp8_e4m3fnuz", _E4M3FNUZ),
    _mode("fp8_e5m2fnuz", _E5M2FNUZ),
)
