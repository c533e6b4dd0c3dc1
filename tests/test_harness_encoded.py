"""The harness on encoded layouts: right modules pass, and every known mistake of a quantiser is reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kvgen import harness, quant, reference
from kvgen.harness.bench import Bench
from kvgen.harness.pools import PoolFactory
from kvgen.harness.values import STATIC, edge_rows
from kvgen.layout import Layout
from kvgen.quant import fp8, int8, rows, scales
from kvgen.resolve import load_text
from tests.fake_module import FakeModule
from tests.generated import module_of

HEAD = """
axes: {head: 3, dim: 12}
block_size: 5
"""
BESIDE = """
buffers:
  key_cache: {holds: key, order: block slot head dim}
  value_cache: {holds: value, order: block slot head dim}
"""
SCALES = """
  key_scales: {holds: key.scale, order: block slot head}
  value_scales: {holds: value.scale, order: block slot head}
"""
INLINE = """
buffers:
  cache: {order: block slot head, fields: [key, key.scale, value, value.scale]}
"""


def layout_of(name: str, key: str, value: str, buffers: str) -> Layout:
    return load_text(f"name: {name}{HEAD}streams:\n  key: {key}\n  value: {value}\n{buffers}")


def dynamic(mode: str, rest: str = "", per: str = "token head", outer: str = "") -> str:
    return f"{{quant: {{mode: {mode}, {outer}scale: {{per: {per}, source: dynamic{rest}}}}}}}"


def static(mode: str, per: str = "[]") -> str:
    return f"{{quant: {{mode: {mode}, scale: {{per: {per}, source: static}}}}}}"


FP8 = layout_of("fp8", dynamic("fp8_e4m3"), dynamic("fp8_e4m3"), BESIDE + SCALES)
INT8 = layout_of("int8", dynamic("int8"), dynamic("int8", ", arithmetic: multiply", outer="round: away, "), INLINE)
HALF = layout_of("half", *[dynamic("fp8_e4m3", ", dtype: float16, floor: none")] * 2, BESIDE + SCALES)
POW2 = layout_of("pow2", *[dynamic("fp8_e4m3", ", grid: pow2, floor: {scale: 1.0e-4}")] * 2, INLINE)
GIVEN = layout_of("given", static("fp8_e4m3"), static("fp8_e4m3", "head"), BESIDE)
AWAY = "{quant: {mode: int8, round: away, scale: {per: head, source: static, given: inverse, arithmetic: multiply}}}"
GIVEN_INT8 = layout_of("given_int8", static("int8"), AWAY, BESIDE)
PER_BLOCK = "{quant: {mode: int8, scale: {per: block head, source: static}}}"
BLOCK = layout_of(
    "block",
    PER_BLOCK,
    PER_BLOCK,
    BESIDE + "  scales: {holds: [key.scale, value.scale], order: kv block head}\n",
)
CAST = layout_of("cast", "{dtype: float32, store: bfloat16}", "{store: float8_e4m3fn}", BESIDE)
"""Small layouts of each kind."""


def names(layout: Layout) -> list[str]:
    """Cases that a module made of the reference passes: it refuses nothing but scales that do not fit."""
    found = [c.name for c in harness.cases(layout) if not c.name.startswith("allocate")]
    return [name for name in found if "refuses" not in name or "_scale_" in name]


def report(layout: Layout, module: Any, *only: str) -> harness.Report:
    return harness.run(layout, module, only=only or names(layout))


@pytest.mark.parametrize("layout", [FP8, INT8, HALF, POW2, GIVEN, GIVEN_INT8, BLOCK, CAST], ids=lambda x: x.name)
def test_a_right_module_passes(layout: Layout) -> None:
    found = report(layout, FakeModule(layout))
    assert found.ok, str(found)


def altered(layout: Layout, name: str, **changes: Any) -> Layout:
    """The layout with another encoding of a stream; changes named ``scale_…`` are the scale's."""
    stream = layout.stream(name)
    encoding = replace(stream.encoding, **{k: v for k, v in changes.items() if not k.startswith("scale_")})
    scale = {k.removeprefix("scale_"): v for k, v in changes.items() if k.startswith("scale_")}
    if scale:
        encoding = replace(encoding, scale=replace(encoding.scale, **scale))
    other = replace(stream, encoding=encoding)
    return replace(layout, streams=tuple(other if s is stream else s for s in layout.streams))


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (FP8, {"mode": "fp8_e5m2"}),
        (FP8, {"mode": "fp8_e4m3fnuz"}),
        (FP8, {"scale_arithmetic": "multiply"}),
        (FP8, {"scale_floor_on": None}),
        (FP8, {"scale_floor": 1e-6}),
        (FP8, {"scale_code_range": 240.0}),
        (FP8, {"scale_grid": "pow2"}),
        (INT8, {"rounding": "away"}),
        (INT8, {"clamp": (-128, 126)}),
        (INT8, {"scale_floor_on": "amax"}),
        (INT8, {"scale_arithmetic": "multiply"}),
        (HALF, {"scale_encode": "exact"}),
        (HALF, {"scale_floor_on": "scale", "scale_floor": 1e-6}),
        (POW2, {"scale_exponent": "floor"}),
        (POW2, {"scale_encode": "exact"}),
        (POW2, {"scale_floor_on": "amax"}),
        (POW2, {"scale_grid": "any"}),
        (GIVEN, {"mode": "fp8_e5m2"}),
        (GIVEN, {"scale_arithmetic": "multiply"}),
        (GIVEN, {"scale_given": "inverse"}),
        (GIVEN_INT8, {"rounding": "away"}),
        (GIVEN_INT8, {"clamp": (-128, 127)}),
        (CAST, {"code": "float16"}),
    ],
    ids=lambda x: x.name if isinstance(x, Layout) else " ".join(f"{k}={v}" for k, v in x.items()),
)
def test_another_encoding_is_reported(layout: Layout, changes: dict[str, Any]) -> None:
    edges = [name for name in names(layout) if name.startswith("append/edges")]
    found = report(layout, FakeModule(altered(layout, "key", **changes)), *edges)
    assert found.failures
    assert {r.difference.stream for r in found.failures} <= {"key", "key.scale"}


