"""`kvgen build`: what it writes, what it refuses, and what its exit status says."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import Result, kvgen

ROOT = Path(__file__).parent.parent

LAYOUT = """\
name: {name}
axes: {{head: 2, dim: 16}}
block_size: 4
buffers:
  key_cache: {{holds: key, order: block slot head dim}}
  value_cache: {{holds: value, order: block slot head dim}}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with layouts a and b, which is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layouts").mkdir()
    for name in "ab":
        (tmp_path / "layouts" / f"{name}.yaml").write_text(LAYOUT.format(name=name))
    return tmp_path


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def change(project, name="a"):
    (project / "layouts" / f"{name}.yaml").write_text(LAYOUT.format(name=name).replace("dim: 16", "dim: 32"))


def test_build_writes_modules_that_python_can_parse(project):
    result = kvgen("build")
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == ["wrote generated/a.py", "wrote generated/b.py", "2 written, 0 unchanged"]
    assert sorted(tree(project / "generated")) == ["a.py", "b.py", "kvgen.manifest.json"]
    compile((project / "generated" / "a.py").read_text(), "a.py", "exec")


def test_second_build_writes_nothing(project):
    kvgen("build")
    before = {path: path.stat().st_mtime_ns for path in (project / "generated").iterdir()}
    assert kvgen("build").out == "0 written, 2 unchanged\n"
    assert {path: path.stat().st_mtime_ns for path in (project / "generated").iterdir()} == before
    assert kvgen("build", "--check") == Result(0, "", "")


def test_same_bytes_in_any_folder_and_under_any_hash_seed(project, tmp_path_factory):
    kvgen("build")
    other = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(project / "layouts", other / "nested" / "layouts")
    for seed in ("1", "2"):
        command = [sys.executable, "-c", "from kvgen.cli import main; main()", "build", "--out", seed]
        subprocess.run(command, cwd=other / "nested", env=os.environ | {"PYTHONHASHSEED": seed}, check=True)
        assert tree(other / "nested" / seed) == tree(project / "generated")


def test_out_folder(project):
    assert kvgen("build", "layouts/a.yaml", "--out", "deep/er").code == 0
    assert sorted(tree(project / "deep")) == ["er/a.py", "er/kvgen.manifest.json"]


def test_paths_that_overlap_are_built_once(project):
    assert kvgen("build", "layouts", project / "layouts" / "a.yaml", "layouts/../layouts").out.endswith(
        "2 written, 0 unchanged\n"
    )


def test_check_names_what_is_wrong_and_writes_nothing(project):
    (project / "layouts" / "c.yaml").write_text(LAYOUT.format(name="c"))
    kvgen("build")
    change(project, "a")
    (project / "generated" / "b.py").write_text("# mine\n")
    (project / "layouts" / "c.yaml").unlink()
    (project / "layouts" / "d.yaml").write_text(LAYOUT.format(name="d"))
    before = tree(project)
    result = kvgen("build", "--check", "--output-format", "json")
    assert result.code == 1
    assert {(d["code"], d["path"]) for d in json.loads(result.out)} == {
        ("KV705", "generated/a.py"),
        ("KV703", "generated/b.py"),
        ("KV707", "generated/c.py"),
        ("KV706", "generated/d.py"),
        ("KV705", "generated/kvgen.manifest.json"),
    }
    assert tree(project) == before


def test_check_speaks_text_and_github(project):
    result = kvgen("build", "layouts/a.yaml", "--check")
    assert (result.code, result.out) == (1, "")
    assert "generated/a.py:1:1: error[KV706]: generated/a.py is missing" in result.err
    result = kvgen("build", "layouts/a.yaml", "--check", "--output-format", "github")
    assert (result.code, result.err) == (1, "")
    assert result.out.startswith("::error file=generated/a.py,line=1,")


def test_diff_shows_what_would_change(project):
    kvgen("build")
    before = tree(project)
    assert kvgen("build", "--diff") == Result(0, "", "")
    change(project)
    result = kvgen("build", "--diff")
    assert result.code == 1
    assert "--- a/generated/a.py\n+++ b/generated/a.py\n@@" in result.out
    assert "generated/b.py" not in result.out
    assert {k: v for k, v in tree(project).items() if k.startswith("generated")} == {
        k: v for k, v in before.items() if k.startswith("generated")
    }


