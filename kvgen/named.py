"""Files of layouts and transfers by their names: what ``name`` says in them counts, not what the file is called."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvgen.diagnostics import Span

SUFFIXES = (".yaml", ".yml")


def name_span(path: Path) -> Span:
    """The line in which a file says its name; its first one if none does."""
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.startswith("name:"):
                line = line.rstrip("\n")
                return Span(path.as_posix(), number, 1, len(line) + 1, line)
    return Span(path.as_posix(), 1, 1, 1, "")


def name_of(path: Path) -> str:
    """The name in a file; what the file is called if it cannot be read, or says it in another way than in a line."""
    try:
        said = name_span(path).text.removeprefix("name:").partition(" #")[0].strip()
    except (OSError, ValueError):
        said = ""
    return said.strip("'\"") or path.stem


def may_be(path: Path) -> bool:
    """Whether a path is called like a layout or a transfer; what is hidden is not."""
    return path.suffix in SUFFIXES and not path.name.startswith(".")


def names_in(folder: Path) -> dict[Path, str]:
    """Layouts and transfers in a folder, and their names."""
    return {path: name_of(path) for path in sorted(folder.glob("*")) if may_be(path) and os.path.isfile(path)}


def find(name: str, names: Mapping[Path, str]) -> list[Path]:
    """The files with a name; where none has it, those that are called so."""
    return [path for path, said in names.items() if said == name] or [path for path in names if path.stem == name]
