"""What layout files mean: dimensions, records, offsets in bytes, units and names, stated value by value."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.axes import Axis, Digit
from kvgen.diagnostics import KvgenError
from kvgen.layout import (
    Buffer,
    Dim,
    Field,
    Holds,
    KernelHints,
    Layout,
    Leaf,
    Pad,
    Place,
    Record,
    ScheduleHints,
    Shard,
    Slots,
    Stream,
    leaves_of,
)
from kvgen.resolve import load, load_text

LAYOUTS = Path(__file__).parents[2] / "layouts"
HALF = ("bfloat16", "float16")
BLOCK, HEAD = Digit("block", 1, None), Digit("head", 1, 8)


def layout(
    buffers: str, block_size: str = "16", axes: str = "head: 8, dim: 128", streams: str | None = None, more: str = ""
) -> Layout:
    text = f"name: sample\naxes: {{{axes}}}\nblock_size: {block_size}\nbuffers: {{{buffers}}}\n{more}\n"
    return load_text(text + (f"streams: {{{streams}}}\n" if streams else ""))


def codes(*arguments: str, **sections: str) -> list[str]:
    with pytest.raises(KvgenError) as caught:
        layout(*arguments, **sections)
    return [diagnostic.code for diagnostic in caught.value.diagnostics]


def dims(*digits: Digit | tuple[Digit, ...]) -> tuple[Dim, ...]:
    return tuple(Dim(digit if isinstance(digit, tuple) else (digit,)) for digit in digits)


def test_paged_x_vector_as_a_whole():
    axes = (Axis("head", 8), Axis("dim", 128))
    whole = (Axis("block", None), Axis("slot", 16), *axes)
    key = dims(BLOCK, HEAD, Digit("dim", 8, 16), Digit("slot", 1, 16), Digit("dim", 1, 8))
    value = dims(BLOCK, HEAD, Digit("dim", 1, 128), Digit("slot", 1, 16))
    assert load(LAYOUTS / "paged_x_vector.yaml") == Layout(
        name="paged_x_vector",
        summary="K in 16-byte vectors along dim, V slot-minor: PagedAttention v1.",
        block_size=16,
        contiguous=False,
        layers=None,
        streams=(Stream("key", axes, HALF, 2), Stream("value", axes, HALF, 2)),
        leaves=(Leaf("key", "key", whole, HALF, 2), Leaf("value", "value", whole, HALF, 2)),
        buffers=(
            Buffer("key_cache", Place(key, Holds(("key",), 2)), 2, HALF),
            Buffer("value_cache", Place(value, Holds(("value",), 2)), 2, HALF),
        ),
        slots=Slots("int64", None, None, None),
        schedule=ScheduleHints(KernelHints(None, None, None), KernelHints(None, None, None)),
    )


@pytest.mark.parametrize(
    ("name", "shape", "leaves"),
    [
        ("contiguous_hnd", [None, 8, 4096, 128], ("key",)),
        ("contiguous_nhd", [None, 4096, 8, 128], ("key",)),
        ("flat_slots", [None, 8, 128], ("key",)),
        ("paged_nhd", [None, 16, 8, 128], ("key",)),
        ("paged_hnd", [None, 8, 16, 128], ("key",)),
        ("block_v1", [None, 2, 8, 32, 128], ("key", "value")),
        ("stacked_nhd", [2, None, 16, 8, 128], ("key", "value")),
        ("pair_nhd", [None, 2, 16, 8, 128], ("key", "value")),
        ("packed_nhd", [None, 16, 8], ("key", "value")),
        ("packed_hnd", [None, 8, 16], ("key", "value")),
        ("cross_layer_nhd", [None, None, 16, 8], ("key", "value")),
        ("cross_layer_hnd", [None, None, 8, 16], ("key", "value")),
        ("swa_nhd", [None, 16, 8, 128], ("key",)),
        ("context_parallel_nhd", [None, 16, 8, 128], ("key",)),
        ("mla", [None, 64], ("latent", "rope")),
        ("mla_split", [None, 64, 512], ("latent",)),
    ],
)
def test_shapes_of_shipped_layouts(name: str, shape: list[int | None], leaves: tuple[str, ...]):
    found = load(LAYOUTS / f"{name}.yaml")
    buffer = found.buffers[0]
    assert found.name == name
    assert [dim.size for dim in buffer.place.dims] == shape
    assert leaves_of(buffer.place) == leaves
    assert (buffer.unit, buffer.dtypes) == (2, HALF)
    assert buffer.ndim == len(shape) + (leaves == ("key", "value") and 2 not in shape) + (name == "mla")
    assert found.contiguous == name.startswith("contiguous")
    assert found.layers == (Axis("layer", None) if name.startswith("cross_layer") else None)


def test_slots_of_shipped_layouts():
    assert load(LAYOUTS / "swa_nhd.yaml").slots == Slots(remap="swa_slots")
    assert load(LAYOUTS / "context_parallel_nhd.yaml").slots == Slots(shard=Shard(4, 1))


def test_rows_of_a_record_follow_each_other():
    record = load(LAYOUTS / "mla.yaml").buffers[0].place.content
    latent, rope = (
        Place(dims(Digit("dim", 1, 512)), Holds(("latent",), 2)),
        Place(dims(Digit("dim", 1, 64)), Holds(("rope",), 2)),
    )
    assert record == Record((Field(0, latent), Field(1024, rope)), 1152)


def test_alignment_and_padding_in_nested_records():
    found = layout(
        "pool: {order: block slot//4, align: 64, fields: ["
        "{order: slot%4 head, align: 8, fields: [{key: dim}, {pad: 3}, value]},"
        "{rope: slot%4 dim, align: 128}, {pad: 5}]}",
        axes="head: 2, dim: 6",
        streams="key: , value: {dim: 3}, rope: {head: none, dim: 5, dtype: float32}",
    )
    (buffer,) = found.buffers
    key = Place(dims(Digit("dim", 1, 6)), Holds(("key",), 2))
    value = Place(dims(Digit("dim", 1, 3)), Holds(("value",), 2))
    row = Record((Field(0, key), Field(12, Pad(3)), Field(15, value)), 21)
    rows = Place(dims(Digit("slot", 1, 4), Digit("head", 1, 2)), row, align=8)
    rope = Place(dims(Digit("slot", 1, 4), Digit("dim", 1, 5)), Holds(("rope",), 4), align=128)
    assert (rows.pitch, rows.size) == (24, 192)
    assert buffer.place == Place(
        dims(BLOCK, Digit("slot", 4, 4)),
        Record((Field(0, rows), Field(256, rope), Field(256 + 80, Pad(5))), 341),
        align=64,
    )
    assert buffer.place.pitch == 384
    assert (buffer.unit, buffer.dtypes) == (1, ("uint8",))


@pytest.mark.parametrize(
    ("fields", "unit"),
    [
        ("[key, value]", 2),
        ("[key, {pad: 2}, value]", 2),
        ("[key, {pad: 1}, value]", 1),
        ("[key, {value: dim, align: 4}]", 2),
        ("[key, value], align: 3", 1),
        ("[key, {order: 1, align: 7, fields: [value]}]", 1),
        ("[key, {order: 1, fields: [{pad: 1}, {value: dim, align: 2}]}]", 1),
    ],
)
def test_a_tensor_counts_bytes_where_something_is_no_whole_element(fields: str, unit: int):
    (buffer,) = layout(f"pool: {{order: block slot head, fields: {fields}}}").buffers
    assert (buffer.unit, buffer.dtypes) == {2: (2, HALF), 1: (1, ("uint8",))}[unit]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("float16", "bfloat16", (1, ("uint8",))),
        ("[float16, bfloat16]", "[bfloat16, float16]", (2, ("float16", "bfloat16"))),
        ("float32", "float32", (4, ("float32",))),
        ("float8_e4m3fn", "float8_e4m3fn", (1, ("float8_e4m3fn",))),
        ("float8_e5m2", "int8", (1, ("uint8",))),
        ("float32", "float16", (1, ("uint8",))),
    ],
)
def test_a_record_has_a_type_if_all_of_it_has_it(key: str, value: str, expected: tuple[int, tuple[str, ...]]):
    streams = f"key: {{dtype: {key}}}, value: {{dtype: {value}}}"
    (buffer,) = layout("pool: {order: block slot head, fields: [key, value]}", streams=streams).buffers
    assert (buffer.unit, buffer.dtypes) == expected


def test_a_bare_stream_takes_what_is_left():
    found = layout("pool: {order: block slot head dim//32, fields: [key, {holds: value, align: 8}]}").buffers[0].place
    rest = dims(Digit("dim", 1, 32))
    assert [field.content.dims for field in found.content.fields] == [rest, rest]
    # In the middle of an axis, nothing at all, and the pair axis.
    found = layout("pool: {order: block slot head dim//64 dim%4, fields: [key, {order: 1, fields: [value]}]}").buffers[
        0
    ]
    assert found.place.content.fields[0].content.dims == dims(Digit("dim", 4, 16))
    found = layout("pool: {order: block slot head dim, fields: [key, value]}").buffers[0].place
    assert [field.content.dims for field in found.content.fields] == [(), ()]
    found = layout("pool: {order: block slot head dim, fields: [{holds: [key, value]}]}").buffers[0].place
    assert found.content.fields[0].content == Place(dims(Digit("kv", 1, 2)), Holds(("key", "value"), 2))
    assert codes("pool: {order: block head dim//8 dim%4, fields: [key, value]}") == ["KV309", "KV309"]


def test_token_is_block_and_slot():
    buffer = layout("pool: {holds: [key, value], order: token//4 kv head slot%4 dim}").buffers[0]
    assert buffer.place.dims[0] == Dim((BLOCK, Digit("slot", 4, 4)))
    buffer = layout("pool: {holds: [key, value], order: (token head) kv dim}").buffers[0]
    assert buffer.place.dims[0] == Dim((BLOCK, Digit("slot", 1, 16), HEAD))


def test_lists_lines_and_params_are_spellings():
    expected = layout("pool: {holds: [key, value], order: block kv head dim//8 slot (dim%8 1) 1}")
    assert expected.buffers[0].place.dims[-1] == Dim(())
    as_list = "[block, kv, head, dim//8, slot, (dim%x 1), 1]"
    assert layout(f"pool: {{holds: [key, value], order: {as_list}}}", more="params: {x: 8}") == expected
    folded = "\n    block kv\n    head dim // 8 slot\n    (dim % 8) 1"
    assert layout(f"pool: {{holds: [key, value], order: {folded}}}") == expected


def test_requests_and_positions_are_blocks_and_slots():
    paged = layout("pool: {holds: [key, value], order: block kv slot//4 head slot%4 dim}")
    other = layout("pool: {holds: [key, value], order: request kv position//4 head position%4 dim}")
    assert (paged.contiguous, other.contiguous) == (False, True)
    assert other.buffers == paged.buffers
    assert layout("pool: {holds: [key, value], order: token kv head dim}").contiguous is False


def test_streams_may_differ():
    found = layout(
        "pool: {order: token, fields: [{key: head dim}, {value: head dim}, rope]}",
        streams="rope: {head: none, dim: 64}, key: {dim: 192}, value: {dim: 128}",
        axes="head: 8",
    )
    assert [(s.name, [a.extent for a in s.axes]) for s in found.streams] == [
        ("rope", [64]),
        ("key", [8, 192]),
        ("value", [8, 128]),
    ]
    assert [leaf.axes[2:] for leaf in found.leaves] == [stream.axes for stream in found.streams]
    offsets = [field.offset for field in found.buffers[0].place.content.fields]
    assert offsets == [0, 8 * 192 * 2, 8 * (192 + 128) * 2]


def test_dynamic_extents_are_tensor_dimensions():
    order = "block slot head dim"
    found = layout(
        f"k: {{holds: key, order: {order}}}, v: {{holds: value, order: (block slot) head dim}}",
        "dynamic",
        "head: dynamic, dim: dynamic",
    )
    assert found.block_size is None
    assert found.buffers[0].place.dims == dims(
        BLOCK, Digit("slot", 1, None), Digit("head", 1, None), Digit("dim", 1, None)
    )
    assert found.buffers[1].place.dims[0] == Dim((BLOCK, Digit("slot", 1, None)))
    assert found.leaves[0].axes == tuple(Axis(name, None) for name in ("block", "slot", "head", "dim"))
    assert codes("p: {holds: [key, value], order: (block slot) kv head dim}", "dynamic") == ["KV308"]
    assert codes("p: {holds: [key, value], order: block kv (slot head) dim}", "dynamic") == ["KV308"]
    assert codes("p: {holds: [key, value], order: (kv block) slot head dim}") == ["KV308"]
    assert codes("p: {order: block slot head, fields: [key, value]}", axes="head: 8, dim: dynamic") == [
        "KV405",
        "KV405",
    ]


def test_layers():
    found = layout("p: {holds: [key, value], order: kv layer block slot head dim}")
    assert found.layers == Axis("layer", None)
    assert found.buffers[0].place.dims[1] == Dim((Digit("layer", 1, None),))
    found = layout(
        "p: {holds: [key, value], order: kv layer//4 (block layer%4) slot head dim}",
        axes="head: 8, dim: 128, layer: 12",
    )
    assert found.layers == Axis("layer", 12)
    assert found.buffers[0].place.dims[2] == Dim((BLOCK, Digit("layer", 1, 4)))
    assert (
        layout("p: {holds: [key, value], order: kv block slot head dim}", axes="head: 8, dim: 128, layer: 12").layers
        is None
    )
    assert codes(
        "p: {holds: [key, value], order: kv layer//4 block slot head dim}", axes="head: 8, dim: 128, layer: 12"
    ) == ["KV304"]


def test_axes_of_extent_one_are_covered_once_too():
    assert codes("p: {holds: [key, value], order: block kv slot head head dim}", axes="head: 1, dim: 8") == ["KV305"]
    assert codes("p: {holds: [key, value], order: block kv slot dim}", axes="head: 1, dim: 8") == ["KV304"]
    found = layout("p: {holds: [key, value], order: block kv slot head head%1 dim//8 dim}", axes="head: 1, dim: 8")
    assert [dim.size for dim in found.buffers[0].place.dims] == [None, 2, 16, 1, 1, 1, 8]


def test_fill_needs_a_record_of_one_token():
    found = layout("p: {order: token head, fields: [key, {pad: 4, fill: 255}, value]}")
    assert found.buffers[0].place.content.fields[1] == Field(256, Pad(4, 255))
    assert codes("p: {order: block head, fields: [{key: slot dim}, {pad: 4, fill: 0}, {value: slot dim}]}") == ["KV404"]
    one = "p: {order: block slot, fields: [{key: head dim}, {pad: 4, fill: 0}, {value: head dim}]}"
    assert layout(one, "1").buffers[0].place.content.fields[1] == Field(2048, Pad(4, 0))
    assert codes(
        "p: {order: block, fields: [{key: slot head dim}, {pad: 4, fill: 0}, {value: slot head dim}]}", "1"
    ) == ["KV404"]


def test_shards():
    pool = "p: {holds: [key, value], order: block kv slot head dim}"
    assert layout(pool, more="slots: {shard: {world: 3, interleave: 8}}").slots.shard == Shard(3, 8)
    assert layout(pool, "dynamic", more="slots: {shard: {world: 3}}").slots.shard == Shard(3, 1)
    assert codes(pool, "12", more="slots: {shard: {world: 3, interleave: 8}}") == ["KV209"]


@pytest.mark.parametrize(
    "name",
    [
        "slots",
        "out",
        "layer",
        "rank",
        "dim",
        "token",
        "append",
        "allocate",
        "holds",
        "class",
        "match",
        "len",
        "tl",
        "_x",
        "x-y",
        "é",
        "x" * 65,
        "null",
    ],
)
def test_names_that_would_collide(name: str):
    assert "KV205" in codes(
        f"'{name}': {{holds: key, order: block slot head dim}}, v: {{holds: value, order: block slot head dim}}"
    )


def test_longest_names_pass():
    name = "x" * 64
    assert layout(f"{name}: {{holds: [key, value], order: block kv slot head dim}}").buffers[0].name == name


def test_extents_stay_within_32_bits():
    assert layout("p: {holds: [key, value], order: block kv slot head dim}", str(2**31 - 1)).block_size == 2**31 - 1
    assert codes("p: {holds: [key, value], order: block kv slot head dim}", str(2**31)) == ["KV203"]
    assert codes("p: {order: block slot head, fields: [key, value, {pad: 2147483136}]}") == ["KV406"]
    layout("p: {order: block slot head, fields: [key, value, {pad: 2147483135}]}")
