"""What launches check of tensors that the harness does not hand in: pools that share memory, and odd kinds."""

from __future__ import annotations

import random
import re
from types import ModuleType

import numpy as np
import pytest
import torch

from kvgen.resolve import load_text
from tests.generated import module_of, rendered, shipped

BLOCKS, N, H, D = 3, 16, 8, 128

DYNAMIC = """
name: sizes
axes: {head: dynamic, dim: dynamic, layer: dynamic}
block_size: dynamic
buffers:
  key_cache: {holds: key, order: layer block slot head dim}
  value_cache: {holds: value, order: layer block slot head dim}
"""


@pytest.fixture(scope="module")
def nhd() -> ModuleType:
    return module_of(shipped("paged_nhd"))


def rows(count: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(count, H, D).bfloat16() for _ in range(2))


def pool(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def slots() -> torch.Tensor:
    return torch.tensor([17, 3])


def test_allocate_pins_what_it_is_asked_to(nhd: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step: to pin a tensor that is there takes its memory twice."""
    asked: list[bool] = []
    monkeypatch.setattr(torch, "zeros", lambda *_, **options: asked.append(options["pin_memory"]))
    nhd.allocate(2, pin_memory=True)
    nhd.allocate(2)
    assert asked == [True, True, False, False]


@pytest.mark.parametrize(
    "views",
    [
        pool(2, BLOCKS, N, H, D).unbind(0),
        pool(BLOCKS, 2, N, H, D).unbind(1),
        pool(BLOCKS, N, 2, H, D).unbind(2),
        pool(BLOCKS, N, H, 2, D).unbind(3),
        pool(BLOCKS, N, 2, H, D).unbind(2)[::-1],
        (pool(2 * BLOCKS, N, H, D)[::2], pool(2 * BLOCKS, N, H, D)[1::2]),
        pool(2 * BLOCKS, N, H, D).split(BLOCKS),
        (pool(0, N, H, D), pool(0, N, H, D)),
    ],
)
def test_views_that_take_turns_in_one_allocation_are_taken(nhd: ModuleType, views: tuple[torch.Tensor, ...]) -> None:
    key, value = rows()
    nhd.append(key, value, *views, slots())
    if len(views[0]):
        assert torch.equal(views[0][1, 1], key[0])
        assert torch.equal(views[1][0, 3], value[1])


def test_buffers_that_share_memory_are_refused(nhd: ModuleType) -> None:
    key, value = rows()
    whole = pool(BLOCKS + 1, N, H, D)
    packed = pool(BLOCKS, N, H, 2 * D)
    shared = [
        (whole[:BLOCKS], whole[:BLOCKS]),
        (whole[:BLOCKS], whole[1:]),
        (whole[1:], whole[:BLOCKS]),
        (packed[..., :D], packed[..., D // 2 : D + D // 2]),
        (
            whole.view(-1)[: BLOCKS * N * H * D].view(BLOCKS, N, H, D),
            whole.view(-1)[8 : 8 + BLOCKS * N * H * D].view(BLOCKS, N, H, D),
        ),
        (whole[:BLOCKS], whole.view(BLOCKS + 1, H, N, D)[:BLOCKS].transpose(1, 2)),
    ]
    for key_cache, value_cache in shared:
        with pytest.raises(ValueError, match="value_cache: shares memory with key_cache"):
            nhd.append(key, value, key_cache, value_cache, slots())
        nhd.append_key(key, key_cache, slots())


def test_outputs_that_share_memory_are_refused(nhd: ModuleType) -> None:
    caches = pool(BLOCKS, N, H, D), pool(BLOCKS, N, H, D)
    whole = pool(3, H, D)
    for key, value in ((whole[:2], whole[:2]), (whole[:2], whole[1:])):
        with pytest.raises(ValueError, match="value_out: shares memory with key_out"):
            nhd.gather(*caches, slots(), out=(key, value))
    nhd.gather(*caches, slots(), out=pool(2, 2, H, D).unbind(1))  # rows that take turns


def test_shared_memory_is_told_as_sets_of_addresses_tell_it(nhd: ModuleType) -> None:
    """Two tensors of equal strides, at every distance: random shapes, gaps between dimensions, sizes that differ."""
    draw = random.Random(0)
    memory = torch.zeros(4000, dtype=torch.uint8)
    found = {True: 0, False: 0}
    for _ in range(400):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
        strides, reach = [], 0
        for size in reversed(shape):
            strides.insert(0, reach + draw.randint(1, 3))
            reach += strides[0] * (size - 1)
        smaller = [draw.randint(1, size) for size in shape]
        one = memory.as_strided(shape, strides, 1500)
        other = memory.as_strided(smaller, strides, 1500 + draw.randint(-reach - 3, reach + 3))
        sets = [_addresses(tensor) for tensor in (one, other)]
        assert nhd._meet(one, other) == nhd._meet(other, one) == bool(sets[0] & sets[1]), (shape, smaller, strides)
        found[bool(sets[0] & sets[1])] += 1
    assert min(found.values()) > 50


def _addresses(tensor: torch.Tensor) -> set[int]:
    grid = np.indices(tensor.shape).reshape(tensor.dim(), -1)
    return set((tensor.storage_offset() + np.array(tensor.stride()) @ grid).tolist())


def test_values_must_lie_in_memory_as_they_are(nhd: ModuleType) -> None:
    """A view that negates, as the imaginary part of a conjugate is, and tensors that have no strides."""
    key, value = rows()
    caches = [pool(BLOCKS, N, H, D) for _ in range(2)]
    with pytest.raises(ValueError, match=r"key: expected values as they lie in memory.*resolve_neg"):
        nhd.append(torch._neg_view(key), value, *caches, slots())
    with pytest.raises(ValueError, match="value_cache: expected values as they lie in memory"):
        nhd.gather(caches[0], torch._neg_view(caches[1]), slots())
    with pytest.raises(TypeError, match=r"key_cache: expected strided memory, got torch\.sparse_coo"):
        nhd.gather(caches[0].to_sparse(), caches[1], slots())
    with pytest.raises(TypeError, match="key_cache: expected dtype"):
        nhd.gather(torch.complex(caches[0].float(), caches[0].float()).conj(), caches[1], slots())


def test_sizes_of_the_launch_are_at_least_one() -> None:
    module = module_of(load_text(DYNAMIC))
    sizes = {"num_layers": 2, "block_size": 4, "num_heads": 3, "head_dim": 8}
    caches = module.allocate(0, **sizes)
    assert [tuple(cache.shape) for cache in caches] == [(2, 0, 4, 3, 8)] * 2
    row = torch.ones(1, 3, 8).bfloat16()
    module.append(row, row, *caches, torch.tensor([0]), layer=1)
    for name in sizes:
        for size in (0, 2**62):
            with pytest.raises(ValueError, match=rf"{name}: expected 1 to 2\*\*62 \(exclusive\), got {size}"):
                module.allocate(5, **(sizes | {name: size}))
    for dim in (2, 3, 4):
        empty = [cache.narrow(dim, 0, 0) for cache in module.allocate(5, **sizes)]
        with pytest.raises(ValueError, match=rf"key_cache: expected at least 1 in dimension {dim}"):
            module.append(row, row, *empty, torch.tensor([0]), layer=1)


def test_strides_are_counted_in_what_divides_them() -> None:
    """Of rows that the compiler would take for bytes; those that 16 divides it knows by itself."""
    text = rendered("packed_fp8_token_head")
    assert text.count("_stride_unit(8, kv_cache.stride(2))\n") == 6  # all that append, and gather values
    assert text.count("_stride_unit(8, kv_cache.stride(2), key_scale_out.stride(0), value_scale_out.stride(0))\n") == 2
    assert "kv_cache.stride(1),\n" in text
    assert "kv_cache.stride" not in "".join(re.findall(r"_stride_unit\(.*", rendered("packed_nvfp4")))


@pytest.mark.parametrize(("stride", "unit"), [(264, 8), (272, 8), (268, 4), (266, 2), (265, 1)])
def test_padded_rows_have_a_unit_of_their_own(stride: int, unit: int) -> None:
    module = module_of(shipped("packed_fp8_token_head"))
    assert module._stride_unit(8, stride, 8 * stride) == unit
    if stride % 4:
        return
    compact = torch.full((2, N, H, 264), 0xA5, dtype=torch.uint8)
    padded = torch.full((2 * N * H * stride,), 0xA5, dtype=torch.uint8)
    padded = padded.as_strided(compact.shape, (N * H * stride, H * stride, stride, 1))
    key, value = rows()
    for buffer in (compact, padded):
        module.append(key, value, buffer, torch.tensor([3, 17]))
    assert torch.equal(compact, padded)
    assert (compact[0, 3] != 0xA5).any()
