"""Orders: spelling to terms, terms to digits, and whether digits tile an axis; compared with the terms evaluated."""

from __future__ import annotations

import itertools

import pytest

from kvgen.axes import Axis, Digit
from kvgen.coverage import Coverage, coverage
from kvgen.orders import OrderError, digits, parse_order

EXTENTS = {"block": None, "slot": 16, "token": 16, "head": 8, "dim": 96, "kv": 2, "layer": None}


def terms(text: str) -> list[list[str]]:
    return [[str(term) for term in group.terms] for group in parse_order(text)]


def resolve(text: str, params: dict[str, int] | None = None) -> tuple[Digit, ...]:
    (group,) = parse_order(text)
    (term,) = group.terms
    return digits(term, term.axis, EXTENTS, params or {})


def test_spelling():
    assert terms("block kv (slot head) dim//8 1 dim%x") == [
        ["block"],
        ["kv"],
        ["slot", "head"],
        ["dim//8"],
        [],
        ["dim%x"],
    ]
    assert terms("slot//32%4(head dim)") == [["slot//32%4"], ["head", "dim"]]
    assert terms("dim // 8 % 4 slot") == [["dim//8%4"], ["slot"]]
    assert terms("(1 slot) (1)") == [["slot"], []]
    assert terms("") == []


def test_offsets_are_those_of_the_text():
    text = "block (slot  dim//x) 1"
    groups = parse_order(text)
    assert [text[group.start : group.end] for group in groups] == ["block", "(slot  dim//x)", "1"]
    slot, dim = groups[1].terms
    assert (text[slot.start : slot.end], text[dim.start : dim.end]) == ("slot", "dim//x")
    assert text[dim.operations[0].start : dim.operations[0].end] == "x"


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ("block, slot", 5, 6),
        ("block slot/4", 10, 11),
        ("block (slot", 6, 7),
        ("block slot)", 10, 11),
        ("((slot) dim)", 1, 2),
        ("block ()", 6, 8),
        ("2 slot", 0, 1),
        ("dim//", 3, 5),
        ("dim//%4", 5, 6),
        ("dim//(4)", 5, 6),
        ("% 4", 0, 1),
    ],
)
def test_spelling_mistakes_are_pointed_at(text: str, start: int, end: int):
    with pytest.raises(OrderError) as caught:
        parse_order(text)
    assert (caught.value.code, caught.value.start, caught.value.end) == ("KV301", start, end)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dim", Digit("dim", 1, 96)),
        ("dim//8", Digit("dim", 8, 12)),
        ("dim%8", Digit("dim", 1, 8)),
        ("dim//8%4", Digit("dim", 8, 4)),
        ("dim%24//8", Digit("dim", 8, 3)),
        ("dim//2//3%8//2%2", Digit("dim", 12, 2)),
        ("dim//96", Digit("dim", 96, 1)),
        ("dim%1", Digit("dim", 1, 1)),
        ("block", Digit("block", 1, None)),
    ],
)
def test_a_digit_has_the_values_of_its_term(text: str, expected: Digit):
    assert resolve(text) == (expected,)
    if expected.size is not None:
        for index in range(96):
            assert expected.of(index) == eval(text, {"dim": index})


def test_token_is_block_and_slot():
    block = Digit("block", 1, None)
    assert resolve("token") == (block, Digit("slot", 1, 16))
    assert resolve("token//4") == (block, Digit("slot", 4, 4))
    assert resolve("token//4//2") == (block, Digit("slot", 8, 2))
    assert resolve("token%4") == (Digit("slot", 1, 4),)
    assert resolve("token//4%2") == (Digit("slot", 4, 2),)


def test_params_stand_for_numbers():
    assert resolve("dim//x%y", {"x": 8, "y": 4}) == (Digit("dim", 8, 4),)


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("dim//7", "KV303", "7 does not divide 96, what `dim` counts"),
        ("dim//8%5", "KV303", "5 does not divide 12, what `dim//8` counts"),
        ("dim%x", "KV311", "unknown param `x`"),
        ("dim//0", "KV301", "`0` cannot split an axis"),
        ("dim//08", "KV301", "`08` cannot split an axis"),
        ("dim//99999999999", "KV301", "`99999999999` cannot split an axis"),
        ("block%4", "KV308", "`block` cannot be split: how many there are is the pool's"),
        ("layer//2", "KV308", "`layer` cannot be split: its extent is dynamic"),
    ],
)
def test_terms_without_digits(text: str, code: str, message: str):
    with pytest.raises(OrderError) as caught:
        resolve(text)
    assert (caught.value.code, caught.value.message) == (code, message)


