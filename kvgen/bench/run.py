"""Checks a layout's functions and their rivals against each other, and times those that agree."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kvgen import harness
from kvgen.bench.compare import difference, fill_pool, outcome
from kvgen.bench.functions import Function, functions_of, scene_of
from kvgen.bench.results import OURS, Row, Timing
from kvgen.bench.rivals import Call, Eager, Reference, Rival, Yardstick
from kvgen.bench.task import Scene, Task, number_of_sets
from kvgen.bench.timing import Clock
from kvgen.diagnostics import Diagnostic
from kvgen.documents import Document

REFERRED = 4096
"""Tokens of a call that is compared with the reference at the most."""

REFERENCE = "kvgen's reference: compared, not timed"

COPIED = 3
"""How often a yardstick is timed: much is judged by one figure, the median."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: ``functions`` (None: all) by how many tokens, who is compared, how large a pool is.

    ``cache_bytes``: the device's last-level cache, which inputs are not to stay in from one call to the next.
    ``programs``: caps of grids that transfers are launched with besides their own. ``measured`` are the times of
    yardsticks so far, which are the same for all that have their size.
    """

    device: str
    functions: Mapping[int, tuple[str, ...] | None]
    rivals: tuple[Rival, ...]
    pool_tokens: int
    cache_bytes: int
    programs: tuple[int, ...] = ()
    measured: dict[Hashable, float] = field(default_factory=dict)

    @property
    def names(self) -> set[str] | None:
        """All functions, at any number of tokens."""
        groups = self.functions.values()
        return None if None in groups else {name for names in groups for name in names or ()}


def harness_findings(layout: Document, module: Any, plan: Plan) -> list[Diagnostic]:
    """What the harness has against the functions that are to be timed: nobody needs wrong results fast."""
    names = [function.name for function in functions_of(layout, module, plan.names)]
    if not names:
        return []
    report = harness.run(layout, module, device=plan.device, only=names)
    if report.ok:
        return []
    failed = [result.case for result in report.results if result.outcome in ("failed", "missing")]
    message = f"{layout.name} is not timed: the harness fails in {failed[0]}"
    others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    return [Diagnostic("KV741", message + others, hint=f"`kvgen test {layout.name}` says what differs")]


def measure(layout: Document, module: Any, plan: Plan, clock: Clock | None) -> Iterator[Row]:
    """A row for each number of tokens and function, as it is found. Without a clock results are compared only."""
    wanted = {tokens: functions_of(layout, module, names) for tokens, names in plan.functions.items()}
    wanted = {tokens: functions for tokens, functions in wanted.items() if functions}
    if not wanted:
        return
    if plan.device == "cuda":
        torch.cuda.empty_cache()  # of the harness and of the layout before
    scene = scene_of(layout, module, plan.device, max(wanted), plan.pool_tokens)
    for tokens, functions in wanted.items():
        moved = {f.name: f.moved(scene, tokens) for f in functions}
        sets = number_of_sets(min(moved.values()), plan.cache_bytes) if clock else 1
        tasks = scene.tasks(tokens, sets)
        for function in functions:
            nbytes = moved[function.name]
            calls = [task.of(function.name, nbytes) for task in tasks]
            timings = _timings(scene, module, function, calls, plan, clock)
            yield Row(layout.name, function.name, tokens, nbytes, sets, tuple(timings))


def _timings(
    scene: Scene, module: Any, function: Function, tasks: Sequence[Task], plan: Plan, clock: Clock | None
) -> Iterator[Timing]:
    if function.reads:
        fill_pool(scene, module, tasks)
    ours = [function.call(module, task) for task in tasks]
    expected = _outcome(scene, function, tasks[0], ours[0])
    yield _time(OURS, ours, clock)
    for rival in plan.rivals:
        timing = _against(rival, module, scene, function, tasks, expected, plan, clock)
        if timing is not None:
            yield timing


def _against(
    rival: Rival,
    module: Any,
    scene: Scene,
    function: Function,
    tasks: Sequence[Task],
    expected: list[Tensor],
    plan: Plan,
    clock: Clock | None,
) -> Timing | None:
    """A rival's times, or why it has none; None where it does not do this at all."""
    try:
        first = rival.adapter(tasks[0])
        if first is None:
            return None
        if isinstance(first, Yardstick):
            return _beside(rival.name, first, len(tasks), plan, clock) if clock else None
        if isinstance(first, Reference):
            found = _refer(rival, module, scene, function, tasks[0], expected)
            return Timing(rival.name, None, None, f"differs: {found}" if found else REFERENCE if clock else "")
        if found := difference(function, tasks[0], expected, outcome(scene, function, tasks[0], first)):
            return Timing(rival.name, None, None, f"differs: {found}")
        return _time(rival.name, [first, *(rival.adapter(task) for task in tasks[1:])], clock)
    except (Exception, SystemExit) as error:  # somebody else's code may raise anything; other rows are still wanted
        text = str(error).strip().splitlines()
        return Timing(rival.name, None, None, f"raised {type(error).__name__}: {text[0] if text else ''}".rstrip(": "))


def _refer(rival: Rival, module: Any, scene: Scene, function: Function, task: Task, expected: list[Tensor]) -> str:
    """How what the reference leaves differs; of many tokens it is shown some."""
    if task.tokens > REFERRED:
        (task,) = (some.of(function.name) for some in scene.tasks(REFERRED, 1))
        expected = _outcome(scene, function, task, function.call(module, task))
    return difference(function, task, expected, outcome(scene, function, task, rival.adapter(task)))


def _outcome(scene: Scene, function: Function, task: Task, call: Call) -> list[Tensor]:
    """What a call leaves, to be kept."""
    return [x.clone(memory_format=torch.contiguous_format) for x in outcome(scene, function, task, call)]


def _beside(name: str, yardstick: Yardstick, sets: int, plan: Plan, clock: Clock) -> Timing:
    sets = sets if yardstick.cached else 1
    size = name, yardstick.size, sets
    if size not in plan.measured:
        calls = [yardstick.make() for _ in range(sets)]
        plan.measured[size] = median(clock.device_time(calls) for _ in range(COPIED))
    return Timing(name, plan.measured[size], None)


def _time(name: str, calls: Sequence[Call], clock: Clock | None) -> Timing:
    if clock is None:
        return Timing(name, None, None)
    host, add = clock.host_time(calls)
    if any(isinstance(call, Eager) for call in calls):
        return Timing(name, None, host, "not captured in a graph", add)
    return Timing(name, clock.device_time(calls), host, "", add)


def environment(device: str, rivals: Sequence[Rival]) -> tuple[str, dict[str, str]]:
    """The name of the device, and the versions of all that takes part."""
    import triton

    from kvgen import __version__

    versions = {OURS: __version__, "torch": torch.__version__, "triton": triton.__version__}
    versions |= {rival.name: rival.version for rival in rivals if rival.version}
    return torch.cuda.get_device_name() if device == "cuda" else "cpu", versions


def last_level_cache(device: str) -> int:
    """Bytes of the device's last-level cache; 0 where nothing is timed."""
    return torch.cuda.get_device_properties("cuda").L2_cache_size if device == "cuda" else 0
