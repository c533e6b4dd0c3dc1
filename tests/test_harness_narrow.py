"""The harness on codes narrower than a byte: right modules pass, and mistakes of packing are reported."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen import harness
from kvgen.layout import Layout
from kvgen.resolve import load_text
from tests.fake_module import FakeModule
from tests.generated import shipped_text

NARROW = ["nhd_int4", "nhd_int4_group", "nhd_nvfp4", "packed_nvfp4", "nhd_mxfp4"]


def small(name: str) -> Layout:
    return load_text(shipped_text(name).replace("head: 8", "head: 2"))


def names(layout: Layout) -> list[str]:
    """Cases that a module made of the reference passes: it refuses nothing but scales that do not fit."""
    found = [c.name for c in harness.cases(layout) if not c.name.startswith("allocate")]
    return [name for name in found if "refuses" not in name or "_scale_" in name]


@pytest.mark.parametrize("name", NARROW)
def test_a_right_module_passes(name: str) -> None:
    layout = small(name)
    found = harness.run(layout, FakeModule(layout), only=names(layout))
    assert found.ok, str(found)


class Swapped(FakeModule):
    """The first code of a byte lies in its high bits."""

    def write(self, sources: Any, buffers: Any, slots: Any, **options: Any) -> None:
        swapped = {s: x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) for s, x in sources.items()}
        super().write(swapped, buffers, slots, **options)


@pytest.mark.parametrize("name", NARROW)
def test_swapped_nibbles_are_reported(name: str) -> None:
    layout = small(name)
    function = "append_value" if name == "nhd_int4_group" else "append"
    found = harness.run(layout, Swapped(layout), only=[f"{function}/T1", f"{function}/edges"])
    assert [result.outcome for result in found.results] == ["failed", "failed"]
    assert {result.difference.stream for result in found.results} <= {"key", "value"}


def test_codes_half_a_group_apart_share_a_byte() -> None:
    order = "block slot head dim//32 dim%16 dim//16%2"
    text = shipped_text("nhd_int4").replace("head: 8", "head: 2")
    layout = load_text(text.replace("key,         order: block slot head dim}", f"key, order: {order}}}"))
    assert layout.buffer("key_cache").place.content.pack.div == 16
    found = harness.run(layout, FakeModule(layout), only=["append/T7", "append/then_gather", "gather/T7"])
    assert found.ok, str(found)


def test_the_code_that_differs_is_named() -> None:
    layout = small("nhd_int4")

    class FlipsOne(FakeModule):
        def write(self, sources: Any, buffers: Any, slots: Any, **options: Any) -> None:
            super().write(sources, buffers, slots, **options)
            buffers["key_cache"][0, 0, 1, 3] ^= 0x10

    (result,) = harness.run(layout, FlipsOne(layout), only=["append/T0"]).results
    assert (result.difference.head, result.difference.dim) == (1, 7)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_case_appends_what_cannot_be_appended(device: str) -> None:
    functions = {case.function for case in harness.cases(small("nhd_int4_group"), device)}
    assert not functions & {"append", "append_positions", "append_key"}
    assert {"append_value", "gather", "gather_paged", "slot_mapping", "fill_slots"} <= functions
