"""Codes narrower than a byte, zeros, scales of scales, stored static scales, streams in several places."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.axes import Axis, Digit
from kvgen.canonical import canonical
from kvgen.diagnostics import KvgenError
from kvgen.encodings import append_refusal
from kvgen.layout import Dim, Encoding, Holds, Layout, Leaf, Place, Scale, Zero
from kvgen.packing import Pack, PackingError, pack_of, packed, unpacked
from kvgen.resolve import load_text

BLOCK, SLOT, HEAD, DIM = Axis("block", None), Axis("slot", 16), Axis("head", 8), Axis("dim", 128)
TOKEN = (BLOCK, SLOT)
STATIC = "scale: {per: [], source: static}"


def layout(quant: str, buffers: str, dim: int = 128, streams: str = "") -> Layout:
    return load_text(
        f"name: s\naxes: {{head: 8, dim: {dim}}}\nblock_size: 16\n"
        f"streams: {{key: {{quant: {{{quant}}}}}{streams}}}\nbuffers: {{{buffers}}}\n"
    )


def codes(*arguments: str, **more: str) -> list[str]:
    with pytest.raises(KvgenError) as caught:
        layout(*arguments, **more)
    return [diagnostic.code for diagnostic in caught.value.diagnostics]


def place(order: str, dim: int = 128) -> Place:
    return layout(f"mode: int4, {STATIC}", f"c: {{key: {order}}}", dim).buffers[0].place


@pytest.mark.parametrize(
    ("order", "dim", "pack", "last"),
    [
        ("block slot head dim", 128, (1, 2), [(2, 64)]),
        ("block slot head dim", 46, (1, 2), [(2, 23)]),
        ("block slot head dim", 2, (1, 2), [(2, 1)]),
        ("block slot head (dim//32 dim%16 dim//16%2)", 128, (16, 2), [(32, 4), (1, 16), (32, 1)]),
        ("block head dim//32 slot dim%32", 128, (1, 2), [(2, 16)]),
        ("block slot head dim//2 dim%2", 128, (1, 2), [(2, 1)]),
        ("block slot head dim%64 dim//64", 128, (64, 2), [(128, 1)]),
        ("block slot head dim%8 dim//8", 128, (8, 2), [(16, 8)]),
    ],
)
def test_the_fastest_digit_is_counted_in_bytes(order: str, dim: int, pack, last):
    found = place(order, dim)
    assert found.content == Holds(("key",), 1, Digit("dim", *pack))
    assert found.dims[-1] == Dim(tuple(Digit("dim", *digit) for digit in last))


def test_dimensions_of_size_one_are_passed_over():
    found = place("block slot head dim 1 dim//2%1")
    assert found.dims[3:] == (Dim((Digit("dim", 2, 64),)), Dim(()), Dim(()))
    text = "name: s\naxes: {dim: 8}\nblock_size: 1\n"
    text += f"streams: {{key: {{quant: {{mode: int4, {STATIC}}}}}}}\nbuffers: {{c: {{key: block dim slot}}}}\n"
    assert load_text(text).buffers[0].place.dims[1:] == (Dim((Digit("dim", 2, 4),)), Dim((Digit("slot", 1, 1),)))
    assert load_text(canonical(load_text(text))) == load_text(text)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
@settings(max_examples=200, derandomize=True, database=None, deadline=None)
def test_every_code_has_a_nibble_of_its_own(sizes: list[int], data: st.DataObject):
    """The byte and the nibble of each dim, told by the place's dims and pack, are those of its rank in the order."""
    sizes = [1 << size for size in sizes]
    digits, div = [], 1
    for size in sizes:
        digits.append(Digit("dim", div, size))
        div *= size
    digits = data.draw(st.permutations(digits))
    leaf = Leaf("key", "key", (*TOKEN, Axis("dim", div)), ("uint8",), 1)
    dims, pack = packed(leaf, [Dim((digit,)) for digit in digits], pack_of(4))
    assert unpacked(Place(dims, Holds(("key",), 1, pack))) == tuple(Dim((digit,)) for digit in digits)
    for dim in range(div):
        rank = byte = 0
        for digit in digits:
            rank = rank * digit.size + digit.of(dim)
        for digit in (d for each in dims for d in each.digits):
            byte = byte * digit.size + digit.of(dim)
        assert (byte, pack.of(dim)) == divmod(rank, 2)


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ("block head dim slot", "2 tokens"),
        ("block slot dim head", "2 heads"),
        ("slot head dim block", "2 blocks"),
        ("block slot head dim%3 dim//3", "3 dims apart"),
        ("block slot head dim//3 dim%3", "do not fill bytes of 2"),
    ],
)
def test_codes_that_cannot_share_a_byte(order: str, why: str):
    with pytest.raises(KvgenError) as caught:
        place(order, 96)
    (problem,) = caught.value.diagnostics
    assert problem.code == "KV314"
    assert why in problem.message
    assert problem.hint


