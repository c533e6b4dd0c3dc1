"""What ``store`` and ``quant`` mean: encodings and scales value by value, where scales lie, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.axes import Axis, Digit
from kvgen.canonical import canonical
from kvgen.diagnostics import KvgenError
from kvgen.emit.args import argument_scales
from kvgen.layout import Dim, Encoding, Field, Holds, Layout, Leaf, Place, Record, Scale
from kvgen.lower import lower
from kvgen.resolve import load, load_text

LAYOUTS = Path(__file__).parents[2] / "layouts"
BLOCK, SLOT, HEAD, DIM = Axis("block", None), Axis("slot", 16), Axis("head", 8), Axis("dim", 128)
TOKEN = (BLOCK, SLOT)
TINY = 2.0**-126
ONE_BUFFER = "c: {holds: key, order: block slot head dim}"


def layout(key: str, buffers: str = ONE_BUFFER, axes: str = "head: 8, dim: 128", more: str = "") -> Layout:
    return load_text(
        f"name: s\naxes: {{{axes}}}\nblock_size: 16\nstreams: {{key: {{{key}}}}}\nbuffers: {{{buffers}}}\n{more}\n"
    )


def quant(mode: str, scale: str, buffers: str = ONE_BUFFER, more: str = "", **sections: str) -> Layout:
    return layout(f"quant: {{mode: {mode}{more}, scale: {{{scale}}}}}", buffers, **sections)


def codes(*arguments: str, **sections: str) -> list[str]:
    with pytest.raises(KvgenError) as caught:
        quant(*arguments, **sections)
    return [diagnostic.code for diagnostic in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("mode", "code", "code_range", "floor", "clamp"),
    [
        ("fp8_e4m3", "float8_e4m3fn", 448.0, TINY, None),
        ("fp8_e5m2", "float8_e5m2", 57344.0, TINY, None),
        ("fp8_e4m3fnuz", "float8_e4m3fnuz", 240.0, TINY, None),
        ("fp8_e5m2fnuz", "float8_e5m2fnuz", 57344.0, TINY, None),
        ("int8", "int8", 127.0, 1e-6, (-127, 127)),
    ],
)
def test_what_a_mode_implies(mode: str, code: str, code_range: float, floor: float, clamp: tuple[int, int] | None):
    static = quant(mode, "per: []").streams[0]
    assert static.encoding == Encoding(
        mode, code, clamp=clamp, scale=Scale("key.scale", (), False, "float32", stored=False, code_range=code_range)
    )
    assert (static.dtypes, static.itemsize) == (("bfloat16", "float16"), 2)
    assert static.encoding.scale.argument == "key_scale"
    dynamic = quant(mode, "per: token", ONE_BUFFER + ", s: {key.scale: token}")
    assert dynamic.streams[0].encoding == Encoding(
        mode,
        code,
        clamp=clamp,
        scale=Scale(
            "key.scale", TOKEN, True, "float32", stored=True, code_range=code_range, floor_on="scale", floor=floor
        ),
    )
    assert dynamic.leaves == (
        Leaf("key", "key", (*TOKEN, HEAD, DIM), (code,), 1),
        Leaf("key.scale", "key", TOKEN, ("float32",), 4),
    )


def test_what_mxfp8_implies():
    buffers = ONE_BUFFER + ", s: {holds: key.scale, order: block slot head dim//32}"
    found = layout("quant: {mode: mxfp8}", buffers)
    scale = Scale(
        "key.scale",
        (*TOKEN, HEAD, Axis("dim", 128, 32)),
        True,
        "float8_e8m0fnu",
        stored=True,
        grid="pow2",
        code_range=448.0,
    )
    assert found.streams[0].encoding == Encoding("mxfp8", "float8_e4m3fn", scale=scale)
    assert found.leaves[1] == Leaf("key.scale", "key", scale.axes, ("float8_e8m0fnu",), 1)
    assert found.buffers[1].dtypes == ("float8_e8m0fnu", "uint8")
    none = layout("head: none, quant: {mode: mxfp8}", "c: {order: block slot, fields: [{key: dim}, key.scale]}")
    assert none.streams[0].encoding.scale.axes == (*TOKEN, Axis("dim", 128, 32))


def test_what_is_said_is_carried_along():
    every = "per: token head, dtype: bfloat16, grid: pow2, exponent: floor, range: 224, floor: {amax: 1e-4}"
    every += ", arithmetic: multiply, encode: exact"
    buffers = "c: {order: block slot head, fields: [key, key.scale]}"
    found = quant("int8", every.replace("224", "100"), buffers, ", round: away, clamp: [-128, 127]").streams[0].encoding
    assert found == Encoding(
        "int8",
        "int8",
        "away",
        (-128, 127),
        Scale(
            name="key.scale",
            axes=(*TOKEN, HEAD),
            dynamic=True,
            dtype="bfloat16",
            stored=True,
            grid="pow2",
            exponent="floor",
            code_range=100.0,
            floor_on="amax",
            floor=1e-4,
            arithmetic="multiply",
            given="scale",
            encode="exact",
        ),
    )
    scale = quant("fp8_e4m3", "per: head, source: static, dtype: float16, given: inverse, arithmetic: multiply")
    assert scale.streams[0].encoding.scale == Scale(
        "key.scale", (HEAD,), False, "float16", stored=False, arithmetic="multiply", given="inverse"
    )
    exact = quant("int8", "per: token head, grid: pow2, encode: exact", buffers).streams[0].encoding.scale
    assert (exact.dtype, exact.grid, exact.encode) == ("float32", "pow2", "exact")
    floorless = quant("int8", "per: token head, floor: none, dtype: e4m3", buffers).streams[0].encoding.scale
    assert (floorless.floor_on, floorless.floor, floorless.dtype) == (None, 0.0, "float8_e4m3fn")


@pytest.mark.parametrize(
    ("per", "axes", "stored"),
    [
        ("[]", (), False),
        ("head", (HEAD,), False),
        ("dim", (DIM,), False),
        ("[dim//32, head]", (HEAD, Axis("dim", 128, 32)), False),
        ("dim//48 head", (HEAD, Axis("dim", 128, 48)), False),
        ("dim//1", (DIM,), False),
        ("layer head", (HEAD, Axis("layer", 3)), False),
        ("token", TOKEN, True),
        ("slot block", TOKEN, True),
        ("position request", TOKEN, True),
        ("head token", (*TOKEN, HEAD), True),
        ("[token//1, head]", (*TOKEN, HEAD), True),
        ("dim//g token", (*TOKEN, Axis("dim", 128, 16)), True),
        ("dim//200 token", (*TOKEN, Axis("dim", 128, 200)), True),
        ("head dim slot block", (*TOKEN, HEAD, DIM), True),
        ("layer token", TOKEN, True),
    ],
)
def test_what_a_scale_varies_over(per: str, axes: tuple[Axis, ...], stored: bool):
    terms = ["layer", "block", "slot", *(axis.name if axis.step == 1 else f"dim//{axis.step}" for axis in axes[2:])]
    buffers = "c: {holds: key, order: layer block slot head dim}"
    buffers += f", s: {{holds: key.scale, order: {' '.join(terms)}}}" * stored
    key = f"quant: {{mode: int8, scale: {{per: {per}}}}}"
    found = layout(key, buffers, "head: 8, dim: 128, layer: 3", "params: {g: 16}")
    scale = found.streams[0].encoding.scale
    assert (scale.axes, scale.stored, scale.dynamic) == (axes, stored, stored)
    assert [leaf.axes for leaf in found.leaves[1:]] == [axes] * stored


@pytest.mark.parametrize(
    ("mode", "scale", "code"),
    [
        ("fp8_e4m3", "per: head, source: dynamic", "KV213"),
        ("fp8_e4m3", "per: slot", "KV306"),
        ("fp8_e4m3", "per: slot head, source: dynamic", "KV306"),
        ("fp8_e4m3", "per: token//5", "KV303"),
        ("fp8_e4m3", "source: static", "KV202"),
        ("fp8_e4m3", "per: block", "KV401"),
        ("mxfp8", "source: static", "KV401"),
        ("fp8_e4m3", "per: block, given: inverse", "KV211"),
        ("fp8_e4m3", "per: [], scale: {}", "KV211"),
        ("int4_asymmetric", "per: []", "KV204"),
        ("int4", "per: token dim//24", "KV314"),
        ("int4", "per: token dim//2, range: 7.5", "KV212"),
        ("nvfp4", "dtype: float32", "KV211"),
        ("nvfp4", "range: 7", "KV212"),
        ("nvfp4", "scale: {per: token}", "KV306"),
        ("fp8_e4m3", "per: token, range: 448.1", "KV212"),
        ("int8", "per: token, range: 128", "KV212"),
        ("fp8_e4m3", "per: token, exponent: floor", "KV211"),
        ("fp8_e4m3", "per: token, encode: exact", "KV211"),
        ("fp8_e4m3", "per: token, given: inverse", "KV211"),
        ("fp8_e4m3", "per: token, dtype: e8m0, grid: any", "KV211"),
        ("fp8_e4m3", "per: [], range: 1", "KV211"),
        ("fp8_e4m3", "per: [], floor: {scale: 1}", "KV211"),
        ("fp8_e4m3", "per: [], grid: pow2", "KV211"),
        ("fp8_e4m3", "per: [], exponent: floor", "KV211"),
        ("fp8_e4m3", "per: [], encode: exact", "KV211"),
        ("mxfp8", "dtype: float32", "KV211"),
        ("fp8_e4m3", "per: head head", "KV305"),
        ("fp8_e4m3", "per: layer", "KV306"),
        ("fp8_e4m3", "per: token 1", "KV301"),
    ],
)
def test_scales_that_are_refused(mode: str, scale: str, code: str):
    assert codes(mode, scale) == [code]


@pytest.mark.parametrize(
    ("mode", "scale"),
    [
        ("fp8_e4m3", "per: [], range: 448, floor: {scale: 1.1754943508222875e-38}, exponent: ceil, encode: stored"),
        ("int8", "per: [], range: 127, floor: {scale: 1e-6}, grid: any, given: scale"),
        ("fp8_e4m3", "per: [], floor: none"),
        ("mxfp8", "per: [], source: static, dtype: e8m0, grid: pow2"),
    ],
)
def test_defaults_may_be_written(mode: str, scale: str):
    short = ", ".join(part for part in scale.split(", ") if part.startswith(("per", "source")))
    assert quant(mode, scale) == quant(mode, short)


def test_float_codes_are_neither_clamped_nor_rounded_otherwise():
    assert quant("fp8_e4m3", "per: []", more=", round: even") == quant("fp8_e4m3", "per: []")
    assert codes("fp8_e4m3", "per: []", ONE_BUFFER, ", round: away") == ["KV211"]
    assert codes("fp8_e4m3", "per: []", ONE_BUFFER, ", clamp: [-1, 1]") == ["KV211"]
    assert codes("int8", "per: []", ONE_BUFFER, ", clamp: [-129, 127]") == ["KV212"]
    assert codes("int8", "per: []", ONE_BUFFER, ", clamp: [-128, 128]") == ["KV212"]
    assert codes("int8", "per: token", ONE_BUFFER, ", clamp: [-100, 127]") == ["KV212"]


def test_casts():
    found = layout("dtype: [bfloat16, float16], store: float16")
    assert found.streams[0].encoding == Encoding("cast", "float16")
    assert found.leaves == (Leaf("key", "key", (*TOKEN, HEAD, DIM), ("float16",), 2),)
    assert (found.buffers[0].unit, found.buffers[0].dtypes) == (2, ("float16",))
    eight = layout("store: float8_e4m3fn").buffers[0]
    assert (eight.unit, eight.dtypes) == (1, ("float8_e4m3fn", "uint8"))
    assert layout("dtype: float32, store: bfloat16").streams[0].itemsize == 4
    for stream in ("dtype: float16, store: float16", "store: float16, quant: {mode: int8, scale: {per: []}}"):
        with pytest.raises(KvgenError) as caught:
            layout(stream)
        assert [diagnostic.code for diagnostic in caught.value.diagnostics] == ["KV210"]


def test_tensors_of_float8_come_as_bytes_too_where_they_are_codes():
    assert layout("dtype: float8_e4m3fn").buffers[0].dtypes == ("float8_e4m3fn",)
    assert quant("int8", "per: []").buffers[0].dtypes == ("int8",)
    mixed = "name: s\naxes: {dim: 4}\nblock_size: 2\nstreams: {a: {quant: {mode: MODE, scale: {per: []}}}, b: STREAM}\n"
    mixed += "buffers: {c: {order: token, fields: [a, b]}}\n"
    expected = {
        "{store: float8_e4m3fn}": ("float8_e4m3fn", "uint8"),
        "{store: float8_e5m2}": ("uint8",),
        "{dtype: float8_e4m3fn}": ("float8_e4m3fn",),
        "{}": ("uint8",),
    }
    for stream, dtypes in expected.items():
        assert load_text(mixed.replace("MODE", "fp8_e4m3").replace("STREAM", stream)).buffers[0].dtypes == dtypes


def test_a_record_of_656_bytes():
    found = load(LAYOUTS / "mla_fp8_record.yaml")
    (buffer,) = found.buffers
    latent = Place((Dim((Digit("dim", 1, 512),)),), Holds(("latent",), 1))
    scale = Place((Dim((Digit("dim", 128, 4),)),), Holds(("latent.scale",), 4))
    rope = Place((Dim((Digit("dim", 1, 64),)),), Holds(("rope",), 2))
    assert buffer.place.content == Record((Field(0, latent), Field(512, scale), Field(528, rope)), 656)
    assert (buffer.unit, buffer.dtypes) == (1, ("uint8",))
    scale = found.stream("latent").encoding.scale
    assert (scale.grid, scale.exponent, scale.floor_on, scale.floor) == ("pow2", "ceil", "scale", 1e-4)
    assert found.stream("rope").encoding is None


def test_a_row_of_codes_and_scales_and_a_page_of_planes():
    packed = load(LAYOUTS / "packed_fp8_token_head.yaml").buffers[0].place.content
    assert [(f.offset, f.content.content.leaves) for f in packed.fields] == [
        (0, ("key",)),
        (128, ("key.scale",)),
        (132, ("value",)),
        (260, ("value.scale",)),
    ]
    assert packed.fields[1].content == Place((), Holds(("key.scale",), 4))
    assert packed.size == 264
    planar = load(LAYOUTS / "indexer_planar.yaml").buffers[0].place.content
    assert planar.fields[1] == Field(64 * 128, Place((Dim((Digit("slot", 1, 64),)),), Holds(("key.scale",), 4)))
    assert planar.size == 64 * 132


@pytest.mark.parametrize(
    ("name", "mode", "axes", "dynamic", "rounding"),
    [
        ("nhd_fp8_tensor", "fp8_e4m3", "", False, "even"),
        ("nhd_fp8_head", "fp8_e4m3", "head", False, "even"),
        ("nhd_e5m2_tensor", "fp8_e5m2", "", False, "even"),
        ("flat_slots_fp8", "fp8_e4m3", "", False, "even"),
        ("paged_x_vector_fp8", "fp8_e4m3", "", False, "even"),
        ("nhd_fp8_token_head", "fp8_e4m3", "block slot head", True, "even"),
        ("packed_fp8_token_head", "fp8_e4m3", "block slot head", True, "even"),
        ("nhd_int8_token_head", "int8", "block slot head", True, "away"),
        ("hnd_int8_token", "int8", "block slot", True, "even"),
        ("nhd_mxfp8", "mxfp8", "block slot head dim", True, "even"),
        ("mla_fp8", "fp8_e4m3", "", False, "even"),
    ],
)
def test_encodings_of_shipped_layouts(name: str, mode: str, axes: str, dynamic: bool, rounding: str):
    for stream in load(LAYOUTS / f"{name}.yaml").streams:
        scale = stream.encoding.scale
        assert (stream.encoding.mode, stream.encoding.rounding) == (mode, rounding)
        assert ([axis.name for axis in scale.axes], scale.dynamic) == (axes.split(), dynamic)
        assert scale.name == f"{stream.name}.scale"
        assert scale.arithmetic == ("multiply" if "token_head" in name else "divide")
        assert scale.floor == (1e-6 if dynamic and mode != "mxfp8" else 0.0)


def test_keys_as_they_come_and_values_in_fp8():
    key, value = load(LAYOUTS / "nhd_bf16k_fp8v.yaml").streams
    assert (key.encoding, value.encoding.scale.axes) == (None, ())


def test_groups_of_a_scale_in_orders():
    def dims(order: str, per: str, axes: str) -> list[tuple[Digit, ...]]:
        buffers = ONE_BUFFER + f", s: {{holds: key.scale, order: {order}}}"
        place = quant("int8", f"per: {per}", buffers, axes=axes).buffers[1].place
        return [dim.digits for dim in place.dims]

    split = dims("block slot dim//64 head dim//16%4", "token head dim//16", "head: 8, dim: 128")
    assert (split[2], split[4]) == ((Digit("dim", 64, 2),), (Digit("dim", 16, 4),))
    assert dims("token dim//16", "token dim//16", "head: 8, dim: 46")[1] == (Digit("dim", 16, 3),)
    assert dims("token dim//16%3", "token dim//16", "head: 8, dim: 46")[1] == (Digit("dim", 16, 3),)
    assert dims("token dim//48 dim//16%3", "token dim//16", "head: 8, dim: 46")[1:] == [
        (Digit("dim", 48, 1),),
        (Digit("dim", 16, 3),),
    ]
    assert dims("token dim//64", "token dim//64", "head: 8, dim: 46")[1] == (Digit("dim", 64, 1),)
    record = quant(
        "int8", "per: token head dim//32", "c: {order: block slot head dim//32, fields: [{key: dim%32}, key.scale]}"
    ).buffers[0]
    assert record.place.content == Record(
        (
            Field(0, Place((Dim((Digit("dim", 1, 32),)),), Holds(("key",), 1))),
            Field(32, Place((), Holds(("key.scale",), 4))),
        ),
        36,
    )


@pytest.mark.parametrize(
    ("per", "order", "code"),
    [
        ("token head dim//16", "block slot head dim", "KV306"),
        ("token head dim//16", "block slot head dim%16", "KV306"),
        ("token head dim//16", "block slot head dim//8", "KV306"),
        ("token head dim//16", "block slot head dim//32", "KV304"),
        ("token head dim//16", "block slot head dim//16 dim//16", "KV305"),
        ("token head dim//16", "block slot dim//16", "KV304"),
        ("token dim//16", "block slot head dim//16", "KV306"),
        ("token", "block slot 1 dim", "KV306"),
        ("token", "block", "KV304"),
    ],
)
def test_orders_that_do_not_cover_a_scale_once(per: str, order: str, code: str):
    assert codes("int8", f"per: {per}", ONE_BUFFER + f", s: {{holds: key.scale, order: {order}}}") == [code]


def test_a_short_last_group_is_not_split():
    for order in ("token dim//32 dim//16%2", "token dim//16%2 dim//32"):
        buffers = ONE_BUFFER + f", s: {{holds: key.scale, order: {order}}}"
        assert codes("int8", "per: token dim//16", buffers, axes="head: 8, dim: 62") == ["KV303"]
        assert quant("int8", "per: token dim//16", buffers, axes="head: 8, dim: 64").leaves[1].axes[2].count == 4


def test_pairs_of_codes_and_of_scales():
    text = "name: s\naxes: {head: 8, dim: 128}\nblock_size: 16\n"
    text += "streams: {key: {quant: {mode: int8, scale: {per: token}}}, value: OTHER}\n"
    text += "buffers: {c: {holds: [key, value], order: block kv slot head dim}, "
    text += "s: {holds: [key.scale, value.scale], order: block slot kv}}\n"
    found = load_text(text.replace("OTHER", "key"))
    assert found.buffers[1].place.content == Holds(("key.scale", "value.scale"), 4)
    assert [stream.encoding.scale.name for stream in found.streams] == ["key.scale", "value.scale"]
    differs = "{quant: {mode: int8, round: away, scale: {per: token, floor: none}}}"
    assert load_text(text.replace("OTHER", differs)).buffers == found.buffers
    with pytest.raises(KvgenError) as caught:
        load_text(text.replace("OTHER", "{quant: {mode: int8, scale: {per: token, dtype: float16}}}"))
    assert [diagnostic.code for diagnostic in caught.value.diagnostics] == ["KV307"]


def test_where_scales_must_lie():
    assert codes("int8", "per: token") == ["KV401"]
    assert codes("int8", "per: []", "c: {order: block slot head, fields: [key, key.scale]}") == ["KV407"]
    assert codes("int8", "per: token", ONE_BUFFER + ", s: {key.scale: token}, u: {key.scale: token}") == ["KV402"]
    assert codes("int8", "per: []", "c: {order: block slot head, fields: [key]}, s: {key.scale.scale: 1}") == ["KV206"]
    nvfp4 = ONE_BUFFER + ", s: {key.scale: token head dim//16}, u: {key.scale.scale: 1}"
    assert codes("nvfp4", "scale: {}", nvfp4) == ["KV407"]
    assert codes("int8", "per: token", "c: {holds: key, order: layer token head dim}, s: {key.scale: token}") == [
        "KV313"
    ]


def test_a_mistake_is_told_once_where_it_is_written():
    text = "name: s\naxes: {head: 8, dim: 128}\nblock_size: 16\n"
    text += "streams: {key: {quant: {mode: fp8_e4m3, scale: {per: head, source: dynamic}}}, value: key}\n"
    text += "buffers: {c: {order: block slot head, fields: [key, key.scale, value, value.scale]}}\n"
    with pytest.raises(KvgenError) as caught:
        load_text(text)
    assert [(d.code, d.span.line) for d in caught.value.diagnostics] == [("KV213", 4)]


def test_what_rests_on_a_broken_param_is_passed_over():
    assert codes("int8", "per: token dim//g", axes="head: 8, dim: 128") == ["KV311"]
    buffers = ONE_BUFFER + ", s: {holds: key.scale, order: token dim//g}"
    with pytest.raises(KvgenError) as caught:
        layout("quant: {mode: int8, scale: {per: token dim//g}}", buffers, more="params: {g: 0}")
    assert [diagnostic.code for diagnostic in caught.value.diagnostics] == ["KV203"]


def test_where_orders_are_wrong_nothing_is_said_of_layers():
    assert codes("int8", "per: layer", "c: {holds: key, order: layer token hed dim}") == ["KV302"]


@pytest.mark.parametrize(
    "name", ["key_scale", "Key_Scale", "key_scale_out", "append_key_scale", "key_scale_stride_head"]
)
@pytest.mark.parametrize("per", ["[]", "token"])
def test_names_that_a_scale_has_taken(name: str, per: str):
    scales = ", s: {key.scale: token}" * (per == "token")
    buffers = f"{name}: {{holds: key, order: token head dim}}{scales}"
    assert codes("int8", f"per: {per}", buffers) == ["KV205"]
    assert layout("store: float16, dtype: [float16, bfloat16]", buffers.partition(", s")[0]).buffers[0].name == name
    assert quant("int8", f"per: {per}", buffers.replace(name, "key_scales")).buffers[0].name == "key_scales"


SHARED = """
name: shared
axes: {head: 2, dim: 16}
block_size: 4
streams:
  key: {quant: {mode: fp8_e4m3, scale: {per: head, source: static, given: inverse, arithmetic: multiply}}}
  value: {quant: {mode: int8, scale: key}}
  latent: {quant: {mode: nvfp4, scale: {scale: rope}}}
  rope: {quant: {mode: nvfp4}}
buffers:
  a: {order: token head, fields: [key, value]}
  b: {order: token head, fields: [latent, latent.scale, rope, rope.scale]}
"""


def test_scales_that_streams_share():
    found = load_text(SHARED)
    assert found.stream("value").scale is found.stream("value").encoding.scale
    assert found.stream("value").scale == found.stream("key").scale
    assert found.stream("latent").scale.scale == found.stream("rope").scale.scale
    assert found.stream("latent").scale.name == "latent.scale"
    assert "value: {quant: {mode: int8, scale: key}}" in canonical(found)
    assert "source: dynamic, scale: rope}" in canonical(found)
    assert load_text(canonical(found)) == found
    append = next(plan for plan in lower(found) if plan.name == "append")
    assert [scale.argument for scale in argument_scales(found, append)] == ["key_scale", "rope_scale_scale"]
