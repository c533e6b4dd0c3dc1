"""Generated modules are clean, stand-alone and the same everywhere; kvgen itself knows no shipped layout."""

import ast
import difflib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvgen.documents import load, load_text
from kvgen.emit import render_all, render_layout
from kvgen.emit.describe import describe
from tests.generated import module_of

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = sorted((ROOT / "layouts").glob("*.yaml"))
TRANSFERS = sorted((ROOT / "layouts" / "transfers").glob("*.yaml"))
ALL = [*SHIPPED, *TRANSFERS]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return render_all([load(path) for path in ALL])


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_modules_import_torch_and_triton_alone(texts: dict[str, str], path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(texts[f"{path.stem}.py"])):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    roots = {name.partition(".")[0] for name in imported}
    assert {"torch", "triton"} <= roots <= {"torch", "triton"} | sys.stdlib_module_names, imported


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_modules_export_what_they_define(texts: dict[str, str], path: Path) -> None:
    tree = ast.parse(texts[f"{path.stem}.py"])
    kinds = ast.FunctionDef | ast.ClassDef
    defined = {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}
    exported = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    assert sorted([*defined, "TRANSFER" if path in TRANSFERS else "LAYOUT"]) == sorted(exported)
    assert all(ast.get_docstring(n) for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in defined)


