"""Measures schedules of a layout's functions. A schedule never changes a byte, which is checked of each one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvgen import runtime
from kvgen.bench.ahead import Job, compiling
from kvgen.bench.candidates import Choice, Times, candidates, choose, with_hints
from kvgen.bench.compare import difference, fill_pool, outcome
from kvgen.bench.functions import FUNCTIONS, Function, functions_of
from kvgen.bench.rivals import torch_reference
from kvgen.bench.run import Plan
from kvgen.bench.task import Scene, Task, number_of_sets
from kvgen.bench.timing import Clock
from kvgen.diagnostics import Diagnostic, KvgenError
from kvgen.layout import KernelHints, Layout


@dataclass(frozen=True, slots=True)
class Trial:
    """A schedule that was timed: ``hints`` (None: kvgen's own), and why it has no times if it has none."""

    kind: str
    hints: KernelHints | None
    times: Times
    note: str = ""


def trials(layout: Layout, kind: str, plan: Plan, clock: Clock) -> Iterator[Trial]:
    """A trial of kvgen's own schedule, then one of every candidate, as each is done.

    KvgenError if a schedule gives other bytes than the reference: that is a mistake of kvgen's.
    """
    (function,) = (function for function in FUNCTIONS if function.name == kind)
    plain = with_hints(layout, {kind: KernelHints()})
    module = runtime.import_module(layout.name, _text(plain))
    if not functions_of(layout, module, [kind]):
        return
    scene = Scene(layout, plan.device, max(plan.functions), plan.pool_tokens)
    tasks = {tokens: _tasks(scene, function, tokens, plan) for tokens in plan.functions}
    if function.reads:
        fill_pool(scene, module, [task for group in tasks.values() for task in group])
    texts = {hints: _text(with_hints(layout, {kind: hints})) for hints in candidates(layout, kind)}
    jobs = [Job(layout, text, dict.fromkeys(plan.functions, (kind,)), plan.pool_tokens) for text in texts.values()]
    with compiling(jobs, plan.device):
        pass
    yield _trial(scene, function, None, module, tasks, clock)
    for hints, text in texts.items():
        try:
            variant = runtime.import_module(layout.name, text)
            yield _trial(scene, function, hints, variant, tasks, clock)
        except (KvgenError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # one that a compiler refuses, or that asks for more than the device has
            yield Trial(kind, hints, {}, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")


def chosen(found: Sequence[Trial]) -> Choice:
    """The best of what was tried; the first trial is that of kvgen's own schedule."""
    own, *rest = found
    return choose(own.times, {trial.hints: trial.times for trial in rest if trial.hints and trial.times})


def _text(layout: Layout) -> str:
    from kvgen.emit.render import render_raw

    return render_raw(layout)


def _tasks(scene: Scene, function: Function, tokens: int, plan: Plan) -> list[Task]:
    count = number_of_sets(function.moved(scene, tokens), plan.cache_bytes)
    return [task.of(function.name) for task in scene.tasks(tokens, count)]


def _trial(
    scene: Scene,
    function: Function,
    hints: KernelHints | None,
    module: Any,
    tasks: Mapping[int, Sequence[Task]],
    clock: Clock,
) -> Trial:
    times = {}
    for tokens, group in tasks.items():
        calls = [function.call(module, task) for task in group]
        if wrong := _wrong(scene, function, group[0], calls[0]):
            name, which = scene.layout.name, "kvgen's own" if hints is None else str(hints)
            message = f"{name}: with another schedule {function.name} of {tokens} tokens gives other bytes: {wrong}"
            raise KvgenError(Diagnostic("KV745", message, hint=f"the schedule is {which}"))
        times[tokens] = clock.device_time(calls)
    return Trial(function.name, hints, times)


def _wrong(scene: Scene, function: Function, task: Task, call: Any) -> str:
    """How what a call leaves differs from what the reference does; empty if it does not."""
    got = [x.clone(memory_format=torch.contiguous_format) for x in outcome(scene, function, task, call)]
    reference = torch_reference(task)
    return difference(function, task, outcome(scene, function, task, reference), got)
