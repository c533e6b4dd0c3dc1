"""``kvgen show``: where every byte of a layout lies."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvgen.cli.common import check_layers, check_replaced, layout_path, load_all
from kvgen.layout import Layout
from kvgen.transfer import Transfer


class ShowFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


def show(
    layout: Annotated[str, typer.Argument(help="A layout's file, or the name of a shipped layout.")],
    file: Annotated[Path | None, typer.Argument(help="With --svg: the file to write.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the pool whose size is shown.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the pool whose size is shown.")] = None,
    output_format: Annotated[ShowFormat, typer.Option("--output-format", help="For people or for programs.")] = (
        ShowFormat.TEXT
    ),
    svg: Annotated[bool, typer.Option("--svg", help="Draw it as SVG, for FILE or on the output.")] = False,
) -> None:
    """Show a layout: shapes, strides, addresses, sizes, a picture of one page, and its canonical YAML.

    Of a transfer: what is moved and how, and its two layouts.
    """
    from kvgen import show as shown
    from kvgen.canonical import canonical

    if file is not None and not svg:
        raise typer.BadParameter("a file is written with --svg only", param_hint="FILE")
    ((_, loaded),) = load_all([layout_path(layout)])
    if isinstance(loaded, Transfer):
        _show_transfer(loaded, layers, tokens, output_format, svg, file)
        return
    check_layers(loaded, layers)
    if svg:
        _draw(loaded, file)
    elif output_format is ShowFormat.JSON:
        typer.echo(json.dumps(shown.describe(loaded, layers, tokens) | {"canonical": canonical(loaded)}, indent=2))
    else:
        typer.echo(f"{shown.text(loaded, layers, tokens)}\n{canonical(loaded).rstrip()}")


def _show_transfer(what: Transfer, layers, tokens, output_format: ShowFormat, svg: bool, file: Path | None) -> None:
    from kvgen import show_transfer

    if layers or tokens:
        raise typer.BadParameter(
            f"{what.name} is a transfer: show its layouts, {what.source.name} and {what.destination.name}"
        )
    if svg:
        _draw(what, file)
    elif output_format is ShowFormat.JSON:
        typer.echo(json.dumps(show_transfer.describe(what), indent=2))
    else:
        typer.echo(show_transfer.text(what).rstrip())


def _draw(what: Layout | Transfer, file: Path | None) -> None:
    from kvgen.emit.write import is_stream, write_file
    from kvgen.figure import figure, transfer_figure

    drawn = transfer_figure(what) if isinstance(what, Transfer) else figure(what)
    if file is None:
        typer.echo(drawn, nl=False)
        return
    check_replaced(file, rb"<svg|<\?xml", "SVG")
    write_file(file, drawn)
    if not is_stream(file):
        typer.echo(f"wrote {file.as_posix()}")
