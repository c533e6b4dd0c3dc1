"""``kvgen check``: are the layouts right?"""

from __future__ import annotations

import typer

from kvgen.cli.common import FormatOption, OutputFormat, PathsArgument, find_layouts, load_all, reporting


def check(paths: PathsArgument = None, output_format: FormatOption = OutputFormat.TEXT) -> None:
    """Check layouts (by default those in layouts/), and say what is wrong and where."""
    with reporting(output_format):
        loaded = load_all(find_layouts(paths))
    if output_format is OutputFormat.TEXT:
        typer.echo("1 layout is right" if len(loaded) == 1 else f"{len(loaded)} layouts are right")
