"""Rows of records that are written whole: bytes by the harness, mistakes planted in them, and what they compile to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvgen import compile_report, harness
from kvgen.emit import kernels, render_layout
from kvgen.layout import KernelHints, Layout, ScheduleHints
from kvgen.resolve import load, load_text
from tests.generated import module_of
from tests.mutation import Mutant, check_layout, pairs

SHIPPED = load(Path(__file__).parent.parent / "layouts" / "packed_fp8_token_head.yaml")

FP8 = "{quant: {mode: fp8_e4m3, scale: {per: token head, source: dynamic}}}"
TEXTS = {
    "halves": f"""
axes: {{head: 3, dim: 12}}
streams: {{key: {FP8}, value: {FP8}}}
buffers: {{cache: {{order: block slot head, fields: [key, key.scale, value, value.scale, {{pad: 8}}]}}}}
schedule: {{append: {{tokens: 2}}}}
""",
    "counted": f"""
axes: {{head: 1, dim: 60}}
streams: {{key: {FP8}, value: {FP8}}}
buffers: {{cache: {{order: block slot head, fields: [value, value.scale, key, key.scale]}}}}
""",
}
LAYOUTS: dict[str, Layout] = {name: load_text(f"name: {name}\nblock_size: 5\n{text}") for name, text in TEXTS.items()}
CASES = ("append/T1", "append/T7", "append/edges", "append/padded", "append/skipped", "append_positions/decode")

COUNTED = ("append/T7", "append/prefill")  # few tokens, of which each has a program of its own, and many


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes(name: str) -> None:
    """Rows of one token and of several, alike halves or none, padded sides, padding between rows and behind them."""
    assert "_words_of_two" in render_layout(LAYOUTS[name])
    only = COUNTED if name == "counted" else CASES
    report = harness.run(LAYOUTS[name], module_of(LAYOUTS[name]), only=only)
    assert [str(result) for result in report.results if result.outcome != "passed"] == []
    assert len(report.results) == len(only)


ALL, APPEND = ("halves",), "_append_kernel"
# fmt: off
MUTANTS = [
    Mutant("words of another row", ("halves",), "_words_of_two", r"row \* beside", "(row ^ 1) * beside", "append/T7"),
    Mutant("words of another column", ("halves",), "_words_of_two", r"\(column &", "(column + 1 &", "append/T1"),
    Mutant("one half for the other", ("halves",), "_words_of_two", r"\+ second", "+ 1 - second", "append/T1"),
    Mutant("halves told apart a word late", ("halves",), APPEND, r"column >= 4", "column >= 5", "append/T1"),
    Mutant("last word left out", ALL, APPEND, r"word < (\d+)", lambda m: f"word < {int(m[1]) - 1}", "append/T1"),
    Mutant("a field a word too long", ALL, APPEND, r"(\w+) < (\d+), _words", lambda m: f"{m[1]} < {int(m[2]) + 1}, _words", "append/T1"),
    Mutant("bytes of a word swapped", ALL, "_pack_8", r"low \+ \(high", "high + (low", "append/T1"),
    Mutant("rows assumed dense", ("halves",), APPEND, r"row_head \* cache_stride_head \* STRIDE_UNIT", "row_head * 40", "append/padded"),
    Mutant("words of the first token for all", ("counted",), APPEND, r"row = tl\.arange\(0, TOKENS\)", "row = 0 * tl.arange(0, TOKENS)", "append/prefill"),
    Mutant("words of the first token for all", ("halves",), APPEND, r"row = tl\.arange\(0, TOKENS\)", "row = 0 * tl.arange(0, TOKENS)", "append/T7"),
]
# fmt: on


@pytest.mark.parametrize(("mutant", "name"), pairs(MUTANTS))
def test_is_noticed(mutant: Mutant, name: str) -> None:
    check_layout(mutant, LAYOUTS, name)


def stores(layout: Layout, form: str = "") -> dict[str, int]:
    layout = replace(layout, functions=("append",))
    specs = [spec for spec in kernels(layout) if spec.name == APPEND and spec.form == form]
    _, report = compile_report.compile_all({layout.name: render_layout(layout)}, {layout.name: specs}, ["sm_90"])
    (figures,) = (targets["sm_90"] for targets in report[layout.name].values())
    assert figures.spills == 0
    return figures.stores


def test_rows_are_stored_as_wide_as_words_lie_together() -> None:
    """Eight rows of 264 bytes, 1024 lanes: words of two lanes are one access, and scales take none of their own."""
    assert stores(SHIPPED) == {"8": 1024 // (2 * 64)}
    assert stores(SHIPPED, "few warps") == {"8": 1024 // (2 * 128)}


def test_fields_alone_are_stored_as_wide_as_they_are_aligned() -> None:
    """Of four of eight heads: keys start at multiples of 8, values behind the keys' scale at multiples of 4."""
    layout = replace(SHIPPED, schedule=ScheduleHints(append=KernelHints(tokens=1, heads=4)))
    (spec,) = (spec for spec in kernels(layout) if spec.label == APPEND)
    values = 4 * 128 // 32 // spec.num_warps  # of each stream a thread has
    assert stores(layout) == {"8": values // 8, "4": values // 4 + 2}
