"""Kernels of installed libraries as rivals: each adapter takes a task and gives a call, or None where it has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvgen.bench.caches import plain_caches
from kvgen.bench.task import Task
from kvgen.layout import Stream
from kvgen.stages import RmsNorm, Rope, Step

Call = Callable[[], Any]
LATENT, ROPE = 512, 64
"""Sizes of the one kind of MLA rows that FlashInfer appends."""


def flashinfer(task: Task) -> Call | None:
    """``append_paged_kv_cache``, ``append_paged_mla_kv_cache``, and what stands for a fused append."""
    if task.function == "append":
        pages = _flashinfer_pages(task, *task.streams.values()) if len(task.streams) == 2 else None
        return pages or _flashinfer_mla(task)
    return _flashinfer_fused(task) if task.function == "append_fused" and task.fused else None


def _flashinfer_pages(task: Task, key: Tensor, value: Tensor) -> Call | None:
    """Keys and values as they come, in pages whose strides are the same."""
    caches = _key_and_value(task)
    if caches is None or caches[0].stride() != caches[1].stride():
        return None
    from flashinfer import append_paged_kv_cache

    by_head = caches[0].stride(2) > caches[0].stride(1)
    pool = tuple(cache.transpose(1, 2) for cache in caches) if by_head else caches
    token, pages = _flashinfer_tables(task)
    arguments = (key, value, *token, pool, *pages, "HND" if by_head else "NHD")
    return lambda: append_paged_kv_cache(*arguments)


def _flashinfer_mla(task: Task) -> Call | None:
    """Latent and rope part as they come, in one row or in two."""
    shapes = [tuple(x.shape[1:]) for x in task.streams.values()]
    caches = plain_caches(task) if shapes == [(LATENT,), (ROPE,)] and task.remap is None else None
    if caches is None or any(cache.dim() != 3 for cache in caches.values()):
        return None
    from flashinfer import page

    token, pages = _flashinfer_tables(task)
    arguments = (*task.streams.values(), *token, *caches.values(), *pages)
    return lambda: page.append_paged_mla_kv_cache(*arguments)


def _flashinfer_tables(task: Task) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Where each token belongs, request and position; and the pages of each request: indices, bounds, last length."""
    pages = -(-task.seq_lens // task.block_size)
    used = torch.arange(task.block_table.shape[1], device=pages.device) < pages[:, None]
    bounds = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
    last = (task.seq_lens - (pages - 1) * task.block_size).int()
    return (task.request_ids.int(), task.positions.int()), (task.block_table[used], bounds, last)


def _flashinfer_fused(task: Task) -> Call | None:
    """PyTorch's RMS norm of key and query, FlashInfer's rotary embedding of both, and its append, one by one.

    The last two are one launch where they make fp8 codes.
    """
    fuse, fused = task.layout.fuse, task.fused
    steps = {name: fuse.of(name) for name in fused.parts}
    staged = [name for name in ("key", "query") if steps.get(name)]
    if set(steps) - {"key", "value", "query"} or steps.get("value") or "cos_sin" not in fused.tables or fuse.mrope:
        return None
    key = fused.parts["key"]
    if "key" not in staged or not all(_flashinfer_steps(steps[name], key.shape[-1]) for name in staged):
        return None
    outs = {"key": torch.empty_like(key, memory_format=torch.contiguous_format)}
    outs["query"] = fused.query_out if "query" in staged else torch.zeros_like(outs["key"][:, :1])
    neox = steps["key"][-1].style == "neox"
    rest = _flashinfer_rest(task, outs, neox) or _flashinfer_fp8(task, outs, neox)
    if rest is None:
        return None
    norms = [_norm(steps[s][:-1], fused.parts[s], fused.weights.get(s), outs[s]) for s in staged]

    def call() -> None:
        for norm in norms:
            norm()
        rest()

    return call


def _flashinfer_rest(task: Task, outs: dict[str, Tensor], neox: bool) -> Call | None:
    """Rotary embedding in place, and the append."""
    append = _flashinfer_pages(task, outs["key"], task.fused.parts["value"])
    if append is None:
        return None
    from flashinfer import apply_rope_with_cos_sin_cache_inplace as turn

    flat, dim = [outs[name].flatten(1) for name in ("query", "key")], outs["key"].shape[-1]

    def call() -> None:
        turn(task.fused.positions, *flat, dim, task.fused.tables["cos_sin"], neox)
        append()

    return call


def _flashinfer_fp8(task: Task, outs: dict[str, Tensor], neox: bool) -> Call | None:
    """Rotary embedding, codes of key and value under one scale, and the append; not with a query, made codes too."""
    scales = {float(scale) for scale in task.scales.values() if scale.numel() == 1}
    coded = all(_static_fp8(stream) for stream in task.layout.streams)
    caches = _key_and_value(task, torch.float8_e4m3fn) if coded and len(scales) == 1 else None
    if caches is None or "query" in task.fused.parts:
        return None
    from flashinfer import rope

    (batch, positions), (indices, bounds, _) = _flashinfer_tables(task)
    by_head = caches[0].stride(2) > caches[0].stride(1)
    pool = tuple(cache.transpose(1, 2) for cache in caches) if by_head else caches
    key, query, value = outs["key"], outs["query"], task.fused.parts["value"]
    codes = torch.empty_like(query, dtype=torch.float8_e4m3fn)
    options = {"is_neox": neox, "quant_scale_kv": 1 / scales.pop(), "page_size": task.block_size}
    options |= {"kv_layout": "HND" if by_head else "NHD", "q_rope_out": codes, "q_nope_out": codes[..., :0]}
    tokens = (query, key, query[..., :0], key[..., :0], value, task.fused.tables["cos_sin"], task.fused.positions)
    return lambda: rope.rope_quantize_fp8_append_paged_kv_cache(
        *tokens, pool, indices, bounds, batch, positions, **options
    )


def _flashinfer_steps(steps: tuple[Step, ...], dim: int) -> bool:
    """A norm with a weight, or none, and then an embedding of all values."""
    *norms, rope = steps
    known = all(isinstance(norm, RmsNorm) and norm.weight != "none" for norm in norms)
    return known and len(norms) < 2 and isinstance(rope, Rope) and rope.rotary_dim == dim


def _norm(steps: tuple[Step, ...], rows: Tensor, weight: Tensor | None, out: Tensor) -> Call:
    """PyTorch's: FlashInfer compiles its own for minutes."""
    if not steps:
        return lambda: out.copy_(rows)
    (norm,) = steps
    factor = weight + 1 if norm.weight == "plus_one" else weight
    return lambda: out.copy_(torch.nn.functional.rms_norm(rows, rows.shape[-1:], factor, norm.eps))


def vllm(task: Task) -> Call | None:
    """``reshape_and_cache_flash`` and ``concat_and_cache_mla``."""
    return (_vllm_pages(task) or _vllm_mla(task)) if task.function == "append" else None


def _vllm_pages(task: Task) -> Call | None:
    """Keys and values as they come, or as fp8 codes under one static scale."""
    codes = [_static_fp8(stream) for stream in task.layout.streams]
    caches = _key_and_value(task, torch.uint8 if all(codes) else None)
    if caches is None:
        return None
    import vllm._C  # noqa: F401 - registers the operator

    operator = torch.ops._C_cache_ops.reshape_and_cache_flash
    one = torch.ones(1, device=task.slots.device)
    scales = tuple(task.scales.values()) if all(codes) else (one, one)
    arguments = (*task.streams.values(), *caches, task.slots, "fp8" if all(codes) else "auto", *scales)
    return lambda: operator(*arguments)


def _vllm_mla(task: Task) -> Call | None:
    """Latent and rope part as they come, in one row."""
    caches = plain_caches(task) if [x.dim() for x in task.streams.values()] == [2, 2] and task.remap is None else None
    if caches is None or any(cache.dim() != 3 for cache in caches.values()):
        return None
    latent, rope = caches.values()
    width = latent.shape[2] + rope.shape[2]
    if latent.stride() != rope.stride() or rope.data_ptr() - latent.data_ptr() != latent.shape[2] * latent.itemsize:
        return None
    import vllm._C  # noqa: F401 - registers the operator

    operator = torch.ops._C_cache_ops.concat_and_cache_mla
    rows = latent.as_strided((*latent.shape[:2], width), latent.stride())
    arguments = (*task.streams.values(), rows, task.slots, "auto", torch.ones(1, device=task.slots.device))
    return lambda: operator(*arguments)


def _static_fp8(stream: Stream) -> bool:
    scale = stream.scale
    return (
        scale is not None
        and stream.encoding.mode == "fp8_e4m3"
        and (scale.stored, scale.axes, scale.arithmetic, scale.given) == (False, (), "divide", "scale")
    )


def _key_and_value(task: Task, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor] | None:
    """Two pools ``[blocks, block_size, heads, dim]`` of key and value, None if they are not so."""
    shapes = [x.shape[1:] for x in task.streams.values()]
    if len(shapes) != 2 or shapes[0] != shapes[1] or len(shapes[0]) != 2:
        return None
    if task.remap is not None:
        return None
    caches = plain_caches(task, dtype)
    if caches is None or any(cache.dim() != 4 or cache.stride(-1) != 1 for cache in caches.values()):
        return None
    first, second = caches.values()
    return first, second
