"""Mistakes of codes and scales, planted in generated text: each is noticed, wherever codes and scales lie."""

from __future__ import annotations

import pytest

from kvgen.layout import Layout
from tests.mutation import Mutant, check_layout, check_spread, family, pairs, placed


def scaled(mode: str, per: str, rest: str = "", outer: str = "") -> str:
    return f"{{quant: {{mode: {mode}, {outer}scale: {{per: {per}{rest}}}}}}}"


def leaves(order: str, *kinds: str) -> dict[str, str]:
    return {f"{stream}.{kind}": order for stream in ("key", "value") for kind in kinds}


BY_HEAD = leaves("slot head", "scale")
ROUND_AWAY = scaled("int8", "head", ", source: static, given: inverse, arithmetic: multiply", "round: away, ")
NARROW = {"narrow": True, "dim": 32, "leaves": leaves("slot head dim//16", "scale")}
PAIRS = {"dim": 96, "head": 2, "leaves": leaves("slot head dim//32", "scale")}
ZEROS = {"narrow": True, "dim": 16, "leaves": leaves("slot head", "scale", "zero")}
LAYOUTS: dict[str, Layout] = {
    **family("fp8", scaled("fp8_e4m3", "token head", ", source: dynamic"), dim=60, leaves=BY_HEAD),
    **family("given", scaled("fp8_e4m3", "head", ", source: static"), dim=60),
    **family("int8", scaled("int8", "token head", ", source: dynamic"), dim=60, leaves=BY_HEAD),
    **family("rows", scaled("int8", "token", ", source: dynamic"), head=8, dim=128, leaves=leaves("slot", "scale")),
    **family(
        "whole", scaled("fp8_e4m3", "token", ", source: dynamic"), head=8, dim=128, leaves=leaves("slot", "scale")
    ),
    **family("block", scaled("int8", "block head", ", source: static"), dim=60, leaves=leaves("head", "scale")),
    **family("away", ROUND_AWAY, dim=60),
    **family("int4", scaled("int4", "token head dim//16"), **NARROW),
    **family("zero", scaled("int4_asymmetric", "token head"), **ZEROS),
    **family("mxfp8", "{quant: {mode: mxfp8}}", **PAIRS),
    **family("mxfp4", "{quant: {mode: mxfp4}}", **PAIRS, narrow=True),
    **family("nvfp4", "{quant: {mode: nvfp4}}", **NARROW),
    **family("cast", "{dtype: float32, store: bfloat16}"),
}

APPEND, GATHER = "_append_kernel", "_gather_kernel"
FP8, GIVEN, INT8, ROWS, BLOCK, AWAY = map(placed, ("fp8", "given", "int8", "rows", "block", "away"))
INT4, ZERO, MXFP8, MXFP4, NVFP4 = map(placed, ("int4", "zero", "mxfp8", "mxfp4", "nvfp4"))
STORED = r"(?=(?:\s+\+ \d+)?,\n\s+{},\n)"
"""What stands behind an address under which something is stored."""

