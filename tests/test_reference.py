"""The oracle itself: against brute force, and against the arithmetic that engines publish."""

from __future__ import annotations

import pytest
import torch

from kvgen import reference
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
