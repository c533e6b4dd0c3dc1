"""Cases of ``append``, ``append_<stream>`` and ``append_positions``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvgen import reference
from kvgen.encodings import append_refusal
from kvgen.harness.bench import Bench, Case
from kvgen.harness.compare import Mismatch, compare_rows
from kvgen.harness.pools import GEOMETRIES
from kvgen.harness.tables import Tables, ranks
from kvgen.layout import Layout


def append_cases(layout: Layout, variants: int) -> Iterator[Case]:
    """Every case of a layout; ``variants`` is the number of choices of element types."""

    def case(name: str, body: Callable[..., None], *args: object, function: str = "append") -> Case:
        return Case(f"{function}/{name}", function, lambda bench: body(bench, *args))

    for count in (0, 1, 7):
        yield case(f"T{count}", _append, count)
    yield case("minus_one", _minus_one)
    yield case("prefill", _prefill)
    yield case("int32", _append, 7, "compact", "int32")
    for variant in range(1, variants):
        yield case(f"dtype{variant}", _append, 7, "compact", "int64", "dense", variant)
    for geometry in GEOMETRIES:
        if geometry not in ("compact", "odd_bytes"):
            yield case(geometry, _append, 9, geometry)
    yield case("odd_bytes", _odd_bytes)
    yield case("other_addresses", _other_addresses)
    yield case("huge_int32", _append, 5, "huge", "int32")
    for style in ("fused", "joint", "odd"):
        yield case(f"source_{style}", _append, 5, "compact", "int64", style)
    yield case("same_fused_source", _same_fused_source)
    yield case("skipped", _skipped, "int64")
    yield case("skipped_int32", _skipped, "int32")
    yield case("all_skipped", _all_skipped)
    yield case("longer_sources", _longer_sources)
    yield case("twice", _twice)
    yield case("one_slot_twice", _one_slot_twice)
    yield Case("append/then_gather", "append", _then_gather, needs=("gather",))
    yield case("no_blocks", _no_blocks)
    if any(len(s.axes) == 1 for s in layout.streams):
        yield case("headless_as_one_head", _one_head)
    if layout.slots.remap:
        yield case("remap", _remap, "int64", "int64")
        yield case("remap_int32", _remap, "int32", "int32")
        yield case("remap_mixed", _remap, "int32", "int64")
        yield case("remap_empty", _remap_empty)
    if layout.layers:
        yield case("first_layer", _layer, 0)
        yield case("last_layer", _layer, -1)
    for stream in layout.streams:
        function = f"append_{stream.name}"
        yield case("alone", _alone, stream.name, "compact", function=function)
        yield case("alone_padded_odd", _alone, stream.name, "padded_odd", function=function)
        if any(append_refusal(layout, other.name) for other in layout.streams):  # there is no call that writes all
            for count in (0, 1):
                name = f"T{count}"
                yield case(name, _append, count, "compact", "int32", "fused", 0, stream.name, function=function)
            yield case("prefill", _prefill, stream.name, function=function)
            yield case("skipped", _skipped, "int64", stream.name, function=function)
    for rank, suffix in ranks(layout):
        for name, body in (("request_ids", _by_request), ("decode", _decode)):
            yield case(f"{name}{suffix}", body, rank, "int64", function="append_positions")
    yield case("huge", _by_request, 0, "int32", "huge", function="append_positions")
    yield case("T0", _no_positions, function="append_positions")


def _append(
    bench: Bench,
    count: int,
    geometry: str = "compact",
    dtype: str = "int64",
    style: str = "dense",
    variant: int = 0,
    stream: str | None = None,
) -> None:
    pool = bench.pool(geometry, variant)
    slots = bench.slots(count)
    bench.append(pool, bench.sources(len(slots), pool, style), bench.tensor(slots, dtype), stream=stream)


def _prefill(bench: Bench, stream: str | None = None) -> None:
    pool = bench.pool("padded")
    slots = bench.prefill()
    bench.append(pool, bench.sources(len(slots), pool), bench.tensor(slots), stream=stream)


def _other_addresses(bench: Bench) -> None:
    """Tensors alike in all but where they start, one call after the other: what was kept of the first must not show."""
    slots = bench.tensor(bench.slots(4))
    for geometry, style in (("compact", "dense"), ("misaligned", "dense"), ("compact", "odd"), ("compact", "dense")):
        pool = bench.pool(geometry)
        sources = bench.sources(len(slots), pool, "dense")
        if style == "odd":
            for stream, source in sources.items():
                shifted = bench.random((source.numel() + 1,), source.dtype)[1:].view(source.shape)
                sources[stream] = shifted.copy_(source)
        bench.append(pool, sources, slots)


def _odd_bytes(bench: Bench) -> None:
    """Wide values at odd addresses: written like any other, or the tensor is refused by name."""
    pool = bench.pool("odd_bytes")
    slots = bench.tensor(bench.slots(5))
    try:
        bench.append(pool, bench.sources(len(slots), pool), slots)
    except (TypeError, ValueError) as error:
        if not any(b.name in str(error) for b in bench.layout.buffers):
            raise Mismatch(f"the refusal names no buffer: {error}") from error
        bench.check(pool)


def _same_fused_source(bench: Bench) -> None:
    pool = bench.pool()
    if len(set(pool.dtypes.values())) == 1:
        slots = bench.slots(7)
        bench.append(pool, bench.same_source(len(slots), pool), bench.tensor(slots))


def dead_slots(bench: Bench, dtype: str) -> list[int]:
    """Slots that name no token: negative, past the pool, or live only in their low 32 bits."""
    total, n = bench.sizes.slots, bench.sizes.block_size
    dead = [-1, -n, total, total + 1]
    dead += [-(2**31), 2**31 - 1] if dtype == "int32" else [2**32, 1 - 2**32, -(2**63), 2**63 - 1]
    if bench.layout.slots.skip is not None:
        dead.append(bench.layout.slots.skip)
    return dead


def poison(source: Tensor) -> float | int:
    """A value that shows wherever it lands: NaN, or the largest integer."""
    return float("nan") if source.dtype.is_floating_point else torch.iinfo(source.dtype).max


def _skipped(bench: Bench, dtype: str, stream: str | None = None) -> None:
    """Skipped tokens stand between live ones, and their source rows hold NaN."""
    pool = bench.pool()
    slots = [*bench.slots(4), *dead_slots(bench, dtype)]
    slots = [slots[i] for i in bench.shuffle(len(slots))]
    sources = bench.sources(len(slots), pool)
    live = reference.resolve_slots(bench.layout, bench.tensor(slots, dtype), bench.sizes.slots, None)[0]
    for source in sources.values():
        source[~live] = poison(source)
    bench.append(pool, sources, bench.tensor(slots, dtype), stream=stream)


def _minus_one(bench: Bench) -> None:
    """A token of a padded batch: the last slot, to which an index of -1 leads, is nobody's."""
    pool = bench.pool()
    slots = [-1, *[s for s in bench.slots(4) if s != bench.sizes.slots - 1]]
    bench.append(pool, bench.sources(len(slots), pool), bench.tensor(slots))


