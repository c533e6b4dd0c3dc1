"""The docs: layouts in them load, commands run, links lead somewhere, and pages that are written are up to date.

HTML comments right before a code block say what is special about it:

    <!-- refused: KV303 -->   a layout that gives this code
    <!-- slow -->             commands that take minutes: run with KVGEN_SLOW_DOCS=1 only
    <!-- file: PATH -->       the content of a file that a test uses
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvgen.diagnostics import KvgenError
from kvgen.quant import MODES
from kvgen.resolve import load_text
from kvgen.spec import (
    RESERVED,
    AxesSpec,
    KernelSpec,
    PadSpec,
    PlaceSpec,
    QuantSpec,
    ScaleSpec,
    ShardSpec,
    SlotsSpec,
    Spec,
    StreamSpec,
)
from kvgen.values import CASTS, ITEMSIZE, RESERVED_MODES, SCALE_DTYPES
from tests.command import kvgen
from tests.generated import ROOT, SHIPPED
from tools import make_docs

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
LANGUAGE = (ROOT / "docs" / "layout-language.md").read_text(encoding="utf-8")
FOLDERS = ("layouts", "schema", "generated")
SHELLS = ("bash", "sh", "console")


@dataclass(frozen=True)
class Block:
    """A fenced code block, and the comments right before it as ``{"refused": "KV303"}``."""

    language: str
    text: str
    marks: dict[str, str]

    @property
    def is_layout(self) -> bool:
        """Whether it is a whole layout, and not a part of one."""
        return self.language == "yaml" and re.search(r"^name:", self.text, re.M) is not None


def blocks(text: str) -> Iterator[Block]:
    """The code blocks of a page, in order."""
    pattern = r"((?:^<!--[^\n]*-->\n)*)^```(\w*)\n(.*?)^```$"
    for comments, language, code in re.findall(pattern, text, re.M | re.S):
        marks = dict(re.findall(r"^<!-- (\w+)(?:: (.*?))? -->$", comments, re.M))
        yield Block(language, code, marks)


def commands(block: Block) -> list[list[str]]:
    """The arguments of every kvgen command line in a block of shell commands; ``console`` has a prompt before them."""
    if block.language not in SHELLS:
        return []
    prompt = r"\$ " if block.language == "console" else ""
    lines = re.findall(rf"^{prompt}(?:\S*/)?kvgen (.*)$", block.text, re.M)
    return [shlex.split(line, comments=True) for line in lines]


def run_commands(block: Block, folder: Path) -> None:
    """Run a block's commands one after the other in a folder that has what the repository has; each must succeed."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for arguments in commands(block):
        result = kvgen(*arguments)
        assert result.code == 0, f"kvgen {shlex.join(arguments)}\n{result.err}"


def anchors(text: str) -> set[str]:
    """What links to a page may name: its headings as GitHub spells them, and explicit anchors."""
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", outside, re.M)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', outside))


def found(paths: list[Path], wanted) -> list:
    """Every block of some pages that is wanted, as a parameter named by its page and its place among them."""
    cases = []
    for path in paths:
        chosen = [block for block in blocks(path.read_text(encoding="utf-8")) if wanted(block)]
        cases += [pytest.param(block, id=f"{path.stem}-{i}") for i, block in enumerate(chosen)]
    return cases


@pytest.mark.parametrize("block", found([*DOCS, ROOT / "README.md"], lambda block: block.is_layout))
def test_layouts_load(block: Block) -> None:
    refused = block.marks.get("refused")
    if refused is None:
        load_text(block.text, "docs.yaml")
        return
    with pytest.raises(KvgenError) as caught:
        load_text(block.text, "docs.yaml")
    assert refused in [diagnostic.code for diagnostic in caught.value.diagnostics]


