"""Schedules worth trying, and the choice among those that were timed. Pure: nothing here runs anything."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvgen.axes import padded_side
from kvgen.layout import FewHints, KernelHints, Layout
from kvgen.lower import lower
from kvgen.plan import Plan
from kvgen.schedule import DYNAMIC_SIDE, Schedule, schedule

KINDS = ("append", "gather")
"""What a layout's ``schedule`` has an entry for, each timed by the function of that name."""

TOKENS = (1, 2, 4, 8, 16, 32)
WARPS = (1, 2, 4, 8)
THREADS = 32  # of a warp
PER_THREAD = (1, 64)  # values of one stream that a thread holds, at the least and at the most

GAIN = 0.03
"""What a schedule must save before it is preferred to a simpler one: less is noise."""

Times = Mapping[int, float]
"""Microseconds of a call by its number of tokens."""


def candidates(layout: Layout, kind: str) -> tuple[KernelHints, ...]:
    """Different schedules of ``append`` or ``gather``, none of which leaves threads idle or overfills them.

    Hints that come to the same schedule, because heads cannot be divided, say, are one candidate.
    """
    plan = next((plan for plan in lower(layout) if plan.kind == kind), None)
    if plan is None:
        return ()
    heads = ("all", *(1 << i for i in range(_most_heads(layout).bit_length())))
    found: dict[tuple[int, int | None, int], KernelHints] = {}
    for wish in product(TOKENS, heads, WARPS):
        hints = KernelHints(*wish)
        chosen = schedule(with_hints(layout, {kind: hints}), plan)
        each = chosen.tokens * _row(layout, plan, chosen) / (THREADS * chosen.num_warps)
        if PER_THREAD[0] <= each <= PER_THREAD[1]:
            found.setdefault((chosen.tokens, chosen.heads, chosen.num_warps), hints)
    return tuple(found.values())


def with_hints(layout: Layout, hints: Mapping[str, KernelHints]) -> Layout:
    """The layout with other schedules for some kinds of kernels."""
    return replace(layout, schedule=replace(layout.schedule, **hints))


def _most_heads(layout: Layout) -> int:
    extents = [axis.extent for stream in layout.streams for axis in stream.axes if axis.name == "head"]
    return max((extent - 1 for extent in extents if extent is not None), default=0)


def _row(layout: Layout, plan: Plan, chosen: Schedule) -> int:
    """Values of a token of the widest stream that a program holds."""
    rows = []
    for copy in plan.copies:
        sides = {axis.name: padded_side(axis.extent) or DYNAMIC_SIDE for axis in layout.stream(copy.stream).axes}
        if "head" in sides and chosen.heads is not None:
            sides["head"] = chosen.heads
        rows.append(math.prod(sides.values()))
    return max(rows)


@dataclass(frozen=True, slots=True)
class Choice:
    """``hints`` (None: kvgen's own schedule is as good), and the time of each number of tokens with them."""

    hints: KernelHints | None
    times: Times


def choose(own: Times, times: Mapping[KernelHints, Times]) -> Choice:
    """The schedule with the least time in the geometric mean over all numbers of tokens.

    ``own`` are the times of kvgen's own choice. Few tokens may have a schedule of their own, which has the same heads
    and no more tokens a program: that is one kernel. Of what is within ``GAIN`` the simplest is taken.
    """
    counts = sorted(own)
    best = Choice(None, own)
    for choice in _choices(times, counts, split=False):
        if mean(choice.times) < mean(best.times) * (1 - GAIN * (best.hints is None)):
            best = choice
    plain = best
    for choice in _choices(times, counts, split=True):
        limit = mean(plain.times) * (1 - GAIN)
        if mean(choice.times) < (limit if best is plain else mean(best.times)):
            best = choice
    return best


def _choices(times: Mapping[KernelHints, Times], counts: Sequence[int], *, split: bool) -> Iterator[Choice]:
    """Candidates as they are, or pairs of two with the number of tokens up to which the first is taken."""
    if not split:
        for hints, found in times.items():
            yield Choice(hints, found)
        return
    for many, few in product(times, times):
        if few == many or few.heads != many.heads or few.tokens > many.tokens:
            continue
        for up_to in counts[:-1]:
            joined = {count: times[few if count <= up_to else many][count] for count in counts}
            yield Choice(replace(many, few=FewHints(up_to, few.tokens, few.num_warps)), joined)


def mean(times: Times) -> float:
    """The geometric mean: a tenth saved on a short call counts as much as on a long one."""
    return math.exp(sum(map(math.log, times.values())) / len(times))