# fmt: off
SCALES = [
    Mutant("scale field dropped", FP8, APPEND, r"(\n\s+scale,\n\s+mask=)", r"\1False & ", "append/T1"),
    Mutant("codes made before the scale", FP8, APPEND, r"\n    (?:key|value) = _over\(\w+, scale, .*?\)", "", "append/T1"),
    Mutant("multiplied by the scale", FP8, APPEND, r"_over\((\w+), scale, .*?\)", r"\1 * scale", "append/T1"),
    Mutant("inverse of the scale stored", FP8, APPEND, r"(\n\s+)scale,(?=\n\s+mask)", r"\1tl.div_rn(1.0, scale),", "append/T1"),
    Mutant("scale of another head stored", FP8[:2], APPEND, r"head\[None, :, None\]" + STORED.format("scale"), "(2 - head[None, :, None])", "append/T1"),
    Mutant("scale of another head stored", FP8[2:], APPEND, r"head \* (key|value)_scales_stride_head", r"(2 - head) * \1_scales_stride_head", "append/T1"),
    Mutant("amax of signed values", FP8, APPEND, r"_counted\((\w+)\)", r"\1", "append/T1"),
    Mutant("amax of the other stream", (*ROWS[:2], *placed("whole")[:2]), APPEND, r"(\w+_amax), (\w+_amax) = tl\.split", r"\2, \1 = tl.split", "append/T1"),
    Mutant("NaN in amax", FP8, "_counted", r"tl\.where\(x != x, 0\.0, (.*)\)\n", r"tl.where(x != x, 1e38, \1)\n", "append/T1"),
    Mutant("infinity in amax", FP8, "_amax", r"tl\.minimum\(largest, [^)]*\)", "largest", "append/edges"),
    Mutant("largest code of another format", FP8, APPEND, r"448\.0", "240.0", "append/T1"),
    Mutant("floor of the scale lost", FP8, APPEND, r"\n    scale = tl\.maximum\(scale, .*", "", "append/edges"),
    Mutant("floor of the scale too high", FP8, APPEND, r"(scale = tl\.maximum\(scale, ).*", r"\g<1>1e-12)", "append/edges"),
    Mutant("scale of one head for all", INT4, APPEND, r"tl\.max\(_counted\((\w+)\), axis=3, keep_dims=True\)", r"tl.max(tl.max(_counted(\1), axis=3, keep_dims=True), axis=1, keep_dims=True) + tl.zeros((1, 4, 1, 1), tl.float32)", "append/T7"),
    Mutant("scale of one group for all", INT4, APPEND, r"(dim_group\[[^\]]*\])" + STORED.format("stored"), r"0 * \1", "append/T1"),
    Mutant("exact scale encodes, not the stored one", INT4, APPEND, r"\n    scale = _to_float32\(stored\)", "", "append/T7"),
    Mutant("K's scale for V", GIVEN, APPEND, r"value_scale_ptr \+", "key_scale_ptr +", "append/T1"),
    Mutant("K's scale for V in gather", GIVEN, GATHER, r"value_scale_ptr \+", "key_scale_ptr +", "gather/T1"),
    Mutant("scale of the first head for all", GIVEN, APPEND, r"\* (\w+_scale_stride_head)", r"* 0 * \1", "append/T1"),
    Mutant("scales assumed dense", GIVEN, APPEND, r"\* (?:key|value)_scale_stride_head", "* 1", "append/T1"),
    Mutant("scale of the first block for all", BLOCK, APPEND, r"(_scales_ptr|scale_ptrs = \(cache_ptr) \+ ", r"\1 + 0 * ", "append/T7"),
    Mutant("block's scale looked up by slot", BLOCK, APPEND, r"(_scales_ptr|scale_ptrs = \(cache_ptr) \+ block", r"\1 + slot", "append/T7"),
    Mutant("V's scales with K's strides", ("fp8_nhd", "fp8_minor", "int8_nhd", "int8_minor"), APPEND, r"\* value_scales_stride", "* key_scales_stride", "append/padded"),
    Mutant("scale of the next slot read", FP8[:1], GATHER, r"slot(\[[^\]]*\]) \* (key|value)_scales_stride_slot", r"((slot\1 + 1) % BLOCK_SIZE) * \2_scales_stride_slot", "gather/T1"),
    Mutant("scale of the next slot read", FP8[1:2], GATHER, r"scale_ptrs \+ slot(\[[^\]]*\])", r"scale_ptrs + ((slot\1 + 1) % BLOCK_SIZE)", "gather/T1"),
    Mutant("scale of the next slot read", FP8[2:], GATHER, r"(_scales_stride_head \+ )slot(\[[^\]]*\])", r"\1((slot\2 + 1) % BLOCK_SIZE)", "gather/T1"),
    Mutant("scale ignored by gather", FP8, GATHER, r"\n    (?:key|value) = \w+ \* scale", "", "gather/T1"),
    Mutant("inverse taken for the scale", AWAY, APPEND, r"scale = tl\.div_rn\(1\.0, inverse\)", "scale, inverse = inverse, tl.div_rn(1.0, inverse)", "append/T1"),
    Mutant("scale of the tensor forgotten", NVFP4, APPEND, r" \* \w+_scale_scale", "", "append/T1"),
    Mutant("codes without the scale of the tensor", NVFP4, APPEND, r"\n    scale = scale \* \w+_scale_scale", "", "append/T1"),
    Mutant("scale of the tensor ignored by gather", NVFP4, GATHER, r" \* \w+_scale_scale", "", "gather/as_float32"),
    Mutant("exponent off by one", MXFP8, "_e8m0_over_ceil", r"\+ 127", "+ 128", "append/T1"),
    Mutant("exponent rounded down", MXFP8, "_e8m0_over_ceil", r" \+ 0x7FFFFF", "", "append/T1"),
    Mutant("smallest exponent taken for zero", MXFP8, "_e8m0_values", r"code == 0, 0x400000", "code == 0, 0", "append/edges"),
]

