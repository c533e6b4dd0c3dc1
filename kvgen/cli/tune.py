"""``kvgen tune``: what schedule is fastest on this GPU, written into the layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen import resources
from kvgen.cli.bench import POOL_TOKENS, device_and_clock, numbers
from kvgen.cli.common import (
    DEFAULT_FOLDER,
    OutputFormat,
    console_width,
    layout_path,
    load_all,
    only_layouts,
    progress,
    reporting,
)
from kvgen.diagnostics import Diagnostic, KvgenError
from kvgen.layout import KernelHints, Layout

if TYPE_CHECKING:
    from kvgen.bench.candidates import Choice
    from kvgen.bench.run import Plan
    from kvgen.bench.timing import Clock
    from kvgen.bench.tune import Trial

SWEEP = (1, 32, 256, 1024, 4096, 32768)
SHOWN = 8
"""Schedules that are shown, the best ones."""


def tune(
    layout: Annotated[str, typer.Argument(help="A layout's file, or the name of one of layouts/.")],
    tokens: Annotated[
        str | None, typer.Option(help=f"Tokens of a call, several by commas. Default: {','.join(map(str, SWEEP))}.")
    ] = None,
    function: Annotated[
        list[str] | None, typer.Option(help="Tune append or gather alone; the other keeps its schedule.")
    ] = None,
    pool_tokens: Annotated[int, typer.Option(min=0, help="Slots of the pool, over all layers.")] = POOL_TOKENS,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and print, but leave the file alone.")] = False,
) -> None:
    """Time the schedules of append and gather on a GPU, and write the best into the layout's file.

    Every schedule's bytes are compared with the reference. What gains less than 3 % is not preferred to kvgen's own
    choice; then the file has no entry. Its other lines and its comments stay as they are.
    """
    counts = numbers(tokens, "--tokens", SWEEP)
    with reporting(OutputFormat.TEXT):
        path = layout_path(layout)
        ((_, document),) = load_all([path])
        (loaded,) = only_layouts([document], "kvgen chooses how transfers are divided")
        kinds = _kinds(function)
        if not dry_run:
            _check_place(path)
        device, clock = device_and_clock(dry_run=False, hint="schedules are timed, and nothing is timed on a CPU")
        from kvgen.bench import run

        plan = run.Plan(device, dict.fromkeys(counts), (), pool_tokens, run.last_level_cache(device))
        found = _measure(loaded, kinds, plan, clock)
        name, versions = run.environment(device, ())
        remark = ", ".join([name, *(f"{package} {version}" for package, version in versions.items())])
        _write(path, loaded, found, remark, dry_run=dry_run)


def _kinds(names: list[str] | None) -> tuple[str, ...]:
    from kvgen.bench.candidates import KINDS

    if unknown := [name for name in names or () if name not in KINDS]:
        message = f"no schedule is named {', '.join(unknown)}"
        raise KvgenError(Diagnostic("KV710", message, hint=f"there are {' and '.join(KINDS)}"))
    return tuple(kind for kind in KINDS if not names or kind in names)


def _check_place(path: Path) -> None:
    """KvgenError for a layout inside an installed kvgen: that file is not the user's."""
    shipped = resources.folder("layouts").resolve()
    if path.resolve().parent == shipped != Path(DEFAULT_FOLDER).resolve():
        hint = f"`kvgen new NAME --like {path.stem}` makes a copy of it, --dry-run prints what is found"
        raise KvgenError(Diagnostic("KV702", f"{path.stem} came with kvgen, and is not written to", hint=hint))


def _measure(layout: Layout, kinds: tuple[str, ...], plan: Plan, clock: Clock) -> dict[str, Choice]:
    """The choice for each kind of function that the layout has; tables of what was tried are printed."""
    from kvgen.bench.candidates import candidates
    from kvgen.bench.tune import chosen, trials

    found: dict[str, Choice] = {}
    for kind in kinds:
        tried: list[Trial] = []
        with progress(len(candidates(layout, kind)) + 1) as tell:
            for trial in trials(layout, kind, plan, clock):
                tried.append(trial)
                tell(f"{layout.name}: {kind}", True)
        if tried:
            found[kind] = chosen(tried)
            _print(layout, kind, tried, found[kind])
    return found


def _print(layout: Layout, kind: str, tried: list[Trial], choice: Choice) -> None:
    from rich.console import Console

    from kvgen.bench.table import trial_table

    console = Console(width=console_width(), highlight=False)
    console.print()
    console.print(trial_table(f"{layout.name}, {kind}: µs by tokens", tried, choice, SHOWN))
    if refused := [trial for trial in tried if trial.note]:
        console.print(f"  {len(refused)} more cannot run here: {refused[0].note}", markup=False)


def _write(path: Path, layout: Layout, found: dict[str, Choice], remark: str, *, dry_run: bool) -> None:
    from kvgen.edit import schedule_lines, with_schedule
    from kvgen.emit.write import write_file

    hints = {kind: getattr(layout.schedule, kind) for kind in ("append", "gather")}
    hints |= {kind: choice.hints or KernelHints() for kind, choice in found.items()}
    hints = {kind: each for kind, each in hints.items() if each != KernelHints()}
    if dry_run:
        typer.echo("\n" + ("\n".join(schedule_lines(hints, remark)) or "kvgen's own schedule is the best"))
        return
    old = path.read_bytes().decode("utf-8")
    new = with_schedule(old, path.as_posix(), hints, remark)
    if new == old:
        typer.echo(f"\n{path.as_posix()} is as it was")
        return
    write_file(path, new)
    typer.echo(f"\nwrote {path.as_posix()}; `kvgen build` makes its module anew")
