"""Fused appends with a query compiled for sm_90: many and few query heads to a KV head, head sizes of all kinds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvgen import compile_report
from kvgen.emit import kernels, render_all
from kvgen.resolve import load_text

TABLE = Path(__file__).parent / "compile_fused_table.json"
HEADS = ((64, 8), (32, 8), (32, 32), (8, 1))
DIMS = (64, 80, 96, 128, 192, 256, 512)
LAYOUT = """
name: fused_{query}_{head}_{dim}
axes: {{head: {head}, dim: {dim}}}
block_size: 16
buffers:
  key_cache: {{holds: key, order: block slot head dim}}
  value_cache: {{holds: value, order: block slot head dim}}
fuse:
  key: [rms_norm, rope]
  query: {{heads: {query}, stages: key}}
  rounding: chain
"""


@pytest.fixture(scope="module")
def compiled() -> tuple[str, compile_report.Report]:
    layouts = [load_text(LAYOUT.format(query=q, head=h, dim=d)) for q, h in HEADS for d in DIMS]
    texts = {name.removesuffix(".py"): text for name, text in render_all(layouts).items()}
    specs = {x.name: [k for k in kernels(x) if k.name == "_append_fused_kernel" and not k.form] for x in layouts}
    return compile_report.compile_all(texts, specs, ["sm_90"])


def test_nothing_spills_and_accesses_are_wide(compiled) -> None:
    """And every figure is as recorded; ``KVGEN_RECORD=1`` records them, with the Triton that is installed."""
    version, report = compiled
    assert compile_report.problems(report) == []
    assert len(report) == len(HEADS) * len(DIMS)
    for rows in report.values():
        assert all(max(map(int, row["sm_90"].stores)) == 16 for row in rows.values())
    if os.environ.get("KVGEN_RECORD"):
        TABLE.write_text(compile_report.table_text(version, report), encoding="utf-8")
    known, table = compile_report.read_table(TABLE)
    found = compile_report.differences(report, version, table, known, whole=True)
    assert [problem.message for problem in found] == []