CODES = [
    Mutant("no saturation", GIVEN, "_fp8_e4m3_integers", r"tl\.minimum\((tl\.where\(.*?\)), 0x7E\)", r"\1", "append/T1"),
    Mutant("largest code one too low", GIVEN, "_fp8_e4m3_integers", r"0x7E\)", "0x7D)", "append/T1"),
    Mutant("fp8 truncated", FP8, "_fp8_e4m3_integers", r" \+ 0x7FFFF \+ \(\(size >> 20\) & 1\)", "", "append/T1"),
    Mutant("fp8 ties away from zero", GIVEN, "_fp8_e4m3_integers", r"\(\(size >> 20\) & 1\)", "1", "append/T1"),
    Mutant("fp8 sign lost", FP8, "_fp8_e4m3_integers", r"(code = code) \| .*", r"\1", "append/T1"),
    Mutant("sign of zero lost", FP8, "_fp8_e4m3_integers", r"(code = code) \| (.*)", r"\1 | tl.where(size == 0, 0, \2)", "append/T1"),
    Mutant("NaN stored as a number", FP8, "_fp8_e4m3_integers", r"tl\.where\(x != x, 0x7F, code\)", "code", "append/T1"),
    Mutant("subnormal codes flushed", GIVEN, "_fp8_e4m3_integers", r"0x3C800000, small, normal", "0x3C800000, 0, normal", "append/T1"),
    Mutant("bits of e5m2 for e4m3", FP8, "_fp8_e4m3_integers", r"\(size >> 20\) & 1\)\) >> 20\) - 960", "(size >> 21) & 1)) >> 21) - 448", "append/T1"),
    Mutant("NaN codes read as numbers", FP8, "_fp8_e4m3_from_integers", r"tl\.where\(size == 0x7F, .*?, value\)", "value", "gather/as_float32"),
    Mutant("subnormal codes read as zero", FP8, "_fp8_e4m3_from_integers", r"0\.001953125", "0.0", "gather/as_float32"),
    Mutant("read values truncated", FP8, "_to_bfloat16", r" \+ 0x7FFF \+ \(\(bits >> 16\) & 1\)", "", "gather/as_bfloat16"),
    Mutant("int8 truncated", INT8, "_int8_codes_even", r"(tl\.maximum\(x, low\)) \+", r"tl.where(x < 0, tl.ceil(\1), tl.floor(\1)) +", "append/T1"),
    Mutant("int8 ties up", BLOCK, "_int8_codes_even", r"(tl\.maximum\(x, low\)) \+", r"tl.floor(\1 + 0.5) +", "append/edges"),
    Mutant("int8 wraps", BLOCK, "_int8_codes_even", r"tl\.maximum\(x, low\)(.*)\n    return .*", r"x\1\n    return code.to(tl.uint8)", "append/T1"),
    Mutant("int8 clamped to -128", BLOCK, APPEND, r"-127, 127", "-128, 127", "append/T1"),
    Mutant("int8 ties to even, not away", AWAY, "_int8_codes_away", r"whole = whole \+ .*", "", "append/edges"),
    Mutant("int8 read without its sign", INT8, "_int8_values", r"code\.to\(tl\.int8, bitcast=True\)", "code", "gather/as_float32"),
    Mutant("codes of a byte swapped", INT4, "_pack_4", r"low \+ \(high << 4\)", "high + (low << 4)", "append/T1"),
    Mutant("codes of a byte swapped in gather", INT4, "_unpack_4", r"codes & 15, codes >> 4", "codes >> 4, codes & 15", "gather/as_float32"),
    Mutant("sign of a code runs into its neighbour", INT4, "_int4_codes_even", r" & 15", "", "append/T1"),
    Mutant("int4 read without its sign", INT4, "_int4_values", r"\(\(code \^ 8\)\.to\(tl\.int8, bitcast=True\) - 8\)", "code", "gather/as_float32"),
    Mutant("zero not taken off", ZERO, APPEND, r" - _to_float32\(stored\)", "", "append/T1"),
    Mutant("maximum stored for the minimum", ZERO, APPEND, r"_to_scale_float16\(lowest\)", "_to_scale_float16(highest)", "append/T1"),
    Mutant("range of one side", ZERO, APPEND, r"highest - lowest", "tl.maximum(highest, -lowest)", "append/T7"),
    Mutant("e2m1 ties away from zero", NVFP4, "_e2m1_codes_of_half", r"\(tl\.abs\(half\)", "(tl.abs(half) * 1.0000001", "append/scales1"),
    Mutant("e2m1 steps of a half up to 4", NVFP4, "_e2m1_codes", r"2\.0, code", "4.0, code", "append/T1"),
    Mutant("e2m1 sign lost", MXFP4, "_e2m1_codes", r" \| \(sign & 8\)", "", "append/T1"),
    Mutant("e2m1 largest code read as 8", MXFP4, "_e2m1_values", r"\(code & 7\)", "((code & 7) + (code & 7) // 7)", "gather/as_float32"),
    Mutant("cast truncates", placed("cast"), "_to_bfloat16", r" \+ 0x7FFF \+ \(\(bits >> 16\) & 1\)", "", "append/T1"),
]
# fmt: on
MUTANTS = [*SCALES, *CODES]


@pytest.mark.parametrize(("mutant", "name"), pairs(MUTANTS))
def test_is_noticed(mutant: Mutant, name: str) -> None:
    check_layout(mutant, LAYOUTS, name)


def test_kinds() -> None:
    fewer = {
        "V's scales with K's strides": "planes lie in one tensor, and have one set of strides",
        "amax of the other stream": "tiles of several tokens find the amax of each stream for itself",
    }
    check_spread(MUTANTS, at_least=55, fewer=fewer)
