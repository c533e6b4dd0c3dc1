"""What a benchmark found, as values that can be written to a file and read back. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvgen.diagnostics import Diagnostic, KvgenError

OURS, COPY = "kvgen", "copy"
"""Names: whose functions are measured, and that of a copy of as many bytes, beside every function."""

FORMAT = 2


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call of one implementation; None where it was not timed, and ``note`` says why.

    ``device_us`` is the time on the device, from a graph; ``host_us`` the time an eager call keeps its caller, and
    ``add_us`` that of torch's ``slots.add_(0)`` between the same calls.
    """

    name: str
    device_us: float | None
    host_us: float | None
    note: str = ""
    add_us: float | None = None

    @property
    def of_add(self) -> float | None:
        """What part of ``slots.add_(0)`` an eager call costs."""
        return self.host_us / self.add_us if self.host_us is not None and self.add_us else None


@dataclass(frozen=True, slots=True)
class Row:
    """One function of one layout at one number of tokens. ``bytes`` are read and written by a call; kvgen is first."""

    layout: str
    function: str
    tokens: int
    bytes: int
    sets: int
    timings: tuple[Timing, ...]

    def timing(self, name: str) -> Timing | None:
        return next((timing for timing in self.timings if timing.name == name), None)

    @property
    def ours(self) -> Timing:
        return self.timings[0]

    def rate(self, timing: Timing) -> float | None:
        """Bytes per second on the device."""
        return None if timing.device_us is None else self.bytes / (timing.device_us * 1e-6)

    @property
    def of_copy(self) -> float | None:
        """What part of a copy's rate is reached, of as many bytes."""
        copy = self.timing(COPY)
        return self.ratio(copy) if copy else None

    def ratio(self, timing: Timing) -> float | None:
        """How much longer than kvgen's it takes on the device."""
        ours = self.ours.device_us
        return None if timing.device_us is None or ours is None else timing.device_us / ours


@dataclass(frozen=True, slots=True)
class Run:
    """All rows of one run, and the machine: ``copy_rate`` in bytes per second, None in a dry run. ``versions`` by name,
    kvgen's and torch's among them."""

    device: str
    date: str
    versions: Mapping[str, str]
    pool_tokens: int
    copy_rate: float | None
    rows: tuple[Row, ...]


def to_json(run: Run) -> str:
    """The run as JSON, with rates worked out for those who read it elsewhere."""
    rows = []
    for row in run.rows:
        timings = []
        for timing in row.timings:
            rate = row.rate(timing)
            worked_out = {"bytes_per_s": rate, "ratio": row.ratio(timing), "of_add": timing.of_add}
            timings.append(asdict(timing) | worked_out)
        rows.append({**asdict(row), "of_copy": row.of_copy, "timings": timings})
    return json.dumps({"format": FORMAT, **asdict(run), "rows": rows}, indent=1) + "\n"


def from_json(text: str, path: str) -> Run:
    """What ``to_json`` wrote. KvgenError if it is something else."""
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, this is kvgen of format {FORMAT}")
        rows = tuple(_row(row) for row in data["rows"])
        return Run(**{field: data[field] for field in Run.__slots__ if field != "rows"}, rows=rows)
    except (ValueError, KeyError, TypeError) as error:
        message = f"{path} was not written by `kvgen bench --json`: {error}"
        raise KvgenError(Diagnostic("KV743", message)) from None


def merged(runs: Sequence[Run]) -> Run:
    """One run of several on one machine: the first, and the rows of all. KvgenError if machine or versions differ."""
    first = runs[0]
    for run in runs[1:]:
        if (run.device, run.versions, run.pool_tokens) != (first.device, first.versions, first.pool_tokens):
            message = f"results of {run.device} and of {first.device} are not of one machine and the same versions"
            raise KvgenError(Diagnostic("KV743", message))
    return replace(first, rows=tuple(row for run in runs for row in run.rows))


def _row(data: Mapping[str, Any]) -> Row:
    timings = tuple(Timing(*(timing[field] for field in Timing.__slots__)) for timing in data["timings"])
    return Row(*(data[field] for field in Row.__slots__ if field != "timings"), timings)
