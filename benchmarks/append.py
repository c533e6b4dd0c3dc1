"""Times append of generated modules on a GPU, beside torch indexing and, where it is importable, FlashInfer.

    python benchmarks/append.py [LAYOUT ...] [--tokens 32 4096 32768] [--sweep] [--json FILE]

GPU time is the median over replays of a CUDA graph that walks through several sets of inputs; bytes are those read and
written. Results are compared with torch's before anything is timed. ``--sweep`` tries schedules besides the chosen one.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import tempfile
import time
from pathlib import Path

import torch
import triton

from kvgen import sizes
from kvgen.emit import render_layout
from kvgen.layout import KernelHints, Layout, ScheduleHints
from kvgen.resolve import load

ROOT = Path(__file__).resolve().parent.parent
QUERY_HEADS = 32
SETS = 8
POOL_TOKENS = 1 << 20


def build(layout: Layout, folder: Path, tag: str = ""):
    """The generated module of a layout, imported from a file of its own."""
    path = folder / f"{layout.name}{tag}.py"
    path.write_text(render_layout(layout))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def graph_time(calls) -> float:
    """Microseconds of one call: the median over replays of a graph of all ``calls``."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    repeats = max(1, 64 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    begin = time.perf_counter()
    while time.perf_counter() - begin < 0.05:  # clocks settle
        graph.replay()
        torch.cuda.synchronize()
    times = [event_time(graph.replay) / (repeats * len(calls)) for _ in range(21)]
    return sorted(times)[len(times) // 2]


def event_time(call) -> float:
    """Microseconds between events around one call."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3


def eager_time(call, count: int = 300) -> float:
    """Microseconds of host time of one call."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - begin) * 1e6 / count)
        torch.cuda.synchronize()
    return sorted(times)[2]


def inputs(layout: Layout, tokens: int, num_blocks: int):
    """Sets of streams, sliced from a fused projection where there are heads, and slots in whole shuffled blocks."""
    size = layout.block_size
    sets = []
    for seed in range(SETS):
        generator = torch.Generator("cuda").manual_seed(seed)
        widths = [torch.Size([a.extent for a in s.axes]).numel() for s in layout.streams]
        lead = QUERY_HEADS * layout.streams[0].axes[-1].extent if len(layout.streams[0].axes) > 1 else 0
        fused = torch.randn(tokens, lead + sum(widths), generator=generator, device="cuda", dtype=torch.bfloat16)
        parts = fused[:, lead:].split(widths, dim=1)
        streams = [p.unflatten(1, [a.extent for a in s.axes]) for p, s in zip(parts, layout.streams, strict=True)]
        if tokens <= 256:  # one token each for many requests
            slots = torch.randperm(num_blocks * size, generator=generator, device="cuda")[:tokens]
        else:
            blocks = torch.randperm(num_blocks, generator=generator, device="cuda")[: -(-tokens // size)]
            slots = (blocks[:, None] * size + torch.arange(size, device="cuda")).flatten()[:tokens]
        sets.append((streams, slots))
    return sets


def torch_append(layout: Layout, buffers, streams, slots) -> bool:
    """The same with ``index_put_`` on permuted views, where the layout has no layer axis and no record."""
    from kvgen.layout import Holds

    size = layout.block_size
    for buffer, tensor in zip(layout.buffers, buffers, strict=True):
        place = buffer.place
        encoded = any(stream.encoding for stream in layout.streams)
        if layout.layers or encoded or not isinstance(place.content, Holds):
            return False
        names, view = [], tensor
        for i in reversed(range(len(place.dims))):
            digits = place.dims[i].digits
            view = view.unflatten(i, [d.size if d.size is not None else -1 for d in digits])
            names[:0] = [(d.axis, d.div) for d in digits]
        for leaf, index in zip(place.content.leaves, range(2), strict=False):
            value = streams[[s.name for s in layout.streams].index(leaf)]
            part, left = view, list(names)
            if ("kv", 1) in left:
                part = part.select(left.index(("kv", 1)), index)
                left.remove(("kv", 1))
            order = [("block", 1), ("slot", 1)]
            for axis in ("head", "dim"):
                order += sorted((name for name in left if name[0] == axis), key=lambda name: -name[1])
            part = part.permute([left.index(n) for n in order])
            part[slots // size, slots % size] = value.reshape(len(slots), *part.shape[2:])
    return True


def flashinfer_calls(layout: Layout, buffers, sets):
    """Calls of FlashInfer's append for the layouts it has, or None."""
    kinds = {"paged_nhd": "NHD", "paged_hnd": "HND"}
    if layout.name not in kinds:
        return None
    try:
        import flashinfer
    except ImportError:
        return None
    size, calls = layout.block_size, []
    for (key, value), slots in sets:
        tokens = len(slots)
        blocks, inner = (slots // size).to(torch.int32), (slots % size).to(torch.int32)
        if tokens <= 256:
            batch, pages = torch.arange(tokens, dtype=torch.int32, device="cuda"), blocks
            indptr = torch.arange(tokens + 1, dtype=torch.int32, device="cuda")
            positions, last = inner, inner + 1
        else:
            batch, pages = torch.zeros(tokens, dtype=torch.int32, device="cuda"), blocks[::size].contiguous()
            indptr = torch.tensor([0, len(pages)], dtype=torch.int32, device="cuda")
            positions = torch.arange(tokens, dtype=torch.int32, device="cuda")
            last = torch.tensor([(tokens - 1) % size + 1], dtype=torch.int32, device="cuda")
        args = (key, value, batch, positions, tuple(buffers), pages, indptr, last, kinds[layout.name])
        calls.append(lambda args=args: flashinfer.append_paged_kv_cache(*args))
    return calls


def module_call(module, layout, buffers, streams, slots):
    extra = [torch.arange(POOL_TOKENS, device="cuda")] if layout.slots.remap else []
    for scale in (part for s in layout.streams if s.scale for part in (s.scale, s.scale.scale)):
        if scale is not None and not scale.stored:
            extra.append(torch.full([axis.count for axis in scale.axes] or [1], 0.013, device="cuda"))
    keywords = {"layer": 1} if layout.layers else {}
    return lambda: module.append(*streams, *buffers, slots, *extra, **keywords)


def pool(module, layout: Layout):
    blocks = POOL_TOKENS // layout.block_size
    keywords = {}
    if layout.layers:
        count = layout.layers.extent or 4
        blocks //= count
        keywords = {"num_layers": count} if layout.layers.extent is None else {}
    made = module.allocate(blocks, device="cuda", **keywords)
    return (made if isinstance(made, tuple) else (made,)), blocks


def measure(layout: Layout, folder: Path, token_counts, sweep: bool) -> list[dict]:
    module = build(layout, folder)
    buffers, blocks = pool(module, layout)
    rows = []
    for tokens in token_counts:
        sets = inputs(layout, tokens, blocks)
        values = sum(torch.Size([a.extent for a in s.axes]).numel() for s in layout.streams)
        moved = tokens * (2 * values + sizes.token_bytes(layout).value)  # read and written
        calls = [module_call(module, layout, buffers, *item) for item in sets]
        row = {"layout": layout.name, "tokens": tokens, "bytes": moved, "kvgen_us": graph_time(calls)}
        row["eager_us"] = eager_time(calls[0]) if tokens == token_counts[0] else None
        if torch_append(layout, buffers, *sets[0]):
            for buffer in buffers:
                buffer.random_(0, 7)
            calls[0]()
            probe = [buffer.clone() for buffer in buffers]
            torch_append(layout, buffers, *sets[0])
            assert all(torch.equal(a, b) for a, b in zip(probe, buffers, strict=True)), layout.name
            row["torch_us"] = graph_time([lambda s=s: torch_append(layout, buffers, *s) for s in sets])
        others = flashinfer_calls(layout, buffers, sets)
        if others:
            calls[0]()
            probe = [b.clone() for b in buffers]
            others[0]()
            assert all(torch.equal(a, b) for a, b in zip(probe, buffers, strict=True)), "flashinfer differs"
            row["flashinfer_us"] = graph_time(others)
            row["flashinfer_eager_us"] = eager_time(others[0]) if tokens == token_counts[0] else None
        if sweep:
            row["sweep"] = sweep_schedules(layout, folder, buffers, sets)
        rows.append(row)
    return rows


def sweep_schedules(layout: Layout, folder: Path, buffers, sets) -> dict[str, float]:
    found = {}
    for tokens, heads, warps in itertools.product((1, 2, 4, 8, 16, 32), (1, "all"), (1, 2, 4, 8)):
        hints = KernelHints(tokens, heads, warps)
        tag = f"_{tokens}_{heads}_{warps}"
        try:
            module = build(dataclasses.replace(layout, schedule=ScheduleHints(hints, KernelHints())), folder, tag)
            time = graph_time([module_call(module, layout, buffers, *item) for item in sets])
        except Exception as error:  # a schedule that does not compile is a result
            found[tag] = f"{type(error).__name__}"
            continue
        found[tag] = time
    return dict(sorted(((k, v) for k, v in found.items() if isinstance(v, float)), key=lambda item: item[1])[:8])


def copy_rate() -> float:
    """Bytes per second of a device copy, read and written."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = [event_time(lambda: target.copy_(source)) for _ in range(12)]
    return 2 * source.numel() / (sorted(times)[6] * 1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layouts", nargs="*", default=["paged_nhd", "packed_hnd", "paged_x_vector"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[32, 4096, 32768])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rate = copy_rate()
    slots = torch.zeros(32, dtype=torch.int64, device="cuda")
    yardstick = eager_time(lambda: slots.add_(0))
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    print(f"{device}; copy {rate / 1e12:.2f} TB/s; add_ {yardstick:.1f} us")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.layouts:
            layout = load(ROOT / "layouts" / f"{name}.yaml")
            for row in measure(layout, Path(folder), args.tokens, args.sweep):
                rows.append(row)
                print(line(row, rate), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"copy_rate": rate, "add_us": yardstick, "rows": rows}, indent=1))


def line(row: dict, rate: float) -> str:
    speed = row["bytes"] / (row["kvgen_us"] * 1e-6)
    text = f"{row['layout']:22} T={row['tokens']:<6} {row['kvgen_us']:9.2f} us"
    text += f" {speed / 1e12:5.2f} TB/s {speed / rate:4.0%}"
    for key in ("torch_us", "flashinfer_us", "eager_us", "flashinfer_eager_us"):
        if row.get(key):
            text += f"  {key[:-3]} {row[key]:.2f}"
            if "eager" not in key:
                text += f" (x{row[key] / row['kvgen_us']:.2f})"
    for key, value in row.get("sweep", {}).items():
        text += f"\n{'':28}{key:14} {value:9.2f} us"
    return text


if __name__ == "__main__":
    main()
