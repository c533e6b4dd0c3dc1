"""Diagnostics: what a user is told about a mistake, and where it is."""

from __future__ import annotations

from dataclasses import dataclass


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
