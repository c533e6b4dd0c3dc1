"""One page of a buffer, drawn in characters: nested axes, the bytes each part takes, records with their fields."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvgen.amount import Amount
from kvgen.axes import Digit
from kvgen.layout import Buffer, Field, Holds, Layout, Pad, Place, leaves_of
from kvgen.packing import unpacked
from kvgen.sizes import digit_size, place_strides, term

WIDTH = 112
"""Columns a picture should fit in; records with more fields go on in a second strip."""

GAP = "…"


@dataclass(frozen=True, slots=True)
class Level:
    """One digit that a place repeats over, ``label`` being how orders spell it.

    ``names`` are those of its two halves where it is ``kv``.
    """

    label: str
    size: Amount
    stride: Amount
    names: tuple[str, ...] = ()
    digit: Digit | None = None

    def at(self, index: int) -> str:
        name = f" {self.names[index]}" if self.names else ""
        text = f"{self.label} {index}{name}"
        if self.stride.value is None and index:
            text += f", {self.stride * index} bytes on"
        return text

    def shown(self, few: int) -> list[int | None]:
        """The indices worth drawing, None for those left out: all if there are few, else the first ones and the last.

        Of a count that only the launch knows the last one cannot be drawn.
        """
        count = self.size.value
        if isinstance(count, int) and count <= few:
            return list(range(count))
        first = list(range(max(1, few - 2)))
        return [*first, None] if count is None or few == 1 else [*first, None, int(count) - 1]


def page(layout: Layout, buffer: Buffer) -> list[str]:
    """The lines that show one block of ``buffer``; where it has a ``layer`` axis, of one layer.

    Offsets count bytes from the start of the block, in a tensor with the smallest strides. An axis whose stride depends
    on the launch (``kv`` above ``block``, say) starts a count of its own.
    """
    levels = levels_of(layout, buffer.place, outside=("block", "layer"))
    return _place(layout, levels, buffer.place, 0)


def levels_of(layout: Layout, place: Place, outside: Iterable[str] = ()) -> list[Level]:
    """What a place repeats over, slowest first, without axes that are ``outside`` and digits of size one."""
    names = place.content.leaves if isinstance(place.content, Holds) else ()
    levels = []
    for dim, stride in zip(place.dims, place_strides(layout, place), strict=True):
        below = stride
        inner: list[Level] = []
        for digit in reversed(dim.digits):
            size = digit_size(layout, digit)
            if digit.axis not in outside and size.value != 1:
                halves = names if digit.axis == "kv" else ()
                inner.insert(0, Level(term(layout, place, digit), size, below, halves, digit))
            below *= size
        levels += inner
    return levels


def _place(layout: Layout, levels: Sequence[Level], place: Place, base: int) -> list[str]:
    """``place`` from byte ``base`` on, repeated over ``levels``."""
    if isinstance(place.content, Holds):
        outer, run = split_run(place.content, levels)
        size = (run.size if run else Amount.of(1)) * place.content.itemsize
        each = _run_text(place, run)
        lines = [f"each cell: {each}", *_nest(outer, base, size)] if outer else _nest((), base, size, each)
        return lines + _shared_bytes(place.content, run)
    if not levels:
        return _record(layout, place, base)
    repeats = [f"each cell: a record of {place.pitch} bytes", *_nest(levels, base, Amount.of(place.pitch))]
    return repeats + _record(layout, place, 0)


def split_run(content: Holds, levels: Sequence[Level]) -> tuple[Sequence[Level], Level | None]:
    """The levels without the fastest one, and that one, if its values lie side by side."""
    if levels and levels[-1].stride.value == content.itemsize:
        return levels[:-1], levels[-1]
    return levels, None


def codes_at(content: Holds, run: Level | None, index: int) -> tuple[int, ...]:
    """The dims, within their run, of the codes that share its bytes number ``index``: the first in the lowest bits."""
    step = run.digit.div if run and run.digit.axis == content.pack.axis else 0
    return tuple(index * step + content.pack.div * i for i in range(content.pack.size))


def beside(content: Holds, run: Level | None, index: int) -> str:
    """``, slot 1``: where bytes number ``index`` of a run lie that does not count dims; nothing where it does."""
    return f", {run.at(index)}" if run and run.digit.axis != content.pack.axis else ""


def bits_of(content: Holds, code: int) -> str:
    """The bits of a code among those that share bytes: ``4 – 7``."""
    return _span(content.bits * code, content.bits)


def _span(first: int, count: int) -> str:
    return f"{first}" if count == 1 else f"{first} – {first + count - 1}"


def _run_text(place: Place, run: Level | None) -> str:
    content = place.content
    what = content.leaves[0] if len(content.leaves) == 1 else "values"
    item = f"{content.itemsize} byte{'s' * (content.itemsize > 1)}"
    if run is None:
        return f"{what}, {item}"
    if content.pack:
        whole = "bytes" if content.itemsize == 1 else f"times {content.itemsize} bytes"
        return f"{what}, {run.size} {whole} of {content.pack.size} codes"
    last = run.size + -1
    return f"{what}, {run.label} 0 {GAP} {last}, {item} each"


def _shared_bytes(content: Holds, run: Level | None) -> list[str]:
    """Which codes share the first bytes of a cell, and the last ones; nothing where a code has bytes of its own."""
    if not content.pack:
        return []
    wide = content.itemsize
    shown = run.shown(4) if run else [0]
    name = "bit" + "s" * (content.bits > 1) + " " if wide == 1 else ""
    head = [f"{name}{bits_of(content, i)}" for i in range(content.pack.size)]
    rows = [[GAP] * len(head) if b is None else [f"dim {d}" for d in codes_at(content, run, b)] for b in shown]
    word = "byte" if wide == 1 else "bytes"
    spans = [f"{word} {_span(wide * (b or 0), wide)}" for b in shown]
    labels = [GAP if b is None else span + beside(content, run, b) for b, span in zip(shown, spans, strict=True)]
    names = ", ".join(content.leaves)
    return [
        f"bytes of {names}, {content.pack.size} codes each:",
        *_table([head, *rows], ["" if name else "bits", *labels], header=True),
    ]


def _nest(levels: Sequence[Level], base: int, size: Amount, title: str = "", few: int = 2) -> list[str]:
    """Boxes around a grid: the last two levels are its rows and columns, the others a box for each index drawn.

    Of boxes inside boxes only the first is drawn.
    """
    if len(levels) <= 2:
        return _grid(levels, base, size, title)
    level, rest = levels[0], levels[1:]
    lines: list[str] = []
    for index in level.shown(2 if level.names else few):
        if index is None:
            lines.append(f"  {GAP}")
            continue
        start = base + _offset(level, index)
        lines += _box(level.at(index), _nest(rest, start, size, few=1), _range(start, _extent(rest, size)))
    return lines


def _offset(level: Level, index: int) -> int:
    """Bytes to ``index``; none where the stride is unknown, since the label says so and counting starts anew."""
    return int(level.stride.value) * index if level.stride.value is not None else 0


def _extent(levels: Sequence[Level], size: Amount) -> Amount:
    """Bytes from the first to the end of the last of what ``levels`` repeat."""
    for level in reversed(levels):
        size = level.stride * (level.size + -1) + size
    return size


def _range(start: int, size: Amount) -> str:
    end = size + (start - 1)
    return f"{start} – {end}"


def _grid(levels: Sequence[Level], base: int, size: Amount, title: str) -> list[str]:
    one = Level("", Amount.of(1), Amount())
    rows, columns = [one, one, *levels][-2:]
    across, down = columns.shown(4), rows.shown(4)
    cells = [["" if c is None else columns.at(c) for c in across]] if columns is not one else [[title]] if title else []
    for r in down:
        start = base + (0 if r is None else _offset(rows, r))
        cells.append([GAP if None in (r, c) else _range(start + _offset(columns, c), size) for c in across])
    labels = [GAP if r is None else rows.at(r) if rows is not one else "" for r in down]
    if columns is one:
        return _table(cells, labels, header=False)
    return _table(cells, ["", *labels], header=True)


def _table(cells: Sequence[Sequence[str]], labels: Sequence[str], *, header: bool) -> list[str]:
    """Cells in a frame, with labels before the rows; a header stands above the frame."""
    labels = [*labels, *[""] * (len(cells) - len(labels))]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    margin = max(map(len, labels))
    indent = " " * (margin + 1 if margin else 0)

    def row(label: str, texts: Sequence[str], bar: str) -> str:
        body = bar.join(f" {text:^{width}} " for text, width in zip(texts, widths, strict=True))
        return f"{label:<{margin}}{' ' * bool(margin)}{bar}{body}{bar}".rstrip()

    def rule(left: str, mid: str, right: str) -> str:
        return indent + left + mid.join("─" * (width + 2) for width in widths) + right

    body = [row(label, texts, "│") for label, texts in zip(labels, cells, strict=True)]
    head = [row(labels[0], cells[0], " ")] if header else []
    return [*head, rule("┌", "┬", "┐"), *body[header:], rule("└", "┴", "┘")]


def _box(title: str, lines: Sequence[str], corner: str) -> list[str]:
    width = max(*map(len, lines), len(title) + 2, len(corner) + 2)
    top = f"┌ {title} {'─' * (width - len(title))}┐"
    bottom = f"└{'─' * (width - len(corner))} {corner} ┘"
    return [top, *(f"│ {line:<{width}} │" for line in lines), bottom]


def _record(layout: Layout, place: Place, base: int) -> list[str]:
    """The fields of a record side by side, and below them those that are more than a row of values."""
    columns, below = [], []
    for field in parts(place):
        start, content = base + field.offset, field.content
        columns.append(_column(layout, start, content))
        if isinstance(content, Pad):
            continue
        levels = levels_of(layout, content)
        if len(levels) > 1 or not isinstance(content.content, Holds):
            name = ", ".join(leaves_of(content))
            below += ["", f"{name}, from byte {start}:", *_place(layout, levels, content, start)]
        else:
            below += _shared_bytes(content.content, levels[-1] if levels else None)
    lines = [f"record of {place.pitch} bytes"]
    for strip in _strips(columns):
        lines += _table([[column[i] for column in strip] for i in range(3)], ["", "", ""], header=False)
    return lines + below


def parts(place: Place) -> Iterable[Field]:
    """The fields of a record, and as paddings the gaps that alignment leaves between and after them."""
    end = 0
    for field in place.content.fields:
        if field.offset > end:
            yield Field(end, Pad(field.offset - end))
        yield field
        end = field.offset + field.content.size
    if place.pitch > end:
        yield Field(end, Pad(place.pitch - end))


def _column(layout: Layout, start: int, content: Place | Pad) -> tuple[str, str, str]:
    extent = _range(start, Amount.of(content.size))
    if isinstance(content, Pad):
        return ("pad" if content.fill is None else f"pad of {content.fill}", "", extent)
    return ", ".join(leaves_of(content)), _repeats(layout, content), extent


def _repeats(layout: Layout, place: Place) -> str:
    """``slot 64 dim 128``: what a field repeats over, counted in values."""
    digits = [digit for dim in unpacked(place) for digit in dim.digits]
    sizes = [(term(layout, place, digit), digit_size(layout, digit)) for digit in digits]
    return " ".join(f"{name} {size}" for name, size in sizes if size.value != 1)


def _strips(columns: Sequence[tuple[str, str, str]]) -> Iterable[list[tuple[str, str, str]]]:
    """The columns, broken where a strip would be wider than ``WIDTH``."""
    strip: list[tuple[str, str, str]] = []
    width = 1
    for column in columns:
        needed = max(map(len, column)) + 3
        if strip and width + needed > WIDTH:
            yield strip
            strip, width = [], 1
        strip.append(column)
        width += needed
    yield strip
