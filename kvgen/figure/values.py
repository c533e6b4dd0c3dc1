"""What is drawn of values: their colours, how many there are, and the first of them with their bytes."""

from __future__ import annotations

from kvgen.amount import Amount
from kvgen.figure import svg
from kvgen.figure.svg import Drawing, line, rect, text, text_width
from kvgen.layout import Holds, Layout, Pad
from kvgen.picture import GAP, Level, beside, bits_of, codes_at

SKIP = 24
"""Pixels that stand for what is left out."""


def class_of(layout: Layout, leaf: str) -> str:
    hue = [stream.name for stream in layout.streams].index(layout.leaf(leaf).stream) % svg.HUES
    return f"s{hue}" if leaf == layout.leaf(leaf).stream else f"s{hue} more"


def paint(layout: Layout, leaf: str | None, x: int, y: int, width: int, height: int, plain: bool = False) -> list[str]:
    """A box in the colour of a leaf, with lines for scales and dots for zeros unless ``plain``; None is padding."""
    if leaf is None:
        return [rect(x, y, width, height, "pad"), rect(x, y, width, height, "cross")]
    marks = [rect(x, y, width, height, class_of(layout, leaf))]
    if leaf != layout.leaf(leaf).stream and not plain:
        marks.append(rect(x, y, width, height, "dots" if leaf.endswith(".zero") else "lines"))
    return marks


def pad_name(pad: Pad) -> str:
    return "padding, never written" if pad.fill is None else f"padding, written with {pad.fill}"


def how_many(layout: Layout, content: Holds, run: Level | None, leaf: str) -> str:
    """``128 values of 2 bytes``, ``128 codes of 4 bits``."""
    count = run.size if run else Amount.of(1)
    what = "code" if layout.stream(layout.leaf(leaf).stream).scale and leaf == layout.leaf(leaf).stream else "value"
    if content.pack:
        room = "a byte" if content.itemsize == 1 else f"{content.itemsize} bytes"
        what = f"codes of {content.bits} bits" if content.bits > 1 else "bits of as many codes"
        return f"{count * content.pack.size} {what}, {content.pack.size} in {room}"
    plural = "" if count.value == 1 else "s"
    return f"{count} {what}{plural} of {content.itemsize} byte{'s' * (content.itemsize > 1)}"


def draw_values(
    layout: Layout, content: Holds, run: Level | None, base: int, width: int, half: str | None, *, plain: bool = False
) -> Drawing:
    """Values side by side; where several share a byte, the byte and what lies in which of its bits."""
    count = int(run.size.value) if run and run.size.value else 1 if run is None else None
    needed = value_width(content, run, base)
    room = max(1, (width - SKIP) // needed)
    if count is not None and count <= max(1, min(width // needed, 16)):
        shown: list[int | None] = list(range(count))
    else:
        shown = run.shown(max(1, min(room, 8)))
    drawn = [i for i in shown if i is not None]
    each = min((width - SKIP * (len(shown) - len(drawn))) // len(drawn), 2 * needed)
    height = 52 if content.pack else 38
    marks: list[str] = []
    x = 0
    for i in shown:
        if i is None:
            marks.append(text(x + SKIP // 2, height // 2 + 3, GAP, "byte", "middle"))
            x += SKIP
            continue
        leaf = run.names[i] if run and run.names else half or content.leaves[0]
        marks += paint(layout, leaf, x, 0, each - 2, height, plain)
        marks += _value(content, run, base, i, x, each - 2)
        x += each
    return Drawing(x, height, tuple(marks))


def value_width(content: Holds, run: Level | None, base: int) -> int:
    last = int(run.size.value) - 1 if run and run.size.value else 0
    if content.pack:
        dims = codes_at(content, run, last)
        codes = len(dims) * (max(text_width(f"dim {d}", "label") for d in (*dims, 1000)) + 8) + 2
        return max(codes, text_width(_range(content, base, last) + beside(content, run, last), "byte") + 12)
    label = f"{run.label} {last}" if run else ""
    return max(text_width(label, "label"), text_width(_range(content, base, last), "byte")) + 12


def _range(content: Holds, base: int, index: int) -> str:
    start = base + index * content.itemsize
    return str(start) if content.itemsize == 1 else f"{start} – {start + content.itemsize - 1}"


def _value(content: Holds, run: Level | None, base: int, index: int, x: int, width: int) -> list[str]:
    if not content.pack:
        label = (run.names[index] if run.names else f"{run.label} {index}") if run else ""
        where = text(x + width // 2, 31 if label else 24, _range(content, base, index), "byte", "middle")
        return [text(x + width // 2, 15, label, "label", "middle"), where] if label else [where]
    dims = codes_at(content, run, index)
    part = width // len(dims)
    marks: list[str] = []
    for i, dim in enumerate(dims):
        middle = x + part * i + part // 2
        marks += [line(x + part * i, 0, x + part * i, 34, "half")] if i else []
        where = bits_of(content, i).replace(" ", "")
        name = f"dim {dim}" if text_width(f"dim {dim}", "label") < part else str(dim)
        marks.append(text(middle, 14, name, "label", "middle"))
        marks.append(text(middle, 29, f"bit {where}" if len(dims) == 2 else where, "bit", "middle"))
    where = _range(content, base, index) + beside(content, run, index)
    return [*marks, text(x + width // 2, 46, where, "byte", "middle")]
