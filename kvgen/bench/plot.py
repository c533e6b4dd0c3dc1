"""A plot of bandwidth over the number of tokens, in any format that matplotlib writes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvgen.bench.results import OURS, Row, Run
from kvgen.bench.table import rivals_of
from kvgen.diagnostics import Diagnostic, KvgenError
from kvgen.emit.write import write_file

COLOURS = ("#0b62a4", "#d1671f", "#4a8f3c", "#8a5aa8", "#8c6d1f", "#a33b3b")
COLUMNS = 3
INK, GRID = "#333333", "#dddddd"


def require_matplotlib() -> None:
    """KvgenError if it is not installed: better before the measurements than after."""
    if not find_spec("matplotlib"):
        hint = "it is in the extra `plot`: pip install 'kvgen[plot]'"
        raise KvgenError(Diagnostic("KV714", "a plot needs matplotlib, which is not installed", hint=hint))


def plot(run: Run, path: Path, functions: Sequence[str] = (), layouts: Sequence[str] = ()) -> None:
    """Write a picture with a panel for each layout and function, of those named if any are.

    The same run gives the same bytes of SVG. KvgenError where matplotlib is missing or the file cannot be written.
    """
    require_matplotlib()
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in run.rows:
        if (not functions or row.function in functions) and (not layouts or row.layout in layouts):
            panels.setdefault((row.layout, row.function), []).append(row)
    write_file(path, _draw(run, panels, path.suffix.removeprefix(".") or "svg"))


def _draw(run: Run, panels: dict[tuple[str, str], list[Row]], kind: str) -> bytes:
    import matplotlib
    from matplotlib.figure import Figure

    names = [OURS, *rivals_of([row for rows in panels.values() for row in rows])]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    columns = min(COLUMNS, len(panels)) or 1
    lines = -(-len(panels) // columns) or 1
    # Without a salt ids in an SVG are random, and text as paths keeps it independent of the fonts of a viewer.
    with matplotlib.rc_context({"svg.hashsalt": "kvgen", "svg.fonttype": "path", "font.size": 9}):
        figure = Figure(figsize=(3.4 * columns, 2.5 * lines + 0.6), layout="constrained", facecolor="white")
        axes = figure.subplots(lines, columns, squeeze=False)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis, ((layout, function), rows) in zip(axes.flat, panels.items(), strict=False):
            _panel(axis, f"{layout}, {function}", rows, run.copy_rate, colours)
        handles = {
            label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        if handles:
            figure.legend(
                handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles), frameon=False
            )
        figure.supxlabel(f"tokens of a call; {run.device}, {run.date}", fontsize=8, color=INK)
        output = io.BytesIO()
        figure.savefig(output, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return output.getvalue()


def _panel(axis: Any, title: str, rows: Sequence[Row], copy_rate: float | None, colours: dict[str, str]) -> None:
    for name, colour in colours.items():
        points = []
        for row in rows:
            timing = row.timing(name)
            rate = row.rate(timing) if timing else None
            if rate is not None:
                points.append((row.tokens, rate / 1e12))
        if points:
            width = 2.0 if name == OURS else 1.2
            axis.plot(*zip(*points, strict=True), color=colour, linewidth=width, marker="o", markersize=3, label=name)
    if copy_rate is not None:
        axis.axhline(copy_rate / 1e12, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), label="device copy")
    axis.set_title(title, fontsize=9, color=INK, loc="left")
    axis.set_xscale("log", base=2)
    tokens = sorted({row.tokens for row in rows})
    axis.set_xticks(tokens, [str(count) for count in tokens], fontsize=7)
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_ylabel("TB/s", fontsize=8, color=INK)
    axis.grid(axis="y", color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
