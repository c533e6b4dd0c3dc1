"""Mistakes of addresses, bounds, skips, strides and streams, planted in generated text: each is noticed.

A kind is planted wherever it can be: in layouts with slots above heads, with planes (all keys of a page before all
values), and with slots below dims. ``python -m tests.mutation`` prints the table: kind, case that notices, layouts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvgen import harness, runtime
from kvgen.harness import Report
from kvgen.layout import Layout
from kvgen.resolve import load_text
from tests.mutation import Mutant, check, check_layout, check_spread, family, pairs, placed, text_of

HEAD = "axes: {head: 3, dim: 12}\nblock_size: 5\nbuffers:\n"
LAYERS = "axes: {head: 3, dim: 12, layer: 3}\nblock_size: 5\nbuffers:\n"
BANDED = "axes: {head: 2, dim: 32}\nblock_size: 5\nbuffers:\n"


def one(name: str, buffers: str, head: str = HEAD) -> dict[str, Layout]:
    return {name: load_text(f"name: {name}\n{head}  {buffers}\n")}


HND = "key_cache: {holds: key, order: O}\n  value_cache: {holds: value, order: O}".replace("O", "block head slot dim")
PAIR = "cache: {holds: [key, value], order: %s}"
PLANES = "fields: [{key: head slot dim}, {value: slot head dim}]"
LAYOUTS: dict[str, Layout] = {
    **family("plain"),
    **family("skip", rest="slots: {skip: 7}\n"),
    **family("remap", rest="slots: {remap: other_slots}\n"),
    **family("ranks", rest="slots: {shard: {world: 3, interleave: 1}}\n"),
    **one("hnd", HND),
    **one("pair_nhd", PAIR % "block kv slot head dim"),
    **one("pair_minor", PAIR % "block kv head dim slot"),
    **one("pair_inside", PAIR % "block slot head (kv dim)"),
    **one("layers_nhd", PAIR % "layer block kv slot head dim", LAYERS),
    **one("layers_planar", f"cache: {{order: block layer, {PLANES}}}", LAYERS),
    **one("layers_minor", PAIR % "block layer kv head dim slot", LAYERS),
    **one("banded_minor", PAIR % "block kv head dim slot", BANDED),
    **one("banded_inside", PAIR % "block head dim (kv slot)", BANDED),
    **one(
        "banded_apart",
        "keys: {holds: key, order: O}\n  values: {holds: value, order: O}".replace("O", "block head dim slot"),
        BANDED,
    ),
    **one("tiles", PAIR % "block kv head dim//4 slot dim%4"),
    **one("tiles_planar", "cache: {order: block, fields: [{key: dim//4 head slot dim%4}, {value: slot head dim}]}"),
    **one("record_nhd", "cache: {order: block slot head, fields: [key, {pad: 8}, value]}"),
    **one("record_planar_minor", "cache: {order: block head, fields: [{key: dim slot}, {pad: 8}, {value: dim slot}]}"),
    **one("filled_nhd", "cache: {order: block slot, fields: [{key: head dim}, {value: head dim}, {pad: 8, fill: 3}]}"),
    **one(
        "filled_planar", "cache: {order: block slot, fields: [{pad: 4, fill: 3}, {key: head dim}, {value: dim head}]}"
    ),
    **one(
        "filled_minor", "cache: {order: block slot, fields: [{key: head dim}, {pad: 4, fill: 3}, {value: head dim}]}"
    ),
}

PLAIN = placed("plain")
APPEND, GATHER = "_append_kernel", "_gather_kernel"
SLOT = r"(?<!\w)slot = slot_number % BLOCK_SIZE"
NUMBER = r"(slot_number = tl\.load\(\w+ \+ token, mask=in_range, other=-1\)\.to\(tl\.int64\))"
AT = r"(?:\[[^\]]*\])?"
"""A subscript that spreads a vector over a tile, or none."""

# fmt: off
SLOTS = [
    Mutant("slot plus one", ("plain_nhd", "plain_planar"), APPEND, SLOT, "slot = (slot_number + 1) % BLOCK_SIZE", "append/T1"),
    Mutant("slot minus one", ("plain_nhd", "plain_planar"), APPEND, SLOT, "slot = (slot_number + 4) % BLOCK_SIZE", "append/T1"),
    Mutant("slot plus one", ("plain_minor", "banded_minor"), APPEND, SLOT, "slot = (slot_number + 1) % BLOCK_SIZE", "append/prefill"),
    Mutant("slot minus one", ("plain_minor", "banded_minor"), APPEND, SLOT, "slot = (slot_number + 4) % BLOCK_SIZE", "append/prefill"),
    Mutant("last band never written", ("banded_minor", "banded_inside", "banded_apart"), APPEND, r"range\(0, HEAD_DIM, 16\)", "range(0, HEAD_DIM - 16, 16)", "append/prefill"),
    Mutant("block size mismatch", PLAIN, APPEND, "BLOCK_SIZE: tl.constexpr = 5", "BLOCK_SIZE: tl.constexpr = 6", "append/T7"),
    Mutant("skip of -1 lost", PLAIN, APPEND, r"slot_number >= 0", "slot_number >= -1", "append/skipped"),
    Mutant("skipped tokens go to slot 0", PLAIN, APPEND, NUMBER, r"\1\n    slot_number = tl.maximum(slot_number, 0)", "append/all_skipped"),
    Mutant("bound too high", PLAIN, APPEND, r"< num_slots\)", "< num_slots + 2)", "append/skipped"),
    Mutant("bound too low", PLAIN, APPEND, r"< num_slots\)", "< num_slots - 1)", "append/T7"),
    Mutant("slot number in 32 bits", PLAIN, APPEND, NUMBER, r"\1.to(tl.int32).to(tl.int64)", "append/skipped"),
    Mutant("32-bit address", PLAIN, APPEND, rf"(\w*block{AT} \* \w*cache_stride_block)", r"(\1).to(tl.int32)", "append/huge"),
    Mutant("padding slot written", placed("skip"), APPEND, r" & \(slot_number != SKIP\)", "", "append/skipped"),
    Mutant("neighbours of the padding slot skipped", placed("skip"), APPEND, r"slot_number != SKIP", "slot_number // 2 != SKIP // 2", "append/prefill"),
    Mutant("run of slots shifted", ("plain_minor", "pair_minor", "record_planar_minor"), APPEND, r"(?<!\w)run_slot = ", "run_slot = 1 + ", "append/T1"),
    Mutant("broken run taken for whole", ("plain_minor", "pair_minor", "record_planar_minor"), APPEND, r"tl\.min\((\(valid.*)\) == 1", r"tl.max(\1) == 1", "append/prefill"),
    Mutant("slot table ignored", placed("remap"), APPEND, r"(?<=\n)    slot_number = tl\.load\(other_slots_ptr.*\n", "", "append/remap"),
    Mutant("slot table read past its end", placed("remap"), APPEND, r"< other_slots_length", "<= other_slots_length", "append/remap"),
    Mutant("slot table read before its start", placed("remap"), APPEND, r"\(slot_number >= 0\) & (\(slot_number < other_slots_length)", r"(slot_number >= -1) & \1", "append/remap"),
    Mutant("slots unmapped to a negative are written", placed("remap"), APPEND, r"valid = \(slot_number >= 0\)", "valid = (slot_number >= -1)", "append/remap"),
    Mutant("slot table ignored by gather", placed("remap"), GATHER, r"(?<=\n)    slot_number = tl\.load\(other_slots_ptr.*\n", "", "gather/remap"),
]

TABLES = [
    Mutant("block table indexed in slots", PLAIN, "_slot_of", r"column = position // BLOCK_SIZE", "column = position", "append_positions/request_ids"),
    Mutant("position in a page off by one", PLAIN, "_slot_of", r"offset = position % BLOCK_SIZE", "offset = (position + 1) % BLOCK_SIZE", "append_positions/request_ids"),
    Mutant("page past the table", PLAIN, "_slot_of", r"column < num_columns", "column <= num_columns", "append_positions/request_ids"),
    Mutant("rows of the block table assumed dense", PLAIN, "_slot_of", r"block_table_stride \+", "num_columns +", "append_positions/request_ids"),
    Mutant("hole in the block table is a block", PLAIN, "_slot_of", r"\(block >= 0\) & ", "(block >= -1) & ", "slot_mapping/decode_positions_int64"),
    Mutant("negative position is in the page before", PLAIN, "_slot_of", r"\(position >= 0\) & ", "(position >= -1) & ", "slot_mapping/request_ids_int64"),
    Mutant("padding filled with slot 0", PLAIN, "_slot_of", r"BLOCK_SIZE \+ offset, -1\)", "BLOCK_SIZE + offset, 0)", "slot_mapping/padded"),
    Mutant("request past the table", PLAIN, "_append_positions_kernel", r"request < num_rows", "request <= num_rows", "append_positions/decode"),
    Mutant("lengths counted after the append", PLAIN, "_slot_mapping_kernel", r"(position = tl\.load\(context_lens_ptr.*)", r"\1 - 1", "slot_mapping/decode_context_lens_int64"),
    Mutant("first new token a position too far", PLAIN, "_slot_mapping_kernel", r"(position = tl\.load\(context_lens_ptr.*)", r"\1 + 1", "slot_mapping/prefill_context_lens_int64"),
    Mutant("first token of a request given to the one before", PLAIN, "_request_of", r"start <= token", "start < token", "slot_mapping/prefill_positions_int64"),
    Mutant("fill begins a position too late", PLAIN, "_fill_slots_kernel", r"start_pos \+ token", "start_pos + token + 1", "fill_slots/rows"),
    Mutant("owner of the wrong rank", placed("ranks"), "_slot_of", r"== rank", "!= rank", "append_positions/request_ids_rank0"),
    Mutant("interleave ignored", placed("ranks"), "_slot_of", r"offset // INTERLEAVE % WORLD", "offset // WORLD % WORLD", "append_positions/request_ids_rank1"),
    Mutant("blocks of one rank, not of all", placed("ranks"), "_slot_of", r"\(BLOCK_SIZE \* WORLD\)", "BLOCK_SIZE", "append_positions/request_ids_rank0"),
]

STRIDES = [
    Mutant("heads of the source assumed dense", PLAIN, APPEND, r"\* key_stride_head(?: \* STRIDE_UNIT)?", "* HEAD_DIM", "append/source_joint"),
    Mutant("tokens of the source assumed dense", PLAIN, APPEND, r"\* key_stride_token(?: \* STRIDE_UNIT)?", "* (3 * HEAD_DIM)", "append/source_fused"),
    Mutant("source of V with K's strides", PLAIN, APPEND, r"\* value_stride_token", "* key_stride_token", "append/source_odd"),
    Mutant("heads of queries for KV heads", PLAIN, APPEND, rf"(?<!\w)head({AT}) \* (key|value)_stride_head", r"(head\1 // 2) * \2_stride_head", "append/T1"),
    Mutant("heads of a query's group apart", PLAIN, APPEND, r"\* (key|value)_stride_token", r"* (\1_stride_token // 3)", "append/T7"),
    Mutant("blocks assumed to follow each other", ("plain_nhd", "plain_minor", "hnd"), APPEND, r"\* \w+_cache_stride_block(?: \* STRIDE_UNIT)?", "* (BLOCK_SIZE * 3 * HEAD_DIM)", "append/inside"),
    Mutant("blocks assumed to follow each other", ("plain_planar",), APPEND, r"\* cache_stride_block(?: \* STRIDE_UNIT)?", "* 364", "append/inside"),
    Mutant("V with K's strides", ("plain_nhd", "hnd"), APPEND, r"\* value_cache_stride", "* key_cache_stride", "append/padded"),
    Mutant("V with K's strides", ("plain_minor",), APPEND, r"\* value_cache_stride_(block|head)", r"* key_cache_stride_\1", "append/padded"),
    Mutant("strides swapped", ("plain_nhd", "hnd"), APPEND, r"key_cache_stride_(slot|head)(?!,)", lambda m: f"key_cache_stride_{'head' if m[1] == 'slot' else 'slot'}", "append/T1"),
    Mutant("strides swapped", ("plain_planar",), APPEND, r"\* (60|12)\n", lambda m: f"* {72 - int(m[1])}\n", "append/T1"),
    Mutant("strides swapped", ("plain_minor",), APPEND, r"key_cache_stride_(slot|dim_div4)(?!,)", lambda m: f"key_cache_stride_{'dim_div4' if m[1] == 'slot' else 'slot'}", "append/T7"),
    Mutant("last head never written", ("plain_nhd", "plain_planar"), APPEND, "NUM_HEADS: tl.constexpr = 3", "NUM_HEADS: tl.constexpr = 2", "append/T1"),
    Mutant("last head never written", ("plain_minor",), APPEND, r"head = \(tl\.program_id\(0\) % 3\)\.to\(tl\.int64\)", "head = tl.minimum(tl.program_id(0) % 3, 1).to(tl.int64)", "append/T1"),
    Mutant("tail of dims never written", PLAIN, APPEND, "dim < HEAD_DIM", "dim < HEAD_DIM - 1", "append/T1"),
    Mutant("mask of the tail lost", ("plain_nhd", "plain_planar"), APPEND, r"( key,\s+mask=.*) & \(dim < HEAD_DIM\)\[.*?\]", r"\1", "append/T7"),
    Mutant("mask of the tail lost", ("plain_minor", "tiles"), APPEND, r"( key,\s+mask=)\(dim < HEAD_DIM\)", r"\1(dim < 16)", "append/T7"),
    Mutant("wrong split", ("plain_minor", "tiles", "tiles_planar"), APPEND, r"\(dim // 4\)", "(dim // 2)", "append/T1"),
    Mutant("wrong remainder", ("plain_minor", "tiles", "tiles_planar"), APPEND, r"\(dim % 4\)", "(dim % 2)", "append/T1"),
]

STREAMS = [
    Mutant("V on top of K", ("pair_nhd", "pair_minor", "layers_minor"), APPEND, r"\+ cache_stride_kv(?: \* STRIDE_UNIT)?", "", "append/T1"),
    Mutant("V on top of K", ("plain_planar", "layers_planar"), APPEND, r"\+ (184|180)(?=,\n\s+value,)", "", "append/T1"),
    Mutant("K for V", PLAIN, APPEND, r"(?<=\s)value,(?=\n\s+mask)", "key,", "append/T1"),
    Mutant("K and V swapped", PLAIN, APPEND, r"= tl\.load\(\s+(key|value)_ptr", lambda m: m[0].replace(m[1], "value" if m[1] == "key" else "key"), "append/T1"),
    Mutant("append_value a slot too far", ("plain_nhd", "plain_planar", "hnd"), "_append_value_kernel", SLOT, "slot = (slot_number + 1) % BLOCK_SIZE", "append_value/alone"),
    Mutant("append_value a slot too far", ("plain_minor", "tiles"), "_append_value_kernel", r"run_slot = ", "run_slot = 1 + ", "append_value/alone"),
    Mutant("layer ignored", placed("layers"), APPEND, r"\+ layer \* cache_stride_layer(?: \* STRIDE_UNIT)?", "", "append/last_layer"),
    Mutant("layer of the one before", placed("layers"), APPEND, r"layer \* cache_stride_layer", "(layer - 1) * cache_stride_layer", "append/last_layer"),
    Mutant("layer ignored by gather", placed("layers"), GATHER, r"\+ layer \* cache_stride_layer(?: \* STRIDE_UNIT)?", "", "gather/last_layer"),
    Mutant("padding inside a record forgotten", ("record_nhd",), APPEND, r"\+ 16(?=,\n\s+value,)", "+ 12", "append/T1"),
    Mutant("padding inside a record forgotten", ("plain_planar",), APPEND, r"\+ 184(?=,\n\s+value,)", "+ 180", "append/T1"),
    Mutant("padding inside a record forgotten", ("record_planar_minor",), APPEND, r"\+ 64(?=,\n\s+value,)", "+ 60", "append/T1"),
    Mutant("padding not filled", placed("filled"), APPEND, r"(tl\.store\(pad_ptrs, 3, mask=)", r"\1False & ", "append/T1"),
    Mutant("padding filled with another byte", placed("filled"), APPEND, r"tl\.store\(pad_ptrs, 3", "tl.store(pad_ptrs, 0", "append/T1"),
    Mutant("padding of skipped tokens filled", placed("filled"), APPEND, r"(?s)(    block = slot_number // BLOCK_SIZE.*?tl\.store\(pad_ptrs, 3, mask=)valid", r"    slot_number = tl.where(valid, slot_number, num_slots - 3)\n\1(slot_number >= 0)", "append/skipped"),
]

READS = [
    Mutant("gather reads a slot too far", PLAIN, GATHER, SLOT, "slot = (slot_number + 1) % BLOCK_SIZE", "gather/T1"),
    Mutant("gather of V from K", ("plain_nhd",), GATHER, r"value_cache_ptr\n", "key_cache_ptr\n", "gather/T1"),
    Mutant("gather of V from K", ("plain_planar", "layers_planar"), GATHER, r"\+ (184|180)(?=,\n\s+mask=)", "", "gather/T1"),
    Mutant("gather of V from K", ("pair_nhd", "pair_minor"), GATHER, r"\+ cache_stride_kv(?: \* STRIDE_UNIT)?", "", "gather/T1"),
    Mutant("skipped rows zeroed", PLAIN, GATHER, r"written = valid\n", "written = in_range\n", "gather/skipped_strided"),
    Mutant("skipped rows not zeroed", PLAIN, GATHER, r"written = in_range\n", "written = valid\n", "gather/skipped_dense_zeroed"),
    Mutant("rows of the output assumed dense", PLAIN, GATHER, r"\* key_out_stride_token(?: \* STRIDE_UNIT)?", "* (3 * HEAD_DIM)", "gather/skipped_strided"),
    Mutant("cached pages assumed to follow each other", ("plain_nhd", "plain_minor", "hnd"), GATHER, r"\* \w+_cache_stride_block(?: \* STRIDE_UNIT)?", "* (BLOCK_SIZE * 3 * HEAD_DIM)", "gather/inside"),
    Mutant("cached pages assumed to follow each other", ("plain_planar",), GATHER, r"\* cache_stride_block(?: \* STRIDE_UNIT)?", "* 364", "gather/inside"),
    Mutant("32-bit address in gather", PLAIN, GATHER, rf"(\w*block{AT} \* \w*cache_stride_block)", r"(\1).to(tl.int32)", "gather/huge"),
    Mutant("start of a request ignored", PLAIN, "_gather_paged_kernel", r"position \+= tl\.load\(starts", "position += 0 * tl.load(starts", "gather_paged/starts"),
    Mutant("a token past the request's length read", PLAIN, "_gather_paged_kernel", r"position < tl\.load\(seq_lens", "position <= tl.load(seq_lens", "gather_paged/ragged"),
]

CRASHES = [
    Mutant("mask of another rank", PLAIN[:2], APPEND, r"valid(\[[^\]]*\]) &", r"valid[:, None, None, None] &", "append/T1"),
    Mutant("mask of another rank", PLAIN[2:], APPEND, r"valid(\[[^\]]*\]) &", r"valid[:, None, None, None] &", "append/prefill"),
    Mutant("name that nothing has", PLAIN, APPEND, r"block = slot_number", "block = slot_numbers", "append/T1"),
    Mutant("right tensors refused", PLAIN, "append", r"\(NUM_HEADS, HEAD_DIM\)", "(NUM_HEADS + 1, HEAD_DIM)", "append/T1"),
]
"""Mistakes that end a call: the harness says so, but nobody needs it to find them."""
# fmt: on
MUTANTS = [*SLOTS, *TABLES, *STRIDES, *STREAMS, *READS]


@pytest.mark.parametrize(("mutant", "name"), pairs(MUTANTS))
def test_is_noticed(mutant: Mutant, name: str) -> None:
    check_layout(mutant, LAYOUTS, name)


@pytest.mark.parametrize("mutant", CRASHES, ids=lambda m: m.kind)
def test_a_crash_is_told(mutant: Mutant) -> None:
    """And is no mutant that counts."""
    for name in mutant.layouts:
        module = runtime.import_module(name, mutant.apply(text_of(LAYOUTS, name)))
        (result,) = harness.run(LAYOUTS[name], module, only=mutant.case).results
        assert result.outcome == "failed"
        assert "raised" in result.message
        with pytest.raises(AssertionError, match="a crash and no mutant"):
            check_layout(mutant, LAYOUTS, name)


def test_kinds() -> None:
    """Enough of them, each in three layouts: with planes and with slots below dims too, but for what these lack."""
    fewer = {
        "V with K's strides": "planes lie in one tensor, and have one set of strides",
        "last band never written": "only slots below dims are written some dims at a time",
    }
    check_spread(MUTANTS, at_least=55, fewer=fewer)


def test_an_edit_without_effect_does_not_count() -> None:
    idle = Mutant(
        "nothing",
        PLAIN,
        APPEND,
        r"slot = slot_number % BLOCK_SIZE",
        "slot = (slot_number + 0) % BLOCK_SIZE",
        "append/T1",
    )
    with pytest.raises(AssertionError, match="nothing is changed"):
        check_layout(idle, LAYOUTS, "plain_nhd")


def test_an_unnoticed_mutant_is_told() -> None:
    """A case that does not look: it makes its calls and passes."""
    mutant = SLOTS[0]

    def blind(module: object) -> Report:
        report = harness.run(LAYOUTS["plain_nhd"], module, only=mutant.case)
        return replace(report, results=tuple(replace(r, outcome="passed", message="") for r in report.results))

    with pytest.raises(AssertionError, match="the harness has not noticed"):
        check(mutant, "plain_nhd", text_of(LAYOUTS, "plain_nhd"), blind)
