"""The project around the code: what is installed, what the README promises, what CI runs."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import kvgen
from kvgen import resources
from tests.command import kvgen as kvgen_command
from tests.command import searching

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NO_COMMANDS = {"__init__", "codes", "common"}
README = (ROOT / "README.md").read_text()


def commands(text, language="sh"):
    """The lines of all code blocks of a language."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


def test_torch_and_triton_bind_nobody_who_only_builds():
    names = {re.split(r"[<>=\[ ]", requirement)[0].lower() for requirement in PROJECT["dependencies"]}
    assert names == {"jinja2", "pydantic", "pyyaml", "rich", "ruff", "typer"}
    assert not [r for r in PROJECT["optional-dependencies"]["run"] if "==" in r or "<" in r]


def test_version_comes_from_one_place():
    assert PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", kvgen.__version__)
    versions = [path for path in ROOT.glob("*.toml") if kvgen.__version__ in path.read_text()]
    assert versions == []


@pytest.mark.parametrize("name", ["templates", "schema", "layouts"])
def test_resources_are_found_in_a_checkout_and_inside_the_package(name, tmp_path, monkeypatch):
    assert resources.folder(name) == ROOT / name
    installed = tmp_path / "site-packages" / "kvgen"
    (installed / name).mkdir(parents=True)
    monkeypatch.setattr(resources, "__file__", str(installed / "resources.py"))
    assert resources.folder(name) == installed / name


def built(kind, folder):
    """The wheel, or the source archive, of the project."""
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.iterdir()
    return path


def test_wheel_has_all_that_the_commands_read(tmp_path):
    with zipfile.ZipFile(built("wheel", tmp_path)) as archive:
        names = set(archive.namelist())
    expected = {"kvgen/py.typed", "kvgen/cli/__init__.py"}
    for folder in ("templates", "schema", "layouts"):
        expected |= {f"kvgen/{p.relative_to(ROOT)}" for p in (ROOT / folder).rglob("*") if p.is_file()}
    assert expected <= names
    assert not [name for name in names if not name.startswith(("kvgen/", f"kvgen-{kvgen.__version__}.dist-info/"))]


def clean_environment(folder):
    """A virtual environment with what kvgen depends on, and no kvgen; what runs there, and with which variables."""
    venv.create(folder)
    scripts = folder / ("Scripts" if os.name == "nt" else "bin")
    packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    # A line of a .pth file adds a folder, and not the .pth files in it: an editable kvgen there stays out of sight.
    (Path(packages) / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return scripts, {"PATH": str(scripts), "HOME": str(folder)}


@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_an_installed_kvgen_builds(kind, tmp_path):
    """In a clean environment, nothing of this checkout in reach; the source archive is made a wheel there."""
    pytest.importorskip("hatchling")
    scripts, variables = clean_environment(tmp_path / "environment")
    if kind == "editable":
        source = tmp_path / "checkout"
        for name in ("kvgen", "templates", "schema", "layouts"):
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, source)
        what = ["-e", source]
    else:
        what = [built(kind, tmp_path / "archive")]
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    pip = [sys.executable, "-m", "pip", "--python", scripts / "python", "install", *options, *what]
    subprocess.run(pip, check=True, capture_output=True, env=os.environ | {"PIP_NO_INPUT": "1"})

    def run(*arguments):
        result = subprocess.run(
            [scripts / arguments[0], *arguments[1:]], cwd=tmp_path, env=variables, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    where = Path(run("python", "-c", "import kvgen; print(kvgen.__file__)").strip())
    assert where.is_relative_to(tmp_path / ("checkout" if kind == "editable" else "environment"))
    assert run("kvgen", "--version") == f"kvgen {kvgen.__version__}\n"
    listed = {line.split()[0] for line in run("kvgen", "list").splitlines() if line}
    assert listed == {"name", "transfer"} | {path.stem for path in (ROOT / "layouts").rglob("*.yaml")}
    assert run("kvgen", "build", "paged_nhd") == "wrote generated/paged_nhd.py\n1 written, 0 unchanged\n"
    assert (tmp_path / "generated" / "paged_nhd.py").read_text() == (ROOT / "generated" / "paged_nhd.py").read_text()
    assert json.loads(run("kvgen", "schema")) == json.loads((ROOT / "schema" / "layout.schema.json").read_text())


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a layout and its module, which is the current one."""
    monkeypatch.chdir(tmp_path)
    assert kvgen_command("new", "mine", "--like", "mla").code == 0
    assert kvgen_command("build").code == 0
    return tmp_path


def test_hooks_of_pre_commit(project):
    hooks = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    assert hooks.keys() == {"kvgen-check", "kvgen-build"}
    for hook in hooks.values():
        assert {"id", "name", "description", "entry", "language", "files"} <= hook.keys()
        assert hook["language"] == "python"

    def statuses(changed):
        """What the hooks exit with that a change of some files sets off."""
        found = {}
        for name, hook in hooks.items():
            files = [file for file in changed if re.search(hook["files"], file)]
            passed = files if hook.get("pass_filenames", True) else []
            if files:
                found[name] = kvgen_command(*hook["entry"].split()[1:], *passed).code
        return found

    layout = project / "layouts" / "mine.yaml"
    assert statuses(["layouts/mine.yaml"]) == {"kvgen-check": 0, "kvgen-build": 0}
    layout.write_text(layout.read_text().replace("dim: 64", "dim: 128"))
    assert statuses(["layouts/mine.yaml"]) == {"kvgen-check": 0, "kvgen-build": 1}
    layout.write_text(layout.read_text().replace("order: block slot", "order: block slto"))
    assert statuses(["layouts/mine.yaml"]) == {"kvgen-check": 1, "kvgen-build": 1}
    assert statuses(["generated/mine.py"]) == {"kvgen-build": 1}
    assert statuses(["README.md"]) == {}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell):
    named = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # not the shell that runs this
    show = [sys.executable, "-m", "kvgen", "--show-completion", shell]
    script = subprocess.run(show, cwd=ROOT, env=named, capture_output=True, text=True, check=True)
    assert "_KVGEN_COMPLETE" in script.stdout
    asked = {"COMP_WORDS": "kvgen s", "COMP_CWORD": "1"}
    asked |= {"_TYPER_COMPLETE_ARGS": "kvgen s", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    environment = os.environ | asked | {"_KVGEN_COMPLETE": f"complete_{shell}"}
    completed = subprocess.run(
        [sys.executable, "-m", "kvgen"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert "show" in completed.stdout
    assert "schema" in completed.stdout
    assert "build" not in completed.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
@pytest.mark.parametrize("arguments", [["--help"], ["show"], ["list", "mla"], ["check", "no_such_layout"]])
def test_no_color_is_respected(arguments):
    import pty

    terminal, end = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "NO_COLOR": "1"}
    environment.pop("FORCE_COLOR", None)
    with subprocess.Popen(
        [sys.executable, "-m", "kvgen", *arguments], cwd=ROOT, env=environment, stdout=end, stderr=end
    ):
        os.close(end)
        printed = b""
        with contextlib.suppress(OSError):  # how a terminal ends
            while part := os.read(terminal, 65536):
                printed += part
    os.close(terminal)
    codes = {int(code) for codes in re.findall(rb"\x1b\[([\d;]*)m", printed) for code in codes.split(b";") if code}
    assert printed
    assert not [code for code in codes if 30 <= code <= 49 or 90 <= code <= 107]


def test_nothing_is_sent_anywhere(tmp_path):
    """No command opens a connection."""
    code = f"""
import sys
def watch(event, arguments):
    if event.startswith(("socket.", "urllib.", "http.")):
        raise SystemExit(f"{{event}} {{arguments}}")
sys.addaudithook(watch)
sys.path.insert(0, {str(ROOT)!r})
from tests.command import kvgen
for line in ("list", "check paged_nhd", "show mla", "build paged_nhd", "new mine", "schema", "explain KV101"):
    assert kvgen(*line.split()).code == 0, line
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_changelog_has_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (\S+)", text, re.M)
    assert kvgen.__version__ in versions or versions[0] == "Unreleased"
    assert len(versions) == len(set(versions))


def test_shipped_layouts_are_called_as_their_files_are():
    for path in (ROOT / "layouts").glob("*.yaml"):
        assert f"\nname: {path.stem}\n" in path.read_text(), path


def test_code_is_clean():
    for command in (["check"], ["format", "--check"]):
        result = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


def test_ci_runs_the_commands_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    setup_and_test = [
        line
        for line in commands(README)
        if line.startswith(("python3 -m venv", ".venv/bin/pip", ".venv/bin/python -m pytest"))
    ]
    assert len(setup_and_test) == 3
    for line in setup_and_test:
        assert line in script.splitlines()
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def quickstart(*arguments):
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_main_job_agrees():
    result = quickstart()
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-2:] == [
        "read them back: they agree",
        "and all 393216 bytes of the pool are as the reference has them",
    ]


