"""``kvgen bench``: how fast generated functions are, beside what else does the same."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.against import Target, parse
from kvgen.cli.common import (
    OutputFormat,
    PathsArgument,
    check_replaced,
    console_width,
    find_layouts,
    load_all,
    progress,
    reporting,
)
from kvgen.diagnostics import Diagnostic, KvgenError
from kvgen.layout import Layout

if TYPE_CHECKING:
    from kvgen.bench.results import Row, Run
    from kvgen.bench.rivals import Rival
    from kvgen.bench.run import Plan
    from kvgen.bench.timing import Clock
    from kvgen.documents import Document

SWEEP = (1, 32, 256, 4096, 32768)
DRY_SWEEP = (1, 32)
"""Numbers of tokens of a dry run, which an interpreter gets through in seconds."""

POOL_TOKENS = 1 << 20


def bench(
    paths: PathsArgument = None,
    tokens: Annotated[
        str | None, typer.Option(help=f"Tokens of a call, several by commas. Default: {','.join(map(str, SWEEP))}.")
    ] = None,
    function: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=TOKENS]", help="Time this function alone (append, gather=1,256 …); may be repeated."
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[FUNCTION=]MODULE:NAME[(ARGUMENTS)]",
            help="Compare with this function, called as the generated one is; may be repeated.",
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE:NAME", help="Compare with what this adapter makes of a task; may be repeated."),
    ] = None,
    programs: Annotated[
        str | None, typer.Option(help="Launch transfers with at most so many programs too, several numbers by commas.")
    ] = None,
    pool_tokens: Annotated[int, typer.Option(min=0, help="Slots of the pool, over all layers.")] = POOL_TOKENS,
    check: Annotated[bool, typer.Option(help="Run the harness first, and do not time what it finds wrong.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Do everything but the timing, in a small pool; needs no GPU.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results there.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw the results there, as SVG or PNG.")] = None,
) -> None:
    """Time the functions of freshly generated modules on a GPU, beside PyTorch, FlashInfer and vLLM.

    Results are compared, byte by byte, before anything is timed; what differs is said and not timed. Of a transfer a
    side lies in pinned host memory if the name of its layout or of a buffer says `host`.
    """
    counts = numbers(tokens, "--tokens", DRY_SWEEP if dry_run else SWEEP)
    caps = numbers(programs, "--programs", ())
    if dry_run and (json_file or plot_file):
        raise typer.BadParameter("a dry run has no times to write", param_hint="--dry-run")
    if plot_file:
        from kvgen.bench.plot import plot, require_matplotlib

        require_matplotlib()
    with reporting(OutputFormat.TEXT) as found:
        if json_file:
            check_replaced(json_file, rb'\{\s*"format"', "file of results")
        if plot_file:
            check_replaced(plot_file, rb"<svg|<\?xml|\x89PNG|%PDF|%!PS", "picture")
        documents = [document for _, document in load_all(find_layouts(paths))]
        device, clock = device_and_clock(dry_run)
        targets = [parse(target) for target in against or []]
        rivals = _rivals(device, adapter or [])
        functions = _functions(function or [], counts)
        from kvgen.bench.run import Plan, last_level_cache

        size = 0 if dry_run else pool_tokens
        plan = Plan(device, functions, rivals, size, last_level_cache(device), caps)
        result = _measure(documents, plan, targets, clock, check, found, json_file)
        if plot_file:
            plot(result, plot_file)


def numbers(text: str | None, option: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Positive numbers by commas, in order."""
    if text is None:
        return default
    words = [word for word in re.split(r"[,\s]+", text) if word]
    if not words or not all(re.fullmatch(r"[1-9]\d{0,6}", word) for word in words):
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 1,32,4096", param_hint=option)
    return tuple(sorted(set(map(int, words))))


def device_and_clock(
    dry_run: bool, hint: str = "nothing is timed on a CPU; --dry-run does everything else"
) -> tuple[str, Clock | None]:
    """A GPU and what measures time on it; of a dry run any device, and no clock."""
    from kvgen import runtime

    if dry_run:
        return runtime.choose_device(), None
    device = runtime.choose_device("cuda", hint=hint)
    from kvgen.bench.timing import CudaClock

    return device, CudaClock()


def _rivals(device: str, names: list[str]) -> tuple[Rival, ...]:
    from kvgen.bench.rivals import known_rivals, load_adapter

    sys.path.insert(0, os.getcwd())  # an adapter may lie where the command is called
    return (*known_rivals(device), *map(load_adapter, names))


