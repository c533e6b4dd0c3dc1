"""Somebody's own function in the place of a generated one, so that the harness can be run on it.

A target is written ``[FUNCTION=]MODULE:NAME[(ARGUMENTS)]``: the function that it stands in for (``append``), where it
is, and in Python's notation how it is called, with the generated function's arguments by their names:
``mine:write(key, value, cache=kv_cache, slots=slot_mapping, kind="auto")``.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from kvgen.diagnostics import Diagnostic, KvgenError

TARGET = re.compile(r"(?:(?P<function>\w+)=)?(?P<module>[^:()=]+):(?P<name>[\w.]+)(?P<call>\(.*\))?", re.S)


@dataclass(frozen=True, slots=True)
class Name:
    """An argument of the generated function, handed on."""

    name: str


@dataclass(frozen=True, slots=True)
class Target:
    """A function under test.

    ``arguments`` and ``keywords`` hold names and constants; where they are None and empty, it is called as the
    generated function is.
    """

    text: str
    function: str
    module: str
    name: str
    arguments: tuple[Any, ...] | None = None
    keywords: tuple[tuple[str, Any], ...] = ()

    @property
    def names(self) -> set[str]:
        """The arguments of the generated function that are handed on."""
        values = (*(self.arguments or ()), *(value for _, value in self.keywords))
        return {value.name for value in values if isinstance(value, Name)}


def parse(text: str) -> Target:
    """A target's parts; KvgenError with KV715 for anything else."""
    found = TARGET.fullmatch(text.strip())
    if found is None:
        raise _error(
            f"{text!r} is no function", "write [FUNCTION=]MODULE:NAME, as in mine:append or gather=mine.py:read"
        )
    target = Target(text, found["function"] or "append", found["module"], found["name"])
    if found["call"] is None:
        return target
    try:
        call = ast.parse(f"f{found['call']}", mode="eval").body
        assert isinstance(call, ast.Call)
        arguments = tuple(_value(argument) for argument in call.args)
        keywords = tuple((_keyword(keyword), _value(keyword.value)) for keyword in call.keywords)
    except (SyntaxError, ValueError, AssertionError):
        hint = 'write names and constants, as in mine:write(key, value, cache=kv_cache, kind="auto")'
        raise _error(f"{text!r}: these are no arguments of a call", hint) from None
    return Target(text, target.function, target.module, target.name, arguments, keywords)


def _keyword(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise ValueError("** stands for no argument")
    return keyword.arg


def _value(node: ast.expr) -> Any:
    return Name(node.id) if isinstance(node, ast.Name) else ast.literal_eval(node)


def stand_in(targets: Sequence[Target], generated: ModuleType) -> SimpleNamespace:
    """What the harness takes for a module: the functions under test under the names of the generated ones.

    KvgenError with KV715 where one cannot be imported, stands in for nothing, or is handed what there is not.
    """
    functions = {}
    for target in targets:
        model = getattr(generated, target.function, None)
        if target.function not in generated.__all__ or not callable(model):
            there = ", ".join(name for name in generated.__all__ if callable(getattr(generated, name)))
            raise _error(
                f"{target.text}: {generated.LAYOUT['name']} has no function {target.function}", f"it has {there}"
            )
        functions[target.function] = _adapted(target, _load(target), inspect.signature(model))
    return SimpleNamespace(**functions)


def _adapted(target: Target, own: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    if target.arguments is None:
        return own
    parameters = signature.parameters
    required = {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
    takes = f"{target.function} takes {', '.join(parameters)}"
    for what, names in (("there is no", target.names - parameters.keys()), ("nothing takes", required - target.names)):
        if names:
            raise _error(f"{target.text}: {what} {', '.join(sorted(names))}", takes)

    def call(*args: Any, **options: Any) -> Any:
        from kvgen.harness import Unsupported

        given = signature.bind(*args, **options).arguments
        if ignored := sorted(given.keys() - target.names):
            raise Unsupported(f"{target.text} takes no {', '.join(ignored)}")
        known = {name: given.get(name, parameter.default) for name, parameter in parameters.items()}
        arguments = [known[x.name] if isinstance(x, Name) else x for x in target.arguments or ()]
        keywords = {key: known[x.name] if isinstance(x, Name) else x for key, x in target.keywords}
        return own(*arguments, **keywords)

    return call


def _load(target: Target) -> Callable[..., Any]:
    """The function itself, from a file (``mine.py``) or a module, looked for in the current folder first."""
    try:
        found: Any = _module(target.module)
        for part in target.name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # importing somebody's code may raise anything
        raise _error(f"{target.text} cannot be imported: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise _error(f"{target.text} is a {type(found).__name__} and no function")
    return found


def _module(name: str) -> Any:
    if not name.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return importlib.import_module(name)
    path = Path(name).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where a Triton kernel looks for its globals
    spec.loader.exec_module(module)
    return module


def _error(message: str, hint: str | None = None) -> KvgenError:
    return KvgenError(Diagnostic("KV715", message, hint=hint))
