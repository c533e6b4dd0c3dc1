"""``kvgen schema``: the JSON Schema of layout files, for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvgen.diagnostics import Diagnostic, KvgenError


def schema(
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write, instead of printing, or to check (schema/layout.schema.json)."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if the file is not up to date.")
    ] = False,
) -> None:
    """Print the JSON Schema of layout files, write it, or check that the written one is up to date."""
    from kvgen import spec

    text = json.dumps(spec.schema(), indent=2) + "\n"
    if check:
        _check(out or Path("schema/layout.schema.json"), text)
    elif out is None:
        typer.echo(text, nl=False)
    else:
        from kvgen.cli.common import check_replaced
        from kvgen.emit.write import write_file

        check_replaced(out, rb'\{\s*("\$schema"|\})', "JSON Schema")
        write_file(out, text)
        typer.echo(f"wrote {out.as_posix()}")


def _check(path: Path, text: str) -> None:
    try:
        current = path.read_text(encoding="utf-8")
    except OSError:
        current = None
    if current != text:
        what = "is missing" if current is None else "is out of date"
        hint = f"`kvgen schema --out {path.as_posix()}` writes it"
        raise KvgenError(Diagnostic("KV711", f"{path.as_posix()} {what}", hint=hint))
