"""What generated functions are compared with: PyTorch's indexing, kernels of installed libraries, anybody's function.

A function that is called as the generated one is needs no more than its name (``kvgen.against`` has the notation).
Others need an adapter: it takes a ``Task`` and gives a function without arguments that does the same work, or None
where it cannot. What it prepares is not timed. The function writes into ``task.buffers``; of a gather it returns the
rows of every stream in the order of ``task.streams`` (a tensor or a tuple), or fills ``task.outputs`` and returns None.
Wrapped in ``Eager`` it is never captured in a graph, and has a host time only.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvgen import reference
from kvgen.against import Target, stand_in
from kvgen.bench.functions import FUNCTIONS
from kvgen.bench.task import Task
from kvgen.diagnostics import Diagnostic, KvgenError
from kvgen.layout import Pad, Place, Stream
from kvgen.views import ByteView, leaf_places

Call = Callable[[], Any]
Adapter = Callable[[Task], Call | None]


@dataclass(frozen=True, slots=True)
class Eager:
    """A call that cannot be captured: it waits for the device, or makes tensors of numbers."""

    call: Call

    def __call__(self) -> Any:
        return self.call()


@dataclass(frozen=True, slots=True)
class Rival:
    """``version`` is that of its library, empty where there is none of its own."""

    name: str
    adapter: Adapter
    version: str = ""


def known_rivals() -> list[Rival]:
    """PyTorch, and those of the libraries that are known here which can be imported."""
    found = [Rival("torch", torch_indexing)]
    for package, adapter in (("flashinfer", flashinfer_append), ("vllm", vllm_append)):
        if importlib.util.find_spec(package):
            with contextlib.suppress(Exception):  # what is installed may still not work here
                version = getattr(importlib.import_module(package), "__version__", "")
                found.append(Rival(package, adapter, str(version)))
    return found


def against(target: Target, module: ModuleType) -> Rival:
    """A function that stands in for one of ``module``, which is generated. KvgenError as ``stand_in`` raises it."""
    own = getattr(stand_in([target], module), target.function)

    def adapter(task: Task) -> Call | None:
        if task.function != target.function:
            return None
        function = next(function for function in FUNCTIONS if function.name == task.function)
        positional, options = function.arguments(task)
        if target.arguments is not None and "out" not in target.names:
            options.pop("out", None)
        return lambda: own(*positional, **options)

    return Rival(target.text, adapter)


def load_adapter(name: str) -> Rival:
    """The adapter that ``module:function`` names. KvgenError if it cannot be imported."""
    module, _, function = name.partition(":")
    try:
        adapter = getattr(importlib.import_module(module), function)
    except Exception as error:  # a module may raise anything while it is imported
        hint = "write module:function, with the module where Python finds it (PYTHONPATH)"
        message = f"{name} cannot be imported: {type(error).__name__}: {error}"
        raise KvgenError(Diagnostic("KV742", message, hint=hint)) from None
    if not callable(adapter):
        raise KvgenError(Diagnostic("KV742", f"{name} is no function", hint="write module:function"))
    return Rival(name, adapter)


def torch_indexing(task: Task) -> Call | None:
    """``cache[slots] = rows`` and back, on views of the pool; where bytes have another meaning, kvgen's reference.

    A paged gather is given its slots: what it costs to find them is not counted.
    """
    if task.function in ("copy_blocks", "zero_blocks"):
        return _torch_pages(task)
    caches = _plain_caches(task)
    if caches is None or task.remap is not None:
        return torch_reference(task)
    sides = []
    for name, rows in task.streams.items():
        cache, index = _by_slot(_words(caches[name]), task.block_size)
        sides.append((cache, index, _words(rows), (len(rows), *caches[name].shape[2:])))
    if task.function == "append":

        def append() -> None:
            for cache, index, rows, shape in sides:
                cache[index(task.slots)] = rows.reshape(shape)

        return append
    if task.function.startswith("gather"):
        dtypes = [rows.dtype for rows in task.streams.values()]

        def gather() -> tuple[Tensor, ...]:
            found = (cache[index(task.slots)].reshape(rows.shape) for cache, index, rows, _ in sides)
            return tuple(rows.view(dtype) for rows, dtype in zip(found, dtypes, strict=True))

        return gather
    return None


def torch_reference(task: Task) -> Call | None:
    """kvgen's reference, which knows every layout."""
    options: dict[str, Any] = {"remap": task.remap, "layer": task.layer, "scales": task.scales}
    given = (task.layout, task.buffers)
    if task.function == "append":
        return Eager(lambda: reference.append(task.layout, task.streams, task.buffers, task.slots, **options))
    kinds = {rows.dtype for rows in task.outputs.values()}
    options["dtype"] = kinds.pop() if len(kinds) == 1 else None
    if task.function == "gather":
        return Eager(lambda: tuple(reference.gather(*given, task.slots, **options).values()))
    if task.function == "gather_paged":
        tables = (task.block_table, task.seq_lens, task.cu_seq_lens)
        options |= {"starts": task.starts, "total_tokens": len(task.slots)}
        return Eager(lambda: tuple(reference.gather_paged(*given, *tables, **options).values()))
    return None