def test_modules_are_clean_and_a_fixed_point_of_the_formatter(texts: dict[str, str], tmp_path: Path) -> None:
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    ruff = [sys.executable, "-m", "ruff"]
    rules = ["--isolated", "--no-cache", "--line-length", "120"]
    check = subprocess.run(
        [*ruff, "check", *rules, "--select", "E,F,W,I,UP,B", "--ignore", "E501", str(tmp_path)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert check.stdout.strip() == "All checks passed!"
    formatted = subprocess.run([*ruff, "format", *rules, "--check", str(tmp_path)], capture_output=True, text=True)
    assert formatted.stdout.strip() == f"{len(texts)} files already formatted"


def test_text_depends_on_nothing_but_the_layout(tmp_path: Path) -> None:
    code = (
        "import sys, hashlib; from kvgen.resolve import load; from kvgen.emit import render_layout;"
        "print(hashlib.sha256(render_layout(load(sys.argv[1])).encode()).hexdigest())"
    )
    copy = tmp_path / "elsewhere" / "other.yaml"
    copy.parent.mkdir()
    copy.write_bytes((ROOT / "layouts" / "paged_x_vector.yaml").read_bytes())
    digests = set()
    for seed, path in (("0", ROOT / "layouts" / "paged_x_vector.yaml"), ("1", copy), ("77", copy)):
        found = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            env=os.environ | {"PYTHONHASHSEED": seed}, cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        digests.add(found.stdout)
    assert len(digests) == 1


def test_no_shipped_name_occurs_in_kvgen_or_its_templates() -> None:
    sources = [*(ROOT / "kvgen").rglob("*.py"), *(ROOT / "templates").rglob("*.j2")]
    sources.remove(ROOT / "kvgen" / "catalog.py")  # its examples name layouts as their users do
    names = re.compile(r"\b(" + "|".join(path.stem for path in ALL) + r")\b")
    # `mla` is a word of the field and may stand in prose; no other shipped name is one. The examples of what commands
    # find name layouts that ship.
    found = {
        (str(path.relative_to(ROOT)), match)
        for path in sources
        for match in names.findall(path.read_text())
        if match != "mla" and path.name != "codes.py"
    }
    assert found == set()


def renamed(text: str) -> str:
    """The same layout under other names and with other extents that are tiled alike."""
    text = re.sub(r"^name: (\w+)", r"name: z_\1", text, flags=re.M)
    text = re.sub(r"^summary: .*", "summary: Something else.", text, flags=re.M)
    text = re.sub(r"\bhead: 8\b", "head: 16", text)
    alone = re.search(r"\bhead: \d", text) is None  # half a row without heads may be less than a sector
    text = re.sub(r"\bdim: 128\b", "dim: 256" if alone else "dim: 64", text)
    text = re.sub(r"^block_size: (16|32|64)$", "block_size: 96", text, flags=re.M)
    text = text.replace("rotary_dim: 128", "rotary_dim: 64").replace("mrope: [24, 20, 20]", "mrope: [12, 10, 10]")
    head, tail = text.split("buffers:")
    buffers, fuse, stages = re.match(r"(?s)(.*?)(\n(?:fuse|schedule):|\Z)(.*)", tail).groups()
    return head + "buffers:" + re.sub(r"^  (\w+):( +\{|$)", r"  z_\1:\2", buffers, flags=re.M) + fuse + stages


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_other_names_and_extents_change_names_and_numbers_only(texts: dict[str, str], path: Path) -> None:
    other = renamed(path.read_text())
    assert other != path.read_text()
    mine, theirs = (skeleton(text) for text in (texts[f"{path.stem}.py"], render_layout(load_text(other))))
    assert list(difflib.unified_diff(mine, theirs, lineterm="", n=0)) == []


def skeleton(text: str) -> list[str]:
    """The tokens of the code alone: docstrings, comments, numbers and the replaced names gone."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.Module) and ast.get_docstring(node):
            node.body = node.body[1:]
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "LAYOUT":
            node.value = ast.Constant(None)
    plain = re.sub(r"\bkvgen_\w+_[0-9a-f]{8}\b", "operators", ast.unparse(tree))  # a namespace with a digest
    plain = re.sub(r"\b[zZ]_", "", plain)
    plain = re.sub(r"(_mod)\d+\b", r"\1N", plain)  # the stride of a digit of raw codes
    # Whether strides are counted in units depends on what divides them.
    plain = re.sub(r"(?s)\ndef _stride_unit\(.*?\n\n", "\n", plain)
    plain = re.sub(r"(?m)^ *stride_unit = .*\n|, (STRIDE_UNIT: tl\.constexpr|stride_unit)\b", "", plain)
    plain = re.sub(r" (//|\*) (stride_unit|STRIDE_UNIT)\b", "", plain)
    plain = re.sub(r"(num_warps=\d+) if num_tokens <= \d+ else \d+", r"\1", plain)  # as many as values ask for
    return re.sub(r"\b\d+\b", "N", plain).splitlines()


def test_committed_modules_are_what_the_layouts_give(texts: dict[str, str]) -> None:
    committed = {path.name: path.read_text() for path in (ROOT / "generated").glob("*.py")}
    assert committed.keys() == texts.keys()
    assert [name for name in texts if committed[name] != texts[name]] == []


ENCODED = """
name: encoded
axes: {head: 2, dim: 64, layer: dynamic}
block_size: 16
streams:
  key: {quant: {mode: nvfp4}}
  value: {quant: {mode: int8, round: away, scale: {per: head, source: static, given: inverse, arithmetic: multiply}}}
  extra:
    dim: 32
    head: none
    quant: {mode: int4_asymmetric, zero: {kind: point}, scale: {per: token, dtype: float32, floor: {amax: 0.5}}}
  short: {dtype: float32, store: float16}
buffers:
  cache:
    order: block layer slot
    fields:
      [{key: head dim}, {key.scale: head dim//16}, {value: head dim},
       {short: head dim}, extra, extra.scale, extra.zero]
slots: {dtype: int32, skip: 0, remap: window, shard: {world: 4, interleave: 2}}
"""


SUMMARIES = (
    'x"""; raise SystemExit; """',
    'quotes: """""" """" ""',
    '"',
    "ends in a backslash\\",
    'C:\\users\\new \\d \\N{BULLET} \\"""',
    "LaTeX \\alpha",
    "ends in spaces  ",
    "Å → 語 {{ m }} {# m #} # {0} %s",
)


@pytest.mark.parametrize("summary", SUMMARIES)
def test_a_summary_is_text_whatever_it_says(summary: str) -> None:
    documents = [replace(load(path), summary=summary) for path in (SHIPPED[0], TRANSFERS[0])]
    for what, text in zip(documents, render_all(documents).values(), strict=True):
        tree = ast.parse(text)
        assert ast.get_docstring(tree, clean=False).startswith(f"{what.name}: {summary}\n\nGenerated by kvgen")
        assert summary in [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]  # in its facts


def test_a_module_says_what_its_layout_is() -> None:
    facts = describe(load_text(ENCODED))
    assert facts["num_layers"] is None
    assert facts["slots"] == {"dtype": "int32", "skip": 0, "remap": "window", "shard": {"world": 4, "interleave": 2}}
    encodings = {name: stream["encoding"] for name, stream in facts["streams"].items()}
    outer = {"per": [], "argument": "key_scale_scale", "dtype": "float32"}
    assert encodings["key"] == {
        "mode": "nvfp4",
        "code": "e2m1",
        "scale": {
            "per": ["token", "head", "dim//16"],
            "source": "dynamic",
            "stored": "key.scale",
            "dtype": "float8_e4m3fn",
            "grid": "any",
            "range": 6.0,
            "encode": "stored",
            "arithmetic": "divide",
            "scale": outer,
        },
    }
    assert encodings["value"] == {
        "mode": "int8",
        "code": "int8",
        "round": "away",
        "clamp": [-127, 127],
        "scale": {
            "per": ["head"],
            "source": "static",
            "argument": "value_scale",
            "dtype": "float32",
            "given": "inverse",
            "arithmetic": "multiply",
        },
    }
    assert encodings["extra"]["zero"] == {"kind": "point", "dtype": "uint8", "stored": "extra.zero"}
    assert encodings["extra"]["scale"]["floor"] == {"amax": 0.5}
    assert encodings["short"] == {"mode": "cast", "code": "float16"}
    assert ast.literal_eval(repr(facts)) == facts
    plain = describe(load(ROOT / "layouts" / "contiguous_nhd.yaml"))
    assert plain["contiguous"]
    assert plain["streams"]["key"]["encoding"] is None


def test_pieces_of_what_is_computed_are_pieces_of_integers() -> None:
    """ptxas 12.8 stores the lowest piece of a float as its value, unless an operation on integers comes between."""
    axes = "axes: {head: 2, dim: 46}\nblock_size: 6\n"
    buffers = "buffers: {cache: {order: block slot head, fields: [{pad: 1}, %s]}}"
    scaled = "streams: {key: {quant: {mode: int8, scale: {per: token head, source: dynamic}}}}\n"
    text = render_layout(load_text(f"name: odd_scales\n{axes}{scaled}{buffers % 'key, key.scale'}"))
    kernels = "".join(part for part in text.split("\n@triton.jit") if "_kernel(" in part[:200])
    stores = re.findall(r"bits = scale\.to\(tl\.uint32, bitcast=True\)\n( +bits = .*)?", kernels)
    assert stores
    assert all("bits = bits ^ tl.program_id(2).to(tl.uint32)" in line for line in stores)
    moved = render_layout(load_text(f"name: odd_rows\n{axes}streams: {{key: {{}}}}\n{buffers % 'key'}"))
    assert "bits = key.to(tl.uint16, bitcast=True)" in moved
    assert "program_id(2)" not in moved


def test_a_nan_of_all_bits_keeps_them_at_odd_addresses() -> None:
    head = "name: odd_nans\naxes: {head: 1, dim: 4}\nblock_size: 2\n"
    streams = "streams: {key: {dtype: [float32, float16], store: float32}}\n"
    buffers = "buffers: {cache: {order: block slot head, fields: [{pad: 1}, key]}}\n"
    module = module_of(load_text(head + streams + buffers))
    rows = torch.tensor([-1, -2, 0x7FFFFFFF, 0x3F800001], dtype=torch.int32).view(torch.float32)
    cache = module.allocate(1)
    module.append(rows.view(1, 1, 4), cache, torch.tensor([1]))
    assert cache[0, 1, 0, 1:].clone().view(torch.int32).tolist() == rows.view(torch.int32).tolist()


@pytest.mark.parametrize(
    ("slots", "waits"),
    [
        ("", False),
        ("slots: {skip: 0}", False),
        ("slots: {remap: window}", False),
        ("slots: {shard: {world: 2, interleave: 1}}", True),
    ],
)
@pytest.mark.parametrize("dim", [128, 8])
def test_rows_are_read_before_the_slot_is_known(slots: str, waits: bool, dim: int) -> None:
    """Not where most tokens of a prompt are skipped. Few dims: several tokens a program."""
    axes = f"name: x\naxes: {{head: 8, dim: {dim}}}\nblock_size: 16\n"
    text = render_layout(
        load_text(f"{axes}buffers: {{cache: {{holds: [key, value], order: block kv slot head dim}}}}\n{slots}")
    )
    kernel = text[text.index("def _append_kernel(") :]
    before, load = kernel.split("    key = tl.load(", 1)
    load = load[: load.index("    value = tl.load(")]
    assert ("    if not valid:\n        return\n" in before or "mask=valid" in load) == waits
    assert ("slot_number >= 0" in before) == (waits or dim == 8)
    assert ("in_range[" in load) == (dim == 8 and not waits)


@pytest.mark.parametrize(
    ("name", "function", "first"),
    [
        ("nhd_nvfp4", "gather", ["key", "key_scale", "key_scale_scale", "value", "value_scale", "value_scale_scale"]),
        ("nhd_bf16k_turbo4v", "gather", ["key", "value", "value_scale"]),
        ("nhd_int8_block", "append", ["key", "value", "key_scale", "value_scale"]),
        ("nhd_fp8_tensor", "append", ["key", "key_scale", "value", "value_scale"]),
    ],
)
def test_all_is_read_before_anything_is_written(texts, name: str, function: str, first: list[str]) -> None:
    """What depends on the slot last in an append: nothing waits behind it."""
    text = texts[f"{name}.py"]
    kernel = text[text.index(f"def _{function}_kernel(") :]
    before = kernel[: kernel.index("    tl.store(")]
    assert [x for x in re.findall(r"(\w+) = tl\.load\(", before) if x != "slot_number"] == first
