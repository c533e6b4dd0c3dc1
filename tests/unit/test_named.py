"""Layouts are found by the names that stand in their files."""

from pathlib import Path

import pytest

from kvgen import named
from kvgen.cli.common import known_layouts, layout_path
from kvgen.diagnostics import KvgenError
from kvgen.documents import load
from kvgen.transfer import Transfer

BUFFERS = "buffers: {cache: {holds: [key, value], order: block slot kv head dim}}"
LAYOUT = "name: {}\naxes: {{head: 2, dim: 16}}\nblock_size: {}\n" + BUFFERS.replace("{", "{{").replace("}", "}}") + "\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layouts").mkdir()
    return tmp_path / "layouts"


def size_of_source(path: Path) -> int | None:
    transfer = load(path)
    assert isinstance(transfer, Transfer)
    return transfer.source.block_size


def test_a_transfer_takes_the_layout_of_that_name(here: Path) -> None:
    """And not the file that is called so."""
    (here / "cache.yaml").write_text(LAYOUT.format("cache_hnd", 4))
    (here / "v1.yaml").write_text(LAYOUT.format("cache", 8))
    (here / "move.yaml").write_text("name: move\ntransfer: {from: cache, to: cache_hnd}\n")
    assert size_of_source(here / "move.yaml") == 8
    assert layout_path("cache") == Path("layouts/v1.yaml")
    assert layout_path("cache_hnd") == Path("layouts/cache.yaml")


def test_a_file_is_found_by_what_it_is_called_too(here: Path) -> None:
    (here / "v1.yaml").write_text(LAYOUT.format("cache", 8))
    (here / "move.yaml").write_text("name: move\ntransfer: {from: v1, to: v1}\n")
    assert size_of_source(here / "move.yaml") == 8
    assert layout_path("v1") == Path("layouts/v1.yaml")


def test_a_name_here_hides_one_that_came_with_kvgen(here: Path) -> None:
    (here / "own.yaml").write_text(LAYOUT.format("paged_nhd", 4))
    (here / "move.yaml").write_text("name: move\ntransfer: {from: paged_nhd, to: paged_nhd}\n")
    assert size_of_source(here / "move.yaml") == 4
    assert layout_path("paged_nhd") == Path("layouts/own.yaml")
    names = list(known_layouts().values())
    assert names.count("paged_nhd") == 1
    assert "paged_hnd" in names


def test_of_two_with_one_name_none_is_taken(here: Path) -> None:
    (here / "a.yaml").write_text(LAYOUT.format("cache", 8))
    (here / "b.yaml").write_text(LAYOUT.format("cache", 4))
    with pytest.raises(KvgenError, match=r"the name cache is taken by layouts/a\.yaml"):
        layout_path("cache")
    (here / "move.yaml").write_text("name: move\ntransfer: {from: cache, to: cache}\n")
    with pytest.raises(KvgenError, match=r"`cache` is the name of a\.yaml and of b\.yaml"):
        load(here / "move.yaml")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("name: plain", "plain"),
        ("name: 'quoted'  # why", "quoted"),
        ('\ufeffname: "quoted"', "quoted"),
        ("{name: flow}", "file"),
        ("", "file"),
    ],
)
def test_what_a_file_says(tmp_path: Path, line: str, name: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(line + "\n", encoding="utf-8")
    assert named.name_of(path) == name


def test_what_cannot_be_read_is_called_as_its_file(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "bytes.yaml").write_bytes(b"name: \xff\n")
    assert named.name_of(tmp_path / "folder.yaml") == "folder"
    assert named.name_of(tmp_path / "bytes.yaml") == "bytes"
    assert named.names_in(tmp_path) == {tmp_path / "bytes.yaml": "bytes"}


def test_what_is_hidden_is_no_layout(here: Path) -> None:
    """Editors and archives leave such files beside those that they are of."""
    (here / "cache.yaml").write_text(LAYOUT.format("cache", 8))
    (here / ".cache.yaml").write_text(LAYOUT.format("cache", 4))
    (here / "move.yaml").write_text("name: move\ntransfer: {from: cache, to: cache}\n")
    assert size_of_source(here / "move.yaml") == 8
    assert layout_path("cache") == Path("layouts/cache.yaml")
