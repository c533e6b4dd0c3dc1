"""Kernels compiled ahead of ``kvgen bench``: without a GPU, and under the keys that calls on real tensors look for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import triton

from kvgen.bench import ahead
from tests.command import searching
from tests.generated import ROOT, shipped

CODE = """
import os
from pathlib import Path
from kvgen.bench import ahead
from kvgen.emit import render_layout
from kvgen.resolve import load

ahead._prepare(("cuda", 90, 32))
layout = load("layouts/nhd_fused.yaml")
job = ahead.Job(layout, render_layout(layout), {1: ("append_fused",), 300: ("append_fused",)}, 1024)
for ahead.NOWHERE in ("meta", "cpu"):
    ahead.compile_job(job)
    print(*sorted(f"{path.parent.name}/{path.name}" for path in Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin")))
"""


def test_tensors_without_memory_are_compiled_for_as_others_are(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), **searching(ROOT)}
    found = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    first, again = found.stdout.splitlines()
    assert again == first
    kernels = [tmp_path / name for name in first.split()]
    assert {path.name for path in kernels} == {"_append_fused_kernel.cubin"}
    assert {json.loads(path.with_suffix(".json").read_text())["target"]["arch"] for path in kernels} == {90}


def test_off_a_gpu_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(ahead, "ProcessPoolExecutor", None)
    job = ahead.Job(shipped("paged_nhd"), "", {1: None}, 0)
    with ahead.compiling([job, job], "cpu"):
        pass


def test_nothing_is_compiled_any_more_when_what_comes_next_is_timed(monkeypatch):
    through = []

    def slowly(jobs, processes, target):
        time.sleep(0.3)
        through.append((len(jobs), processes, target))

    target = SimpleNamespace(backend="cuda", arch=90, warp_size=32)
    active = SimpleNamespace(get_current_target=lambda: target)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(ahead, "_compile_all", slowly)
    job = ahead.Job(shipped("paged_nhd"), "", {1: None}, 0)
    with ahead.compiling([job, job], "cuda"):
        assert through == []
    assert through == [(2, 2, ("cuda", 90, 32))]
