"""Layouts drawn at random go the whole way, and their addresses are held against brute force."""

from __future__ import annotations

import math
import os

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings

from kvgen import harness, runtime
from kvgen.diagnostics import KvgenError
from kvgen.emit import render_layout
from kvgen.encodings import append_refusal
from kvgen.layout import Layout
from kvgen.resolve import load_text
from tests.addresses import check_views, check_written
from tests.strategies import ENCODED, SHAPES, Drawn, Shape, layouts

WANTED = int(os.environ.get("KVGEN_RANDOM_LAYOUTS", "312"))
"""Distinct layouts in a run of all shapes."""

EACH = math.ceil(WANTED / len(SHAPES))

ALWAYS = ("append/huge_int32", "append_{stream}/alone", "gather/transposed")
"""Harness cases of every layout; ``{stream}`` is its first one. A token costs the interpreter a millisecond or two."""

IN_TURN = (
    "append/T7",
    "append/one_slot_twice",
    "append/skipped_int32",
    "append_positions/request_ids{rank}",
    "gather/skipped_strided",
    "gather_paged/starts{rank}",
)
"""One of these for each layout, so that every shape meets all of them."""

PAGES = ("copy_blocks/padded_odd", "zero_blocks/padded_odd", "copy_blocks/transposed")
"""And one of these."""


ENCODED_EACH = math.ceil(EACH / 6)
"""An encoded layout takes longer, and `test_product.py` has more of them."""


@pytest.mark.parametrize("shape", [*SHAPES, *ENCODED], ids=str)
def test_whole_chain(shape: Shape, record_property) -> None:
    """Text to layout to module; every byte after append and gather is the reference's and brute force's.

    Shapes differ in their streams, buffers, layers or encodings, so layouts of two shapes are never the same.
    """
    seen: dict[str, dict[str, int]] = {}
    wanted = ENCODED_EACH if shape.encoded else EACH

    # Draws repeat themselves now and then: more are made than are wanted, and what is not new is passed over.
    @settings(
        max_examples=4 * wanted + 10,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # a layout that fails is short enough; shrinking it takes minutes
        suppress_health_check=list(HealthCheck),
    )
    @given(layouts(shape))
    def check(drawn: Drawn) -> None:
        if drawn.text in seen or len(seen) == wanted:
            return
        check_layout(drawn.text, len(seen))
        seen[drawn.text] = drawn.features

    check()
    record_property("layouts", list(seen.values()))
    assert len(seen) == wanted


def loaded(text: str) -> Layout:
    """The layout; a draw is given up where a byte would hold codes of two tokens, or a record an unknown extent."""
    try:
        return load_text(text)
    except KvgenError as error:
        assume(not {diagnostic.code for diagnostic in error.diagnostics} <= {"KV314", "KV405"})
        raise


def check_layout(text: str, turn: int) -> None:
    """One layout, from its text to every byte that its module writes and reads."""
    layout = loaded(text)
    module = runtime.import_module(layout.name, render_layout(layout))
    check_views(layout, text, "padded_odd")
    scales = [stream.scale for stream in layout.streams if stream.scale]
    given = any(scale.stored and not scale.dynamic for scale in scales)  # what lies there are no numbers to count with
    if not given and not any(append_refusal(layout, stream.name) for stream in layout.streams):
        check_written(layout, text, module, "padded_odd")
    rank = "_rank1" if layout.slots.shard else ""
    names = [*ALWAYS, IN_TURN[turn % len(IN_TURN)], PAGES[turn % len(PAGES)]]
    only = [name.format(stream=layout.streams[0].name, rank=rank) for name in names]
    known = {case.name for case in harness.cases(layout)}
    report = harness.run(layout, module, only=[name for name in only if name in known])
    assert report.ok, f"{report}\n{text}"


@pytest.mark.parametrize("again", ["block slot head dim", "block head dim slot"], ids=["alike", "turned"])
def test_keys_in_two_buffers(again: str) -> None:
    """In one order what is there is written twice; in two it is read for each, and nothing is kept together then."""
    text = f"""
name: keys_twice
axes: {{head: 2, dim: 32}}
block_size: 16
streams:
  key: {{quant: {{mode: fp8_e4m3, scale: {{per: [], source: static}}}}}}
  value: key
buffers:
  key_cache: {{holds: key, order: block slot head dim}}
  key_again: {{holds: key, order: {again}}}
  value_cache: {{holds: value, order: block head dim slot}}
"""
    check_layout(text, 0)
