"""Times transfers and page copies of generated modules on a GPU beside plain copies of the same bytes.

    python benchmarks/transfer.py [CASE ...] [--tokens 1024 32768] [--json FILE]

Blocks are moved in whole, shuffled on both sides. GPU time is the median over replays of a CUDA graph that walks
through several lists of blocks; bytes are those read and written. Beside it, in the same run: a copy of as many bytes
between contiguous tensors (in pinned memory where one side of the transfer is), and the slowdown of matrix products on
another stream while the transfer runs again and again. A case that is a layout's name is its ``copy_blocks`` beside
such a copy, and its ``zero_blocks`` beside ``zero_``. Bytes are compared with the reference before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from kvgen import reference_transfer, runtime, sizes
from kvgen.documents import load_text
from kvgen.emit import render_layout
from kvgen.harness.pools import Sizes, tensor_shape
from kvgen.layout import Layout
from kvgen.reference_transfer import SideTensors, block_slots
from kvgen.resolve import load
from kvgen.transfer import Transfer

ROOT = Path(__file__).resolve().parent.parent
SETS = 4
SETTLE, MEASURE = 0.03, 0.06  # seconds of replays before the first that counts, and of those that do
LAYERS = 8
CAPS = (8, 32, None)
MATRIX = 4096

LAYER_FIRST = f"{{layout: host_layer_first, axes: {{layer: {LAYERS}}}}}"
PAGE_FIRST = f"{{layout: host_page_first, axes: {{layer: {LAYERS}}}}}"
CASES = {
    "nhd_to_hnd": ("paged_nhd", "paged_hnd", ""),
    "hnd_to_nhd": ("paged_hnd", "paged_nhd", ""),
    "nhd_to_nhd": ("paged_nhd", "paged_nhd", ""),
    "packed_to_apart": ("packed_nhd", "paged_nhd", ""),
    "nhd_16_to_64": ("paged_nhd", "{layout: paged_nhd, block_size: 64}", ""),
    "nhd_to_x_vector": ("paged_nhd", "paged_x_vector", ""),
    "x_vector_to_nhd": ("paged_x_vector", "paged_nhd", ""),
    "nhd_to_fp8": ("paged_nhd", "nhd_fp8_token_head", "convert: requantise"),
    "fp8_to_nhd": ("nhd_fp8_token_head", "paged_nhd", "convert: requantise"),
    "mla_to_mla_16": ("mla", "{layout: mla, block_size: 16}", ""),
    "nhd_to_host_layer_first": ("paged_nhd", LAYER_FIRST, "layers: all"),
    "host_layer_first_to_nhd": (LAYER_FIRST, "paged_nhd", "layers: all"),
    "nhd_to_host_page_first": ("paged_nhd", PAGE_FIRST, "layers: all"),
    "host_page_first_to_nhd": (PAGE_FIRST, "paged_nhd", "layers: all"),
}
PAGES = ("paged_nhd", "nhd_fp8_token_head", "mla_fp8_record", "cross_layer_hnd")


@dataclass
class Pool:
    """The buffers of one side: as the module takes them, and one dict for each layer as the reference does."""

    layout: Layout
    host: bool
    arguments: list
    layers: list[dict[str, torch.Tensor]]

    def side(self, count: int) -> SideTensors:
        return SideTensors(self.layers, None if len(self.layers) > 1 else list(range(count)))


def transfer_of(name: str) -> Transfer:
    source, destination, rest = CASES[name]
    text = f"name: {name}\ntransfer:\n  from: {source}\n  to: {destination}\n{rest}\n"
    return load_text(text, str(ROOT / "layouts" / "transfers" / f"{name}.yaml"))


def layout_of(name: str) -> Layout:
    return load(ROOT / "layouts" / f"{name}.yaml")


def compile_ahead(names: Sequence[str]) -> None:
    """Fill Triton's cache in processes of their own: kernels compile one after the other in one process."""
    jobs = min(len(names), os.cpu_count() or 1)
    command = [sys.executable, __file__, "--compile"]
    for worker in [subprocess.Popen([*command, *names[i::jobs]]) for i in range(jobs)]:
        worker.wait()


