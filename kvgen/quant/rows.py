"""Rows of a stream, ``[n, *axes]``, to the elements of its leaves and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgen.quant import decode, encode
from kvgen.quant.scales import dynamic_scale, group_amax, load, spread

if TYPE_CHECKING:
    from torch import Tensor

    from kvgen.layout import Scale, Stream


@dataclass(frozen=True, slots=True)
class Given:
    """Scales ``[n or 1, *counts]`` in float32; ``inverse`` where an argument was the inverse."""

    scale: Tensor
    inverse: Tensor | None = None


def counts(stream: Stream, scale: Scale, shape: Sequence[int]) -> list[int]:
    """How many scales a token has along each axis of its stream; 1 where all values share one."""
    steps = {axis.name: axis.step for axis in scale.axes}
    pairs = zip(stream.axes, shape, strict=True)
    return [-(-extent // steps[axis.name]) if axis.name in steps else 1 for axis, extent in pairs]


def stored_scale(scale: Scale, data: Tensor) -> Given:
    """Scales that were read from a pool, as bytes ``[n, *counts[:-1], counts[-1] · itemsize]``."""
    return Given(load(scale.dtype, data))


def argument_scale(scale: Scale, given: Tensor, counts: Sequence[int], layer: int) -> Given:
    """A scale that was handed in: a dimension for each of its axes, ``[1]`` for none."""
    import torch

    names = [axis.name for axis in scale.axes]
    if "layer" in names:
        given = given.select(names.index("layer"), layer)
    values = load(scale.dtype, given.contiguous()).reshape(1, *counts)
    return Given(torch.ones_like(values) / values, values) if scale.given == "inverse" else Given(values)


def encode_rows(stream: Stream, values: Tensor, given: Given | None) -> dict[str, Tensor]:
    """Elements of each leaf that rows fill: codes, and scales that are computed. float8 elements come as uint8."""
    import torch

    encoding, scale, values = stream.encoding, stream.encoding.scale, values.float()

    def each(factors: Tensor | None) -> Tensor | None:
        return None if factors is None else spread(scale, factors, stream.axes, values.shape[1:])

    if scale is None:
        return {stream.name: encode(encoding, values)}
    if not scale.dynamic:
        return {stream.name: encode(encoding, values, each(given.scale), each(given.inverse))}
    made = dynamic_scale(scale, group_amax(values, stream.axes, scale))
    used = made.value if scale.encode == "stored" else torch.where(made.value == 0, 0.0, made.exact)
    return {stream.name: encode(encoding, values, each(used)), scale.name: made.stored}


def decode_rows(stream: Stream, codes: Tensor, given: Given | None) -> Tensor:
    """Float32 values of codes ``[n, *axes]``, or of their bytes."""
    scale = stream.encoding.scale
    if scale is None:
        return decode(stream.encoding, codes)
    import torch

    code = getattr(torch, stream.encoding.code)
    shape = codes.view(code).shape[1:]
    return decode(stream.encoding, codes, spread(scale, given.scale, stream.axes, shape))