def _torch_pages(task: Task) -> Call | None:
    """``cache[to] = cache[from]`` of every buffer, where a dimension starts with blocks and nothing is padded."""
    layout, sides = task.layout, []
    for buffer in layout.buffers:
        axes = [[digit.axis for digit in dim.digits] for dim in buffer.place.dims]
        found = [i for i, names in enumerate(axes) if names[:1] == ["block"] and names.count("block") == 1]
        if len(found) != 1 or sum(names.count("block") for names in axes) != 1 or _pads(buffer.place):
            return None
        blocks = _words(task.buffers[buffer.name]).unflatten(found[0], (task.blocks, -1))
        sides.append((blocks, found[0]))
    source, target = task.pairs.unbind(1)
    if task.function == "zero_blocks":
        return lambda: [cache.index_fill_(dim, target, 0) for cache, dim in sides]
    return lambda: [cache.index_copy_(dim, target, cache.index_select(dim, source)) for cache, dim in sides]


def _words(tensor: Tensor) -> Tensor:
    """Bytes in the place of types that torch has no indexing for."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def flashinfer_append(task: Task) -> Call | None:
    """``flashinfer.append_paged_kv_cache``: keys and values as they come, in pages whose strides are the same."""
    caches = _key_and_value(task)
    if caches is None or caches[0].stride() != caches[1].stride():
        return None
    import flashinfer

    key, value = task.streams.values()
    batch, positions = task.request_ids.int(), task.positions.int()
    pages = -(-task.seq_lens // task.block_size)
    used = torch.arange(task.block_table.shape[1], device=pages.device) < pages[:, None]
    indices = task.block_table[used]
    indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
    last = (task.seq_lens - (pages - 1) * task.block_size).int()
    by_head = caches[0].stride(2) > caches[0].stride(1)
    pool = tuple(cache.transpose(1, 2) for cache in caches) if by_head else caches
    arguments = (key, value, batch, positions, pool, indices, indptr, last, "HND" if by_head else "NHD")
    return lambda: flashinfer.append_paged_kv_cache(*arguments)


def vllm_append(task: Task) -> Call | None:
    """vLLM's ``reshape_and_cache_flash``: keys and values as they come, or as fp8 codes under one static scale."""
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


def _static_fp8(stream: Stream) -> bool:
    scale = stream.scale
    return (
        scale is not None
        and stream.encoding.mode == "fp8_e4m3"
        and (scale.stored, scale.axes, scale.arithmetic, scale.given) == (False, (), "divide", "scale")
    )


def _key_and_value(task: Task, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor] | None:
    """Two pools ``[blocks, block_size, heads, dim]`` for an append of key and value, None if they are not so."""
    shapes = [x.shape[1:] for x in task.streams.values()]
    if task.function != "append" or len(shapes) != 2 or shapes[0] != shapes[1] or len(shapes[0]) != 2:
        return None
    if task.remap is not None:
        return None
    caches = _plain_caches(task, dtype)
    if caches is None or any(cache.dim() != 4 or cache.stride(-1) != 1 for cache in caches.values()):
        return None
    first, second = caches.values()
    return first, second


def _plain_caches(task: Task, codes: torch.dtype | None = None) -> dict[str, Tensor] | None:
    """A view ``[blocks, block_size, …]`` of every stream where it is stored, once, as it comes; None otherwise.

    What follows are its axes, one that strides do not join in several dimensions. ``codes`` is the type to view codes
    as; without it there is nothing for encoded streams.
    """
    layout = task.layout
    if any(_fills(buffer.place) for buffer in layout.buffers):
        return None
    if codes is None and any(stream.encoding for stream in layout.streams):
        return None
    places, found = leaf_places(layout, task.buffers), {}
    for name, rows in task.streams.items():
        view = _typed(places[name][0].select("layer", task.layer or 0), codes or rows.dtype)
        if view is None or len(places[name]) > 1:
            return None
        found[name] = view
    return found


def _fills(place: Place | Pad) -> bool:
    """Whether padding in it is written with its token."""
    if isinstance(place, Pad):
        return place.fill is not None
    return any(_fills(field.content) for field in getattr(place.content, "fields", ()))


def _pads(place: Place | Pad) -> bool:
    """Whether there are bytes in it that nothing is stored in."""
    if isinstance(place, Pad):
        return place.fill is None
    return place.pitch != getattr(place.content, "size", place.pitch) or any(
        _pads(field.content) for field in getattr(place.content, "fields", ())
    )


def _typed(view: ByteView, dtype: torch.dtype) -> Tensor | None:
    """Bytes as values, digits of an axis joined where strides allow it; None unless block and slot are one each."""
    try:
        tensor = view.tensor.view(dtype).squeeze(-1)
    except RuntimeError:  # values that are not aligned to their size
        return None
    axes = [digit.axis for digit in view.digits]
    for i in reversed(range(1, len(axes))):
        if axes[i] == axes[i - 1] and tensor.stride(i - 1) == tensor.stride(i) * tensor.shape[i]:
            tensor = tensor.flatten(i - 1, i)
            del axes[i]
    whole = view.pack is None and axes[:2] == ["block", "slot"] and "slot" not in axes[2:]
    return tensor if whole else None


def _by_slot(cache: Tensor, block_size: int) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """The cache and what its rows are found by: their slots, or block and slot where the strides do not join these."""
    if cache.stride(0) == cache.stride(1) * block_size:
        return cache.flatten(0, 1), lambda slots: (slots,)
    return cache, lambda slots: (slots // block_size, slots % block_size)
