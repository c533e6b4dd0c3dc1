"""On a GPU: benchmarks and tuning with the real clock. That times are there is looked at, not what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.bench import results, tune
from kvgen.layout import KernelHints
from kvgen.resolve import load
from tests.command import kvgen
from tests.generated import shipped_text

pytestmark = pytest.mark.gpu
COMPARED = "kvgen's reference: compared, not timed"


def test_functions_are_timed_beside_torch(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    call = ("bench", "paged_nhd", "mla_fp8_record", "--tokens", "32,4096", "--no-check", "--pool-tokens", 1 << 16)
    result = kvgen(*call, "--json", path)
    assert (result.code, result.err) == (0, ""), result.err
    run = results.from_json(path.read_text(), str(path))
    assert run.copy_rate > 1e11
    assert len(run.rows) == 2 * 2 * 5
    for row in run.rows:
        assert [t.name for t in row.timings[:3]] == ["kvgen", "torch", "copy"]
        assert all(t.note in ("", COMPARED) for t in row.timings), row
        assert all(t.device_us > 0 for t in row.timings if not t.note)
        assert row.ours.host_us > 0
        assert row.ours.add_us > 0


def test_fused_appends_and_transfers_are_timed(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    names = ("nhd_fused", "packed_hnd_fused", "mla_record_fused", "nhd_to_fp8", "nhd_to_host_page_first")
    wanted = ("append_fused=1,300", "transfer=300", "transfer_blocks=4096")
    call = ("bench", *names, *(part for name in wanted for part in ("--function", name)), "--programs", 8)
    result = kvgen(*call, "--no-check", "--pool-tokens", 1 << 16, "--json", path)
    assert (result.code, result.err) == (0, ""), result.err
    rows = results.from_json(path.read_text(), str(path)).rows
    assert [(row.layout, row.function, row.tokens) for row in rows] == [
        *((name, "append_fused", tokens) for name in names[:3] for tokens in (1, 300)),
        *((name, *call) for name in names[3:] for call in (("transfer", 300), ("transfer_blocks", 4096))),
    ]
    for row in rows:
        assert row.timing("torch").note == COMPARED
        assert all(t.device_us > 0 for t in row.timings if t.name not in ("torch", "flashinfer")), row
        assert (row.timing("8 programs") is not None) == (row.function != "append_fused")


def test_schedules_are_timed_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "paged_nhd.yaml"
    path.write_text(shipped_text("paged_nhd"))
    monkeypatch.setattr(tune, "candidates", lambda layout, kind: (KernelHints(1, 1, 1), KernelHints(4, "all", 4)))
    result = kvgen("tune", path, "--tokens", "32,4096", "--pool-tokens", 1 << 16)
    assert (result.code, result.err) == (0, ""), result.err
    assert "{tokens: 4, heads: all, num_warps: 4}" in result.out
    load(path)
