"""Examples and operators on a GPU: the larger decoder, pinned host memory, and graphs that Inductor compiles."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.generated import ROOT, module_of, shipped

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
