"""The reference and the harness judge generated text, so they must use nothing that makes it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = ("kvgen.emit", "kvgen.schedule", "kvgen.lower", "generated")
FOLDERS = ("harness", "quant")
JUDGES = ["kvgen.reference", "kvgen.reference_pages", "kvgen.reference_transfer", "kvgen.views"]
JUDGES += [f"kvgen.{folder}.{p.stem}" for folder in FOLDERS for p in sorted((ROOT / "kvgen" / folder).glob("*.py"))]


def source_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((c for c in candidates if c.exists()), None)


def imports_of(path: Path) -> set[str]:
    """Every module a file may import, inside functions and under conditions too, and what it takes from packages."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def reached(module: str) -> set[str]:
    """Everything a module imports, directly or through other modules of this repository."""
    seen: set[str] = set()
    pending = [module]
    while pending:
        name = pending.pop()
        path = source_of(name)
        if name in seen or path is None:
            seen.add(name)
            continue
        seen.add(name)
        parents = [".".join(name.split(".")[:i]) for i in range(1, name.count(".") + 1)]
        pending += [*imports_of(path), *parents]
    return seen


def is_forbidden(name: str) -> bool:
    return any(name == f or name.startswith(f + ".") for f in FORBIDDEN)


@pytest.mark.parametrize("module", JUDGES)
def test_uses_nothing_of_the_generator(module: str) -> None:
    assert source_of(module) is not None
    assert sorted(filter(is_forbidden, reached(module))) == []


def test_reference_never_looks_up_text() -> None:
    """No import by name and no evaluation, through which generated text could come in unseen."""
    for module in JUDGES:
        tree = ast.parse(source_of(module).read_text(encoding="utf-8"))
        called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "id")}
        assert not called & {"exec", "eval", "__import__"}, module
        assert "importlib" not in reached(module), module


def test_the_walk_finds_what_is_there() -> None:
    assert "kvgen.emit.kernel" in reached("kvgen.emit")
    assert any(is_forbidden(name) for name in reached("kvgen.cli.test"))