def _functions(wishes: list[str], counts: tuple[int, ...]) -> dict[int, tuple[str, ...] | None]:
    """What is timed with how many tokens: everything with ``counts``, or what is named with these or its own."""
    from kvgen.bench.functions import FUNCTIONS

    if not wishes:
        return dict.fromkeys(counts)
    known = [function.name for function in FUNCTIONS]
    pairs = [wish.partition("=")[::2] for wish in wishes]
    if unknown := [name for name, _ in pairs if name not in known]:
        message = f"no benchmark is named {', '.join(unknown)}"
        raise KvgenError(Diagnostic("KV710", message, hint=f"there are {', '.join(known)}"))
    own = {name: numbers(text or None, "--function", counts) for name, text in pairs}
    return {
        tokens: tuple(name for name, tokens_of in own.items() if tokens in tokens_of)
        for tokens in sorted({tokens for found in own.values() for tokens in found})
    }


def _measure(
    documents: list[Document],
    plan: Plan,
    targets: list[Target],
    clock: Clock | None,
    check: bool,
    found: list[Diagnostic],
    json_file: Path | None,
) -> Run:
    """Every row of every layout; tables are printed and written as they are done. ``found`` has what is not timed."""
    from kvgen.bench import run, table
    from kvgen.bench.results import Run
    from kvgen.bench.rivals import against, capped
    from kvgen.emit.write import is_stream

    name, versions = run.environment(plan.device, plan.rivals)
    rate = clock.copy_rate() if clock else None
    result = Run(name, time.strftime("%Y-%m-%d", time.gmtime()), versions, plan.pool_tokens, rate, ())
    typer.echo(table.heading(result))
    rows: list[Row] = []
    modules = _compiled(documents, plan)
    with progress(len(documents)) as tell:
        for layout, module in modules:
            try:
                others = tuple(against(target, module) for target in targets if _concerns(target, layout))
                others += tuple(capped(module, programs) for programs in plan.programs)
            except KvgenError as error:
                found += error.diagnostics
                continue
            own = _rows(layout, module, replace(plan, rivals=plan.rivals + others), clock, check, found, tell)
            if own:
                _print(own, clock is not None)
            rows += own
            result = replace(result, rows=tuple(rows))
            if json_file and not is_stream(json_file):
                _write_json(result, json_file)  # after each layout: a later one may take the process with it
    if json_file and is_stream(json_file):
        _write_json(result, json_file)
    return result


def _concerns(target: Target, document: Document) -> bool:
    """Whether a function stands in for one of a transfer, and this is one, or of a layout."""
    return isinstance(document, Layout) != target.function.startswith("transfer")


def _compiled(documents: list[Document], plan: Plan) -> Iterator[tuple[Document, ModuleType]]:
    """The documents with their modules, once all that is to be timed is compiled: then nothing else keeps the CPU."""
    from kvgen import runtime
    from kvgen.bench.ahead import Job, compiling
    from kvgen.bench.rivals import prepare
    from kvgen.emit.render import render_all

    texts = render_all(documents)
    given = [(document, texts[f"{document.name}.py"]) for document in documents]
    sizes = (plan.functions, plan.pool_tokens, plan.programs)
    jobs = [Job(document, text, *sizes) for document, text in given]
    with compiling(jobs, plan.device):
        if plan.device == "cuda":
            prepare(plan.rivals, documents, plan.names, plan.device)
    for document, text in given:
        yield document, runtime.import_module(document.name, text)


def _rows(
    layout: Document,
    module: ModuleType,
    plan: Plan,
    clock: Clock | None,
    check: bool,
    found: list[Diagnostic],
    tell: Callable[[str, bool], None],
) -> list[Row]:
    """The rows of one layout, none where the harness fails, those before it if the device's memory runs out."""
    import torch

    from kvgen.bench import run

    rows: list[Row] = []
    tell(f"{layout.name}: harness" if check else layout.name, False)
    findings = run.harness_findings(layout, module, plan) if check else []
    found += findings
    if not findings:
        try:
            for row in run.measure(layout, module, plan, clock):
                rows.append(row)
                tell(f"{layout.name}: {row.function} of {row.tokens} tokens", False)
        except torch.OutOfMemoryError:
            message = f"{layout.name}: the memory of the device is too small for a pool of {plan.pool_tokens} tokens"
            found.append(Diagnostic("KV744", message, hint="--pool-tokens takes a smaller one"))
    tell(layout.name, True)
    return rows


def _print(rows: list[Row], timed: bool) -> None:
    from rich.console import Console

    from kvgen.bench import table

    console = Console(width=console_width(), highlight=False)
    console.print()
    console.print(table.layout_table(rows, timed))
    for note in table.notes(rows):
        console.print(f"  {note}", markup=False)


def _write_json(result: Run, path: Path) -> None:
    from kvgen.bench.results import to_json
    from kvgen.emit.write import write_file

    write_file(path, to_json(result))
