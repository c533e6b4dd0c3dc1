"""Rows that are written whole: the fields that sections leave as words, and the section that stores them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvgen.axes import padded_side
from kvgen.emit.sections import CopyContext, Masks, Side
from kvgen.rows import WORD, Field, Rows


@dataclass(frozen=True, slots=True)
class FieldContext:
    """A field of the rows: the column that follows it, and its words at the columns of all lanes."""

    end: int
    words: str


@dataclass(frozen=True, slots=True)
class RowsContext:
    """The section that stores rows: its lanes have a ``word`` each of all that a token has.

    Where a token has ``several`` rows of so many ``words``, a ``row`` and a column place a word in them; ``rows`` goes
    on to count those of a tile, whose first axis is that of tokens. Columns are counted within each ``half``, whose
    last field is ``last``; ``fields`` are the others from behind.
    """

    comment: str
    word: str
    tiled: bool
    held: bool  # whether a barrier keeps it behind the work on codes
    by_count: bool  # whether they are written whole only where a program has several tokens
    several: bool
    row: str
    words: int
    rows: str
    half: int
    column: str
    last: str
    fields: tuple[FieldContext, ...]
    cache: Side
    masks: Masks


def words_name(field: Field) -> str:
    """What a field is called as words."""
    return f"{field.stream}_words" if field.part == "values" else f"{field.stream}_{field.part}_words"


def in_words(context: CopyContext, rows: tuple[Rows, ...], tiled: bool, by_count: bool) -> CopyContext:
    """The section of a stream that leaves what belongs to whole rows as words: of all rows, one after the other.

    ``by_count``: only where a program has several tokens.
    """
    for each in rows:
        for field in each.fields:
            if field.stream == context.stream:
                context = _left(context, field, f"{'TOKENS * ' if tiled else ''}{each.side * field.beside}", by_count)
    return context


def _left(context: CopyContext, field: Field, words: str, by_count: bool) -> CopyContext:
    apart = {1: ", 2, 2", 2: ", 2", WORD: ","}[field.itemsize]
    coded = context.encoded and field.itemsize == 1  # codes of a byte are integers already
    holder = {"values": context, "scale": context.scale, "zero": context.zero}[field.part]
    alone = holder.cache if field.part == "values" else holder.side
    side = replace(
        alone,
        field=words_name(field),
        word_bits="" if coded else f".to(tl.uint{8 * field.itemsize}, bitcast=True)",
        word_pack={1: "_pack_8", 2: "_pack_16", WORD: ""}[field.itemsize],
        word_shape=f"({words}{apart})",
        alone=alone if by_count else None,
    )
    if field.part == "values":
        return replace(context, cache=side)
    return replace(context, **{field.part: replace(holder, side=side)})


def build_rows(rows: Rows, tiled: bool, by_count: bool, cache: Side, masks: Masks) -> RowsContext:
    """The section that stores the words of all fields at ``cache``."""
    several, lanes = rows.count > 1, padded_side(rows.total)
    row, column = f"word // {rows.words}", "column" if several else "word"
    if (lanes - 1) // rows.words >= rows.side:
        row = f"tl.minimum({row}, {rows.side - 1})"
    fields = tuple(FieldContext(field.first + field.words, _words_of(field, other)) for field, other in rows.halves)
    return RowsContext(
        comment=f"all of it to {rows.view.tensor}, rows of {rows.words} words whole",
        word=f"tl.arange(0, {lanes})" + ("[None, :]" if tiled else ""),
        tiled=tiled,
        held=not tiled,
        by_count=by_count,
        several=several,
        row=row,
        words=rows.words,
        rows=f" * {rows.side} + row" if several else "",
        half=rows.words // 2,
        column=column,
        last=fields[-1].words,
        fields=fields[-2::-1],
        cache=replace(cache, values=f"{cache.values} + {column}"),
        masks=masks,
    )


def _words_of(field: Field, other: Field) -> str:
    """The words at all lanes of two fields alike."""
    column = f"within - {field.first}" if field.first else "within"
    return f"_words_of_two({words_name(field)}, {words_name(other)}, second, row, {column}, {field.beside})"
