"""Where the files that are no Python lie: beside the package in a checkout, inside it once installed."""

from __future__ import annotations

from pathlib import Path


def folder(name: str) -> Path:
    """The folder ``templates``, ``schema`` or ``layouts`` that came with this copy of kvgen."""
    package = Path(__file__).resolve().parent
    installed = package / name
    return installed if installed.is_dir() else package.parent / name