def test_a_place_of_one_code():
    leaf = Leaf("key", "key", (*TOKEN, DIM), ("uint8",), 1)
    with pytest.raises(PackingError, match="this place holds one"):
        packed(leaf, [], pack_of(4))


@pytest.mark.parametrize(("bits", "pack"), [(4, Pack(2, 1)), (2, Pack(4, 1)), (3, Pack(8, 3)), (6, Pack(4, 3))])
def test_the_fewest_codes_that_end_at_a_byte(bits: int, pack: Pack):
    assert pack_of(bits) == pack


@pytest.mark.parametrize(
    ("order", "outer", "inner", "pack"),
    [
        ("block slot head dim", 3, [(8, 16)], (1, 8)),
        ("block slot head dim//16 dim%16", 4, [(8, 2)], (1, 8)),
        ("block slot (head dim)", 2, [("head", 1, 8), (8, 16)], (1, 8)),
        ("block slot head dim//32 (dim%4 dim//4%8)", 4, [(1, 4), (32, 1)], (4, 8)),
    ],
)
def test_codes_of_three_bits_make_the_last_dimension_one_of_bytes(order: str, outer: int, inner: list, pack):
    """Eight of them in three bytes: the place is the only field of a record."""
    scales = "s: {key.scale: block slot head dim//16}"
    found = layout("mode: turbo3", f"c: {{key: {order}}}, {scales}")
    (field,) = found.buffers[0].place.content.fields
    digits = tuple(Digit(*digit) if len(digit) == 3 else Digit("dim", *digit) for digit in inner)
    assert field.content == Place((Dim(digits),), Holds(("key",), 3, Digit("dim", *pack)))
    assert field.content.content.bits == 3
    assert (len(found.buffers[0].place.dims), found.buffers[0].unit, found.buffers[0].dtypes) == (outer, 1, ("uint8",))
    assert load_text(canonical(found)) == found


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ("block head dim slot", "3 bytes would hold codes of `key` of 8 tokens"),
        ("block slot head dim//4 dim%4", "4 codes of `key` do not fill 3 bytes of 8"),
        ("slot head (block dim)", "the last dimension counts bytes, 3 of each 8 codes"),
    ],
)
def test_codes_of_three_bits_that_cannot_share_bytes(order: str, why: str):
    with pytest.raises(KvgenError) as caught:
        layout("mode: turbo3", f"c: {{key: {order}}}, s: {{key.scale: block slot head dim//16}}")
    (problem,) = caught.value.diagnostics
    assert (problem.code, why in problem.message) == ("KV314", True), problem.message


@pytest.mark.parametrize("group", [2, 16, 32, 64, 128, 200])
def test_groups_that_tiles_can_hold(group: int):
    quant = f"mode: int4, scale: {{per: token dim//{group}}}"
    buffers = f"c: {{key: block slot head dim}}, s: {{key.scale: token dim//{group}}}"
    assert layout(quant, buffers).streams[0].scale.axes[-1] == Axis("dim", 128, group)
    assert codes(quant.replace(str(group), "24"), buffers.replace(str(group), "24")) == ["KV314"]


@pytest.mark.parametrize(
    ("mode", "code", "code_range", "dtype", "clamp"),
    [
        ("int4", "int4", 7.0, "float16", (-7, 7)),
        ("int4_asymmetric", "uint4", 15.0, "float16", (0, 15)),
        ("nvfp4", "e2m1", 6.0, "float8_e4m3fn", None),
        ("mxfp4", "e2m1", 6.0, "float8_e8m0fnu", None),
    ],
)
def test_what_a_mode_implies(mode: str, code: str, code_range: float, dtype: str, clamp):
    buffers = "c: {order: token head, fields: [{key: dim}, {key.scale: dim//16}ZERO]}"
    zero = Zero("key.zero", "minimum", "float16") if mode == "int4_asymmetric" else None
    buffers = buffers.replace("ZERO", ", {key.zero: dim//16}" if zero else "")
    found = layout(f"mode: {mode}, scale: {{per: token head dim//16}}", buffers)
    outer = Scale("key.scale.scale", (), False, "float32", stored=False, code_range=1.0) if mode == "nvfp4" else None
    grid = "pow2" if mode == "mxfp4" else "any"
    axes = (*TOKEN, HEAD, Axis("dim", 128, 16))
    scale = Scale("key.scale", axes, True, dtype, stored=True, grid=grid, code_range=code_range, scale=outer)
    assert found.streams[0].encoding == Encoding(mode, code, clamp=clamp, scale=scale, zero=zero)
    assert found.leaves[0] == Leaf("key", "key", (*TOKEN, HEAD, DIM), ("uint8",), 1)
    assert [leaf.name for leaf in found.leaves] == ["key", "key.scale", "key.zero"][: 3 if zero else 2]
    assert found.buffers[0].dtypes == ("uint8",)
    if outer:
        assert (outer.argument, scale.argument) == ("key_scale_scale", "key_scale")


