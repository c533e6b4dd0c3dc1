"""The docs: their pages run from top to bottom, links lead somewhere, and pages that are written are up to date."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvgen.cli.codes import ENTRIES, ENVIRONMENT
from kvgen.quant import MODES
from kvgen.spec import Spec
from kvgen.spec_transfer import TransferSpec
from kvgen.values import CASTS, ITEMSIZE, SCALE_DTYPES
from tests.command import searching
from tests.generated import ROOT, SHIPPED
from tests.pages import Block, Story, blocks, commands, load_layout, run_commands, unrunnable
from tools import make_docs

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
LANGUAGE = (ROOT / "docs" / "layout-language.md").read_text(encoding="utf-8")
WRITTEN = [ROOT / "docs" / "gallery.md", ROOT / "docs" / "errors.md"]
TOLD = [path for path in PAGES if path not in WRITTEN]


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


@pytest.mark.parametrize("block", found(WRITTEN, lambda block: block.is_layout))
def test_layouts_of_written_pages_load(block: Block) -> None:
    load_layout(block)


@pytest.mark.parametrize("path", TOLD, ids=lambda path: path.stem)
def test_every_block_is_run(path: Path) -> None:
    for block in blocks(path.read_text(encoding="utf-8")):
        reason = unrunnable(block)
        assert reason is None, f"{reason}\n{block.text}"
        if "run by" in block.marks:
            file, _, name = block.marks["run by"].partition("::")
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.M), block.marks


@pytest.mark.parametrize("path", TOLD, ids=lambda path: path.stem)
def test_pages_run_from_top_to_bottom(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    story = Story(tmp_path)
    for block in blocks(path.read_text(encoding="utf-8")):
        story.tell(block)


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


@pytest.mark.parametrize("code", sorted(ENTRIES))
def test_every_code_has_an_example(code: str) -> None:
    """Sessions meet their mistake, but for those that need what is not everywhere; layouts are tried by the page."""
    example = ENTRIES[code].example
    assert example
    if example.startswith("$ ") and code not in make_docs.ELSEWHERE:
        status, said = make_docs.session(example)
        assert f"error[{code}]" in said
        assert status == (2 if code in ENVIRONMENT else 1)


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


def explained(text: str) -> set[str]:
    """The words that rows of a page's tables begin with."""
    return set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\|([^|]*)\|", text, re.M))))


def test_the_language_page_has_every_key_and_type() -> None:
    models = Spec.__mro__[1].__subclasses__()
    keys = {key for model in models for key in model.model_fields}
    assert keys <= explained(LANGUAGE), "keys without a row of a table"
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", LANGUAGE))))
    assert ITEMSIZE.keys() | MODES.keys() | {*SCALE_DTYPES, *CASTS} <= words


def test_the_page_on_transfers_has_every_key() -> None:
    models = TransferSpec.__mro__[1].__subclasses__()
    keys = {field.alias or name for model in models for name, field in model.model_fields.items()}
    assert keys | {"layout"} <= explained((ROOT / "docs" / "transfers.md").read_text(encoding="utf-8"))


def test_tests_that_the_docs_name_exist() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 20
    for path, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.M), f"{path}::{name}"


def test_a_module_is_tested_in_another_tree_as_the_docs_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = list(blocks((ROOT / "docs" / "vendoring.md").read_text(encoding="utf-8")))
    monkeypatch.chdir(tmp_path)
    Story(tmp_path)
    run_commands(next(block for block in page if commands(block)))
    (block,) = [block for block in page if "file" in block.marks and block.language == "python"]
    program = block.text.replace(
        "device=device", 'device=device, only="slot_mapping"'
    )  # the others are tested elsewhere
    assert program != block.text
    path = tmp_path / block.marks["file"]
    path.parent.mkdir()
    path.write_text(f"{program}\ntest_every_byte()\nprint(device)\n", encoding="utf-8")
    environment = os.environ | searching(tmp_path, ROOT) | {"CUDA_VISIBLE_DEVICES": ""}
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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("```yaml\naxes: {}\n```\n", "a part of a layout that does not say of which"),
        ("<!-- of: mla -->\n```yaml\nblock_size: 32\n```\n", None),
        ("```sh\nkvgen list\nls\n```\n", "a line that is no kvgen command"),
        ("```console\n$ kvgen list\nname\n```\n", None),
        ("<!-- run by: tests/test_docs.py::anchors -->\n```sh\nls\n```\n", None),
        ("<!-- gpu -->\n```python\nx = 1\n```\n", "a block that is not run here needs a reason"),
        ("<!-- gpu: a profiler of kernels -->\n```python\nx = 1\n```\n", None),
        ("<!-- later -->\n```python\nx = 1\n```\n", "unknown marks: later"),
        ("```text\nkvgen 0.1\n```\n", "text that is neither output nor diagram"),
        ("```cpp\nint x;\n```\n", "blocks of cpp are not run"),
    ],
)
def test_a_block_that_nothing_runs_is_noticed(text: str, reason: str | None) -> None:
    (block,) = blocks(text)
    assert unrunnable(block) == reason


@pytest.mark.parametrize(
    "text",
    [
        "```python\nassert False\n```\n",
        "```sh\nkvgen show nothing\n```\n",
        "<!-- refused: KV303 -->\n```yaml\nname: a\n```\n",
        "<!-- command: kvgen list -->\n```text\nno such layout\n```\n",
        "<!-- gpu: a reason -->\n```python\n(\n```\n",
        "<!-- file: README.md -->\n```sh\nnot in it\n```\n",
    ],
)
def test_a_block_that_is_wrong_fails(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(text)
    with pytest.raises((AssertionError, SyntaxError)):
        Story(tmp_path).tell(block)
