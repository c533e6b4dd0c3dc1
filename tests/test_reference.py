"""The oracle itself: against brute force, and against the arithmetic that engines publish."""

from __future__ import annotations

import pytest
import torch

from kvgen import reference
from kvgen.axes import Digit
from kvgen.harness.pools import GEOMETRIES, PoolFactory
from kvgen.resolve import load_text
from tests.addresses import check_views
from tests.generated import SHIPPED, shipped, shipped_text

SHARDED = """
name: sharded
axes: {head: 1, dim: 2}
block_size: 4
buffers:
  key_cache: {holds: key, order: block slot head dim}
streams: {key: {}}
slots: {shard: {world: 2, interleave: 2}}
"""


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("geometry", ["compact", "padded_odd", "inside", "transposed"])
def test_values_lie_where_brute_force_says(name: str, geometry: str) -> None:
    # A long maximum length says nothing that a short one does not, and brute force looks at every byte.
    text = shipped_text(name).replace("block_size: 4096", "block_size: 6")
    check_views(load_text(text), text, geometry)


def paged(slots: str = "") -> tuple:
    """A small layout of one buffer, and a pool of 3 blocks × 4 slots filled with its element numbers."""
    text = SHARDED.split("slots:")[0] + slots
    layout = load_text(text)
    pool = torch.arange(3 * 4 * 1 * 2, dtype=torch.float32).view(3, 4, 1, 2).bfloat16()
    return layout, {"key_cache": pool}


def test_append_writes_rows_and_nothing_else() -> None:
    layout, buffers = paged()
    before = buffers["key_cache"].clone()
    key = torch.tensor([[[100.0, 101.0]], [[102.0, 103.0]], [[104.0, 105.0]]]).bfloat16()
    reference.append(layout, {"key": key}, buffers, torch.tensor([5, -1, 11]))
    before[1, 1], before[2, 3] = key[0], key[2]
    assert torch.equal(buffers["key_cache"], before)


def test_the_last_of_two_tokens_wins() -> None:
    layout, buffers = paged()
    key = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]]).bfloat16()
    reference.append(layout, {"key": key}, buffers, torch.tensor([6, 6, 2]))
    assert torch.equal(buffers["key_cache"][1, 2], key[1])
    assert torch.equal(buffers["key_cache"][0, 2], key[2])


def test_gather_leaves_or_zeroes_skipped_rows() -> None:
    layout, buffers = paged()
    slots = torch.tensor([4, 12, -3, 0])
    out = {"key": torch.full((4, 1, 2), 7.0, dtype=torch.bfloat16)}
    assert reference.gather(layout, buffers, slots, out=out)["key"].flatten().tolist() == [8, 9, 7, 7, 7, 7, 0, 1]
    assert reference.gather(layout, buffers, slots)["key"].flatten().tolist() == [8, 9, 0, 0, 0, 0, 0, 1]
    reference.gather(layout, buffers, slots, out=out, zero_skipped=True)
    assert out["key"].flatten().tolist() == [8, 9, 0, 0, 0, 0, 0, 1]


def test_order_of_the_slot_checks() -> None:
    """Skip rule, table's length, look-up, negatives, pool: the named slot is skipped before the look-up, not after."""
    layout, buffers = paged("slots: {skip: 1, remap: table}")
    table = torch.tensor([1, 5, -1, 12, 3])
    keep, numbers = reference.resolve_slots(
        layout, torch.tensor([0, 1, 2, 3, 4, 5, -1]), reference.num_slots(layout, buffers), table
    )
    assert keep.tolist() == [True, False, False, False, True, False, False]
    assert numbers.tolist() == [1, 3]


def test_decode_and_prefill_mappings() -> None:
    layout, _ = paged()
    table = torch.tensor([[7, 2], [5, -1]], dtype=torch.int32)
    assert reference.slot_mapping(layout, table, torch.tensor([5, 3])).tolist() == [9, 23]
    assert reference.slot_mapping(layout, table, context_lens=torch.tensor([8, 4])).tolist() == [-1, -1]
    bounds = torch.tensor([0, 3, 5])
    found = reference.slot_mapping(
        layout, table, context_lens=torch.tensor([2, 3]), query_start_loc=bounds, num_tokens=7
    )
    assert found.tolist() == [30, 31, 8, 23, -1, -1, -1]
    ids = torch.tensor([1, 0, 2, -1])
    assert reference.slot_mapping(layout, table, torch.tensor([0, 4, 0, 0]), request_ids=ids).tolist() == [
        20,
        8,
        -1,
        -1,
    ]


