"""What a call leaves, and whether two calls leave the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvgen.bench.functions import Function, functions_of
from kvgen.bench.task import Scene, Task

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
    function.prepare(scene, task)
    return list(function.results(task, call()))


def difference(function: Function, task: Task, expected: Sequence[Tensor], got: Sequence[Tensor]) -> str:
    """What differs first, in words; empty if nothing does."""
    names = list(task.outputs) if function.reads else list(task.buffers)
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


def _unequal(left: Tensor, right: Tensor) -> str:
    """How many bytes are not the same and which is the first, part by part: pools are large."""
    first, count = -1, 0
    for number, parts in enumerate(zip(left.split(PART), right.split(PART), strict=True)):
        unequal = parts[0] != parts[1]
        if first < 0 and unequal.any():
            first = number * PART + int(unequal.byte().argmax())
        count += int(unequal.sum())
    return f"byte {first} and {count - 1} more of {left.numel()}"