def test_building_one_file_leaves_the_others(project):
    kvgen("build")
    change(project)
    result = kvgen("build", "layouts/a.yaml", "--clean")
    assert result.out == "wrote generated/a.py\n1 written, 0 unchanged\n"
    assert kvgen("build", "--check").code == 0


def test_orphans_are_reported_and_cleaned(project):
    kvgen("build")
    (project / "layouts" / "b.yaml").unlink()
    result = kvgen("build")
    assert (result.code, result.out) == (0, "0 written, 1 unchanged\n")
    assert result.err == "generated/b.py has no layout any more; --clean removes it\n"
    assert kvgen("build", "--clean").out == "removed generated/b.py\n0 written, 1 unchanged, 1 removed\n"
    assert sorted(tree(project / "generated")) == ["a.py", "kvgen.manifest.json"]


def test_an_orphan_that_was_edited_takes_force_to_remove(project):
    kvgen("build")
    (project / "layouts" / "b.yaml").unlink()
    module = project / "generated" / "b.py"
    module.write_text(module.read_text() + "# mine\n")
    said = "generated/b.py has no layout any more"
    assert kvgen("build").err == f"{said}; it was edited: --clean --force removes it\n"
    assert f"{said}, and was edited\n  help: `kvgen build --clean --force` removes it" in kvgen("build", "--check").err
    assert kvgen("build", "--clean").code == 1
    assert kvgen("build", "--clean", "--force").code == 0
    assert not module.exists()


@pytest.mark.parametrize("options", [("--check", "--force"), ("--diff", "--clean"), ("--check", "--clean")])
def test_what_writes_nothing_neither_removes_nor_overwrites(project, options):
    result = kvgen("build", *options)
    assert (result.code, "--check and --diff write nothing" in result.err) == (2, True)
    assert not (project / "generated").exists()


def test_renamed_layout_orphans_its_old_module(project):
    kvgen("build")
    (project / "layouts" / "b.yaml").write_text(LAYOUT.format(name="z"))
    assert kvgen("build", "--clean").out == (
        "wrote generated/z.py\nremoved generated/b.py\n1 written, 1 unchanged, 1 removed\n"
    )


def test_edited_file_is_not_overwritten_without_force(project):
    kvgen("build")
    module = project / "generated" / "a.py"
    module.write_text(module.read_text() + "# mine\n")
    change(project, "b")
    before = tree(project)
    result = kvgen("build")
    assert result.code == 1
    assert "error[KV703]: generated/a.py is not as kvgen wrote it" in result.err
    assert "--force" in result.err
    assert tree(project) == before
    assert kvgen("build", "--force").out.endswith("2 written, 0 unchanged\n")
    assert kvgen("build", "--check").code == 0


def test_a_mistake_in_one_layout_writes_nothing(project):
    (project / "layouts" / "b.yaml").write_text(LAYOUT.format(name="b").replace("slot head dim", "slot haed dim"))
    result = kvgen("build")
    assert result.code == 1
    assert "layouts/b.yaml:5:" in result.err
    assert not (project / "generated").exists()


def test_mistakes_in_all_files_are_told_in_one_run(project):
    for name in "ab":
        (project / "layouts" / f"{name}.yaml").write_text("name: [\n")
    result = kvgen("build")
    assert result.code == 1
    assert "layouts/a.yaml:" in result.err
    assert "layouts/b.yaml:" in result.err


@pytest.mark.parametrize("name", ["a", "A"])
def test_two_layouts_of_one_name(project, name):
    (project / "layouts" / "z.yaml").write_text("# the other\n" + LAYOUT.format(name=name))
    result = kvgen("build")
    assert result.code == 1
    assert f"layouts/z.yaml:2:1: error[KV708]: the name {name} is taken by layouts/a.yaml" in result.err
    assert not (project / "generated").exists()


def test_unwritable_output(project):
    (project / "generated").write_text("a file\n")
    result = kvgen("build")
    assert result.code == 2
    assert "error[KV702]: generated" in result.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_output(project):
    (project / "generated").mkdir(mode=0o500)
    assert kvgen("build").code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is neither a file nor the name of a layout"),
        (["layouts/c.yaml"], "layouts/c.yaml does not exist"),
        (["empty"], "there are no layouts in empty/"),
    ],
)
def test_nothing_to_build(project, arguments, message):
    (project / "empty").mkdir()
    result = kvgen("build", *arguments)
    assert result.code == 2
    assert f"error[KV701]: {message}" in result.err


