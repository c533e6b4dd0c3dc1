"""Cases of ``gather_codes`` and ``gather_codes_paged``: what is stored comes back bit by bit, leaf by leaf."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvgen import reference
from kvgen.harness.bench import Bench, Case
from kvgen.harness.cases_append import dead_slots
from kvgen.harness.cases_gather import Ragged, no_rows, ragged
from kvgen.harness.cases_refuse import refuse
from kvgen.harness.compare import Mismatch, compare_bytes, compare_rows
from kvgen.harness.pools import Pool
from kvgen.harness.tables import ranks
from kvgen.layout import Layout

FUNCTION = "gather_codes"
PAGED = "gather_codes_paged"


def code_cases(layout: Layout) -> Iterator[Case]:
    """Every case of a layout; none where nothing is encoded."""
    if not any(stream.encoding for stream in layout.streams):
        return
    yield Case(f"{FUNCTION}/T0", FUNCTION, lambda bench: _gather(bench, []))
    yield Case(f"{FUNCTION}/padded_odd", FUNCTION, lambda bench: _gather(bench, bench.slots(9), "padded_odd"))
    yield Case(f"{FUNCTION}/skipped", FUNCTION, lambda bench: _gather(bench, _some_dead(bench)))
    yield Case(f"{FUNCTION}/skipped_out", FUNCTION, lambda bench: _gather(bench, _some_dead(bench), out=True))
    yield Case(f"{FUNCTION}/zeroed", FUNCTION, lambda bench: _gather(bench, _some_dead(bench), out=True, zero=True))
    yield Case(f"{FUNCTION}/refuses_out", FUNCTION, _refuses_out)
    for rank, suffix in ranks(layout):
        yield Case(f"{PAGED}/starts{suffix}", PAGED, lambda bench, rank=rank: _paged(bench, rank))
    yield Case(f"{PAGED}/zeroed", PAGED, lambda bench: _paged(bench, 0, "padded_odd", "int64", out=True, zero=True))
    yield Case(f"{PAGED}/out", PAGED, lambda bench: _paged(bench, 0, out=True))
    yield Case(f"{PAGED}/nothing", PAGED, lambda bench: _read_paged(bench, no_rows(bench), 0, bench.pool()))


def _some_dead(bench: Bench) -> list[int]:
    slots = [*bench.slots(4), *dead_slots(bench, "int64")]
    return [slots[i] for i in bench.shuffle(len(slots))]


def _gather(bench: Bench, slots: list[int], geometry: str = "compact", out: bool = False, zero: bool = False) -> None:
    pool, numbers = bench.pool(geometry), bench.tensor(slots)
    table = next(iter(bench.remap_args(None).values()), None)
    keep, _ = reference.resolve_slots(bench.layout, numbers, bench.sizes.slots, table)
    rows = [slot if kept else None for slot, kept in zip(slots, keep.tolist(), strict=True)]
    _read(bench, FUNCTION, pool, (numbers,), bench.layer_args(None), rows, out, zero)


def _paged(
    bench: Bench, rank: int, geometry: str = "compact", dtype: str = "int32", out: bool = False, zero: bool = False
) -> None:
    _read_paged(bench, ragged(bench, rank, True, dtype), rank, bench.pool(geometry), out, zero)


def _read_paged(bench: Bench, requests: Ragged, rank: int, pool: Pool, out: bool = False, zero: bool = False) -> None:
    options = bench.layer_args(None) | bench.rank_args(rank) | requests.options
    options |= {"total_tokens": len(requests.rows)}
    _read(bench, PAGED, pool, requests.given, options, list(requests.rows), out, zero)


def _read(
    bench: Bench,
    function: str,
    pool: Pool,
    which: tuple[Tensor, ...],
    options: dict[str, Any],
    rows: list[int | None],
    out: bool,
    zero: bool,
) -> None:
    """Call a function for the tokens of ``which`` and compare what it reads; ``rows`` are their slots."""
    remap = bench.remap_args(None)
    args = [*(pool.actual[buffer.name] for buffer in bench.layout.buffers), *which, *remap.values()]
    expect, table = getattr(reference, function), next(iter(remap.values()), None)
    wanted = expect(bench.layout, pool.expected, *which, remap=table, **options)
    storages: dict[str, Tensor] = {}
    if out:
        storages, views = _outputs(bench, wanted)
        copies = {name: storage.clone() for name, storage in storages.items()}
        given = {n: copies[n].as_strided(v.shape, v.stride(), v.storage_offset()) for n, v in views.items()}
        options = {name: value for name, value in options.items() if name != "total_tokens"} | {"zero_skipped": zero}
        wanted = expect(bench.layout, pool.expected, *which, remap=table, out=given, **options)
        options |= {"out": _packed(list(views.values()))}
    result = getattr(bench.module, function)(*args, **options)
    found = result if isinstance(result, tuple) else (result,)
    if len(found) != len(wanted):
        raise Mismatch(f"expected a tensor for each of {', '.join(wanted)}, got {len(found)}")
    for (name, expected), tensor in zip(wanted.items(), found, strict=True):
        compare_rows(name, tensor, expected, rows)
    for name, storage in storages.items():
        compare_bytes(f"output of {name}", storage, copies[name])
    bench.check(pool)


def _outputs(bench: Bench, wanted: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Poisoned storages, and outputs in them whose rows lie five elements apart."""
    storages, views = {}, {}
    for name, rows in wanted.items():
        width = torch.Size(rows.shape[1:]).numel()
        storages[name] = bench.random((16 + len(rows) * (width + 5) + 16,), rows.dtype)
        wide = storages[name][16 : 16 + len(rows) * (width + 5)].view(len(rows), width + 5)
        views[name] = wide[:, :width].unflatten(1, rows.shape[1:])
    return storages, views


def _packed(tensors: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _refuses_out(bench: Bench) -> None:
    """An output of another width is named before anything is launched."""
    pool, numbers = bench.pool(), bench.tensor(bench.slots(3))
    remap = bench.remap_args(None)
    args = [*(pool.actual[buffer.name] for buffer in bench.layout.buffers), numbers, *remap.values()]
    table = next(iter(remap.values()), None)
    options = bench.layer_args(None)
    made = list(reference.gather_codes(bench.layout, pool.expected, numbers, remap=table, **options).values())
    made[0] = made[0][..., 1:] if made[0].shape[-1] > 1 else torch.cat([made[0], made[0]], dim=-1)
    call = getattr(bench.module, FUNCTION)
    refuse(bench, pool, next(iter(bench.streams)), lambda: call(*args, **options, out=_packed(made)))