def test_each_token_lies_on_one_rank() -> None:
    """World 2, interleave 2, blocks of 4: positions 0 1 4 5 of a virtual block of 8 are rank 0's slots 0 1 2 3."""
    layout = load_text(SHARDED)
    table = torch.tensor([[3, 1]])
    rows = [reference.fill_slots(layout, table[0], 0, 16, rank=rank).tolist() for rank in range(2)]
    assert rows[0] == [12, 13, -1, -1, 14, 15, -1, -1, 4, 5, -1, -1, 6, 7, -1, -1]
    assert rows[1] == [-1, -1, 12, 13, -1, -1, 14, 15, -1, -1, 4, 5, -1, -1, 6, 7]


def test_filled_padding_is_written_with_its_token() -> None:
    text = """
name: padded
axes: {head: 2, dim: 1}
block_size: 2
streams: {key: {}}
buffers:
  cache:
    order: block slot head
    fields: [key, {pad: 2, fill: 9}, {pad: 2}]
"""
    layout = load_text(text)
    pool = torch.zeros(1, 2, 2, 3, dtype=torch.bfloat16)
    reference.append(layout, {"key": torch.ones(1, 2, 1).bfloat16()}, {"cache": pool}, torch.tensor([1]))
    words = pool.view(torch.int16)
    assert words[0, 0].flatten().tolist() == [0] * 6
    assert words[0, 1].tolist() == [[0x3F80, 0x0909, 0], [0x3F80, 0x0909, 0]]


def test_only_named_pages_are_touched() -> None:
    """Blocks gigabytes apart: what a call does not name takes no memory and no time."""
    layout = shipped("paged_nhd")
    pool = PoolFactory(layout, "cpu", 0).make("huge")
    reach = (pool.actual["key_cache"].shape[0] - 1) * pool.actual["key_cache"].stride(0)
    assert reach > 2**31
    key = torch.ones(1, 8, 128).bfloat16()
    last = pool.sizes.slots - 1
    reference.append(layout, {"key": key, "value": key}, pool.expected, torch.tensor([last]))
    assert torch.equal(pool.expected["key_cache"][-1, -1], key[0])


def test_layers_are_bounded() -> None:
    layout = shipped("cross_layer_nhd")
    pool = PoolFactory(layout, "cpu", 0).make()
    slots = torch.tensor([0])
    for layer in (-1, pool.sizes.layers, None):
        with pytest.raises(ValueError, match="layer"):
            reference.gather(layout, pool.actual, slots, layer=layer)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_no_two_values_share_a_byte(geometry: str) -> None:
    """A geometry that overlapped would let a wrong module pass."""
    layout = load_text(shipped_text("paged_x_vector").replace("block_size: 16", "block_size: 3"))
    pool = PoolFactory(layout, "cpu", 0).make(geometry)
    for view in reference.leaf_views(layout, pool.expected).values():
        spans = sorted((s, n) for n, s in zip(view.tensor.shape, view.tensor.stride(), strict=True) if n > 1)
        reach = 0
        for stride, size in spans:
            assert stride > reach
            reach += stride * (size - 1)


RECORD = "name: mla_fp8_record\nblock_size: 4\n" + shipped_text("mla_fp8_record").split("block_size: 64\n")[1]


def test_record_in_656_bytes() -> None:
    """Latent all 1, rope all 2: 512 codes, four scales, 64 values as they came; no other token changes."""
    layout = load_text(RECORD)
    pool = torch.full((2, 4, 656), 0xAB, dtype=torch.uint8)
    sources = {"latent": torch.ones(2, 512).bfloat16(), "rope": torch.full((2, 64), 2.0).bfloat16()}
    reference.append(layout, sources, {"cache": pool}, torch.tensor([6, -1]))
    row = pool[1, 2]
    assert row[:512].unique().tolist() == [0x78]
    assert row[512:528].tolist() == [0x00, 0x00, 0x80, 0x3B] * 4
    assert row[528:].tolist() == [0x00, 0x40] * 64
    pool[1, 2] = 0xAB
    assert pool.unique().tolist() == [0xAB]


