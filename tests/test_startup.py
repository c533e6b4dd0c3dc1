"""What a command imports: those that only read and write text must not wait for torch."""

import subprocess
import sys

import pytest

PROBE = """
import sys
from kvgen.cli import main

try:
    main()
except SystemExit as exit:
    assert not exit.code, exit.code
heavy = {"torch", "triton", "numpy", "matplotlib"} & {name.partition(".")[0] for name in sys.modules}
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    "command",
    [
        "build paged_nhd --out out",
        "build paged_nhd --out out --diff",
        "check paged_nhd packed_hnd",
        "list",
        "show paged_x_vector --layers 2 --tokens 100",
        "show paged_nhd --output-format json",
        "diff paged_nhd flat_slots",
        "plan paged_nhd block_v1 --json",
        "new mine",
        "schema",
        "explain KV101",
        "--help",
        "compile --help",
        "test --help",
        "bench --help",
        "tune --help",
    ],
)
def test_no_torch(tmp_path, command):
    if "--diff" in command:
        subprocess.run([sys.executable, "-c", PROBE, *command.split()[:-1]], cwd=tmp_path, check=True)
    result = subprocess.run(
        [sys.executable, "-c", PROBE, *command.split()], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_the_probe_notices():
    """The test above can fail: something that imports torch is told apart."""
    probe = PROBE.replace("from kvgen.cli import main", "from kvgen.cli import main\nimport numpy")
    result = subprocess.run([sys.executable, "-c", probe, "explain"], capture_output=True, text=True, check=False)
    assert "AssertionError: {'numpy'}" in result.stderr


def test_modules_of_the_build_do_not_import_each_others_heavy_parts():
    """Each part of the flow up to the text of a module, imported alone."""
    modules = "kvgen.resolve kvgen.canonical kvgen.lower kvgen.schedule kvgen.emit kvgen.show kvgen.compile_report"
    code = f"import sys, {', '.join(modules.split())}\nassert not {{'torch', 'triton'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
