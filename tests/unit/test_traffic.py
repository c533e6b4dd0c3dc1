"""Bytes that functions move, counted from layouts."""

from pathlib import Path

import pytest

from kvgen.bench import traffic
from kvgen.resolve import load, load_text

LAYOUTS = Path(__file__).resolve().parents[2] / "layouts"
BF16 = {"key": "bfloat16", "value": "bfloat16", "latent": "bfloat16", "rope": "bfloat16"}
# values of a token, twice: as they come, and in the cache
COUNTS = {
    "paged_nhd": (4096 + 4096, 4096 + 4096),
    "cross_layer_nhd": (8192, 8192),  # one layer of them
    "paged_x_vector": (8192, 8192),
    "nhd_bf16k_fp8v": (4096 + 2048 + 1024, 4096 + 2048 + 1024),
    "nhd_fp8_token_head": (4096 + 2 * (1024 + 8 * 4), 4096 + 2 * (1024 + 8 * 4)),
    "nhd_nvfp4": (4096 + 2 * (512 + 64), 4096 + 2 * (512 + 64)),
    "nhd_fp8_block_head": (4096 + 2048, 4096 + 2048 + 4),  # 64 bytes of scales a block, which append does not write
    "mla": (2 * 1152, 2 * 1152),
    "mla_fp8_record": (1152 + 656, 1152 + 656),
    "mla_assembled": (1152 + 1152 + 1152, 1152 + 1152),  # rows of keys and, filled up with zeros, of values; read once
    "indexer_planar": (256 + 132, 256 + 132),
}


@pytest.mark.parametrize("name", COUNTS)
def test_bytes_of_shipped_layouts(name):
    layout = load(LAYOUTS / f"{name}.yaml")
    sizes = {"slot": layout.block_size}
    assert (traffic.appended(layout, sizes, 3, BF16), traffic.gathered(layout, sizes, 3, BF16)) == (
        3 * COUNTS[name][0],
        3 * COUNTS[name][1],
    )


OPEN = """
name: x
axes: {head: dynamic, dim: 6}
block_size: dynamic
buffers:
  k: {holds: key, order: block head slot dim}
  v: {holds: value, order: block slot head dim}
"""
PADDED = """
name: x
axes: {head: 2, dim: 6}
block_size: 8
buffers:
  p:
    order: block slot
    fields: [{pad: 4, fill: 0}, {order: head, fields: [key, value, {pad: 2, fill: 1}]}, {pad: 8}]
"""


def test_open_extents_and_other_types():
    dtypes = {"key": "float32", "value": "bfloat16"}
    moved = traffic.appended(load_text(OPEN), {"slot": 8, "head": 5}, 2, dtypes)
    assert moved == 2 * (30 * (4 + 2) + 2 * 30 * 2)


def test_padding_counts_where_it_is_written():
    layout = load_text(PADDED)
    assert traffic.appended(layout, {"slot": 8}, 1, BF16) == 48 + (4 + 48 + 2 * 2)
    assert traffic.gathered(layout, {"slot": 8}, 1, BF16) == 48 + 48


def test_a_transfer_reads_one_place_and_writes_all():
    layout = load(LAYOUTS / "mla_assembled.yaml")
    sizes = {"slot": layout.block_size}
    assert [traffic.one_side(layout, sizes, 3, source=source) for source in (True, False)] == [3 * 1152, 3 * 2 * 1152]
