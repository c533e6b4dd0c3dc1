"""Module contexts to text: templates, then the formatter."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kvgen.emit.codes import CODES
from kvgen.emit.module import build_module
from kvgen.emit.prune import pruned
from kvgen.emit.transfer_module import build_transfer_module
from kvgen.layout import Layout
from kvgen.resources import folder
from kvgen.transfer import Transfer

FORMAT = ["format", "--isolated", "--quiet", "--no-cache", "--line-length", "120", "--target-version", "py311"]


def render_layout(layout: Layout | Transfer) -> str:
    """The text of the module of a layout or a transfer, formatted."""
    return next(iter(render_all([layout]).values()))


def render_all(layouts: Sequence[Layout | Transfer]) -> dict[str, str]:
    """File name to text for every layout and transfer, formatted in one run of the formatter."""
    return _format({f"{layout.name}.py": render_raw(layout) for layout in layouts})


def render_raw(layout: Layout | Transfer) -> str:
    """The text of a module as the templates print it, without what none of its functions uses."""
    if isinstance(layout, Transfer):
        moves = build_transfer_module(layout)
        return pruned(_environment().get_template("transfer.py.j2").render(m=moves, o=moves.ops, codes=CODES))
    module = build_module(layout)
    contexts = {"m": module, "a": module.addressing, "t": module.page_table, "o": module.ops, "codes": CODES}
    return pruned(_environment().get_template("module.py.j2").render(contexts))


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(folder("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def _format(texts: Mapping[str, str]) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="kvgen-") as name:
        root = Path(name)
        for file, text in texts.items():
            (root / file).write_text(text, encoding="utf-8", newline="\n")
        found = subprocess.run([_ruff(), *FORMAT, str(root)], capture_output=True, text=True, check=False)
        if found.returncode:
            raise RuntimeError(f"the formatter refused a generated module:\n{found.stderr}")
        return {file: (root / file).read_text(encoding="utf-8") for file in texts}


@cache
def _ruff() -> str:
    """The formatter that was installed with kvgen, wherever the shell's PATH points."""
    suffix = sysconfig.get_config_var("EXE") or ""
    beside = Path(sys.executable).with_name(f"ruff{suffix}")
    if beside.exists():
        return str(beside)
    from ruff.__main__ import find_ruff_bin  # slower to import, and right for every kind of installation

    return find_ruff_bin()
