"""Keys, values and the JSON Schema: what the models take, what they refuse, and that the two say the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from kvgen.diagnostics import KvgenError
from kvgen.packing import BITS
from kvgen.quant import MODES
from kvgen.resolve import load_text
from kvgen.source import parse
from kvgen.spec import PadSpec, PlaceSpec, Spec, StreamSpec, read_spec, schema
from kvgen.values import CASTS, ITEMSIZE, SCALE_DTYPES, STORED_ITEMSIZE, ZERO_DTYPES

ROOT = Path(__file__).parents[2]
LAYOUTS = sorted((ROOT / "layouts").glob("*.yaml"))
TAIL = "buffers: {pool: {holds: [key, value], order: block kv slot head dim}}\n"
BASE = "name: sample\naxes: {head: 8, dim: 128}\nblock_size: 16\n"


def spec(text: str) -> Spec:
    reading = read_spec(parse(text, "layout.yaml"))
    assert reading.problems == ()
    return reading.spec


def codes(text: str) -> list[str]:
    with pytest.raises(KvgenError) as caught:
        load_text(text)
    return [diagnostic.code for diagnostic in caught.value.diagnostics]


def test_without_streams_there_are_key_and_value_alike():
    found = spec(BASE + TAIL)
    assert found.streams == {"key": StreamSpec(), "value": "key"}
    assert found.streams["key"].dtype == ("bfloat16", "float16")
    assert found.slots.dtype == "int64"
    assert found.slots.shard is None


@pytest.mark.parametrize("spelling", ["{}", "", "~", "{dtype: [bfloat16, float16]}"])
def test_a_stream_of_which_nothing_is_said(spelling: str):
    assert spec(BASE + f"streams:\n  key: {spelling}\n  value: key\n" + TAIL).streams["key"] == StreamSpec()


@pytest.mark.parametrize(
    ("spelling", "place"),
    [
        ("key", PlaceSpec(holds="key")),
        ("{key: slot dim}", PlaceSpec(holds="key", order="slot dim")),
        ("{key: [slot, dim]}", PlaceSpec(holds="key", order=["slot", "dim"])),
        ("{key: slot dim, align: 16}", PlaceSpec(holds="key", order="slot dim", align=16)),
        ("{holds: [key, value], order: kv 1}", PlaceSpec(holds=["key", "value"], order="kv 1")),
        ("{holds: key, order: 1}", PlaceSpec(holds="key", order="1")),
        ("{pad: 8}", PadSpec(pad=8)),
        ("{pad: 8, fill: 255}", PadSpec(pad=8, fill=255)),
        ("{fields: [key, {pad: 2}]}", PlaceSpec(fields=["key", {"pad": 2}])),
    ],
)
def test_spellings_of_fields(spelling: str, place: PlaceSpec | PadSpec):
    text = BASE + "buffers:\n  pool: {order: block, fields: [" + spelling + "]}\n"
    assert spec(text).buffers["pool"].fields == [place]


def test_an_encoding_is_as_it_is_written():
    stream = "dim: 64, quant: {mode: int8, round: away, clamp: [-128, 127], scale: SCALE}"
    every = "per: token head dim//32, source: dynamic, dtype: e8m0, grid: pow2, exponent: floor, range: 120, "
    every += "floor: {amax: 1e-4}, arithmetic: multiply, given: inverse, encode: exact"
    found = spec(BASE + f"streams: {{key: {{{stream.replace('SCALE', '{' + every + '}')}}}}}\n" + TAIL).streams["key"]
    quant, scale = found.quant, found.quant.scale
    assert (found.store, quant.mode, quant.round, quant.clamp) == (None, "int8", "away", (-128, 127))
    assert (scale.per, scale.source, scale.dtype) == ("token head dim//32", "dynamic", "e8m0")
    assert (scale.grid, scale.exponent, scale.range, scale.floor) == ("pow2", "floor", 120.0, ("amax", 1e-4))
    assert (scale.arithmetic, scale.given, scale.encode) == ("multiply", "inverse", "exact")
    for spelling, per in {"[]": (), "[token, head]": ("token", "head"), "''": "", "dim": "dim"}.items():
        text = BASE + f"streams: {{key: {{quant: {{mode: int8, scale: {{per: {spelling}, floor: none}}}}}}}}\n" + TAIL
        scale = spec(text).streams["key"].quant.scale
        assert (scale.per, scale.floor, scale.source) == (per, ("none", 0.0), None)
    assert spec(BASE + "streams: {key: {store: float8_e5m2}}\n" + TAIL).streams["key"].store == "float8_e5m2"


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("range", ["1.17549436e-38", "448", "3.4028234e38"], ["1e-38", "0", "-1", "3.5e38", "1e999", "true", "'1'"]),
        ("floor", ["{scale: 1.17549436e-38}", "{amax: 1}", "none"], ["{}", "{scale: 0}", "{amax: 1e39}", "1.0", "no"]),
        ("floor", ["{amax: 1.0e-4}"], ["{amax: 1, scale: 1}", "{mean: 1}", "{scale: true}", "[1]"]),
        ("per", ["[]", "head"], ["1", "true", "[1]", "{}"]),
    ],
)
def test_values_of_a_scale(key: str, good: list[str], bad: list[str]):
    text = BASE + "streams: {key: {quant: {mode: int8, scale: {KEY: VALUE}}}, value: }\n" + TAIL
    for value in good:
        assert read_spec(parse(text.replace("KEY", key).replace("VALUE", value), "f")).problems == (), value
    for value in bad:
        assert codes(text.replace("KEY", key).replace("VALUE", value)) == ["KV203"], value


@pytest.mark.parametrize(
    "stream", ["{quant: }", "{store: }", "{quant: {mode: }}", "{quant: {mode: int8, scale: {per: }}}"]
)
def test_an_encoding_left_empty_is_none(stream: str):
    text = BASE + f"streams: {{key: {stream}, value: }}\n" + TAIL
    assert [problem.code for problem in read_spec(parse(text, "f")).problems] in (["KV203"], ["KV207"])


@pytest.mark.parametrize(
    ("clamp", "wrong"),
    [
        ("[-1, 1]", False),
        ("[0, 1]", True),
        ("[-1, 0]", True),
        ("[-1]", True),
        ("[-1.0, 1]", True),
        ("[-1, 1, 2]", True),
    ],
)
def test_a_clamp_has_two_sides(clamp: str, wrong: bool):
    text = BASE + f"streams: {{key: {{quant: {{mode: int8, clamp: {clamp}, scale: {{per: []}}}}}}}}\n" + TAIL
    assert [problem.code for problem in read_spec(parse(text, "f")).problems] == ["KV203"] * wrong


def test_schedule_is_carried_along():
    hints = load_text(
        BASE + TAIL + "schedule: {append: {tokens: 4, heads: all, num_warps: 8}, gather: {heads: 2}}\n"
    ).schedule
    assert (hints.append.tokens, hints.append.heads, hints.append.num_warps) == (4, "all", 8)
    assert (hints.gather.tokens, hints.gather.heads, hints.gather.num_warps) == (None, 2, None)
    assert codes(BASE + TAIL + "schedule: {append: {heads: some}, scatter: {}}\n") == ["KV203", "KV201"]
    few = load_text(BASE + TAIL + "schedule: {append: {few: {tokens: 2}}}\n").schedule.append.few
    assert (few.up_to, few.tokens, few.num_warps) == (64, 2, None)
    wrong = "schedule: {append: {few: {heads: 1, tokens: 3, up_to: 0}}}\n"
    assert codes(BASE + TAIL + wrong) == ["KV201", "KV203", "KV203"]


def test_a_wrong_part_does_not_hide_mistakes_elsewhere():
    text = BASE + "slots: {skip: no}\nstreams: {key: {dim: none}, value: {}}\nbuffers:\n"
    text += "  keys: {holds: key, order: block slot nothing}\n  values: {holds: value, order: block slot hed dim}\n"
    assert codes(text) == ["KV203", "KV203", "KV302"]


def test_schema_file_is_up_to_date():
    written = (ROOT / "schema" / "layout.schema.json").read_text(encoding="utf-8")
    assert written == json.dumps(schema(), indent=2) + "\n", "`kvgen schema --out schema/layout.schema.json` writes it"


def test_schema_describes_every_key():
    found = schema()
    for model in found["$defs"].values():
        for alternative in model.get("anyOf", [model]):
            for key, value in alternative.get("properties", {}).items():
                assert value.get("description"), key


@pytest.fixture(scope="module")
def validator():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema())
    return jsonschema.Draft202012Validator(schema())


@pytest.mark.parametrize("path", LAYOUTS, ids=lambda path: path.stem)
def test_schema_takes_shipped_layouts(path: Path, validator):
    assert path.read_text(encoding="utf-8").startswith("# yaml-language-server: $schema=../schema/layout.schema.json\n")
    validator.validate(yaml.safe_load(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "text",
    [
        "streams: {key: {dim: 128, head: none, dtype: int8}, value: key, rope: }",
        "buffers: {pool: {order: [block, slot, 1], fields: [key, {value: dim, align: 8}, {pad: 8, fill: 0}]}}",
        "buffers: {pool: {order: 1, align: 4, fields: [{order: slot, fields: [{holds: [key, value], order: kv}]}]}}",
        "block_size: dynamic\naxes: {head: dynamic, layer: 3}\nparams: {x: 8}",
        "slots: {dtype: int32, skip: 0, remap: table, shard: {world: 2}}\nschedule: {append: {heads: all}}",
        "streams: {key: {store: float16}, value: {quant: {mode: mxfp8}}}",
        "streams: {key: {quant: {mode: int8, round: away, clamp: [-128, 127], scale: {per: [token, dim//32]}}}}",
        "streams: {key: {quant: {mode: int8, scale: {per: [], dtype: e4m3, range: 100, floor: {amax: 1.0e-4}}}}}",
        "streams: {key: {quant: {mode: int8, scale: {per: dim, floor: none, given: inverse, encode: exact}}}}",
        "buffers: {pool: {order: block, fields: [{key: slot dim}, {key.scale: slot}, key.scale]}}",
        "streams: {key: {quant: {mode: int4_asymmetric, zero: {kind: point, dtype: uint8, clamped: true}}}}",
        "streams: {key: {quant: {mode: nvfp4, scale: {scale: {per: head, source: static, dtype: float32}}}}}",
        "streams: {key: {quant: {mode: nvfp4, scale: {scale: none}}}}",
    ],
)
def test_schema_takes_shorthands(text: str, validator):
    validator.validate({"name": "sample", "block_size": 16, "buffers": {}} | yaml.safe_load(text))


@pytest.mark.parametrize(
    "text",
    [
        "streams: {key: {dims: 128}}",
        "streams: {key: {dtype: bf16}}",
        "buffers: {pool: {order: block}}",
        "buffers: {pool: {order: block, fields: [{fill: 0}]}}",
        "buffers: {pool: {holds: [key, value, rope], order: block}}",
        "block_size: 0",
        "axes: {heads: 8}",
        "quant: {}",
        "streams: {key: {store: int8}}",
        "streams: {key: {quant: {}}}",
        "streams: {key: {quant: {mode: turbo5}}}",
        "streams: {key: {rotate: fourier, store: bfloat16}}",
        "streams: {key: {quant: {mode: int4_asymmetric, zero: {kind: lowest}}}}",
        "streams: {key: {quant: {mode: int4_asymmetric, zero: {clamped: 1}}}}",
        "streams: {key: {quant: {mode: int8, scale: {floor: 1.0}}}}",
        "streams: {key: {quant: {mode: int8, scale: {floor: {amax: 1, scale: 1}}}}}",
        "streams: {key: {quant: {mode: int8, scale: {scale: {floor: none}}}}}",
        "streams: {key: {quant: {mode: nvfp4, scale: {scale: [one]}}}}",
        "streams: {key: {quant: {mode: int8, clamp: [1]}}}",
    ],
)
def test_schema_refuses_mistakes(text: str, validator):
    assert not validator.is_valid({"name": "sample", "block_size": 16, "buffers": {}} | yaml.safe_load(text))


def test_item_sizes_are_those_of_torch():
    torch = pytest.importorskip("torch")
    assert {name: getattr(torch, name).itemsize for name in STORED_ITEMSIZE} == STORED_ITEMSIZE
    assert ITEMSIZE.items() <= STORED_ITEMSIZE.items()


def test_every_type_of_codes_and_scales_has_a_size():
    used = {*CASTS, *SCALE_DTYPES.values()}
    used |= {dtype for mode in MODES.values() for dtype in (mode.code, mode.scale_dtype)}
    used |= {dtype for dtypes in ZERO_DTYPES.values() for dtype in dtypes}
    assert used <= STORED_ITEMSIZE.keys() | BITS.keys()
    assert {mode.code: mode.bits for mode in MODES.values() if mode.bits < 8} == BITS
