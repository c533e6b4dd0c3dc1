"""What `kvgen show` says: formulas and strides against the PyTorch reference, sizes and pictures against known ones."""

import itertools
import re
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from kvgen import figure, picture, reference, show, sizes
from kvgen.amount import Amount
from kvgen.resolve import load, load_text

SHIPPED = sorted((Path(__file__).parent.parent / "layouts").glob("*.yaml"))

STACKED = """
name: stacked
axes: {head: 2, dim: 4}
block_size: 2
buffers:
  kv_cache: {holds: [key, value], order: kv block slot head dim}
"""
PLANAR = """
name: planar
axes: {head: 2, dim: 4}
block_size: 2
buffers:
  kv_cache:
    order: block
    fields: [{key: slot head dim}, {pad: 8}, {value: slot head dim}]
"""
RECORD = """
name: record
axes: {head: 2}
block_size: 2
streams:
  key: {dim: 5}
  value: {dim: 3}
buffers:
  kv_cache: {order: block slot head, fields: [key, value, {pad: 2, fill: 0}], align: 16}
"""
SPLIT = """
name: split
axes: {head: 6, dim: 12}
block_size: 6
buffers:
  key_cache: {holds: key, order: block head//2 slot//3 dim//4 head%2 slot%3 dim%4}
  value_cache: {holds: value, order: block dim//3 slot head dim%3}
"""
CODES = """
name: nibbles
axes: {{head: 2, dim: 32}}
block_size: 4
streams: {{key: {{quant: {{mode: int4, scale: {{per: [], source: static}}}}}}}}
buffers: {{cache: {{holds: key, order: {order}}}}}
"""
LAYERED = """
name: layered
axes: {head: 2, dim: 4}
block_size: 2
buffers:
  kv_cache: {order: block layer head slot, fields: [key, value]}
"""
DYNAMIC = """
name: dynamic_heads
axes: {head: dynamic, dim: 8}
block_size: 4
buffers:
  key_cache: {holds: key, order: block slot head dim}
  value_cache: {holds: value, order: block head slot dim}
"""
NIBBLES = """
name: nibbles
axes: {head: 2, dim: 46}
block_size: 4
streams:
  key: {dim: 64, quant: {mode: int4_asymmetric, scale: {per: token//2 head dim//16}}}
  value: {quant: {mode: int4, scale: {per: block head, source: static}}}
buffers:
  key_cache: {order: block head slot//2, fields: [{key: dim//32 slot%2 dim%16 dim//16%2}, {key.scale: dim//16}]}
  value_cache: {order: block, fields: [{value: slot head dim}, {value.scale: head}, {pad: 3}], align: 16}
  zeros: {key.zero: token//2 dim//16 head}
"""
TEXTS = {
    "stacked": STACKED,
    "planar": PLANAR,
    "record": RECORD,
    "split": SPLIT,
    "layered": LAYERED,
    "dynamic": DYNAMIC,
    "nibbles": NIBBLES,
}
UNKNOWN = {"num_blocks": 3, "num_requests": 2, "num_layers": 2, "num_heads": 3}


LAYOUTS = [
    *(pytest.param(load(path), id=path.stem) for path in SHIPPED),
    *(pytest.param(load_text(text, f"{name}.yaml"), id=name) for name, text in TEXTS.items()),
]


def described(text, **pool):
    return show.describe(load_text(text, "layout.yaml"), **pool)