@pytest.mark.parametrize(("byte", "name", "at"), [(0, "key_cache", 0), (200_000, "value_cache", 3392)])
def test_the_main_job_names_a_flipped_byte(byte, name, at):
    result = quickstart("--flip-byte", str(byte))
    assert result.returncode == 1
    assert re.search(rf"^FAILED: {name} byte {at} is 0x.., it should be 0x..$", result.stdout, re.M)


def test_the_main_job_is_called_wrongly():
    assert quickstart("--flip-byte", "393216").returncode == 2


def quoted(kind):
    """The code blocks of the README that say where they come from: (source, block)."""
    return re.findall(rf"^<!-- {kind}: (.*?) -->\n```\w+\n(.*?)^```", README, re.M | re.S)


def test_readme_quotes_files_as_they_are():
    blocks = quoted("file")
    assert len(blocks) == 2
    for path, block in blocks:
        assert block in (ROOT / path).read_text(), path


def test_readme_quotes_commands_as_they_print():
    ((command, block),) = quoted("command")
    assert block in kvgen_command(*command.split()[1:]).out


def test_readme_names_every_command():
    table = re.findall(r"^\| `kvgen (\w+)", README, re.M)
    assert sorted(table) == sorted(
        path.stem for path in (ROOT / "kvgen" / "cli").glob("*.py") if path.stem not in NO_COMMANDS
    )


def test_readme_lists_every_page():
    pages = re.findall(r"^\| \[[\w ]+\]\(docs/([\w-]+\.md)\)", README, re.M)
    assert sorted(pages) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_readme_links_exist():
    for text in (README, (ROOT / "CONTRIBUTING.md").read_text()):
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / target).exists(), target


def test_readme_snippet_runs(tmp_path):
    """The example of use, on the CPU, with inputs of its own."""
    (snippet,) = re.findall(r"^```python\n(import torch\n.*?)^```", README, re.M | re.S)
    preamble = """
import torch
block_table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
context_lens = torch.tensor([17, 5])
key, value = (torch.randn(2, 8, 128).bfloat16() for _ in range(2))
"""
    checks = """
assert slots.tolist() == [1 * 16 + 1, 5]
assert torch.equal(keys, key) and torch.equal(values, value)
"""
    assert kvgen_command("build", "paged_nhd", "--out", tmp_path / "generated").code == 0
    code = preamble + snippet.replace('"cuda"', '"cpu"').replace("1024", "4") + checks
    environment = os.environ | searching(tmp_path) | {"TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
