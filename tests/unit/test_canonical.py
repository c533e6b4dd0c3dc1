"""The canonical spelling: fixed examples, and that it reads back as the same layout, whatever the layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
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
schedule: {append: {tokens: 4, heads: all, few: {num_warps: 2}}, gather: {}}
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
schedule: {append: {tokens: 4, heads: all, few: {up_to: 64, num_warps: 2}}}
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


def encoded(stream: str, buffers: str, axes: str = "head: 3, dim: 46") -> str:
    return f"name: s\naxes: {{{axes}}}\nblock_size: 4\nstreams:\n  key: {stream}\nbuffers: {{{buffers}}}\n"


def test_encodings_say_what_their_mode_does_not_imply():
    buffers = "c: {holds: key, order: token head dim}, s: {holds: key.scale, order: token dim//16 head}"
    every = "per: [dim//16, head, slot, block], dtype: bfloat16, grid: pow2, exponent: floor, range: 64, "
    every += "floor: {amax: 0.00001}, arithmetic: multiply, encode: exact"
    stream = f"{{quant: {{mode: int8, round: away, clamp: [-128, 127], scale: {{{every}}}}}}}"
    lines = canonical(load_text(encoded(stream, buffers))).splitlines()
    assert lines[4] == (
        "  key: {quant: {mode: int8, round: away, clamp: [-128, 127], scale: {per: token head dim//16, "
        "source: dynamic, dtype: bfloat16, grid: pow2, exponent: floor, range: 64, floor: {amax: 1.0e-5}, "
        "arithmetic: multiply, encode: exact}}}"
    )
    assert lines[-1] == "  s: {key.scale: (block slot) dim//16 head}"
    defaults = (
        "per: token head dim//32, source: dynamic, dtype: e8m0, grid: pow2, exponent: ceil, range: 448, floor: none"
    )
    stream = f"{{quant: {{mode: mxfp8, round: even, scale: {{{defaults}}}}}}}"
    lines = canonical(load_text(encoded(stream, buffers.replace("16", "32")))).splitlines()
    assert lines[4] == "  key: {quant: {mode: mxfp8, scale: {per: token head dim//32, source: dynamic}}}"


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        ("{store: float8_e5m2}", "{store: float8_e5m2}"),
        ("{quant: {mode: int8, scale: {per: []}}}", "{quant: {mode: int8, scale: {per: [], source: static}}}"),
        (
            "{quant: {mode: fp8_e5m2, scale: {per: dim//16, given: inverse, dtype: e4m3}}}",
            "{quant: {mode: fp8_e5m2, scale: {per: dim//16, source: static, dtype: e4m3, given: inverse}}}",
        ),
    ],
)
def test_encodings_without_a_stored_scale(stream: str, expected: str):
    lines = canonical(load_text(encoded(stream, "c: {holds: key, order: token head dim}"))).splitlines()
    assert lines[4] == f"  key: {expected}"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("mode: int4_asymmetric, zero: {kind: minimum, dtype: float16}, SCALE", "mode: int4_asymmetric, SCALE"),
        ("mode: int4_asymmetric, zero: {dtype: float32}, SCALE", None),
        ("mode: int4_asymmetric, zero: {kind: point}, SCALE", None),
        (
            "mode: int4_asymmetric, zero: {kind: point, dtype: uint8, clamped: false}, SCALE",
            "mode: int4_asymmetric, zero: {kind: point}, SCALE",
        ),
        ("mode: int4_asymmetric, zero: {kind: point, clamped: true}, SCALE", None),
        ("mode: int4, round: away, clamp: [-8, 7], SCALE", None),
        ("mode: int4, clamp: [-7, 7], SCALE", "mode: int4, SCALE"),
        ("mode: mxfp4, SCALE, exponent: floor, range: 4", None),
        ("mode: nvfp4, SCALE, scale: {per: [], source: static, dtype: float32}", "mode: nvfp4, SCALE"),
        ("mode: nvfp4, SCALE, scale: {per: head}", None),
        ("mode: nvfp4, SCALE, scale: none", None),
        ("mode: fp8_e4m3, SCALE, scale: {}", "mode: fp8_e4m3, SCALE, scale: {per: []}"),
        ("mode: fp8_e4m3, SCALE, scale: none", "mode: fp8_e4m3, SCALE"),
    ],
)
def test_zeros_and_scales_of_scales(said: str, shown: str | None):
    buffers = "c: {order: token head, fields: [{key: dim//64 dim%32 dim//32%2}, {key.scale: dim//32}ZERO]}"
    buffers = buffers.replace("ZERO", ", {key.zero: dim//32}" if "asymmetric" in said else "")

    def line(text: str) -> str:
        head, _, tail = text.partition("SCALE")
        return f"{{quant: {{{head}scale: {{per: token head dim//32, source: dynamic{tail}}}}}}}"

    layout = load_text(encoded(line(said), buffers, "head: 4, dim: 128"))
    text = canonical(layout)
    assert text.splitlines()[4] == f"  key: {line(shown or said)}"
    assert "{key: dim//64 dim%32 dim//32%2}" in text
    assert load_text(text) == layout


def test_streams_of_one_encoding_are_alike():
    text = "name: s\naxes: {dim: 8}\nblock_size: 4\nstreams: {key: A, value: B}\n"
    text += "buffers: {c: {order: token, fields: [key, value, key.scale, value.scale]}}\n"
    text = text.replace("A", "{quant: {mode: int8, scale: {per: token}}}")
    same = text.replace("B", "{quant: {mode: int8, scale: {per: [slot, block], source: dynamic}}}")
    assert canonical(load_text(same)).splitlines()[5] == "  value: key"
    other = text.replace("B", "{quant: {mode: int8, round: away, scale: {per: token}}}")
    assert (
        canonical(load_text(other)).splitlines()[5].startswith("  value: {head: none, quant: {mode: int8, round: away,")
    )


SCALES = [
    *("per: []", "per: head", "per: dim//16", "per: layer", "per: head, dtype: float16, given: inverse"),
    *("per: token", "per: token head", "per: token head dim//16", "per: token dim//5", "per: token dim"),
    *("per: token, dtype: e8m0, exponent: floor", "per: token, dtype: e4m3, encode: exact, arithmetic: multiply"),
    *("per: token head, grid: pow2, floor: {scale: 0.0001}, range: 100.5", "per: token, floor: none"),
    "per: token, floor: {amax: 1.1754943508222875e-38}, range: 3.4e-38",
]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("mode", ["fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz", "int8", "mxfp8"])
def test_encodings_read_back(mode: str, scale: str):
    if mode == "mxfp8" and ("dtype: float16" in scale or "dtype: e4m3" in scale):
        pytest.skip("mxfp8 has scales of one type")
    words = scale.partition("per: ")[2].partition(",")[0]
    stored = [word for word in words.split() if word not in ("token", "[]")] if "token" in words else None
    buffers = "c: {holds: key, order: layer token head dim}"
    for order in [None] if stored is None else [["token", *stored], [*reversed(stored), "token"]]:
        place = f", s: {{holds: key.scale, order: layer {' '.join(order)}}}" if order else ""
        layout = load_text(encoded(f"{{quant: {{mode: {mode}, scale: {{{scale}}}}}}}", buffers + place))
        text = canonical(layout)
        assert load_text(text) == layout, text
        assert canonical(load_text(text)) == text
        assert len(layout.leaves) == 1 + (order is not None)
        yaml.safe_load(text)


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
