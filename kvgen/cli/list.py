"""``kvgen list``: the layouts there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kvgen.cli.common import PathsArgument, console_width, find_layouts, load_each, shipped_layouts
from kvgen.diagnostics import KvgenError
from kvgen.transfer import Transfer

if TYPE_CHECKING:
    from rich.table import Table


def list_layouts(paths: PathsArgument = None) -> None:
    """List layouts: by default those in layouts/ and those that come with kvgen."""
    from rich.console import Console
    from rich.table import Table

    from kvgen import sizes

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("name", "block size", "streams, fused*", "buffers", "bytes a token, layer", "summary"):
        table.add_column(column, justify="right" if column.startswith(("block", "bytes")) else "left", overflow="fold")
    found = find_layouts(paths) if paths else list(shipped_layouts().values())
    loaded, problems = load_each(found)
    documents = [document for _, document in loaded]
    transfers = [document for document in documents if isinstance(document, Transfer)]
    for layout in documents:
        if isinstance(layout, Transfer):
            continue
        table.add_row(
            layout.name,
            str(layout.block_size or "dynamic"),
            " ".join(s.name + "*" * bool(layout.fuse and layout.fuse.of(s.name)) for s in layout.streams),
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
    if documents:
        typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
    if problems:
        raise KvgenError(*problems)


def _transfers(transfers: list[Transfer]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("transfer", "from", "to", "layers", "streams", "summary"):
        table.add_column(column, overflow="fold")
    for what in transfers:
        streams = (f"{s.name}{'' if what.raw(s.name) else ' (requantised)'}" for s in what.source.streams)
        table.add_row(what.name, what.source.name, what.destination.name, what.layers, " ".join(streams), what.summary)
    return table
