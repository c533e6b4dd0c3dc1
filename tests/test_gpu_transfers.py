"""Transfers on a GPU: every case of the shipped ones, pinned host memory, one launch, and no memory of their own."""

from __future__ import annotations

import pytest
import torch

from kvgen import harness, reference_transfer
from kvgen.reference_transfer import Heads, SideTensors
from tests.generated import TRANSFERS, module_of, shipped, transfer
from tests.test_gpu_codes import mantissas
from tests.test_transfers import SHARED, into_shared

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", TRANSFERS)
def test_shipped_transfer(name: str) -> None:
    report = harness.run(transfer(name), module_of(transfer(name)), device="cuda")
    assert report.ok, str(report)
    print(report)


def offload(layers: int = 3, blocks: int = 6):
    """Pools of some layers on the device, with random values, and a pinned host pool."""
    caches = [[torch.randn(blocks, 16, 8, 128, device="cuda").bfloat16() for _ in range(layers)] for _ in range(2)]
    host = torch.zeros(2, 5 * 16, layers, 8, 128, dtype=torch.bfloat16).pin_memory()
    return caches, host


def test_to_pinned_memory_and_back() -> None:
    (keys, values), host = offload()
    there, back = (module_of(transfer(name)) for name in ("nhd_to_host_page_first", "host_page_first_to_nhd"))
    device_blocks, host_blocks = (torch.tensor(b, device="cuda") for b in ([4, 0, 5], [1, 4, 0]))
    there.transfer_blocks(keys, values, host, device_blocks, host_blocks)
    torch.cuda.synchronize()
    for layer, caches in enumerate(zip(keys, values, strict=True)):
        for side, cache in enumerate(caches):
            held = host[side, :, layer].view(5, 16, 8, 128)
            assert torch.equal(held[host_blocks.cpu()], cache[device_blocks].cpu())
            assert not held[[2, 3]].any()
    (again, _), _ = offload()
    kept = [cache.clone() for cache in again]
    again_values = [torch.zeros_like(cache) for cache in values]
    back.transfer_blocks(host, back.pointer_table(again), again_values, host_blocks, device_blocks)
    for layer in range(len(keys)):
        assert torch.equal(again[layer][device_blocks], keys[layer][device_blocks])
        assert torch.equal(again[layer][1:4], kept[layer][1:4])
        assert torch.equal(again_values[layer][device_blocks], values[layer][device_blocks])


def test_memory_that_is_not_pinned_is_refused() -> None:
    (keys, values), host = offload()
    blocks = torch.zeros(1, dtype=torch.int64, device="cuda")
    with pytest.raises(
        ValueError, match="kv_buffer: expected device cuda:0 or pinned host memory, got unpinned memory"
    ):
        module_of(transfer("nhd_to_host_page_first")).transfer_blocks(keys, values, host.clone(), blocks, blocks)


@pytest.mark.parametrize("name", ["nhd_to_hnd", "nhd_to_fp8", "packed_to_apart"])
def test_one_launch_and_no_memory_of_its_own(name: str) -> None:
    what, module = transfer(name), module_of(transfer(name))
    allocated = {}
    for layout in (what.source, what.destination):
        made = module_of(shipped(layout.name)).allocate(2048, device="cuda")
        allocated[layout.prefix] = made if isinstance(made, tuple) else (made,)
    slots = torch.randperm(2048 * 16, device="cuda")

    def call() -> None:
        module.transfer(*allocated["src_"], *allocated["dst_"], slots, slots)

    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert [event.name for event in kernels] == ["_transfer_kernel"]


def test_tables_are_used_while_a_graph_is_captured() -> None:
    (keys, values), host = offload()
    module = module_of(transfer("nhd_to_host_page_first"))
    tables = [module.pointer_table(caches) for caches in (keys, values)]
    blocks = torch.tensor([1, 2], device="cuda")
    module.transfer_blocks(*tables, host, blocks, blocks)
    torch.cuda.synchronize()
    host.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module.transfer_blocks(*tables, host, blocks, blocks)
    blocks.copy_(torch.tensor([3, 0]))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(host[0, :, 1].view(5, 16, 8, 128)[[3, 0]], keys[1][[3, 0]].cpu())
    assert not host.view(2, 5, -1)[:, [1, 2, 4]].any()


@pytest.mark.parametrize("per", SHARED)
def test_scales_that_tokens_share(per: str) -> None:
    what = into_shared(per)
    report = harness.run(what, module_of(what), device="cuda")
    assert report.ok, str(report)


def ties(source: torch.dtype, size: int = 32) -> torch.Tensor:
    """Groups from nothing to 15 scales of few bits, all multiples of half a scale between; and those a step beside."""
    halves = torch.arange(31, device="cuda") / 2
    odd, power = torch.arange(1, 64, 2, device="cuda"), torch.arange(-24, 16, device="cuda")
    scales = (odd[:, None] * torch.exp2(power.double())).flatten()
    groups = torch.nn.functional.pad((scales[:, None] * halves).to(source), (0, size - len(halves)))
    beside = [(groups[:, 1:-1].view(torch.int16) + step).view(source) for step in (-1, 1)]
    return torch.cat([groups, *(torch.cat([groups[:, :1], each, groups[:, -2:-1]], 1) for each in beside)])


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
def test_codes_above_a_minimum_are_those_of_the_reference(source: torch.dtype) -> None:
    """Groups of channels and of dims: every 16-bit value, every pair of mantissas, and what lies on and beside ties."""
    what, generator = transfer("nhd_to_int4_group"), torch.Generator("cuda").manual_seed(0)
    every = torch.randperm(1 << 16, generator=generator, device="cuda").to(torch.int16).view(source).view(-1, 32)
    shared = torch.tensor([0.0, -0.0, 1.5, 1e-7, -1e-40, 65504.0, float("inf"), -float("inf"), float("nan")])
    shared = shared.cuda().to(source)[:, None].expand(-1, 32)
    groups = torch.cat([every, shared, mantissas(32, source).view(-1, 32), ties(source)])
    groups = torch.cat([groups, groups.flip(0) * -1.0, (every * 0.25).roll(7, 0)])
    groups = torch.nn.functional.pad(groups, (0, 0, 0, -len(groups) % 2048))
    keys = groups.view(-1, 8, 128, 32).permute(0, 3, 1, 2).reshape(-1, 16, 8, 128).contiguous()
    pools = {"src_key_cache": keys, "src_value_cache": groups.view(-1, 16, 8, 128)}
    blocks = torch.randperm(len(keys), generator=generator, device="cuda")
    targets = torch.randperm(len(keys) // 4, generator=generator, device="cuda")
    names = [buffer.name for buffer in what.destination.buffers]
    found, expected = (module_of(shipped("nhd_int4_group")).allocate(len(targets), device="cuda") for _ in range(2))
    module_of(what).transfer_blocks(*pools.values(), *found, blocks, targets)
    slots = (reference_transfer.block_slots(each, size, 16 * len(keys)) for each, size in ((blocks, 16), (targets, 64)))
    sides = SideTensors([pools], None, {}), SideTensors([dict(zip(names, expected, strict=True))], None, {})
    reference_transfer.transfer(what, *sides, *slots, Heads(0, 0, None), None)
    for name, cache, wanted in zip(names, found, expected, strict=True):
        assert torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8)), name
