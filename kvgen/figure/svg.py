"""Drawings as values: boxes and text that are put beside and below each other, and the SVG file of one."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

SIZES = {"title": 17, "name": 13, "text": 12, "label": 11, "byte": 11, "bit": 10}
"""Pixels of a text, by its class."""

_WIDTH_OF_A_CHARACTER = 0.602
"""Of a monospaced font, in its sizes."""

# (tint, strong, stroke) of a stream: the first for values and codes, the second for scales and zeros.
_LIGHT = (
    ("#ddf4ff", "#b6e3ff", "#0969da"),
    ("#fff1e5", "#ffd8b5", "#bc4c00"),
    ("#dafbe1", "#aceebb", "#1a7f37"),
    ("#fbefff", "#ecd8ff", "#8250df"),
    ("#ffeff7", "#ffd3eb", "#bf3989"),
    ("#fff8c5", "#fae17d", "#9a6700"),
)
_DARK = (
    ("#0d2847", "#12447a", "#4493f8"),
    ("#3a1d0a", "#6a3010", "#f0883e"),
    ("#0f2d18", "#1b5a2c", "#3fb950"),
    ("#25154a", "#46288a", "#ab7df8"),
    ("#3b1029", "#6b1d4a", "#f778ba"),
    ("#2e2408", "#5a4608", "#d29922"),
)
HUES = len(_LIGHT)


@dataclass(frozen=True, slots=True)
class Drawing:
    """SVG elements, one a line, in a box that begins at 0, 0."""

    width: int
    height: int
    marks: tuple[str, ...] = ()

    def at(self, x: int, y: int) -> tuple[str, ...]:
        """The elements, moved."""
        if not self.marks or (x, y) == (0, 0):
            return self.marks
        return (f'<g transform="translate({x} {y})">', *self.marks, "</g>")


def text_width(text: str, kind: str) -> int:
    return math.ceil(len(text) * SIZES[kind] * _WIDTH_OF_A_CHARACTER)


def text(x: int, y: int, content: str, kind: str, anchor: str = "start") -> str:
    """Text whose line begins, has its middle or ends at ``x``; ``y`` is its base line."""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" class="{kind}"{where}>{escape(content, quote=False)}</text>'


def rect(x: int, y: int, width: int, height: int, kind: str, corner: int = 3) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{corner}" class="{kind}"/>'


def line(x1: int, y1: int, x2: int, y2: int, kind: str) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="{kind}"/>'


def arrow(width: int, height: int) -> Drawing:
    """An arrow to the right, in the middle of a column."""
    y, tip = height // 2, width - 6
    shaft = line(6, y, tip, y, "arrow")
    return Drawing(width, height, (shaft, f'<path d="M{tip - 6} {y - 5}L{tip} {y}L{tip - 6} {y + 5}" class="arrow"/>'))


def paragraph(content: str, kind: str, width: int) -> Drawing:
    """Text broken into lines of at most ``width``."""
    step = SIZES[kind] + 5
    columns = max(10, int(width / (SIZES[kind] * _WIDTH_OF_A_CHARACTER)))
    lines = textwrap.wrap(content, columns) or [""]
    marks = tuple(text(0, step * i + SIZES[kind], one, kind) for i, one in enumerate(lines))
    return Drawing(width, step * len(lines), marks)


def below(drawings: Iterable[Drawing], gap: int = 0) -> Drawing:
    """One under the other."""
    marks: list[str] = []
    width = height = 0
    for drawing in drawings:
        height += gap if height else 0
        marks += drawing.at(0, height)
        width, height = max(width, drawing.width), height + drawing.height
    return Drawing(width, height, tuple(marks))


def beside(drawings: Sequence[Drawing], gap: int = 0) -> Drawing:
    """One next to the other, their tops at one height."""
    marks: list[str] = []
    width = height = 0
    for drawing in drawings:
        width += gap if width else 0
        marks += drawing.at(width, 0)
        width, height = width + drawing.width, max(height, drawing.height)
    return Drawing(width, height, tuple(marks))


def document(drawing: Drawing, title: str, margin: int = 16) -> str:
    """The SVG file of a drawing, in ASCII; it follows the reader's preference for light or dark."""
    width, height = drawing.width + 2 * margin, drawing.height + 2 * margin
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' role="img">',
        f"<title>{escape(title, quote=False)}</title>",
        "<style>",
        *_style(),
        "</style>",
        "<defs>",
        '<pattern id="lines" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<line y2="6" class="hatch"/></pattern>',
        '<pattern id="dots" width="6" height="6" patternUnits="userSpaceOnUse"><circle cx="2" cy="2" r="1" '
        'class="dot"/></pattern>',
        '<pattern id="cross" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<path d="M0 0V7M0 0H7" class="hatch"/></pattern>',
        "</defs>",
        rect(0, 0, width, height, "sheet", 8),
        *drawing.at(margin, margin),
        "</svg>",
    ]
    return ("\n".join(lines) + "\n").encode("ascii", "xmlcharrefreplace").decode()


def _style() -> list[str]:
    fonts = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
    lines = [f"text{{font-family:{fonts}}}"]
    lines += [f".{kind}{{font-size:{size}px}}" for kind, size in SIZES.items()]
    lines += [".title,.name,.label{font-weight:600}", ".lines{fill:url(#lines)}", ".dots{fill:url(#dots)}"]
    lines += [".cross{fill:url(#cross)}", ".half{stroke-dasharray:3 2}"]
    lines += _colours(_LIGHT, sheet="#ffffff", box="#f6f8fa", ink="#1f2328", faint="#59636e", rule="#c8d1da")
    dark = _colours(_DARK, sheet="#0d1117", box="#151b23", ink="#f0f6fc", faint="#9ea7b3", rule="#3d444d")
    return [*lines, "@media (prefers-color-scheme:dark){", *dark, "}"]


def _colours(hues: Sequence[tuple[str, str, str]], sheet: str, box: str, ink: str, faint: str, rule: str) -> list[str]:
    lines = [
        f".sheet{{fill:{sheet}}}",
        f".box{{fill:{sheet};stroke:{rule}}}",
        f".bar,.pad{{fill:{box};stroke:{rule}}}",
        f"text{{fill:{ink}}}",
        f".byte,.bit,.text{{fill:{faint}}}",
        f".hatch{{stroke:{faint};stroke-opacity:.35;fill:none}}",
        f".dot{{fill:{faint};fill-opacity:.5}}",
        f".half{{stroke:{faint}}}",
        f".arrow{{stroke:{ink};stroke-width:2;fill:none}}",
    ]
    for i, (tint, strong, stroke) in enumerate(hues):
        lines.append(f".s{i}{{fill:{tint};stroke:{stroke}}}")
        lines.append(f".s{i}.more{{fill:{strong}}}")
    return lines
