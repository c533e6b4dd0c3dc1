"""What nothing uses is not printed: the text of a module without the definitions that its functions do not reach."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

# The templates put two empty lines between definitions, and nothing in the first column after two others.
_BETWEEN = re.compile(r"(?<=\n)(?=\n\n\S)")


@dataclass(frozen=True, slots=True)
class _Statement:
    """A statement of a module: its text with the comments above, what it defines, and what it takes from the module."""

    text: str
    bound: frozenset[str]
    used: frozenset[str]


def pruned(text: str) -> str:
    """The text of a module without what nothing in its ``__all__`` needs, and without the comments above that.

    Public names in capitals stay: they are facts of the layout, for whoever imports the module.
    """
    statements = [statement for part in _BETWEEN.split(text) for statement in _statements(part)]
    where = {name: i for i, statement in enumerate(statements) for name in statement.bound}
    needed = [i for i, s in enumerate(statements) if not s.bound or any(_stays(name) for name in s.bound)]
    needed += [where[name] for name in _exports(statements)]
    kept: set[int] = set()
    while needed:
        i = needed.pop()
        if i not in kept:
            kept.add(i)
            needed += [where[name] for name in statements[i].used if name in where]
    return "".join(statement.text for i, statement in enumerate(statements) if i in kept)


# Most of what the templates print is the same in every module.
@lru_cache(maxsize=2048)
def _statements(text: str) -> tuple[_Statement, ...]:
    lines, start, found = text.splitlines(keepends=True), 0, []
    for node in ast.parse(text).body:
        found.append(
            _Statement("".join(lines[start : node.end_lineno]), frozenset(_bound(node)), frozenset(_used(node)))
        )
        start = node.end_lineno
    return tuple(found)


def _stays(name: str) -> bool:
    return name == "__all__" or (name.isupper() and not name.startswith("_"))


def _exports(statements: list[_Statement]) -> list[str]:
    text = next(statement.text for statement in statements if "__all__" in statement.bound)
    return ast.literal_eval(text.partition("__all__ =")[2].strip())


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _used(statement: ast.AST) -> set[str]:
    """The names that a statement takes from the module: what it reads, but for a function's own variables."""
    if isinstance(statement, ast.ClassDef):
        return set().union(*map(_used, ast.iter_child_nodes(statement)))
    nodes = list(ast.walk(statement))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if isinstance(statement, ast.FunctionDef):
        own = {node.arg for node in nodes if isinstance(node, ast.arg)}
        own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        head = (*statement.decorator_list, statement.args)  # evaluated in the module
        return (read - own).union(*map(_used, head))
    return read
