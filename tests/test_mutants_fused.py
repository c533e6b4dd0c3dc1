"""Mistakes of norms, rotary embeddings and queries, planted in fused appends: each is noticed."""

from __future__ import annotations

import pytest

from tests.mutation import Mutant, check_layout, check_spread, family, pairs, placed

FUSE = "fuse:\n  key: [{rms_norm: {weight: plus_one}}, {rope: {rotary_dim: 8}}]\n"
WHOLE = "fuse:\n  key: [rope, {rms_norm: {weight: plus_one}}]\n  query: {heads: 4, stages: key}\n"
ALONE = WHOLE.partition("  query")[0] + "schedule: {append: {tokens: 1, few: {up_to: 4}}}\n"
FP8 = "{quant: {mode: fp8_e4m3, scale: {per: [], source: static}}}"
DYNAMIC = "{quant: {mode: fp8_e4m3, scale: {per: token head, source: dynamic}}}"
SCALES = {"key.scale": "slot head", "value.scale": "slot head"}
LAYOUTS = {
    **family("fused", rest=FUSE),
    **family("query", rest=FUSE + "  query: {heads: 4, stages: key}\n"),
    **family("chain", rest=FUSE + "  rounding: chain\n"),
    **family("packed", rest=FUSE + "  input: packed_qkv\n  query: {heads: 4, stages: key}\n"),
    **family("three", rest=FUSE + "  positions: {mrope: [2, 1, 1]}\n"),
    **family("halves", FP8, dim=16, head=4, rest=WHOLE),
    **family("halves5", FP8.replace("e4m3", "e5m2"), dim=16, head=4, rest=WHOLE),
    **family("ready", FP8, dim=16, head=4, rest=ALONE),
    **family("ready5", FP8.replace("e4m3", "e5m2"), dim=16, head=4, rest=ALONE),
    **family("rows", DYNAMIC, dim=16, head=4, rest=WHOLE, leaves=SCALES),
    **family("rows5", DYNAMIC.replace("e4m3", "e5m2"), dim=16, head=4, rest=WHOLE, leaves=SCALES),
    **family("split", dim=16, head=4, rest=WHOLE.replace("rope,", "{rope: {style: interleaved}},")),
}
FUSED, WITH_QUERY, CHAIN, PACKED, THREE, HALVES, SPLIT = map(
    placed, ("fused", "query", "chain", "packed", "three", "halves", "split")
)
# Slots below dims: each value's other is loaded beside it.
CODED, READY, WHOLE_ROWS = ((*placed(name)[:2], *placed(f"{name}5")[:2]) for name in ("halves", "ready", "rows"))
KERNEL, QUERY, CASE = "_append_fused_kernel", "_append_fused_query", "append_fused/T7"

# fmt: off
STAGES = [
    Mutant("neighbours turned as pairs", FUSED, KERNEL, r"key_other = [^\n]*", "key_other = (dim % 8) ^ 1", CASE),
    Mutant("tail turned", FUSED, KERNEL, r"\(dim < 8\)", "(dim < 16)", CASE),
    Mutant("one value too few turned", FUSED, KERNEL, r"\(dim < 8\)", "(dim < 7)", CASE),
    Mutant("turned the other way", FUSED, KERNEL, r"key_sin \* -1\.0, key_sin", "key_sin, key_sin * -1.0", CASE),
    Mutant("both of a pair turned alike", FUSED, KERNEL, r"key_sin \* -1\.0", "key_sin", CASE),
    Mutant("sines for cosines", FUSED, KERNEL, r"key_cos \+ key_partner \* key_sin", "key_sin + key_partner * key_cos", CASE),
    Mutant("angle of the next pair", FUSED, KERNEL, r"key_pair = dim % 4", "key_pair = (dim + 1) % 4", CASE),
    Mutant("position off by one", FUSED, KERNEL, r"(position = tl\.load\([^\n]*)", r"\1\n    position = tl.maximum(position - 1, tl.minimum(position, 0))", CASE),
    Mutant("row past the table read", FUSED, KERNEL, r"position < num_positions", "position <= num_positions", "append_fused/positions_past_the_table"),
    Mutant("last row of the table skipped", FUSED, KERNEL, r"position < num_positions", "position < num_positions - 1", "append_fused/positions_past_the_table"),
    Mutant("weight instead of one plus it", FUSED, KERNEL, r"(key_weight = [^#]*?)\s\+ 1\.0", r"\1", CASE),
    Mutant("other of a pair has the weight of the first", FUSED, KERNEL, r"key_weight_ptr \+ key_other", "key_weight_ptr + tl.minimum(dim, 11)", CASE),
    Mutant("other of a pair not normed", FUSED, KERNEL, r"key_partner = key_partner \* key_inverse", "key_partner = key_partner * 1.0", CASE),
    Mutant("squares summed instead of averaged", FUSED, KERNEL, r"\* 0\.0833\d*", "* 1.0", CASE),
    Mutant("averaged over the padded row", FUSED, KERNEL, r"\* 0\.0833\d*", "* 0.0625", CASE),
    Mutant("eps left out", FUSED, KERNEL, r"\+ 1e-06", "+ 0.0", "append_fused/edges"),
    Mutant("not rounded between norm and rotary embedding", CHAIN, KERNEL, r"(key(?:_partner)?) = _rounded\(\1, [^)]*\)\.to\(tl\.float32\)", r"\1 = \1", CASE),
    Mutant("height and width exchanged", THREE, KERNEL, r"positions_stride \+", "2 * positions_stride +", CASE),
    Mutant("three positions taken for one", THREE, KERNEL, r"(?:2 \* )?positions_stride \+", "0 * positions_stride +", CASE),
]

