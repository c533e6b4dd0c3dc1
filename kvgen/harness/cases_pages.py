"""Cases of ``copy_blocks``, ``zero_blocks`` and ``gather_page_table``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvgen import reference_pages as reference
from kvgen.harness.bench import RUN, Bench, Case
from kvgen.harness.cases_refuse import buffer_changes, refuse
from kvgen.harness.compare import Mismatch, Written, compare_bytes, compare_pool
from kvgen.harness.pools import Pool
from kvgen.layout import Layout

Pair = tuple[int, int]

NOT_A_PAGE = (-1, -(2**31), 2**31 - 1)
"""Numbers of no page, whatever the pool; its own number of pages is another."""


GEOMETRIES = {
    "copy_blocks": ("padded", "padded_odd", "inside", "transposed", "misaligned"),
    "zero_blocks": ("padded_odd", "transposed"),
}
"""How pools lie besides the compact one. Both functions find pages in the same way."""


def page_cases(layout: Layout, device: str) -> Iterator[Case]:
    """Every case of a layout."""

    def case(function: str, name: str, body: Callable[..., None], *args: object) -> Case:
        return Case(f"{function}/{name}", function, lambda bench: body(bench, *args))

    for function, body in (("copy_blocks", _copy), ("zero_blocks", _zero)):
        yield case(function, "n0", body, 0)
        yield case(function, "n2", body, 2)
        for geometry in GEOMETRIES[function]:
            yield case(function, geometry, body, 1, geometry)
        if any(buffer.unit == 1 for buffer in layout.buffers):
            yield case(function, "odd_bytes", body, 1, "odd_bytes")
        yield case(function, "huge_int32", body, 1, "huge", "int32")
        if device != "cpu":  # where launches are kept
            yield case(function, "other_addresses", _other_addresses, body)
    yield case("copy_blocks", "skipped", _skipped_pairs)
    yield case("copy_blocks", "fan_out", _fan_out)
    yield Case("copy_blocks/then_gather", "copy_blocks", _then_gather, needs=("gather",))
    yield case("zero_blocks", "skipped", _skipped_blocks)
    yield case("gather_page_table", "int32", _page_table, "int32", ((5, 4), (3, 6), (2, 140), (140, 130)))
    yield case("gather_page_table", "int64", _page_table, "int64", ((4, 5),))
    yield case("gather_page_table", "mixed", _mixed_types)
    yield case("gather_page_table", "nothing", _no_requests)
    yield from _refusals(layout)


def _pairs(bench: Bench, count: int) -> list[Pair]:
    """Sources and destinations, all of them different; the first and the last block are in the first pair."""
    last, inner = bench.sizes.blocks - 1, [i + 1 for i in bench.shuffle(bench.sizes.blocks - 2)]
    first = [(0, last), (last, 0)][bench.shuffle(2)[0]]
    return [first, *zip(inner[::2], inner[1::2], strict=False)][:count]


def run_copy(bench: Bench, pool: Pool, pairs: Sequence[Pair], dtype: str = "int64") -> None:
    """Copy through the module and the reference, and compare every byte of the pool."""
    # A slice of a wider table, the pair's numbers apart from each other.
    table = bench.tensor([n for pair in pairs for n in (99, pair[0], 99, pair[1], 99)], dtype).view(len(pairs), 5)
    given = table[:, 1:4:2]
    bench.module.copy_blocks(*pool.actual.values(), given)
    reference.copy_blocks(bench.layout, pool.expected, given)
    _check(bench, pool, [target for source, target in pairs if _both(bench, source, target)])


def run_zero(bench: Bench, pool: Pool, blocks: Sequence[int], dtype: str = "int64") -> None:
    given = bench.tensor(blocks, dtype)
    bench.module.zero_blocks(*pool.actual.values(), given)
    reference.zero_blocks(bench.layout, pool.expected, given)
    _check(bench, pool, [block for block in blocks if _both(bench, block, block)])


def _both(bench: Bench, source: int, target: int) -> bool:
    return 0 <= source < bench.sizes.blocks and 0 <= target < bench.sizes.blocks


def _check(bench: Bench, pool: Pool, written: Sequence[int]) -> None:
    size = bench.sizes.block_size
    slots = {block * size + slot for block in written for slot in range(size)}
    pool.written = True
    compare_pool(bench.layout, pool, Written((), slots, None, pages=True))


def _pool(bench: Bench, geometry: str) -> Pool:
    """A pool of a geometry; huge ones start an element later, so that offsets are counted in small pieces."""
    pool = bench.pool(geometry)
    for side in (pool.actual, pool.expected) if geometry == "huge" else ():
        for name, tensor in side.items():
            side[name] = tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() + 1)
    return pool


def _copy(bench: Bench, count: int, geometry: str = "compact", dtype: str = "int64") -> None:
    run_copy(bench, _pool(bench, geometry), _pairs(bench, count), dtype)


def _zero(bench: Bench, count: int, geometry: str = "compact", dtype: str = "int64") -> None:
    blocks = [block for pair in _pairs(bench, 1) for block in pair]
    run_zero(bench, _pool(bench, geometry), blocks[:count], dtype)


def _other_addresses(bench: Bench, body: Callable[..., None]) -> None:
    """Pools alike in all but where they start, one call after the other: what was kept of the first must not show."""
    for geometry in ("compact", "misaligned", "compact"):
        body(bench, 1, geometry)


def _skipped_pairs(bench: Bench) -> None:
    """Numbers of no page on either side of a pair, with one pair among them that has none."""
    outside = (*NOT_A_PAGE, bench.sizes.blocks, 2**62, -(2**63))
    pairs = [(number, 0) for number in outside] + [(0, number) for number in outside]
    pairs.insert(3, _pairs(bench, 1)[0])
    run_copy(bench, bench.pool(), pairs)
    run_copy(bench, bench.pool(), [(NOT_A_PAGE[0], 0), (0, bench.sizes.blocks)], "int32")


def _fan_out(bench: Bench) -> None:
    """One block copied to others, as when requests that share a prefix part."""
    blocks = bench.shuffle(bench.sizes.blocks)[:3]
    run_copy(bench, bench.pool(), [(blocks[0], target) for target in blocks[1:]])


def _skipped_blocks(bench: Bench) -> None:
    run_zero(bench, bench.pool(), [*NOT_A_PAGE, bench.sizes.blocks, 2**62, bench.shuffle(bench.sizes.blocks)[0]])


def _then_gather(bench: Bench) -> None:
    """What is gathered from the copy is what was gathered from the source: scales have come along, in every layer."""
    pool, size = bench.pool(), bench.sizes.block_size
    pairs = _pairs(bench, 2)
    length = min(size, RUN)
    starts = [0, size - length] if bench.layout.contiguous else [0]
    slots = [(a * size + s, b * size + s) for a, b in pairs for start in starts for s in range(start, start + length)]
    slots = [pair for pair in slots if bench.layout.slots.skip not in pair]
    layers = [None] if bench.layout.layers is None else [0, bench.sizes.layers - 1]
    wanted = [_gathered(bench, pool, [source for source, _ in slots], layer) for layer in layers]
    run_copy(bench, pool, pairs)
    for layer, before in zip(layers, wanted, strict=True):
        after = _gathered(bench, pool, [target for _, target in slots], layer)
        for stream, rows in before.items():
            if not torch.equal(rows.view(torch.uint8), after[stream].view(torch.uint8)):
                raise Mismatch(f"{stream} gathered from a copied block is not what the block held")


def _gathered(bench: Bench, pool: Pool, slots: Sequence[int], layer: int | None) -> dict[str, Tensor]:
    options: dict[str, Any] = bench.layer_args(layer) | bench.dtype_args(pool)
    args = [*pool.actual.values(), bench.tensor(slots), *bench.remap_args(None).values(), *bench.scale_args().values()]
    return bench.unpack(bench.module.gather(*args, **options))


# Page tables.


def _page_table(bench: Bench, dtype: str, shapes: Sequence[tuple[int, int]]) -> None:
    """Lengths at page edges, indices outside, a table wider than out and one narrower, rows that no request has."""
    tokens = _page_tokens(bench)
    lengths = [0, 1, tokens - 1, tokens, tokens + 1, 3 * tokens, 9 * tokens, 5, 5, 1, -tokens]
    rows = [3, 0, 6, 2, 1, 5, 4, -1, 7, 2**31 - 1, 6]
    for columns, width in shapes:
        table = bench.tensor([i * 7 - 40 for i in range(7 * (columns + 2))], dtype).view(7, columns + 2)[:, :columns]
        _run_table(bench, table, bench.tensor(rows, dtype), bench.tensor(lengths, dtype), (13, width), dtype, -1)
    table = bench.tensor(range(7 * 5), dtype).view(5, 7).T
    _run_table(bench, table, bench.tensor(rows, dtype), bench.tensor(lengths, dtype), (11, 4), dtype, 77, across=True)


def _mixed_types(bench: Bench) -> None:
    """Entries of an int64 table that an int32 cannot hold are padding; lengths and indices of another type."""
    table = bench.tensor([2**31, -(2**31) - 1, 2**31 - 1, -(2**31), 5, 2**40], "int64").view(2, 3)
    lengths = bench.tensor([3 * _page_tokens(bench)] * 2, "int32")
    _run_table(bench, table, bench.tensor([1, 0]), lengths, (2, 4), "int32", 9)
    _run_table(bench, table.int(), bench.tensor([1, 0], "int32"), lengths.long(), (2, 4), "int64", -(2**40))


def _no_requests(bench: Bench) -> None:
    table, none = bench.tensor(range(6)).view(2, 3), bench.tensor([])
    _run_table(bench, table, none, none, (2, 3), "int32", 0)
    _run_table(bench, table, none, none, (0, 3), "int32", 0)
    _run_table(bench, table[:, :0], bench.tensor([1]), bench.tensor([3]), (1, 3), "int32", 0)
    _run_table(bench, table, bench.tensor([1]), bench.tensor([3]), (1, 0), "int32", 0)


def _page_tokens(bench: Bench) -> int:
    return bench.sizes.block_size * (bench.layout.slots.shard.world if bench.layout.slots.shard else 1)


def _run_table(
    bench: Bench,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    shape: tuple[int, int],
    dtype: str,
    padding: int,
    across: bool = False,
) -> None:
    """Call and compare; ``out`` is a part of a wider tensor, and its rows lie ``across`` that one's where asked."""
    height, width = (shape[1], shape[0]) if across else shape
    whole = bench.random((height + 2, width + 3), bench.tensor([], dtype).dtype)
    copy = whole.clone()
    actual, expected = (x[1 : 1 + height, 2 : 2 + width] for x in (whole, copy))
    actual, expected = (actual.T, expected.T) if across else (actual, expected)
    options = bench.block_size_args()
    result = bench.module.gather_page_table(table, rows, lengths, actual, padding, **options)
    reference.gather_page_table(bench.layout, table, rows, lengths, expected, padding, **options)
    if result is not actual and not (result.shape == actual.shape and torch.equal(result, actual)):
        raise Mismatch("gather_page_table: expected out to be returned")
    if not torch.equal(actual, expected):
        row, column = (actual != expected).nonzero()[0].tolist()
        wanted, got = int(expected[row, column]), int(actual[row, column])
        raise Mismatch(f"gather_page_table, row {row}, column {column}: expected {wanted}, got {got}")
    compare_bytes("gather_page_table out", whole.flatten(), copy.flatten())


