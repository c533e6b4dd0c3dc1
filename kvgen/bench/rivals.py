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
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvgen import reference, reference_fused
from kvgen.against import Target, stand_in
from kvgen.bench import libraries
from kvgen.bench.caches import by_slot, pads, plain_caches, words
from kvgen.bench.functions import FUNCTIONS
from kvgen.bench.task import Scene, Task
from kvgen.bench.transfers import TransferTask
from kvgen.diagnostics import Diagnostic, KvgenError
from kvgen.documents import Document
from kvgen.layout import Layout

Call = Callable[[], Any]

PIECE = 1 << 28
"""Bytes of one copy at the most: within a graph, larger ones run at two thirds of the rate on an H200."""


@dataclass(frozen=True, slots=True)
class Eager:
    """A call that cannot be captured: it waits for the device, or makes tensors of numbers."""

    call: Call

    def __call__(self) -> Any:
        return self.call()


@dataclass(frozen=True, slots=True)
class Reference(Eager):
    """kvgen's own reference, which says what is right and takes its time: compared, and not timed."""


@dataclass(frozen=True, slots=True)
class Yardstick:
    """A call that does something else of the same size: not compared, and timed once for every ``size``.

    ``make`` makes tensors and call anew; ``cached`` says that a device's cache could hold the tensors.
    """

    make: Callable[[], Call]
    size: Hashable
    cached: bool


Adapter = Callable[[Task | TransferTask], Call | Yardstick | None]


@dataclass(frozen=True, slots=True)
class Rival:
    """``version`` is that of its library, empty where there is none of its own."""

    name: str
    adapter: Adapter
    version: str = ""


def known_rivals(device: str) -> list[Rival]:
    """PyTorch, and on a GPU those of the libraries that are known here which can be imported."""
    found = [Rival("torch", torch_indexing), Rival("copy", copy)]
    if device == "cpu":
        return found
    for package, adapter in (("flashinfer", libraries.flashinfer), ("vllm", libraries.vllm)):
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


def capped(module: ModuleType, programs: int) -> Rival:
    """A transfer's own function, launched with no more than so many programs."""

    def adapter(task: Task | TransferTask) -> Call | None:
        if not isinstance(task, TransferTask):
            return None
        function = next(function for function in FUNCTIONS if function.name == task.function)
        positional, options = function.arguments(task)
        return lambda: getattr(module, task.function)(*positional, **options, programs=programs)

    return Rival(f"{programs} programs", adapter)


def prepare(
    rivals: Sequence[Rival], documents: Sequence[Document], functions: Collection[str] | None, device: str
) -> None:
    """Call the kernels of libraries for ``functions`` (None: all) once, which they may compile only then, in threads.

    What goes wrong is left to those who call them again.
    """
    layouts = [document for document in documents if isinstance(document, Layout)]
    tasks = [task for layout in layouts for task in Scene(layout, device, 1).tasks(1, 1)]
    calls: dict[tuple[str, str, int], Call] = {}
    wanted = [name for name in ("append", "append_fused") if functions is None or name in functions]
    for rival, task, function in product((rival for rival in rivals if rival.version), tasks, wanted):
        if function == "append" or task.fused:
            with contextlib.suppress(Exception):
                if call := rival.adapter(task.of(function)):
                    calls.setdefault((rival.name, function, next(iter(task.streams.values())).dim()), call)
    with ThreadPoolExecutor(max(len(calls), 1)) as pool:
        for future in [pool.submit(call) for call in calls.values()]:
            with contextlib.suppress(Exception):
                future.result()


def load_adapter(name: str) -> Rival:
    """The adapter that ``module:function`` names. KvgenError if it cannot be imported."""
    module, _, function = name.partition(":")
    try:
        adapter = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        hint = "write module:function, with the module where Python finds it (PYTHONPATH)"
        message = f"{name} cannot be imported: {type(error).__name__}: {error}"
        raise KvgenError(Diagnostic("KV742", message, hint=hint)) from None
    if not callable(adapter):
        raise KvgenError(Diagnostic("KV742", f"{name} is no function", hint="write module:function"))
    return Rival(name, adapter)


