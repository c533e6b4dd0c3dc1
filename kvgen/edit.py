"""Changing one section of a layout file and nothing else of its text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from kvgen.canonical import hints_text
from kvgen.diagnostics import Diagnostic, KvgenError
from kvgen.layout import KernelHints, ScheduleHints
from kvgen.resolve import load_text

MARK = "# kvgen tune: "
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_KEY = re.compile(r"""(["']?)schedule\1\s*:""")
_COMMENT = re.compile(r"(?:^|\s)(#[^\r\n]*)")


def with_schedule(text: str, path: str, hints: Mapping[str, KernelHints], remark: str) -> str:
    """The text of a layout with a ``schedule:`` of these ``hints`` by kind, and what they rest on in a comment above.

    A section that is there is replaced where it stands, one that is not is put at the end; without hints none is left.
    All else stays as it is; comments inside the section are put above it. KvgenError if the text is not one that this
    can be done to line by line.
    """
    wanted = replace(load_text(text, path), schedule=ScheduleHints(**hints))
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = _LINE.findall(text)
    start, end = _section(lines)
    section = [*_comments(lines[start:end]), *schedule_lines(hints, remark)]
    if section and start == len(lines):
        if not lines[-1].endswith("\n"):
            lines[-1] += newline
            end = start = len(lines)
        if any(not line.strip() for line in lines):  # a file that sets its sections apart
            section.insert(0, "")
    found = "".join([*lines[:start], *(line + newline for line in section), *lines[end:]])
    if _means(found, wanted):
        return found
    raise KvgenError(
        Diagnostic(
            "KV746",
            f"{path}: the schedule cannot be put into the text as it is written",
            hint="write the keys of the layout one below the other, or put it there yourself: "
            + " ".join(line.strip() for line in schedule_lines(hints, remark)[1:]),
        )
    )


def schedule_lines(hints: Mapping[str, KernelHints], remark: str) -> list[str]:
    """The section and the comment above it."""
    if not hints:
        return []
    return [MARK + remark, "schedule:", *(f"  {kind}: {hints_text(each)}" for kind, each in hints.items())]


def _means(text: str, wanted: object) -> bool:
    try:
        return load_text(text) == wanted
    except KvgenError:
        return False


def _section(lines: list[str]) -> tuple[int, int]:
    """From where to where the section goes, the mark above it included; the end of the text if there is none."""
    start = next((i for i, line in enumerate(lines) if _KEY.match(line)), None)
    if start is None:
        return len(lines), len(lines)
    end = start + 1
    while end < len(lines) and lines[end][0] in " \t}":
        end += 1
    while not lines[end - 1].strip():  # blank lines before the next section
        end -= 1
    return start - (start > 0 and lines[start - 1].startswith(MARK)), end


def _comments(lines: list[str]) -> list[str]:
    found = [match[1] for line in lines if (match := _COMMENT.search(line))]
    return [comment for comment in found if not comment.startswith(MARK)]
