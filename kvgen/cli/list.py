"""``kvgen list``: the layouts there are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.cli.common import PathsArgument, console_width, find_layouts, known_layouts, load_each
from kvgen.diagnostics import KvgenError
from kvgen.layout import Layout
from kvgen.transfer import Transfer

if TYPE_CHECKING:
    from rich.table import Table

    from kvgen.documents import Document


def list_layouts(
    paths: PathsArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print objects, with the path of each file.")] = False,
) -> None:
    """List layouts: by default those in layouts/ and those that come with kvgen."""
    found = find_layouts(paths) if paths else list(known_layouts())
    loaded, problems = load_each(found)
    if as_json:
        rows = [{"path": path.as_posix(), **_facts(document)} for path, document in loaded]
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    elif loaded:
        typer.echo(_tables([document for _, document in loaded]))
    if problems:
        raise KvgenError(*problems)


def _facts(document: Document) -> dict[str, object]:
    """What the tables say of a layout or a transfer."""
    from kvgen import sizes

    facts: dict[str, object] = {"name": document.name, "summary": document.summary}
    if isinstance(document, Transfer):
        streams = [{"name": s.name, "requantised": not document.raw(s.name)} for s in document.source.streams]
        ends = {"from": document.source.name, "to": document.destination.name, "layers": document.layers}
        return facts | {"kind": "transfer", **ends, "streams": streams}
    streams = [{"name": s.name, "fused": _fused(document, s.name)} for s in document.streams]
    return facts | {
        "kind": "layout",
        "block_size": document.block_size,
        "streams": streams,
        "buffers": [buffer.name for buffer in document.buffers],
        "bytes_per_token_and_layer": sizes.token_bytes(document).plain,
    }


def _fused(layout: Layout, stream: str) -> bool:
    return bool(layout.fuse and layout.fuse.of(stream))


def _tables(documents: list[Document]) -> str:
    """Layouts, then transfers."""
    from rich.console import Console
    from rich.table import Table

    from kvgen import sizes

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("name", "block size", "streams, fused*", "buffers", "bytes a token, layer", "summary"):
        table.add_column(column, justify="right" if column.startswith(("block", "bytes")) else "left", overflow="fold")
    transfers = [document for document in documents if isinstance(document, Transfer)]
    for layout in documents:
        if isinstance(layout, Transfer):
            continue
        table.add_row(
            layout.name,
            str(layout.block_size or "dynamic"),
            " ".join(s.name + "*" * _fused(layout, s.name) for s in layout.streams),
            " ".join(buffer.name for buffer in layout.buffers),
            str(sizes.token_bytes(layout)),
            layout.summary,
        )
    console = Console(width=console_width(), highlight=False)
    with console.capture() as captured:
        if len(transfers) < len(documents):
            console.print(table)
        if 0 < len(transfers) < len(documents):
            console.print()
        if transfers:
            console.print(_transfers(transfers))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _transfers(transfers: list[Transfer]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("transfer", "from", "to", "layers", "streams", "summary"):
        table.add_column(column, overflow="fold")
    for what in transfers:
        streams = (f"{s.name}{'' if what.raw(s.name) else ' (requantised)'}" for s in what.source.streams)
        table.add_row(what.name, what.source.name, what.destination.name, what.layers, " ".join(streams), what.summary)
    return table
