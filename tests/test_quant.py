"""Encodings in PyTorch: published byte vectors, edge values, rounding rules, and accuracy."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from kvgen.axes import Axis
from kvgen.layout import Encoding, Scale, Stream
from kvgen.quant import MODES, casts, decode, encode, fp8, int8, mx
from kvgen.quant.rows import argument_scale, counts, decode_rows, encode_rows, stored_scale
from kvgen.quant.scales import dynamic_scale, group_amax, load, store

INF, NAN, TINY, LARGEST = math.inf, math.nan, 2.0**-126, torch.finfo(torch.float32).max
FP8 = ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz")
GRIDS = tuple(fp8.GRIDS.values())
TOKEN = (Axis("block", None), Axis("slot", 16))


def hexes(codes: Tensor) -> str:
    return " ".join(f"{code:02X}" for code in codes.flatten().view(torch.uint8).tolist())


def numbers(text: str) -> list[float]:
    """``2^-9`` and plain numbers, also a product of both."""
    return [float(eval(word.replace("^", "**"), {"nan": NAN, "inf": INF})) for word in text.split()]


def bits(values: Tensor) -> list[int]:
    return values.contiguous().view(torch.int32).flatten().tolist()


def scale_of(mode: str, *axes: Axis, dynamic: bool = True, **options) -> Scale:
    """A scale with the defaults of its mode, for ``axes`` of the stream."""
    facts = MODES[mode]
    found = {"dtype": facts.scale_dtype, "code_range": facts.code_range}
    found |= {"floor_on": "scale", "floor": facts.floor} if facts.floor else {}
    return Scale("key.scale", (*TOKEN, *axes) if dynamic else axes, dynamic, stored=dynamic, **(found | options))


def encoding_of(mode: str, *axes: Axis, rounding: str = "even", clamp=None, **options) -> Encoding:
    clamp = clamp or MODES[mode].clamp
    return Encoding(mode, MODES[mode].code, rounding, clamp, scale_of(mode, *axes, **options))


def stream_of(encoding: Encoding, *extents: int) -> Stream:
    names = ("head", "dim")[-len(extents) :]
    axes = tuple(Axis(name, extent) for name, extent in zip(names, extents, strict=True))
    return Stream("key", axes, ("bfloat16", "float16", "float32"), 2, encoding)


def computed(encoding: Encoding, amax: float) -> Tensor:
    """The stored scale of a group with that largest magnitude."""
    return dynamic_scale(encoding.scale, torch.tensor([amax])).stored


def test_facts_need_no_torch() -> None:
    code = "import sys, kvgen.quant, kvgen.quant.scales, kvgen.quant.rows; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("grid", "values", "codes"),
    [
        ("float8_e4m3fn", "0 -0.0 1 -1 448 464 1e6 -1e6", "00 80 38 B8 7E 7E 7E FE"),
        ("float8_e4m3fn", "2^-9 2^-10 0.75*2^-9 7.5*2^-9 2^-6", "01 00 01 08 08"),
        ("float8_e4m3fn", "1.0625 1.1875 126.24 470", "38 3A 70 7E"),
        ("float8_e4m3fn", "nan -nan inf -inf 1.5*2^-9 2.5*2^-9 -2^-10 1e-45", "7F 7F 7E FE 02 02 80 00"),
        ("float8_e5m2", "1 -0.0 1.125 57344 61440 2^-16", "3C 80 3C 7B 7B 01"),
        ("float8_e5m2", "nan -nan inf -inf 2^-17 1.5*2^-16 1.375 -1e38", "7F 7F 7B FB 00 02 3E FB"),
        ("float8_e4m3fnuz", "1 -0.0 240 248 2^-10", "40 00 7F 7F 01"),
        ("float8_e4m3fnuz", "nan -nan inf -inf -2^-11 2^-7 -240 1e38", "80 80 7F FF 00 08 FF 7F"),
        ("float8_e5m2fnuz", "1 -0.0 57344 61440 2^-17 nan -inf -2^-18", "40 00 7F 7F 01 80 FF 00"),
    ],
)
def test_float8_bytes(grid: str, values: str, codes: str) -> None:
    assert hexes(fp8.encode(fp8.GRIDS[grid], torch.tensor(numbers(values)))) == codes


@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: g.name)
def test_float8_codes_come_back(grid: fp8.Grid) -> None:
    """Every code that encoding makes decodes to a value that encodes to it."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = fp8.decode(grid, codes)
    torch_values = codes.view(getattr(torch, grid.name)).float()
    assert torch.equal(values.isnan(), torch_values.isnan())
    real = ~values.isnan()
    assert bits(values[real]) == bits(torch_values[real])
    finite = values.isfinite()
    assert torch.equal(fp8.encode(grid, values[finite]), codes[finite])
    assert values[finite].abs().max() == grid.largest
    assert fp8.encode(grid, torch.tensor([NAN])).item() == grid.nan


