"""Mistakes in what moves whole pages and in transfers, planted in generated text: each is noticed.

As in test_mutants.py; transfers are planted in one from slots above heads, from slots below dims, and between planes.
"""

from __future__ import annotations

from functools import cache, partial

import pytest

from kvgen import harness
from kvgen.documents import load_text
from kvgen.emit.render import render_all
from kvgen.layout import Layout
from kvgen.transfer import Transfer
from tests.generated import ROOT
from tests.mutation import Mutant, check, check_layout, check_spread, family, pairs, placed

CODED = "{quant: {mode: int8, scale: {per: token head}}}"
SCALES = {"key.scale": "slot head", "value.scale": "slot head"}
APART = (
    "fields: [{key: head slot dim}, {value: slot head dim}, {pad: 8}, {key.scale: slot head}, {value.scale: slot head}]"
)
LAYOUTS: dict[str, Layout] = {
    **family("plain"),
    **family("coded", CODED, leaves=SCALES),
    "coded_planar": load_text(
        "name: coded_planar\naxes: {head: 3, dim: 12}\nblock_size: 5\n"
        f"streams: {{key: {CODED}, value: key}}\nbuffers: {{cache: {{order: block, {APART}}}}}\n"
    ),
}
PLAIN, CODES = placed("plain"), placed("coded")
COPY, ZERO, TABLE = "_copy_blocks_kernel", "_zero_blocks_kernel", "_gather_page_table_kernel"

SIZES = "axes: {head: 3, dim: 16}"
STREAM = "axes: {dim: 16}, streams: {key: {dim: 16, quant: {mode: fp8_e4m3, scale: {per: token}}}}"
ENDS = {
    "move_nhd": ("paged_nhd", "paged_hnd", SIZES),
    "move_minor": ("paged_x_vector", "paged_nhd", SIZES),
    "move_packed": ("packed_nhd", "stacked_nhd", SIZES),
    "move_planar": ("indexer_planar", "indexer_planar", STREAM),
    "move_codes": ("nhd_fp8_token_head", "packed_fp8_token_head", SIZES),
    "move_scales_minor": ("hnd_int8_token", "hnd_int8_token", SIZES),
}
"""From blocks of 5 to blocks of 6, in all layers."""
MOVES = ("move_nhd", "move_minor", "move_planar")
HEADS = ("move_nhd", "move_minor", "move_packed")
MOVE, MOVE_TILE, MOVE_BLOCKS = "_transfer_kernel", "_transfer_tile", "_transfer_blocks_tile"

# fmt: off
PAGES = [
    Mutant("pair read twice", PLAIN, COPY, r"pair_ptr \+ pairs_stride_side", "pair_ptr", "copy_blocks/n2"),
    Mutant("pair of the one before", PLAIN, COPY, r"\+ index \* pairs_stride_pair", "+ tl.maximum(index - 1, 0) * pairs_stride_pair", "copy_blocks/n2"),
    Mutant("copied onto itself", PLAIN, COPY, r"source \* (\w+_page\d?_block)", r"page * \1", "copy_blocks/n2"),
    Mutant("one block too far", PLAIN, COPY, r" page \* (\w+_page\d?_block)", r" (page + 1) * \1", "copy_blocks/n2"),
    Mutant("pair with a negative source copied", PLAIN, COPY, r"\(source < 0\)", "(source < -1)", "copy_blocks/skipped"),
    Mutant("pair with a negative destination copied", PLAIN, COPY, r"\(page < 0\)", "(page < -1)", "copy_blocks/skipped"),
    Mutant("pair with a source past the pool copied", PLAIN, COPY, r"\(source >= num_pages\)", "(source > num_pages)", "copy_blocks/skipped"),
    Mutant("pair with a destination past the pool copied", PLAIN, COPY, r"\(page >= num_pages\)", "(page > num_pages)", "copy_blocks/skipped"),
    Mutant("block number in 32 bits", PLAIN, COPY, r"(source|page) \* (\w+_page\d?_block),", r"(\1 * \2).to(tl.int32),", "copy_blocks/huge_int32"),
    Mutant("slots of a page shifted by one", PLAIN, COPY, r"at = tl\.zeros_like\(tile_row\)\.to\(tl\.int64\)", r"at = tl.zeros_like(tile_row).to(tl.int64) + 1", "copy_blocks/n2"),
    Mutant("tail of a run lost", PLAIN, "_page_tile", r"column < run \* LANES", "column < run * LANES - 1", "copy_blocks/n2"),
    Mutant("last run of a page lost", PLAIN, COPY, r"inside = tile_row < (\w+_rows)", r"inside = tile_row < \1 - 1", "copy_blocks/padded_odd"),
    Mutant("steps of a page taken for one", ("plain_nhd", "plain_minor", "coded_nhd"), COPY, r"at \+= tile_row\.to\(tl\.int64\) \* (\w+)_step_[12]", r"at += tile_row.to(tl.int64) * \1_step_0", "copy_blocks/padded"),
    Mutant("scales left behind", ("coded_nhd", "coded_minor"), COPY, r"part < \w+_scales_page_programs", "part < 0", "copy_blocks/n2"),
    Mutant("scales left behind", ("coded_planar",), COPY, r"part < cache_page1_programs", "part < 0", "copy_blocks/n2"),
    Mutant("one buffer's blocks as far apart as the other's", ("plain_nhd", "plain_minor", "coded_nhd"), COPY, r"\* value_cache_page_block", "* key_cache_page_block", "copy_blocks/padded"),
    Mutant("another block zeroed", PLAIN, ZERO, r" page \* (\w+_page\d?_block)", r" (page + 1) * \1", "zero_blocks/n2"),
    Mutant("a negative number zeroed", PLAIN, ZERO, r"\(page < 0\)", "(page < -1)", "zero_blocks/skipped"),
    Mutant("a number past the pool zeroed", PLAIN, ZERO, r"\(page >= num_pages\)", "(page > num_pages)", "zero_blocks/skipped"),
    Mutant("scales not zeroed", ("coded_nhd", "coded_minor"), ZERO, r"part < \w+_scales_page_programs", "part < 0", "zero_blocks/n2"),
    Mutant("scales not zeroed", ("coded_planar",), ZERO, r"part < cache_page1_programs", "part < 0", "zero_blocks/n2"),
]

