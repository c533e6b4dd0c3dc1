"""Examples run, and say what they should."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.generated import ROOT


def run(name: str, *arguments: str, status: int = 0) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), "--device", "cpu", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed (extra `examples`)")
def test_a_decoder_keeps_its_cache_in_generated_pages() -> None:
    out = run("decode.py")
    assert "bf16 pages: logits differ in 0 of 12 steps" in out
    assert "two slots swapped: they differ in 6\n" in out
    assert "fp8 pages: they differ by at most 0.0" in out


def test_a_pool_comes_back_in_another_layout() -> None:
    out = run("offload.py")
    assert "37 tokens of 3 layers lie in host memory" in out
    assert "back in HND pages: every key and value is as it was" in out


def test_a_token_from_the_wrong_slot_is_told() -> None:
    out = run("offload.py", "--wrong-slot", status=1)
    assert [line for line in out.splitlines() if "FAILED" in line] == [
        f"FAILED: layer {layer}, {name} of token 0 differs" for layer in range(3) for name in ("key", "value")
    ]
