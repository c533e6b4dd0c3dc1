"""Results as tables: in a terminal, and as Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from kvgen.bench.candidates import Choice, mean
from kvgen.bench.results import OURS, Row, Run, Timing
from kvgen.canonical import hints_text

if TYPE_CHECKING:
    from kvgen.bench.tune import Trial


def microseconds(time: float | None) -> str:
    """Three digits or more, and no more than two behind the point."""
    if time is None:
        return "–"
    return f"{time:.2f}" if time < 10 else f"{time:.1f}" if time < 100 else f"{time:.0f}"


def bandwidth(rate: float | None) -> str:
    """Bytes per second in GB/s."""
    return "–" if rate is None else f"{rate / 1e9:.0f}" if rate >= 1e10 else f"{rate / 1e9:.1f}"


def percent(part: float | None) -> str:
    return "–" if part is None else f"{part:.0%}"


def rivals_of(rows: Sequence[Row]) -> list[str]:
    """Who took part besides kvgen, in order of appearance."""
    return list(dict.fromkeys(timing.name for row in rows for timing in row.timings if timing.name != OURS))


def factor(ratio: float | None) -> str:
    return "–" if ratio is None else f"×{ratio:.2f}"


def layout_table(rows: Sequence[Row], timed: bool) -> Table:
    """The rows of one layout, columns for everyone that it is compared with.

    ``of copy``: what part of the rate of a copy of as many bytes is reached; ``of add_``: how many times as long as
    torch's ``slots.add_(0)`` an eager call takes.
    """
    table = Table(title=rows[0].layout, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("function")
    for name in ("tokens", "bytes", *((f"{OURS} µs", "GB/s", "of copy", "host µs", "of add_") if timed else ())):
        table.add_column(name, justify="right")
    others = rivals_of(rows)
    for name in others:
        for title in (f"{name} µs", "host µs") if timed else (name,):
            table.add_column(title, justify="right")
    for row in rows:
        cells = [row.function, str(row.tokens), f"{row.bytes:,}"]
        if timed:
            rate = row.rate(row.ours)
            cells += [microseconds(row.ours.device_us), bandwidth(rate), percent(row.of_copy)]
            cells += [microseconds(row.ours.host_us), factor(row.ours.of_add)]
        for name in others:
            cells += _rival_cells(row, row.timing(name), timed)
        table.add_row(*cells)
    return table


def _rival_cells(row: Row, timing: Timing | None, timed: bool) -> tuple[str, ...]:
    if timing is None:
        return ("", "") if timed else ("",)
    if not timed:
        return ("see below" if timing.note else "same bytes",)
    ratio = row.ratio(timing)
    device = microseconds(timing.device_us) + (f" ×{ratio:.2f}" if ratio is not None else "")
    return device, microseconds(timing.host_us)


def trial_table(title: str, tried: Sequence[Trial], choice: Choice, shown: int) -> Table:
    """Times of kvgen's own schedule, of the choice, and of the best others, a column for each number of tokens."""
    counts = sorted(tried[0].times)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("schedule")
    for count in counts:
        table.add_column(str(count), justify="right")
    table.add_column("mean", justify="right")
    rows = [("kvgen's own", tried[0].times)]
    if choice.hints is not None:
        rows.append((f"chosen: {hints_text(choice.hints)}", choice.times))
    others = sorted((trial for trial in tried[1:] if trial.times), key=lambda trial: mean(trial.times))
    rows += [(hints_text(trial.hints), trial.times) for trial in others[:shown] if trial.hints]
    for name, times in rows:
        ratio = mean(times) / mean(tried[0].times)
        table.add_row(name, *(microseconds(times[count]) for count in counts), f"{ratio:.0%}")
    return table


def notes(rows: Sequence[Row]) -> list[str]:
    """What stands behind a time that is missing, each once, with the numbers of tokens it is true of."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        for timing in row.timings:
            if timing.note:
                found.setdefault((row.function, timing.name, timing.note), []).append(row.tokens)
    return [
        f"{function}, {name}, {', '.join(map(str, tokens))} tokens: {note}"
        for (function, name, note), tokens in found.items()
    ]


def heading(run: Run) -> str:
    """The machine in a line: device, versions, date, and the rate of a copy."""
    text = ", ".join([run.device, *(f"{name} {version}" for name, version in run.versions.items()), run.date])
    if run.copy_rate is not None:
        text += f"; a large copy runs at {run.copy_rate / 1e12:.2f} TB/s"
    return text