def test_record_parts_are_written_apart() -> None:
    layout = load_text(RECORD)
    pool = torch.full((2, 4, 656), 0xAB, dtype=torch.uint8)
    reference.append(layout, {"rope": torch.zeros(1, 64).bfloat16()}, {"cache": pool}, torch.tensor([0]))
    assert pool[0, 0, :528].unique().tolist() == [0xAB]
    pool.fill_(0xAB)
    reference.append(layout, {"latent": torch.zeros(1, 512).bfloat16()}, {"cache": pool}, torch.tensor([0]))
    assert pool[0, 0, 512:528].tolist() == [0x00, 0x00, 0x00, 0x39] * 4  # 2^-13
    assert pool[0, 0, 528:].unique().tolist() == [0xAB]


def test_plain_values_beside_codes_are_of_their_own_types() -> None:
    layout = load_text(RECORD)
    pool = {"cache": torch.zeros(2, 4, 656, dtype=torch.uint8)}
    for asked in (torch.float32, torch.float16, None):
        rows = reference.gather(layout, pool, torch.tensor([0]), dtype=asked)
        assert rows["latent"].dtype == (asked or torch.bfloat16)
        assert rows["rope"].dtype == (torch.float16 if asked == torch.float16 else torch.bfloat16)


def test_planar_page() -> None:
    """All codes of a page, then all its scales: token 1 of block 1."""
    layout = load_text(shipped_text("indexer_planar").replace("block_size: 64", "block_size: 4"))
    pool = torch.zeros(2, 4 * 132, dtype=torch.uint8)
    key = torch.full((1, 128), -3.5).bfloat16()
    reference.append(layout, {"key": key}, {"index_cache": pool}, torch.tensor([5]))
    scale = torch.tensor([3.5]) / torch.tensor([448.0])
    assert pool[1, 128:256].unique().tolist() == [0xFE]
    assert torch.equal(pool[1, 4 * 128 + 4 : 4 * 128 + 8], scale.view(torch.uint8))
    assert pool.count_nonzero() == 128 + scale.view(torch.uint8).count_nonzero()
    back = reference.gather(layout, {"index_cache": pool}, torch.tensor([5, 4]), dtype=torch.float32)["key"]
    assert torch.equal(back[0], torch.full((128,), -448.0) * scale)
    assert not back[1].any()


STATIC = """
name: static
axes: {head: 2, dim: 4}
block_size: 2
streams:
  key: {dtype: float32, quant: {mode: fp8_e4m3, scale: {per: head, source: static}}}
  value: {quant: {mode: int8, scale: {per: [], source: static}}}
buffers:
  cache: {order: block slot head, fields: [key, value]}
"""


