"""A file to what it says: a layout, or a transfer between two."""

from __future__ import annotations

from pathlib import Path

from kvgen import resolve, resolve_transfer
from kvgen.layout import Layout
from kvgen.source import Source, parse, read
from kvgen.transfer import Transfer

Document = Layout | Transfer


def load(path: Path | str) -> Document:
    """Read a layout or a transfer. Raises KvgenError with all that is wrong with it, in the order of the file."""
    return _load(read(path))


def load_text(text: str | bytes, path: str = "<string>") -> Document:
    """Read one from text; ``path`` is what diagnostics call it, and where the layouts of a transfer are looked for."""
    return _load(parse(text, path))


def _load(source: Source) -> Document:
    return resolve_transfer.load(source) if "transfer" in source else resolve.load_source(source)
