"""Modules with some of their functions: whole, clean, no longer than they need be, and right."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvgen import harness
from kvgen.canonical import canonical
from kvgen.diagnostics import KvgenError
from kvgen.documents import load_text as load_document
from kvgen.emit import render_all, render_layout
from kvgen.emit.prune import pruned
from kvgen.emit.specs import kernels
from kvgen.functions import possible
from kvgen.layout import Layout
from kvgen.resolve import load_text
from tests.generated import ROOT, module_of, shipped, shipped_text

KINDS = ("paged_nhd", "packed_fp8_token_head", "mla_fp8", "nhd_fused_mrope", "context_parallel_nhd", "nhd_int4_group")
"""Layouts that together have every function and every kind of helper."""


def only(layout: Layout, *names: str) -> Layout:
    return replace(layout, name=f"{layout.name}_{'_'.join(names)}", functions=names)


def public(text: str) -> set[str]:
    kinds = ast.FunctionDef | ast.ClassDef
    return {node.name for node in ast.parse(text).body if isinstance(node, kinds) and not node.name.startswith("_")}


def exports(text: str) -> list[str]:
    return next(
        ast.literal_eval(node.value) for node in ast.parse(text).body if ast.unparse(node).startswith("__all__")
    )


def test_every_function_stands_alone(tmp_path: Path) -> None:
    """Nothing that it calls is missing, nothing else is there, and the operators are those of the functions."""
    alone = [only(shipped(name), function) for name in KINDS for function in possible(shipped(name))]
    pairs = [only(shipped(name), possible(shipped(name))[1], "register_ops") for name in KINDS]
    texts = render_all([*alone, *pairs])
    for layout in (*alone, *pairs):
        text = texts[f"{layout.name}.py"]
        (tmp_path / f"{layout.name}.py").write_text(text)
        assert public(text) == set(layout.functions), layout.name
        assert exports(text) == ["LAYOUT", *layout.functions]
        assert {spec.name for spec in kernels(layout)} <= {f"_{name}_kernel" for name in layout.functions}
        assert text.count(") -> ") == (layout.functions[-1:] == ("register_ops",)) * (len(layout.functions) - 1)
    rules = ["--isolated", "--no-cache", "--line-length", "120", "--select", "F,I"]
    found = subprocess.run([sys.executable, "-m", "ruff", "check", *rules, tmp_path], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


SMALL = {
    "paged_nhd": "axes: {head: 2, dim: 16}\nblock_size: 4\n"
    "buffers: {key_cache: {key: block slot head dim}, value_cache: {value: block slot head dim}}\n",
    "row": "axes: {dim: 24}\nblock_size: 4\n"
    "streams: {latent: {quant: {mode: fp8_e4m3, scale: {per: token}}}, rope: {dim: 8}}\n"
    "buffers: {cache: {order: block slot, fields: [latent, latent.scale, rope]}}\n",
}
HARNESS = [
    ("paged_nhd", ("append_value",)),
    ("paged_nhd", ("copy_blocks", "zero_blocks")),
    ("paged_nhd", ("allocate", "slot_mapping", "fill_slots", "gather_page_table")),
    ("row", ("append_latent", "gather_codes")),
    ("row", ("concat_mla_key",)),
]


@pytest.mark.parametrize(("name", "functions"), HARNESS)
def test_the_harness_asks_for_these_alone(name: str, functions: tuple[str, ...]) -> None:
    layout = load_text(f"name: {name}\n{SMALL[name]}functions: [{', '.join(functions)}]\n")
    report = harness.run(layout, module_of(layout))
    assert {result.function for result in report.results} == set(functions)
    assert report.ok, str(report)
    assert report.count("passed") == len(report.results)


def test_a_case_that_needs_another_function_is_there_with_it() -> None:
    names = [
        {c.name for c in harness.cases(only(shipped("paged_nhd"), *f))} for f in (("append",), ("append", "gather"))
    ]
    assert "append/then_gather" in names[1] - names[0]
    assert "gather/T7" in names[1] - names[0]
    assert "append/T7" in names[0] & names[1]


def test_the_key_is_read_and_written() -> None:
    layout = load_text(shipped_text("paged_nhd") + "functions: [gather, append]\n")
    assert layout.functions == ("gather", "append")
    assert load_text(canonical(layout)) == layout
    assert replace(layout, functions=()) == shipped("paged_nhd")
    assert exports(render_layout(layout)) == ["LAYOUT", "append", "gather"]


@pytest.mark.parametrize("functions", ["transfer", "transfer_blocks, register_ops", "pointer_table, transfer"])
def test_transfers_have_the_key_too(functions: str) -> None:
    names = functions.split(", ")
    ends = "{from: {layout: paged_nhd, S}, to: {layout: host_layer_first, S}}".replace("S", "axes: {head: 2, dim: 16}")
    text = f"name: moves\ntransfer: {ends}\nlayers: all\nfunctions: [{functions}]\n"
    what = load_document(text, str(ROOT / "layouts" / "transfers" / "moves.yaml"))
    module = module_of(what)
    tables = ["PointerTable"] if "pointer_table" in names else []
    assert module.__all__ == ["TRANSFER", *names, *tables]
    assert {spec.name for spec in kernels(what)} == {f"_{name}_kernel" for name in names if name.startswith("transfer")}
    report = harness.run(what, module)
    assert {result.function for result in report.results} == {name for name in names if name.startswith("transfer")}
    assert ("transfer/tables" in {result.case for result in report.results}) == bool(tables)
    assert report.ok, str(report)
    with pytest.raises(KvgenError, match="no function `transfers`"):
        load_document(text.replace("functions: [", "functions: [transfers, "), str(ROOT / "layouts" / "x.yaml"))


def test_sizes_are_as_the_docs_say() -> None:
    text = (ROOT / "docs" / "vendoring.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*`|all of them) \| ([\d,]+) \|$", text, re.M)
    assert len(rows) == 4
    for names, lines in rows:
        layout = only(shipped("paged_nhd"), *re.findall(r"`(\w+)`", names))
        assert len(render_layout(layout).splitlines()) == pytest.approx(int(lines.replace(",", "")), rel=0.1)


TEXT = '''"""Doc."""

import math

import torch

try:
    from somewhere import Thing
except ImportError:
    Thing = None

__all__ = ["first"]

SIZE = 3
_kept = object()


# Of the one that is wanted.
@torch.no_grad()
def first(second, other=SIZE):
    """Names third."""
    return second + _helper(_kept)


# Of the other.
def second():
    return third()


def third():
    return math.pi


class _Used:
    def method(self, _unused):
        return Thing


def _helper(value):
    _lost = value.third
    return _Used, _lost


def _lost():
    return 1


_unused = 1
'''


def test_what_is_reached_stays() -> None:
    """Variables of functions, attributes and text that are named like something of the module do not keep it."""
    kept = pruned(TEXT)
    lost = ("import math\n\n", "# Of the other.\ndef second", "def third", "def _lost", "_unused = 1")
    assert not [part for part in lost if part in kept]
    stays = ('"""Doc."""', "from somewhere", "SIZE", "_kept =", "# Of the one", "@torch", "class _Used", "def _helper")
    assert [part for part in stays if part not in kept] == []
    assert pruned(kept) == kept
