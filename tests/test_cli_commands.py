"""The other commands: what they print, their exit status, and that mistakes are told and not traced."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from kvgen import __version__, runtime
from kvgen.cli.codes import COMMANDS, ENTRIES, ENVIRONMENT
from kvgen.cli.common import report
from kvgen.diagnostics import Diagnostic
from kvgen.emit import render
from kvgen.resolve import load
from tests.command import Result, kvgen, searching

ROOT = Path(__file__).parent.parent
SHIPPED = sorted(path.stem for path in (ROOT / "layouts").glob("*.yaml"))
TRANSFERS = sorted(path.stem for path in (ROOT / "layouts" / "transfers").glob("*.yaml"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments, **environment):
    """A process of its own, for what depends on the environment or on what is imported when."""
    command = [sys.executable, "-c", "from kvgen.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


# exit status


def test_status_is_two_only_if_nothing_was_found_wrong():
    missing, stale = Diagnostic("KV701", "there is none"), Diagnostic("KV705", "it is stale")
    assert [report(found) for found in ([], [missing], [stale], [missing, stale])] == [0, 2, 1, 1]


# check


def test_check_says_how_many_are_right(folder):
    assert kvgen("check", *SHIPPED) == Result(0, f"{len(SHIPPED)} layouts are right\n", "")
    assert kvgen("check", "paged_nhd", "--output-format", "json") == Result(0, "[]\n", "")
    assert kvgen("check", "paged_nhd", "--output-format", "github") == Result(0, "", "")


def test_check_tells_all_mistakes_with_places(folder):
    text = "name: x\naxes: {head: 8, dim: 128}\nblock_size: 16\nbuffers:\n"
    text += (
        "  key_cache: {holds: key, order: block slot head}\n  value_cache: {holds: value, order: blok slot head dim}\n"
    )
    Path("x.yaml").write_text(text)
    result = kvgen("check", "x.yaml")
    assert (result.code, result.out) == (1, "")
    assert re.findall(r"^x\.yaml:(\d+):\d+: error\[KV\d+\]", result.err, re.M) == ["5", "6"]
    found = json.loads(kvgen("check", "x.yaml", "--output-format", "json").out)
    assert [(d["path"], d["line"]) for d in found] == [("x.yaml", 5), ("x.yaml", 6)]
    github = kvgen("check", "x.yaml", "--output-format", "github").out
    assert [line.partition(",col")[0] for line in github.splitlines()] == [
        "::error file=x.yaml,line=5",
        "::error file=x.yaml,line=6",
    ]


@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe", b"name: [", b"a" * 10_000_000, b"- 1\n- 2\n", b"name: 3x\n"])
def test_check_of_what_is_no_layout(folder, content):
    Path("x.yaml").write_bytes(content)
    result = kvgen("check", "x.yaml")
    assert result.code == 1
    assert "error[KV" in result.err
    assert "Traceback" not in result.err


# list


def test_list_has_a_line_for_each_layout(folder):
    result = kvgen("list")
    assert (result.code, result.err) == (0, "")
    layouts, transfers = (part.splitlines() for part in result.out.split("\n\n"))
    header, *lines = layouts
    assert header.split()[:3] == ["name", "block", "size"]
    assert [line.split()[0] for line in lines] == SHIPPED
    assert [line.split()[0] for line in transfers] == ["transfer", *TRANSFERS]
    (line,) = [line for line in lines if line.startswith("paged_nhd ")]
    assert line.split()[1:7] == ["16", "key", "value", "key_cache", "value_cache", "4096"]


def test_list_names_the_layouts_here_too(folder):
    Path("layouts").mkdir()
    Path("layouts/mine.yaml").write_text((ROOT / "layouts" / "paged_nhd.yaml").read_text().replace("paged_nhd", "mine"))
    assert "\nmine " in kvgen("list").out
    assert kvgen("list", "layouts").out.count("\n") == 2


def test_list_for_programs(folder):
    """What the tables say; mistakes in files are told beside it."""
    Path("layouts").mkdir()
    text = "name: mine\nsummary: Mine.\naxes: {head: dynamic, dim: 64}\nblock_size: dynamic\nfuse: {key: [rope]}\n"
    text += "buffers:\n  k: {holds: key, order: block slot head dim}\n  v: {holds: value, order: block slot head dim}\n"
    Path("layouts/mine.yaml").write_text(text)
    Path("layouts/wrong.yaml").write_text("name: wrong\n")
    result = kvgen("list", "--json", "layouts", "nhd_to_fp8")
    assert result.code == 1
    assert result.err.startswith("layouts/wrong.yaml:1:1: error[KV208]")
    layout, transfer = json.loads(result.out)
    assert transfer.pop("path").endswith("layouts/transfers/nhd_to_fp8.yaml")
    assert layout == {
        "path": "layouts/mine.yaml",
        "name": "mine",
        "summary": "Mine.",
        "kind": "layout",
        "block_size": None,
        "streams": [{"name": "key", "fused": True}, {"name": "value", "fused": False}],
        "buffers": ["k", "v"],
        "bytes_per_token_and_layer": "256 * num_heads",
    }
    assert {name: transfer[name] for name in ("kind", "from", "to", "layers")} == {
        "kind": "transfer",
        "from": "paged_nhd",
        "to": "nhd_fp8_token_head",
        "layers": "one",
    }
    assert transfer["streams"] == [{"name": "key", "requantised": True}, {"name": "value", "requantised": True}]


def test_layouts_are_found_where_they_are_checked(folder):
    """In folders of `layouts`, and whatever they end in."""
    text = (ROOT / "layouts/paged_nhd.yaml").read_text()
    for file in ("layouts/engine/mine.yml", "layouts/other.yml"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(text.replace("name: paged_nhd", f"name: {Path(file).stem}"))
    assert kvgen("check").out == "2 layouts are right\n"
    assert [line.split()[0] for line in kvgen("list").out.splitlines()[1:3]] == ["other", "mine"]
    assert kvgen("check", "mine", "other").out == "2 layouts are right\n"


def test_two_files_of_one_name(folder):
    Path("layouts").mkdir()
    text = (ROOT / "layouts" / "paged_nhd.yaml").read_text()
    Path("layouts/a.yaml").write_text(text.replace("paged_nhd", "one"))
    assert kvgen("show", "one").out == kvgen("show", "layouts/a.yaml").out
    Path("layouts/b.yaml").write_text(text.replace("paged_nhd", "'one' # too"))
    taken = "error[KV708]: the name one is taken by layouts/a.yaml"
    result = kvgen("show", "one")
    assert (result.code, result.out) == (1, "")
    assert re.match(rf"layouts/b\.yaml:\d+:1: {re.escape(taken)}\n", result.err)
    result = kvgen("list")
    assert result.code == 1
    assert taken in result.err
    assert result.out.count("\none ") == 2
    assert "\npaged_nhd " in result.out


# show


def test_show_prints_everything(folder):
    result = kvgen("show", "paged_nhd", "--layers", 4, "--tokens", 100)
    assert (result.code, result.err) == (0, "")
    assert "key_cache + block * stride(0) + slot * stride(1) + head * stride(2) + dim" in result.out
    assert "slot 15 │ 30720 – 30975 │" in result.out
    assert "pool: 100 tokens = 7 blocks in 4 layers: 1835008 bytes (1.8 MiB)" in result.out


@pytest.mark.parametrize("name", SHIPPED)
def test_the_canonical_yaml_it_ends_with_is_the_layout(folder, name):
    out = kvgen("show", name).out
    Path("again.yaml").write_text(out[out.index(f"\nname: {name}\n") + 1 :])
    assert load(Path("again.yaml")) == load(ROOT / "layouts" / f"{name}.yaml")


def test_show_as_json(folder):
    facts = json.loads(kvgen("show", "packed_nhd", "--tokens", 32, "--output-format", "json").out)
    assert facts["buffers"][0]["order"] == "block slot head"
    assert facts["pool"] == {"layers": 1, "tokens": 32, "blocks": 2, "bytes": 131072}
    assert yaml.safe_load(facts["canonical"])["name"] == "packed_nhd"


def test_show_in_a_terminal_without_these_characters(folder):
    result = run("show", "paged_nhd", PYTHONIOENCODING="latin-1")
    assert result.returncode == 0
    assert "slot 15 ? 30720 ? 30975 ?" in result.stdout


@pytest.mark.parametrize("arguments", [["--layers", "0"], ["--tokens", "-3"], ["--tokens", "many"], ["--nonsense"]])
def test_show_called_wrongly(folder, arguments):
    assert kvgen("show", "paged_nhd", *arguments).code == 2


def test_show_of_a_name_almost_right(folder):
    result = kvgen("show", "page_nhd")
    assert result == Result(
        2, "", "error[KV701]: page_nhd is neither a file nor the name of a layout\n  help: did you mean paged_nhd?\n"
    )


@pytest.mark.parametrize(
    "command",
    [
        ["diff", "nhd_to_hnd", "paged_nhd"],
        ["diff", "paged_nhd", "nhd_to_hnd"],
        ["plan", "nhd_to_hnd", "paged_nhd"],
        ["test", "nhd_to_hnd", "--against", "os:getcwd"],
    ],
    ids=" ".join,
)
def test_a_transfer_where_a_layout_is_wanted(folder, command):
    result = kvgen(*command)
    assert result.code == 2
    assert result.err.startswith("error[KV701]: nhd_to_hnd is a transfer and no layout\n")


# new


def test_new_writes_a_layout_that_is_right(folder):
    result = kvgen("new", "mine")
    assert result.code == 0
    assert result.out.startswith("wrote layouts/mine.yaml")
    assert kvgen("check", "layouts").out == "1 layout is right\n"
    assert kvgen("build").code == 0


def test_new_says_what_makes_its_module(folder):
    assert kvgen("new", "mine").out.endswith("`kvgen build` makes its module\n")
    assert "wrote a b/mine.yaml; `kvgen show 'a b/mine.yaml'`" in kvgen("new", "mine", "--out", "a b").out
    result = kvgen("new", "mine", "--out", "sub")
    assert result.out.endswith("`kvgen build sub/mine.yaml` makes its module\n")
    assert kvgen("build", "sub/mine.yaml").code == 0


@pytest.mark.parametrize("like", [[], ["--like", "paged_hnd"], ["--like", "nhd_to_hnd"]])
def test_new_gives_editors_the_schema_that_is_there(folder, like):
    assert kvgen("new", "mine", *like).code == 0
    assert Path("layouts/mine.yaml").read_text().startswith("name: mine\n")
    kvgen("schema", "--out", "schema/layout.schema.json")
    assert kvgen("new", "other", *like).code == 0
    editor, name, *_ = Path("layouts/other.yaml").read_text().splitlines()
    assert (editor, name) == ("# yaml-language-server: $schema=../schema/layout.schema.json", "name: other")


def test_new_like_another_keeps_its_comments(folder):
    Path("a.yaml").write_text(
        "# first\nname: 'other' # its name\n" + (ROOT / "layouts/mla.yaml").read_text().partition("name: mla\n")[2]
    )
    assert kvgen("new", "mine", "--like", "a.yaml", "--out", "sub").code == 0
    assert Path("sub/mine.yaml").read_text().startswith("# first\nname: mine # its name\nsummary: ")
    assert kvgen("new", "mine", "--like", "paged_hnd").code == 0
    assert load(Path("layouts/mine.yaml")).name == "mine"


def test_new_never_overwrites(folder):
    kvgen("new", "mine")
    Path("layouts/mine.yaml").write_text("precious\n")
    result = kvgen("new", "mine")
    assert result.code == 2
    assert "error[KV709]: layouts/mine.yaml exists already" in result.err
    assert Path("layouts/mine.yaml").read_text() == "precious\n"


def test_new_refuses_the_name_of_a_transfer(folder):
    result = kvgen("new", "nhd_to_hnd")
    assert result.code == 1
    assert result.err.startswith("error[KV708]: nhd_to_hnd is the name of a transfer, ")
    assert not list(folder.rglob("*.yaml"))


@pytest.mark.parametrize("name", ["3x", "class", "a-b", "../a", "", "a\nb: c"])
def test_new_refuses_names_that_are_none(folder, name):
    result = kvgen("new", name)
    assert result.code == 1
    assert "error[KV" in result.err
    assert not list(folder.rglob("*.yaml"))
    assert not (folder.parent / "a.yaml").exists()


# schema


def test_schema_prints_writes_and_checks(folder):
    printed = kvgen("schema").out
    assert json.loads(printed)["$schema"].startswith("https://json-schema.org/")
    assert kvgen("schema", "--out", "s/layout.json") == Result(0, "wrote s/layout.json\n", "")
    assert Path("s/layout.json").read_text() == printed
    assert kvgen("schema", "--check", "--out", "s/layout.json") == Result(0, "", "")
    Path("s/layout.json").write_text(printed + " ")
    result = kvgen("schema", "--check", "--out", "s/layout.json")
    assert (result.code, result.err.splitlines()[0]) == (1, "error[KV711]: s/layout.json is out of date")
    assert kvgen("schema", "--check", "--out", "none.json").err.startswith("error[KV711]: none.json is missing")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["schema", "--out"], "JSON Schema"),
        (["show", "mla", "--svg"], "SVG"),
        (["bench", "mla", "--json"], "file of results"),
        (["bench", "mla", "--plot"], "picture"),
        (["compile", "mla", "--update", "--table"], "table of compiled kernels"),
    ],
)
def test_no_other_file_is_written_over(folder, arguments, what):
    if what == "picture":
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    Path("mine").write_text('{"layers": 32}\n')
    result = kvgen(*arguments, "mine")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error[KV709]: mine exists already, and is no {what}\n")
    assert Path("mine").read_text() == '{"layers": 32}\n'


@pytest.mark.parametrize("old", ["", "{}\n", '\ufeff{"$schema": "older"}\n'])
def test_an_older_schema_is_written_over(folder, old):
    Path("schema.json").write_text(old)
    assert kvgen("schema", "--out", "schema.json").code == 0
    assert Path("schema.json").read_text() == kvgen("schema").out


def test_the_repositorys_schema_is_up_to_date(folder, monkeypatch):
    assert kvgen("schema", "--check").err.startswith("error[KV711]: schema/layout.schema.json is missing")
    monkeypatch.chdir(ROOT)
    assert kvgen("schema", "--check") == Result(0, "", "")


# explain


def test_explain(folder):
    result = kvgen("explain", "kv703")
    assert result.out.startswith("KV703: A generated file was edited by hand\n\n")
    assert kvgen("explain").out.count("\n") == len(ENTRIES)
    assert kvgen("explain", "KV999") == Result(
        2, "", "error[KV710]: no code is called KV999\n  help: `kvgen explain` lists them\n"
    )


def test_every_code_in_use_is_in_the_catalogue_and_no_other():
    used = {code for path in (ROOT / "kvgen").rglob("*.py") for code in re.findall(r'"(KV\d{3})"', path.read_text())}
    assert used == set(ENTRIES)
    assert set(ENTRIES) >= ENVIRONMENT
    assert all(entry.title and entry.cause and entry.cure for entry in COMMANDS.values())


# compile and test: their own parts are tested elsewhere


def test_compile_checks_against_a_table(folder):
    call = ("compile", "paged_nhd", "--target", "sm_90", "--table", "t.json")
    assert kvgen(*call, "--check").err.startswith("error[KV723]: t.json does not exist")
    Path("t.json").write_text('{"triton": "0", "kernels": {}}')
    result = kvgen(*call, "--check", "--output-format", "json")
    assert result.code == 1
    assert {d["message"] for d in json.loads(result.out)} >= {"paged_nhd _append_kernel sm_90 is not in the table"}
    assert "was made with triton 0" in kvgen(*call, "--update").err


def test_compile_updates_a_part_of_the_table(folder):
    from importlib.metadata import version

    Path("t.json").write_text(json.dumps({"triton": version("triton"), "kernels": {}}))
    call = ("compile", "paged_nhd", "--table", "t.json")
    result = kvgen(*call, "--target", "sm_90", "--update")
    assert result.code == 0
    assert re.search(r"  _append_kernel: \d+ registers\n", result.out)
    assert kvgen(*call, "--target", "gfx942", "--update").code == 0
    rows = json.loads(Path("t.json").read_text())["kernels"]["paged_nhd"]["_append_kernel"]
    assert list(rows) == ["sm_90", "gfx942"]
    assert kvgen(*call, "--target", "sm_90", "--check").code == 0


def test_compile_lists_what_was_compiled(folder):
    """Forms of a call are compiled for one target of each maker, and not named where that is not asked for."""
    Path("a.yaml").write_text((ROOT / "layouts/paged_nhd.yaml").read_text() + "functions: [slot_mapping]\n")
    forms = [kvgen("compile", "a.yaml", "--target", targets).out for targets in ("sm_80", "sm_80,sm_90")]
    assert [text.count("_slot_mapping_kernel") for text in forms] == [1, 5]
    assert [text.count("sm_80") for text in forms] == [1, 1]


@pytest.mark.parametrize("arguments", [["--target", "sm90"], ["--target", "h100"], ["--check", "--update"]])
def test_compile_called_wrongly(folder, arguments):
    assert kvgen("compile", "paged_nhd", *arguments).code == 2


def test_test_runs_cases_and_says_so(folder):
    result = kvgen("test", "paged_nhd", "--device", "cpu", "--case", "allocate")
    assert result.code == 0, result.err
    assert re.fullmatch(r"paged_nhd +cpu, seed 0: \d+ passed\n", result.out)


def test_seeds_are_bounded(folder):
    for seed in ("-1", str(2**32), "1" + 30 * "0"):
        result = kvgen("test", "paged_nhd", "--device", "cpu", "--seed", seed)
        assert result.code == 2
        assert "--seed" in result.err
        assert ("4294967295" in result.err) == (seed != "-1")
    result = kvgen("test", "paged_nhd", "--device", "cpu", "--case", "append/T1", "--seed", str(2**32 - 1))
    assert result.out.endswith("cpu, seed 4294967295: 1 passed\n")


def test_test_of_a_case_that_nobody_has(folder):
    result = kvgen("test", "paged_nhd", "--device", "cpu", "--case", "nonsense")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error[KV710]: no case is named nonsense\n  help: known here: `append`, ")
    result = kvgen("test", "paged_nhd", "--device", "cpu", "--case", "zero_blocks/nonsense")
    assert "  help: known here: `zero_blocks/" in result.err
    result = kvgen("test", "paged_nhd", "--device", "cpu", "--case", "apend")
    assert "  help: did you mean `append`?" in result.err


def test_cases_run_where_they_are(folder):
    """Each on the layouts that have it, among names that others have; a name that none has is told."""
    call = (
        "test",
        "paged_nhd",
        "nhd_to_hnd",
        "--device",
        "cpu",
        "--case",
        "allocate",
        "--case",
        "transfer_blocks/many",
    )
    result = kvgen(*call)
    assert result.code == 0, result.err
    assert re.fullmatch(r"paged_nhd +cpu, seed 0: \d passed\nnhd_to_hnd +cpu, seed 0: \d+ passed\n", result.out)
    result = kvgen(*call, "--case", "nonsense")
    assert (result.code, result.err.splitlines()[0]) == (2, "error[KV710]: no case is named nonsense")


def test_test_names_the_first_difference_and_how_to_see_it_again(folder, monkeypatch):
    right, wrong = "slot = slot_number % BLOCK_SIZE", "slot = (slot_number + 1) % BLOCK_SIZE"
    original = render.render_all

    def faulty(layouts):
        return {file: text.replace(right, wrong) + "del allocate" for file, text in original(layouts).items()}

    monkeypatch.setattr(render, "render_all", faulty)
    command = ("test", "paged_nhd", "--device", "cpu", "--case", "append", "--case", "allocate")
    result = kvgen(*command)
    assert result.code == 1
    assert re.search(r"error\[KV731\]: paged_nhd append/\S+: .*expected 0x..", result.err)
    assert "  help: again: kvgen test paged_nhd --seed 0 --case append/" in result.err
    messages = [d["message"] for d in json.loads(kvgen(*command, "--output-format", "json").out)]
    assert "paged_nhd: there is no function allocate" in messages
    assert len(messages) > 4


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_test_shows_on_a_terminal_which_case_runs(folder, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    command = ("test", "paged_nhd", "nhd_to_hnd", "--device", "cpu", "--case", "allocate", "--case", "transfer/T1")
    quiet = kvgen(*command)
    monkeypatch.setattr("tests.command.io.StringIO", Terminal)
    result = kvgen(*command)
    assert (quiet.code, quiet.err) == (0, "")
    assert result.out == quiet.out
    assert "paged_nhd: allocate" in result.err
    assert "1/1" in result.err
    assert "nhd_to_hnd: transfer/T1" in result.err


def test_no_such_device(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert runtime.choose_device() == "cpu"
    assert kvgen("test", "paged_nhd", "--device", "cuda").err.startswith("error[KV713]: torch finds no CUDA device")
    assert kvgen("test", "paged_nhd", "--device", "cuda").code == 2
    assert kvgen("test", "paged_nhd", "--device", "tpu").code == 2


def test_without_torch(folder):
    """As on a machine where only the hard dependencies are installed."""
    hidden = Path("hidden/torch")
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    path = searching(hidden.parent, ROOT)
    calls = (["test", "paged_nhd"], ["compile", "paged_nhd", "--target", "sm_90"], ["bench", "paged_nhd"])
    for arguments in (*calls, ["tune", "paged_nhd", "--dry-run", "--function", "append"]):
        result = run(*arguments, **path)
        assert result.returncode == 2, result.stderr
        assert "error[KV712]" in result.stderr
        assert "extra `run`" in result.stderr
    assert run("build", "paged_nhd", **path).returncode == 0


# all of them


def test_explanations_fit_the_terminal(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, kvgen("explain", "KV223").out.splitlines())) > 80
    monkeypatch.setattr(
        sys.modules["kvgen.cli.explain"], "sys", SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True))
    )
    assert max(map(len, kvgen("explain", "KV223").out.splitlines())) <= 47  # the title is one line


def test_version_and_help(folder):
    assert kvgen("--version") == Result(0, f"kvgen {__version__}\n", "")
    assert kvgen().code in (0, 2)
    for command in ("build", "check", "list", "show", "new", "schema", "compile", "test", "bench", "tune", "explain"):
        result = kvgen(command, "--help")
        assert result.code == 0
        assert "Usage: kvgen " + command in result.out


def test_wrong_calls_are_usage_errors(folder):
    assert kvgen("biuld").code == 2
    assert kvgen("build", "--output-format", "xml").code == 2
    assert kvgen("show").code == 2


@pytest.mark.parametrize("name", ["a" * 300, "a" * 5000])
def test_names_longer_than_a_file_can_have(folder, name):
    for command in (
        ["check", name],
        ["build", name],
        ["show", name],
        ["new", name],
        ["build", "paged_nhd", "--out", name],
    ):
        result = kvgen(*command)
        assert result.code in (1, 2), command
        assert "error[KV" in result.err


def test_a_reader_that_stops_early(folder):
    command = [sys.executable, "-c", "from kvgen.cli import main; main()", "show", "paged_nhd"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_an_output_that_is_full(folder):
    command = [sys.executable, "-c", "from kvgen.cli import main; main()", "show", "paged_nhd"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (
        2,
        "error[KV702]: the output or a temporary file: No space left on device\n",
    )


def test_no_colour_where_it_is_not_wanted(folder):
    for arguments in (["list"], ["--help"], ["check", "nowhere"]):
        result = run(*arguments, NO_COLOR="1", TERM="xterm-256color")
        assert "\x1b[3" not in result.stdout + result.stderr