def test_coverage_against_brute_force():
    """All sets of up to three digits of an axis of 12: sound exactly if they are the digits of one numeral system.

    Being 1 : 1 is not enough: so are ``dim%3`` and ``dim%4``, by the Chinese remainder theorem.
    """
    axis = Axis("dim", 12)
    parts = [Digit("dim", div, size) for div in (1, 2, 3, 4, 6) for size in (2, 3, 4, 6, 12) if 12 % (div * size) == 0]
    sound = []
    for count in (1, 2, 3):
        for chosen in itertools.combinations_with_replacement(parts, count):
            found = coverage(axis, chosen)
            adds_up = all(sum(digit.of(i) * digit.div for digit in chosen) == i for i in range(12))
            assert (not found.missing and found.clash is None) == adds_up, chosen
            if found.missing:
                assert coverage(axis, (*chosen, *found.missing)) == Coverage(), chosen
            if adds_up:
                sound.append(chosen)
    assert len(sound) == 8  # the ordered factorisations of 12 into one, two and three factors


def test_what_is_missing_and_what_clashes():
    axis = Axis("dim", 96)
    assert coverage(axis, []).missing == (Digit("dim", 1, 96),)
    assert coverage(axis, [Digit("dim", 4, 6)]).missing == (Digit("dim", 24, 4), Digit("dim", 1, 4))
    assert coverage(axis, [Digit("dim", 1, 16), Digit("dim", 8, 12)]).clash == (
        Digit("dim", 1, 16),
        Digit("dim", 8, 12),
    )
    assert coverage(axis, [Digit("dim", 1, 4), Digit("dim", 6, 16)]).clash == (Digit("dim", 1, 4), Digit("dim", 6, 16))


def test_digits_of_size_one():
    assert coverage(Axis("head", 1), []).missing == (Digit("head", 1, 1),)
    assert coverage(Axis("head", 1), [Digit("head", 1, 1)]).missing == ()
    assert coverage(Axis("dim", 8), [Digit("dim", 8, 1), Digit("dim", 1, 8), Digit("dim", 3, 1)]).missing == ()
    assert coverage(Axis("dim", 8), [Digit("dim", 1, 1)]).missing == (Digit("dim", 1, 8),)


def test_an_axis_of_unknown_extent_is_whole():
    axis, whole = Axis("block", None), Digit("block", 1, None)
    assert coverage(axis, []).missing == (whole,)
    assert coverage(axis, [whole]) == Coverage()
    assert coverage(axis, [whole, whole]).clash == (whole, whole)


@pytest.mark.parametrize(("extent", "step"), [(12, 3), (12, 4), (12, 12), (10, 4), (7, 16)])
def test_coverage_of_groups_against_brute_force(extent: int, step: int):
    """Digits of groups are sound exactly if they give each group a number of its own, in order and without a gap."""
    axis = Axis("dim", extent, step)
    assert (axis.count, axis.reach) == (len(range(0, extent, step)), step * len(range(0, extent, step)))
    parts = [Digit("dim", div, size) for div in (1, 2, *range(step, 25, step)) for size in (1, 2, 3, 4, 12)]
    parts = [digit for digit in parts if axis.reach % (digit.div * digit.size) == 0]
    for count in (1, 2):
        for chosen in itertools.combinations_with_replacement(parts, count):
            found = coverage(axis, chosen)
            groups = [sum(digit.of(i) * digit.div for digit in chosen) for i in range(extent)]
            sound = groups == [i // step * step for i in range(extent)]
            assert (not found.missing and found.clash is None) == sound, chosen
            if found.missing:
                assert coverage(axis, (*chosen, *found.missing)) == Coverage(), chosen


def test_what_is_missing_of_groups():
    assert coverage(Axis("dim", 46, 16), []).missing == (Digit("dim", 16, 3),)
    assert coverage(Axis("dim", 128, 16), [Digit("dim", 32, 2)]).missing == (Digit("dim", 64, 2), Digit("dim", 16, 2))
    assert coverage(Axis("dim", 128, 128), []).missing == (Digit("dim", 128, 1),)
    assert coverage(Axis("dim", 128, 32), [Digit("dim", 1, 128)]).clash is not None
    assert (Axis("dim", None, 1).count, Axis("dim", None, 1).reach) == (None, None)
