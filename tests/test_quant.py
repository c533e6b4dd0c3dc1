"""Codes of every encoding: published bytes, every rounding boundary, edge values, and accuracy."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from kvgen.axes import Axis
from kvgen.layout import Encoding
from kvgen.quant import MODES, casts, decode, encode, fp8, int8
from kvgen.quant.rows import argument_scale, decode_rows, encode_rows, stored_scale
from kvgen.quant.scales import dynamic_scale
from tests.quantised import FP8, GRIDS, INF, NAN, bits, encoding_of, hexes, numbers, stream_of


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


@pytest.mark.parametrize("mode", [*FP8, "int8", "mxfp8"])
def test_zero_scale_gives_zero_codes(mode: str) -> None:
    encoding = encoding_of(mode)
    values = torch.tensor([0.0, -1.0, INF, NAN, 1e-45])
    for arithmetic in ("divide", "multiply"):
        encoding = encoding_of(mode, arithmetic=arithmetic)
        assert encode(encoding, values, torch.zeros(1)).tolist() == [0] * 5


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
