"""What the commands share: finding layouts, loading them, and telling the user what is wrong."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen import diagnostics, named, resources
from kvgen.cli.codes import ENVIRONMENT
from kvgen.diagnostics import Diagnostic, KvgenError
from kvgen.layout import Layout

if TYPE_CHECKING:
    from kvgen.documents import Document

DEFAULT_FOLDER = "layouts"


class OutputFormat(StrEnum):
    """How findings are printed: for people, for programs, or as annotations on GitHub."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"


PathsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PATHS]...", help="Layout files, folders of them, or names of shipped layouts."),
]
FormatOption = Annotated[OutputFormat, typer.Option("--output-format", help="How to print what is found.")]


def report(found: Sequence[Diagnostic], output_format: OutputFormat = OutputFormat.TEXT) -> int:
    """Print findings, and return the exit status they deserve.

    Text goes to the error stream. JSON and annotations are for programs and go to the output, JSON also when empty.
    """
    if output_format is OutputFormat.JSON:
        typer.echo(diagnostics.render_json(found))
    elif found and output_format is OutputFormat.GITHUB:
        typer.echo(diagnostics.render_github(found))
    elif found:
        typer.echo(diagnostics.render_text(found), err=True)
    if not found:
        return 0
    return 2 if all(diagnostic.code in ENVIRONMENT for diagnostic in found) else 1


@contextmanager
def reporting(output_format: OutputFormat) -> Iterator[list[Diagnostic]]:
    """Collect findings into the list, print them at the end, and exit with their status if there are any."""
    found: list[Diagnostic] = []
    try:
        yield found
    except KvgenError as error:
        found += error.diagnostics
    if status := report(found, output_format):
        raise typer.Exit(status)


def find_layouts(arguments: Sequence[str] | None) -> list[Path]:
    """The layout files that ``arguments`` name, each once, in a fixed order; by default those of ``layouts/``."""
    if not arguments and not Path(DEFAULT_FOLDER).is_dir():
        message = f"there is no folder {DEFAULT_FOLDER}/ here"
        raise KvgenError(Diagnostic("KV701", message, hint="name files or folders; `kvgen new NAME` starts a layout"))
    found: dict[Path, Path] = {}
    problems = []
    for argument in arguments or [DEFAULT_FOLDER]:
        try:
            for path in _expand(argument):
                found.setdefault(path.resolve(), path)
        except KvgenError as error:
            problems += error.diagnostics
    if problems:
        raise KvgenError(*problems)
    return list(found.values())


def _expand(argument: str) -> list[Path]:
    path = Path(argument)
    if os.path.isdir(path):  # unlike Path.is_dir, for any string at all
        named = _named(path)
        if broken := [p for p in named if p.is_symlink() and not p.exists()]:
            raise KvgenError(*map(_leads_nowhere, broken))  # passed over, its module would have no layout any more
        files = [p for p in named if p.is_file()]
        if not files:
            raise KvgenError(Diagnostic("KV701", f"there are no layouts in {path.as_posix()}/"))
        return files
    return [layout_path(argument)]


def _named(folder: Path) -> list[Path]:
    """What is called like a layout in a folder and those in it."""
    return sorted(path for path in folder.rglob("*") if named.may_be(path))


def _leads_nowhere(link: Path) -> Diagnostic:
    message = f"{link.as_posix()} is a link to {os.readlink(link)}, which is not there"
    return Diagnostic("KV701", message, hint="mend the link, or delete it")


def layout_path(argument: str) -> Path:
    """A layout's file, by path or by its name, which may be that of a shipped one."""
    path = Path(argument)
    if os.path.exists(path):
        return path
    known = known_layouts()
    found = named.find(argument, known)
    if len(found) > 1:
        raise KvgenError(*(_same_name(argument, each, found[0]) for each in found[1:]))
    if found:
        return found[0]
    if path.suffix in named.SUFFIXES or len(path.parts) != 1:
        raise KvgenError(Diagnostic("KV701", f"{path.as_posix()} does not exist"))
    import difflib

    close = difflib.get_close_matches(argument, known.values(), n=1)
    hint = f"did you mean {close[0]}?" if close else "`kvgen list` names the layouts"
    raise KvgenError(Diagnostic("KV701", f"{argument} is neither a file nor the name of a layout", hint=hint))


