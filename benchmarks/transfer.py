"""Times transfers of generated modules on a GPU beside plain copies of the same bytes, and what they cost compute.

    python benchmarks/transfer.py [CASE ...] [--tokens 1024 32768] [--json FILE]

Blocks are moved in whole, shuffled on both sides. GPU time is the median over replays of a CUDA graph that walks
through several lists of blocks; bytes are those read and written. Beside it, in the same run: a copy of as many bytes
between contiguous tensors (in pinned memory where one side of the transfer is), and the slowdown of matrix products on
another stream while the transfer runs again and again. Bytes are compared with the reference before anything is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from kvgen import reference_transfer, sizes
from kvgen.documents import load_text
from kvgen.emit import render_layout
from kvgen.harness.pools import Sizes, tensor_shape
from kvgen.layout import Layout
from kvgen.reference_transfer import SideTensors, block_slots
from kvgen.transfer import Transfer

ROOT = Path(__file__).resolve().parent.parent
SETS = 4
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


@dataclass
class Pool:
    """The buffers of one side: as the module takes them, and one dict for each layer as the reference does."""

    layout: Layout
    host: bool
    arguments: list
    layers: list[dict[str, torch.Tensor]]

    def side(self, count: int) -> SideTensors:
        return SideTensors(self.layers, None if len(self.layers) > 1 else list(range(count)))


def build(what: Transfer, folder: Path):
    path = folder / f"{what.name}.py"
    path.write_text(render_layout(what))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def captured(calls):
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


def microseconds(calls, count: int = 15) -> float:
    """Of one call: the median over replays of a graph of all."""
    graph = captured(calls)

    def run() -> None:
        if graph is not None:
            graph.replay()
            return
        for call in calls:
            call()

    begin = time.perf_counter()
    while time.perf_counter() - begin < 0.1:  # clocks settle
        run()
        torch.cuda.synchronize()
    times = sorted(event_time(run) for _ in range(count))
    return times[len(times) // 2] / len(calls)


def event_time(call) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3


def copy_time(nbytes: int, source: Pool, destination: Pool) -> float:
    """A copy of as many bytes as are read, between contiguous tensors that lie where the pools do."""
    pairs = []
    for _ in range(SETS):
        sides = [
            torch.empty(nbytes, dtype=torch.uint8, device="cpu" if side.host else "cuda", pin_memory=side.host)
            for side in (source, destination)
        ]
        pairs.append(sides)
    return microseconds([lambda p=p: p[1].copy_(p[0], non_blocking=True) for p in pairs])


def slowdown(calls, alone: float, product) -> float:
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
    for _ in range(5):
        replays = max(2, int(4 * quiet / (alone * len(calls))))
        with torch.cuda.stream(beside):
            for _ in range(min(replays, 4000)):
                graph.replay()
        busy.append(products())
        torch.cuda.synchronize()
    return sorted(busy)[2] / quiet


def moved_bytes(what: Transfer, tokens: int) -> tuple[int, int]:
    """Bytes read and bytes written; filled padding is left out of account."""
    layers = LAYERS if what.layers == "all" else 1
    return tuple(tokens * layers * int(sizes.token_bytes(layout).value) for layout in what.sides)


def measure(name: str, folder: Path, token_counts, product) -> list[dict]:
    source, destination, rest = CASES[name]
    text = f"name: {name}\ntransfer:\n  from: {source}\n  to: {destination}\n{rest}\n"
    what = load_text(text, str(ROOT / "layouts" / "transfers" / f"{name}.yaml"))
    module = build(what, folder)
    pool_tokens = 2 * max(token_counts)
    pools = [pool(module, what, layout, pool_tokens) for layout in what.sides]
    rows = []
    for tokens in token_counts:
        sets = block_lists(*pools, tokens, pool_tokens)
        if tokens == token_counts[0]:
            check(module, what, *pools, sets[0])
        read, written = moved_bytes(what, tokens)
        row = {"transfer": name, "tokens": tokens, "bytes": read + written, "host": any(p.host for p in pools)}
        row["copy_us"] = copy_time((read + written) // 2, *pools)
        for cap in CAPS:
            calls = [
                lambda s=s, cap=cap: module.transfer_blocks(*pools[0].arguments, *pools[1].arguments, *s, programs=cap)
                for s in sets
            ]
            row[f"us_{cap or 'all'}"] = microseconds(calls)
            if tokens == token_counts[-1]:
                row[f"matmul_{cap or 'all'}"] = slowdown(calls, row[f"us_{cap or 'all'}"], product)
        if hasattr(module, "transfer"):
            slots = [
                [block_slots(b, p.layout.block_size, tokens) for b, p in zip(pair, pools, strict=True)] for pair in sets
            ]
            calls = [lambda s=s: module.transfer(*pools[0].arguments, *pools[1].arguments, *s) for s in slots]
            row["us_slots"] = microseconds(calls)
        rows.append(row)
    return rows


def line(row: dict) -> str:
    text = f"{row['transfer']:26} T={row['tokens']:<6}"
    rate = row["bytes"] / row["copy_us"] / 1e6
    text += f" copy {row['copy_us']:9.1f} us {rate:6.3f} TB/s |"
    for key in ("all", "32", "8", "slots"):
        if f"us_{key}" in row:
            mine = row["bytes"] / row[f"us_{key}"] / 1e6
            text += f" {key} {row[f'us_{key}']:9.1f} us {mine:6.3f} ({mine / rate:4.0%})"
            if f"matmul_{key}" in row:
                text += f" matmul x{row[f'matmul_{key}']:.2f}"
            text += " |"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all where none is named")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 32768])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    unknown = set(args.cases) - CASES.keys()
    if unknown:
        parser.error(f"no case is called {', '.join(sorted(unknown))}")
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    left, right = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    torch.mm(left, right, out=out)
    print(device, flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.cases or CASES:
            for row in measure(name, Path(folder), args.tokens, lambda: torch.mm(left, right, out=out)):
                rows.append(row)
                print(line(row), flush=True)
            torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps({"device": device, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
