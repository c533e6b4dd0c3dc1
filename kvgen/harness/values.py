"""What encoded streams are fed: values with magnitudes of all sizes, rows of every edge, and static scales."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvgen.harness.pools import Pool, Sizes, random_bytes
from kvgen.layout import Encoding, Layout, Scale, Stream
from kvgen.quant import MODES
from kvgen.quant.e2m1 import VALUES
from kvgen.quant.fp8 import GRIDS
from kvgen.quant.scales import store
from kvgen.quant.turbo import CODEBOOKS
from kvgen.views import leaf_views

STATIC = (0.013, 37.0, 1.0, 0.25, 7.0, 41.0)
"""Static scales: the streams of a layout start at different ones."""

FACTORS = (1.0, -1.0, 0.25, -8.0, 7.0, 13.0, -15.0)
"""What rows are multiplied by. A product with the inverse of 7, 13 or 15 misses what a division by it meets."""


def random_values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal values times a power of two for each row (the first dimension), and rows of any bit pattern."""
    powers = torch.randint(-14, 15, (shape[0], *[1] * (len(shape) - 1)), generator=generator)
    values = (torch.randn(shape, generator=generator) * 2.0**powers).to(dtype)
    patterns = random_bytes(values[::8].numel() * dtype.itemsize, generator)
    values[::8] = patterns.view(dtype).view(values[::8].shape)
    return values


def scale_arguments(stream: Stream) -> list[Scale]:
    """The static scales of a stream that are arguments: its own, or the one that its own is counted in."""
    found = [part for part in (stream.scale, stream.scale and stream.scale.scale) if part is not None]
    return [scale for scale in found if not scale.stored]


def static_scales(
    layout: Layout, sizes: Sizes, device: str, variant: int, streams: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """A tensor for each scale that is an argument, by its name; those of more than one are slices of wider tensors.

    ``streams`` are those whose scales are asked for, in their order, all without it.
    """
    found = {}
    for index, stream in enumerate(layout.streams if streams is None else map(layout.stream, streams)):
        for scale in scale_arguments(stream):
            found.setdefault(scale.argument, _static(scale, stream, sizes, index + variant).to(device))
    return found


def _static(scale: Scale, stream: Stream, sizes: Sizes, start: int) -> Tensor:
    shape = [-(-_extent(axis, sizes) // axis.step) for axis in scale.axes] or [1]
    values = torch.tensor([STATIC[(start + i) % len(STATIC)] for i in range(math.prod(shape))]).view(shape)
    values = store(scale.dtype, 1 / values if scale.given == "inverse" else values)
    if values.dtype == torch.uint8:
        values = values.view(getattr(torch, scale.dtype))
    wide = torch.zeros(*shape, 3, dtype=values.dtype)
    wide[..., 1] = values
    return wide[..., 1]


def fill_static(layout: Layout, pool: Pool) -> None:
    """Static scales that lie in buffers: such as a caller stores, but for some of any bit pattern."""
    scales = [s.scale for s in layout.streams if s.scale and s.scale.stored and not s.scale.dynamic]
    for side in (pool.actual, pool.expected) if scales else ():
        views = leaf_views(layout, side)
        for index, scale in enumerate(scales):
            view = views[scale.name].tensor
            places = torch.arange(view[..., 0].numel()).view(view.shape[:-1])
            values = torch.tensor(STATIC)[(places + index) % len(STATIC)]
            data = store(scale.dtype, values).unsqueeze(-1).view(torch.uint8).to(view.device)
            kept = (places % 5 == 4).to(view.device)
            view[~kept] = data[~kept]


def _extent(axis, sizes: Sizes) -> int:
    return axis.extent if axis.extent is not None else sizes.of(axis.name)


def edge_rows(stream: Stream, shape: tuple[int, ...], dtype: torch.dtype, static: float) -> Tensor:
    """``[n, *shape]``: a row for each edge of the encoding and of the type the stream comes in.

    ``static`` is a scale of the stream where it is given; then boundaries of codes lie at their multiples.
    """
    width, encoding = math.prod(shape), stream.encoding
    rows = [_repeat(values, width) for values in _edges(encoding, dtype, static)]
    boundaries = _boundaries(encoding)
    top = encoding.scale.code_range if encoding.scale and encoding.scale.dynamic else boundaries[-1]
    # The largest code stands first in every group, so that a computed scale is a power of two; then 0, if it is lowest.
    places = torch.arange(width) % shape[-1] % (stream.group or shape[-1])
    lowest = (places == 1) & (encoding.zero is not None)
    for factor in FACTORS:
        for start in range(0, len(boundaries), width // 2 + 1):  # each lies in two rows, at another place of its group
            row = torch.where(places == 0, top, _repeat(boundaries[start:] + boundaries[:start], width))
            rows.append(torch.where(lowest, 0.0, row) * (factor * static))
    return torch.stack(rows).to(dtype).view(len(rows), *shape)


def _repeat(values: list[float], width: int) -> Tensor:
    return torch.tensor((values * -(-width // len(values)))[:width], dtype=torch.float64)


def _boundaries(encoding: Encoding) -> list[float]:
    """Magnitudes on, between and just beside codes, past the largest one too."""
    if encoding.code in GRIDS:
        grid = GRIDS[encoding.code]
        codes = [grid.value(code) for code in range(grid.max_code + 1)]
        past = [codes[-1] * factor for factor in (1.03, 1.04, 1.05, 1.08, 2.0)]
    elif encoding.mode == "cast":
        return [1.0, 1.00390625, 1.01171875, 65504.0, 65519.0, 65520.0, 2.0**-24, 2.0**-25, 2.0**-126]
    elif book := next((book for book in CODEBOOKS if book.name == encoding.mode), None):
        codes, past = [0.0, *book.centroids], [*book.bounds, 2 * book.centroids[-1]]
    elif encoding.code == "e2m1":
        codes = list(VALUES)
        past = [codes[-1] + 1, codes[-1] + 2, 2 * codes[-1]]
    else:
        codes = [float(code) for code in range(int(MODES[encoding.mode].largest) + 1)]
        past = [] if encoding.zero else [codes[-1] + 0.5, codes[-1] + 1, codes[-1] + 1.5, 2 * codes[-1]]
    middles = [(low + high) / 2 for low, high in pairwise(codes)]
    beside = [middle * factor for middle in middles for factor in (1 - 2**-7, 1 + 2**-7)]
    return [*past, *middles, *beside, *codes]


def _edges(encoding: Encoding, dtype: torch.dtype, static: float) -> Iterator[list[float]]:
    info = torch.finfo(dtype)
    largest, tiny = info.max, info.tiny * info.eps  # the smallest subnormal
    nan, inf = math.nan, math.inf
    yield [0.0]
    yield [-0.0]
    yield [0.0, -0.0]
    yield [1.5, 2.0, 0.75]  # one-sided
    yield [-1.5, -2.0, -0.75]
    yield [3.0, *[0.0] * 63]
    yield [tiny, -tiny, 3 * tiny, info.tiny, -info.tiny, 0.0]
    yield [tiny]
    yield [nan]
    yield [nan, 1.0, -2.0, 0.5]
    yield [inf, 1.0, -2.0, 0.5]
    yield [-inf, 1.0, -2.0, 0.5]
    yield [inf, -inf, nan, 0.0, -0.0]
    yield [largest, -largest, largest / 2, 1.0]
    for amax in (1e-30, 1e38, 1e-4, 1e-6 * 127, 2.0**-126, static, 464 * static, 1e6 * static):
        yield [min(amax, largest), -min(amax, largest) / 3, 0.0, min(amax, largest) / 7]
