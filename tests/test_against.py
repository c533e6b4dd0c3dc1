"""``kvgen test --against``: somebody's own function under the harness, and the page that documents it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from kvgen.against import Name, parse
from kvgen.diagnostics import KvgenError
from tests.command import kvgen
from tests.generated import ROOT
from tests.pages import blocks

PAGE = list(blocks((ROOT / "docs" / "own-functions.md").read_text(encoding="utf-8")))
FILES = {block.marks["file"]: block.text for block in PAGE if "file" in block.marks}

OWN = """
import torch
from kvgen import reference
from kvgen.resolve import load

LAYOUT = load({layout!r})
calls = []

def append(key, value, key_cache, value_cache, slot_mapping):
    pool = {{"key_cache": key_cache, "value_cache": value_cache}}
    reference.append(LAYOUT, {{"key": key, "value": value}}, pool, slot_mapping)

def renamed(slots, *, v, k, caches, kind, half):
    calls.append((kind, half))
    append(k, v, *caches, slots)

def one_by_one(slots, kind, key_cache, value_cache, key, value):
    renamed(slots, v=value, k=key, caches=(key_cache, value_cache), kind=kind, half=None)

def read(slots, key_cache, value_cache):
    pool = {{"key_cache": key_cache, "value_cache": value_cache}}
    return tuple(reference.gather(LAYOUT, pool, slots).values())

class Shelf:
    wrong = staticmethod(lambda *args: append(*args[:4], torch.where(args[4] >= 0, args[4] ^ 1, args[4])))

def nothing(*args, **options):
    pass
"""
LAYOUT = """
name: small
axes: {head: 2, dim: 6}
block_size: 4
buffers:
  key_cache: {holds: key, order: block slot head dim}
  value_cache: {holds: value, order: block slot head dim}
"""
CASES = ("--case", "append/T7", "--case", "append/minus_one", "--case", "append/padded")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which Python imports from, with a layout and functions for it in a module of its own name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    (tmp_path / "small.yaml").write_text(LAYOUT)
    (tmp_path / "own.py").write_text(OWN.format(layout=str(tmp_path / "small.yaml")))
    for name in ("own", "mine", "flash"):
        __import__("sys").modules.pop(name, None)
    return tmp_path


@pytest.mark.parametrize(
    "target",
    [
        "own:append",
        "append=own.py:append",
        "own:append(key, value, key_cache, value_cache, slot_mapping)",
        "own:one_by_one(slot_mapping, 'auto', value=value, key=key, key_cache=key_cache, value_cache=value_cache)",
    ],
)
def test_a_right_function_passes(folder: Path, target: str) -> None:
    result = kvgen("test", "small.yaml", "--against", target, *CASES)
    assert (result.code, result.err) == (0, "")
    assert "3 passed" in result.out


def test_all_cases_but_refusals_run(folder: Path) -> None:
    """Those of two functions that belong together; a case with an option that the call does not name is skipped."""
    calls = ("--against", "own:append", "--against", "gather=own:read(slots, key_cache, value_cache)")
    result = kvgen("test", "small.yaml", *calls)
    assert (result.code, result.err) == (0, "")
    passed, skipped = map(int, re.search(r": (\d+) passed, (\d+) skipped\n", result.out).groups())
    assert passed > 35
    assert 2 <= skipped <= 4


def test_a_wrong_function_is_told_like_a_generated_one(folder: Path) -> None:
    result = kvgen("test", "small.yaml", "--against", "own:Shelf.wrong", "--seed", 3, "--case", "append/T1")
    assert result.code == 1
    assert re.search(r"error\[KV731\]: small append/T1: .*key_cache.*slot number \d+ \(block", result.err)
    assert "again: kvgen test small.yaml --against own:Shelf.wrong --seed 3 --case append/T1" in result.err


def test_what_names_a_byte_comes_first(folder: Path) -> None:
    (folder / "mine.py").write_text(FILES["mine.py"])
    lines = kvgen("test", "small.yaml", "--against", "mine:append").err.splitlines()
    assert "append/minus_one: byte outside every addressed value: key_cache, neighbour slot 19" in lines[0]
    assert "raised" in lines[2]


def test_a_function_without_results(folder: Path) -> None:
    result = kvgen("test", "small.yaml", "--against", "gather=own:nothing", "--case", "gather/T7")
    assert "gather/T7: expected one tensor per stream (key, value), got NoneType" in result.err


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("own", "is no function"),
        ("own:append(key", "is no function"),
        ("own:append(key + 1)", "are no arguments of a call"),
        ("own:append(**key)", "are no arguments of a call"),
        ("own:append)(key)", "is no function"),
        ("own:missing", "AttributeError"),
        ("own:calls", "is a list and no function"),
        ("leaves.py:append", "leaves.py:append cannot be imported: SystemExit: 3"),
        ("not_there:append", "ModuleNotFoundError"),
        ("not_there.py:append", "FileNotFoundError"),
        ("LAYOUT=own:append", "small has no function LAYOUT"),
        ("write=own:append", "small has no function write"),
        ("own:append(key, value, key_cache, value_cache, slots)", "there is no slots"),
        ("own:append(key, key_cache, slot_mapping)", "nothing takes value, value_cache"),
    ],
)
def test_what_cannot_be_used_is_told(folder: Path, target: str, words: str) -> None:
    (folder / "leaves.py").write_text("raise SystemExit(3)")
    result = kvgen("test", "small.yaml", "--against", target)
    assert result.code == 2, result
    assert "error[KV715]" in result.err
    assert words in result.err


def test_parts() -> None:
    target = parse("gather=a.b:C.d(slots, x=key_cache, y=-1, z=('e', None))")
    assert (target.function, target.module, target.name) == ("gather", "a.b", "C.d")
    assert target.arguments == (Name("slots"),)
    assert target.keywords == (("x", Name("key_cache")), ("y", -1), ("z", ("e", None)))
    assert target.names == {"slots", "key_cache"}
    assert parse("a:b").arguments is None
    with pytest.raises(KvgenError):
        parse("a:b(open('x'))")


# the page


LIBRARIES = {"flash": "flashinfer", "vllm": "vllm"}
LINES = [line for block in PAGE if "run by" in block.marks for line in block.text.splitlines()]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split()[4])
def test_functions_of_libraries(folder: Path, line: str) -> None:
    """Where these can be imported and there is a GPU: their kernels have no other form."""
    (folder / "flash.py").write_text(FILES["flash.py"])
    arguments = shlex.split(line.removeprefix("kvgen "))
    library = LIBRARIES[re.split(r"[:.]", arguments[3])[0]]
    pytest.importorskip(library, reason=f"{library} is not installed")
    if not torch.cuda.is_available():
        pytest.skip(f"{library} needs a GPU")
    result = kvgen(*arguments, "--device", "cuda", "--case", "append/T7")
    assert result.code == 0, result.err
