"""Writing generated files: what is found, what is written, and that it is all or nothing."""

import json
import os
import subprocess
import sys

import pytest

from kvgen.diagnostics import KvgenError
from kvgen.emit.write import MANIFEST, Module, State, apply, digest, survey, write_file

A = Module("a.py", "a = 1\n", digest("layout a"))
B = Module("b.py", "b = 1\n", digest("layout b"))
A2 = Module("a.py", "a = 2\n", digest("layout a, changed"))


def build(folder, *modules, whole=True, clean=False, force=False):
    return apply(survey(folder, modules, whole=whole, clean=clean), force=force, clean=clean)


def states(folder, *modules, whole=True):
    return {change.file: change.state for change in survey(folder, modules, whole=whole).changes}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_first_build_writes_modules_and_manifest(tmp_path):
    out = tmp_path / "deep" / "generated"
    assert states(out, A) == {"a.py": State.MISSING, MANIFEST: State.MISSING}
    assert not out.exists()
    assert build(out, A, B) == (["a.py", "b.py"], [])
    assert (out / "a.py").read_text() == "a = 1\n"
    assert json.loads((out / MANIFEST).read_text()) == {
        "modules": {
            "a.py": {"layout": digest("layout a"), "module": digest("a = 1\n")},
            "b.py": {"layout": digest("layout b"), "module": digest("b = 1\n")},
        }
    }


def test_unchanged_tree_writes_nothing(tmp_path):
    build(tmp_path, A, B)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert build(tmp_path, A, B) == ([], [])
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert set(states(tmp_path, A, B).values()) == {State.FRESH}


def test_manifest_does_not_depend_on_folder_or_order(tmp_path):
    build(tmp_path / "x", A, B)
    build(tmp_path / "y" / "z", B)
    build(tmp_path / "y" / "z", A, B)
    assert contents(tmp_path / "x") == contents(tmp_path / "y" / "z")


def test_changed_layout_is_stale_and_rewritten(tmp_path):
    build(tmp_path, A, B)
    assert states(tmp_path, A2, B) == {"a.py": State.STALE, "b.py": State.FRESH, MANIFEST: State.STALE}
    assert build(tmp_path, A2, B) == (["a.py"], [])
    assert (tmp_path / "a.py").read_text() == "a = 2\n"


def test_layout_changed_without_effect_refreshes_the_manifest(tmp_path):
    build(tmp_path, A)
    commented = Module("a.py", A.text, digest("layout a, with a comment"))
    assert states(tmp_path, commented) == {"a.py": State.FRESH, MANIFEST: State.STALE}
    assert build(tmp_path, commented) == ([], [])
    assert digest("layout a, with a comment") in (tmp_path / MANIFEST).read_text()


def test_building_one_leaves_the_others(tmp_path):
    build(tmp_path, A, B)
    assert State.ORPHANED not in states(tmp_path, A2, whole=False).values()
    build(tmp_path, A2, whole=False, clean=True)
    assert (tmp_path / "b.py").read_text() == "b = 1\n"
    assert set(json.loads((tmp_path / MANIFEST).read_text())["modules"]) == {"a.py", "b.py"}


def test_orphans_are_named_kept_and_removed_on_request(tmp_path):
    build(tmp_path, A, B)
    (tmp_path / "mine.py").write_text("not kvgen's\n")
    assert states(tmp_path, A)["b.py"] == State.ORPHANED
    assert build(tmp_path, A) == ([], [])
    assert states(tmp_path, A)["b.py"] == State.ORPHANED  # not forgotten by a build without --clean
    assert build(tmp_path, A, clean=True) == ([], ["b.py"])
    assert sorted(contents(tmp_path)) == ["a.py", MANIFEST, "mine.py"]
    assert set(states(tmp_path, A).values()) == {State.FRESH}


def test_deleted_orphan_leaves_the_manifest(tmp_path):
    build(tmp_path, A, B)
    (tmp_path / "b.py").unlink()
    assert states(tmp_path, A) == {"a.py": State.FRESH, MANIFEST: State.STALE}
    build(tmp_path, A)
    assert set(json.loads((tmp_path / MANIFEST).read_text())["modules"]) == {"a.py"}


def test_edited_file_is_refused_and_nothing_is_written(tmp_path):
    build(tmp_path, A, B)
    (tmp_path / "a.py").write_text("a = 1  # mine\n")
    new_b = Module("b.py", "b = 2\n", digest("layout b, changed"))
    before = contents(tmp_path)
    assert states(tmp_path, A, new_b)["a.py"] == State.EDITED
    with pytest.raises(KvgenError) as caught:
        build(tmp_path, A, new_b)
    assert [d.code for d in caught.value.diagnostics] == ["KV703"]
    assert "a.py is not as kvgen wrote it" in caught.value.diagnostics[0].message
    assert contents(tmp_path) == before
    assert build(tmp_path, A, new_b, force=True) == (["a.py", "b.py"], [])
    assert (tmp_path / "a.py").read_text() == "a = 1\n"


