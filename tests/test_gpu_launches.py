"""Kept launches on a GPU: whatever tensors come next, their bytes land where they belong."""

import dataclasses
import threading

import pytest
import torch

from kvgen import harness
from kvgen.harness.transfers import transfer_cases
from tests.generated import TRANSFERS, module_of, shipped, transfer

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


def test_scales_sliced_from_wider_tensors_start_directly_too(monkeypatch) -> None:
    """Each offset from a multiple of 16 has a launch that was compiled for it; bytes follow the scale handed in."""
    module = module_of(dataclasses.replace(shipped("nhd_fp8_tensor"), name="sliced_scales"))
    key, value = source(1, 4, torch.bfloat16, "cuda"), source(1, 4, torch.bfloat16, "cuda")
    caches = [pool(0, torch.bfloat16, "cuda").to(torch.float8_e4m3fn) for _ in range(2)]
    scales = torch.tensor([0.5, 0.25, 2.0, 1.0, 0.125, 4.0, 0.5, 8.0], device="cuda")
    slots = torch.arange(4, device="cuda")
    for first in range(4):
        module.append(key, value, *caches, slots, scales[first : first + 1], scales[7 - first : 8 - first])
    assert len(module._append_kept.known) == 4
    monkeypatch.setattr(module, "_append_kernel", None)
    for first in (2, 1, 1, 3, 0, 2):
        module.append(key, value, *caches, slots, scales[first : first + 1], scales[7 - first : 8 - first])
        for cache, rows, scale in zip(caches, (key, value), (scales[first], scales[7 - first]), strict=True):
            codes = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(cache.flatten(0, 1)[:4].view(torch.uint8), codes.view(torch.uint8))


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


EVERY = {"append", "append_positions", "gather", "gather_paged", "copy_blocks", "zero_blocks", "slot_mapping"}
STARTED = {
    "paged_nhd": EVERY | {"append_key", "append_value", "gather_page_table"},
    "cross_layer_nhd": EVERY,  # layers
    "context_parallel_nhd": EVERY,  # ranks
    "nhd_fp8_tensor": EVERY | {"gather_codes"},  # codes, and scales that are handed in
    "nhd_fused": {"append_fused", "append_fused_key"},
    "nhd_to_hnd": {"transfer", "transfer_blocks"},
    "nhd_to_host_layer_first": {"transfer", "transfer_blocks"},  # tables of pointers, and host memory
}


@pytest.mark.parametrize("name", STARTED)
def test_every_function_serves_whatever_tensors_come_next(name: str, monkeypatch) -> None:
    """Tensors of all kinds take turns as the harness calls functions, and again; what could be was started directly."""
    layout = transfer(name) if name in TRANSFERS else shipped(name)
    module, started = module_of(layout), set()

    def direct(compiled, *rest: object) -> object:
        launch = _direct(compiled, *rest)

        def counted(tensors: tuple, layer: int | None) -> bool:
            done = launch(tensors, layer)
            started.update({compiled.name} if done else ())
            return done

        return launch and counted

    _direct = module._direct
    monkeypatch.setattr(module, "_direct", direct)
    found = transfer_cases(layout) if name in TRANSFERS else harness.cases(layout, "cuda")
    names = [case.name for case in found if case.function in STARTED[name] and "huge" not in case.name]
    for _ in range(2):
        report = harness.run(layout, module, device="cuda", only=names)
        assert report.ok, str(report)
    assert {kernel.removeprefix("_").removesuffix("_kernel") for kernel in started} >= STARTED[name]


def test_keys_of_latent_attention() -> None:
    module = module_of(shipped("mla"))
    for heads, dtype in ((16, torch.bfloat16), (3, torch.float16), (16, torch.bfloat16), (16, torch.bfloat16)):
        k_nope, k_rope = torch.randn(7, heads, 128, device="cuda"), torch.randn(7, 576, device="cuda").to(dtype)
        k_nope, k_rope = k_nope.to(dtype), k_rope[:, 512:]
        found = module.concat_mla_key(k_nope, k_rope)
        assert torch.equal(found, torch.cat([k_nope, k_rope[:, None].expand(-1, heads, -1)], -1))
    assert len(module._concat_mla_key_kept.known) == 2


def test_pinned_host_memory_takes_turns_with_memory_of_the_device() -> None:
    """A kept transfer looks each time whether what lies on the host is pinned."""
    module = module_of(transfer("nhd_to_hnd"))
    source = [torch.randn(BLOCKS, SIZE, HEADS, DIM, device="cuda").to(torch.bfloat16) for _ in range(2)]
    slots = torch.randperm(BLOCKS * SIZE, device="cuda")
    pinned, plain = (
        [torch.zeros(BLOCKS, HEADS, SIZE, DIM, dtype=torch.bfloat16, pin_memory=pin) for _ in range(2)]
        for pin in (True, False)
    )
    for _ in range(3):
        for target in (pinned, [cache.cuda() for cache in plain]):
            module.transfer(*source, *target, slots, slots)
            torch.cuda.synchronize()
            for old, new in zip(source, target, strict=True):
                assert torch.equal(new.cpu().transpose(1, 2), old.cpu())
                new.zero_()
        with pytest.raises(ValueError, match="pinned"):
            module.transfer(*source, *plain, slots, slots)


def test_without_the_c_function_triton_launches(monkeypatch) -> None:
    module = module_of(dataclasses.replace(shipped("paged_nhd"), name="without_starter"))
    monkeypatch.setattr(module, "_starter", lambda: None)
    caches = pool(0, torch.bfloat16, "cuda"), pool(0, torch.bfloat16, "cuda")
    key, value = source(1, 4, torch.bfloat16, "cuda"), source(1, 4, torch.bfloat16, "cuda")
    for _ in range(2):
        append_and_check(module, key, value, *caches, torch.arange(4, device="cuda"))
    assert module._append_kept.known == {}
