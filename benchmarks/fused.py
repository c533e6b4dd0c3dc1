"""What ``kvgen bench`` does not know of fused appends: the chain of kernels they stand for, and other schedules.

    kvgen bench nhd_fused --function append_fused --adapter benchmarks.fused:chain
    python benchmarks/fused.py [LAYOUT ...] [--tokens 1 32 4096 32768]

``chain`` is norm and rotary embedding of K, and of the query where the layout has one, and the append, in launches of
their own: Triton kernels of this file, and the generated append. The command times ``append_fused`` with other warps
and heads of a program than those chosen; bytes are compared with the reference before.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
import triton
import triton.language as tl

from kvgen import runtime
from kvgen.bench import run
from kvgen.bench.rivals import Rival, torch_reference
from kvgen.bench.task import Task
from kvgen.bench.timing import CudaClock
from kvgen.emit import render_layout
from kvgen.layout import KernelHints, Layout, ScheduleHints
from kvgen.resolve import load
from kvgen.stages import RmsNorm, Rope

ROOT = Path(__file__).resolve().parent.parent
LAYOUTS = sorted(path.stem for path in (ROOT / "layouts").glob("*fused*.yaml"))
POOL = 1 << 20


@triton.jit
def _norm_kernel(
    x_ptr, y_ptr, weight_ptr, x_token, x_head, y_token, y_head, EPS: tl.constexpr, PLUS: tl.constexpr, DIM: tl.constexpr
):
    """RMS norm of one row of a token and head."""
    token, head, dim = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, DIM)
    x = tl.load(x_ptr + token * x_token + head * x_head + dim).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / DIM + EPS)
    weight = tl.load(weight_ptr + dim).to(tl.float32) + PLUS
    tl.store(y_ptr + token * y_token + head * y_head + dim, (x * scale * weight).to(y_ptr.dtype.element_ty))


@triton.jit
def _rope_kernel(
    x_ptr,
    y_ptr,
    positions_ptr,
    table_ptr,
    x_token,
    x_head,
    y_token,
    y_head,
    START: tl.constexpr,
    PAIRS: tl.constexpr,
    NEOX: tl.constexpr,
):
    """The pairs of one row of a token and head turned."""
    token, head, pair = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PAIRS)
    angle = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * PAIRS) + pair
    cos, sin = tl.load(angle).to(tl.float32), tl.load(angle + PAIRS).to(tl.float32)
    if NEOX:
        first, second = START + pair, START + pair + PAIRS
    else:
        first, second = START + 2 * pair, START + 2 * pair + 1
    x, y = x_ptr + token * x_token + head * x_head, y_ptr + token * y_token + head * y_head
    a, b = tl.load(x + first).to(tl.float32), tl.load(x + second).to(tl.float32)
    tl.store(y + first, (a * cos - b * sin).to(y_ptr.dtype.element_ty))
    tl.store(y + second, (b * cos + a * sin).to(y_ptr.dtype.element_ty))


@cache
def _module(layout: Layout) -> ModuleType:
    return runtime.import_module(layout.name, render_layout(layout))


def chain(task: Task) -> Callable[[], None] | None:
    """Norm, rotary embedding and append one after the other; None without a table of cosines and sines in one row."""
    if task.function != "append_fused" or task.fused is None:
        return None
    fused, fuse = task.fused, task.layout.fuse
    if fuse.mrope or "cos_sin" not in fused.tables:
        return None
    launches, parts = [], dict(fused.parts)
    for name, part in fused.parts.items():
        target = fused.query_out if name == "query" else torch.empty_like(part, memory_format=torch.contiguous_format)
        source = part
        for step in fuse.of(name):
            # An embedding of some of the values leaves the others where they are.
            if isinstance(step, Rope) and source is part and step.rotary_dim < part.shape[-1]:
                launches.append(lambda x=part, y=target: y.copy_(x))
            launches.append(_launch(step, source, target, fused.weights.get(name), fused))
            source = target
        parts[name] = source
    module, layer = _module(task.layout), {} if task.layer is None else {"layer": task.layer}
    streams = [parts[stream.name] for stream in task.layout.streams]
    extra = [] if task.remap is None else [task.remap]
    arguments = [*streams, *task.buffers.values(), task.slots, *extra, *task.scales.values()]
    launches.append(lambda: module.append(*arguments, **layer))

    def call() -> None:
        for launch in launches:
            launch()

    return call


def _launch(step, source, target, weight, fused) -> Callable[[], object]:
    x, y = (rows.unsqueeze(1) if rows.dim() == 2 else rows for rows in (source, target))
    grid, strides = (len(x), x.shape[1]), (x.stride(0), x.stride(1), y.stride(0), y.stride(1))
    if isinstance(step, RmsNorm):
        numbers = (*strides, step.eps, float(step.weight == "plus_one"), x.shape[2])
        return lambda: _norm_kernel[grid](x, y, weight, *numbers, num_warps=1)
    table, numbers = fused.tables["cos_sin"], (*strides, step.start, step.pairs, step.style == "neox")
    return lambda: _rope_kernel[grid](x, y, fused.positions, table, *numbers, num_warps=1)


def schedules(layout: Layout, counts: tuple[int, ...], clock: CudaClock) -> Iterator[tuple[str, list[float | None]]]:
    """Each schedule, and its times for all numbers of tokens."""
    plan = run.Plan("cuda", dict.fromkeys(counts, ("append_fused",)), (Rival("torch", torch_reference),), POOL, 0)
    tried = [("as chosen", layout)]
    for heads in ("all", 4, 2, 1):
        for warps in (1, 2, 4, 8):
            hints = ScheduleHints(append=KernelHints(heads=heads, num_warps=warps))
            tried.append((f"heads {heads}, warps {warps}", dataclasses.replace(layout, schedule=hints)))
    for name, variant in tried:
        rows = list(run.measure(variant, _module(variant), plan, clock))
        wrong = [timing.note for row in rows for timing in row.timings if timing.note.startswith("differs")]
        assert not wrong, f"{layout.name}, {name}: {wrong[0]}"
        yield name, [row.ours.device_us for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 32, 4096, 32768])
    args = parser.parse_args()
    clock = CudaClock()
    for name in args.layouts:
        print(name)
        for schedule, times in schedules(load(ROOT / "layouts" / f"{name}.yaml"), tuple(args.tokens), clock):
            print(f"  {schedule:20}" + "".join(f"{time:10.2f}" for time in times), flush=True)


if __name__ == "__main__":
    main()