def known_layouts() -> dict[Path, str]:
    """The layouts and transfers here (``layouts/``), and of those that came with kvgen whose names are not taken here;
    each with its name.

    What lies deeper in a folder comes last.
    """
    found: dict[Path, str] = {}
    for folder in (Path(DEFAULT_FOLDER), resources.folder("layouts")):
        files = sorted(filter(Path.is_file, _named(folder)), key=lambda path: len(path.parts))
        taken = set(found.values())
        found |= {path: name for path, name in zip(files, map(named.name_of, files), strict=True) if name not in taken}
    return found


def load_all(paths: Iterable[Path]) -> list[tuple[Path, Document]]:
    """Load every layout and transfer; all mistakes in all files are raised together, two of one name among them."""
    loaded, problems = load_each(paths)
    if problems:
        raise KvgenError(*problems)
    return loaded


def load_each(paths: Iterable[Path]) -> tuple[list[tuple[Path, Document]], list[Diagnostic]]:
    """The layouts and transfers that load, two of one name both, and what is wrong with the files."""
    from kvgen.documents import load

    loaded: list[tuple[Path, Document]] = []
    problems: list[Diagnostic] = []
    names: dict[str, Path] = {}
    for path in paths:
        try:
            layout = load(path)
        except KvgenError as error:
            problems += error.diagnostics
            continue
        # Compared without case: on some file systems Paged.py and paged.py are one file.
        first = names.setdefault(layout.name.casefold(), path)
        if first is not path:
            problems.append(_same_name(layout.name, path, first))
        loaded.append((path, layout))
    return loaded, problems


def _same_name(name: str, path: Path, first: Path) -> Diagnostic:
    message = f"the name {name} is taken by {first.as_posix()}"
    return Diagnostic("KV708", message, named.name_span(path), "every layout needs a name of its own")


def only_layouts(documents: Sequence[Document], why: str) -> list[Layout]:
    """The layouts among some documents. KvgenError with ``why`` if there are none, but only transfers."""
    found = [document for document in documents if isinstance(document, Layout)]
    if not found:
        raise KvgenError(Diagnostic("KV701", f"{documents[0].name} is a transfer and no layout", hint=why))
    return found


def check_replaced(file: Path, start: bytes, what: str) -> None:
    """Nothing but an empty file or what a command may have written is written over: others are easily named by mistake.

    ``start`` is a pattern of how ``what`` begins. KvgenError if a file holds something else.
    """
    from kvgen.emit.write import is_stream

    if not file.is_file() or is_stream(file):
        return
    try:
        with file.open("rb") as old:
            head = old.read(512).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError as error:
        raise KvgenError(Diagnostic("KV702", f"{file.as_posix()}: {error.strerror}")) from None
    if head and not re.match(start, head):
        message = f"{file.as_posix()} exists already, and is no {what}"
        raise KvgenError(Diagnostic("KV709", message, hint="choose another name, or delete it"))


def console_width() -> int | None:
    """The width of tables: the terminal's, and wide enough for everything where the output goes elsewhere."""
    return None if sys.stdout.isatty() else 240


@contextmanager
def progress(total: int) -> Iterator[Callable[[str, bool], None]]:
    """A bar on a terminal, nothing elsewhere: a function that is told what was done and whether one of ``total`` is."""
    if not sys.stderr.isatty():
        yield lambda what, through: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda what, through: bar.update(task, description=what, advance=int(through))


def one_layout(argument: str, why: str) -> Layout:
    """The layout that an argument names. KvgenError with ``why`` if that is a transfer."""
    return only_layouts([load_all([layout_path(argument)])[0][1]], why)[0]


def check_layers(layout: Layout, layers: int | None) -> None:
    """Usage error for a number of layers where the layout says another itself."""
    known = layout.layers or layout.regions
    own = known and known.extent
    if own and layers not in (None, own):
        raise typer.BadParameter(f"{layout.name} has {own} layers", param_hint="--layers")
