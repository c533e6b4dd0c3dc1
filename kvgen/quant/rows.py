"""Rows of a stream, ``[n, *axes]``, to the elements of its leaves and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgen.quant import MODES, decode, encode, turbo
from kvgen.quant.rotation import hadamard
from kvgen.quant.scales import LARGEST, dynamic_scale, group_amax, group_extremes, load, spread, zero_point
from kvgen.quant.scales import store as stored

if TYPE_CHECKING:
    from torch import Tensor

    from kvgen.layout import Scale, Stream


@dataclass(frozen=True, slots=True)
class Given:
    """Scales ``[n or 1, *counts]`` in float32; ``inverse`` where an argument was the inverse.

    ``outer`` is the static scale that ``scale`` is counted in, ``zero`` what lies under the codes. Before a dynamic
    scale is computed there is nothing but its ``outer`` one.
    """

    scale: Tensor | None = None
    inverse: Tensor | None = None
    outer: Tensor | None = None
    zero: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        """What codes are multiplied by."""
        return self.scale if self.outer is None else self.scale * self.outer


def counts(stream: Stream, scale: Scale, shape: Sequence[int]) -> list[int]:
    """How many scales a token has along each axis of its stream; 1 where all values share one."""
    steps = {axis.name: axis.step for axis in scale.axes}
    pairs = zip(stream.axes, shape, strict=True)
    return [-(-extent // steps[axis.name]) if axis.name in steps else 1 for axis, extent in pairs]


def stored_scale(scale: Scale, data: Tensor, outer: Tensor | None = None, zero: Tensor | None = None) -> Given:
    """Scales that were read from a pool, as bytes ``[n, *counts[:-1], counts[-1] · itemsize]``."""
    return Given(load(scale.dtype, data), None, outer, zero)


def argument_scale(scale: Scale, given: Tensor, counts: Sequence[int], layer: int) -> Given:
    """A scale that was handed in: a dimension for each of its axes, ``[1]`` for none."""
    import torch

    names = [axis.name for axis in scale.axes]
    if "layer" in names:
        given = given.select(names.index("layer"), layer)
    values = load(scale.dtype, given.contiguous()).reshape(1, *counts)
    return Given(torch.ones_like(values) / values, values) if scale.given == "inverse" else Given(values)


def encode_rows(stream: Stream, values: Tensor, given: Given | None) -> dict[str, Tensor]:
    """Elements of each leaf that rows fill: codes, and scales and zeros that are computed.

    float8 elements and codes narrower than a byte come as uint8, one of them each.
    """
    import torch

    encoding, scale, values = stream.encoding, stream.encoding.scale, values.float()
    if encoding.rotation:
        values = hadamard(values)

    def each(factors: Tensor | None) -> Tensor | None:
        return None if factors is None else spread(scale, factors, stream.axes, values.shape[1:])

    if scale is None:
        return {stream.name: encode(encoding, values)}
    if not scale.dynamic:
        return {stream.name: encode(encoding, values, each(given.scale), each(given.inverse))}
    if MODES[encoding.mode].by_norm:
        codes = encode(encoding, values * each(turbo.stretch(scale.code_range, group_amax(values, stream.axes, scale))))
        magnitudes = torch.nan_to_num(values.abs(), nan=0.0, posinf=LARGEST["float32"])
        ratio = turbo.norm_ratio(magnitudes, MODES[encoding.mode].from_codes(codes))
        return {stream.name: codes, scale.name: stored(scale.dtype, ratio)}
    outer, zero = None if given is None else given.outer, encoding.zero
    if zero is None:
        made = dynamic_scale(scale, group_amax(values, stream.axes, scale), outer)
    else:
        lowest, highest = group_extremes(values, stream.axes, scale)
        if zero.kind == "point" and not zero.clamped:
            lowest, highest = lowest.clamp(max=0.0), highest.clamp(min=0.0)
        made = dynamic_scale(scale, highest - lowest, outer)
    used = made.value if scale.encode == "stored" else torch.where(made.value == 0, 0.0, made.exact)
    used = used if outer is None else used * outer
    if zero is None:
        return {stream.name: encode(encoding, values, each(used)), scale.name: made.stored}
    under = stored(zero.dtype, lowest if zero.kind == "minimum" else zero_point(lowest, used, encoding.clamp[1]))
    codes = encode(encoding, values, each(used), None, each(load(zero.dtype, under)))
    return {stream.name: codes, scale.name: made.stored, zero.name: under}


def decode_rows(stream: Stream, codes: Tensor, given: Given | None, rotated: bool = False) -> Tensor:
    """Float32 values of codes ``[n, *axes]``, or of their bytes; those narrower than a byte come one a byte.

    What was rotated before it was encoded is turned back, unless it is wanted ``rotated``.
    """
    values = _decoded(stream, codes, given)
    return hadamard(values) if stream.encoding.rotation and not rotated else values


def _decoded(stream: Stream, codes: Tensor, given: Given | None) -> Tensor:
    encoding, scale = stream.encoding, stream.encoding.scale
    if scale is None:
        return decode(encoding, codes)
    import torch

    narrow = MODES[encoding.mode].bits < 8
    shape = codes.shape[1:] if narrow else codes.view(getattr(torch, encoding.code)).shape[1:]
    zero = None if given.zero is None else spread(scale, given.zero, stream.axes, shape)
    return decode(encoding, codes, spread(scale, given.whole, stream.axes, shape), zero)
