"""Cases of ``gather``, ``gather_paged`` and ``allocate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvgen import reference
from kvgen.harness.bench import Bench, Case
from kvgen.harness.cases_append import dead_slots, remap_table
from kvgen.harness.compare import Mismatch
from kvgen.harness.pools import GEOMETRIES, compact_strides, tensor_shape
from kvgen.harness.tables import Tables, ranks
from kvgen.layout import Layout


def gather_cases(layout: Layout, variants: int) -> Iterator[Case]:
    """Every case of a layout; ``variants`` is the number of choices of element types."""

    def case(name: str, body: Callable[..., None], *args: object, function: str = "gather") -> Case:
        return Case(f"{function}/{name}", function, lambda bench: body(bench, *args))

    for count in (0, 1, 7):
        yield case(f"T{count}", _gather, count)
    for variant in range(1, variants):
        yield case(f"dtype{variant}", _gather, 7, "compact", "int64", variant)
    for geometry in GEOMETRIES:
        if geometry not in ("compact", "odd_bytes"):
            yield case(geometry, _gather, 9, geometry)
    yield case("huge_int32", _gather, 5, "huge", "int32")
    yield case("repeated_slots", _repeated)
    yield case("prefill", _prefill)
    yield case("other_addresses", _other_addresses)
    yield case("skipped_allocated", _skipped, "int64", None, False)
    yield case("skipped_strided", _skipped, "int64", "strided", False)
    yield case("skipped_dense_zeroed", _skipped, "int32", "dense", True)
    if layout.slots.remap:
        yield case("remap", _remap, "int64")
        yield case("remap_int32", _remap, "int32")
    if layout.layers:
        yield case("first_layer", _layer, 0)
        yield case("last_layer", _layer, -1)

    def paged(name: str, body: Callable[..., None], *args: object) -> Case:
        return case(name, body, *args, function="gather_paged")

    for rank, suffix in ranks(layout):
        yield paged(f"ragged{suffix}", _ragged, rank)
        yield paged(f"starts{suffix}", _ragged, rank, True)
    yield paged("out_huge", _ragged, 0, True, "strided", False, "int64", "huge")
    yield paged("zeroed", _ragged, 0, True, "dense", True)
    if any(stream.encoding and stream.encoding.rotation for stream in layout.streams):
        yield case("rotated", lambda bench: bench.gather(bench.pool(), bench.tensor(bench.slots(7)), rotated=True))
        yield paged("rotated", _ragged, 0, True, "dense", True, "int32", "compact", True)
    yield paged("nothing", _nothing_paged)
    yield case("smallest", _allocate, function="allocate")


def _gather(bench: Bench, count: int, geometry: str = "compact", dtype: str = "int64", variant: int = 0) -> None:
    bench.gather(bench.pool(geometry, variant), bench.tensor(bench.slots(count), dtype))


def _prefill(bench: Bench) -> None:
    bench.gather(bench.pool(), bench.tensor(bench.prefill()))


def _other_addresses(bench: Bench) -> None:
    """Pools alike in all but where they start, one call after the other."""
    slots = bench.tensor(bench.slots(4))
    for geometry in ("compact", "misaligned", "compact"):
        bench.gather(bench.pool(geometry), slots)


def _repeated(bench: Bench) -> None:
    slots = bench.slots(3)
    bench.gather(bench.pool(), bench.tensor([*slots, *slots[:2], slots[0]]))


def _skipped(bench: Bench, dtype: str, out: str | None, zero: bool) -> None:
    slots = [*bench.slots(3), *dead_slots(bench, dtype)]
    slots = [slots[i] for i in bench.shuffle(len(slots))]
    bench.gather(bench.pool(), bench.tensor(slots, dtype), out=out, zero_skipped=zero)


def _remap(bench: Bench, dtype: str) -> None:
    table, slots = remap_table(bench, dtype)
    bench.gather(bench.pool(), bench.tensor(slots, dtype), remap=table, out="dense")


def _layer(bench: Bench, layer: int) -> None:
    bench.gather(bench.pool(), bench.tensor(bench.slots(5)), layer=layer % bench.sizes.layers)


@dataclass(frozen=True)
class Ragged:
    """Requests to read: the table, lengths and bounds; where they start; and the slot of each row, None of no token."""

    given: tuple[Tensor, Tensor, Tensor]
    starts: Tensor | None
    rows: tuple[int | None, ...]

    @property
    def args(self) -> dict[str, Tensor]:
        return dict(zip(("block_table", "seq_lens", "cu_seq_lens"), self.given, strict=True))

    @property
    def options(self) -> dict[str, Tensor]:
        return {} if self.starts is None else {"starts": self.starts}


def ragged(bench: Bench, rank: int, with_starts: bool, dtype: str) -> Ragged:
    """Requests of several lengths, one of them empty and one cut short by its length; rows past all of them."""
    tables = Tables(bench)
    lengths = [min(tables.length, 2 + r) if r != 1 else 0 for r in range(tables.requests)]
    bounds = [1]  # row 0 belongs to no request
    for length in lengths:
        bounds.append(bounds[-1] + length)
    starts = [max(tables.length - length, 0) if r % 2 == 0 else 0 for r, length in enumerate(lengths)]
    starts = starts if with_starts else [0] * tables.requests
    seq_lens = [start + length for start, length in zip(starts, lengths, strict=True)]
    seq_lens[-1] -= 1
    if with_starts:
        seq_lens[0] -= 1  # the last row of request 0 lies at its length
    given = tables.table, bench.tensor(seq_lens, dtype), bench.tensor(bounds, dtype)
    rows: list[int | None] = [None] * (bounds[-1] + 2)
    for r, (low, high) in enumerate(pairwise(bounds)):
        for i in range(low, high):
            position = bench.tensor([i - low + starts[r]])
            slot = reference.locate(
                bench.layout, tables.table, bench.tensor([r]), position, bench.sizes.block_size, rank
            )
            rows[i] = int(slot) if int(position) < seq_lens[r] and int(slot) >= 0 else None
    return Ragged(given, bench.tensor(starts, dtype) if with_starts else None, tuple(rows))


def no_rows(bench: Bench) -> Ragged:
    """Requests without a token."""
    tables = Tables(bench)
    lengths, bounds = (bench.tensor([0] * (tables.requests + more), "int32") for more in (0, 1))
    return Ragged((tables.table, lengths, bounds), None, ())


def _ragged(
    bench: Bench,
    rank: int,
    with_starts: bool = False,
    out: str | None = None,
    zero: bool = False,
    dtype: str = "int32",
    geometry: str = "compact",
    rotated: bool = False,
) -> None:
    _paged(bench, ragged(bench, rank, with_starts, dtype), rank, out, zero, geometry, rotated)


def _nothing_paged(bench: Bench) -> None:
    _paged(bench, no_rows(bench), 0, None, False, "compact", False)


def _paged(
    bench: Bench, requests: Ragged, rank: int, out: str | None, zero: bool, geometry: str, rotated: bool
) -> None:
    pool, count = bench.pool(geometry), len(requests.rows)
    args: dict[str, Any] = {b.name: pool.actual[b.name] for b in bench.layout.buffers} | requests.args
    table = bench.remap_args(None)
    scales = bench.scale_args()
    remap = next(iter(table.values()), None)
    options: dict[str, Any] = bench.layer_args(None) | bench.rank_args(rank) | requests.options
    if rotated:
        options["rotated"] = True
    if out is None:
        options["total_tokens"] = count

    def expect(**shared: Any) -> dict[str, Tensor]:
        return reference.gather_paged(bench.layout, pool.expected, *requests.given, remap=remap, **shared)

    bench.read("gather_paged", pool, args | table | scales, options, count, expect, list(requests.rows), out, zero)


def _allocate(bench: Bench) -> None:
    """Zeroed tensors of the layout's shapes with the smallest strides."""
    layout, sizes = bench.layout, bench.sizes
    options: dict[str, Any] = bench.block_size_args() | {"device": bench.device}
    if layout.layers is not None and layout.layers.extent is None:
        options["num_layers"] = sizes.layers
    open_axes = {a.name for s in layout.streams for a in s.axes if a.extent is None}
    options |= {
        word: sizes.dynamic[axis] for axis, word in (("head", "num_heads"), ("dim", "head_dim")) if axis in open_axes
    }
    result = bench.module.allocate(sizes.blocks, **options)
    tensors = (result,) if len(layout.buffers) == 1 else tuple(result)
    for buffer, tensor in zip(layout.buffers, tensors, strict=True):
        shape = tensor_shape(layout, buffer, sizes)
        kind = torch.uint8 if buffer.dtypes == ("uint8",) else torch.bfloat16
        data = tensor.unsqueeze(-1).view(torch.uint8)
        if tuple(tensor.shape) != shape:
            raise Mismatch(f"allocate: {buffer.name} expected shape {shape}, got {tuple(tensor.shape)}")
        wanted = [s for n, s in zip(shape, compact_strides(buffer, shape), strict=True) if n > 1]
        strides = [s for n, s in zip(shape, tensor.stride(), strict=True) if n > 1]
        if strides != wanted:
            raise Mismatch(f"allocate: {buffer.name} expected strides {wanted}, got {strides}")
        if tensor.dtype != kind and getattr(torch, buffer.dtypes[0]) != tensor.dtype:
            raise Mismatch(f"allocate: {buffer.name} expected {kind}, got {tensor.dtype}")
        if data.count_nonzero():
            raise Mismatch(f"allocate: {buffer.name} is not zero")
