"""Places become views: steps, strides, offsets, and what may be joined."""

import dataclasses

import pytest

from kvgen.axes import Digit
from kvgen.lower import coalesce, lower, verify
from kvgen.plan import Step, View
from kvgen.resolve import load_text


def views(text: str) -> dict[str, View]:
    """Stream name to the cache's view."""
    append = lower(load_text(text))[0]
    return {copy.stream: copy.destination for copy in append.copies}


def steps(view: View) -> list[tuple[str, int, int | None, int | None, int]]:
    return [(s.digit.axis, s.digit.div, s.digit.size, s.dim, s.factor) for s in view.steps]


HEAD = "name: x\naxes: {head: 8, dim: 128}\nblock_size: 16\nbuffers:\n"


def test_a_dense_page_has_a_stride_per_dimension() -> None:
    view = views(HEAD + "  pool: {holds: [key, value], order: block slot kv head dim}\n")["key"]
    assert steps(view) == [
        ("block", 1, None, 0, 1),
        ("slot", 1, 16, 1, 1),
        ("head", 1, 8, 3, 1),
        ("dim", 1, 128, None, 1),
    ]
    assert (view.offset, view.unit, view.itemsize, view.access) == (0, 2, 2, 2)


def test_the_second_of_a_pair_has_a_step_of_its_own() -> None:
    value = views(HEAD + "  pool: {holds: [key, value], order: block slot kv head dim}\n")["value"]
    assert ("kv", 1, 2, 2, 1) in steps(value)


def test_a_pair_inside_the_last_dimension_is_an_offset() -> None:
    found = views(HEAD + "  pool: {holds: [key, value], order: block slot head (kv dim)}\n")
    assert (found["key"].offset, found["value"].offset) == (0, 128)
    assert steps(found["value"])[-1] == ("dim", 1, 128, None, 1)


def test_digits_that_share_a_dimension_share_its_stride() -> None:
    found = views(
        HEAD
        + "  k: {holds: key, order: (block slot//4) head dim slot%4}\n  v: {holds: value, order: block slot head dim}\n"
    )
    assert steps(found["key"])[:2] == [("block", 1, None, 0, 4), ("slot", 4, 4, 0, 1)]
    assert steps(found["key"])[-1] == ("slot", 1, 4, None, 1)


def test_records_count_constants_in_tensor_elements() -> None:
    text = HEAD + "  pool: {order: block slot, fields: [{order: head, fields: [key, {pad: 2}, value]}, {pad: 4}]}\n"
    found = views(text)
    assert (found["key"].unit, found["key"].offset, found["value"].offset) == (2, 0, 129)
    assert steps(found["value"])[2:] == [("head", 1, 8, None, 257), ("dim", 1, 128, None, 1)]


def test_records_off_the_natural_alignment_count_bytes_and_are_reached_in_pieces() -> None:
    found = views(HEAD + "  pool: {order: block slot, fields: [{pad: 1}, {key: head dim}, {value: head dim}]}\n")
    assert (found["key"].unit, found["key"].offset, found["key"].access) == (1, 1, 1)
    assert steps(found["key"])[2:] == [("head", 1, 8, None, 256), ("dim", 1, 128, None, 2)]


def test_filled_padding_is_written_by_every_append_of_its_record() -> None:
    layout = load_text(HEAD + "  pool: {order: block slot head, fields: [key, {pad: 2, fill: 7}, value]}\n")
    plans = {plan.name: plan for plan in lower(layout)}
    for name in ("append", "append_key", "append_value", "append_positions"):
        [fill] = plans[name].fills
        assert (fill.view.offset, fill.size, fill.value) == (128, 2, 7)
    assert plans["gather"].fills == ()


def joined(layout_text: str, stream: str = "key") -> list[tuple[str, int, int | None, int | None, int]]:
    layout = load_text(layout_text)
    view = next(c.destination for c in lower(layout)[0].copies if c.stream == stream)
    return steps(dataclasses.replace(view, steps=coalesce(layout, view.steps)))


def test_block_above_slot_in_one_dimension_is_the_slot_number() -> None:
    found = joined(HEAD + "  pool: {holds: [key, value], order: kv (block slot) head dim}\n")
    assert found[0] == ("slot_number", 1, None, 1, 1)


def test_a_part_of_slot_under_block_is_a_digit_of_the_slot_number() -> None:
    found = joined(HEAD + "  pool: {holds: [key, value], order: kv (block slot//4) head slot%4 dim}\n")
    assert found[0] == ("slot_number", 4, None, 1, 1)
    assert ("slot", 1, 4, 3, 1) in found


def test_a_dynamic_block_size_in_one_dimension_with_block_is_the_slot_number() -> None:
    text = "name: x\naxes: {head: 8, dim: 128}\nblock_size: dynamic\nbuffers:\n"
    text += "  k: {holds: key, order: (block slot) head dim}\n  v: {holds: value, order: block slot head dim}\n"
    assert joined(text)[0] == ("slot_number", 1, None, 0, 1)


def test_split_digits_that_meet_again_print_as_one() -> None:
    found = joined(HEAD + "  pool: {holds: [key, value], order: block slot kv head (dim//8 dim%8)}\n")
    assert found[-1] == ("dim", 1, 128, None, 1)


def test_separate_dimensions_never_join() -> None:
    found = joined(HEAD + "  pool: {holds: [key, value], order: block slot kv head dim//8 dim%8}\n")
    assert found[-2:] == [("dim", 8, 16, 4, 1), ("dim", 1, 8, None, 1)]


@pytest.mark.parametrize("bad", [Step(Digit("dim", 2, 64), None, 1), Step(Digit("dim", 1, 64), None, 1)])
def test_verify_refuses_digits_that_do_not_tile_their_axis(bad: Step) -> None:
    layout = load_text(HEAD + "  pool: {holds: [key, value], order: block slot kv head dim}\n")
    plan = lower(layout)[0]
    view = plan.copies[0].destination
    broken = dataclasses.replace(view, steps=(*view.steps[:-1], bad))
    copy = dataclasses.replace(plan.copies[0], destination=broken)
    with pytest.raises(AssertionError):
        verify(layout, dataclasses.replace(plan, copies=(copy, *plan.copies[1:])))
