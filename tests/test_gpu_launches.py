"""Kept launches on a GPU: whatever tensors come next, their bytes land where they belong."""

import dataclasses
import threading

import pytest
import torch

from tests.generated import module_of, shipped

pytestmark = pytest.mark.gpu
HEADS, DIM, BLOCKS, SIZE = 8, 128, 8, 16


@pytest.fixture(scope="module")
def module():
    return module_of(shipped("paged_nhd"))


def source(kind: int, tokens: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """[tokens, 8, 128]: dense, sliced from a fused projection, off its alignment, or with padded heads."""
    values = torch.randn(tokens, 24 * DIM + 8, device=device).to(dtype)
    if kind == 0:
        return values[:, : HEADS * DIM].reshape(tokens, HEADS, DIM)
    if kind == 1:
        return values[:, 16 * DIM : 24 * DIM].unflatten(1, (HEADS, DIM))
    if kind == 2:
        return values[:, 1 : 1 + HEADS * DIM].unflatten(1, (HEADS, DIM))
    return values.as_strided((tokens, HEADS, DIM), (24 * DIM + 8, DIM + 8, 1))


def pool(kind: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """[BLOCKS, SIZE, HEADS, DIM]: dense, padded pages, or off its alignment."""
    if kind == 0:
        return torch.zeros(BLOCKS, SIZE, HEADS, DIM, dtype=dtype, device=device)
    page = SIZE * HEADS * DIM + (64 if kind == 1 else 8)
    flat = torch.zeros(BLOCKS * page + 8, dtype=dtype, device=device)
    return flat[3 * (kind == 2) :].as_strided((BLOCKS, SIZE, HEADS, DIM), (page, HEADS * DIM, DIM, 1))


def append_and_check(module, key, value, key_cache, value_cache, slots) -> None:
    before = key_cache.clone(), value_cache.clone()
    module.append(key, value, key_cache, value_cache, slots)
    for cache, old, new in ((key_cache, before[0], key), (value_cache, before[1], value)):
        expected = old.flatten(0, 1)
        inside = slots >= 0
        expected[slots[inside].long()] = new[: len(slots)][inside]
        assert torch.equal(cache.flatten(0, 1), expected)


def test_twenty_kinds_of_tensors_take_turns(module) -> None:
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    generator = torch.Generator().manual_seed(1)
    kinds = []
    for number in range(20):
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        device = devices[number % len(devices)]
        tokens = (1, 5, 33, 64)[number % 4]
        slots = torch.randperm(BLOCKS * SIZE, generator=generator)[:tokens]
        slots[::7] = -1
        slots = slots.to(device=device, dtype=(torch.int64, torch.int32)[number // 2 % 2])
        caches = [pool(number % 3, dtype, device), pool((number + 1) % 3, dtype, device)]
        kinds.append((tokens, number % 4, dtype, device, caches, slots))
    for _ in range(3):
        for number in torch.randperm(20, generator=generator).tolist():
            tokens, kind, dtype, device, caches, slots = kinds[number]
            # Fresh each time: the allocator hands old addresses to tensors of other kinds.
            key, value = source(kind, tokens, dtype, device), source((kind + 1) % 4, tokens + 2, dtype, device)
            append_and_check(module, key, value, *caches, slots)
    assert 0 < len(module._append_kept.known) <= 20


def test_the_second_call_starts_directly(module) -> None:
    key, value = source(1, 4, torch.bfloat16, "cuda"), source(1, 4, torch.bfloat16, "cuda")
    caches = pool(0, torch.bfloat16, "cuda"), pool(0, torch.bfloat16, "cuda")
    slots = torch.arange(4, device="cuda")
    module.append(key, value, *caches, slots)
    kernel, module._append_kernel = module._append_kernel, None
    try:
        key.add_(1)
        append_and_check(module, key, value, *caches, slots + 4)
    finally:
        module._append_kernel = kernel


def test_other_streams_and_threads(module) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                caches = pool(seed % 2, torch.bfloat16, "cuda"), pool(0, torch.bfloat16, "cuda")
                for step in range(40):
                    tokens = 1 + (seed * step) % 17
                    key, value = (source(k, tokens, torch.bfloat16, "cuda") for k in (seed % 2, 1))
                    append_and_check(module, key, value, *caches, torch.randperm(128, device="cuda")[:tokens])
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_graph_replays_kept_launches_with_what_the_tensors_hold_then(module) -> None:
    key, value = source(1, 6, torch.bfloat16, "cuda"), source(1, 6, torch.bfloat16, "cuda")
    caches = pool(1, torch.bfloat16, "cuda"), pool(0, torch.bfloat16, "cuda")
    slots = torch.arange(6, device="cuda")
    module.append(key, value, *caches, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module.append(key, value, *caches, slots)
    key.copy_(torch.randn_like(key))
    value.copy_(torch.randn_like(value))
    slots.copy_(torch.tensor([90, -1, 3, 127, 64, 31], device="cuda"))
    for cache in caches:
        cache.zero_()
    graph.replay()
    for cache, new in zip(caches, (key, value), strict=True):
        expected = torch.zeros(BLOCKS * SIZE, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        expected[slots[slots >= 0]] = new[slots >= 0]
        assert torch.equal(cache.flatten(0, 1), expected)


def test_what_is_not_compiled_is_not_captured(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    layout = dataclasses.replace(shipped("paged_nhd"), name="never_compiled")
    module = module_of(layout)
    key, value = source(0, 6, torch.bfloat16, "cuda"), source(0, 6, torch.bfloat16, "cuda")
    caches = pool(0, torch.bfloat16, "cuda"), pool(0, torch.bfloat16, "cuda")
    slots = torch.arange(6, device="cuda")
    with pytest.raises(RuntimeError, match="call the function once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        module.append(key, value, *caches, slots)
    append_and_check(module, key, value, *caches, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module.append(key, value, *caches, slots + 6)
    graph.replay()
    assert torch.equal(caches[0].flatten(0, 1)[6:12], key)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_tensors_of_another_gpu_than_the_current_one(module) -> None:
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        key, value = source(1, 6, torch.bfloat16, device), source(1, 6, torch.bfloat16, device)
        caches = pool(0, torch.bfloat16, device), pool(0, torch.bfloat16, device)
        for _ in range(2):
            append_and_check(module, key, value, *caches, torch.arange(6, device=device))
