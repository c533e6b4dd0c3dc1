"""Modules generated on the spot, imported from a file, since Triton reads kernels from their source."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType

from kvgen import documents, runtime
from kvgen.emit import render_layout
from kvgen.layout import Layout
from kvgen.resolve import load
from kvgen.transfer import Transfer

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = sorted(path.stem for path in (ROOT / "layouts").glob("*.yaml"))
TRANSFERS = sorted(path.stem for path in (ROOT / "layouts" / "transfers").glob("*.yaml"))


def shipped_text(name: str) -> str:
    return (ROOT / "layouts" / f"{name}.yaml").read_text(encoding="utf-8")


@cache
def shipped(name: str) -> Layout:
    return load(ROOT / "layouts" / f"{name}.yaml")


@cache
def transfer(name: str) -> Transfer:
    return documents.load(ROOT / "layouts" / "transfers" / f"{name}.yaml")


@cache
def rendered(name: str) -> str:
    """The generated text of a shipped layout."""
    return render_layout(shipped(name))


def module_of(layout: Layout | Transfer) -> ModuleType:
    return runtime.import_module(layout.name, render_layout(layout))