QUERIES = [
    Mutant("query normed by K's weight", WITH_QUERY, KERNEL, r"query_weight_ptr(?=,\s+cos_sin_ptr,\s+query)", "key_weight_ptr", CASE),
    Mutant("query not normed", WITH_QUERY, QUERY, r"query = query \* query_inverse", "query = query * 1.0", CASE),
    Mutant("query heads in another order", WITH_QUERY, QUERY, r"(query_out_ptr\s+\+ [^\n]*\s+\+ )head", r"\1(head ^ 1)", CASE),
    Mutant("heads of the query taken for those of K", PACKED, KERNEL, r"\+ 48\b", "+ 36", CASE),
    Mutant("K taken for V", PACKED, KERNEL, r"\+ 84\b", "+ 48", CASE),
    Mutant("skipped tokens' query left out", WITH_QUERY, KERNEL, r"(_append_fused_query\(\s*token,\s*)in_range", r"\1in_range & (tl.load(slot_mapping_ptr + token, mask=in_range, other=-1) >= 0)", "append_fused/skipped"),
]

# Rows of which all turns: in halves (neox), or split while they turn (interleaved); K with slots below dims is neither.
TOGETHER = [
    Mutant("halves stored in each other's place", HALVES, QUERY, r"query_(pair|other)(\[None, None, :\],\s+_rounded)", lambda m: f"query_{'other' if m[1] == 'pair' else 'pair'}{m[2]}", CASE),
    Mutant("second half read a value too far left", HALVES, QUERY, r"query_other = query_pair \+ 8", "query_other = query_pair + 7", CASE),
    Mutant("squares of the first half alone", HALVES, QUERY, r"tl\.fma\([^)]*\)", "query_wide * query_wide", CASE),
    Mutant("both halves have the weight of the first", HALVES, QUERY, r"query_weight_ptr \+ query_other", "query_weight_ptr + query_pair", CASE),
    Mutant("halves turned the other way", HALVES, QUERY, r"(query_cos) - (query_partner \* query_sin)", r"\1 + \2", CASE),
    Mutant("first half coded twice", CODED, KERNEL, r"_over_one\(key_partner,", "_over_one(key,", CASE),
    Mutant("second half over V's scale", READY, KERNEL, r"_over_known\(key_partner, key_divisor", "_over_known(key_partner, value_divisor", CASE),
    Mutant("halves of codes exchanged", WHOLE_ROWS, KERNEL, r"key, key_partner = tl\.split", "key_partner, key = tl.split", CASE),
    Mutant("halves put together as neighbours", WHOLE_ROWS, KERNEL, r"tl\.permute\((tl\.join\(key, key_partner\)), \(0, 1, 3, 2\)\)", r"\1", CASE),
    Mutant("pairs split the other way round", SPLIT, QUERY, r"query, query_partner = tl\.split", "query_partner, query = tl.split", CASE),
    Mutant("pairs put together the other way round", SPLIT, QUERY, r"tl\.join\(query, query_partner\)", "tl.join(query_partner, query)", CASE),
    Mutant("cosine of the time for that of the width", THREE, KERNEL, r"key_cos_width, key_cos\)", "key_cos, key_cos)", CASE),
    Mutant("sine of the height by the width's pairs", THREE, KERNEL, r"key_sin_height, key_sin\)", "key_sin_width, key_sin)", CASE),
]
# fmt: on
MUTANTS = [*STAGES, *QUERIES, *TOGETHER]


@pytest.mark.parametrize(("mutant", "name"), pairs(MUTANTS))
def test_is_noticed(mutant: Mutant, name: str) -> None:
    check_layout(mutant, LAYOUTS, name)


def test_kinds() -> None:
    fewer = (
        "first half coded twice",
        "second half over V's scale",
        "halves of codes exchanged",
        "halves put together as neighbours",
    )
    check_spread(
        MUTANTS, at_least=35, fewer=dict.fromkeys(fewer, "rows are in halves in no layout with slots below dims")
    )
