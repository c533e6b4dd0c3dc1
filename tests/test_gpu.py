"""On a GPU: every case of every shipped layout, pools past 2³¹ elements and captured graphs among them."""

from __future__ import annotations

import pytest
import torch

from kvgen import harness
from kvgen.harness.pools import HUGE_ELEMENTS, PoolFactory
from tests.generated import SHIPPED, module_of, shipped

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_layout(name: str) -> None:
    report = harness.run(shipped(name), module_of(shipped(name)), device="cuda")
    assert report.ok, str(report)
    graphs = {r.case for r in report.results if r.case.endswith("/graph") and r.outcome == "passed"}
    assert {"gather/graph", "append/graph"} <= graphs or not hasattr(module_of(shipped(name)), "append")
    print(report)
    torch.cuda.empty_cache()


def test_a_dense_pool_past_32_bits() -> None:
    """A pool without a gap, of more than 2³¹ elements: the last slot is written and read, the first keeps its bytes."""
    layout = shipped("paged_nhd")
    module = module_of(layout)
    row = 8 * 128
    blocks = HUGE_ELEMENTS // (16 * row) + 2
    if torch.cuda.mem_get_info()[0] < 3 * blocks * 16 * row * 2:
        pytest.skip("the device has no room for two pools of 4 GiB")
    key_cache, value_cache = module.allocate(blocks, device="cuda")
    assert key_cache.numel() > HUGE_ELEMENTS
    fused = torch.randn(4, (32 + 16) * 128, device="cuda").bfloat16()
    key = fused[:, 32 * 128 : 40 * 128].unflatten(1, (8, 128))
    value = fused[:, 40 * 128 :].unflatten(1, (8, 128))
    last = blocks * 16 - 1
    slots = torch.tensor([last, last - 16, -1, last + 1], device="cuda")
    module.append(key, value, key_cache, value_cache, slots)
    for cache, source in ((key_cache, key), (value_cache, value)):
        assert torch.equal(cache[-1, -1], source[0])
        assert torch.equal(cache[-2, -1], source[1])
        assert not cache[:-2].any()
        assert not cache[-2:, :-1].any()
    rows = module.gather(key_cache, value_cache, slots)
    assert torch.equal(rows[0][:2], key[:2])
    assert torch.equal(rows[1][:2], value[:2])


def test_huge_cases_run_where_there_is_room() -> None:
    layout = shipped("paged_nhd")
    pool = PoolFactory(layout, "cuda", 0).make("huge")
    tensor = pool.actual["key_cache"]
    assert (tensor.shape[0] - 1) * tensor.stride(0) > HUGE_ELEMENTS