class Addresses:
    """Buffers of a layout, shaped as ``describe`` says."""

    def __init__(self, layout):
        self.facts = {facts["name"]: facts for facts in show.describe(layout)["buffers"]}
        self.buffers, self.strides = {}, {}
        for name, facts in self.facts.items():
            shape, strides = (
                [size if isinstance(size, int) else eval(size, {}, UNKNOWN) for size in facts[key]]
                for key in ("shape", "strides")
            )
            count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[facts["element_bytes"]]
            self.buffers[name] = torch.empty(count, dtype=kind).as_strided(shape, strides)
            self.strides[name] = strides

    def formula(self, leaf):
        """The address of a leaf in bytes as a function of its axes."""
        name, text = next((b, f["addresses"][leaf]) for b, f in self.facts.items() if leaf in f["addresses"])
        known = {name: 0, "stride": self.strides[name].__getitem__}
        code, unit = compile(text, leaf, "eval"), self.facts[name]["element_bytes"]
        return lambda **index: unit * eval(code, known, index)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_formulas_lead_where_the_reference_reads(layout):
    addresses = Addresses(layout)
    block_size = layout.block_size
    layer = 0 if layout.layers is None else 1
    views = reference.leaf_views(layout, addresses.buffers)
    for leaf in layout.leaves:
        formula, view = addresses.formula(leaf.name), views[leaf.name].select("layer", layer)
        start = view.tensor.untyped_storage().data_ptr()
        inner = [axis for axis in leaf.axes if axis.name not in ("block", "slot")]
        places = list(itertools.product(*(range(axis.extent or UNKNOWN["num_heads"]) for axis in inner)))
        for slot in (0, 1, block_size - 1, block_size, 2 * block_size - 1):
            block, inside = divmod(slot, block_size)
            index = {"block": block, "request": block, "slot": inside, "position": inside, "slot_number": slot}
            for place in places[:: max(1, len(places) // 97)] + places[-1:]:
                axes = index | dict(zip([axis.name for axis in inner], place, strict=True))
                found = view.tensor[tuple(digit.of(axes[digit.axis]) for digit in view.digits)]
                assert found.data_ptr() - start == formula(layer=layer, **axes), (leaf.name, axes)


def test_a_buffer_is_described():
    (buffer,) = described(RECORD)["buffers"]
    assert buffer == {
        "name": "kv_cache",
        "order": "block slot head",
        "shape": ["num_blocks", 2, 2, 9],
        "strides": [64, 32, 16, 1],
        "element_bytes": 2,
        "dtypes": ["bfloat16", "float16"],
        "addresses": {
            "key": "kv_cache + block * stride(0) + slot * stride(1) + head * stride(2) + dim",
            "value": "kv_cache + block * stride(0) + slot * stride(1) + head * stride(2) + dim + 5",
        },
        "page_bytes": 128,
        "bytes_per_token": 64,
    }


def test_sizes_of_a_buffer_with_all_layers_say_which_they_are():
    (buffer,) = described(LAYERED)["buffers"]
    page = buffer["page_bytes"]
    assert buffer["page_bytes_all_layers"] == f"{page} * num_layers"
    each = f"{page} a block, {buffer['bytes_per_token']} a token in each layer"
    assert f"  bytes    {each}; {page} * num_layers a block in all layers\n" in show.text(load_text(LAYERED, "l.yaml"))
    three = LAYERED.replace("dim: 4", "dim: 4, layer: 3")
    assert described(three)["buffers"][0]["page_bytes_all_layers"] == 3 * page


def test_splits_are_spelled_as_the_language_spells_them():
    key, value = described(SPLIT)["buffers"]
    assert key["order"] == "block head//2 slot//3 dim//4 head%2 slot%3 dim%4"
    assert key["addresses"]["key"] == (
        "key_cache + block * stride(0) + (head // 2) * stride(1) + (slot // 3) * stride(2) + (dim // 4) * stride(3)"
        " + (head % 2) * stride(4) + (slot % 3) * stride(5) + (dim % 4)"
    )
    assert value["shape"] == ["num_blocks", 4, 6, 6, 3]


@pytest.mark.parametrize(
    ("order", "fields"),
    [
        ("block slot head (kv dim)", "order: block slot head, fields: [{key: dim}, {value: dim}]"),
        ("block (kv head slot dim)", "order: block, fields: [{key: head slot dim}, {value: head slot dim}]"),
        (
            "block slot (kv dim//2 head dim%2)",
            "order: block slot, fields: [{key: dim//2 head dim%2}, {value: dim//2 head dim%2}]",
        ),
    ],
)
def test_a_pair_in_the_last_dimension_is_a_record(order, fields):
    text = STACKED.replace("kv block slot head dim", order)
    (pair,) = described(text)["buffers"]
    assert pair["same_as"] == fields
    (record,) = described(re.sub("{holds.*}", f"{{{fields}}}", text))["buffers"]
    assert record["same_as"] == f"holds: [key, value], order: {order}"
    for key in ("shape", "strides", "addresses", "dtypes"):
        assert pair[key] == record[key]
    assert f"\n  same as  {fields}\n" in show.text(load_text(text, "layout.yaml"))


@pytest.mark.parametrize("text", [STACKED, RECORD, PLANAR, SPLIT, CODES.format(order="block slot head dim")])
def test_others_have_one_spelling(text):
    assert not [buffer for buffer in described(text)["buffers"] if "same_as" in buffer]


def test_pool_size_counts_whole_blocks_and_layers():
    page = 2 * 2 * 2 * 4 * 2  # kv, slots, heads, dims, bytes
    assert described(STACKED, layers=3, tokens=5)["pool"] == {"layers": 3, "tokens": 5, "blocks": 3, "bytes": 9 * page}
    assert described(STACKED, tokens=4)["pool"] == {"layers": 1, "tokens": 4, "blocks": 2, "bytes": 2 * page}
    assert described(LAYERED, layers=7, tokens=4)["pool"]["bytes"] == 7 * 2 * page


def test_pool_size_is_what_allocating_takes():
    layout = load_text(RECORD, "record.yaml")
    addresses = Addresses(layout)
    (buffer,) = layout.buffers
    allocated = addresses.strides["kv_cache"][0] * UNKNOWN["num_blocks"] * buffer.unit
    assert show.pool(layout, None, UNKNOWN["num_blocks"] * layout.block_size)["bytes"] == allocated


def test_unknown_extents_have_names():
    facts = described(DYNAMIC, layers=2, tokens=8)
    assert facts["bytes_per_token"] == "32 * num_heads"
    assert facts["buffers"][0]["strides"] == ["32 * num_heads", "8 * num_heads", 8, 1]
    assert facts["pool"]["bytes"] == "512 * num_heads"


def test_contiguous_layouts_speak_of_requests_and_positions():
    layout = load(next(path for path in SHIPPED if path.stem == "contiguous_nhd"))
    (buffer, _) = show.describe(layout)["buffers"]
    assert buffer["order"] == "request position head dim"
    assert buffer["shape"][0] == "num_requests"
    assert "request * stride(0) + position * stride(1)" in buffer["addresses"]["key"]
    assert "max_seq_len 4096" in show.text(layout)


def drawn(text):
    layout = load_text(text, "layout.yaml")
    return "\n".join(picture.page(layout, layout.buffers[0]))


def test_picture_of_a_pair_whose_halves_lie_apart():
    assert drawn(STACKED) == dedent("""\
        each cell: values, dim 0 … 3, 2 bytes each
        ┌ kv 0 key ────────────────────┐
        │          head 0    head 1    │
        │        ┌─────────┬─────────┐ │
        │ slot 0 │  0 – 7  │ 8 – 15  │ │
        │ slot 1 │ 16 – 23 │ 24 – 31 │ │
        │        └─────────┴─────────┘ │
        └────────────────────── 0 – 31 ┘
        ┌ kv 1 value, 32 * num_blocks bytes on ──┐
        │          head 0    head 1              │
        │        ┌─────────┬─────────┐           │
        │ slot 0 │  0 – 7  │ 8 – 15  │           │
        │ slot 1 │ 16 – 23 │ 24 – 31 │           │
        │        └─────────┴─────────┘           │
        └──────────────────────────────── 0 – 31 ┘""")


def test_picture_of_pages_with_others_between():
    text = STACKED.replace("kv block slot head dim", "kv head block slot dim")
    assert drawn(text).splitlines()[-1].endswith(" 0 – 16 * num_blocks + 15 ┘")


def test_picture_of_records_with_padding():
    assert drawn(RECORD) == dedent("""\
        each cell: a record of 32 bytes
                 head 0     head 1
               ┌─────────┬──────────┐
        slot 0 │ 0 – 31  │ 32 – 63  │
        slot 1 │ 64 – 95 │ 96 – 127 │
               └─────────┴──────────┘
        record of 32 bytes
        ┌───────┬─────────┬──────────┬─────────┐
        │  key  │  value  │ pad of 0 │   pad   │
        │ dim 5 │  dim 3  │          │         │
        │ 0 – 9 │ 10 – 15 │ 16 – 17  │ 18 – 31 │
        └───────┴─────────┴──────────┴─────────┘""")


def test_picture_of_a_planar_page():
    assert drawn(PLANAR) == dedent("""\
        record of 72 bytes
        ┌─────────────────────┬─────────┬─────────────────────┐
        │         key         │   pad   │        value        │
        │ slot 2 head 2 dim 4 │         │ slot 2 head 2 dim 4 │
        │       0 – 31        │ 32 – 39 │       40 – 71       │
        └─────────────────────┴─────────┴─────────────────────┘

        key, from byte 0:
        each cell: key, dim 0 … 3, 2 bytes each
                 head 0    head 1
               ┌─────────┬─────────┐
        slot 0 │  0 – 7  │ 8 – 15  │
        slot 1 │ 16 – 23 │ 24 – 31 │
               └─────────┴─────────┘

        value, from byte 40:
        each cell: value, dim 0 … 3, 2 bytes each
                 head 0    head 1
               ┌─────────┬─────────┐
        slot 0 │ 40 – 47 │ 48 – 55 │
        slot 1 │ 56 – 63 │ 64 – 71 │
               └─────────┴─────────┘""")


def test_picture_of_codes_that_share_a_byte():
    text = CODES.format(order="block slot head dim")
    assert drawn(text) == dedent("""\
        each cell: key, 16 bytes of 2 codes
                  head 0     head 1
               ┌──────────┬───────────┐
        slot 0 │  0 – 15  │  16 – 31  │
        slot 1 │ 32 – 47  │  48 – 63  │
        slot 2 │ 64 – 79  │  80 – 95  │
        slot 3 │ 96 – 111 │ 112 – 127 │
               └──────────┴───────────┘
        bytes of key, 2 codes each:
                  bits 0 – 3   bits 4 – 7
                ┌────────────┬────────────┐
        byte 0  │   dim 0    │   dim 1    │
        byte 1  │   dim 2    │   dim 3    │
        …       │     …      │     …      │
        byte 15 │   dim 30   │   dim 31   │
                └────────────┴────────────┘""")
    assert "byte 15 │   dim 15   │   dim 31   │" in drawn(CODES.format(order="block slot head dim%16 dim//16"))
    assert "byte 3, slot 3 │   dim 0    │   dim 1    │" in drawn(CODES.format(order="block head dim//2 slot dim%2"))
    drawing = figure.figure(load_text(CODES.format(order="block head dim//2 slot dim%2")))
    assert ">3, slot 3</text>" in drawing


def test_codes_that_share_a_byte_have_bits():
    (buffer,) = described(CODES.format(order="block slot head dim%16 dim//16"))["buffers"]
    assert buffer["addresses"]["key"].endswith("+ head * stride(2) + (dim % 16) * stride(3)")
    assert buffer["bits"] == {"key": {"bits": 4, "first": "(dim // 16) * 4"}}
    layout = load_text(CODES.format(order="block slot head dim"), "layout.yaml")
    assert "+ (dim // 2), 4 bits from bit (dim % 2) * 4 on\n" in show.text(layout)


def test_picture_of_gaps_that_alignment_leaves():
    text = RECORD.replace("fields: [key, value,", "fields: [key, {holds: value, align: 8},")
    assert "│ 0 – 9 │ 10 – 15 │ 16 – 21 │ 22 – 23  │ 24 – 31 │" in drawn(text)


def test_picture_of_an_axis_known_only_at_launch():
    assert drawn(DYNAMIC) == dedent("""\
        each cell: key, dim 0 … 7, 2 bytes each
                                          head 0   head 1
                                        ┌────────┬─────────┬───┐
        slot 0                          │ 0 – 15 │ 16 – 31 │ … │
        slot 1, 16 * num_heads bytes on │ 0 – 15 │ 16 – 31 │ … │
        slot 2, 32 * num_heads bytes on │ 0 – 15 │ 16 – 31 │ … │
        slot 3, 48 * num_heads bytes on │ 0 – 15 │ 16 – 31 │ … │
                                        └────────┴─────────┴───┘""")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_last_corner_is_the_last_byte_of_the_page(layout):
    for buffer in layout.buffers:
        page = sizes.page_bytes(layout, buffer).value
        lines = picture.page(layout, buffer)
        ends = [int(end) for line in lines for end in re.findall(r" – (\d+)", line)]
        if page is not None and not any("bytes on" in line for line in lines):
            assert max(ends) == page - 1
        assert max(map(len, lines)) <= picture.WIDTH


def test_amounts():
    blocks = Amount.of("num_blocks")
    assert str(blocks * 16 + 4) == "16 * num_blocks + 4"
    assert (blocks * 16 + 4).at({"num_blocks": 3}).value == 52
    assert (blocks * 16).per("num_blocks").value == 16
    assert (Amount.of(3).per(2)).plain == "1.50"
    assert (blocks + blocks * -1).value == 0