# Refusals.


def _refusals(layout: Layout) -> Iterator[Case]:
    blocks = "requests" if layout.contiguous else "blocks"
    changes: dict[str, Callable[[Tensor], Any]] = {
        "floats": lambda x: x.float(),
        "int16": lambda x: x.short(),
        "rank": lambda x: x.unsqueeze(0),
        "device": lambda x: x.to("meta"),
        "no_tensor": lambda x: x.tolist(),
    }
    wide: dict[str, Callable[[Tensor], Any]] = {"three_columns": lambda x: torch.cat([x, x[:, :1]], dim=1)}
    for function, word in (("copy_blocks", "pairs"), ("zero_blocks", blocks)):
        for what, change in (changes | (wide if word == "pairs" else {})).items():
            yield _refusal(function, word, word, what, change)
        for buffer in layout.buffers:
            for what, change in buffer_changes(layout, buffer.name):
                if function == "copy_blocks" or what in ("dtype", "rank"):
                    yield _refusal(function, word, buffer.name, what, change)
    yield Case("gather_page_table/refuses", "gather_page_table", _refused_tables)


def _refusal(function: str, word: str, argument: str, what: str, change: Callable[[Tensor], Any]) -> Case:
    def body(bench: Bench) -> None:
        pool = bench.pool()
        blocks = bench.tensor([0, 1]).view(1, 2) if function == "copy_blocks" else bench.tensor([0])
        args: dict[str, Any] = pool.actual | {word: blocks}
        changed = change(args[argument])
        if changed is None and what != "no_tensor":
            return
        args[argument] = changed
        named = None if what == "device" else argument
        refuse(bench, pool, named, lambda: getattr(bench.module, function)(*args.values()))

    return Case(f"{function}/refuses_{argument}_{what}", function, body)


def _refused_tables(bench: Bench) -> None:
    """One argument wrong in each call, which is named and leaves out alone."""
    table, out = bench.tensor(range(6)).view(2, 3), bench.tensor([5] * 6).view(2, 3)
    right = {"req_to_page": table, "req_pool_indices": bench.tensor([0, 1]), "seq_lens": bench.tensor([1, 1])}
    right |= {"out": out, "padding": -1}
    wrong: list[tuple[str, Any]] = [
        *((name, right[name].float()) for name in right if name != "padding"),
        *((name, right[name].unsqueeze(0)) for name in right if name != "padding"),
        ("seq_lens", bench.tensor([1])),
        ("out", out[:1]),
        ("out", out[:1].expand(2, 3)),
        ("padding", 1.5),
        ("padding", 2**63),
    ]
    for name, value in wrong:
        args = right | {name: value}
        refuse(
            bench,
            bench.pool(),
            name,
            lambda args=args: bench.module.gather_page_table(*args.values(), **bench.block_size_args()),
        )
        if not torch.equal(out, torch.full_like(out, 5)):
            raise Mismatch("a refused gather_page_table wrote to out")