PAGE_TABLES = [
    Mutant("entry of the page before", PLAIN, TABLE, r"\+ column \* req_to_page_stride_column", "+ tl.maximum(column - 1, 0) * req_to_page_stride_column", "gather_page_table/int32"),
    Mutant("last page of a request lost", PLAIN, TABLE, r"length \+ BLOCK_SIZE - 1", "length", "gather_page_table/int32"),
    Mutant("lengths counted in pages", PLAIN, TABLE, r"\(length \+ BLOCK_SIZE - 1\) // BLOCK_SIZE", "length", "gather_page_table/int32"),
    Mutant("row of the table by the request's place", PLAIN, TABLE, r"request \* req_to_page_stride_row", "out_row * req_to_page_stride_row", "gather_page_table/int32"),
    Mutant("rows of the table assumed dense", PLAIN, TABLE, r"request \* req_to_page_stride_row", "request * num_columns", "gather_page_table/int32"),
    Mutant("columns past the table", PLAIN, TABLE, r"column < num_columns", "column <= num_columns", "gather_page_table/int32"),
    Mutant("padding of another value", PLAIN, TABLE, r"tl\.cast\(padding, tl\.int64\)", "tl.cast(padding, tl.int64) - 1", "gather_page_table/int32"),
    Mutant("entries cut to 32 bits", PLAIN, TABLE, r"known = known & \(page == page.*\n", "known = known & (page == page)\n", "gather_page_table/mixed"),
]

