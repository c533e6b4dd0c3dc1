"""``kvgen build``: layouts to modules."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Annotated

import typer

from kvgen import resources
from kvgen.cli.common import (
    DEFAULT_FOLDER,
    FormatOption,
    OutputFormat,
    PathsArgument,
    find_layouts,
    load_all,
    reporting,
)
from kvgen.diagnostics import Diagnostic, Span
from kvgen.documents import Document
from kvgen.emit.write import MANIFEST, Change, Module, State, Survey, apply, digest, survey
from kvgen.transfer import Transfer


def build(
    paths: PathsArgument = None,
    out: Annotated[Path, typer.Option(help="The folder that modules are written to.")] = Path("generated"),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if a file is not as it should be.")
    ] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Write nothing; show what would change.")] = False,
    only: Annotated[
        str | None,
        typer.Option(help="The functions that modules are to have, by commas: append,gather. Instead of `functions`."),
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Remove modules whose layout is gone.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that were edited by hand.")] = False,
    output_format: FormatOption = OutputFormat.TEXT,
) -> None:
    """Write the module of every layout (by default of those in layouts/), or say what would change.

    Everything is checked and rendered before the first file is written; files that are as they belong stay untouched.
    When folders are built, modules in the output folder whose layout is gone are orphans; when single files are built,
    the other modules stay as they are.
    """
    if (check or diff) and (force or clean):
        raise typer.BadParameter("--check and --diff write nothing: they go without --force and --clean")
    with reporting(output_format) as found:
        modules, left_out = _render(paths, [name.strip() for name in only.split(",")] if only is not None else [])
        result = survey(out, modules, whole=_is_whole(paths), clean=clean, others=_elsewhere(paths) | left_out)
        if diff:
            typer.echo("".join(_diff(out, change) for change in result.changes), nl=False)
        if check or diff:
            found += [_finding(out, change) for change in result.changes if change.state is not State.FRESH]
            return
        written, removed = apply(result, force=force, clean=clean)
        if output_format is OutputFormat.TEXT:
            for file in sorted(left_out):
                typer.echo(
                    f"{(out / file).as_posix()} can have none of these functions, and is left as it is", err=True
                )
            _summarise(result, written, removed)


def _is_whole(paths: list[str] | None) -> bool:
    """Whether the layouts named are all there are: folders, not single files."""
    return all(os.path.isdir(path) for path in paths or ())


def _elsewhere(paths: list[str] | None) -> set[str]:
    """Modules that a folder does not orphan: those of shipped layouts, which are built by name."""
    shipped = resources.folder("layouts")
    if shipped.resolve() in {Path(path).resolve() for path in paths or [DEFAULT_FOLDER]}:
        return set()
    return {f"{path.stem}.py" for path in shipped.rglob("*.yaml")}


def _render(paths: list[str] | None, only: list[str]) -> tuple[list[Module], set[str]]:
    """The modules, with these functions alone if there are any; and the files of those that can have none of them."""
    from kvgen.emit.render import render_all
    from kvgen.functions import restricted

    loaded = load_all(find_layouts(paths))
    documents = [document for _, document in loaded]
    texts = render_all(restricted(documents, only) if only else documents)
    digests = {f"{document.name}.py": _digest(path, document, only) for path, document in loaded}
    return [Module(file, text, digests[file]) for file, text in texts.items()], digests.keys() - texts.keys()


def _digest(path: Path, document: Document, only: list[str]) -> str:
    """Of what a module is made of: the layout's file, or that of a transfer and the layouts it names."""
    from kvgen.canonical import canonical

    parts = [path.read_bytes(), *(name.encode() for name in only)]
    if isinstance(document, Transfer):
        parts += [canonical(layout).encode() for layout in document.sides]
    return digest(b"".join(parts))


_MEANING = {
    State.MISSING: ("KV706", "is missing", "`kvgen build` writes it"),
    State.STALE: ("KV705", "is out of date", "`kvgen build` writes it anew"),
    State.EDITED: (
        "KV703",
        "is not as kvgen wrote it",
        "move your changes to the layout; `kvgen build --force` overwrites",
    ),
    State.ORPHANED: ("KV707", "has no layout any more", "`kvgen build --clean` removes it"),
}


def _finding(out: Path, change: Change) -> Diagnostic:
    code, what, hint = _MEANING[change.state]
    if change.state is State.ORPHANED and change.edited:
        what, hint = "has no layout any more, and was edited", "`kvgen build --clean --force` removes it"
    path = (out / change.file).as_posix()
    return Diagnostic(code, f"{path} {what}", Span(path, 1, 1, 1, ""), hint)


def _diff(out: Path, change: Change) -> str:
    path = (out / change.file).as_posix()
    before = "/dev/null" if change.old is None else f"a/{path}"
    after = "/dev/null" if change.new is None else f"b/{path}"
    old, new = (change.old or "").splitlines(keepends=True), (change.new or "").splitlines(keepends=True)
    return "".join(difflib.unified_diff(old, new, before, after))


def _summarise(result: Survey, written: list[str], removed: list[str]) -> None:
    for verb, files in (("wrote", written), ("removed", removed)):
        for file in files:
            typer.echo(f"{verb} {(result.folder / file).as_posix()}")
    for change in result.of(State.ORPHANED):
        if change.file not in removed:
            what = "it was edited: --clean --force removes it" if change.edited else "--clean removes it"
            typer.echo(f"{(result.folder / change.file).as_posix()} has no layout any more; {what}", err=True)
    fresh = sum(change.file != MANIFEST for change in result.of(State.FRESH))
    typer.echo(f"{len(written)} written, {fresh} unchanged" + (f", {len(removed)} removed" if removed else ""))
