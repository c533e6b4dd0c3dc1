"""Fused appends whose bytes are not the same everywhere: angles that a device computes, sums that depend on an
order.

What the module wrote is taken over by the reference where both decode to nearly the same; anything else shows in the
bytes.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from kvgen import reference
from kvgen.harness.bench import Bench
from kvgen.harness.compare import Mismatch
from kvgen.harness.pools import Pool
from kvgen.layout import Layout, Stream

STEPS = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-16, "float8_e4m3fn": 2**-2, "int8": 2**-5}
"""What a code may be off by, relative to the largest value of its row, where a value lies near the middle of two."""


def inexact(layout: Layout) -> bool:
    """Whether anything but the order of exact sums decides a bit."""
    rope = layout.fuse.rope
    return layout.fuse.norm_sum == "float32" or (rope is not None and rope.theta is not None)


def adopt_within_bounds(bench: Bench, pool: Pool, slots: Tensor, streams: Collection[str], layer: int | None) -> None:
    """Bytes of the streams that have stages, in the slots that were written."""
    table = next(iter(bench.remap_args(None).values()), None)
    numbers = reference.resolve_slots(bench.layout, slots, bench.sizes.slots, table)[1]
    options = {"layer": layer, "scales": bench.scales}
    sides = [
        reference.gather(bench.layout, tensors, slots, remap=table, **options)
        for tensors in (pool.actual, pool.expected)
    ]
    for name in streams:
        if not bench.layout.fuse.of(name) or not len(numbers):
            continue
        got, wanted = (side[name].float() for side in sides)
        limit = code_step(bench.layout.stream(name)) * wanted.nan_to_num().abs().amax(-1, keepdim=True) + 1e-30
        close = ((got - wanted).abs() <= limit) | (got.isnan() & wanted.isnan()) | (got == wanted)
        if not close.all():
            where = close.logical_not().nonzero()[0].tolist()
            raise Mismatch(f"{name}: token and place {where}: expected {wanted[*where]:g}, got {got[*where]:g}")
        for leaf in (leaf.name for leaf in bench.layout.leaves if leaf.stream == name):
            places = [reference.leaf_places(bench.layout, t)[leaf] for t in (pool.actual, pool.expected)]
            for mine, theirs in zip(*places, strict=True):
                mine, theirs = mine.select("layer", layer or 0), theirs.select("layer", layer or 0)
                index = mine.at(numbers, bench.sizes.block_size)
                theirs.tensor[index] = mine.tensor[index]


def code_step(stream: Stream) -> float:
    """The most that two neighbouring codes of a stream are apart, relative to the largest value of their row."""
    codes = stream.dtypes if stream.encoding is None else (stream.encoding.code,)
    return max(STEPS.get(code, 2**-1) for code in codes)