def compile_case(name: str) -> None:
    """Call everything that is measured once, on as little as there can be."""
    if name in PAGES:
        layout = layout_of(name)
        module, held = runtime.import_module(name, render_layout(layout)), page_buffers(layout, 4)
        blocks = torch.arange(4, dtype=torch.int32, device="cuda")
        module.copy_blocks(*held, blocks.view(2, 2))
        module.zero_blocks(*held, blocks)
        return
    what = transfer_of(name)
    module = runtime.import_module(name, render_layout(what))
    pools = [pool(module, what, layout, 256) for layout in what.sides]
    (pair,) = block_lists(*pools, 128, 256)[:1]
    for call in (*capped_calls(module, pools, [pair]).values(), slot_calls(module, pools, [pair], 128)):
        for each in call:
            each()


def pool(module, what: Transfer, layout: Layout, tokens: int) -> Pool:
    """Random bytes, in pinned memory where the layout is the host's; one tensor a layer in a pointer table."""
    blocks = -(-tokens // layout.block_size)
    host = layout.name.startswith("host")
    count = LAYERS if what.layers == "all" and layout.layers is None else 1
    layers = [{b.name: tensor(layout, b, blocks, host) for b in layout.buffers} for _ in range(count)]
    arguments = [layers[0][b.name] for b in layout.buffers]
    if count > 1:
        arguments = [module.pointer_table([layer[b.name] for layer in layers]) for b in layout.buffers]
    return Pool(layout, host, arguments, layers)


def tensor(layout: Layout, buffer, blocks: int, host: bool) -> torch.Tensor:
    shape = tensor_shape(layout, buffer, Sizes(blocks, layout.block_size, LAYERS, {}))
    dtype = getattr(torch, buffer.dtypes[0])
    whole = torch.empty(shape, dtype=dtype, device="cpu" if host else "cuda", pin_memory=host)
    if dtype.itemsize > 1:  # numbers, so that scales made of them are finite
        some = torch.randn(4099, device="cuda").to(dtype).repeat(-(-whole.numel() // 4099))
        return whole.copy_(some[: whole.numel()].view(shape))
    whole.view(torch.uint8).random_(0, 120)
    return whole


def block_lists(source: Pool, destination: Pool, tokens: int, pool_tokens: int):
    """Shuffled blocks of both sides that hold so many tokens, several times."""
    found = []
    for seed in range(SETS):
        generator = torch.Generator("cuda").manual_seed(seed)
        pair = []
        for side in (source, destination):
            size = side.layout.block_size
            order = torch.randperm(pool_tokens // size, generator=generator, device="cuda")
            pair.append(order[: tokens // size].to(torch.int32))
        found.append(pair)
    return found


def capped_calls(module, pools: Sequence[Pool], sets) -> dict[str, list[Callable]]:
    """A call for each pair of lists, under each cap of programs."""
    held = [argument for side in pools for argument in side.arguments]
    return {
        str(cap or "all"): [lambda s=s, cap=cap: module.transfer_blocks(*held, *s, programs=cap) for s in sets]
        for cap in CAPS
    }


def slot_calls(module, pools: Sequence[Pool], sets, tokens: int) -> list[Callable]:
    """The same by slot numbers; none where only whole blocks can be moved."""
    if not hasattr(module, "transfer"):
        return []
    held = [argument for side in pools for argument in side.arguments]
    sizes_of = [side.layout.block_size for side in pools]
    slots = [[block_slots(b, size, tokens) for b, size in zip(pair, sizes_of, strict=True)] for pair in sets]
    return [lambda s=s: module.transfer(*held, *s) for s in slots]


def check(module, what: Transfer, source: Pool, destination: Pool, blocks) -> None:
    """Every byte of the destination is the reference's."""
    tokens = len(blocks[0]) * what.source.block_size
    layers = LAYERS if what.layers == "all" else 1
    expected = Pool(destination.layout, False, [], [{k: t.clone() for k, t in d.items()} for d in destination.layers])
    module.transfer_blocks(*source.arguments, *destination.arguments, *blocks)
    torch.cuda.synchronize()
    sizes_of = [layout.block_size for layout in what.sides]
    slots = [block_slots(b, size, tokens) for b, size in zip(blocks, sizes_of, strict=True)]
    sides = []
    for side in (source, expected):  # the reference indexes on one device
        sides.append(Pool(side.layout, False, [], [{k: t.cuda() for k, t in held.items()} for held in side.layers]))
    reference_transfer.transfer(what, sides[0].side(layers), sides[1].side(layers), *slots)
    for got, wanted in zip(destination.layers, sides[1].layers, strict=True):
        for name, value in got.items():
            same = value.cuda().view(torch.uint8) == wanted[name].view(torch.uint8)
            assert bool(same.all()), f"{what.name}: {name} differs"


def captured(calls: Sequence[Callable]):
    """A graph of all calls; None where they cannot be captured."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            for call in calls:
                call()
    except RuntimeError as error:
        print(f"not captured: {error}")
        torch.cuda.synchronize()
        return None
    return graph


def microseconds(calls: Sequence[Callable]) -> float:
    """Of one call: the median over replays of a graph, in which short ones are made again and again."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    once = event_time(lambda: [call() for call in calls])
    calls = list(calls) * max(1, min(16, int(1000 / once)))
    graph = captured(calls)
    run = graph.replay if graph else lambda: [call() for call in calls]
    begin = time.perf_counter()
    while time.perf_counter() - begin < SETTLE:  # clocks settle
        run()
        torch.cuda.synchronize()
    times, begin = [], time.perf_counter()
    while len(times) < 5 or (len(times) < 50 and time.perf_counter() - begin < MEASURE):
        times.append(event_time(run))
    return sorted(times)[len(times) // 2] / len(calls)


def event_time(call: Callable) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3


def copy_time(nbytes: int, hosts: Sequence[bool]) -> float:
    """A copy of as many bytes as are read, between contiguous tensors that lie where the pools do."""
    pairs = []
    for _ in range(1 if any(hosts) else SETS):  # no cache lies between the device and the host
        pairs.append(
            [
                torch.empty(nbytes, dtype=torch.uint8, device="cpu" if host else "cuda", pin_memory=host)
                for host in hosts
            ]
        )
    return microseconds([lambda p=p: p[1].copy_(p[0], non_blocking=True) for p in pairs])


def slowdown(calls: Sequence[Callable], alone: float, product: Callable) -> float:
    """How much longer matrix products take while the calls run on another stream, again and again."""
    graph = captured(calls)
    if graph is None:
        return float("nan")
    beside, rounds = torch.cuda.Stream(), 20
    product_stream = torch.cuda.Stream()

    def products() -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(product_stream):
            start.record()
            for _ in range(rounds):
                product()
            stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3

    products()
    torch.cuda.synchronize()
    quiet = sorted(products() for _ in range(5))[2]
    busy = []
    for _ in range(3):
        replays = max(2, int(4 * quiet / (alone * len(calls))))
        with torch.cuda.stream(beside):
            for _ in range(min(replays, 4000)):
                graph.replay()
        busy.append(products())
        torch.cuda.synchronize()
    return sorted(busy)[1] / quiet


def moved_bytes(what: Transfer, tokens: int) -> tuple[int, int]:
    """Bytes read and bytes written; filled padding is left out of account."""
    layers = LAYERS if what.layers == "all" else 1
    return tuple(tokens * layers * int(sizes.token_bytes(layout).value) for layout in what.sides)


def measure(name: str, token_counts: Sequence[int], product: Callable) -> list[dict]:
    what = transfer_of(name)
    module = runtime.import_module(name, render_layout(what))
    hosts = [layout.name.startswith("host") for layout in what.sides]
    pool_tokens = max(token_counts) * (1 if any(hosts) else 2)
    pools = [pool(module, what, layout, pool_tokens) for layout in what.sides]
    rows = []
    for tokens in token_counts:
        sets = block_lists(*pools, tokens, pool_tokens)
        if tokens == token_counts[0]:
            check(module, what, *pools, sets[0])
        nbytes = sum(moved_bytes(what, tokens))
        row = {"transfer": name, "tokens": tokens, "bytes": nbytes, "host": any(hosts)}
        row["copy_us"] = copy_time(nbytes // 2, hosts)
        for cap, calls in capped_calls(module, pools, sets).items():
            row[f"us_{cap}"] = microseconds(calls)
            if tokens == token_counts[-1]:
                row[f"matmul_{cap}"] = slowdown(calls, row[f"us_{cap}"], product)
        if by_slots := slot_calls(module, pools, sets, tokens):
            row["us_slots"] = microseconds(by_slots)
        rows.append(row)
    return rows


def page_buffers(layout: Layout, blocks: int) -> list[torch.Tensor]:
    """Pools of random bytes."""
    held = [tensor(layout, buffer, blocks, host=False) for buffer in layout.buffers]
    for each in held:
        each.view(torch.uint8).random_(0, 256)
    return held


def pages_by_block(held: Sequence[torch.Tensor], layout: Layout) -> list[torch.Tensor]:
    """The bytes of buffers with their axis of blocks first."""
    places = [sizes.order(layout, buffer.place).index("block") for buffer in layout.buffers]
    return [each.view(torch.uint8).movedim(at, 0) for each, at in zip(held, places, strict=True)]


def check_pages(module, layout: Layout, held: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    """Every byte of the pools is what indexing makes it; of the layouts timed here all bytes are a block's."""
    expected = [each.clone() for each in held]
    source, target = pairs.long().unbind(1)
    module.copy_blocks(*held, pairs)
    for pages in pages_by_block(expected, layout):
        pages[target] = pages[source]
    assert all(torch.equal(g.view(torch.uint8), e.view(torch.uint8)) for g, e in zip(held, expected, strict=True))
    module.zero_blocks(*held, pairs[:, 0].contiguous())
    for pages in pages_by_block(expected, layout):
        pages[source] = 0
    assert all(torch.equal(g.view(torch.uint8), e.view(torch.uint8)) for g, e in zip(held, expected, strict=True))


def measure_pages(name: str, token_counts: Sequence[int]) -> list[dict]:
    layout = layout_of(name)
    module = runtime.import_module(name, render_layout(layout))
    count = 2 * max(token_counts) // layout.block_size
    held = page_buffers(layout, count)
    page = sum(each.numel() * each.element_size() for each in held) // count
    rows = []
    for tokens in token_counts:
        moved = tokens // layout.block_size
        sets = [torch.randperm(count, device="cuda")[: 2 * moved].view(-1, 2).to(torch.int32) for _ in range(SETS)]
        if tokens == token_counts[0]:
            check_pages(module, layout, held, sets[0])
        lists = [pairs[:, 0].contiguous() for pairs in sets]
        plain = [torch.empty(moved * page, dtype=torch.uint8, device="cuda") for _ in range(SETS)]
        row = {"pages": name, "tokens": tokens, "bytes": 2 * moved * page}
        row["copy_us"] = copy_time(moved * page, (False, False))
        row["us_copy_blocks"] = microseconds([lambda s=s: module.copy_blocks(*held, s) for s in sets])
        row["zero_us"] = microseconds([each.zero_ for each in plain])
        row["us_zero_blocks"] = microseconds([lambda s=s: module.zero_blocks(*held, s) for s in lists])
        rows.append(row)
    return rows


def line(row: dict) -> str:
    text = f"{row.get('transfer') or row['pages']:26} T={row['tokens']:<6}"
    rate = row["bytes"] / row["copy_us"] / 1e6
    text += f" copy {row['copy_us']:9.1f} us {rate:6.3f} TB/s |"
    for key in ("all", "32", "8", "slots", "copy_blocks"):
        if f"us_{key}" in row:
            mine = row["bytes"] / row[f"us_{key}"] / 1e6
            text += f" {key} {row[f'us_{key}']:9.1f} us {mine:6.3f} ({mine / rate:4.0%})"
            if f"matmul_{key}" in row:
                text += f" matmul x{row[f'matmul_{key}']:.2f}"
            text += " |"
    if "zero_us" in row:
        mine = row["bytes"] / 2 / row["us_zero_blocks"] / 1e6
        share = row["zero_us"] / row["us_zero_blocks"]
        text += f" zero_blocks {row['us_zero_blocks']:9.1f} us {mine:6.3f} ({share:4.0%} of zero_)"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join([*CASES, *PAGES])}; all where none is named")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 32768])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.cases or [*CASES, *PAGES]
    if unknown := set(names) - {*CASES, *PAGES}:
        parser.error(f"no case is called {', '.join(sorted(unknown))}")
    if args.compile:
        for name in names:
            compile_case(name)
        return
    compile_ahead(names)
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    left, right = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    torch.mm(left, right, out=out)
    print(device, flush=True)
    rows = []
    for name in names:
        if name in PAGES:
            found = measure_pages(name, args.tokens)
        else:
            found = measure(name, args.tokens, lambda: torch.mm(left, right, out=out))
        for row in found:
            rows.append(row)
            print(line(row), flush=True)
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps({"device": device, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
