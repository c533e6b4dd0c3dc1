"""Results as Markdown, for the documentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from kvgen.bench.results import COPY, OURS, Row, Run, Timing
from kvgen.bench.table import factor, microseconds, percent, rivals_of


def markdown(run: Run, function: str, layouts: Sequence[str] = ()) -> str:
    """A table of a function: a row for each layout and everyone it is compared with, a column for each T.

    Cells are microseconds on the device, and of the longest call the rate and its part of a copy's. Without names it
    has all layouts.
    """
    rows = [row for row in run.rows if row.function == function and (not layouts or row.layout in layouts)]
    counts = sorted({row.tokens for row in rows})
    lines = [f"| {function} | {' | '.join(_heads(counts))} |", "|---" * (1 + len(counts)) + "|"]
    for layout in layouts or dict.fromkeys(row.layout for row in rows):
        found = {row.tokens: row for row in rows if row.layout == layout}
        for name in [OURS, *rivals_of(list(found.values()))]:
            cells = [_cell(found.get(count), name, last=count == counts[-1]) for count in counts]
            if any(cell != "–" for cell in cells):
                lines.append(f"| {layout if name == OURS else '– ' + _title(run, name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _heads(counts: Sequence[int]) -> list[str]:
    """Numbers of tokens, the first of them with its unit."""
    return [f"{count} token{'s' * (count > 1)}" if not i else str(count) for i, count in enumerate(counts)]


def _title(run: Run, name: str) -> str:
    version = run.versions.get(name, "")
    return name if name in (OURS, "torch") or not version else f"{name} {version}"


def _cell(row: Row | None, name: str, *, last: bool) -> str:
    timing = row.timing(name) if row else None
    if row is None or timing is None or timing.device_us is None:
        return "–"
    if name != OURS:
        return f"{microseconds(timing.device_us)} (×{row.ratio(timing):.2f})"
    rate = row.rate(timing)
    part = f", {percent(row.of_copy)}" if row.of_copy else ""
    return microseconds(timing.device_us) + (f" ({rate / 1e12:.2f} TB/s{part})" if last and rate else "")


def host_markdown(run: Run) -> str:
    """A table of what calls cost their caller, and how many times as long as torch's ``slots.add_(0)`` they take.

    Medians and ranges are over all layouts and numbers of tokens.
    """
    timed: dict[tuple[str, str], list[Timing]] = {}
    for row in run.rows:
        for timing in row.timings:
            # What is not captured waits for the device: that is no host time to compare with.
            if timing.host_us is not None and timing.device_us is not None:
                timed.setdefault((row.function, timing.name), []).append(timing)
    lines = ["| eager call | median, µs | range | of `slots.add_(0)` | range |", "|---|---|---|---|---|"]
    for (function, name), found in timed.items():
        cells = [*_spread([t.host_us for t in found], microseconds), *_spread([t.of_add for t in found], factor)]
        lines.append(f"| {function}, {_title(run, name)} | {' | '.join(cells)} |")
    adds = [timing.add_us for found in timed.values() for timing in found]
    if any(adds):
        lines.append(f"| `slots.add_(0)` of torch | {' | '.join(_spread(adds, microseconds))} | | |")
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float | None], shown: Callable[[float | None], str]) -> tuple[str, str]:
    """The median and the range of those that are known."""
    known = [value for value in values if value is not None]
    return (shown(median(known)), f"{shown(min(known))} – {shown(max(known))}") if known else ("–", "–")


def rivals(row: Row) -> list[Timing]:
    """Who did the same and was timed on the device; a copy does less, and capped grids are kvgen's own."""
    return [t for t in row.timings[1:] if t.device_us and t.name != COPY and not t.name.endswith(" programs")]


def best(row: Row) -> Timing | None:
    """The fastest of those."""
    return min(rivals(row), key=lambda timing: timing.device_us or 0.0, default=None)


