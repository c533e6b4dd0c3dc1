"""What a run says of the speeds that kvgen is meant to have, in sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvgen.bench.markdown import best, of_copy, over
from kvgen.bench.results import Row, Run
from kvgen.bench.table import microseconds

PREFILL, DECODE = 4096, 256
"""Tokens from which, and up to which, the targets are about a prefill and a decode step."""

OF_COPY = 0.95
"""What an append of a prefill is to reach of the rate of a copy of as many bytes."""

LAUNCH = 1.55
"""Microseconds of an append of a decode step."""

FUSED = {"prefill": 1.10, "decode": 1.25}
"""What a fused append may take, as a multiple of the plain one."""

MOVED = 0.90
"""What a transfer of a prefill's blocks is to reach of the rate of a copy of as many bytes."""

HOST = 0.8
"""What an eager append may cost its caller, as a part of ``slots.add_(0)``."""


def sentences(run: Run) -> Iterator[str]:
    """One for each target that the run has rows for: who meets it, and everyone who does not, the worst first."""
    appends = [row for row in run.rows if row.function == "append" and row.ours.device_us]
    prefill = [row for row in appends if row.tokens >= PREFILL]
    decode = [row for row in appends if row.tokens <= DECODE]
    yield from _judged(
        f"A prefill appends at {OF_COPY:.0%} of the rate of a copy of as many bytes",
        [(row, of_copy(row)) for row in prefill],
        lambda part: part >= OF_COPY,
        lambda part: f"{part:.0%}",
    )
    rivals = [(row, row.ratio(rival)) for row in appends if (rival := best(row))]
    yield from _judged(
        "No append is behind what else does the same",
        rivals,
        lambda ratio: ratio >= 1,
        lambda ratio: f"×{ratio:.2f}",
    )
    yield from _judged(
        f"A decode step's append takes {LAUNCH} µs at most",
        [(row, row.ours.device_us) for row in decode],
        lambda time: time <= LAUNCH,
        microseconds,
        worst=max,
    )
    yield from _fused(run)
    moved = [row for row in run.rows if row.function == "transfer_blocks" and row.tokens >= PREFILL]
    yield from _judged(
        f"A transfer reaches {MOVED:.0%} of the rate of a copy of as many bytes",
        [(row, of_copy(row)) for row in moved],
        lambda part: part >= MOVED,
        lambda part: f"{part:.0%}",
    )
    if run.add_us:
        yield from _judged(
            f"A decode step's eager append costs its caller {HOST} of `slots.add_(0)` at most",
            [(row, row.ours.host_us / run.add_us) for row in decode if row.ours.host_us],
            lambda part: part <= HOST,
            lambda part: f"{part:.2f}",
            worst=max,
        )


def _fused(run: Run) -> Iterator[str]:
    plain = {(row.layout, row.tokens): row for row in run.rows if row.function == "append"}
    rows = [row for row in run.rows if row.function == "append_fused"]
    for name, limit in FUSED.items():
        some = [row for row in rows if (row.tokens >= PREFILL if name == "prefill" else row.tokens <= DECODE)]
        # A query that goes along is more to move than an append has: those are told by their bytes.
        alike = [(row, over(row, other)) for row in some if (other := plain.get((row.layout, row.tokens)))]
        alike = [(row, ratio) for row, ratio in alike if row.bytes <= 1.5 * plain[row.layout, row.tokens].bytes]
        yield from _judged(
            f"Without a query, a fused append of a {name} takes ×{limit:.2f} of the plain one at most",
            alike,
            lambda ratio, limit=limit: ratio <= limit,
            lambda ratio: f"×{ratio:.2f}",
            worst=max,
        )


def _judged(
    what: str,
    found: Sequence[tuple[Row, float | None]],
    met: Callable[[float], bool],
    shown: Callable[[float], str],
    worst: Callable[..., float] = min,
) -> Iterator[str]:
    known = [(row, value) for row, value in found if value is not None]
    if not known:
        return
    missed: dict[str, list[tuple[Row, float]]] = {}
    for row, value in known:
        if not met(value):
            missed.setdefault(row.layout, []).append((row, value))
    layouts = {row.layout for row, _ in known}
    if not missed:
        yield f"{what}: met by all {len(layouts)}."
        return
    ends = {name: worst(value for _, value in rows) for name, rows in missed.items()}
    ordered = sorted(missed, key=ends.__getitem__, reverse=worst is max)
    listed = []
    for name in ordered:
        row, value = next(pair for pair in missed[name] if pair[1] == ends[name])
        listed.append(f"{name} ({shown(value)} of {row.tokens} tokens)")
    yield f"{what}: met by {len(layouts) - len(missed)} of {len(layouts)}, missed by {', '.join(listed)}."
