"""Diagnostics: what a user is told about a mistake, and where it is."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from kvgen.catalog import CATALOG, Entry

__all__ = ["CATALOG", "Diagnostic", "Entry", "KvgenError", "Span", "render_github", "render_json", "render_text"]

WIDEST = 160
"""Columns of a source line that are shown; longer ones are cut around the caret."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a source file; lines and columns count from 1, ``end_column`` is exclusive."""

    path: str
    line: int
    column: int
    end_column: int
    text: str  # the whole source line


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One mistake. ``code`` is a key of ``CATALOG``; ``hint`` says what to write instead."""

    code: str
    message: str
    span: Span | None = None
    hint: str | None = None


class KvgenError(Exception):
    """One or more diagnostics; the commands print them and exit, a traceback is never shown."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__("\n".join(d.message for d in diagnostics))
        self.diagnostics = diagnostics


def render_text(diagnostics: Iterable[Diagnostic]) -> str:
    """For people: ``path:line:col: error[CODE]: message``, the line with a caret, and the help. No final newline."""
    return "\n".join(_render(diagnostic) for diagnostic in diagnostics)


def render_json(diagnostics: Iterable[Diagnostic]) -> str:
    """For programs: a list of objects; without a place in a file ``path`` and the numbers are null."""
    found = []
    for d in diagnostics:
        place = dict.fromkeys(("path", "line", "column", "end_column"))
        if d.span is not None:
            place = {key: getattr(d.span, key) for key in place}
        found.append({"code": d.code, "message": d.message, **place, "help": d.hint})
    return json.dumps(found, indent=2)


def render_github(diagnostics: Iterable[Diagnostic]) -> str:
    """For GitHub: one workflow command a line, which becomes an annotation. No final newline."""
    lines = []
    for d in diagnostics:
        properties = {"title": d.code}
        if d.span is not None:
            where = {"file": d.span.path, "line": d.span.line, "col": d.span.column, "endColumn": d.span.end_column}
            properties = where | properties
        listed = ",".join(f"{key}={_escape(str(value), ':,')}" for key, value in properties.items())
        text = d.message + ("\nhelp: " + d.hint if d.hint else "")
        lines.append(f"::error {listed}::{_escape(text)}")
    return "\n".join(lines)


def _escape(text: str, also: str = "") -> str:
    """Text as workflow commands quote it: ``%`` and a hexadecimal code."""
    return "".join(f"%{ord(char):02X}" if char in "%\r\n" + also else char for char in _printable(text, "\r\n"))


def _render(diagnostic: Diagnostic) -> str:
    span = diagnostic.span
    where = f"{_printable(span.path)}:{span.line}:{span.column}: " if span else ""
    message = _printable(diagnostic.message, "\n")
    lines = [f"{where}error[{diagnostic.code}]: {message}"]
    if span is not None and span.text:
        lines += [f"    {line}" for line in _excerpt(span)]
    if diagnostic.hint:
        lines.append("  help: " + _printable(diagnostic.hint, "\n"))
    return "\n".join(lines)


def _excerpt(span: Span) -> tuple[str, str]:
    """The source line, and a second with carets below the span."""
    start, end = span.column - 1, max(span.end_column - 1, span.column)
    first = max(0, start - WIDEST // 2) if len(span.text) > WIDEST else 0
    last = first + WIDEST
    before, marked = span.text[first:start], span.text[start : min(end, last)]
    line = "".join(char if char.isprintable() else " " if char == "\t" else "\ufffd" for char in span.text[first:last])
    left, right = "..." if first else "", "..." if last < len(span.text) else ""
    carets = "^" * max(1, _columns(marked))
    return f"{left}{line}{right}".rstrip(), " " * (len(left) + _columns(before)) + carets


def _columns(text: str) -> int:
    """The columns text takes on a terminal: none for combining characters, two for wide ones."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def _printable(text: str, also: str = "") -> str:
    """Text without control characters, which could do anything to a terminal."""
    return "".join(c if c.isprintable() or c in also else c.encode("unicode_escape").decode() for c in text)
