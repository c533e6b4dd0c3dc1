"""The canonical spelling: fixed examples, and that it reads back as the same layout, whatever the layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgen.canonical import canonical
from kvgen.resolve import load, load_text
from tests.strategies import SHAPES, Shape, layouts

LAYOUTS = sorted((Path(__file__).parents[2] / "layouts").glob("*.yaml"))


def test_puts_params_in_and_resolves_aliases_shorthands_and_defaults():
    text = """
summary: 'rows: of two'
name: sample
block_size: 12
params: {g: 4}
axes: {dim: 24, head: 6}
streams:
  value: {dtype: [float16]}
  key: value
  rope: {head: none, dim: 8}
buffers:
  pool:
    order: [block, slot//g]
    align: 64
    fields:
      - order: token%g head//2 1
        fields: [{holds: [key, value], order: kv head%2 dim//g dim%g}, {pad: 3}]
      - {rope: slot%g dim, align: 16}
      - {pad: 5}
slots: {skip: 0, shard: {world: 2}}
schedule: {append: {tokens: 4, heads: all}, gather: {}}
"""
    assert (
        canonical(load_text(text))
        == """\
name: sample
summary: "rows: of two"
axes: {head: 6}
block_size: 12
streams:
  value: {dim: 24, dtype: [float16]}
  key: value
  rope: {dim: 8, head: none}
buffers:
  pool:
    order: block slot//4
    align: 64
    fields:
      - order: slot%4 head//2 1
        fields:
          - {holds: [key, value], order: kv head%2 dim//4 dim%4}
          - {pad: 3}
      - {rope: slot%4 dim, align: 16}
      - {pad: 5}
slots: {skip: 0, shard: {world: 2, interleave: 1}}
schedule: {append: {tokens: 4, heads: all}}
"""
    )


def test_speaks_of_requests_and_positions_where_the_layout_does():
    text = """
name: sample
axes: {head: dynamic, dim: 4, layer: 2}
block_size: 8
buffers: {cache: {holds: [key, value], order: layer request kv position//2 head position%2 dim}}
"""
    lines = canonical(load_text(text)).splitlines()
    assert lines[1] == "axes: {head: dynamic, dim: 4, layer: 2}"
    assert lines[-1] == "  cache: {holds: [key, value], order: layer request kv position//2 head position%2 dim}"


def test_repeats_of_an_axis_of_extent_one_stay_apart():
    text = """
name: sample
axes: {head: 1, dim: 8}
block_size: 4
buffers:
  pool: {order: block slot head%1, fields: [{key: head dim//8 dim}, {value: head//1%1 dim}]}
"""
    layout = load_text(text)
    assert load_text(canonical(layout)) == layout
    assert "  - {value: head%1 dim}" in canonical(layout)


@pytest.mark.parametrize("streams", ["key: {dim: 64}, value: {dim: 128}", "value: {dim: 128}, key: {dim: 64}"])
def test_shared_terms_keep_their_remainder_where_streams_differ(streams: str):
    text = f"""
name: sample
axes: {{head: 2}}
block_size: 4
streams: {{{streams}}}
buffers:
  pool: {{order: block slot head dim//8%8, fields: [{{key: dim%8}}, {{value: dim//64 dim%8}}]}}
"""
    layout = load_text(text)
    assert "order: block slot head dim//8%8" in canonical(layout)
    assert load_text(canonical(layout)) == layout


@pytest.mark.parametrize(
    "summary",
    [
        "",
        "plain words",
        "a: b",
        "a #b",
        "true",
        "null",
        "12",
        "- x",
        '"quoted"',
        "back\\slash",
        " spaces ",
        "é ‖ ∎",
        "[x",
        "*a",
    ],
)
def test_summaries_survive(summary: str):
    text = f"name: s\nsummary: {json.dumps(summary)}\naxes: {{dim: 4}}\nblock_size: 2\n"
    layout = load_text(text + "buffers: {pool: {holds: [key, value], order: block kv slot dim}}\n")
    assert layout.summary == summary
    assert load_text(canonical(layout)) == layout


@pytest.mark.parametrize("path", LAYOUTS, ids=lambda path: path.stem)
def test_shipped_layouts_read_back(path: Path):
    layout = load(path)
    text = canonical(layout)
    assert load_text(text) == layout
    assert canonical(load_text(text)) == text


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=20, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_drawn_layouts_read_back(shape: Shape, data: st.DataObject):
    layout = load_text(data.draw(layouts(shape)).text)
    text = canonical(layout)
    assert load_text(text) == layout, text
    assert canonical(load_text(text)) == text
