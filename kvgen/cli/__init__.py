"""The commands. Each imports what it needs when it runs, so that none pays for another."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Annotated

import typer

from kvgen.cli.bench import bench
from kvgen.cli.build import build
from kvgen.cli.check import check
from kvgen.cli.common import report
from kvgen.cli.compile import compile_kernels
from kvgen.cli.diff import diff
from kvgen.cli.explain import explain
from kvgen.cli.list import list_layouts
from kvgen.cli.new import new
from kvgen.cli.plan import plan
from kvgen.cli.schema import schema
from kvgen.cli.show import show
from kvgen.cli.test import test
from kvgen.cli.tune import tune
from kvgen.diagnostics import Diagnostic, KvgenError

app = typer.Typer(
    name="kvgen",
    help="From one YAML file that says where every byte of a KV cache lives: its kernels, its reference and its proof.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(build)
app.command()(check)
app.command(name="list")(list_layouts)
app.command()(show)
app.command()(diff)
app.command()(plan)
app.command()(new)
app.command()(schema)
app.command(name="compile")(compile_kernels)
app.command()(test)
app.command()(bench)
app.command()(tune)
app.command()(explain)


def _version(wanted: bool) -> None:
    if wanted:
        from kvgen import __version__

        typer.echo(f"kvgen {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script: exit status 0 for success, 1 for findings, 2 for a wrong call or a missing prerequisite."""
    for stream in (sys.stdout, sys.stderr):
        # A picture has characters that some terminals lack; better a question mark there than no picture.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="kvgen")
    except KvgenError as error:
        sys.exit(report(error.diagnostics))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would be tried again at the end
        what = error.filename or "the output or a temporary file"
        sys.exit(report([Diagnostic("KV702", f"{what}: {error.strerror}")]))
