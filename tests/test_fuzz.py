"""Texts that are almost layouts, in a process with little memory: `tools/fuzz.py` says what is wanted of them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.generated import ROOT
from tools import fuzz

COUNT = 500


def test_no_text_surprises_kvgen(tmp_path) -> None:
    command = [sys.executable, ROOT / "tools" / "fuzz.py", "--count", str(COUNT), "--keep", tmp_path / "failures"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    built, refused = map(int, re.fullmatch(rf"{COUNT} texts: (\d+) built, (\d+) refused\n", result.stdout).groups())
    # Both sides of right are looked at.
    assert built > 20
    assert refused > 300
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "fault", ["raise ValueError", "while True: pass", "bytearray(2 * fuzz.MEMORY)", "Path('x').touch()"]
)
def test_a_surprise_is_told_and_kept(fault: str, tmp_path) -> None:
    """The fuzzer notices a traceback, a hang, a large allocation, and a file that is left behind."""
    program = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from kvgen import documents
from tools import fuzz
fuzz.PATIENCE = 0.5
def load(path):
    import os
    os.chdir(path.parent)
    {fault}
    raise SystemExit(1)
documents.load = load
sys.exit(fuzz.fuzz(1, 60, 0, Path({str(tmp_path / "failures")!r})))
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "1 texts: 1 failed\n"), result.stderr
    assert [path.name for path in (tmp_path / "failures").iterdir()] == ["fuzz_0_0.yaml"]


def test_the_same_seed_draws_the_same_texts() -> None:
    first, second, other = fuzz.Mutator(5), fuzz.Mutator(5), fuzz.Mutator(6)
    drawn = [first.text() for _ in range(20)]
    assert drawn == [second.text() for _ in range(20)]
    assert drawn != [other.text() for _ in range(20)]


@pytest.mark.parametrize("name", ["layer_" * 200, '"a\\0b"', "..", "/"], ids=["long", "nul", "up", "root"])
def test_names_that_no_file_can_have(name: str, tmp_path) -> None:
    text = f"name: moved\ntransfer:\n  from: {name}\n  to: paged_nhd\n"
    assert fuzz.run(tmp_path, text.encode()) == "refused"
