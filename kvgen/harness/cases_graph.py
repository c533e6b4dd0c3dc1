"""Cases that need a CUDA device: every function is captured once and replayed with other inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvgen import reference, reference_pages
from kvgen.harness.bench import Bench, Case
from kvgen.harness.cases_concat import parts
from kvgen.harness.compare import adopt_nans, compare_numbers, compare_rows
from kvgen.harness.tables import Tables
from kvgen.layout import Layout

TOKENS = 9


def graph_cases(layout: Layout) -> Iterator[Case]:
    """Capture and replay with changed slots, of the functions that a decode step captures."""
    yield Case("append/graph", "append", _append)
    yield Case("gather/graph", "gather", _gather)
    yield Case("slot_mapping/graph", "slot_mapping", _slot_mapping)
    yield Case("append_positions/graph", "append_positions", _append_positions)
    yield Case("copy_blocks/graph", "copy_blocks", _copy_blocks, needs=("zero_blocks",))
    yield Case("gather_page_table/graph", "gather_page_table", _page_table)
    if layout.mla:
        yield Case("concat_mla_key/graph", "concat_mla_key", _concat_mla_key)


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Run once to compile, then record; returns the graph and the call's result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def _append(bench: Bench) -> None:
    pool = bench.pool()
    sources = bench.sources(TOKENS, pool)
    slots = bench.tensor([-1] * TOKENS)
    args, options = bench.append_args(pool, sources, slots), bench.layer_args(None)
    table = next(iter(bench.remap_args(None).values()), None)
    graph, _ = capture(lambda: bench.module.append(*args.values(), **options))
    for _ in range(2):
        live = bench.slots(TOKENS - 2)
        slots.copy_(bench.tensor([*live, *[-1] * (TOKENS - len(live))]))
        for stream, fresh in bench.sources(TOKENS, pool).items():
            sources[stream].copy_(fresh)
        graph.replay()
        reference.append(bench.layout, sources, pool.expected, slots, remap=table, scales=bench.scales, **options)
        bench.check(pool, slots, bench.streams, table, options.get("layer"))


def _gather(bench: Bench) -> None:
    pool = bench.pool()
    slots = bench.tensor([-1] * TOKENS)
    args = {b.name: pool.actual[b.name] for b in bench.layout.buffers} | {"slots": slots} | bench.remap_args(None)
    args |= bench.scale_args()
    options = bench.layer_args(None) | bench.dtype_args(pool)
    table = next(iter(bench.remap_args(None).values()), None)
    graph, result = capture(lambda: bench.module.gather(*args.values(), **options))
    for _ in range(2):
        live = bench.slots(TOKENS - 2)
        slots.copy_(bench.tensor([*live, *[-1] * (TOKENS - len(live))]))
        graph.replay()
        wanted = reference.gather(bench.layout, pool.expected, slots, remap=table, scales=bench.scales, **options)
        for stream, rows in bench.unpack(result).items():
            if stream in bench.encoded:
                adopt_nans(rows, wanted[stream])
            compare_rows(stream, rows, wanted[stream], slots.tolist())


def _slot_mapping(bench: Bench) -> None:
    tables = Tables(bench)
    positions = bench.tensor([0] * tables.requests)
    options = bench.rank_args(0) | bench.block_size_args() | {"num_tokens": tables.requests + 3}
    graph, result = capture(lambda: bench.module.slot_mapping(tables.table, positions, **options))
    for _ in range(3):
        positions.copy_(bench.tensor([bench.below(tables.length) for _ in range(tables.requests)]))
        graph.replay()
        compare_numbers(
            "slot_mapping", result, reference.slot_mapping(bench.layout, tables.table, positions, **options)
        )


def _append_positions(bench: Bench) -> None:
    pool, tables = bench.pool(), Tables(bench)
    sources = bench.sources(tables.requests, pool)
    positions = bench.tensor([-1] * tables.requests)
    args = {s: sources[s] for s in bench.streams} | {b.name: pool.actual[b.name] for b in bench.layout.buffers}
    args |= {"block_table": tables.table, "positions": positions} | bench.remap_args(None) | bench.scale_args()
    options = bench.layer_args(None) | bench.rank_args(0)
    table = next(iter(bench.remap_args(None).values()), None)
    graph, _ = capture(lambda: bench.module.append_positions(*args.values(), **options))
    for _ in range(2):
        positions.copy_(bench.tensor([bench.below(tables.length) for _ in range(tables.requests)]))
        graph.replay()
        shared = options | {"remap": table, "scales": bench.scales}
        reference.append_positions(bench.layout, sources, pool.expected, tables.table, positions, **shared)
        bench.check(pool, None, bench.streams, table, options.get("layer"))


def _copy_blocks(bench: Bench) -> None:
    """Both functions on pages in one graph, replayed on other blocks."""
    pool, last = bench.pool(), bench.sizes.blocks - 1
    pairs, blocks = bench.tensor([-1] * 4).view(2, 2), bench.tensor([-1])

    def both() -> None:
        bench.module.copy_blocks(*pool.actual.values(), pairs)
        bench.module.zero_blocks(*pool.actual.values(), blocks)

    graph, _ = capture(both)
    for pair, block in (((0, last), 0), ((last, 0), -1)):
        pairs.copy_(bench.tensor([*pair, -1, 0]).view(2, 2))
        blocks.copy_(bench.tensor([block]))
        graph.replay()
        reference_pages.copy_blocks(bench.layout, pool.expected, pairs)
        reference_pages.zero_blocks(bench.layout, pool.expected, blocks)
        bench.check(pool, bench.tensor([]))


def _page_table(bench: Bench) -> None:
    tables = Tables(bench)
    rows, lengths = bench.tensor([-1] * tables.requests), bench.tensor([0] * tables.requests)
    out = torch.empty(tables.requests + 1, tables.columns + 2, dtype=torch.int32, device=bench.device)
    options = bench.block_size_args()
    graph, _ = capture(lambda: bench.module.gather_page_table(tables.table, rows, lengths, out, 7, **options))
    for length in (1, tables.length):
        rows.copy_(bench.tensor(bench.shuffle(tables.requests)))
        lengths.fill_(length)
        graph.replay()
        wanted = torch.empty_like(out)
        reference_pages.gather_page_table(bench.layout, tables.table, rows, lengths, wanted, 7, **options)
        compare_numbers("gather_page_table", out.flatten(), wanted.flatten())


def _concat_mla_key(bench: Bench) -> None:
    sizes = (TOKENS, 3, 16, 8)
    given = parts(bench, sizes, "bfloat16", "bfloat16")
    graph, result = capture(lambda: bench.module.concat_mla_key(*given))
    for _ in range(2):
        for tensor, fresh in zip(given, parts(bench, sizes, "bfloat16", "bfloat16"), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        compare_rows("key", result, reference.concat_mla_key(*given), list(range(TOKENS)))