@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: g.name)
def test_float8_rounds_to_the_nearest(grid: fp8.Grid) -> None:
    """Between any two neighbours: just under, at and just over the middle, ties to the even code, both signs."""
    for code in range(grid.max_code):
        low, high = grid.value(code), grid.value(code + 1)
        middle = torch.tensor((low + high) / 2)
        assert middle.item() == (Fraction(low) + Fraction(high)) / 2
        under, over = middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(INF))
        wanted = [code, code + code % 2, code + 1]
        assert fp8.encode(grid, torch.stack([under, middle, over])).tolist() == wanted
        negative = [c | 0x80 if c or grid.signed_zero else 0 for c in wanted]
        assert fp8.encode(grid, -torch.stack([under, middle, over])).tolist() == negative


@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: g.name)
def test_float8_over_all_16_bit_values(grid: fp8.Grid) -> None:
    """Equal to the cast of this library's version, clamped before it, over every bfloat16 and float16."""
    words = torch.arange(-(2**15), 2**15, dtype=torch.int32).short()
    values = torch.cat([words.view(torch.bfloat16).float(), words.view(torch.float16).float()])
    values = values[~values.isnan()]
    native = values.clamp(-grid.largest, grid.largest).to(getattr(torch, grid.name)).view(torch.uint8)
    assert torch.equal(fp8.encode(grid, values), native)


def test_int8_bytes() -> None:
    stream = stream_of(encoding_of("int8"), 8)
    row = torch.tensor([[-2, -1, -0.5, 0, 0.25, 0.5, 1, 2]])
    rows = encode_rows(stream, row, None)
    assert rows["key"].tolist() == [[-127, -64, -32, 0, 16, 32, 64, 127]]
    assert rows["key"].dtype == torch.int8
    assert rows["key.scale"].flatten().tolist() == [torch.tensor(2.0).div(127).item()]


def test_int8_rounding_and_clamp() -> None:
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997, -0.49999997, 126.5, 127.5, -127.5, -128.5, 130, -300])
    edges = torch.tensor([NAN, -NAN, INF, -INF, -0.0, 1e-45, 3e38])
    values = torch.cat([values, edges])
    even, away = Encoding("int8", "int8"), Encoding("int8", "int8", "away")
    wide = Encoding("int8", "int8", clamp=(-128, 127))
    tail = [0, 0, 127, -127, 0, 0, 127]
    assert encode(even, values).tolist() == [0, 2, 2, 0, -2, 0, 0, 126, 127, -127, -127, 127, -127, *tail]
    assert encode(away, values).tolist() == [1, 2, 3, -1, -2, 0, 0, 127, 127, -127, -127, 127, -127, *tail]
    assert encode(wide, values)[8:13].tolist() == [127, -128, -128, 127, -128]
    assert decode(even, torch.tensor([-128, 127], dtype=torch.int8)).tolist() == [-128.0, 127.0]


