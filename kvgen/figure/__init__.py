"""A layout drawn as SVG: nested axes, bytes at the corners, every leaf in its colour, codes narrower than a byte.

The same facts as the picture in characters (``picture``), which this shares its levels and parts with. The byte in a
box's upper left corner is its first, that in the lower right one its last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kvgen import show, show_transfer, sizes
from kvgen.figure import svg
from kvgen.figure.boxes import draw_place
from kvgen.figure.svg import Drawing, arrow, below, beside, paragraph, text, text_width
from kvgen.figure.values import pad_name, paint
from kvgen.layout import Buffer, Holds, Layout, Pad, Place
from kvgen.picture import levels_of, parts
from kvgen.transfer import Transfer

WIDTH = 800
"""Pixels of a drawing, its margin included."""

_MARGIN = 16
_NARROW = 280  # the least that half a panel needs
_ARROW = 32


def figure(layout: Layout) -> str:
    """The SVG file of a layout: a page of each buffer, and what the colours mean."""
    drawing = drawn(layout, WIDTH - 2 * _MARGIN)
    return svg.document(drawing, f"{layout.name}: {layout.summary}" if layout.summary else layout.name, _MARGIN)


def transfer_figure(what: Transfer) -> str:
    """The SVG file of a transfer: what is moved and how, and a page of each buffer of both sides."""
    facts = [re.sub(r" {2,}", ": ", line.strip()) for line in show_transfer.lines_of(what)]
    return side_by_side(what.name, [what.summary, *facts] if what.summary else facts, what.source, what.destination)


def side_by_side(name: str, facts: Sequence[str], source: Layout, destination: Layout) -> str:
    """The SVG file of two layouts with an arrow from one to the other, below what is said of them."""
    width = WIDTH - 2 * _MARGIN
    column = (width - _ARROW) // 2
    left, right = drawn(source, column), drawn(destination, column)
    pictures = beside([left, arrow(_ARROW, min(left.height, right.height)), right])
    head = [paragraph(name, "title", width), *(paragraph(fact, "text", width) for fact in facts)]
    return svg.document(below([below(head, 2), pictures], 20), name, _MARGIN)


def drawn(layout: Layout, width: int) -> Drawing:
    """Name, streams, legend and buffers of a layout, ``width`` pixels wide."""
    facts = show.describe(layout)
    head = [paragraph(layout.name, "title", width)]
    head += [paragraph(layout.summary, "text", width)] if layout.summary else []
    head += [paragraph(show.stream_line(stream), "text", width) for stream in facts["streams"]]
    half = (width - _MARGIN) // 2
    rows: list[Drawing] = []
    narrow: list[Drawing] = []
    for buffer, described in zip(layout.buffers, facts["buffers"], strict=True):
        if half >= _NARROW and len(layout.buffers) > 1 and _is_narrow(layout, buffer):
            narrow.append(_panel(layout, buffer, described, half))
            continue
        rows += [*_pairs(narrow), _panel(layout, buffer, described, width)]
        narrow = []
    return below([below(head, 2), _legend(layout, width), *rows, *_pairs(narrow)], 14)


def _is_narrow(layout: Layout, buffer: Buffer) -> bool:
    """Whether half the width is enough: one leaf, few codes of it in a byte, and numbers for its bytes."""
    content = buffer.place.content
    alone = isinstance(content, Holds) and len(content.leaves) == 1 and (content.pack is None or content.pack.size == 2)
    return alone and sizes.page_bytes(layout, buffer).value is not None


def _pairs(panels: Sequence[Drawing]) -> list[Drawing]:
    return [beside(panels[i : i + 2], _MARGIN) for i in range(0, len(panels), 2)]


def _panel(layout: Layout, buffer: Buffer, facts: dict, width: int) -> Drawing:
    """One buffer: what its tensor is, and a page of it."""
    block = "request" if layout.contiguous else "block"
    lines = [
        f"order {facts['order']}" + ("" if isinstance(buffer.place.content, Holds) else " and a record"),
        f"[{', '.join(map(str, facts['shape']))}] of {' or '.join(facts['dtypes'])}",
        f"{facts['page_bytes']} bytes a {block}, {facts['bytes_per_token']} a token{show.in_layers(facts, block)}",
    ]
    head = [paragraph(buffer.name, "name", width), *(paragraph(one, "text", width) for one in lines)]
    levels = levels_of(layout, buffer.place)
    return below([below(head, 1), draw_place(layout, levels, buffer.place, 0, width)], 8)


def _legend(layout: Layout, width: int) -> Drawing:
    """A sample of every colour and what it stands for."""
    stored = [leaf.name for leaf in layout.leaves]
    pads = dict.fromkeys(pad_name(pad) for buffer in layout.buffers for pad in _pads(buffer.place))
    entries: list[tuple[str | None, str]] = [(name, f"{name}  {_type(layout, name)}") for name in stored]
    entries += [(None, name) for name in pads]
    marks: list[str] = []
    x = y = 0
    for leaf, label in entries:
        needed = 22 + text_width(label, "label") + 20
        if x and x + needed > width:
            x, y = 0, y + 20
        marks += [*paint(layout, leaf, x, y, 16, 14), text(x + 22, y + 11, label, "label")]
        x += needed
    return Drawing(width, y + 16, tuple(marks))


def _pads(place: Place) -> Iterable[Pad]:
    if isinstance(place.content, Holds):
        return
    for part in parts(place):
        if isinstance(part.content, Pad):
            yield part.content
        else:
            yield from _pads(part.content)


def _type(layout: Layout, leaf: str) -> str:
    """The element type of a leaf: that of the codes where they are narrower than what the tensor counts."""
    stored = layout.leaf(leaf)
    encoding = layout.stream(stored.stream).encoding
    return encoding.code if encoding and leaf == stored.stream else " or ".join(stored.dtypes)