@pytest.mark.parametrize(("mode", "group"), [("nvfp4", 16), ("mxfp4", 32)])
def test_modes_that_know_their_groups(mode: str, group: int):
    found = layout(f"mode: {mode}", f"c: {{order: token head, fields: [{{key: dim}}, {{key.scale: dim//{group}}}]}}")
    assert found.streams[0].group == group


def test_zeros():
    buffers = "c: {key: block slot head dim}, p: {order: token head, fields: [key.scale, key.zero]}"
    quant = "mode: int4_asymmetric, zero: {kind: point, clamped: true}, scale: {per: token head}"
    found = layout(quant, buffers)
    assert found.streams[0].encoding.zero == Zero("key.zero", "point", "uint8", clamped=True)
    assert found.leaves[2] == Leaf("key.zero", "key", (*TOKEN, HEAD), ("uint8",), 1)
    assert (found.buffers[1].unit, found.buffers[1].dtypes) == (1, ("uint8",))
    minimum = layout(quant.replace("zero: {kind: point, clamped: true}, ", ""), buffers)
    assert (minimum.buffers[1].unit, minimum.buffers[1].dtypes) == (2, ("float16",))
    assert codes(quant, buffers.replace(", key.zero", "")) == ["KV401"]
    assert codes(quant, buffers.replace("key.scale, ", "")) == ["KV401"]


@pytest.mark.parametrize(
    ("per", "order", "axes"),
    [
        ("block", "block", (BLOCK,)),
        ("block head", "head block", (BLOCK, HEAD)),
        ("block dim//64", "block dim//64", (BLOCK, Axis("dim", 128, 64))),
        ("token head", "block slot head", (*TOKEN, HEAD)),
    ],
)
def test_static_scales_that_are_stored(per: str, order: str, axes: tuple[Axis, ...]):
    quant = f"mode: int8, scale: {{per: {per}, source: static}}"
    found = layout(quant, f"c: {{key: block slot head dim}}, s: {{key.scale: {order}}}")
    scale = found.streams[0].scale
    assert (scale.axes, scale.stored, scale.dynamic) == (axes, True, False)
    assert found.leaves[1].axes == axes
    assert append_refusal(found, "key") is None
    assert load_text(canonical(found)) == found
    assert codes(quant, "c: {key: block slot head dim}") == ["KV401"]


@pytest.mark.parametrize("order", ["block slot", "token", "block slot//2", "block block", "head"])
def test_orders_of_a_scale_per_block(order: str):
    quant = "mode: int8, scale: {per: block, source: static}"
    found = codes(quant, f"c: {{key: block slot head dim}}, s: {{key.scale: {order}}}")
    assert found == ["KV305" if order == "block block" else "KV306"]


@pytest.mark.parametrize(
    ("per", "order", "words"),
    [
        ("token//4 head dim", "token//4 head dim", "4 tokens share"),
        ("token//16", "token//16", "16 tokens share"),
        ("block head, source: dynamic", "block head", "all tokens of a block share"),
        ("token", "token", None),
        ("head, source: static", None, None),
    ],
)
def test_streams_that_cannot_be_appended(per: str, order: str | None, words: str | None):
    buffers = "c: {key: block slot head dim}" + (f", s: {{key.scale: {order}}}" if order else "")
    buffers += ", v: {value: token head dim}"
    found = layout(f"mode: int8, scale: {{per: {per}}}", buffers, streams=", value: {}")
    reason = append_refusal(found, "key")
    assert (reason is None) if words is None else words in reason
    assert append_refusal(found, "value") is None
    assert load_text(canonical(found)) == found


def test_streams_in_several_places():
    quant = "mode: int8, scale: {per: token head}"
    row = "{order: token head, fields: [key, key.scale]}"
    each = layout(quant, f"a: {row}, b: {row}")
    assert [buffer.place for buffer in each.buffers] == [each.buffers[0].place] * 2
    once = layout(quant, f"a: {row}, b: {{key: token head dim}}, c: {{key: token head dim}}")
    assert load_text(canonical(once)) == once
    assert codes(quant, f"a: {row}, b: {row}, c: {{key: token head dim}}") == ["KV402"]
    assert codes(quant, "a: {key: layer token head dim}, b: {order: token head, fields: [key, key.scale]}") == ["KV313"]
    assert codes(quant, "a: {holds: [key, key], order: kv token head dim}, s: {key.scale: token head}") == ["KV307"]


def test_names_that_scales_of_scales_and_zeros_have_taken():
    row = "{order: token head, fields: [{key: dim}, {key.scale: dim//16}]}"
    assert codes("mode: nvfp4", f"key_scale_scale: {row}") == ["KV205"]
    row = "{order: token, fields: [{key: head dim}, key.scale, key.zero]}"
    assert codes("mode: int4_asymmetric, scale: {per: token}", f"key_zero: {row}") == ["KV205"]
