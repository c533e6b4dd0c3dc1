"""Which rows of a record an append writes whole, and where their fields lie in them."""

import pytest

from kvgen.layout import Layout
from kvgen.lower import lower
from kvgen.resolve import load_text
from kvgen.rows import Rows, whole_rows
from kvgen.schedule import schedule

FP8 = "{quant: {mode: fp8_e4m3, scale: {per: token head, source: dynamic}}}"


def layout_of(fields: str, key: str = FP8, value: str = FP8, order: str = "block slot head", rest: str = "") -> Layout:
    head = f"name: x\naxes: {{head: 6, dim: 80}}\nblock_size: 16\nstreams: {{key: {key}, value: {value}}}\n{rest}"
    return load_text(f"{head}buffers:\n  cache: {{order: {order}, fields: [{fields}]}}\n")


def rows_of(layout: Layout, function: str = "append") -> tuple[Rows, ...]:
    return whole_rows(layout, next(plan for plan in lower(layout) if plan.name == function))


def fields(rows: Rows) -> list[tuple]:
    return [(f"{f.stream}.{f.part}", f.first, f.words, f.beside) for f in rows.fields]


BESIDE = "key, key.scale, value, value.scale"


def test_fields_without_a_gap_are_one_row() -> None:
    (rows,) = rows_of(layout_of(BESIDE))
    assert (rows.count, rows.side, rows.words, rows.total) == (6, 8, 42, 252)
    assert fields(rows) == [
        ("key.values", 0, 20, 32),  # 80 bytes, of 128 that a tile has
        ("key.scale", 20, 1, 1),
        ("value.values", 21, 20, 32),
        ("value.scale", 41, 1, 1),
    ]
    assert (rows.view.tensor, rows.view.offset, rows.view.itemsize) == ("cache", 0, 4)
    assert [step.digit.axis for step in rows.view.steps] == ["block", "slot", "head"]
    assert rows_of(layout_of(BESIDE), "append_value") == ()


def test_padding_behind_a_row_is_none_of_it() -> None:
    for fill in ("", ", fill: 0"):
        (rows,) = rows_of(layout_of(f"{{pad: 8}}, {BESIDE}, {{pad: 4{fill}}}"))
        assert (rows.view.offset, rows.words) == (8, 42)


def latent_of(dims: int, rope: int) -> Layout:
    latent = f"{{dim: {dims}, quant: {{mode: fp8_e4m3, scale: {{per: token dim//128, source: dynamic}}}}}}"
    text = f"name: x\nblock_size: 64\nstreams: {{latent: {latent}, rope: {{dim: {rope}}}}}\nbuffers:\n"
    return load_text(f"{text}  cache: {{order: block slot, fields: [latent, latent.scale, rope]}}\n")


HALF = "{quant: {mode: int8, scale: {per: token head, source: dynamic, dtype: float16}}}"
GIVEN = "{quant: {mode: fp8_e4m3, scale: {per: head, source: static}}}"
OTHERS = {
    "moved": layout_of("key, value", "{dtype: bfloat16}", "{dtype: bfloat16}"),
    "given scales": layout_of("key, value", GIVEN, GIVEN),
    "rows of 16-byte pieces": layout_of("key, key.scale, {pad: 12}, value, value.scale, {pad: 12}"),
    "padding between halves": layout_of("key, key.scale, {pad: 4}, value, value.scale"),
    "no halves": latent_of(256, 14),
    "long fields": layout_of(BESIDE, *[FP8.replace("{quant", "{dim: 300, quant")] * 2),
    "scales of 2 bytes": layout_of(BESIDE, HALF, HALF),
    "off words": layout_of("{pad: 2}, " + BESIDE + ", {pad: 2}"),
    "all heads in a row": layout_of(
        "{key: head dim}, {key.scale: head}, {value: head dim}, {value.scale: head}", order="block slot"
    ),
    "dims apart": layout_of("{key: dim%2 dim//2}, key.scale, {value: dim%2 dim//2}, value.scale"),
    "scales by norm": layout_of(BESIDE, "{quant: {mode: turbo4}}", "{quant: {mode: turbo4}}"),
}


@pytest.mark.parametrize("layout", OTHERS.values(), ids=OTHERS)
def test_else_fields_are_written_one_by_one(layout: Layout) -> None:
    assert rows_of(layout) == ()
    assert all(schedule(layout, plan).rows == () for plan in lower(layout))


def test_programs_of_some_heads_write_field_by_field() -> None:
    layout = layout_of(BESIDE, rest="schedule: {append: {heads: 2}}\n")
    plan = lower(layout)[0]
    assert whole_rows(layout, plan) != ()
    assert schedule(layout, plan).rows == ()
    assert schedule(layout_of(BESIDE), plan).rows == whole_rows(layout, plan)


def test_a_program_has_1024_values_whose_rows_are_written_whole() -> None:
    """Where there are many tokens; few of them are written field by field, each by a program of its own."""
    for heads, tokens in ((1, 8), (2, 4), (4, 2), (8, 1)):
        text = f"name: x\naxes: {{head: {heads}, dim: 128}}\nblock_size: 16\nstreams: {{key: {FP8}, value: {FP8}}}\n"
        layout = load_text(f"{text}buffers:\n  cache: {{order: block slot head, fields: [{BESIDE}]}}\n")
        found = schedule(layout, lower(layout)[0])
        assert (found.tokens, found.num_warps, found.by_count, len(found.rows)) == (tokens, 2, tokens > 1, 1)
