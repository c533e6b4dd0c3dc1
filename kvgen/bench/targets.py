"""What a run says of the speeds that kvgen is meant to have: a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from kvgen.bench.markdown import best, over, rivals
from kvgen.bench.results import Row, Run
from kvgen.bench.table import factor, microseconds, percent

PREFILL, DECODE = 4096, 256
"""Tokens from which, and up to which, the targets are about a prefill and a decode step."""

OF_BEST = 0.95
"""What an append of a prefill is to reach of the rate of the best one that moves no more bytes."""

NO_MORE = 1.05
"""Bytes that are no more, as a multiple: scales and padding differ among those that hold the same values."""

LAUNCH = 1.55
"""Microseconds of an append of a decode step."""

FUSED = {"prefill": 1.10, "decode": 1.25}
"""What a fused append may take, as a multiple of the plain one."""

QUERIED = 3e12
"""Bytes per second of a fused append of 32768 tokens that norms and rotates a query too."""

MOVED = 0.90
"""What a transfer of a prefill's blocks is to reach of the rate of a copy of as many bytes."""

HOST = 0.8
"""What an eager append may cost its caller, as a part of ``slots.add_(0)``."""

WORST = 5
"""How many that miss a target are named."""


@dataclass(frozen=True, slots=True)
class Target:
    """``what`` is wanted of the ``found`` values: ``limit`` at least, or at ``most``."""

    what: str
    found: Sequence[tuple[Row, float | None]]
    limit: float
    shown: Callable[[float], str]
    most: bool = False

    def line(self) -> str | None:
        """How many layouts meet it with all their rows, and those that are furthest from it; None without values."""
        ends: dict[str, tuple[float, float, Row]] = {}
        for row, value in self.found:
            if value is not None:
                short = value - self.limit if self.most else self.limit - value
                if row.layout not in ends or short > ends[row.layout][0]:
                    ends[row.layout] = short, value, row
        if not ends:
            return None
        missed = sorted((end for end in ends.values() if end[0] > 0), key=lambda end: -end[0])
        named = [f"{row.layout} {self.shown(value)} ({row.tokens})" for _, value, row in missed[:WORST]]
        return f"| {self.what} | {len(ends) - len(missed)} of {len(ends)} | {', '.join(named) or '–'} |"


def summary(run: Run) -> str:
    """A table with a line for each target that the run has rows for."""
    lines = [line for target in _targets(run) if (line := target.line())]
    head = ["| target | met by | furthest from it (tokens) |", "|---|---|---|"]
    return "\n".join(head + lines) + "\n"


def _targets(run: Run) -> Iterator[Target]:
    appends = [row for row in run.rows if row.function == "append" and row.ours.device_us]
    prefills = [row for row in appends if row.tokens >= PREFILL]
    of_best = [(row, (row.rate(row.ours) or 0.0) / _best_rate(row, prefills)) for row in prefills]
    what = f"append of {PREFILL} tokens or more: {OF_BEST:.0%} of the best rate of as many bytes or fewer"
    yield Target(what, of_best, OF_BEST, percent)
    ahead = [(row, row.ratio(rival)) for row in appends if (rival := best(row))]
    yield Target("append: not behind others that do the same", ahead, 1.0, factor)
    for tokens in sorted({row.tokens for row in appends if row.tokens <= DECODE}):
        rows = [row for row in appends if row.tokens == tokens]
        copied = [1 / row.of_copy for row in rows if row.of_copy]
        beside = f"; in the median {factor(median(copied))} of a copy's time" if copied else ""
        times = [(row, row.ours.device_us) for row in rows]
        yield Target(f"append of {tokens}: {LAUNCH} µs{beside}", times, LAUNCH, microseconds, most=True)
    yield from _fused(run)
    moved = [row for row in run.rows if row.function == "transfer_blocks" and row.tokens >= PREFILL]
    copied = [(row, row.of_copy) for row in moved]
    yield Target(f"transfer of {PREFILL} or more: {MOVED:.0%} of a copy's rate", copied, MOVED, percent)
    cost = [(row, row.ours.of_add) for row in appends if row.tokens <= DECODE]
    what = f"eager append of {DECODE} or fewer: {HOST} of what `slots.add_(0)` costs its caller"
    yield Target(what, cost, HOST, factor, most=True)


def _best_rate(row: Row, appends: Sequence[Row]) -> float:
    """The best rate of appends of as many tokens, whosever they are, that move no more bytes than that of ``row``."""
    alike = [one for one in appends if one.tokens == row.tokens and one.bytes <= NO_MORE * row.bytes]
    return max(one.rate(timing) or 0.0 for one in alike for timing in (one.ours, *rivals(one)))


def _fused(run: Run) -> Iterator[Target]:
    plain = {(row.layout, row.tokens): row for row in run.rows if row.function == "append"}
    rows = [(row, plain.get((row.layout, row.tokens))) for row in run.rows if row.function == "append_fused"]
    # A query that goes along is more to move than an append has: those are told by their bytes.
    alike = [(row, other) for row, other in rows if other and row.bytes <= 1.5 * other.bytes]
    ratios = [(row, over(row, other)) for row, other in alike]
    for tokens, limit, found in (
        (f"{PREFILL} or more", FUSED["prefill"], [pair for pair in ratios if pair[0].tokens >= PREFILL]),
        (f"{DECODE} or fewer", FUSED["decode"], [pair for pair in ratios if pair[0].tokens <= DECODE]),
    ):
        yield Target(f"fused append of {tokens}: {factor(limit)} of the plain one", found, limit, factor, most=True)
    more = [row for row, other in rows if other and row.bytes > 1.5 * other.bytes and row.tokens == 32768]
    rates = [(row, row.rate(row.ours)) for row in more]
    what = f"fused append of 32768 with its query: {QUERIED / 1e12:.0f} TB/s"
    yield Target(what, rates, QUERIED, lambda rate: f"{rate / 1e12:.2f} TB/s")
