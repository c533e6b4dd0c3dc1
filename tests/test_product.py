"""Every combination of encodings passes the harness, or stands in the table of those that are refused.

A run draws some of them, always the same; `pytest tests/test_product.py --all-encodings` takes all, and in one of eight
the values of every edge. It deals them out to tests of the same length, so that `-n 64` keeps 64 cores busy.
"""

from __future__ import annotations

import functools
import itertools
import random
from pathlib import Path

import pytest

from kvgen import harness, runtime
from kvgen.emit.render import render_raw
from kvgen.encodings import append_refusal
from kvgen.layout import Layout
from kvgen.quant import MODES
from kvgen.resolve import load_text
from tests.product import CODES, DIMENSIONS, Point, outcome, points, read, written

TABLE = Path(__file__).with_name("refusals.txt")
REFUSED = read(TABLE.read_text(encoding="utf-8"))

MADE = ("", "no append")
"""What becomes of combinations that there is a module of."""

DRAWN = 200
"""Combinations of a run, half of them such as are refused: these cost little."""

HANDS = 240
"""Tests among which all combinations are dealt out, as many to each."""

ALWAYS = ("{append}/alone", "gather/as_bfloat16")

IN_TURN = (
    "append/T7",
    "append/padded_odd",
    "append/misaligned",
    "append/skipped_int32",
    "append/huge_int32",
    "append/source_odd",
    "append_positions/request_ids",
    "gather/transposed",
    "gather/out_float32",
    "gather_codes/skipped_out",
    "gather_paged/starts",
    "gather_codes_paged/zeroed",
)


def drawn(count: int) -> list[Point]:
    """Combinations, the same in every run: as many that work as such as are refused, and all modes alike."""
    found: list[Point] = []
    for codes in CODES:
        for refused in (False, True):
            mine = [p for p in shuffled() if p.codes == codes and (REFUSED.get(p, MADE[0]) not in MADE) is refused]
            found += mine[: -(-count // (2 * len(CODES)))]
    return found


@functools.cache
def shuffled() -> tuple[Point, ...]:
    """All combinations, those that there is a module of first."""
    order = random.Random(20_260).sample(points(), len(points()))
    return tuple(sorted(order, key=lambda point: REFUSED.get(point, "") not in MADE))


def dealt(hand: int) -> tuple[Point, ...]:
    """Combinations of one test of them all: as many of each kind as in the others, so that it takes as long."""
    return shuffled()[hand::HANDS]


def cases(layout: Layout, turn: int, thorough: bool) -> list[str]:
    """Names of the harness's cases: a few, and one in turn; where ``thorough`` now and then every edge."""
    able = [s.name for s in layout.streams if append_refusal(layout, s.name) is None]
    wanted = [name.format(append=f"append_{able[0]}" if able else "append") for name in ALWAYS]
    wanted.append(IN_TURN[turn % len(IN_TURN)])
    known = {case.name for case in harness.cases(layout)}
    if thorough and turn % 8 == 0:
        wanted += [name for name in known if name.endswith(("/edges", "/edges_scales4"))]
    return [name for name in wanted if name in known]


def problem(point: Point, turn: int, thorough: bool) -> str:
    """What is not as it should be with a combination; nothing where all is well."""
    found, expected = outcome(point), REFUSED.get(point, "")
    if found != expected:
        return f"{point}: expected {expected or 'a module'}, got {found or 'a module'}"
    if found not in MADE:
        return ""
    layout = load_text(point.text())
    module = runtime.import_module(layout.name, render_raw(layout))
    report = harness.run(layout, module, only=cases(layout, turn, thorough))
    return "" if report.ok else f"{point}: {report}\n{point.text()}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "hand" in metafunc.fixturenames:
        whole = metafunc.config.getoption("all_encodings")
        metafunc.parametrize("hand", range(HANDS) if whole else CODES)


def test_every_combination_passes_or_is_in_the_table(hand: int | str) -> None:
    thorough = isinstance(hand, int)
    chosen = dealt(hand) if thorough else [p for p in drawn(DRAWN) if p.codes == hand]
    problems = [text for turn, point in enumerate(chosen) if (text := problem(point, turn, thorough))]
    assert not problems, "\n".join([f"{len(problems)} of {len(chosen)}", *problems[:20]])


def test_every_combination_is_dealt_once() -> None:
    hands = [dealt(hand) for hand in range(HANDS)]
    assert len({len(hand) for hand in hands}) == 1
    assert sorted(map(str, itertools.chain(*hands))) == sorted(map(str, points()))
    working = [sum(REFUSED.get(point, "") in MADE for point in hand) for hand in hands]
    assert max(working) - min(working) <= 1


def test_every_value_of_every_dimension_is_drawn() -> None:
    chosen = drawn(DRAWN)
    assert DRAWN <= len(chosen) == len(set(chosen))
    made = [p for p in chosen if REFUSED.get(p, "") in MADE]
    for name, values in DIMENSIONS.items():
        assert {getattr(p, name) for p in chosen} == set(values)
        assert name == "per" or {getattr(p, name) for p in made} == set(values)
    assert {p.mode.name for p in points()} == MODES.keys()


def test_the_table_is_as_it_is_written() -> None:
    whole = {point: REFUSED.get(point, "") for point in points()}
    assert written(whole) == TABLE.read_text(encoding="utf-8")
