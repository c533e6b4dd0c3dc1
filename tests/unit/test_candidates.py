"""Schedules worth trying, and the choice among them."""

from pathlib import Path

import pytest

from kvgen.bench.candidates import PER_THREAD, candidates, choose, mean, with_hints
from kvgen.layout import FewHints, KernelHints
from kvgen.lower import lower
from kvgen.resolve import load
from kvgen.schedule import schedule

LAYOUTS = Path(__file__).resolve().parents[2] / "layouts"


@pytest.mark.parametrize(
    ("name", "heads"), [("paged_nhd", {None, 1, 2, 4}), ("mla", {None}), ("nhd_nvfp4", {None, 1, 2, 4})]
)
@pytest.mark.parametrize("kind", ["append", "gather"])
def test_every_candidate_is_another_schedule(name, heads, kind):
    layout = load(LAYOUTS / f"{name}.yaml")
    plan = next(plan for plan in lower(layout) if plan.name == kind)
    found = [schedule(with_hints(layout, {kind: hints}), plan) for hints in candidates(layout, kind)]
    assert len({(s.tokens, s.heads, s.num_warps) for s in found}) == len(found) > 10
    assert {s.heads for s in found} == heads
    assert {s.num_warps for s in found} == {1, 2, 4, 8}
    values = [s.tokens * 128 * (s.heads or 8) if name != "mla" else s.tokens * 512 for s in found]
    each = [value / (32 * s.num_warps) for value, s in zip(values, found, strict=True)]
    assert PER_THREAD[0] <= min(each) <= max(each) <= PER_THREAD[1]
    assert schedule(layout, plan).heads in heads


def test_what_is_never_appended_has_no_schedule():
    layout = load(LAYOUTS / "nhd_int4_group.yaml")
    kinds = {plan.kind for plan in lower(layout)}
    assert bool(candidates(layout, "append")) == ("append" in kinds)
    assert candidates(layout, "gather")


ONE, FOUR, EIGHT = KernelHints(1, "all", 4), KernelHints(4, "all", 2), KernelHints(8, 1, 2)
OWN = {1: 10.0, 256: 10.0, 4096: 10.0}


def test_the_fastest_is_taken():
    assert choose(OWN, {ONE: {1: 9, 256: 9, 4096: 9}, FOUR: {1: 8, 256: 8, 4096: 8}}).hints == FOUR


def test_a_short_call_counts_as_much_as_a_long_one():
    own = {1: 1.0, 4096: 100.0}
    assert choose(own, {ONE: {1: 0.5, 4096: 110.0}}).hints == ONE
    assert mean({1: 2.0, 2: 8.0}) == pytest.approx(4.0)


def test_what_gains_little_is_not_preferred_to_kvgens_own():
    choice = choose(OWN, {ONE: {1: 9.8, 256: 9.8, 4096: 9.8}})
    assert (choice.hints, choice.times) == (None, OWN)
    assert choose(OWN, {}).hints is None


def test_few_tokens_have_a_schedule_of_their_own_where_that_pays():
    choice = choose(OWN, {ONE: {1: 4, 256: 9, 4096: 20}, FOUR: {1: 9, 256: 4, 4096: 5}})
    assert choice.hints == KernelHints(4, "all", 2, FewHints(1, 1, 4))
    assert choice.times == {1: 4, 256: 4, 4096: 5}
    choice = choose(OWN, {ONE: {1: 4, 256: 4, 4096: 20}, FOUR: {1: 9, 256: 9, 4096: 5}})
    assert choice.hints == KernelHints(4, "all", 2, FewHints(256, 1, 4))


def test_a_split_that_gains_little_is_not_made():
    assert choose(OWN, {ONE: {1: 4.9, 256: 6, 4096: 6}, FOUR: {1: 5, 256: 5, 4096: 5}}).hints == FOUR


def test_both_sides_of_a_split_are_one_kernel():
    """Other heads are another kernel, and few tokens take no more of them than many."""
    heads = choose(OWN, {ONE: {1: 4, 256: 9, 4096: 20}, EIGHT: {1: 9, 256: 5, 4096: 5}})
    assert heads.hints == EIGHT
    larger = choose(OWN, {FOUR: {1: 2, 256: 9, 4096: 20}, ONE: {1: 9, 256: 5, 4096: 5}})
    assert larger.hints == ONE