TRANSFERS = [
    Mutant("pair with a negative source moved", MOVES, MOVE_TILE, r"src_slot_number >= 0", "src_slot_number >= -1", "transfer/skipped"),
    Mutant("pair with a negative destination moved", MOVES, MOVE_TILE, r"dst_slot_number >= 0", "dst_slot_number >= -1", "transfer/skipped"),
    Mutant("pair with a source past the pool moved", MOVES, MOVE_TILE, r"src_slot_number < src_num_slots", "src_slot_number <= src_num_slots", "transfer/skipped"),
    Mutant("pair with a destination past the pool moved", MOVES, MOVE_TILE, r"dst_slot_number < dst_num_slots", "dst_slot_number <= dst_num_slots", "transfer/skipped"),
    Mutant("slot of the destination a slot too far", MOVES, MOVE_TILE, r"dst_slot = dst_slot_number % DST_BLOCK_SIZE", "dst_slot = (dst_slot_number + 1) % DST_BLOCK_SIZE", "transfer/T7"),
    Mutant("block size of the other side", MOVES, MOVE_TILE, r"DST_BLOCK_SIZE: tl\.constexpr = 6", "DST_BLOCK_SIZE: tl.constexpr = 5", "transfer/T7"),
    Mutant("destinations in the order of sources", MOVES, MOVE_TILE, r"dst_slots_ptr \+ token", "src_slots_ptr + token", "transfer/T7"),
    Mutant("pointer table indexed from its end", MOVES, MOVE_TILE, r"src_(\w+)_table_ptr \+ layer", r"src_\1_table_ptr + num_layers - 1 - layer", "transfer/T7"),
    Mutant("destination's pointer table indexed by the next layer", MOVES, MOVE_TILE, r"dst_(\w+)_table_ptr \+ layer", r"dst_\1_table_ptr + (layer + 1) % num_layers", "transfer/T7"),
    Mutant("first layer for all", MOVES, MOVE_TILE, r"layer = tile % num_layers", "layer = tile % 1", "transfer/T7"),
    Mutant("layers of one tile each", MOVES, MOVE_TILE, r"tile = tile // num_layers", "tile = tile % num_layers", "transfer/capped"),
    Mutant("capped programs skip tiles", MOVES, MOVE, r"item \+= tl\.num_programs\(0\)", "item += tl.num_programs(0) + 1", "transfer/capped"),
    Mutant("tail of the tokens lost", MOVES, MOVE_TILE, r"in_range = token < num_tokens", "in_range = token < num_tokens - 1", "transfer/T7"),
    Mutant("heads of the destination from the first on", HEADS, MOVE_TILE, r"dst_heads = dst_head \+ head", "dst_heads = head", "transfer/heads"),
    Mutant("all heads of the tile", HEADS, MOVE_TILE, r"\(head < HEADS\)", "(head < 3)", "transfer/heads"),
    Mutant("K for V", HEADS, MOVE_TILE, r"(?<=\s)value,(?=\n)", "key,", "transfer/T7"),
    Mutant("scale field dropped", ("move_planar", "move_codes", "move_scales_minor"), MOVE_TILE, r"(?s)tl\.store\(\s*(?:key_scale_ptrs|dst_\w*scale\w*_ptr)(?=[^,]*,\s*key_scale\b.*?mask=)(.*?mask=)", lambda m: m[0] + "False & ", "transfer/T7"),
    Mutant("block of the destination a block late", MOVES, MOVE_BLOCKS, r"dst_blocks_ptr \+ (token|first) // DST_BLOCK_SIZE", r"dst_blocks_ptr + tl.maximum(\1 // DST_BLOCK_SIZE - 1, 0)", "transfer_blocks/many"),
    Mutant("tokens of the other side's blocks", MOVES, MOVE_BLOCKS, r"src_slot = token % SRC_BLOCK_SIZE", "src_slot = token % DST_BLOCK_SIZE % SRC_BLOCK_SIZE", "transfer_blocks/many"),
    Mutant("tokens past num_tokens moved", MOVES, MOVE_BLOCKS, r"in_range = token < num_tokens", "in_range = token < num_tokens + 1", "transfer_blocks/cut"),
    Mutant("negative block moved", MOVES, MOVE_BLOCKS, r"\(src_block >= 0\)", "(src_block >= -1)", "transfer_blocks/skipped"),
    Mutant("block past the pool written", MOVES, MOVE_BLOCKS, r"\(dst_block < dst_num_blocks\)", "(dst_block <= dst_num_blocks)", "transfer_blocks/skipped"),
]
# fmt: on
MUTANTS = [*PAGES, *PAGE_TABLES, *TRANSFERS]


@cache
def transfers() -> dict[str, Transfer]:
    path = str(ROOT / "layouts" / "transfers" / "mutants.yaml")
    found = {}
    for name, (source, destination, sizes) in ENDS.items():
        ends = [f"{{layout: {end}, {sizes}, block_size: {n}}}" for end, n in ((source, 5), (destination, 6))]
        found[name] = load_text(f"name: {name}\ntransfer: {{from: {ends[0]}, to: {ends[1]}}}\nlayers: all\n", path)
    return found


@cache
def texts() -> dict[str, str]:
    return render_all(list(transfers().values()))


@pytest.mark.parametrize(("mutant", "name"), pairs([*PAGES, *PAGE_TABLES]))
def test_of_pages_is_noticed(mutant: Mutant, name: str) -> None:
    check_layout(mutant, LAYOUTS, name)


@pytest.mark.parametrize(("mutant", "name"), pairs(TRANSFERS))
def test_of_a_transfer_is_noticed(mutant: Mutant, name: str) -> None:
    check(mutant, name, texts()[f"{name}.py"], partial(harness.run, transfers()[name], only=mutant.case))


def test_kinds() -> None:
    fewer = {
        "steps of a page taken for one": "planes of a page are one run each",
        "one buffer's blocks as far apart as the other's": "planes lie in one tensor",
        "heads of the destination from the first on": "the planes are of a stream without heads",
        "all heads of the tile": "the planes are of a stream without heads",
        "K for V": "the planes are of one stream",
    }
    check_spread(MUTANTS, at_least=45, fewer=fewer)
