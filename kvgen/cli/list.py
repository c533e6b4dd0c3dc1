"""``kvgen list``: the layouts there are."""

from __future__ import annotations

import typer

from kvgen.cli.common import PathsArgument, console_width, find_layouts, load_all, shipped_layouts


def list_layouts(paths: PathsArgument = None) -> None:
    """List layouts: by default those in layouts/ and those that come with kvgen."""
    from rich.console import Console
    from rich.table import Table

    from kvgen import sizes

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("name", "block size", "streams", "buffers", "bytes a token, layer", "summary"):
        table.add_column(column, justify="right" if column.startswith(("block", "bytes")) else "left", overflow="fold")
    found = find_layouts(paths) if paths else list(shipped_layouts().values())
    for _, layout in load_all(found):
        table.add_row(
            layout.name,
            str(layout.block_size or "dynamic"),
            " ".join(stream.name for stream in layout.streams),
            " ".join(buffer.name for buffer in layout.buffers),
            str(sizes.token_bytes(layout)),
            layout.summary,
        )
    console = Console(width=console_width(), highlight=False)
    with console.capture() as captured:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