def torch_indexing(task: Task | TransferTask) -> Call | None:
    """``cache[slots] = rows`` and back, on views of the pool; where bytes have another meaning, kvgen's reference.

    A paged gather is given its slots: what it costs to find them is not counted.
    """
    if task.function in ("copy_blocks", "zero_blocks"):
        return _torch_pages(task)
    if task.function == "append_fused" or isinstance(task, TransferTask):
        return torch_reference(task)
    caches = plain_caches(task)
    if caches is None or task.remap is not None:
        return torch_reference(task)
    sides = []
    for name, rows in task.streams.items():
        cache, index = by_slot(words(caches[name]), task.block_size)
        sides.append((cache, index, words(rows), (len(rows), *caches[name].shape[2:])))
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


def copy(task: Task | TransferTask) -> Yardstick:
    """As many bytes from one tensor to another, which lie where the function's do, in pieces of ``PIECE`` at most."""
    half = max(task.moved // 2, 1)
    if isinstance(task, TransferTask):
        places = [(side.device, side.pinned) for side in task.sides]
    else:
        places = [(task.slots.device.type, False)] * 2

    def make() -> Call:
        source, target = (
            torch.zeros(half, dtype=torch.uint8, device=device, pin_memory=pinned) for device, pinned in places
        )
        pieces = list(zip(target.split(PIECE), source.split(PIECE), strict=True))

        def call() -> None:
            for to, from_ in pieces:
                to.copy_(from_, non_blocking=True)

        return call

    return Yardstick(make, (half, *places), cached=not any(pinned for _, pinned in places))


def torch_reference(task: Task | TransferTask) -> Call | None:
    """kvgen's reference, which knows every layout."""
    if isinstance(task, TransferTask):
        return Reference(task.reference)
    options: dict[str, Any] = {"remap": task.remap, "layer": task.layer, "scales": task.scales}
    given = (task.layout, task.buffers)
    if task.function == "append":
        return Reference(lambda: reference.append(task.layout, task.streams, task.buffers, task.slots, **options))
    if task.function == "append_fused":
        return _fused_reference(task)
    kinds = {rows.dtype for rows in task.outputs.values()}
    options["dtype"] = kinds.pop() if len(kinds) == 1 else None
    if task.function == "gather":
        return Reference(lambda: tuple(reference.gather(*given, task.slots, **options).values()))
    if task.function == "gather_paged":
        tables = (task.block_table, task.seq_lens, task.cu_seq_lens)
        options |= {"starts": task.starts, "total_tokens": len(task.slots)}
        return Reference(lambda: tuple(reference.gather_paged(*given, *tables, **options).values()))
    return None


def _fused_reference(task: Task) -> Call:
    fused = task.fused
    options = {
        "weights": fused.weights,
        "tables": fused.tables,
        "query_out": fused.query_out,
        "remap": task.remap,
        "layer": task.layer,
        "scales": task.scales,
    }
    given = (task.layout, fused.parts, task.buffers, task.slots, fused.positions)
    return Reference(lambda: reference_fused.append_fused(*given, **options))


def _torch_pages(task: Task) -> Call | None:
    """``cache[to] = cache[from]`` of every buffer, where a dimension starts with blocks and nothing is padded."""
    layout, sides = task.layout, []
    for buffer in layout.buffers:
        axes = [[digit.axis for digit in dim.digits] for dim in buffer.place.dims]
        found = [i for i, names in enumerate(axes) if names[:1] == ["block"] and names.count("block") == 1]
        if len(found) != 1 or sum(names.count("block") for names in axes) != 1 or pads(buffer.place):
            return None
        blocks = words(task.buffers[buffer.name]).unflatten(found[0], (task.blocks, -1))
        sides.append((blocks, found[0]))
    source, target = task.pairs.unbind(1)
    if task.function == "zero_blocks":
        return lambda: [cache.index_fill_(dim, target, 0) for cache, dim in sides]
    return lambda: [cache.index_copy_(dim, target, cache.index_select(dim, source)) for cache, dim in sides]
