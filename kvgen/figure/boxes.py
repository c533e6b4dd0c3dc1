"""Boxes around boxes: an axis each, down to grids of cells and the fields of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvgen.amount import Amount
from kvgen.figure.svg import Drawing, below, beside, paragraph, rect, text, text_width
from kvgen.figure.values import SKIP, class_of, draw_values, how_many, pad_name, paint, value_width
from kvgen.layout import Field, Holds, Layout, Pad, Place, leaves_of
from kvgen.picture import GAP, Level, levels_of, parts, split_run

_PAD = 8  # between a box and what it holds
_ROW = 19  # a line of a box
_WIDE = 560  # from here on the two halves of a pair are drawn beside each other


@dataclass(frozen=True, slots=True)
class _Cell:
    """What is repeated: its bytes, the place it belongs to, and its run of values if it holds some."""

    place: Place
    size: Amount
    run: Level | None = None


def draw_place(layout: Layout, levels: Sequence[Level], place: Place, base: int, width: int) -> Drawing:
    """``place`` from byte ``base`` on, repeated over ``levels``."""
    if isinstance(place.content, Holds):
        outer, run = split_run(place.content, levels)
        cell = _Cell(place, (run.size if run else Amount.of(1)) * place.content.itemsize, run)
        return _nest(layout, outer, base, cell, width, None)
    return _nest(layout, levels, base, _Cell(place, Amount.of(place.pitch)), width, None)


def _nest(layout: Layout, levels: Sequence[Level], base: int, cell: _Cell, width: int, half: str | None) -> Drawing:
    """A box for each index drawn of the outer levels, the last two being a grid; ``half`` is that of a pair."""
    whole = max((i + 1 for i, level in enumerate(levels) if level.digit.axis in ("block", "layer")), default=0)
    if len(levels) <= 2 and not whole:
        inside = _inside(layout, cell, base, width, half or _first_half(levels), alone=not levels)
        return below([_grid(layout, levels, base, cell, width, half), inside], 8) if levels else inside
    level, rest = levels[0], levels[1:]
    if level.names:
        first = _first(level, 1, base + _offset(level, 1))
        side = (width - _PAD) // 2
        if width < _WIDE or _heading_width(first, _title(level, 1)) > side:
            side = width
        boxes = [_box(layout, level, i, rest, base, cell, side, name) for i, name in enumerate(level.names)]
        return below(boxes, _PAD) if side == width else beside(boxes, _PAD)
    boxes = [_box(layout, level, 0, rest, base, cell, width, half)]
    unknown = level.size.value is None
    for index in [1, None] if unknown else level.shown(2)[1:]:
        boxes.append(_dots(width) if index is None else _bar(level, index, rest, base, cell, width))
    return below(boxes, 4)


def _first_half(levels: Sequence[Level]) -> str | None:
    return next((level.names[0] for level in levels if level.names), None)


def _box(
    layout: Layout,
    level: Level,
    index: int,
    rest: Sequence[Level],
    base: int,
    cell: _Cell,
    width: int,
    half: str | None,
) -> Drawing:
    start = base + _offset(level, index)
    inner = _nest(layout, rest, start, cell, width - 2 * _PAD, half)
    return _framed(
        _title(level, index), _first(level, index, start), _last(start, _extent(rest, cell.size)), inner, width
    )


def _heading(first: str, title: str, y: int) -> list[str]:
    """The first byte of a box, and its name."""
    return [text(_PAD, y, first, "byte"), text(_PAD + text_width(first, "byte") + 10, y, title, "label")]


def _heading_width(first: str, title: str) -> int:
    return text_width(first, "byte") + text_width(title, "label") + 10 + 2 * _PAD


def _framed(title: str, first: str, last: str, inner: Drawing, width: int, kind: str = "box") -> Drawing:
    """A frame with its name and first byte above and its last byte below what it holds."""
    height = _ROW + inner.height + _ROW + 2
    marks = [
        rect(0, 0, width, height, kind, 6),
        *_heading(first, title, 14),
        *inner.at(_PAD, _ROW + 2),
        text(width - _PAD, height - 7, last, "byte", "end"),
    ]
    return Drawing(width, height, tuple(marks))


def _bar(level: Level, index: int, rest: Sequence[Level], base: int, cell: _Cell, width: int) -> Drawing:
    """A box that is not opened."""
    start = base + _offset(level, index)
    first = _first(level, index, start)
    last = _last(start, _extent(rest, cell.size)) if level.stride.value is not None else ""
    marks = [
        rect(0, 0, width, 22, "bar", 6),
        *_heading(first, _title(level, index), 15),
    ]
    marks += [text(width - _PAD, 15, last, "byte", "end")] if last else []
    return Drawing(width, 22, tuple(marks))


def _dots(width: int) -> Drawing:
    return Drawing(width, 12, (text(width // 2, 10, GAP, "label", "middle"),))


def _title(level: Level, index: int) -> str:
    return f"{level.label} {index}" + (f" {level.names[index]}" if level.names else "")


def _offset(level: Level, index: int) -> int:
    """Bytes to ``index``; none where the launch decides, since the box says so and counts from its own start."""
    return int(level.stride.value) * index if level.stride.value is not None else 0


def _first(level: Level, index: int, start: int) -> str:
    if level.stride.value is None and index:
        return f"+ {level.stride * index} bytes"
    return str(start)


def _extent(levels: Sequence[Level], size: Amount) -> Amount:
    """Bytes from the first to the end of the last of what ``levels`` repeat."""
    for level in reversed(levels):
        size = level.stride * (level.size + -1) + size
    return size


def _last(start: int | Amount, size: Amount) -> str:
    return str(size + start + -1)


# Grids


def _grid(layout: Layout, levels: Sequence[Level], base: int, cell: _Cell, width: int, half: str | None) -> Drawing:
    """Cells in rows and columns, their first and last bytes in them; a record's cell has its fields to scale."""
    rows, columns = (levels[0], levels[1]) if len(levels) == 2 else (None, levels[0])
    down = rows.shown(4) if rows else [0]
    left = max((text_width(_title(rows, r), "label") for r in down if r is not None), default=0) + _PAD if rows else 0
    across, each = _columns(rows, columns, base, cell, width - left)
    marks: list[str] = []
    x, height = left, 38 if isinstance(cell.place.content, Holds) else 46
    for c in across:
        y = 18
        step = SKIP if c is None else each
        marks.append(text(x + step // 2, 12, GAP if c is None else _title(columns, c), "label", "middle"))
        for r in down:
            tall = 16 if r is None else height
            if None in (r, c):
                marks.append(text(x + step // 2, y + tall // 2 + 3, GAP, "byte", "middle"))
            else:
                leaf = next((x.names[i] for x, i in ((rows, r), (columns, c)) if x and x.names), half)
                start = (rows.stride * r if rows else Amount()) + columns.stride * c + base
                marks += _cell(layout, cell, start, x, y, step - 3, tall - 3, leaf)
            y += tall
        x += step
    y = 18
    for r in down:
        tall = 16 if r is None else height
        if rows:
            name = GAP if r is None else _title(rows, r)
            marks.append(text(left - _PAD, y + tall // 2 + 3, name, "label", "end"))
        y += tall
    return Drawing(width, y, tuple(marks))


def _columns(rows: Level | None, columns: Level, base: int, cell: _Cell, width: int) -> tuple[list[int | None], int]:
    """The columns to draw, None for those left out, and how wide each is: as many as have room for their bytes."""
    for few in (9, 5, 4, 3, 2, 1):
        across = columns.shown(few)
        if few == 9 and None in across:
            continue
        drawn = [c for c in across if c is not None]
        each = (width - SKIP * (len(across) - len(drawn))) // len(drawn)
        rows_down = [r for r in rows.shown(4) if r is not None] if rows else [0]
        starts = [(rows.stride * r if rows else Amount()) + columns.stride * c + base for r in rows_down for c in drawn]
        widths = [text_width(text, "byte") for start in starts for text in (str(start), _last(start, cell.size))]
        needed = max(*widths, *(text_width(_title(columns, c), "label") for c in drawn))
        if each >= needed + 14 or few == 1:
            return across, min(each, max(220, needed + 14))
    raise AssertionError


def _cell(
    layout: Layout, cell: _Cell, start: Amount, x: int, y: int, width: int, height: int, leaf: str | None
) -> list[str]:
    content = cell.place.content
    end = _last(start, cell.size)
    if isinstance(content, Holds):
        marks = paint(layout, leaf or content.leaves[0], x, y, width, height)
        last = text(x + width - 5, y + height - 6, end, "byte", "end")
    else:
        marks = [rect(x, y, width, height, "box"), *_to_scale(layout, cell.place, x + 3, y + height - 8, width - 6)]
        last = text(x + width - 5, y + height - 13, end, "byte", "end")
    return [*marks, text(x + 5, y + 13, str(start), "byte"), last]


def _to_scale(layout: Layout, place: Place, x: int, y: int, width: int) -> list[str]:
    """The fields of a record as a thin bar."""
    marks: list[str] = []
    for part in parts(place):
        a, b = (x + width * at // place.pitch for at in (part.offset, part.offset + part.content.size))
        leaf = None if isinstance(part.content, Pad) else leaves_of(part.content)[0]
        marks.append(rect(a, y, max(b - a, 2), 5, "pad" if leaf is None else class_of(layout, leaf), 1))
    return marks


# What a cell holds


def _inside(layout: Layout, cell: _Cell, base: int, width: int, half: str | None, *, alone: bool) -> Drawing:
    """The values of one cell, or its fields; ``alone`` where there is no grid above it."""
    content = cell.place.content
    if not isinstance(content, Holds):
        caption = f"{'a' if alone else 'the first'} record, {cell.place.pitch} bytes"
        return below([paragraph(caption, "text", width), _record(layout, cell.place, base, width)], 2)
    leaf = half or content.leaves[0]
    if cell.run is None and not alone:
        return Drawing(width, 0)
    caption = f"{'' if alone else 'the first cell: '}{how_many(layout, content, cell.run, leaf)}"
    values = draw_values(layout, content, cell.run, base, width, half)
    return below([paragraph(caption, "text", width), values], 2)


# Records


def _record(layout: Layout, place: Place, base: int, width: int) -> Drawing:
    """Fields side by side; one under the other where one of them is more than a row of values."""
    found = list(parts(place))
    if all(isinstance(part.content, Pad) or _is_row(layout, part.content) for part in found):
        return below([_strip(layout, strip, base, width) for strip in _strips(layout, found, base, width)], 4)
    return below([_plane(layout, part, base, width) for part in found], 4)


def _is_row(layout: Layout, place: Place) -> bool:
    return isinstance(place.content, Holds) and len(levels_of(layout, place)) < 2


def _plane(layout: Layout, part: Field, base: int, width: int) -> Drawing:
    """A field that has a grid, or fields, of its own."""
    start, content = base + part.offset, part.content
    first, last = str(start), _last(start, Amount.of(content.size))
    if isinstance(content, Pad):
        marks = [*paint(layout, None, 0, 0, width, 22), *_heading(first, pad_name(content), 15)]
        return Drawing(width, 22, (*marks, text(width - _PAD, 15, last, "byte", "end")))
    inner = draw_place(layout, levels_of(layout, content), content, start, width - 2 * _PAD)
    return _framed(", ".join(leaves_of(content)), first, last, inner, width)


def _strips(layout: Layout, found: Sequence[Field], base: int, width: int) -> list[list[Field]]:
    """The fields in as few strips as have room for them, and those of much the same width."""
    needed = [_part_width(layout, part, base, width) for part in found]
    best = _broken(found, needed, width)
    for limit in range(width, max(needed), -8):
        strips = _broken(found, needed, limit)
        if len(strips) > len(best):
            break
        best = strips
    return best


def _broken(found: Sequence[Field], needed: Sequence[int], limit: int) -> list[list[Field]]:
    strips: list[list[Field]] = [[]]
    used = 0
    for part, width in zip(found, needed, strict=True):
        if strips[-1] and used + width > limit:
            strips.append([])
            used = 0
        strips[-1].append(part)
        used += width
    return strips


def _part_width(layout: Layout, part: Field, base: int, width: int) -> int:
    """What a field needs, two of its values at least where there is room for them in ``width``."""
    start, content = base + part.offset, part.content
    if isinstance(content, Pad):
        return max(text_width(w, "label") for w in (*_pad_words(content), f"{start} {start + content.size}")) + 16
    levels = levels_of(layout, content)
    run = levels[-1] if levels else None
    first = _heading_width(str(start), ", ".join(leaves_of(content)))
    few = 2 if run and run.size.value and run.size.value > 1 else 1
    each, rest = value_width(content.content, run, start), (SKIP if run else 0) + 2 * _PAD + 3
    values = few * each + rest if few * each + rest <= width else min(each + rest, width)
    below_them = f"{how_many(layout, content.content, run, leaves_of(content)[0])} {start + content.size}"
    return max(first, values, text_width(below_them, "byte") + 20)


def _pad_words(pad: Pad) -> tuple[str, ...]:
    return ("pad",) if pad.fill is None else ("pad", f"of {pad.fill}")


def _strip(layout: Layout, strip: Sequence[Field], base: int, width: int) -> Drawing:
    """Fields side by side: each as wide as it needs, and what is left in proportion to their bytes."""
    least = [_part_width(layout, part, base, width) for part in strip]
    total = sum(part.content.size for part in strip)
    spare = max(0, width - sum(least))
    widths = [w + spare * part.content.size // total for w, part in zip(least, strip, strict=True)]
    height = max(_field(layout, part, base, w, 0).height for part, w in zip(strip, widths, strict=True))
    return beside([_field(layout, part, base, w, height) for part, w in zip(strip, widths, strict=True)])


def _field(layout: Layout, part: Field, base: int, width: int, height: int) -> Drawing:
    """One field of a record, at least ``height`` high."""
    start, content = base + part.offset, part.content
    first, last = str(start), str(start + content.size - 1)
    if isinstance(content, Pad):
        names = _pad_words(content)
        inner = Drawing(0, 20)
    else:
        levels = levels_of(layout, content)
        run = levels[-1] if levels else None
        names = (", ".join(leaves_of(content)),)
        inner = Drawing(0, 4)
        if run or content.content.pack:
            inner = draw_values(layout, content.content, run, start, width - 2 * _PAD, None, plain=True)
    height = max(height, 2 * _ROW + inner.height + 2)
    leaf = None if isinstance(content, Pad) else leaves_of(content)[0]
    marks = [*paint(layout, leaf, 0, 0, width - 3, height), text(_PAD, 14, first, "byte")]
    if leaf is None:
        marks += [text(_PAD, 32 + 15 * i, name, "label") for i, name in enumerate(names)]
    else:
        marks.append(text(_PAD + text_width(first, "byte") + 10, 14, names[0], "label"))
        marks += inner.at(_PAD, _ROW + 2)
        marks.append(text(_PAD, height - 7, how_many(layout, content.content, run, leaf), "byte"))
    marks.append(text(width - 3 - _PAD, height - 7, last, "byte", "end"))
    return Drawing(width, height, tuple(marks))
