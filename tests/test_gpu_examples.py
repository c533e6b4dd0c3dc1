"""Examples and operators on a GPU: the larger decoder, pinned host memory, and graphs that Inductor compiles."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.generated import ROOT, module_of, shipped, transfer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["decode.py", "offload.py"])
def test_example(name: str) -> None:
    if name == "decode.py" and find_spec("transformers") is None:
        pytest.skip("transformers is not installed (extra `examples`)")
    command = [sys.executable, str(ROOT / "examples" / name), "--device", "cuda"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", ["paged_nhd", "nhd_fp8_token_head"])
def test_inductor_keeps_append_and_gather_in_one_graph(name: str) -> None:
    module = module_of(shipped(name))
    ops, buffers = module.register_ops(), module.allocate(8, device="cuda")

    @torch.compile(fullgraph=True, dynamic=True)
    def step(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ops.append(key * 2, value, *buffers, slots)
        return ops.gather(*buffers, slots)

    for tokens in (3, 40):
        slots = torch.randperm(128, device="cuda")[:tokens]
        key, value = (torch.randn(tokens, 8, 128, device="cuda").bfloat16() for _ in range(2))
        found = step(key, value, slots)
        others = module.allocate(8, device="cuda")
        module.append(key * 2, value, *others, slots)
        for rows, wanted in zip(found, module.gather(*others, slots), strict=True):
            assert torch.equal(rows, wanted)


def test_inductor_keeps_pages_and_transfers_in_one_graph() -> None:
    """All layers to pinned memory, after pages were copied and zeroed; compiled once for all numbers of pages."""
    cache, host = module_of(shipped("paged_nhd")), module_of(shipped("host_page_first"))
    moves = module_of(transfer("nhd_to_host_page_first"))
    ops, away = cache.register_ops(), moves.register_ops()

    @torch.compile(fullgraph=True, dynamic=True)
    def step(keys: list[torch.Tensor], values: list[torch.Tensor], memory: Any, pairs: Any, blocks: Any) -> None:
        for key, value in zip(keys, values, strict=True):
            ops.copy_blocks(key, value, pairs)
            ops.zero_blocks(key, value, blocks)
        away.transfer_blocks(keys, values, memory, blocks, blocks)

    for count in (3, 5):
        pools = torch.randn(2, 2, 12, 16, 8, 128, device="cuda").bfloat16()
        others = pools.clone()
        memory, wanted = (host.allocate(12, num_layers=2, pin_memory=True) for _ in range(2))
        pairs = torch.randperm(12, device="cuda")[: 2 * count].view(count, 2)
        step([*pools[0]], [*pools[1]], memory, pairs, pairs[:, 0].contiguous())
        for key, value in zip(*others, strict=True):
            cache.copy_blocks(key, value, pairs)
            cache.zero_blocks(key, value, pairs[:, 0].contiguous())
        moves.transfer_blocks([*others[0]], [*others[1]], wanted, *[pairs[:, 0].contiguous()] * 2)
        torch.cuda.synchronize()
        assert torch.equal(pools, others)
        assert torch.equal(memory, wanted)
        assert memory.is_pinned()
