"""Scales of every encoding: computed, rounded, stored, handed in, and the codes they give."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from kvgen import reference
from kvgen.axes import Axis
from kvgen.quant import MODES, encode, fp8, int8, mx
from kvgen.quant.rows import argument_scale, counts, decode_rows, encode_rows, stored_scale
from kvgen.quant.scales import dynamic_scale, group_amax, load, store
from kvgen.resolve import load_text
from tests.generated import module_of
from tests.quantised import FP8, GRIDS, INF, LARGEST, NAN, bits, encoding_of, hexes, scale_of, stream_of


@pytest.mark.parametrize(
    ("amax", "byte"),
    [(448, 0x7F), (449, 0x80), (1, 0x77), (1e-3, 0x6D), (0, 0), (1e-30, 0x13), (1e38, 0xF5), (INF, 0xF7), (1e-45, 0)],
)
def test_mxfp8_scale_bytes(amax: float, byte: int) -> None:
    encoding = encoding_of("mxfp8", Axis("dim", 64, 32))
    made = dynamic_scale(encoding.scale, group_amax(torch.tensor([[amax] * 64]), [Axis("dim", 64)], encoding.scale))
    assert made.stored.tolist() == [[byte, byte]]
    assert made.stored.dtype == torch.uint8
    assert made.value.tolist() == [[2.0 ** (byte - 127)] * 2]


def test_e8m0_values() -> None:
    """Byte 0 is 2^-127, which is subnormal; 255 is NaN."""
    values = mx.e8m0_value(torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8))
    assert bits(values[:4]) == [0x00400000, 0x00800000, 0x3F800000, 0x7F000000]
    assert values[4].isnan()
    assert mx.e8m0_byte(torch.tensor([-400, -127, 0, 127, 128])).tolist() == [0, 0, 127, 254, 254]


@pytest.mark.parametrize(("code_range", "shift", "mantissa"), [(448.0, 8, 0x600000), (6.0, 2, 0x400000)])
def test_powers_of_two_are_exact(code_range: float, shift: int, mantissa: int) -> None:
    """The published rule on the bits of amax, over every exponent and the mantissas where a logarithm goes wrong."""
    fields = torch.arange(0, 255, dtype=torch.int32).repeat_interleave(9)
    near = [0, 1, mantissa - 1, mantissa, mantissa + 1, 0x3FFFFF, 0x5FFFFF, 0x7FFFFE, 0x7FFFFF]
    words = (fields << 23) | torch.tensor(near * 255, dtype=torch.int32)
    expected = fields - shift + (torch.tensor(near * 255) > mantissa)
    scale = scale_of("mxfp8", Axis("dim", 32, 32), code_range=code_range)
    assert torch.equal(dynamic_scale(scale, words.view(torch.float32)).stored, expected.clamp(0, 254).to(torch.uint8))
    for rounding in ("ceil", "floor"):
        scale = scale_of("fp8_e4m3", grid="pow2", exponent=rounding, code_range=code_range, floor_on=None)
        found = dynamic_scale(scale, words.view(torch.float32)).value.double()
        for amax, power in zip(words.view(torch.float32).tolist(), found.tolist(), strict=True):
            quotient = Fraction(amax) / Fraction(code_range)
            if quotient < Fraction(2) ** -126:
                continue
            low, high = (power / 2, power) if rounding == "ceil" else (power, power * 2)
            assert Fraction(low) <= quotient <= Fraction(high)
            assert quotient != Fraction(low if rounding == "ceil" else high)


def test_record_bytes() -> None:
    """The MLA record: four scales, powers of two, with the floor on amax / 448 before the power is taken."""
    group = Axis("dim", 512, 128)
    encoding = encoding_of("fp8_e4m3", group, grid="pow2", floor=1e-4)
    stream = stream_of(encoding, 512)
    rows = encode_rows(stream, torch.ones(1, 512).bfloat16(), None)
    assert hexes(rows["key"]) == " ".join(["78"] * 512)
    assert hexes(rows["key.scale"]) == " ".join(["00 00 80 3B"] * 4)
    floored = encode_rows(stream, torch.zeros(1, 512), None)
    assert floored["key.scale"].tolist() == [[2.0**-13] * 4]
    assert not floored["key"].any()
    plain = encode_rows(stream_of(encoding_of("fp8_e4m3", group), 512), torch.ones(1, 512), None)
    assert plain["key.scale"].tolist() == [[torch.tensor(1.0).div(448).item()] * 4]


@pytest.mark.parametrize("grid", ["any", "pow2"])
def test_indexer_scale(grid: str) -> None:
    """max(amax, 1e-4) / 448, optionally the power of two above it."""
    encoding = encoding_of("fp8_e4m3", floor_on="amax", floor=1e-4, grid=grid)
    stream = stream_of(encoding, 128)
    rows = encode_rows(
        stream, torch.stack([torch.zeros(128), torch.full((128,), 5e-5), torch.full((128,), -3.5)]), None
    )
    small, seven = torch.tensor(1e-4).div(448).item(), torch.tensor(3.5).div(448).item()
    expected = [small, small, seven] if grid == "any" else [2.0**-22, 2.0**-22, 2.0**-7]
    assert rows["key.scale"].flatten().tolist() == expected
    assert rows["key"][0].unique().tolist() == [0]
    assert rows["key"][2].unique().tolist() == [0xFE]


@pytest.mark.parametrize(("mode", "largest"), [("fp8_e4m3", 448), ("int8", 127)])
def test_packed_token_head_scale(mode: str, largest: int) -> None:
    """max(amax / Q, 1e-6), and a product with the inverse rounded to float32."""
    encoding = encoding_of(mode, Axis("head", 3), floor=1e-6, arithmetic="multiply", rounding="away")
    stream = stream_of(encoding, 3, 16)
    values = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(1))
    values[1], values[2] = 0, 1e-9
    rows = encode_rows(stream, values, None)
    scale = values.abs().amax(-1, keepdim=True) / torch.tensor(float(largest))
    scale = scale.clamp(min=torch.tensor(1e-6).item())
    assert torch.equal(rows["key.scale"], scale)
    scaled = values * (1 / scale)
    wanted = fp8.encode(GRIDS[0], scaled) if mode == "fp8_e4m3" else int8.round_away(scaled).clamp(-127, 127)
    assert torch.equal(rows["key"].float(), wanted.float())


def test_inverse_is_used_as_it_came() -> None:
    encoding = encoding_of("int8", dynamic=False, arithmetic="multiply", given="inverse")
    given = argument_scale(encoding.scale, torch.tensor([3.0]), [1], 0)
    assert given.scale.item() == torch.tensor(1.0).div(3).item()
    assert encode(encoding, torch.tensor([0.5]), given.scale, given.inverse).item() == 2
    given = argument_scale(encoding.scale, torch.tensor([13.0]), [1], 0)
    assert (1 / given.scale).item() != 13.0
    values = torch.tensor([0.5, 1.5])  # 6.5 and 19.5: ties, to 6 and 20
    assert encode(encoding, values, given.scale, given.inverse).flatten().tolist() == [6, 20]
    assert encode(encoding, values, given.scale).flatten().tolist() != [6, 20]


def test_stored_scale_of_zero_counts_when_the_exact_one_encodes() -> None:
    """A float16 scale that vanishes: its codes are 0, although the exact scale is not."""
    for mode in ("fp8_e4m3", "int8"):
        encoding = encoding_of(mode, dtype="float16", floor_on=None, encode="exact")
        rows = encode_rows(stream_of(encoding, 4), torch.tensor([[1e-6, -1e-6, 5e-7, 0]]), None)
        assert rows["key.scale"].item() == 0
        assert not rows["key"].any()


@pytest.mark.parametrize("mode", [*FP8, "int8", "mxfp8"])
def test_zero_groups(mode: str) -> None:
    """A zero group stores the floor and codes of 0, and decodes to exactly 0."""
    axis = [Axis("dim", 64, 32)] if mode == "mxfp8" else []
    encoding = encoding_of(mode, *axis)
    stream = stream_of(encoding, 64)
    rows = encode_rows(stream, torch.zeros(2, 64), None)
    assert not rows["key"].any()
    floor = 2.0**-127 if mode == "mxfp8" else torch.tensor(MODES[mode].floor).item()
    given = stored_scale(encoding.scale, rows["key.scale"])
    assert given.scale.unique().tolist() == [floor]
    assert bits(decode_rows(stream, rows["key"], given)) == [0] * 128


def test_amax_of_what_is_not_finite() -> None:
    """NaN does not count, an infinity counts as the largest float32; NaN has a code, or is 0 in integers."""
    rows = torch.tensor([[NAN, 1.0, -2.0], [NAN, NAN, NAN], [INF, 1.0, NAN], [-INF, 0.0, 3e38]])
    for mode, codes in (("fp8_e4m3", ["7F 76 FE", "7F 7F 7F", "7E 00 7F", "FE 00 7C"]), ("int8", None)):
        encoding = encoding_of(mode)
        found = encode_rows(stream_of(encoding, 3), rows, None)
        amax = torch.tensor([2.0, 0.0, LARGEST, LARGEST])
        floor = torch.tensor(MODES[mode].floor)
        assert torch.equal(found["key.scale"].flatten(), torch.maximum(amax / MODES[mode].code_range, floor))
        if codes:
            assert [hexes(row) for row in found["key"]] == codes
        else:
            assert found["key"].tolist() == [[0, 64, -127], [0, 0, 0], [127, 0, 0], [-127, 0, 112]]


@pytest.mark.parametrize(
    ("dtype", "value", "element"),
    [
        ("float32", 1.1, 1.100000023841858),
        ("float16", 1.1, 1.099609375),
        ("float16", 1e6, 65504.0),
        ("float16", 2.0**-25, 0.0),
        ("bfloat16", 1.1, 1.1015625),
        ("bfloat16", LARGEST, 3.3895313892515355e38),
        ("float8_e4m3fn", 1.1, 1.125),
        ("float8_e4m3fn", 5000.0, 448.0),
        ("float8_e4m3fn", 2.0**-10, 0.0),
    ],
)
def test_scales_are_rounded_and_saturate(dtype: str, value: float, element: float) -> None:
    stored = store(dtype, torch.tensor([value]))
    assert stored.dtype == (torch.uint8 if dtype.startswith("float8") else getattr(torch, dtype))
    assert load(dtype, stored).item() == element


def test_computed_scales_saturate() -> None:
    scale = scale_of("fp8_e4m3", code_range=0.5, encode="exact")
    for grid in ("any", "pow2"):
        made = dynamic_scale(replace(scale, grid=grid), torch.tensor([3e38]))
        assert made.exact.item() == made.stored.item() == LARGEST


def test_the_stored_scale_encodes() -> None:
    """With float16, e4m3 and powers of two the two scales differ; what is decoded with is what was encoded with."""
    values = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    for dtype, grid in (("float16", "any"), ("float8_e4m3fn", "any"), ("float32", "pow2"), ("float8_e8m0fnu", "any")):
        made = {}
        for which in ("stored", "exact"):
            encoding = encoding_of("int8", dtype=dtype, grid=grid, encode=which, floor_on=None)
            rows = encode_rows(stream_of(encoding, 32), values, None)
            made[which] = rows["key"]
            stored = load(dtype, rows["key.scale"])
            used = stored if which == "stored" else values.abs().amax(1, keepdim=True) / torch.tensor(127.0)
            assert torch.equal(rows["key"], (values / used).round().clamp(-127, 127).to(torch.int8))
        assert not torch.equal(made["stored"], made["exact"])


def test_groups_with_a_short_last_one() -> None:
    """46 dims by 16: 16, 16 and 14."""
    encoding = encoding_of("int8", Axis("head", 2), Axis("dim", 46, 16))
    stream = stream_of(encoding, 2, 46)
    assert counts(stream, encoding.scale, [2, 46]) == [2, 3]
    values = torch.arange(1, 93, dtype=torch.float32).view(1, 2, 46)
    rows = encode_rows(stream, values, None)
    amax = [[16, 32, 46], [62, 78, 92]]
    assert torch.equal(rows["key.scale"][0], torch.tensor(amax) / torch.tensor(127.0))
    assert rows["key"][0, :, [15, 31, 45]].tolist() == [[127] * 3, [127] * 3]
    given = stored_scale(encoding.scale, rows["key.scale"])
    assert (decode_rows(stream, rows["key"], given) - values).abs().max() < 0.5


@pytest.mark.parametrize(
    ("axes", "shape"),
    [((), [1]), ((Axis("head", 3),), [3]), ((Axis("dim", 4),), [4]), ((Axis("head", 3), Axis("dim", 4, 2)), [3, 2])],
)
def test_static_scales_reach_their_values(axes: tuple[Axis, ...], shape: list[int]) -> None:
    encoding = encoding_of("int8", *axes, dynamic=False)
    stream = stream_of(encoding, 3, 4)
    tensor = torch.arange(1, 1 + math.prod(shape), dtype=torch.float32).view(shape)
    given = argument_scale(encoding.scale, tensor, counts(stream, encoding.scale, [3, 4]), 0)
    rows = encode_rows(stream, torch.full((2, 3, 4), 12.0), given)
    assert rows.keys() == {"key"}
    names = [axis.name for axis in axes]
    wide = tensor.view(*(shape[0:1] if "head" in names else [1]), *(shape[-1:] if "dim" in names else [1]))
    wide = wide.repeat_interleave(4 // wide.shape[1], 1).expand(3, 4)
    assert torch.equal(rows["key"][1].float(), (12.0 / wide).round())
    assert torch.equal(decode_rows(stream, rows["key"], given)[0], (12.0 / wide).round() * wide)


def test_layered_scales() -> None:
    encoding = encoding_of("int8", Axis("layer", 3), Axis("head", 2), dynamic=False)
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    assert argument_scale(encoding.scale, tensor, [2, 1], 1).scale.tolist() == [[[3.0], [4.0]]]


OUTER = {
    "nvfp4": "mode: nvfp4",
    "nvfp4_pow2": "mode: nvfp4, scale: {grid: pow2, encode: exact}",
    "mxfp8_floor": "mode: mxfp8, scale: {exponent: floor, scale: {per: []}}",
}


@pytest.mark.parametrize("quant", OUTER.values(), ids=OUTER)
def test_outer_scales_that_are_not_positive(quant: str) -> None:
    """Kernel and reference agree in bits. Codes are 0, but for e8m0; readers see 0, or NaN where it is no number."""
    head = "name: outer\naxes: {head: 1, dim: 32}\nblock_size: 8\n"
    group, exact = ("dim//16", True) if "nvfp4" in quant else ("dim//32", False)
    buffers = f"buffers: {{cache: {{order: block slot head, fields: [key, {{key.scale: {group}}}]}}}}\n"
    layout = load_text(f"{head}streams: {{key: {{dtype: float32, quant: {{{quant}}}}}}}\n{buffers}")
    module, slots = module_of(layout), torch.arange(3)
    rows = torch.stack([torch.linspace(-3, 5, 32), torch.zeros(32), torch.full((32,), 1e30)]).view(3, 1, 32)
    for outer in (-1.0, -0.0, 0.0, -INF, INF, NAN, -1e-45, 0.5):
        caches, given = [module.allocate(1) for _ in range(2)], torch.tensor([outer])
        module.append(rows, caches[0], slots, given)
        reference.append(layout, {"key": rows}, {"cache": caches[1]}, slots, scales={"key_scale_scale": given})
        assert torch.equal(*(cache.view(torch.uint8) for cache in caches)), outer
        if exact:
            assert bool(caches[0].view(torch.uint8)[0, 0, 0, :16].any()) is (outer == 0.5)
        if exact and outer != 0.5:
            read = module.gather(caches[0], slots, given, dtype=torch.float32)
            nothing = torch.full_like(read, 0.0 if math.isfinite(outer) else NAN)
            assert torch.equal(read.nan_to_num(7.0), nothing.nan_to_num(7.0)), outer
