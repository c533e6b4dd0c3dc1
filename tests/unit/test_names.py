"""Names of layouts, and that none they may give is one that generated modules use themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgen.documents import load
from kvgen.names import argument_objection, module_objection, objection

ROOT = Path(__file__).parents[2]
LAYOUTS = sorted((ROOT / "layouts").glob("*.yaml"))
TRANSFERS = sorted((ROOT / "layouts" / "transfers").glob("*.yaml"))


def is_device_function(node: ast.stmt) -> bool:
    """Whether it is what kernels call: nothing in it is called as a layout says."""
    called = isinstance(node, ast.FunctionDef) and not node.name.endswith("_kernel")
    return called and any(isinstance(d, ast.Attribute) and d.attr == "jit" for d in node.decorator_list)


def identifiers(text: str) -> Iterator[str]:
    module = ast.parse(text)
    module.body = [node for node in module.body if not is_device_function(node)]
    for node in ast.walk(module):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef):
            yield node.name


def generated(path: Path) -> str:
    return (ROOT / "generated" / f"{path.stem}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", LAYOUTS, ids=lambda path: path.stem)
def test_no_name_of_a_generated_module_is_free(path: Path):
    layout = load(path)
    own = [item.name for item in (*layout.streams, *layout.buffers)]
    own += [layout.slots.remap] if layout.slots.remap else []
    scales = [scale for stream in layout.streams for scale in (stream.scale, stream.scale and stream.scale.scale)]
    own += [scale.argument for scale in scales if scale]
    own += [s.encoding.zero.name.replace(".", "_") for s in layout.streams if s.encoding and s.encoding.zero]
    used = set(identifiers(generated(path))) - set(own)
    assert {name for name in used if argument_objection(name, own) is None} == set()


@pytest.mark.parametrize("path", TRANSFERS, ids=lambda path: path.stem)
def test_no_name_in_a_kernel_of_a_transfer_is_free(path: Path):
    """What begins with ``src_`` or ``dst_`` is no stream's name, and no other name of a layout occurs there."""
    own = [stream.name for stream in load(path).source.streams]
    body = ast.parse(generated(path)).body
    kernels = [node for node in body if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")]
    names = identifiers(ast.unparse(ast.Module(kernels, [])))
    used = {name for name in names if not name.startswith(("src_", "dst_"))} - set(own)
    assert {name for name in used if argument_objection(name, own) is None} == set()


@pytest.mark.parametrize("name", ["key", "K", "kv", "k_cache", "Keys", "x1", "a" * 64, "inner", "keys_out", "values"])
def test_names_that_are_free(name: str):
    assert objection(name) is None
    assert argument_objection(name, ["value", "pool"]) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "is no identifier"),
        ("_key", "is no identifier"),
        ("1key", "is no identifier"),
        ("key-cache", "is no identifier"),
        ("clé", "is no identifier"),
        ("a" * 65, "is longer than 64"),
        ("lambda", "is a keyword"),
        ("match", "is a keyword"),
        ("len", "is a name of Python's own"),
        ("true", "is a word of YAML"),
        ("torch", "is the name of a module"),
    ],
)
def test_names_no_part_of_a_layout_can_have(name: str, why: str):
    assert objection(name).startswith(why)


@pytest.mark.parametrize("name", ["functools", "re", "struct", "json", "token"])
def test_no_module_hides_one_of_pythons(name: str):
    assert module_objection(name).startswith("is the name of a module of Python's own")
    assert module_objection(f"{name}_cache") is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("slot", "is the name of an axis"),
        ("holds", "is a key of places"),
        ("gather", "is the name of a generated function"),
        ("out", "is used in generated modules for something else"),
        ("TOKENS", "is used in generated modules for something else"),
        ("x_ptr", "is used in generated modules for something else"),
        ("value", "is given twice"),
        ("Value", "differs from `value` in case only"),
        ("value_out", "is used in generated modules for something of `value`"),
        ("value_stride_head", "is used in generated modules for something of `value`"),
        ("append_value", "is used in generated modules for something of `value`"),
    ],
)
def test_names_no_argument_can_have(name: str, why: str):
    assert argument_objection(name, ["value", "pool"]) == why
