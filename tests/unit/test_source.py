"""Reading YAML: its traps closed, every node's place in the file, and nothing but diagnostics for any input."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgen.diagnostics import CATALOG, KvgenError, render_github, render_json, render_text
from kvgen.resolve import load, load_text
from kvgen.source import DEPTH_LIMIT, SIZE_LIMIT, parse, read

LAYOUTS = Path(__file__).parents[2] / "layouts"


def diagnose(text: str | bytes) -> list[tuple[str, int, int]]:
    """Code, line and column of everything that is wrong."""
    with pytest.raises(KvgenError) as caught:
        load_text(text, "layout.yaml")
    return [(d.code, d.span.line, d.span.column) for d in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1.0e-6", 1e-6),
        ("1.", 1.0),
        (".5", 0.5),
        ("-2", -2),
        ("0", 0),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("no", "no"),
        ("True", "True"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("=", "="),
        ("'12'", "12"),
        ('"true"', "true"),
        ("block head dim//8 slot dim%8", "block head dim//8 slot dim%8"),
    ],
)
def test_plain_scalars_mean_what_they_look_like(text: str, value: object):
    found = parse(f"key: {text}\n", "layout.yaml").plain()["key"]
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("text", ["010", "-007", "00", "1" * 19, "9" * 5000])
def test_numbers_that_are_refused(text: str):
    (problem,) = parse(f"key: {text}\n", "layout.yaml").problems
    assert (problem.code, problem.span.column, problem.span.end_column) == ("KV111", 6, 6 + len(text))


def test_spans_of_nested_values():
    text = "a: 1\nlist:\n  - {b: [x, yy]}\n  - 'quoted text'\nc:\n  d: e\n  f: g\n"
    source = parse(text, "layout.yaml")
    span = source.at(("list", 0, "b", 1))
    assert (span.path, span.line, span.column, span.end_column) == ("layout.yaml", 3, 13, 15)
    assert span.text == "  - {b: [x, yy]}"
    assert source.at_key(("list", 0, "b")).column == 6
    # A value of several lines is cut at the end of its first.
    block = source.at(("c",))
    assert (block.line, block.column, block.end_column) == (6, 3, 7)
    # Inside quotes an offset counts from the first character.
    inside = source.inside(("list", 1), 7, 11)
    assert (inside.line, inside.column, inside.end_column) == (4, 13, 17)
    # What is not there answers for what is around it.
    assert source.at(("c", "nothing", 3)) == block


def test_places_written_short_answer_for_what_they_are_short_for():
    source = parse("pool: {key: slot dim, align: 8}\nbare: [key]\n", "layout.yaml")
    assert source.at(("pool", "holds")).column == 8
    assert source.at(("pool", "order")).column == 13
    assert source.inside(("pool", "order"), 5, 8).column == 18
    assert source.at(("bare", 0, "holds", 0)).column == 8


def test_line_endings_and_byte_order_mark():
    body = (LAYOUTS / "packed_nhd.yaml").read_bytes()
    plain = load_text(body)
    assert load_text(body.replace(b"\n", b"\r\n")) == plain
    assert load_text(b"\xef\xbb\xbf" + body) == plain
    assert load_text(body.decode()) == plain
    assert ("KV201", 1, 1) in diagnose(b"\xef\xbb\xbfnmae: x")
    wrong = body.replace(b"block slot head", b"block slot hed")
    for ending in (b"\n", b"\r\n", b"\r"):
        assert diagnose(b"\xef\xbb\xbf" + wrong.replace(b"\n", ending)) == [("KV302", 8, 23)]


def test_keys_are_text():
    source = parse("1: a\ntrue: b\n~: c\n", "layout.yaml")
    assert source.plain() == {"1": "a", "true": "b", "~": "c"}


def test_of_a_key_given_twice_the_first_counts():
    source = parse("a: 1\nb: 2\na: 3\n", "layout.yaml")
    assert source.plain() == {"a": 1, "b": 2}
    assert [(p.code, p.span.line) for p in source.problems] == [("KV107", 3)]


def test_large_files_are_not_read(tmp_path: Path):
    path = tmp_path / "layout.yaml"
    body = (LAYOUTS / "packed_nhd.yaml").read_bytes()
    path.write_bytes(body + b"#" * (SIZE_LIMIT - len(body)))
    load(path)
    path.write_bytes(body + b"#" * (SIZE_LIMIT - len(body) + 1))
    with pytest.raises(KvgenError) as caught:
        load(path)
    message = "the file is larger than 256 KiB: it is no layout"
    assert render_text(caught.value.diagnostics) == f"{path}:1:1: error[KV102]: {message}"
    path.write_bytes(b"x" * 10_000_000)
    with pytest.raises(KvgenError, match="larger than 256 KiB"):
        read(path)
    with pytest.raises(KvgenError, match="larger than 256 KiB"):
        load_text("é" * SIZE_LIMIT)


def test_no_more_is_read_than_tells_that_it_is_too_much(monkeypatch: pytest.MonkeyPatch):
    class Endless(io.BytesIO):
        def read(self, size: int = -1) -> bytes:
            assert size == SIZE_LIMIT + 1
            return b"#" * size

    monkeypatch.setattr("builtins.open", lambda *_: Endless())
    with pytest.raises(KvgenError, match="larger than 256 KiB"):
        read("layout.yaml")


@pytest.mark.parametrize("what", ["folder", "missing", "nul", "pipe", "device"])
def test_files_that_cannot_be_read(what: str, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.yaml")
    path = {"folder": tmp_path, "missing": tmp_path / "no.yaml", "nul": "a\0b", "pipe": tmp_path / "pipe.yaml"}
    path = path.get(what, os.devnull)
    with pytest.raises(KvgenError) as caught:
        read(path)
    assert [d.code for d in caught.value.diagnostics] == ["KV101"]


def test_files_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(KvgenError, match=r"cannot read layout.yaml: permission denied"):
        read("layout.yaml")


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "a:\n"])
def test_nesting_is_bounded(opening: str):
    pieces = [("  " * i if opening == "a:\n" else "") + opening for i in range(5000 if opening != "a:\n" else 400)]
    assert {code for code, *_ in diagnose("".join(pieces))} <= {"KV110", "KV106"}


def test_nesting_up_to_the_limit_is_read():
    text = "a: " + "[" * DEPTH_LIMIT + "]" * DEPTH_LIMIT
    assert parse(text, "layout.yaml").problems == []
    assert diagnose("a: [" + "[" * DEPTH_LIMIT + "]" * DEPTH_LIMIT + "]")[0][0] == "KV110"


WORDS = (
    "key value block slot head dim kv name axes streams buffers order holds fields pad align quant dynamic none token"
)
SIGNS = r"""( ) [ ] { } : , // % 8 0 -1 1.5 - &a *a !t << | > ' " # ? ~ true \\x41 @ ` --- ..."""
OTHERS = ["\n", "\n  ", "  - ", ": ", " ", "\t", "\x00", "\x85", "\u2028", "é", "\ufeff"]
PIECES = st.sampled_from([*WORDS.split(), *SIGNS.split(), *OTHERS])
TEXTS = [(LAYOUTS / f"{name}.yaml").read_text() for name in ("packed_nhd", "mla", "swa_nhd", "paged_x_vector")]


@settings(max_examples=400, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_text_gives_a_layout_or_diagnostics(data: st.DataObject):
    text = (
        LAYOUTS / f"{data.draw(st.sampled_from(['packed_nhd', 'mla', 'swa_nhd', 'paged_x_vector']))}.yaml"
    ).read_text()
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        stop = start + data.draw(st.integers(0, 12))
        text = text[:start] + data.draw(PIECES) + text[stop:]
    try:
        load_text(text)
    except KvgenError as error:
        found = error.diagnostics
        assert found
        assert all(d.code in CATALOG for d in found)
        places = [(d.span.line, d.span.column) for d in found]
        assert places == sorted(places)
        for render in (render_text, render_json, render_github):
            render(found)


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_diagnostics(data: bytes):
    with pytest.raises(KvgenError):
        load_text(data)
