"""``kvgen explain``: what an error code means."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Annotated

import typer

from kvgen.cli.codes import ENTRIES
from kvgen.diagnostics import Diagnostic, KvgenError


def explain(
    code: Annotated[str | None, typer.Argument(help="A code such as KV107; without one, all are listed.")] = None,
) -> None:
    """Say what an error code means, how it comes about and what to do."""
    if code is None:
        for name, entry in sorted(ENTRIES.items()):
            typer.echo(f"{name}  {entry.title}")
        return
    entry = ENTRIES.get(code.upper())
    if entry is None:
        raise KvgenError(Diagnostic("KV710", f"no code is called {code}", hint="`kvgen explain` lists them"))
    typer.echo(f"{code.upper()}: {entry.title}\n\n{_wrapped(entry.cause)}")
    if entry.example:
        typer.echo("\n" + "\n".join(f"    {line}" for line in entry.example.splitlines()))
    typer.echo(f"\n{_wrapped(entry.cure)}")


def _wrapped(text: str) -> str:
    """Prose for a terminal of any width; in one line where it goes elsewhere."""
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, break_on_hyphens=False) if sys.stdout.isatty() else text
