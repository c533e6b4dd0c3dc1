"""Layouts drawn as SVG: the facts in a drawing, and that nothing of it lies outside or on top of something else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings

from kvgen import figure, sizes
from kvgen.documents import load
from kvgen.figure import svg
from kvgen.picture import levels_of
from kvgen.resolve import load_text
from tests.command import kvgen
from tests.generated import ROOT, SHIPPED, shipped
from tests.strategies import SHAPES, layouts

SPLIT_HALVES = """
name: halves
axes: {head: 2, dim: 64}
block_size: 4
streams: {key: {quant: {mode: int4, scale: {per: [], source: static}}}}
buffers: {cache: {holds: key, order: block slot head dim//32 dim%16 dim//16%2}}
"""
NESTED = """
name: nested
axes: {head: 3, dim: 4}
block_size: 2
streams: {key: {}, value: {}, other: {dim: 6, head: none, dtype: int8}}
buffers:
  cache:
    order: block
    align: 64
    fields:
      - {order: slot, align: 16, fields: [{key: head dim}, {pad: 4, fill: 0}, other]}
      - {pad: 5}
      - {value: head slot dim}
"""
DYNAMIC = """
name: dynamic
axes: {head: dynamic, dim: dynamic}
block_size: dynamic
buffers: {cache: {holds: [key, value], order: kv block slot head dim}}
"""
PAIRED_RUN = """
name: paired_run
axes: {head: 2, dim: 3}
block_size: 2
buffers: {cache: {holds: [key, value], order: block slot head dim kv}}
"""


@dataclass(frozen=True)
class Mark:
    """A text or a rectangle of a drawing, where it really lies."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    text: str = ""


def marks(document: str) -> list[Mark]:
    """Everything visible of an SVG file but its style and patterns."""
    root = ElementTree.fromstring(document)
    return [mark for child in root if child.tag.endswith(("}g", "}rect")) for mark in _walk(child, 0, 0)]


def _walk(element: ElementTree.Element, x: float, y: float) -> Iterator[Mark]:
    name, kind = element.tag.rpartition("}")[2], element.get("class", "")
    if name == "g":
        dx, dy = map(float, re.fullmatch(r"translate\((\S+) (\S+)\)", element.get("transform", "")).groups())
        for child in element:
            yield from _walk(child, x + dx, y + dy)
    elif name == "rect":
        left, top, width, height = (float(element.get(key)) for key in ("x", "y", "width", "height"))
        yield Mark(kind, x + left, y + top, width, height)
    elif name == "text":
        width, size = svg.text_width(element.text, kind), svg.SIZES[kind]
        shift = {"middle": width / 2, "end": width}.get(element.get("text-anchor"), 0)
        left, base = x + float(element.get("x")) - shift, y + float(element.get("y"))
        yield Mark(kind, left, base - 0.75 * size, width, 0.95 * size, element.text)


def overlap(a: Mark, b: Mark) -> bool:
    return (
        a.x < b.x + b.width and b.x < a.x + a.width and a.y < b.y + b.height and b.y < a.y + a.height
    )  # touching is none


def check(document: str) -> list[Mark]:
    """Every text is on the sheet, off every other text, and inside each box that it begins in."""
    found = marks(document)
    sheet, texts = found[0], [mark for mark in found if mark.text]
    assert sheet.width == figure.WIDTH
    for i, mark in enumerate(texts):
        assert 0 <= mark.x <= sheet.width - mark.width, mark
        assert 0 <= mark.y <= sheet.height - mark.height, mark
        for other in texts[:i]:
            assert not overlap(mark, other), (mark, other)
    for box in found[1:]:
        if box.text:
            continue
        for mark in texts:
            begins = box.x <= mark.x < box.x + box.width and box.y <= mark.y + mark.height / 2 < box.y + box.height
            assert not begins or mark.x + mark.width <= box.x + box.width, (mark, box)
    return found


def words(document: str) -> list[str]:
    return [mark.text for mark in marks(document) if mark.text]


@pytest.mark.parametrize("name", SHIPPED)
def test_nothing_collides_and_every_page_ends_with_its_last_byte(name: str) -> None:
    layout = shipped(name)
    found = check(figure.figure(layout))
    texts = [mark.text for mark in found]
    for buffer in layout.buffers:
        assert buffer.name in texts
        page = sizes.page_bytes(layout, buffer).value
        strides = [level.stride.value for level in levels_of(layout, buffer.place) if level.digit.axis != "block"]
        if page is not None and None not in strides:
            assert [text for text in texts if re.search(rf"(^|– ){page - 1}$", text)], page
    legend = {text.partition("  ")[0] for text in texts}
    assert {leaf.name for leaf in layout.leaves} <= legend


@pytest.mark.parametrize("text", [SPLIT_HALVES, NESTED, DYNAMIC, PAIRED_RUN])
def test_unusual_layouts_are_drawn(text: str) -> None:
    check(figure.figure(load_text(text)))


@pytest.mark.parametrize("shape", SHAPES[::3], ids=str)
def test_layouts_drawn_at_random_are_drawn(shape) -> None:
    @settings(max_examples=8, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(layouts(shape))
    def draw(drawn) -> None:
        check(figure.figure(load_text(drawn.text)))

    draw()


@pytest.mark.parametrize("name", SHIPPED)
def test_any_two_layouts_are_drawn_side_by_side(name: str) -> None:
    other = SHIPPED[(SHIPPED.index(name) + 1) % len(SHIPPED)]
    found = check(figure.side_by_side("there_and_back", ["one layer a call"], shipped(name), shipped(other)))
    titles = [mark for mark in found if mark.kind == "title"]
    assert [mark.text for mark in titles] == ["there_and_back", name, other]
    assert titles[1].y == titles[2].y
    assert titles[1].x < figure.WIDTH / 2 < titles[2].x


@pytest.mark.parametrize("path", sorted((ROOT / "layouts" / "transfers").glob("*.yaml")), ids=lambda path: path.stem)
def test_transfers_are_drawn(path) -> None:
    what = load(path)
    found = check(figure.transfer_figure(what))
    titles = [mark.text for mark in found if mark.kind == "title"]
    assert titles == [what.name, what.source.name, what.destination.name]
    assert kvgen("show", path, "--svg").out == figure.transfer_figure(what)


def test_codes_that_share_a_byte_are_told_apart() -> None:
    texts = words(figure.figure(shipped("nhd_int4")))
    at = texts.index("dim 0")
    assert texts[at : at + 5] == ["dim 0", "bit 0–3", "dim 1", "bit 4–7", "0"]
    halves = words(figure.figure(load_text(SPLIT_HALVES)))
    at = halves.index("dim 1")
    assert halves[at : at + 5] == ["dim 1", "bit 0–3", "dim 17", "bit 4–7", "1"]


def test_fields_paddings_and_gaps_have_their_bytes_at_the_corners() -> None:
    texts = words(figure.figure(load_text(NESTED)))
    page = texts[texts.index("block 0") :]
    fields = [page[i - 1 : i + 1] for i, word in enumerate(page) if word in ("key", "other", "value")]
    assert fields == [["0", "key"], ["28", "other"], ["101", "value"]]
    # `align` leaves gaps behind `other`, where records of slots are 48 bytes apart, and behind `value`.
    paddings = [page[i - 1 : i + 2] for i, word in enumerate(page) if word.startswith("padding")]
    assert paddings == [
        ["24", "padding, written with 0", "27"],
        ["34", "padding, never written", "47"],
        ["96", "padding, never written", "100"],
        ["149", "padding, never written", "191"],
    ]


def test_kinds_of_leaves_look_different() -> None:
    document = figure.figure(shipped("nhd_int4_group"))
    for name, kinds in (("key", ["s0"]), ("key.scale", ["s0 more", "lines"]), ("key.zero", ["s0 more", "dots"])):
        found = marks(document)
        at = next(i for i, mark in enumerate(found) if mark.kind == "label" and mark.text.startswith(f"{name}  "))
        sample = [mark.kind for mark in found[:at] if (mark.width, mark.height) == (16, 14)]
        assert sample[-len(kinds) :] == kinds
    assert "@media (prefers-color-scheme:dark)" in document


def test_halves_of_a_pair_have_their_own_colours() -> None:
    values = [mark.kind for mark in marks(figure.figure(load_text(PAIRED_RUN))) if mark.height == 38]
    assert {"s0", "s1"} == set(values)


def test_same_bytes_under_any_hash_seed() -> None:
    code = "import sys; from kvgen.cli import main; sys.argv[1:] = ['show', 'packed_nvfp4', '--svg']; main()"
    drawn = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True
        ).stdout
        for seed in ("1", "2")
    }
    assert drawn == {figure.figure(shipped("packed_nvfp4")).encode()}


def test_the_command_prints_or_writes_it(tmp_path) -> None:
    expected = figure.figure(shipped("mla"))
    assert kvgen("show", "mla", "--svg").out == expected
    path = tmp_path / "new" / "mla.svg"
    result = kvgen("show", "mla", "--svg", path)
    assert (result.code, result.out) == (0, f"wrote {path.as_posix()}\n")
    assert path.read_text() == expected
    assert kvgen("show", "mla", path).code == 2
    assert kvgen("show", "mla", "--svg", path).code == 0
    (tmp_path / "file").write_text("name: mine\n")
    result = kvgen("show", "mla", "--svg", tmp_path / "file")
    assert (result.code, result.err.partition("]")[0]) == (2, "error[KV709")
    assert (tmp_path / "file").read_text() == "name: mine\n"
    assert kvgen("show", "mla", "--svg", "/dev/null").out == ""
    assert "KV702" in kvgen("show", "mla", "--svg", tmp_path / "file" / "mla.svg").err