def _all_skipped(bench: Bench) -> None:
    pool = bench.pool()
    slots = dead_slots(bench, "int64")
    bench.append(pool, bench.sources(len(slots), pool), bench.tensor(slots))


def _longer_sources(bench: Bench) -> None:
    """Graphs pad keys: rows past the mapping hold NaN and belong to nobody."""
    pool = bench.pool()
    slots = bench.slots(5)
    sources = bench.sources(len(slots) + 6, pool)
    for source in sources.values():
        source[len(slots) :] = poison(source)
    bench.append(pool, sources, bench.tensor(slots))


def _twice(bench: Bench) -> None:
    pool = bench.pool()
    slots = bench.slots(5)
    bench.append(pool, bench.sources(len(slots), pool), bench.tensor(slots), times=2)


def _one_slot_twice(bench: Bench) -> None:
    """Two tokens, one slot: each byte is that of one of them, and nothing else changes."""
    pool, other = bench.pool(), bench.pool()
    slots = bench.slots(4)
    slots = bench.tensor([*slots, slots[0]])
    sources = bench.sources(len(slots), pool)
    args, options = bench.append_args(pool, sources, slots), bench.layer_args(None)
    bench.module.append(*args.values(), **options)
    table = next(iter(bench.remap_args(None).values()), None)
    shared = options | {"remap": table, "scales": bench.scales}
    reference.append(bench.layout, sources, pool.expected, slots, **shared)
    backwards = {s: x.flip(0) for s, x in sources.items()}
    reference.append(bench.layout, backwards, other.expected, slots.flip(0), **shared)
    for name, storage in pool.storages.items():
        first = other.storages[name].expected
        storage.expected = torch.where(storage.actual == first, first, storage.expected)
    bench.check(pool, slots, bench.streams, table, options.get("layer"))


def _then_gather(bench: Bench) -> None:
    """What was appended comes back."""
    pool = bench.pool()
    slots = bench.slots(9)
    sources = bench.sources(len(slots), pool)
    bench.append(pool, sources, bench.tensor(slots))
    rows = bench.gather(pool, bench.tensor(slots))
    for stream, source in sources.items():
        if stream not in bench.encoded:
            compare_rows(stream, rows[stream], source, list(slots))


def _no_blocks(bench: Bench) -> None:
    """A pool without blocks is a pool: every token is skipped."""
    pool = bench.pool()
    empty = dict(pool.actual)
    for buffer in bench.layout.buffers:
        for i, dim in enumerate(buffer.place.dims):
            if any(digit.axis == "block" and digit.size is None for digit in dim.digits):
                empty[buffer.name] = pool.actual[buffer.name].narrow(i, 0, 0)
    slots = bench.tensor([0, 1, -1])
    args = bench.append_args(pool, bench.sources(len(slots), pool), slots)
    args |= {name: tensor for name, tensor in empty.items() if name in args}
    bench.module.append(*args.values(), **bench.layer_args(None))
    bench.check(pool)


