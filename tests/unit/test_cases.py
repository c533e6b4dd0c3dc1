"""Every folder of ``tests/cases`` is a file with mistakes, and the exact text that tells a user about them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvgen.diagnostics import CATALOG, KvgenError, render_text
from kvgen.documents import load

CASES = Path(__file__).parents[1] / "cases"
FOLDERS = sorted(path for path in CASES.iterdir() if path.is_dir())
ELSEWHERE = {"KV102"}  # too large to commit: see test_source


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_says_what_is_expected(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    with pytest.raises(KvgenError) as caught:
        load("layout.yaml")
    assert render_text(caught.value.diagnostics) + "\n" == (folder / "expect.txt").read_text(encoding="utf-8")


def test_every_code_of_a_layout_file_has_a_case():
    shown = {
        code for path in FOLDERS for code in re.findall(r"error\[(KV\d+)\]", (path / "expect.txt").read_text("utf-8"))
    }
    assert {code for code in CATALOG if code < "KV6"} == shown | ELSEWHERE
