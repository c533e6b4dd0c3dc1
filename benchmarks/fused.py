"""Times fused appends of generated modules on a GPU beside the plain append and the chain they stand for.

    python benchmarks/fused.py [LAYOUT ...] [--tokens 1 32 4096 32768] [--schedules] [--json FILE]

GPU time is the median over replays of a CUDA graph that walks through several sets of inputs; bytes are those read and
written, cosines and sines included. Beside it, in the same run: ``append`` of the same layout; norm, rotary embedding
and append as three launches (Triton kernels of this file, K alone and then Q where the layout has a query); and
FlashInfer's rotary embedding and append, without a norm, where it is importable and has the layout: for fp8 both in one
launch. Bytes are compared with the reference before anything is timed. ``--schedules`` tries warps and heads of a
program besides the chosen ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvgen import reference_fused, runtime
from kvgen.bench import traffic
from kvgen.bench.task import Scene, Task
from kvgen.bench.timing import CudaClock
from kvgen.emit import render_layout
from kvgen.layout import KernelHints, Layout, ScheduleHints
from kvgen.resolve import load
from kvgen.stages import RmsNorm, Rope, rope_of, weighted

ROOT = Path(__file__).resolve().parent.parent
SETS, POSITIONS, POOL = 8, 1 << 16, 1 << 20
LAYOUTS = (
    "nhd_fused",
    "nhd_fused_mrope",
    "nhd_fp8_fused_once",
    "nhd_fp8_fused_chain",
    "packed_hnd_fused",
    "mla_record_fused",
)


@triton.jit
def _norm_kernel(
    x_ptr, weight_ptr, stride_token, stride_head, EPS: tl.constexpr, PLUS: tl.constexpr, DIM: tl.constexpr
):
    """RMS norm of one row of a token and head, in place."""
    dim = tl.arange(0, DIM)
    row = x_ptr + tl.program_id(0).to(tl.int64) * stride_token + tl.program_id(1) * stride_head + dim
    x = tl.load(row).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / DIM + EPS)
    weight = tl.load(weight_ptr + dim).to(tl.float32) + PLUS
    tl.store(row, (x * scale * weight).to(x_ptr.dtype.element_ty))


@triton.jit
def _rope_kernel(
    x_ptr,
    positions_ptr,
    table_ptr,
    stride_token,
    stride_head,
    START: tl.constexpr,
    PAIRS: tl.constexpr,
    NEOX: tl.constexpr,
):
    """The pairs of one row of a token and head turned, in place."""
    token, pair = tl.program_id(0).to(tl.int64), tl.arange(0, PAIRS)
    row = x_ptr + token * stride_token + tl.program_id(1) * stride_head + START
    angle = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * PAIRS) + pair
    cos, sin = tl.load(angle).to(tl.float32), tl.load(angle + PAIRS).to(tl.float32)
    if NEOX:
        first, second = row + pair, row + pair + PAIRS
    else:
        first, second = row + 2 * pair, row + 2 * pair + 1
    a, b = tl.load(first).to(tl.float32), tl.load(second).to(tl.float32)
    tl.store(first, (a * cos - b * sin).to(x_ptr.dtype.element_ty))
    tl.store(second, (b * cos + a * sin).to(x_ptr.dtype.element_ty))


@dataclasses.dataclass
class Inputs:
    """What one call of ``append_fused`` takes, dense tensors by stream in ``parts``."""

    task: Task
    given: dict[str, Tensor]
    parts: dict[str, Tensor]
    out: Tensor | None
    positions: Tensor | None
    weights: dict[str, Tensor]
    tables: dict[str, Tensor]

    @property
    def arguments(self) -> list[Tensor]:
        task = self.task
        found = [*self.given.values(), *([] if self.out is None else [self.out]), *task.buffers.values(), task.slots]
        found += [] if task.remap is None else [task.remap]
        found += [] if self.positions is None else [self.positions]
        return [*found, *self.weights.values(), *self.tables.values(), *task.scales.values()]

    @property
    def options(self) -> dict[str, int]:
        return {} if self.task.layer is None else {"layer": self.task.layer}


def inputs_of(layout: Layout, task: Task, tables: dict[str, Tensor], seed: int) -> Inputs:
    """A set of inputs; streams of a layout that takes them apart are slices of one projection."""
    fuse, tokens, generator = layout.fuse, len(task.slots), torch.Generator("cuda").manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    named = [*([layout.query] if layout.query and fuse.of("query") else []), *layout.streams]
    if fuse.packed:
        widths = [stream.axes[0].extent * stream.axes[1].extent for stream in (layout.query, *layout.streams)]
        given = {"qkv": random(tokens, sum(widths))}
        parts = {s.name: reference_fused.columns(layout, given["qkv"])[s.name] for s in named}
    else:
        parts = {s.name: task.streams.get(s.name) for s in named}
        if "query" in parts:
            parts["query"] = random(tokens, *(axis.extent for axis in layout.query.axes))
        given = parts
    weights = {s.name: random(s.axes[-1].extent) for s in (*layout.streams, *named[:1]) if weighted(fuse.of(s.name))}
    rows = 3 if fuse.mrope else 1
    positions = torch.randint(0, POSITIONS, (rows, tokens), generator=generator, device="cuda")
    positions = None if fuse.rope is None else positions if fuse.mrope else positions[0]
    out = torch.empty_like(parts["query"]) if "query" in parts else None
    return Inputs(task, given, parts, out, positions, weights, tables)


def tables_of(layout: Layout) -> dict[str, Tensor]:
    rope = layout.fuse.rope
    if rope is None or rope.theta is not None:
        return {}
    angle = torch.arange(POSITIONS, device="cuda")[:, None] * 1e6 ** (
        -torch.arange(rope.pairs, device="cuda") / rope.pairs
    )
    if rope.cos_sin == "split":
        return {"cos": angle.cos(), "sin": angle.sin()}
    return {"cos_sin": torch.cat([angle.cos(), angle.sin()], dim=1).contiguous()}


def check(layout: Layout, scene: Scene, module: Any, inputs: Inputs) -> None:
    """Compare a call with the reference. A row in millions may be rounded otherwise: see the page on numerics."""
    task = inputs.task
    scene.poison()
    twins = {name: buffer.clone() for name, buffer in task.buffers.items()}
    module.append_fused(*inputs.arguments, **inputs.options)
    out = None if inputs.out is None else torch.zeros_like(inputs.out)
    parameters = {"weights": inputs.weights, "tables": inputs.tables, "scales": task.scales}
    reference_fused.append_fused(
        layout,
        inputs.parts,
        twins,
        task.slots,
        inputs.positions,
        **parameters,
        query_out=out,
        remap=task.remap,
        **inputs.options,
    )
    pairs = [(task.buffers[name], twins[name]) for name in twins] + ([] if out is None else [(inputs.out, out)])
    for mine, theirs in pairs:
        wrong = (mine.view(torch.uint8) != theirs.view(torch.uint8)).sum().item()
        assert wrong <= 1e-6 * mine.numel(), f"{layout.name}: {wrong} bytes differ from the reference"


def chain(layout: Layout, module: Any, inputs: Inputs) -> Callable[[], None] | None:
    """Norm, rotary embedding and append in launches of their own; values are worked on in place, again and again."""
    if layout.fuse.mrope or layout.fuse.rope is None or "cos_sin" not in inputs.tables:
        return None
    launches: list[Callable[[], Any]] = []
    for name, part in inputs.parts.items():
        rows = part.unsqueeze(1) if part.dim() == 2 else part
        grid, strides = (len(rows), rows.shape[1]), (rows.stride(0), rows.stride(1))
        for step in layout.fuse.of(name):
            if isinstance(step, RmsNorm):
                numbers = (step.eps, float(step.weight == "plus_one"), rows.shape[2])
                launches.append(
                    lambda a=(rows, inputs.weights[name], *strides, *numbers), g=grid: _norm_kernel[g](*a, num_warps=1)
                )
            elif isinstance(step, Rope):
                numbers = (step.start, step.pairs, step.style == "neox")
                table = inputs.tables["cos_sin"]
                launches.append(
                    lambda a=(rows, inputs.positions, table, *strides, *numbers), g=grid: _rope_kernel[g](
                        *a, num_warps=1
                    )
                )
    launches.append(plain(module, inputs))

    def call() -> None:
        for launch in launches:
            launch()

    return call


def plain(module: Any, inputs: Inputs) -> Callable[[], None]:
    """``append`` of the streams as they are."""
    task = inputs.task
    streams = [inputs.parts[stream.name] for stream in task.layout.streams]
    extra = [] if task.remap is None else [task.remap]
    arguments = [*streams, *task.buffers.values(), task.slots, *extra, *task.scales.values()]
    return lambda: module.append(*arguments, **inputs.options)


def flashinfer(layout: Layout, inputs: Inputs) -> Callable[[], None] | None:
    """Rotary embedding of query and key, then the append: for plain pages whose values all turn by a joined table. Both
    are one launch for 8-bit floats under one scale.
    """
    rope = rope_of(layout.fuse.of("key"))
    task, shapes = inputs.task, {b.name: [d.digits[0].axis for d in b.place.dims if d.digits] for b in layout.buffers}
    if (
        list(shapes.values()) != [["block", "slot", "head", "dim"]] * 2
        or "cos_sin" not in inputs.tables
        or layout.fuse.mrope
    ):
        return None
    codes = {stream.encoding.code if stream.encoding else None for stream in layout.streams}
    if codes not in ({None}, {"float8_e4m3fn"}) or any(s.scale and s.scale.axes for s in layout.streams):
        return None
    try:
        import flashinfer as fi
    except ImportError:
        return None
    key, value = inputs.parts["key"], inputs.parts["value"]
    tokens, size = len(task.slots), task.block_size
    query = inputs.parts.get("query", torch.zeros(tokens, 1, key.shape[2], dtype=key.dtype, device="cuda"))
    pages = (task.slots // size).int()
    batch, count = (
        torch.arange(tokens, dtype=torch.int32, device="cuda"),
        torch.arange(tokens + 1, dtype=torch.int32, device="cuda"),
    )
    inner = (task.slots % size).int()
    key, query = key.contiguous(), query.contiguous()
    neox, table = rope.style == "neox", inputs.tables["cos_sin"]

    def call() -> None:
        fi.apply_rope_with_cos_sin_cache_inplace(
            inputs.positions, query.flatten(1), key.flatten(1), key.shape[2], table, neox
        )
        fi.append_paged_kv_cache(key, value, batch, inner, tuple(task.buffers.values()), pages, count, inner + 1, "NHD")

    if codes == {None}:
        return call
    turned, none = torch.empty_like(query, dtype=torch.float8_e4m3fn), query[..., :0]
    caches = tuple(buffer.view(torch.float8_e4m3fn) for buffer in task.buffers.values())
    places = {"kv_indices": pages, "kv_indptr": count, "batch_indices": batch, "positions": inner, "page_size": size}
    outputs = {"q_rope_out": turned, "q_nope_out": turned[..., :0]}
    return lambda: fi.rope.rope_quantize_fp8_append_paged_kv_cache(
        query, key, none, key[..., :0], value, table, inputs.positions, caches, is_neox=neox, **places, **outputs
    )


def moved(layout: Layout, scene: Scene, inputs: Inputs) -> int:
    """Bytes read and written by one call."""
    total = traffic.appended(layout, scene.extents, len(inputs.task.slots), scene.dtypes)
    if inputs.out is not None:
        total += 2 * inputs.out.numel() * inputs.out.element_size()
    rope = layout.fuse.rope
    return total + (len(inputs.task.slots) * rope.rotary_dim * 4 if inputs.tables else 0)


def measure(layout: Layout, clock: CudaClock, counts: list[int], schedules: bool) -> Iterator[dict[str, Any]]:
    module = runtime.import_module(layout.name, render_layout(layout))
    scene = Scene(layout, "cuda", max(counts), POOL)
    tables = tables_of(layout)
    for tokens in counts:
        sets = [inputs_of(layout, task, tables, i) for i, task in enumerate(scene.tasks(tokens, SETS))]
        check(layout, scene, module, sets[0])
        calls = [lambda s=s: module.append_fused(*s.arguments, **s.options) for s in sets]
        row = {"layout": layout.name, "tokens": tokens, "bytes": moved(layout, scene, sets[0])}
        row["fused"], row["host"] = clock.device_time(calls), clock.host_time(calls[:1])
        row["append"] = clock.device_time([plain(module, s) for s in sets])
        for name, made in (
            ("chain", [chain(layout, module, s) for s in sets]),
            ("flashinfer", [flashinfer(layout, s) for s in sets]),
        ):
            if made[0] is None:
                continue
            try:
                row[name] = clock.device_time(made)
            except Exception as error:  # another version of somebody's library is no reason to stop
                row[f"{name}_error"] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        if schedules:
            row["schedules"] = dict(tried(layout, clock, sets))
        yield row


def tried(layout: Layout, clock: CudaClock, sets: list[Inputs]) -> Iterator[tuple[str, float]]:
    for heads in ("all", 4, 2, 1):
        for warps in (1, 2, 4, 8):
            hints = ScheduleHints(append=KernelHints(heads=heads, num_warps=warps))
            other = dataclasses.replace(layout, schedule=hints)
            module = runtime.import_module(f"{layout.name}_{heads}_{warps}", render_layout(other))
            calls = [lambda s=s, m=module: m.append_fused(*s.arguments, **s.options) for s in sets]
            yield f"heads {heads}, warps {warps}", clock.device_time(calls)


def line(row: dict[str, Any], rate: float) -> str:
    speed = row["bytes"] / row["fused"] * 1e6
    text = (
        f"{row['layout']:20} T={row['tokens']:<6} {row['fused']:8.2f} us {speed / 1e12:5.2f} TB/s {speed / rate:4.0%}"
    )
    text += f"  host {row['host']:.1f}"
    for name in ("append", "chain", "flashinfer"):
        if name in row:
            text += f"  {name} {row[name]:.2f} (fused x{row['fused'] / row[name]:.2f})"
        elif f"{name}_error" in row:
            text += f"  {name}: {row[f'{name}_error']}"
    for name, time in sorted(row.get("schedules", {}).items(), key=lambda item: item[1])[:6]:
        text += f"\n{'':30}{name:20} {time:8.2f} us"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 32, 4096, 32768])
    parser.add_argument("--schedules", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    clock, rows = CudaClock(), []
    rate = clock.copy_rate()
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}; copy {rate / 1e12:.2f} TB/s")
    for name in args.layouts:
        for row in measure(load(ROOT / "layouts" / f"{name}.yaml"), clock, args.tokens, args.schedules):
            rows.append(row)
            print(line(row, rate), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"copy_rate": rate, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
