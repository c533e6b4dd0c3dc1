"""``kvgen compile``: what compilers make of the kernels, on a machine without a GPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from kvgen import compile_report
from kvgen.cli.common import (
    FormatOption,
    OutputFormat,
    PathsArgument,
    check_replaced,
    find_layouts,
    load_all,
    reporting,
)
from kvgen.compile_report import TARGETS, Failure, Figures, Report, Result
from kvgen.diagnostics import Diagnostic, KvgenError

TABLE = Path("tests/compile_table.json")


def compile_kernels(
    paths: PathsArgument = None,
    target: Annotated[
        list[str] | None,
        typer.Option(help=f"A GPU, or several by commas; may be repeated. Default: {','.join(TARGETS)}."),
    ] = None,
    table: Annotated[Path, typer.Option(help="The table that --check and --update are about.")] = TABLE,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 if the figures are not those of the table.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Record the figures in the table.")] = False,
    output_format: FormatOption = OutputFormat.TEXT,
) -> None:
    """Compile every kernel for every target and report access widths, spills, registers and shared memory.

    Needs torch and triton, but no GPU. A kernel that does not compile or that spills is a finding.
    """
    if check and update:
        raise typer.BadParameter("--check and --update exclude each other")
    targets = _targets(target)
    with reporting(output_format) as found:
        if update:
            check_replaced(table, rb'\{\s*"triton"', "table of compiled kernels")
        version, report = _compile(paths, targets)
        found += compile_report.problems(report)
        if output_format is OutputFormat.TEXT and not check:
            typer.echo(_text(version, report), nl=False)
        whole = not paths and not target
        if update and not any(diagnostic.code == "KV721" for diagnostic in found):  # a failure has no figures
            _update(table, version, report, whole=whole)
        if check:
            table_version, rows = compile_report.read_table(table)
            found += compile_report.differences(report, version, rows, table_version, whole=whole)
    if check and output_format is OutputFormat.TEXT:
        typer.echo(f"{sum(map(len, report.values()))} kernels are as {table.as_posix()} says")


def _targets(given: list[str] | None) -> list[str]:
    names = [name for text in given or () for name in text.split(",")]
    for name in names:
        if not re.fullmatch(r"sm_\d{2,3}|gfx[0-9a-f]{3,4}", name):
            raise typer.BadParameter(f"{name} is no target; try one of {', '.join(TARGETS)}", param_hint="--target")
    return list(dict.fromkeys(names or TARGETS))


def _compile(paths: list[str] | None, targets: list[str]) -> tuple[str, Report]:
    from kvgen.emit import kernels
    from kvgen.emit.render import render_all

    layouts = [layout for _, layout in load_all(find_layouts(paths))]
    texts = {file.removesuffix(".py"): text for file, text in render_all(layouts).items()}
    specs = {layout.name: kernels(layout) for layout in layouts}
    if sys.stderr.isatty():  # all layouts take a minute or two
        typer.echo(f"compiling {sum(map(len, specs.values()))} kernels for {len(targets)} targets", err=True)
    return compile_report.compile_all(texts, specs, targets)


def _update(path: Path, version: str, report: Report, *, whole: bool) -> None:
    """Record ``report``; of a part of the layouts or targets, beside what the table has of the others."""
    from kvgen.emit.write import write_file

    rows: Report = {}
    if not whole:
        table_version, rows = compile_report.read_table(path)
        if table_version != version:
            message = f"{path.as_posix()} was made with triton {table_version}, this is {version}"
            raise KvgenError(Diagnostic("KV723", message, hint="update all of it: `kvgen compile --update`"))
    for layout, kernels in report.items():
        known = rows.get(layout, {})
        rows[layout] = {kernel: known.get(kernel, {}) | by_target for kernel, by_target in kernels.items()}
    write_file(path, compile_report.table_text(version, rows))


def _text(version: str, report: Report) -> str:
    """A paragraph for each layout, a line for each kernel and set of targets that agree on widths and spills."""
    lines = [f"triton {version}"]
    for layout, kernels in report.items():
        lines += ["", layout]
        for kernel, by_target in kernels.items():
            if not by_target:  # a form of a call, which is compiled for other targets alone
                continue
            groups: dict[str, list[str]] = {}
            for target, result in by_target.items():
                groups.setdefault(_figures(result), []).append(target)
            lines.append(f"  {kernel}: {_registers(by_target)}")
            lines += [f"    {' '.join(targets):<44} {figures}" for figures, targets in groups.items()]
    return "\n".join(lines) + "\n"


def _figures(result: Result) -> str:
    if isinstance(result, Failure):
        return f"does not compile: {result.error}"
    loads, stores = compile_report.widths_text(result.loads), compile_report.widths_text(result.stores)
    shared = f"; {result.shared} bytes of shared memory" if result.shared else ""
    spills = f"; {result.spills} bytes spilled" if result.spills else ""
    return f"loads {loads}; stores {stores}{shared}{spills}"


def _registers(by_target: Mapping[str, Result]) -> str:
    counts = [result.registers for result in by_target.values() if isinstance(result, Figures)]
    if not counts:
        return "no figures"
    least, most = min(counts), max(counts)
    return f"{least} registers" if least == most else f"{least} to {most} registers"