def survey(run: Run, function: str, groups: Mapping[str, Sequence[str]]) -> str:
    """A table of a function with a row for each layout, group by group, and a column for each number of tokens.

    Cells are microseconds, and how many times as long the best rival takes. Behind them, for the most tokens: the rate,
    its part of a copy's, and who is the best.
    """
    rows = {(row.layout, row.tokens): row for row in run.rows if row.function == function}
    counts = sorted({tokens for _, tokens in rows})
    heads = [function, *_heads(counts), "TB/s", "of a copy", "best rival"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for title, names in groups.items():
        known = [name for name in names if any((name, count) in rows for count in counts)]
        if known:
            lines.append(f"| *{title}* |" + " |" * (len(counts) + 3))
        for name in known:
            found = [rows.get((name, count)) for count in counts]
            last = next(row for row in reversed(found) if row)
            rate = last.rate(last.ours)
            names_of = dict.fromkeys(timing.name for row in found if row and (timing := best(row)))
            cells = [*map(_time_and_ratio, found), f"{rate / 1e12:.2f}" if rate else "–", percent(last.of_copy)]
            lines.append(f"| {name} | {' | '.join(cells)} | {', '.join(names_of) or '–'} |")
    return "\n".join(lines) + "\n"


def _time_and_ratio(row: Row | None) -> str:
    if row is None or row.ours.device_us is None:
        return "–"
    rival = best(row)
    return microseconds(row.ours.device_us) + (f" ×{row.ratio(rival):.2f}" if rival else "")


def fused(run: Run) -> str:
    """``append_fused``: times, how many times as long as the plain append of the same layout, and everyone else."""
    rows = {(row.layout, row.function, row.tokens): row for row in run.rows}
    names = list(dict.fromkeys(row.layout for row in run.rows if row.function == "append_fused"))
    counts = sorted({row.tokens for row in run.rows if row.function == "append_fused"})
    lines = [f"| append_fused | {' | '.join(_heads(counts))} |", "|---" * (len(counts) + 1) + "|"]
    for name in names:
        found = [rows.get((name, "append_fused", count)) for count in counts]
        plain = [rows.get((name, "append", count)) for count in counts]
        last = counts[-1]
        cells = [_cell(row, OURS, last=count == last) for row, count in zip(found, counts, strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        parts = [factor(over(row, other)) for row, other in zip(found, plain, strict=True)]
        lines.append(f"| – of its append | {' | '.join(parts)} |")
        for rival in rivals_of([row for row in found if row]):
            cells = [_cell(row, rival, last=False) for row in found]
            if any(cell != "–" for cell in cells) and rival != COPY:
                lines.append(f"| – {_title(run, rival)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def over(row: Row | None, other: Row | None) -> float | None:
    """How many times as long one row takes as another."""
    if row is None or other is None or row.ours.device_us is None or other.ours.device_us is None:
        return None
    return row.ours.device_us / other.ours.device_us


def transfers(run: Run) -> str:
    """Whole blocks moved: rates, and what part they are of a copy of as many bytes; then under caps of the grid."""
    found = [row for row in run.rows if row.function == "transfer_blocks"]
    counts = sorted({row.tokens for row in found})
    caps = [name for name in rivals_of(found) if name.endswith(" programs")]
    lines = [f"| transfer | {' | '.join([*_heads(counts), *caps])} |", "|---" * (len(counts) + len(caps) + 1) + "|"]
    for name in dict.fromkeys(row.layout for row in found):
        rows = {row.tokens: row for row in found if row.layout == name}
        cells = [_speed(rows.get(count), OURS) for count in counts]
        cells += [_speed(rows.get(counts[-1]), cap) for cap in caps]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _speed(row: Row | None, name: str) -> str:
    timing, copy = (row.timing(name), row.timing(COPY)) if row else (None, None)
    rate = row.rate(timing) if row and timing else None
    if rate is None:
        return "–"
    part = f" ({copy.device_us / timing.device_us:.0%})" if copy and copy.device_us else ""
    return f"{rate / 1e12:.3f} TB/s{part}" if rate < 1e12 else f"{rate / 1e12:.2f} TB/s{part}"
