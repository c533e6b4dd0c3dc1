"""``kvgen tune`` with a clock of its own: every candidate's bytes, what is chosen, and what is written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kvgen import resources
from kvgen.bench import run, tune
from kvgen.bench.candidates import KINDS, candidates
from kvgen.diagnostics import KvgenError
from kvgen.emit import render
from kvgen.layout import KernelHints
from kvgen.resolve import load, load_text
from tests.command import kvgen

bench_command = sys.modules["kvgen.cli.bench"]  # the package has the functions under these names
tune_command = sys.modules["kvgen.cli.tune"]

LAYOUTS = {
    "split": """
name: split
axes: {head: 2, dim: 20}
block_size: 4
buffers:
  k: {holds: key, order: block head dim//4 slot dim%4}
  v: {holds: value, order: block slot head dim}
""",
    "encoded": """
name: encoded
axes: {head: 2, dim: 32}
block_size: 4
streams: {key: {quant: {mode: fp8_e4m3, scale: {per: token head, source: dynamic}}}, value: key}
buffers:
  k: {holds: key, order: block slot head dim}
  s: {holds: key.scale, order: block head slot}
  v: {order: block slot, fields: [{value.scale: head}, {value: head dim}]}
""",
}


class Clock:
    """10 µs a call, but what ``fast`` says of the n-th schedule that is timed; kvgen's own is number 0."""

    def __init__(self, counts, fast=None):
        self.counts, self.fast, self.calls = counts, fast or {}, 0

    def device_time(self, calls):
        number, which = divmod(self.calls, self.counts)
        self.calls += 1
        return self.fast.get(number, [10.0] * self.counts)[which]


def plan(*tokens):
    return run.Plan("cpu", dict.fromkeys(tokens), (), 0, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_candidate_gives_the_bytes_of_the_reference(name, kind):
    layout = load_text(LAYOUTS[name])
    found = list(tune.trials(layout, kind, plan(7), Clock(1)))
    assert [trial.hints for trial in found] == [None, *candidates(layout, kind)]
    assert len(found) > 20
    assert [trial.note for trial in found if trial.note] == []
    assert tune.chosen(found).hints is None


def breaking(monkeypatch, wish, edit):
    original = render.render_raw

    def render_raw(layout):
        text = original(layout)
        return edit(text) if layout.schedule.append == wish else text

    monkeypatch.setattr(render, "render_raw", render_raw)


def test_a_schedule_that_changes_a_byte_ends_it(monkeypatch):
    layout = load_text(LAYOUTS["split"])
    wish = candidates(layout, "append")[1]
    breaking(monkeypatch, wish, lambda text: text.replace("slot = slot_number % BLOCK_SIZE", "slot = slot_number % 3"))
    with pytest.raises(KvgenError) as caught:
        list(tune.trials(layout, "append", plan(9), Clock(1)))
    (found,) = caught.value.diagnostics
    assert found.code == "KV745"
    assert found.message.startswith("split: with another schedule append of 9 tokens gives other bytes: byte ")
    assert str(wish) in found.hint


def test_a_schedule_that_cannot_run_is_passed_over(monkeypatch):
    layout = load_text(LAYOUTS["split"])
    wish = candidates(layout, "append")[0]
    breaking(monkeypatch, wish, lambda text: text + "\nraise RuntimeError('out of resources')\n")
    found = list(tune.trials(layout, "append", plan(1), Clock(1)))
    assert found[1] == tune.Trial("append", wish, {}, "RuntimeError: out of resources")
    assert tune.chosen(found).hints is None
    assert all(trial.times for trial in [found[0], *found[2:]])


# the command


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "last_level_cache", lambda device: 0)
    return tmp_path


def timed(monkeypatch, clock):
    monkeypatch.setattr(tune_command, "device_and_clock", lambda dry_run, hint: ("cpu", clock))


def few_candidates(monkeypatch, *hints):
    monkeypatch.setattr(tune, "candidates", lambda layout, kind: hints)


ONE, FOUR = KernelHints(1, "all", 1), KernelHints(4, "all", 2)
CALL = ("tune", "split.yaml", "--tokens", "1,5", "--pool-tokens", 0)


def test_the_best_is_written_into_the_file(folder, monkeypatch):
    path = Path("split.yaml")
    text = "# a comment\n" + LAYOUTS["split"] + "# the end\n"
    path.write_text(text)
    few_candidates(monkeypatch, ONE, FOUR)
    # own, one, four of append; then of gather
    timed(monkeypatch, Clock(2, {1: [4.0, 20.0], 2: [9.0, 5.0], 4: [9.0, 9.0]}))
    result = kvgen(*CALL)
    assert (result.code, result.err) == (0, "")
    versions = ", ".join(f"{name} {version}" for name, version in run.environment("cpu", ())[1].items())
    assert path.read_text() == (
        f"{text}\n# kvgen tune: cpu, {versions}\nschedule:\n"
        "  append: {tokens: 4, heads: all, num_warps: 2, few: {up_to: 1, tokens: 1, num_warps: 1}}\n"
        "  gather: {tokens: 1, heads: all, num_warps: 1}\n"
    )
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert lines[1:7] == [
        "split, append: µs by tokens",
        "schedule 1 5 mean",
        "kvgen's own 10.0 10.0 100%",
        "chosen: {tokens: 4, heads: all, num_warps: 2, few: {up_to: 1, tokens: 1, num_warps: 1}} 4.00 5.00 45%",
        "{tokens: 4, heads: all, num_warps: 2} 9.00 5.00 67%",
        "{tokens: 1, heads: all, num_warps: 1} 4.00 20.0 89%",
    ]
    assert result.out.endswith("\nwrote split.yaml; `kvgen build` makes its module anew\n")
    assert kvgen("check", "split.yaml").code == 0

    # Once more: now gather is not worth an entry, and append is left alone.
    timed(monkeypatch, Clock(2))
    assert kvgen(*CALL, "--function", "gather").code == 0
    assert path.read_text().endswith("num_warps: 1}}\n")
    assert load(path).schedule.gather == KernelHints()
    timed(monkeypatch, Clock(2))
    assert kvgen(*CALL).code == 0
    assert path.read_text() == text + "\n"
    timed(monkeypatch, Clock(2))
    assert kvgen(*CALL).out.endswith("\nsplit.yaml is as it was\n")


def test_a_dry_run_leaves_the_file_alone(folder, monkeypatch):
    Path("split.yaml").write_text(LAYOUTS["split"])
    few_candidates(monkeypatch, FOUR)
    timed(monkeypatch, Clock(2, {1: [5.0, 5.0]}))
    result = kvgen(*CALL, "--function", "append", "--dry-run")
    assert result.out.endswith("\nschedule:\n  append: {tokens: 4, heads: all, num_warps: 2}\n")
    assert Path("split.yaml").read_text() == LAYOUTS["split"]
    timed(monkeypatch, Clock(2))
    assert kvgen(*CALL, "--dry-run").out.endswith("\nkvgen's own schedule is the best\n")


def test_a_link_stays_one(folder, monkeypatch):
    Path("real.yaml").write_text(LAYOUTS["split"])
    Path("split.yaml").symlink_to("real.yaml")
    few_candidates(monkeypatch, FOUR)
    timed(monkeypatch, Clock(2, {1: [5.0, 5.0]}))
    assert kvgen(*CALL, "--function", "append").code == 0
    assert Path("split.yaml").is_symlink()
    assert "schedule:" in Path("real.yaml").read_text()


def test_called_wrongly(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("split.yaml").write_text(LAYOUTS["split"])
    no_gpu = "error[KV713]: torch finds no CUDA device\n  help: schedules are timed, and nothing is timed on a CPU\n"
    assert no_gpu in kvgen(*CALL).err
    assert "error[KV710]: no schedule is named fill" in kvgen(*CALL, "--function", "fill").err
    assert kvgen("tune", "split.yaml", "--tokens", "x").code == 2
    assert kvgen("tune").code == 2
    result = kvgen("tune", "paged_nhd")  # from a folder without layouts/: that of kvgen itself
    assert result.code == 2
    assert result.err.startswith(
        "error[KV702]: paged_nhd came with kvgen, and is not written to\n  help: `kvgen new NAME"
    )
    monkeypatch.chdir(resources.folder("layouts").parent)
    assert "error[KV713]" in kvgen("tune", "paged_nhd").err