def _one_head(bench: Bench) -> None:
    """A stream without heads is taken as ``[T, dim]`` and as ``[T, 1, dim]``."""
    pool = bench.pool()
    slots = bench.tensor(bench.slots(5))
    sources = bench.sources(len(slots), pool)
    headless = [s.name for s in bench.layout.streams if len(s.axes) == 1]
    given = {s: x.unsqueeze(1) if s in headless else x for s, x in sources.items()}
    bench.module.append(*bench.append_args(pool, given, slots).values(), **bench.layer_args(None))
    table = next(iter(bench.remap_args(None).values()), None)
    options = bench.layer_args(None)
    reference.append(bench.layout, sources, pool.expected, slots, remap=table, scales=bench.scales, **options)
    bench.check(pool, slots, bench.streams, table, options.get("layer"))


def remap_table(bench: Bench, dtype: str) -> tuple[Tensor, list[int]]:
    """A table of slot → slot with negatives and targets past the pool, and slots to send through it.

    Live targets are distinct. The slots reach past the table and below zero, too.
    """
    total = bench.sizes.slots
    length = total + 5
    targets = [*bench.slots(total), total, total + 3, -1, -7, 2**31 - 1]
    targets += [-1] * (length - len(targets))
    table = bench.remap_table([targets[i] for i in bench.shuffle(length)], dtype)
    slots = [*bench.shuffle(length)[:8], length - 1, 0, length, length + 1, 2**31 - 1, -1, -length]
    return table, list(dict.fromkeys(slots))


def _remap(bench: Bench, slot_dtype: str, table_dtype: str) -> None:
    pool = bench.pool()
    table, slots = remap_table(bench, table_dtype)
    bench.append(pool, bench.sources(len(slots), pool), bench.tensor(slots, slot_dtype), remap=table)


def _remap_empty(bench: Bench) -> None:
    pool = bench.pool()
    slots = bench.slots(3)
    bench.append(pool, bench.sources(len(slots), pool), bench.tensor(slots), remap=bench.remap_table([]))


def _layer(bench: Bench, layer: int) -> None:
    pool = bench.pool()
    slots = bench.slots(5)
    layer %= bench.sizes.layers
    bench.append(pool, bench.sources(len(slots), pool), bench.tensor(slots), layer=layer)


def _alone(bench: Bench, stream: str, geometry: str) -> None:
    """One stream is written, every byte of the others stays."""
    pool = bench.pool(geometry)
    slots = [*bench.slots(6), -1]
    bench.append(pool, bench.sources(len(slots), pool), bench.tensor(slots), stream=stream)


def _append_positions(bench: Bench, tables: Tables, places, rank: int, dtype: str, geometry: str) -> None:
    pool = bench.pool(geometry)
    requests, positions = zip(*places, strict=True)
    sources = bench.sources(len(places) + 2, pool)
    args = bench.append_args(pool, sources, tables.table)
    args = {("block_table" if k == "slot_mapping" else k): v for k, v in args.items()}
    args = {k: v for k, v in args.items() if k not in bench.scales}
    remap = args.pop(bench.layout.slots.remap) if bench.layout.slots.remap else None
    args["positions"] = bench.tensor(positions, dtype)
    ids = None if list(requests) == list(range(len(requests))) else bench.tensor(requests, dtype)
    given = ({} if remap is None else {bench.layout.slots.remap: remap}) | bench.scale_args()
    options = bench.layer_args(None) | bench.rank_args(rank)
    named = {} if ids is None else {"request_ids": ids}
    bench.module.append_positions(*(args | given).values(), **named, **options)
    shared = {"remap": remap, "request_ids": ids, "scales": bench.scales, **options}
    reference.append_positions(bench.layout, sources, pool.expected, tables.table, args["positions"], **shared)
    request = bench.tensor(requests)
    slots = reference.locate(bench.layout, tables.table, request, bench.tensor(positions), bench.sizes.block_size, rank)
    bench.check(pool, slots, bench.streams, remap, options.get("layer"))


def _by_request(bench: Bench, rank: int, dtype: str, geometry: str = "compact") -> None:
    """Tokens of several requests in any order, with positions past the table and requests outside it."""
    tables = Tables(bench)
    _append_positions(bench, tables, [*tables.places(6, rank), *tables.dead_places()], rank, dtype, geometry)


def _decode(bench: Bench, rank: int, dtype: str) -> None:
    """One token a request: its last position before the table ends, or past it; more tokens than requests."""
    tables = Tables(bench)
    positions = [tables.last_position(r, rank) for r in range(tables.requests)]
    places = list(enumerate([*positions, 0]))
    _append_positions(bench, tables, places, rank, dtype, "compact")


def _no_positions(bench: Bench) -> None:
    tables = Tables(bench)
    pool = bench.pool()
    args = bench.append_args(pool, bench.sources(0, pool), tables.table)
    args = {k: v for k, v in args.items() if k not in bench.scales}
    remap = args.popitem() if bench.layout.slots.remap else None
    values = [*args.values(), bench.tensor([]), *([remap[1]] if remap else []), *bench.scale_args().values()]
    result = bench.module.append_positions(*values, **bench.layer_args(None), **bench.rank_args(0))
    if result is not None:
        raise Mismatch(f"append_positions: expected None, got {type(result).__name__}")
    bench.check(pool)
