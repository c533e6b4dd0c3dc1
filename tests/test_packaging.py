"""The project around the code: what is installed, what the README promises, what CI runs."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import kvgen
from kvgen import resources
from tests.command import kvgen as kvgen_command

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


def test_wheel_has_all_that_the_commands_read(tmp_path):
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    expected = {"kvgen/py.typed", "kvgen/cli/__init__.py"}
    for folder in ("templates", "schema", "layouts"):
        expected |= {f"kvgen/{p.relative_to(ROOT)}" for p in (ROOT / folder).rglob("*") if p.is_file()}
    assert expected <= names
    assert not [name for name in names if not name.startswith(("kvgen/", f"kvgen-{kvgen.__version__}.dist-info/"))]

    # As installed: with nothing of the checkout in reach.
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); from kvgen.cli import main; main()"
    build = subprocess.run(
        [sys.executable, "-c", code, "build", "paged_nhd"], cwd=tmp_path, capture_output=True, text=True
    )
    assert build.stdout == "wrote generated/paged_nhd.py\n1 written, 0 unchanged\n"


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
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
