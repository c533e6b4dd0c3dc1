"""What a call leaves, and whether two calls leave the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvgen import reference
from kvgen.bench.functions import Function, functions_of
from kvgen.bench.task import Scene, Task
from kvgen.harness.fused_bounds import STEPS, code_step
from kvgen.views import leaf_places

PART = 1 << 28
"""Bytes that are looked through at a time."""


def fill_pool(scene: Scene, module: Any, tasks: Sequence[Task]) -> None:
    """Put into the pool what tasks are to read; what cannot be appended is read as it happens to be."""
    scene.poison()
    for function in functions_of(scene.layout, module, ["append"]):
        for task in tasks:
            function.call(module, task)()


def outcome(scene: Scene, function: Function, task: Task, call: Callable[[], Any]) -> list[Tensor]:
    """What a call leaves where everything it is to write was poisoned before; tensors of the task or of the call."""
    _finished()  # host memory is looked at without waiting for what the GPU does to it
    function.prepare(scene, task)
    results = list(function.results(task, call()))
    _finished()
    return results


def _finished() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def difference(function: Function, task: Task, expected: Sequence[Tensor], got: Sequence[Tensor]) -> str:
    """What differs first, in words; empty if nothing does.

    Of a fused append the values of its tokens may, by what rounding between its steps comes to: then ``got`` is given
    those that are ``expected``.
    """
    names = list(task.outputs) if function.reads else list(task.buffers)
    if function.writes == "staged":
        names += ["query_out"] if task.fused.query_out is not None else []
        if found := _staged_difference(task, expected, got):
            return found
    if len(got) != len(expected):
        return f"it gives {len(got)} tensors, not {len(expected)}"
    for name, want, have in zip(names, expected, got, strict=True):
        if not isinstance(have, Tensor) or have.shape != want.shape or have.dtype != want.dtype:
            shape = f"{tuple(have.shape)} {have.dtype}" if isinstance(have, Tensor) else type(have).__name__
            return f"{name} is {shape}, not {tuple(want.shape)} {want.dtype}"
        left, right = (x.contiguous().view(torch.uint8).flatten() for x in (want, have))
        if not torch.equal(left, right):
            return f"{_unequal(left, right)} of {name}"
    return ""


def _staged_difference(task: Task, expected: Sequence[Tensor], got: Sequence[Tensor]) -> str:
    """Which values of the tokens are too far apart; those that are not are made the same."""
    layout, options = task.layout, {"layer": task.layer, "scales": task.scales}
    pools = [_buffers(task, side) for side in (expected, got)]
    rows = [reference.gather(layout, pool, task.slots, remap=task.remap, **options) for pool in pools]
    limits = {stream.name: 2 * code_step(stream) for stream in layout.streams}
    if task.fused.query_out is not None:
        rows = [side | {"query_out": tensors[-1]} for side, tensors in zip(rows, (expected, got), strict=True)]
        limits["query_out"] = 2 * STEPS["bfloat16"]
    for name, limit in limits.items():
        want, have = (side[name].float() for side in rows)
        apart = (want - have).abs() > limit * want.abs().amax(-1, keepdim=True)
        if apart.any():
            return f"{int(apart.sum())} of {apart.numel()} values of {name}"
    numbers = reference.resolve_slots(layout, task.slots, task.blocks * task.block_size, task.remap)[1]
    for leaf, places in leaf_places(layout, pools[0]).items():
        for source, target in zip(places, leaf_places(layout, pools[1])[leaf], strict=True):
            views = [view.select("layer", task.layer or 0) for view in (source, target)]
            index = views[1].at(numbers, task.block_size)
            views[1].tensor[index] = views[0].tensor[index]
    if task.fused.query_out is not None:
        got[-1].copy_(expected[-1])
    return ""


def _buffers(task: Task, storages: Sequence[Tensor]) -> dict[str, Tensor]:
    """The pool's tensors over other bytes."""
    found = {}
    for (name, tensor), storage in zip(task.buffers.items(), storages, strict=False):
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        found[name] = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage.untyped_storage(), *place)
    return found


def _unequal(left: Tensor, right: Tensor) -> str:
    """How many bytes are not the same and which is the first, part by part: pools are large."""
    first, count = -1, 0
    for number, parts in enumerate(zip(left.split(PART), right.split(PART), strict=True)):
        unequal = parts[0] != parts[1]
        if first < 0 and unequal.any():
            first = number * PART + int(unequal.byte().argmax())
        count += int(unequal.sum())
    return f"byte {first} and {count - 1} more of {left.numel()}"
