"""Rows of a record that hold several fields, written whole: what lies where in them, counted in words of four bytes.

Field by field a row is written in pieces as wide as each field's own alignment, and a scale between codes takes an
access for itself. Where fields follow one another without a gap, and each is of whole words, what a token writes of
a row is one run of words, whatever is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from kvgen.axes import padded_side
from kvgen.layout import Layout, Stream
from kvgen.lower import coalesce, planes
from kvgen.plan import Copy, Plan, Step, View
from kvgen.quant import MODES

WORD = 4
"""Bytes of a word."""

WIDEST = 16
"""Bytes of the widest access: rows all of whose fields begin at a multiple of it gain nothing by being whole."""

FIELD = 128
"""Bytes of a field, in the mean of a row, from which on it is as well written for itself: four sectors."""

Part = Literal["values", "scale", "zero"]


@dataclass(frozen=True, slots=True)
class Field:
    """What one copy writes of a row: ``words`` words, ``first`` words from the start of what is written of it.

    A tile has ``beside`` words of it for each row, a power of two: more than are written where sides are padded.
    """

    stream: str
    part: Part
    itemsize: int
    first: int
    words: int
    beside: int


@dataclass(frozen=True, slots=True)
class Rows:
    """``count`` rows a token, one a head; ``words`` words are written of each, to the first of which ``view`` leads."""

    view: View
    count: int
    words: int
    fields: tuple[Field, ...]

    @property
    def side(self) -> int:
        """Rows that a tile has of a token: its side of heads."""
        return padded_side(self.count)

    @property
    def total(self) -> int:
        """Words of a token."""
        return self.count * self.words

    @property
    def halves(self) -> tuple[tuple[Field, Field], ...]:
        """The fields of the first half of a row, each with its like of the second."""
        half = len(self.fields) // 2
        return tuple(zip(self.fields[:half], self.fields[half:], strict=True))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Bytes of a row that one copy writes, none where they are no run; and how many a tile has for each row."""

    stream: str
    part: Part
    view: View
    nbytes: int
    beside: int

    @property
    def in_words(self) -> bool:
        return self.view.unit == 1 and self.nbytes > 0 and self.nbytes % WORD == self.beside % WORD == 0


def whole_rows(layout: Layout, plan: Plan) -> tuple[Rows, ...]:
    """The rows that an append writes whole; what is in none of them is written field by field.

    Of that are fields that are no runs of whole words, lie beside no other, or in tensors that need not be aligned to
    words; where every field can be written by the widest accesses anyway; and what goes through stages.
    """
    if plan.kind != "append" or plan.staged:
        return ()
    found = [stretch for copy in plan.copies for stretch in _stretches(layout, copy)]
    if len({(stretch.stream, stretch.part) for stretch in found}) < len(found):  # something is stored twice
        return ()
    together: list[list[_Stretch]] = []
    for each in sorted(found, key=lambda stretch: (stretch.view.tensor, stretch.view.offset)):
        if not each.in_words:
            continue
        if together and _follows(layout, together[-1][-1], each):
            together[-1].append(each)
        else:
            together.append([each])
    return tuple(_rows(layout, run) for run in together if _gains(layout, run))


def _follows(layout: Layout, before: _Stretch, after: _Stretch) -> bool:
    """Whether the second begins where the first ends, in each row."""
    one, other = before.view, after.view
    side_by_side = one.tensor == other.tensor and one.offset + before.nbytes == other.offset
    return side_by_side and _outer(layout, one) == _outer(layout, other)


def _gains(layout: Layout, run: list[_Stretch]) -> bool:
    """Whether rows of these are aligned to words, and better written whole.

    They are where two halves are alike, keys with what is computed of them and values with theirs: one look-up finds
    what each word is. They are not where each field can be written by the widest accesses; nor where fields are long,
    since it is an edge between two that costs a part of a sector.
    """
    first = run[0].view
    aligned = max(each.view.access for each in run) >= WORD and first.offset % WORD == 0
    ends = [first.offset, layout.buffer(first.tensor).place.pitch]
    ends += [each.nbytes for each in run if each.part == "values"]
    short = sum(each.nbytes for each in run) < FIELD * len(run)
    half, shapes = len(run) // 2, [(each.nbytes, each.beside) for each in run]
    alike = half > 1 and shapes[:half] == shapes[half:]
    return alike and aligned and short and any(end % WIDEST for end in ends)


def _rows(layout: Layout, run: list[_Stretch]) -> Rows:
    first = run[0].view
    view = replace(first, itemsize=WORD, access=WORD, steps=_outer(layout, first), pack=None)
    fields = tuple(
        Field(
            each.stream,
            each.part,
            each.view.itemsize,
            (each.view.offset - first.offset) // WORD,
            each.nbytes // WORD,
            each.beside // WORD,
        )
        for each in run
    )
    heads = layout.leaf(run[0].stream).extent("head") if "head" in first.axes else 1
    return Rows(view, heads, fields[-1].first + fields[-1].words, fields)


def _stretches(layout: Layout, copy: Copy) -> Iterator[_Stretch]:
    """What a copy writes of a row: its values, and what is computed beside them."""
    stream, view = layout.stream(copy.stream), copy.destination
    dims, group = stream.axes[-1].extent, stream.group
    scale = stream.scale if stream.scale and stream.scale.dynamic else None
    apart = dims is None or (group and padded_side(group) != group) or (scale and MODES[stream.encoding.mode].by_norm)
    per = view.pack.size if view.pack else 1
    heads = next((axis.extent for axis in stream.axes if axis.name == "head"), 1)
    if apart or heads is None or (view.pack and view.pack.div > 1):
        return
    side = padded_side(-(-dims // group)) * group if group else padded_side(dims)
    yield _stretch(layout, stream, "values", view, per, dims, side // per)
    if scale:
        axis = next((axis for axis in scale.axes if axis.name == "dim"), None)
        count, step = (axis.count, axis.step) if axis else (1, 1)
        for part, params in (("scale", copy.scale), ("zero", copy.zero)):
            if params is not None:
                yield _stretch(layout, stream, part, params, step, count * step, padded_side(count))


def _stretch(layout: Layout, stream: Stream, part: Part, view: View, div: int, extent: int, side: int) -> _Stretch:
    """Bytes of what is stored once for ``div`` dims each of ``extent``, ``side`` of them in a tile's row."""
    inner = [(s.digit.axis, s.digit.div, s.factor) for s in coalesce(layout, view.steps) if s.dim is None]
    run = inner == ([] if extent == div else [("dim", div, view.itemsize)])
    whole = run and extent % div == 0 and len(planes(view)) == 1 and view.itemsize in (1, 2, WORD)
    return _Stretch(stream.name, part, view, view.itemsize * (extent // div) if whole else 0, view.itemsize * side)


def _outer(layout: Layout, view: View) -> tuple[Step, ...]:
    """The steps that lead to a row: those of the tensor's own dimensions."""
    return tuple(step for step in coalesce(layout, view.steps) if step.dim is not None)