def test_int8_rounds_away_exactly() -> None:
    """Against whole numbers: adding a half in float32 is wrong beside a half and past 2^22."""
    values = torch.tensor([0.49999997, 1.5, 8388607.5, 8388609.0, 4194304.5, -2.5, -4194305.5])
    assert int8.round_away(values).tolist() == [0, 2, 8388608, 8388609, 4194305, -3, -4194306]


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


def test_arithmetics_differ_and_are_clamped() -> None:
    """Both pass the largest code at the amax element of some rows, and never their clamp."""
    values = torch.rand(20000, generator=torch.Generator().manual_seed(3)) * 10 + 1e-3
    found = {}
    for arithmetic in ("divide", "multiply"):
        for mode in ("fp8_e4m3", "int8"):
            encoding = encoding_of(mode, arithmetic=arithmetic)
            scale = dynamic_scale(encoding.scale, values).value
            found[mode, arithmetic] = encode(encoding, values * 0.37, scale)
            top = encode(encoding, values, scale)
            assert top.unique().tolist() == ([0x7E] if mode == "fp8_e4m3" else [127])
    assert ((values / dynamic_scale(encoding.scale, values).value) > 127).float().mean() > 0.1
    x = torch.arange(1, 200000, dtype=torch.float32) / 1000
    scale = torch.full_like(x, 0.013)
    codes = [encode(encoding_of("int8", arithmetic=a), x * 0.01, scale) for a in ("divide", "multiply")]
    assert not torch.equal(*codes)


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


@pytest.mark.parametrize("mode", [*FP8, "int8", "mxfp8"])
def test_zero_scale_gives_zero_codes(mode: str) -> None:
    encoding = encoding_of(mode)
    values = torch.tensor([0.0, -1.0, INF, NAN, 1e-45])
    for arithmetic in ("divide", "multiply"):
        encoding = encoding_of(mode, arithmetic=arithmetic)
        assert encode(encoding, values, torch.zeros(1)).tolist() == [0] * 5


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


@pytest.mark.parametrize("amax", [1e-30, 1e38, 1e-45, 3e38, 1.1754944e-38])
@pytest.mark.parametrize("mode", [*FP8, "int8", "mxfp8"])
def test_extreme_magnitudes(mode: str, amax: float) -> None:
    """No NaN and no infinity comes of a finite row, and an error of no more than the widest step."""
    axis = [Axis("dim", 32, 32)] if mode == "mxfp8" else []
    for arithmetic in ("divide", "multiply"):
        encoding = encoding_of(mode, *axis, arithmetic=arithmetic)
        stream = stream_of(encoding, 32)
        row = torch.linspace(-1, 1, 32).mul(amax).unsqueeze(0)
        rows = encode_rows(stream, row, None)
        given = stored_scale(encoding.scale, rows["key.scale"])
        values = decode_rows(stream, rows["key"], given)
        assert values.isfinite().all()
        step = given.scale.max() * (32 if "e4m3" in mode or mode == "mxfp8" else 8192 if "e5m2" in mode else 1)
        assert (values - row).abs().max() <= step


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


@pytest.mark.parametrize("code", ["float32", "bfloat16", "float16", *fp8.GRIDS])
def test_casts(code: str) -> None:
    values = torch.tensor([1.0, 1.00390625, 1.01171875, 65504.0, 65520.0, 1e39, 1e-8, -0.0, 2.0**-25, -3e-45])
    expected = {
        "float32": values.tolist(),
        "bfloat16": [1, 1, 1.015625, 65536, 65536, INF, 1.0011717677116394e-08, 0, 2.0**-25, -0.0],
        "float16": [1, 1.00390625, 1.01171875, 65504, INF, INF, 0, 0, 0, 0],
        "float8_e4m3fn": [1, 1, 1, 448, 448, 448, 0, 0, 0, 0],
        "float8_e5m2": [1, 1, 1, 57344, 57344, 57344, 0, 0, 0, 0],
        "float8_e4m3fnuz": [1, 1, 1, 240, 240, 240, 0, 0, 0, 0],
        "float8_e5m2fnuz": [1, 1, 1, 57344, 57344, 57344, 0, 0, 0, 0],
    }
    encoding = Encoding("cast", code)
    codes = encode(encoding, values)
    assert decode(encoding, codes).tolist() == expected[code]
    assert casts.uncast(code, encode(encoding, torch.tensor([NAN]))).isnan().all()
    assert codes.element_size() == getattr(torch, code).itemsize


