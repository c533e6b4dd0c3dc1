"""The catalogue, and diagnostics as text, JSON and workflow commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvgen.diagnostics import CATALOG, Diagnostic, KvgenError, Span, render_github, render_json, render_text
from kvgen.resolve import load_text

SOUND = {
    "name": "name: sample\n",
    "axes": "axes: {head: 8, dim: 128}\n",
    "block_size": "block_size: 16\n",
    "buffers": "buffers:\n  kv_cache: {holds: [key, value], order: block kv slot head dim}\n",
}
LAYOUT_CODES = sorted(code for code in CATALOG if code < "KV5")
SPAN = Span("layouts/a.yaml", 3, 9, 13, "  order: bloc slot")


def test_text():
    found = [
        Diagnostic("KV302", "unknown axis `bloc`", SPAN, "did you mean `block`?"),
        Diagnostic("KV101", "cannot read b.yaml: no such file"),
        Diagnostic("KV104", "the file is empty", Span("c.yaml", 1, 1, 1, "")),
    ]
    assert (
        render_text(found)
        == """\
layouts/a.yaml:3:9: error[KV302]: unknown axis `bloc`
      order: bloc slot
            ^^^^
  help: did you mean `block`?
error[KV101]: cannot read b.yaml: no such file
c.yaml:1:1: error[KV104]: the file is empty"""
    )
    assert render_text([]) == ""


@pytest.mark.parametrize(
    ("line", "word", "shown"),
    [
        ("a: word b", "word", ("a: word b", "   ^^^^")),
        ("\ta: word", "word", (" a: word", "    ^^^^")),
        ("中文: word", "word", ("中文: word", "      ^^^^")),
        ("e\u0301: word", "word", ("e\u0301: word", "   ^^^^")),
        ("a: 中文 b", "中文", ("a: 中文 b", "   ^^^^")),
        ("a: \x1b[31m word", "word", ("a: \ufffd[31m word", "         ^^^^")),
        ("x" * 300 + " word " + "y" * 300, "word", ("..." + "x" * 79 + " word " + "y" * 75 + "...", " " * 83 + "^^^^")),
    ],
)
def test_the_caret_stands_below_the_span(line: str, word: str, shown: tuple[str, str]):
    start = line.index(word)
    text = render_text([Diagnostic("KV203", "m", Span("f", 1, start + 1, start + len(word) + 1, line))])
    assert tuple(part.removeprefix("    ") for part in text.split("\n")[1:]) == shown


def test_a_span_without_characters_has_a_caret():
    assert render_text([Diagnostic("KV203", "m", Span("f", 1, 3, 3, "ab"))]).split("\n")[2] == "      ^"


def test_control_characters_reach_no_terminal():
    span = Span("a\x1b[2Jb", 1, 1, 2, "x\x9b")
    text = render_text([Diagnostic("KV203", "m\x07\u202e", span, "h\x00")])
    assert [char for char in text if not char.isprintable() and char != "\n"] == []
    assert text.startswith("a\\x1b[2Jb:1:1: error[KV203]: m\\x07\\u202e\n")


def test_json():
    found = json.loads(render_json([Diagnostic("KV302", "m", SPAN, "h"), Diagnostic("KV101", "n")]))
    where = {"path": "layouts/a.yaml", "line": 3, "column": 9, "end_column": 13}
    assert found == [
        {"code": "KV302", "message": "m", **where, "help": "h"},
        {"code": "KV101", "message": "n", **dict.fromkeys(where), "help": None},
    ]
    assert json.loads(render_json([])) == []


def test_github():
    span = Span("a,b:c%.yaml", 3, 9, 13, "")
    assert (
        render_github([Diagnostic("KV302", "100%: a\nb", span, "h"), Diagnostic("KV101", "n")])
        == "::error file=a%2Cb%3Ac%25.yaml,line=3,col=9,endColumn=13,title=KV302::100%25: a%0Ab%0Ahelp: h\n"
        "::error title=KV101::n"
    )


@pytest.mark.parametrize("code", sorted(CATALOG))
def test_entries_are_whole(code: str):
    entry = CATALOG[code]
    assert re.fullmatch(r"KV\d{3}", code)
    assert not entry.title.endswith(".")
    assert entry.cause.endswith(".")
    assert entry.cure.endswith(".")


@pytest.mark.parametrize("code", [code for code in LAYOUT_CODES if CATALOG[code].example[:2] != "$ "])
def test_examples_show_their_mistake(code: str):
    example = CATALOG[code].example
    given = {line.split(":")[0] for line in example.splitlines()}
    text = "".join(lines for key, lines in SOUND.items() if key not in given) + example + "\n"
    with pytest.raises(KvgenError) as caught:
        load_text(text)
    assert code in [diagnostic.code for diagnostic in caught.value.diagnostics]


def test_the_rest_of_the_examples_is_sound():
    load_text("".join(SOUND.values()))


def test_every_code_in_use_is_in_the_catalogue():
    root = Path(__file__).parents[2] / "kvgen"
    files = [
        root / f"{name}.py"
        for name in (
            "source",
            "spec",
            "values",
            "orders",
            "encodings",
            "packing",
            "places",
            "resolve",
            "fuse",
            "fuse_spec",
        )
    ]
    used = {code for path in files for code in re.findall(r'"(KV\d+)"', path.read_text(encoding="utf-8"))}
    assert used == set(LAYOUT_CODES)


def test_loading_a_layout_imports_neither_torch_nor_triton():
    program = (
        "import sys, kvgen.resolve, kvgen.canonical; print(*{'torch', 'triton', 'numpy', 'rich'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