def test_a_link_that_leads_nowhere_is_told_and_its_module_kept(project):
    kvgen("build")
    (project / "layouts" / "a.yaml").unlink()
    (project / "layouts" / "a.yaml").symlink_to("gone.yaml")
    result = kvgen("build", "--clean")
    assert (result.code, result.out) == (2, "")
    assert "error[KV701]: layouts/a.yaml is a link to gone.yaml, which is not there" in result.err
    assert (project / "generated" / "a.py").exists()
    (project / "layouts" / "b.yaml").rename(project / "gone.yaml")
    (project / "layouts" / "b.yaml").symlink_to("../gone.yaml")
    (project / "layouts" / "a.yaml").unlink()
    assert kvgen("build", "--clean").code == 0


def test_no_layouts_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = kvgen("build")
    assert result.code == 2
    assert "there is no folder layouts/ here" in result.err


def test_shipped_layouts_can_be_named(project):
    assert kvgen("build", "paged_nhd").out == "wrote generated/paged_nhd.py\n1 written, 0 unchanged\n"
    result = kvgen("build", "--clean")  # the layouts of the folder, beside those that came with kvgen
    assert result == Result(0, "wrote generated/a.py\nwrote generated/b.py\n2 written, 0 unchanged\n", "")
    assert kvgen("build", "--check").code == 0
    assert (project / "generated" / "paged_nhd.py").exists()


def test_the_repositorys_modules_are_up_to_date(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert kvgen("build", "--check") == Result(0, "", "")


def test_only_takes_some_functions(project):
    """Into a folder of their own; a build without the option finds other modules there."""
    call = ("build", "layouts/a.yaml", "--out", "some", "--only", "append, gather")
    assert kvgen(*call) == Result(0, "wrote some/a.py\n1 written, 0 unchanged\n", "")
    text = (project / "some" / "a.py").read_text()
    assert '__all__ = ["LAYOUT", "append", "gather"]' in text
    assert kvgen(*call, "--check") == Result(0, "", "")
    assert kvgen(*call[:-2], "--check").code == 1
    with (project / "layouts" / "a.yaml").open("a") as file:
        file.write("functions: [append, gather]\n")
    assert kvgen(*call[:-2]) == Result(0, "0 written, 1 unchanged\n", "")
    assert (project / "some" / "a.py").read_text() == text


def test_only_takes_of_a_folder_what_each_can_have(project):
    """A transfer has no append: its module stays, and is no orphan. A function that none has is refused."""
    (project / "layouts" / "move.yaml").write_text("name: move\ntransfer: {from: a, to: b}\n")
    kvgen("build")
    assert kvgen("build", "--only", "append,gather") == Result(
        0,
        "wrote generated/a.py\nwrote generated/b.py\n2 written, 0 unchanged\n",
        "generated/move.py can have none of these functions, and is left as it is\n",
    )
    result = kvgen("build", "--only", "append,transfer")
    assert (result.out.splitlines()[-1], result.err) == ("3 written, 0 unchanged", "")
    assert '__all__ = ["TRANSFER", "transfer"]' in (project / "generated" / "move.py").read_text()
    assert '__all__ = ["LAYOUT", "append"]' in (project / "generated" / "a.py").read_text()
    result = kvgen("build", "--only", "append,scatter,transfer_blocks,append")
    assert (result.code, result.err.splitlines()[::2]) == (
        1,
        [
            "error[KV223]: all that is named: the module has no function `scatter`",
            "error[KV223]: all that is named: `append` is named twice",
        ],
    )


def test_only_names_functions_of_the_module(project):
    result = kvgen("build", "layouts/a.yaml", "--only", "gaher,append_fused")
    assert result.code == 1
    assert result.err == (
        "error[KV223]: a: the module has no function `gaher`\n  help: did you mean `gather`?\n"
        "error[KV223]: a: the module has no function `append_fused`\n  help: a fused append needs a section `fuse`\n"
    )
    assert not (project / "generated").exists()