def step_of(mode: str, values: Tensor, scale: Tensor) -> Tensor:
    """Distance of neighbouring codes around values, in values."""
    if mode == "int8":
        return scale.expand_as(values)
    grid = fp8.GRIDS[MODES[mode].code]
    exponent = torch.frexp(values.abs() / scale).exponent - 1
    return scale * 2.0 ** (exponent.clamp(min=1 - grid.bias) - grid.mantissa_bits)


@pytest.mark.parametrize("mode", [*FP8, "int8", "mxfp8"])
@pytest.mark.parametrize("arithmetic", ["divide", "multiply"])
def test_round_trip_within_a_step_and_stable(mode: str, arithmetic: str) -> None:
    """An error of half a step (and what float32 loses); values that were decoded come back to the same values."""
    axis = [Axis("dim", 64, 32)] if mode == "mxfp8" else [Axis("head", 4)]
    encoding = encoding_of(mode, *axis, arithmetic=arithmetic)
    stream = stream_of(encoding, 4, 64)
    exponents = torch.linspace(-20, 20, 500).view(500, 1, 1)
    values = torch.randn(500, 4, 64, generator=torch.Generator().manual_seed(4)) * 2**exponents
    rows = encode_rows(stream, values, None)
    given = stored_scale(encoding.scale, rows["key.scale"])
    back = decode_rows(stream, rows["key"], given)
    spread = given.scale.repeat_interleave(32, -1) if mode == "mxfp8" else given.scale
    assert ((back - values).abs() <= 0.5001 * step_of(mode, values, spread)).all()
    again = encode_rows(stream, back, None)
    given = stored_scale(encoding.scale, again["key.scale"])
    assert torch.allclose(decode_rows(stream, again["key"], given), back, rtol=1e-6, atol=0)
    codes = encode(encoding, back, spread)
    assert torch.equal(decode(encoding, codes, spread), back)


def sqnr(encoding: Encoding, static: float | None = None) -> float:
    values = torch.randn(16384, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    stream = stream_of(encoding, 128)
    given = None if static is None else argument_scale(encoding.scale, torch.tensor([static]), [1], 0)
    rows = encode_rows(stream, values, given)
    given = given or stored_scale(encoding.scale, rows["key.scale"])
    exact = values.double()
    error = decode_rows(stream, rows["key"], given).double() - exact
    return (10 * (exact.square().sum() / error.square().sum()).log10()).item()


@pytest.mark.parametrize(
    ("expected", "encoding", "static"),
    [
        (31.48, encoding_of("fp8_e4m3", dynamic=False), 1.0),
        (31.48, encoding_of("fp8_e4m3", dynamic=False), 0.03125),
        (31.48, encoding_of("fp8_e4m3", grid="pow2"), None),
        (31.48, encoding_of("mxfp8", Axis("dim", 128, 32)), None),
        (31.80, encoding_of("fp8_e4m3"), None),
        (31.80, encoding_of("fp8_e4m3", arithmetic="multiply"), None),
        (25.53, encoding_of("fp8_e5m2", dynamic=False), 1.0),
        (43.79, encoding_of("int8"), None),
        (43.79, encoding_of("int8", rounding="away", arithmetic="multiply"), None),
    ],
)
def test_accuracy(expected: float, encoding: Encoding, static: float | None) -> None:
    assert abs(sqnr(encoding, static) - expected) < 0.1