class Patched(FakeModule):
    """Writes and reads with a part of the reference replaced, for as long as the call lasts."""

    def __init__(self, layout: Layout, *patch: Any) -> None:
        super().__init__(layout)
        self.patch = patch

    def write(self, *args: Any, **options: Any) -> None:
        with patch.object(*self.patch):
            super().write(*args, **options)

    def gather(self, *args: Any, **options: Any) -> Any:
        with patch.object(*self.patch):
            return super().gather(*args, **options)


encode_fp8, amax_of, load_scale = fp8.encode, scales.group_amax, scales.load


def overflows_to_nan(grid: fp8.Grid, values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.abs() > 464, 0x7F, encode_fp8(grid, values).int()).to(torch.uint8)


def nan_becomes_finite(grid: fp8.Grid, values: torch.Tensor) -> torch.Tensor:
    return encode_fp8(grid, values.nan_to_num(nan=448.0))


def signed_nan(grid: fp8.Grid, values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.isnan() & values.signbit(), 0xFF, encode_fp8(grid, values).int()).to(torch.uint8)


def loses_minus_zero(grid: fp8.Grid, values: torch.Tensor) -> torch.Tensor:
    return encode_fp8(grid, torch.where(values == 0, 0.0, values))


def flushes_small_codes(grid: fp8.Grid, values: torch.Tensor) -> torch.Tensor:
    return encode_fp8(grid, torch.where(values.abs() < 2**-6, values * 0, values))


def ties_away(grid: fp8.Grid, values: torch.Tensor) -> torch.Tensor:
    return encode_fp8(grid, (values.view(torch.int32) + (values != 0)).view(torch.float32))


def rounds_twice(grid: fp8.Grid, values: torch.Tensor) -> torch.Tensor:
    return encode_fp8(grid, values.half().float())


def amax_with_nan(values: torch.Tensor, axes, scale) -> torch.Tensor:
    return amax_of(values.nan_to_num(nan=3e38), axes, scale)


def amax_one_sided(values: torch.Tensor, axes, scale) -> torch.Tensor:
    return amax_of(values.clamp(min=0), axes, scale)


