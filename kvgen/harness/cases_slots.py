"""Cases of ``slot_mapping`` and ``fill_slots``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvgen import reference
from kvgen.harness.bench import DTYPES, Bench, Case
from kvgen.harness.compare import compare_bytes, compare_numbers
from kvgen.harness.tables import Tables, ranks
from kvgen.layout import Layout


def slot_cases(layout: Layout) -> Iterator[Case]:
    """Every case of a layout, each for every rank."""
    for rank, suffix in ranks(layout):
        yield from _rank_cases(rank, suffix)


def _rank_cases(rank: int, suffix: str) -> Iterator[Case]:
    def case(name: str, body: Callable[..., None], *args: object, function: str = "slot_mapping") -> Case:
        return Case(f"{function}/{name}{suffix}", function, lambda bench: body(bench, rank, *args))

    for dtype in DTYPES:
        yield case(f"decode_positions_{dtype}", _decode, "positions", dtype)
        yield case(f"decode_context_lens_{dtype}", _decode, "context_lens", dtype)
        yield case(f"request_ids_{dtype}", _request_ids, dtype)
        yield case(f"prefill_positions_{dtype}", _prefill_positions, dtype)
        yield case(f"prefill_context_lens_{dtype}", _prefill_lens, dtype)
    yield case("padded", _padded)
    yield case("out", _out)
    yield case("empty", _empty)
    yield case("rows", _fill, function="fill_slots")
    yield case("out", _fill_out, function="fill_slots")


def _map(bench: Bench, tables: Tables, rank: int, **options: Any) -> None:
    """Call with ``block_table`` and options, compare with the reference; ``out`` may be given as a length."""
    positions = options.pop("positions", None)
    options |= bench.rank_args(rank) | bench.block_size_args()
    length = options.pop("out", None)
    if length is None:
        result = bench.module.slot_mapping(tables.table, positions, **options)
        compare_numbers(
            "slot_mapping", result, reference.slot_mapping(bench.layout, tables.table, positions, **options)
        )
        return
    storage, view = poisoned(bench, length)
    other = storage.clone()
    result = bench.module.slot_mapping(tables.table, positions, out=view, **options)
    target = other[8 : 8 + length]
    reference.slot_mapping(bench.layout, tables.table, positions, out=target, **options)
    compare_numbers("slot_mapping", result, target)
    compare_numbers("slot_mapping out", view, target)
    compare_bytes("slot_mapping out", storage, other)


def poisoned(bench: Bench, length: int) -> tuple[Tensor, Tensor]:
    """A storage of slot numbers full of a poison, and ``length`` of them in its middle."""
    kind = DTYPES[bench.layout.slots.dtype]
    storage = torch.full((length + 16,), 123_456_789, dtype=kind, device=bench.device)
    return storage, storage[8 : 8 + length]


def _decode(bench: Bench, rank: int, name: str, dtype: str) -> None:
    """One token a request, at the first, last and any position, before it, and past the table."""
    tables = Tables(bench)
    n, end = tables.virtual, tables.length
    for position in (0, n - 1, n, end - 1, end, -1, 2**31 - 1, bench.below(end)):
        values = [max(position - r, -1) if position < 2**31 - 1 else position for r in range(tables.requests)]
        _map(bench, tables, rank, **{name: bench.tensor(values, dtype)})


def _request_ids(bench: Bench, rank: int, dtype: str) -> None:
    tables = Tables(bench)
    places = [*tables.places(20, rank), *tables.dead_places()]
    requests, positions = zip(*places, strict=True)
    _map(bench, tables, rank, positions=bench.tensor(positions, dtype), request_ids=bench.tensor(requests, dtype))


def _loads(bench: Bench, tables: Tables) -> tuple[list[int], list[int]]:
    """New tokens of each request, the second of them none, and their bounds ``[R + 1]``."""
    counts = [0 if r == 1 else 3 + 2 * r for r in range(tables.requests)]
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return counts, bounds


def _prefill_positions(bench: Bench, rank: int, dtype: str) -> None:
    tables = Tables(bench)
    counts, bounds = _loads(bench, tables)
    firsts = [max(tables.length - 2 - r, 0) for r in range(tables.requests)]  # runs past the table's end
    positions = [firsts[r] + i for r, count in enumerate(counts) for i in range(count)]
    positions += [0, 1]  # past query_start_loc[R]
    starts = bench.tensor(bounds, dtype)
    _map(bench, tables, rank, positions=bench.tensor(positions, dtype), query_start_loc=starts)


def _prefill_lens(bench: Bench, rank: int, dtype: str) -> None:
    """Context lengths count before the append: the first new token lies at its request's length."""
    tables = Tables(bench)
    _, bounds = _loads(bench, tables)
    n = tables.virtual
    lens = bench.tensor([(0, n - 1, n, 1)[r % 4] for r in range(tables.requests)], dtype)
    starts = bench.tensor(bounds, dtype)
    _map(bench, tables, rank, context_lens=lens, query_start_loc=starts, num_tokens=bounds[-1])
    _map(bench, tables, rank, context_lens=lens, query_start_loc=starts, num_tokens=bounds[-1] + 5)
    _map(bench, tables, rank, context_lens=lens, query_start_loc=starts, out=bounds[-1] + 3)


def _padded(bench: Bench, rank: int) -> None:
    """A captured size beyond the tokens there are, and one below."""
    tables = Tables(bench)
    requests, positions = zip(*tables.places(7, rank), strict=True)
    given = {"positions": bench.tensor(positions), "request_ids": bench.tensor(requests)}
    for count in (len(positions) + 70, len(positions), 3, 0):
        _map(bench, tables, rank, num_tokens=count, **given)
    alone = bench.tensor([0] * tables.requests)
    _map(bench, tables, rank, positions=alone, num_tokens=tables.requests + 4)


def _out(bench: Bench, rank: int) -> None:
    tables = Tables(bench)
    requests, positions = zip(*tables.places(7, rank), strict=True)
    given = {"positions": bench.tensor(positions), "request_ids": bench.tensor(requests)}
    for length in (len(positions) + 4, len(positions), 0):
        _map(bench, tables, rank, out=length, **given)


def _empty(bench: Bench, rank: int) -> None:
    tables = Tables(bench)
    _map(bench, tables, rank, positions=bench.tensor([]), request_ids=bench.tensor([]))
    _map(bench, tables, rank, positions=bench.tensor([]))


def _fill(bench: Bench, rank: int) -> None:
    """Runs inside a page, across one, past the table's end, and none at all."""
    tables = Tables(bench)
    n, end = tables.virtual, tables.length
    options = bench.rank_args(rank) | bench.block_size_args()
    for start, count in ((0, 1), (n - 1, 3), (0, min(end, 70)), (end - 2, 5), (end, 2), (3 % end, 0)):
        for row in (tables.table[0], tables.table[tables.requests - 1]):
            result = bench.module.fill_slots(row, start, count, **options)
            compare_numbers("fill_slots", result, reference.fill_slots(bench.layout, row, start, count, **options))


def _fill_out(bench: Bench, rank: int) -> None:
    tables = Tables(bench)
    options = bench.rank_args(rank) | bench.block_size_args()
    row = tables.table[0]
    for count, length in ((5, 5), (5, 9), (0, 3)):
        storage, view = poisoned(bench, length)
        other = storage.clone()
        result = bench.module.fill_slots(row, tables.virtual - 1, count, out=view, **options)
        target = other[8 : 8 + length]
        reference.fill_slots(bench.layout, row, tables.virtual - 1, count, out=target, **options)
        compare_numbers("fill_slots", result, target)
        compare_bytes("fill_slots out", storage, other)
