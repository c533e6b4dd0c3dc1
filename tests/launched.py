"""What Triton makes of the arguments of real calls, beside what the table of compiled kernels says of them.

``python -m tests.launched NAME…`` calls functions of these modules on tensors without memory, stops where kernels would
be compiled, and prints every argument that is another there. It must not run under the interpreter.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import triton

from kvgen import runtime
from kvgen.bench import ahead
from kvgen.bench.functions import functions_of, scene_of
from kvgen.documents import Document
from kvgen.emit import kernels, render_all
from kvgen.emit.specs import BY_TARGET, KernelSpec
from tests.generated import shipped

TOKENS = 4096
Known = tuple[str, Any]
"""A type and what is known of the value: ``D`` if 16 divides it; of a constant the value itself."""


class Launched(Exception):
    """A kernel by its name, and what is known of its arguments."""

    def __init__(self, kernel: str, arguments: dict[str, Known]) -> None:
        self.kernel, self.arguments = kernel, arguments


def stop(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    binder = self.device_caches[0][-1]
    bound, known, _ = binder(*args, debug=False, **options)
    constants = {name: ("constexpr", value) for name, value in bound.items()}
    given = {name: (kind, of or "") for name, (kind, of) in zip(bound, known, strict=True)}
    raise Launched(self.__name__, {n: constants[n] if g[0] == "constexpr" else g for n, g in given.items()})


def launches(document: Document, text: str) -> Iterator[Launched]:
    """Those of each function, with many tokens."""
    module = runtime.import_module(document.name, text)
    module._on, module._native = (lambda device: contextlib.nullcontext()), (lambda device: True)
    (task,) = scene_of(document, module, ahead.NOWHERE, TOKENS, 1 << 16).tasks(TOKENS, 1)
    for function in functions_of(document, module):
        try:
            function.call(module, task.of(function.name))()
        except Launched as launched:
            yield launched


def said(spec: KernelSpec) -> dict[str, Known]:
    """What the table says, for a target that casts to 8-bit floats itself."""
    found = {name: (kind, "D" if name in spec.divisible else "") for name, kind in spec.signature.items()}
    values = {name: True if value == BY_TARGET else value for name, value in spec.constexprs.items()}
    return found | {name: ("constexpr", value) for name, value in values.items()}


def differences(launched: Launched, specs: list[KernelSpec]) -> list[str]:
    """How a launch departs from the form that is nearest to it."""
    forms = [said(spec) for spec in specs if spec.name == launched.kernel]
    apart = [[n for n, known in launched.arguments.items() if form[n] != known] for form in forms]
    form, names = min(zip(forms, apart, strict=True), key=lambda each: len(each[1]))
    return [f"{launched.kernel} {name}: {launched.arguments[name]}, the table has {form[name]}" for name in names]


if __name__ == "__main__":
    triton.runtime.driver.set_active(ahead._NoDriver(("cuda", 90, 32)))
    triton.JITFunction.run = stop
    for document in map(shipped, sys.argv[1:]):
        text = render_all([document])[f"{document.name}.py"]
        found = [differences(launched, kernels(document)) for launched in launches(document, text)]
        print(f"{document.name}: {len(found)} launches")
        print(*(f"{document.name} {line}\n" for lines in found for line in lines), sep="", end="")
