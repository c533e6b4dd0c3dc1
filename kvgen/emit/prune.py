"""What nothing uses is not printed: the text of a module without the definitions that its functions do not reach."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def pruned(text: str) -> str:
    """The text of a module without what nothing in its ``__all__`` needs, and without the comments above that.

    Public names in capitals stay: they are facts of the layout, for whoever imports the module.
    """
    statements = ast.parse(text).body
    bound = [set(_bound(statement)) for statement in statements]
    where = {name: i for i, names in enumerate(bound) for name in names}
    needed = [i for i, names in enumerate(bound) if not names or any(_stays(n) for n in names)]
    needed += [where[name] for name in _exports(statements)]
    kept: set[int] = set()
    while needed:
        i = needed.pop()
        if i not in kept:
            kept.add(i)
            needed += [where[name] for name in _used(statements[i]) if name in where]
    lines, start, parts = text.splitlines(keepends=True), 0, []
    for i, statement in enumerate(statements):
        if i in kept:
            parts += lines[start : statement.end_lineno]
        start = statement.end_lineno
    return "".join(parts)


def _stays(name: str) -> bool:
    return name == "__all__" or (name.isupper() and not name.startswith("_"))


def _exports(statements: list[ast.stmt]) -> list[str]:
    return next(ast.literal_eval(s.value) for s in statements if isinstance(s, ast.Assign) and "__all__" in _bound(s))


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