def amax_of_half(values: torch.Tensor, axes, scale) -> torch.Tensor:
    return amax_of(values[..., : values.shape[-1] // 2], axes, scale)


def amax_without_infinities(values: torch.Tensor, axes, scale) -> torch.Tensor:
    return amax_of(torch.where(values.isinf(), 0.0, values), axes, scale)


def wraps(encoding: Any, values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num().round().clamp(-(2**31), 2**31 - 1).long().to(torch.int8)


def truncates(encoding: Any, values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num().trunc().clamp(-127, 127).to(torch.int8)


def adds_a_half(values: torch.Tensor) -> torch.Tensor:
    return (values + values.sign() * 0.5).trunc()


def minus_128_is_clamped(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.int8).float().clamp(min=-127)


def nan_codes_are_480(codes: torch.Tensor) -> torch.Tensor:
    return fp8.decode(fp8.GRIDS["float8_e4m3fn"], codes).nan_to_num(nan=480.0)


def scale_without_sign(dtype: str, stored: torch.Tensor) -> torch.Tensor:
    return load_scale(dtype, stored).abs()


def modes(name: str, **parts: Any) -> dict[str, quant.Mode]:
    return quant.MODES | {name: replace(quant.MODES[name], **parts)}


@pytest.mark.parametrize(
    ("layout", "where", "what", "mistake", "case"),
    [
        (GIVEN, fp8, "encode", overflows_to_nan, "append/edges"),
        (GIVEN, fp8, "encode", nan_becomes_finite, "append/edges"),
        (FP8, fp8, "encode", nan_becomes_finite, "append/edges"),
        (FP8, fp8, "encode", signed_nan, "append/T7"),
        (FP8, fp8, "encode", loses_minus_zero, "append/edges"),
        (FP8, fp8, "encode", flushes_small_codes, "append/edges"),
        (FP8, fp8, "encode", ties_away, "append/edges"),
        (GIVEN, fp8, "encode", ties_away, "append/edges_scales2"),
        (GIVEN, fp8, "encode", rounds_twice, "append/edges"),
        (FP8, rows, "group_amax", amax_with_nan, "append/edges"),
        (FP8, rows, "group_amax", amax_one_sided, "append/edges"),
        (FP8, rows, "group_amax", amax_of_half, "append/T1"),
        (FP8, rows, "group_amax", amax_without_infinities, "append/edges"),
        (INT8, quant, "MODES", modes("int8", to_codes=truncates), "append/edges"),
        (GIVEN_INT8, quant, "MODES", modes("int8", to_codes=wraps), "append/edges"),
        (GIVEN_INT8, int8, "round_away", adds_a_half, "append/edges_scales4"),
        (INT8, quant, "MODES", modes("int8", from_codes=minus_128_is_clamped), "gather/as_float32"),
        (FP8, quant, "MODES", modes("fp8_e4m3", from_codes=nan_codes_are_480), "gather/as_float32"),
        (FP8, rows, "load", scale_without_sign, "gather/as_float32"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_mistake_is_reported(layout: Layout, where: Any, what: str, mistake: Any, case: str) -> None:
    (result,) = report(layout, Patched(layout, where, what, mistake), case).results
    assert result.outcome == "failed", result
    assert result.difference is not None, result


class SharesScale(FakeModule):
    """K's scale for V too, of the values that both would have."""

    def write(self, *args: Any, scales: dict[str, torch.Tensor], **options: Any) -> None:
        value = scales["key_scale"].expand_as(scales["value_scale"])
        super().write(*args, scales=scales | {"value_scale": value}, **options)


class IgnoresStrides(FakeModule):
    """Reads a sliced scale as if it were dense."""

    def write(self, *args: Any, scales: dict[str, torch.Tensor], **options: Any) -> None:
        dense = {k: v.as_strided(v.shape, [1] * v.dim(), v.storage_offset()) for k, v in scales.items()}
        super().write(*args, scales=dense, **options)


class KeepsScales(FakeModule):
    """Uses the scales of its first call ever after."""

    def write(self, *args: Any, scales: dict[str, torch.Tensor], **options: Any) -> None:
        self.kept = getattr(self, "kept", scales)
        super().write(*args, scales=self.kept, **options)


@pytest.mark.parametrize(
    ("module", "case", "stream"),
    [
        (SharesScale, "append/T1", "value"),
        (IgnoresStrides, "append/T7", "value"),
        (KeepsScales, "append/scales1", "key"),
    ],
)
def test_a_mixed_up_scale_is_reported(module: type, case: str, stream: str) -> None:
    (result,) = report(GIVEN, module(GIVEN), case).results
    assert result.outcome == "failed", result
    assert result.difference.stream == stream


class WritesAllScales(FakeModule):
    """``append_key`` writes the value's scale too."""

    def write(self, sources: Any, buffers: Any, slots: Any, **options: Any) -> None:
        super().write(sources, buffers, slots, **options)
        if len(sources) == 1 and "cache" in buffers:
            found = reference.leaf_views(self.layout, buffers)["value.scale"]
            numbers = reference.resolve_slots(self.layout, slots, 25, None)[1]
            found.tensor[found.at(numbers, 5)] ^= 1


def test_static_scales_in_a_pool_are_such_as_callers_store() -> None:
    """Most are positive numbers, some any bit pattern; the module and the reference are given the same."""
    pool = Bench(BLOCK, FakeModule(BLOCK), PoolFactory(BLOCK, "cpu", 0), 0, "scales").pool()
    found = pool.actual["scales"]
    assert torch.equal(found.view(torch.int32), pool.expected["scales"].view(torch.int32))
    known = torch.isin(found, torch.tensor(STATIC))
    assert known.sum() == 24 < known.numel() == 30


def test_a_scale_of_another_block_is_reported() -> None:
    class FirstBlock(FakeModule):
        def write(self, sources: Any, buffers: Any, slots: Any, **options: Any) -> None:
            first = buffers["scales"][:, :1].expand_as(buffers["scales"]).clone()
            super().write(sources, buffers | {"scales": first}, slots, **options)

    (result,) = report(BLOCK, FirstBlock(BLOCK), "append/T7").results
    assert result.difference.stream in ("key", "value")


def test_the_other_streams_scale_is_told() -> None:
    (result,) = report(INT8, WritesAllScales(INT8), "append_key/alone").results
    assert "the other stream, value; value.scale, slot number" in result.message
    assert result.difference.stream == "value.scale"


class WritesSkippedScales(FakeModule):
    """Scales of skipped tokens go to slot 0."""

    def write(self, sources: Any, buffers: Any, slots: torch.Tensor, **options: Any) -> None:
        found = reference.leaf_views(self.layout, buffers)["key.scale"]
        if "key" in sources and (slots < 0).any():
            found.tensor[found.at(torch.tensor([0]), 5)] = 0x7F
        super().write(sources, buffers, slots, **options)


def test_a_scale_of_a_skipped_token_is_reported() -> None:
    (result,) = report(FP8, WritesSkippedScales(FP8), "append/all_skipped").results
    assert "neighbour slot 0; key.scale" in result.message


class TakesAnything(FakeModule):
    """Refuses no scale, and ignores those it was not asked for."""

    def _tables(self, streams: list[str], rest: list[Any], options: dict[str, Any]) -> dict[str, Any]:
        ones = {"key_scale": torch.ones(1), "value_scale": torch.ones(3)}
        return {k: v for k, v in options.items() if k not in ones} | {"scales": ones}


@pytest.mark.parametrize("layout", [GIVEN, FP8], ids=lambda x: x.name)
def test_scales_that_do_not_fit_must_be_refused(layout: Layout) -> None:
    refusals = [name for name in names(layout) if "_scale_" in name]
    assert len(refusals) == (40 if layout is GIVEN else 4)
    found = report(layout, TakesAnything(layout), *refusals)
    assert all("went through" in result.message for result in found.results), str(found)


def test_any_nan_will_do_in_a_cast() -> None:
    """But not in place of a number, and not in a slot that nobody wrote."""

    class OtherNan(FakeModule):
        def write(self, sources: Any, buffers: Any, slots: Any, **options: Any) -> None:
            super().write(sources, buffers, slots, **options)
            found = reference.leaf_views(self.layout, buffers)["key"]
            index = found.at(reference.resolve_slots(self.layout, slots, 25, None)[1], 5) if self.mine else ()
            words = found.tensor[index].contiguous().view(torch.int16)
            words[words & 0x7FFF > 0x7F80] = -1
            found.tensor[index] = words.view(torch.uint8)

    module = OtherNan(CAST)
    module.mine = True
    assert report(CAST, module, "append/edges", "append/T7").ok
    module.mine = False
    assert report(CAST, module, "append/T1").failures


@pytest.mark.parametrize("layout", [FP8, INT8, GIVEN, GIVEN_INT8], ids=lambda x: x.name)
def test_edges_are_there(layout: Layout) -> None:
    """What the edges must contain, in both types that the streams come in."""
    for stream in layout.streams:
        for dtype in (torch.bfloat16, torch.float16):
            values = edge_rows(stream, (3, 12), dtype, 1.0).float().flatten(1)
            assert values.isnan().all(1).any()
            assert values.isinf().any(1).sum() >= 3
            assert ((values == 0) & ~values.signbit()).all(1).any()
            assert ((values == 0) & values.signbit()).all(1).any()
            assert (values > 0).all(1).any()
            assert (values < 0).all(1).any()
            subnormal = (values.abs() < torch.finfo(dtype).tiny) & (values != 0)
            assert subnormal.any(1).sum() >= 2
            largest = 448.0 if stream.encoding.mode == "fp8_e4m3" else 127.0
            assert (values.abs() > largest * 1.04).any()
            for tie in (1.0625, 1.1875, 2**-10) if largest == 448 else (0.5, 1.5, 126.5):
                assert (values == tie).any()
                assert (values == -tie).any()


def test_a_scale_that_streams_share_is_one_argument() -> None:
    """A module passes that takes it once; one that takes another for the value is told."""
    layout = layout_of("shared", static("fp8_e4m3", "head"), "{quant: {mode: int8, scale: key}}", BESIDE)
    wanted = ["append/T7", "append/scales1", "append/refuses_value_scale_superfluous", "append_value/T7", "gather/T7"]
    known = {case.name for case in harness.cases(layout)}
    found = harness.run(layout, module_of(layout), only=known.intersection(wanted))
    assert found.ok, str(found)
    assert len(found.results) >= 4
    apart = layout_of("apart", static("fp8_e4m3", "head"), static("int8", "head"), BESIDE)
    assert not harness.run(layout, module_of(apart), only=["append/T7"]).ok


@pytest.mark.parametrize("encode", ["stored", "exact"])
@pytest.mark.parametrize("scale", ["grid: pow2", "dtype: e8m0"])
@pytest.mark.parametrize("exponent", ["ceil", "floor"])
def test_quotients_below_the_normal_numbers_find_their_power(exponent: str, scale: str, encode: str) -> None:
    """The nearest float32 of such a quotient may be the power itself, which the quotient is not."""
    key = dynamic("fp8_e4m3", f", {scale}, floor: none, exponent: {exponent}, encode: {encode}", "token head dim")
    cache = "buffers: {cache: {order: block slot head dim, fields: [key, key.scale]}}"
    layout = load_text(
        f"name: tiny\naxes: {{head: 1, dim: 3}}\nblock_size: 8\nstreams: {{key: {{dtype: float32, {key[1:]}}}\n{cache}"
    )
    powers = torch.tensor([448 * 2.0**power for power in range(-152, -121)])
    rows = torch.stack([powers.nextafter(powers * 0), powers, powers.nextafter(powers * 2)], dim=-1).unsqueeze(1)
    slots = torch.arange(len(rows))
    made, wanted = (torch.zeros_like(PoolFactory(layout, "cpu", 0).make().actual["cache"]) for _ in range(2))
    module_of(layout).append(rows, made, slots)
    reference.append(layout, {"key": rows}, {"cache": wanted}, slots)
    assert wanted.any()
    assert torch.equal(made, wanted)


def test_one_layer_has_an_index_too() -> None:
    """It is 0, and another is refused."""
    axes = "name: one_layer\naxes: {head: 2, dim: 16, layer: 1}\nblock_size: 4\n"
    layout = load_text(axes + "buffers: {cache: {holds: [key, value], order: block layer kv slot head dim}}\n")
    wanted = [case.name for case in harness.cases(layout) if "layer" in case.name or case.name.endswith("/T7")]
    assert sum("refuses_layer" in name for name in wanted) >= 4
    found = harness.run(layout, module_of(layout), only=wanted)
    assert found.ok, str(found)