def test_static_scales_are_arguments() -> None:
    layout = load_text(STATIC)
    buffers = {"cache": torch.zeros(1, 2, 2, 8, dtype=torch.uint8)}
    wide = torch.tensor([[9.0, 0.5], [9.0, 2.0]])
    scales = {"key_scale": wide[:, 1], "value_scale": torch.tensor([0.25])}
    sources = {"key": torch.full((1, 2, 4), 1.0), "value": torch.full((1, 2, 4), 1.0).bfloat16()}
    reference.append(layout, sources, buffers, torch.tensor([1]), scales=scales)
    assert buffers["cache"][0, 1].tolist() == [[0x40] * 4 + [4] * 4, [0x30] * 4 + [4] * 4]
    scales["value_scale"] = torch.tensor([1.5])
    out = reference.gather(layout, buffers, torch.tensor([1]), scales=scales)
    assert {name: rows.dtype for name, rows in out.items()} == {"key": torch.float32, "value": torch.bfloat16}
    assert out["key"].unique().tolist() == [1.0]
    assert out["value"].unique().tolist() == [6.0]
    with pytest.raises(ValueError, match="value_scale"):
        reference.gather(layout, buffers, torch.tensor([1]), scales={"key_scale": wide[:, 1]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decoded_values_are_rounded_once(dtype: torch.dtype) -> None:
    layout = load_text(STATIC)
    codes = torch.arange(128, dtype=torch.uint8).view(8, 2, 2, 4)
    cache = torch.cat([codes, codes], -1)
    scales = {"key_scale": torch.tensor([0.013, 37.0]), "value_scale": torch.tensor([0.1])}
    out = reference.gather(layout, {"cache": cache}, torch.arange(16), scales=scales, dtype=dtype)
    values = codes.view(torch.float8_e4m3fn).float().view(16, 2, 4) * scales["key_scale"].view(2, 1)
    assert torch.equal(out["key"].isnan(), values.isnan())
    assert torch.equal(out["key"].nan_to_num(), values.to(dtype).nan_to_num())
    assert torch.equal(out["value"], (codes.float().view(16, 2, 4) * torch.tensor(0.1)).to(dtype))


def test_scales_of_short_groups() -> None:
    """46 dims by 16, the groups of the last head and slot at the end of their buffer."""
    text = """
name: short
axes: {head: 3, dim: 46}
block_size: 2
streams: {key: {quant: {mode: int8, scale: {per: token head dim//16, dtype: float16}}}}
buffers:
  key_cache: {holds: key, order: block slot head dim}
  key_scales: {holds: key.scale, order: block dim//16 head slot}
"""
    layout = load_text(text)
    buffers = {
        "key_cache": torch.zeros(2, 2, 3, 46, dtype=torch.int8),
        "key_scales": torch.zeros(2, 3, 3, 2, dtype=torch.float16),
    }
    key = torch.arange(1, 139).view(1, 3, 46).to(torch.float16)
    reference.append(layout, {"key": key}, buffers, torch.tensor([3]))
    wanted = torch.tensor([[16, 62, 108], [32, 78, 124], [46, 92, 138]]) / torch.tensor(127.0)
    assert torch.equal(buffers["key_scales"][1, :, :, 1], wanted.half())
    assert buffers["key_scales"].count_nonzero() == 9
    out = reference.gather(layout, buffers, torch.tensor([3]), dtype=torch.float32)
    assert (out["key"] - key.float()).abs().max() < 0.6


def test_a_cast_without_a_scale() -> None:
    text = (
        STATIC.split("streams:")[0]
        + """
streams: {key: {dtype: float32, store: float16}}
buffers: {key_cache: {holds: key, order: block slot head dim}}
"""
    )
    layout = load_text(text)
    cache = torch.zeros(1, 2, 2, 4, dtype=torch.float16)
    key = torch.tensor([1.00048828125, 1e6, -1e-8, 65519.0]).expand(1, 2, 4)
    reference.append(layout, {"key": key}, {"key_cache": cache}, torch.tensor([0]))
    assert cache[0, 0, 0].tolist() == [1.0, float("inf"), 0.0, 65504.0]
    assert reference.gather(layout, {"key_cache": cache}, torch.tensor([0]))["key"].dtype == torch.float32


def test_a_slot_is_found_in_its_group() -> None:
    """What varies over pairs of slots, over blocks alone, and over slots alone."""
    pairs = reference.ByteView(torch.zeros(3, 2, 4), (Digit("block", 1, None), Digit("slot", 2, 2)))
    blocks = reference.ByteView(torch.zeros(3, 4), (Digit("block", 1, None),))
    slots = reference.ByteView(torch.zeros(2, 2, 4), (Digit("slot", 2, 2), Digit("slot", 1, 2)))
    numbers = torch.tensor([0, 1, 6, 11])
    assert [x.tolist() for x in pairs.at(numbers, 4)] == [[0, 0, 1, 2], [0, 0, 1, 1]]
    assert [x.tolist() for x in blocks.at(numbers, 4)] == [[0, 0, 1, 2]]
    assert [x.tolist() for x in slots.at(numbers, 4)] == [[0, 0, 1, 1], [0, 1, 0, 1]]