@pytest.mark.parametrize("block", found(DOCS, commands))
def test_commands_run(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "slow" in block.marks and not os.environ.get("KVGEN_SLOW_DOCS"):
        pytest.skip("marked as slow; KVGEN_SLOW_DOCS=1 runs it")
    monkeypatch.chdir(tmp_path)
    run_commands(block, tmp_path)


@pytest.mark.parametrize("name", sorted(make_docs.PAGES))
def test_written_pages_are_up_to_date(name: str) -> None:
    message = f"docs/{name} is out of date: run `python tools/make_docs.py`"
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == make_docs.PAGES[name](), message


def test_check_names_the_page_that_is_out_of_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(make_docs, "DOCS", tmp_path)
    assert make_docs.main([]) == 0
    assert make_docs.main(["--check"]) == 0
    (tmp_path / "errors.md").write_text("old")
    (tmp_path / "gallery" / "gone.svg").write_text("")
    capsys.readouterr()
    assert make_docs.main(["--check"]) == 1
    assert capsys.readouterr().err == (
        "docs/errors.md is out of date: `python tools/make_docs.py` writes it\n"
        "docs/gallery/gone.svg belongs to no layout: `python tools/make_docs.py` removes it\n"
    )
    assert (tmp_path / "errors.md").read_text() == "old"
    assert make_docs.main([]) == 0
    assert not (tmp_path / "gallery" / "gone.svg").exists()
    assert make_docs.main(["--chek"]) == 2


def test_the_gallery_speaks_of_shipped_layouts_only() -> None:
    assert make_docs.FOUND.keys() <= set(SHIPPED)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        page = path.parent / name if name else path
        assert page.exists(), target
        if anchor:
            assert anchor in anchors(page.read_text(encoding="utf-8")), target


def test_the_language_page_has_every_key_and_type() -> None:
    streams = (StreamSpec, QuantSpec, ScaleSpec)
    models = (Spec, AxesSpec, *streams, PlaceSpec, PadSpec, SlotsSpec, ShardSpec, KernelSpec)
    keys = {key for model in models for key in model.model_fields}
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", LANGUAGE))))
    assert keys | ITEMSIZE.keys() | MODES.keys() | {*SCALE_DTYPES, *CASTS, *RESERVED_MODES} <= words


def test_the_language_page_lists_what_is_reserved() -> None:
    section = LANGUAGE.partition("## Reserved keys\n")[2]
    rows = [row.split("|")[1:3] for row in re.findall(r"^\|.*$", section, re.M)[2:]]
    listed = {key: where.strip() for keys, where in rows for key in re.findall(r"`(\w+)`", keys)}
    names = {Spec: "the layout", StreamSpec: "a stream", QuantSpec: "an encoding", ScaleSpec: "a scale"}
    assert listed == {key: names[owners[0]] for key, owners in RESERVED.items()}


def test_tests_that_the_docs_name_exist() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 20
    for path, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.M), f"{path}::{name}"


def test_a_module_is_tested_in_another_tree_as_the_docs_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = list(blocks((ROOT / "docs" / "vendoring.md").read_text(encoding="utf-8")))
    monkeypatch.chdir(tmp_path)
    run_commands(next(block for block in page if commands(block)), tmp_path)
    (block,) = [block for block in page if "file" in block.marks]
    program = block.text.replace(
        "device=device", 'device=device, only="slot_mapping"'
    )  # the others are tested elsewhere
    assert program != block.text
    path = tmp_path / block.marks["file"]
    path.parent.mkdir()
    path.write_text(f"{program}\ntest_every_byte()\nprint(device)\n", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, path], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "cpu\n"), result.stderr


def test_layouts_and_commands_are_recognised() -> None:
    text = (
        "<!-- refused: KV303 -->\n<!-- slow -->\n```yaml\nname: a\n```\n\n```yaml\naxes: {}\n```\n"
        "```console\n$ kvgen list\nname\n$ .venv/bin/kvgen show 'a b'  # why\nkvgen 0.1\n```\n"
        "```text\nkvgen list\n```\n"
    )
    first, part, shell, other = blocks(text)
    assert first.marks == {"refused": "KV303", "slow": ""}
    assert (first.is_layout, part.is_layout, shell.is_layout) == (True, False, False)
    assert commands(shell) == [["list"], ["show", "a b"]]
    assert commands(other) == []
    assert anchors("# A `b` c, d\n```text\n# e\n```\n") == {"a-b-c-d"}
