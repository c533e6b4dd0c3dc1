"""``kvgen new``: a layout to start from."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from kvgen.cli.common import DEFAULT_FOLDER, known_layouts, layout_path
from kvgen.diagnostics import Diagnostic, KvgenError

STARTER = """\
name: {name}
summary: One line that says what this layout is, or whose.

# Extents are compile-time constants; `dynamic` takes one from the tensor at launch.
axes: {{head: 8, dim: 128}} # KV heads, and the size of each

# Tokens in a block (page).
block_size: 16

# One tensor each. `holds` names what lies there, `order` the axes from the slowest to the fastest.
# An axis may be split: `dim//8` and `dim%8` are two axes that together are dim.
buffers:
  key_cache: {{holds: key, order: block slot head dim}}
  value_cache: {{holds: value, order: block slot head dim}}

# Both in one tensor:
#   kv_cache: {{holds: [key, value], order: block kv slot head dim}}
# A key and its value side by side in a record:
#   kv_cache: {{order: block slot head, fields: [key, value]}}
"""


def new(
    name: Annotated[str, typer.Argument(help="The name of the layout: a Python identifier.")],
    like: Annotated[
        str | None, typer.Option(help="Start from this layout: a file, or the name of a shipped one.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder to write NAME.yaml to.")] = Path(DEFAULT_FOLDER),
) -> None:
    """Write a commented layout to start from. An existing file is never overwritten."""
    from kvgen.documents import load_text
    from kvgen.emit.write import write_files

    path = out / f"{name}.yaml"
    taken = next((path for path, said in known_layouts().items() if said == name), None)
    if taken is not None and taken.parent.name == "transfers":
        message = f"{name} is the name of a transfer, {taken.as_posix()}"
        raise KvgenError(
            Diagnostic("KV708", message, hint="choose another: a layout of that name would stand before it")
        )
    text = _editor_line(out) + (STARTER.format(name=name) if like is None else _renamed(layout_path(like), name))
    load_text(text, path.as_posix())  # a name that is no identifier is reported by whoever checks names
    if os.path.lexists(path):
        raise KvgenError(
            Diagnostic("KV709", f"{path.as_posix()} exists already", hint="choose another name, or edit it")
        )
    write_files(out, {path.name: text})
    file = shlex.quote(path.as_posix())
    build = "kvgen build" if out == Path(DEFAULT_FOLDER) else f"kvgen build {file}"
    typer.echo(f"wrote {path.as_posix()}; `kvgen show {file}` shows it, `{build}` makes its module")


def _editor_line(out: Path) -> str:
    """The line that gives editors the schema, where there is one beside the folder."""
    schema = out.parent / "schema" / "layout.schema.json"
    return f"# yaml-language-server: $schema=../schema/{schema.name}\n" if schema.is_file() else ""


def _renamed(path: Path, name: str) -> str:
    """The text of a layout under another name, comments and all but the path to its schema.

    What is wrong with it is reported as usual.
    """
    from kvgen.documents import load

    load(path)
    text = re.sub(r"(?m)\A# yaml-language-server:.*\n", "", path.read_text(encoding="utf-8-sig"))
    return re.sub(r"(?m)^(name:\s*)(\"[^\"]*\"|'[^']*'|[^\s#]+)", lambda match: match[1] + name, text, count=1)
