"""Codebooks: the centroids of Lloyd and Max for N(0, 1), of 2, 3 or 4 bits; NaN is code 0.

A group is stretched until amax meets the outermost centroid and coded; the scale is the norm of its values over that of
the chosen centroids, so that a group keeps its norm. Codes are one a byte here: how they share bytes is the layout's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvgen.quant.mode import Mode

if TYPE_CHECKING:
    from torch import Tensor

    from kvgen.layout import Encoding

GROUP = 16


@dataclass(frozen=True, slots=True)
class Codebook:
    """The positive half of a codebook: its centroids, and the bounds between them, from each of which on a value goes
    up. The negative half mirrors it; the bound in the middle is 0, and 0 and -0 go up there."""

    bits: int
    centroids: tuple[float, ...]
    bounds: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"turbo{self.bits}"

    @property
    def values(self) -> tuple[float, ...]:
        """By code."""
        return (*(-value for value in reversed(self.centroids)), *self.centroids)

    @property
    def all_bounds(self) -> tuple[float, ...]:
        return (*(-bound for bound in reversed(self.bounds)), 0.0, *self.bounds)


CODEBOOKS = (
    Codebook(2, (0.452780, 1.510418), (0.981599,)),
    Codebook(3, (0.245094, 0.756005, 1.343909, 2.151946), (0.500550, 1.049957, 1.747927)),
    Codebook(
        4,
        (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
        (0.258222, 0.522404, 0.799550, 1.099286, 1.437139, 1.843532, 2.400803),
    ),
)


def encode(book: Codebook, encoding: Encoding, values: Tensor) -> Tensor:
    """Codes (uint8) of float32 values: how many bounds are not above them."""
    import torch

    codes = torch.bucketize(values, values.new_tensor(book.all_bounds), right=True)
    return torch.where(values.isnan(), 0, codes).to(torch.uint8)


def decode(book: Codebook, codes: Tensor) -> Tensor:
    """Centroids (float32) of codes."""
    import torch

    table = torch.tensor(book.values, dtype=torch.float32, device=codes.device)
    return table[codes.long() & (1 << book.bits) - 1]


def stretch(largest: float, amax: Tensor) -> Tensor:
    """What values with that largest magnitude are multiplied by to meet the outermost centroid; 1 where it is 0."""
    import torch

    factor = (amax.new_tensor(largest) / amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(amax == 0, 1.0, factor)


def norm_ratio(magnitudes: Tensor, chosen: Tensor) -> Tensor:
    """Norms of groups of 16 along the last axis over those of their centroids: ``[..., dim // 16]``, float32.

    Squares are added in float64, in the order of their index; the quotient of the roots is rounded once.
    """

    def norm(values: Tensor) -> Tensor:
        squares = values.double().square().unflatten(-1, (-1, GROUP))
        total = squares[..., 0]
        for lane in range(1, GROUP):
            total = total + squares[..., lane]
        return total.sqrt()

    return (norm(magnitudes) / norm(chosen)).float()


def _mode(book: Codebook) -> Mode:
    largest = book.centroids[-1]
    codes = (partial(encode, book), partial(decode, book))
    facts = {"group": GROUP, "bits": book.bits, "by_norm": True}
    return Mode(book.name, book.name, largest, largest, "float8_e4m3fn", 0.0, *codes, **facts)


MODES = tuple(map(_mode, CODEBOOKS))