def test_foreign_file_of_that_name_is_not_overwritten(tmp_path):
    (tmp_path / "a.py").write_text("somebody's own\n")
    with pytest.raises(KvgenError):
        build(tmp_path, A)
    assert contents(tmp_path) == {"a.py": b"somebody's own\n"}


def test_edited_orphan_is_not_removed(tmp_path):
    build(tmp_path, A, B)
    (tmp_path / "b.py").write_text("b = 1  # mine\n")
    with pytest.raises(KvgenError) as caught:
        build(tmp_path, A, clean=True)
    assert [d.code for d in caught.value.diagnostics] == ["KV703"]
    assert (tmp_path / "b.py").exists()
    assert build(tmp_path, A, clean=True, force=True) == ([], ["b.py"])


def test_lost_manifest_is_written_anew_when_the_files_are_right(tmp_path):
    build(tmp_path, A, B)
    expected = contents(tmp_path)
    (tmp_path / MANIFEST).unlink()
    assert build(tmp_path, A, B) == ([], [])
    assert contents(tmp_path) == expected


@pytest.mark.parametrize("text", ["", "[]", "{", '{"modules": 3}', '{"modules": {"a.py": "x"}}', "<<<<<<< HEAD\n"])
def test_damaged_manifest_is_an_error(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(KvgenError) as caught:
        build(tmp_path, A)
    assert [d.code for d in caught.value.diagnostics] == ["KV704"]
    assert sorted(contents(tmp_path)) == [MANIFEST]


def test_manifest_names_no_file_outside_its_folder(tmp_path):
    victim = tmp_path / "victim.py"
    victim.write_text("precious\n")
    entry = {"layout": digest(""), "module": digest("precious\n")}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / MANIFEST).write_text(json.dumps({"modules": {"../victim.py": entry}}))
    build(tmp_path / "out", A, clean=True)
    assert victim.read_text() == "precious\n"


def test_unwritable_folder(tmp_path):
    (tmp_path / "generated").write_text("a file where the folder should be\n")
    for function in (lambda: survey(tmp_path / "generated", [A], whole=True), lambda: build(tmp_path / "generated", A)):
        with pytest.raises(KvgenError) as caught:
            function()
        assert [d.code for d in caught.value.diagnostics] == ["KV702"]


@pytest.mark.parametrize("call", ["write_bytes", "replace"])
def test_failure_half_way_leaves_the_old_files(tmp_path, monkeypatch, call):
    """The disk fills up while the second file is written beside its place, or the first move fails."""
    build(tmp_path, A, B)
    before = contents(tmp_path)
    calls = []

    def failing(*args, original):
        calls.append(args)
        if len(calls) == (2 if call == "write_bytes" else 1):
            raise OSError(28, "No space left on device")
        return original(*args)

    if call == "write_bytes":
        path = type(tmp_path)
        original = path.write_bytes
        monkeypatch.setattr(path, "write_bytes", lambda self, data: failing(self, data, original=original))
    else:
        original = os.replace
        monkeypatch.setattr(os, "replace", lambda a, b: failing(a, b, original=original))
    with pytest.raises(KvgenError) as caught:
        build(tmp_path, A2, Module("b.py", "b = 2\n", digest("b2")))
    assert caught.value.diagnostics[0].message.endswith("no space left on device")
    assert contents(tmp_path) == before


def test_written_files_have_the_usual_permissions(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("")
    build(tmp_path, A)
    assert (tmp_path / "a.py").stat().st_mode == plain.stat().st_mode


def test_a_written_file_keeps_its_permissions_and_a_link_stays_one(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("new/file")
    for name in ("file", "link", "dangling"):
        write_file(tmp_path / name, name)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "link"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "new" / "file").read_text() == "dangling"


def test_what_is_no_regular_file_is_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_file(tmp_path / "pipe", "a")
    write_file(tmp_path / "link", b"b")
    assert os.read(reader, 9) == b"ab"
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(KvgenError) as caught:
        write_file(tmp_path, "a")
    assert [d.code for d in caught.value.diagnostics] == ["KV702"]


@pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="not on this system")
def test_outputs_of_the_process_are_written_to(tmp_path):
    code = "from pathlib import Path; from kvgen.emit.write import write_file; write_file(Path('/dev/stdout'), 'a')"
    with (tmp_path / "out").open("a") as out:
        for _ in range(2):
            subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "aa"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"a"


def test_windows_line_ends_count_as_an_edit(tmp_path):
    build(tmp_path, A)
    (tmp_path / "a.py").write_bytes(b"a = 1\r\n")
    assert states(tmp_path, A)["a.py"] == State.EDITED
