"""Triton's interpreter on the CPU, mended: a conversion is exact, and what it repeats without need is done once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def mended(device: str) -> Iterator[None]:
    """What cases run in: all of the following."""
    with ExitStack() as stack:
        for context in (exact_widening, patched_once, described_once, reduced_at_once, without_warnings):
            stack.enter_context(context(device))
        yield


@contextmanager
def exact_widening(device: str) -> Iterator[None]:
    """While this lasts, bfloat16 values become float32 ones exactly; no GPU and no compiled kernel is touched.

    The interpreter loses bits of bfloat16 subnormals (Triton 3.6 to 3.9). It is left alone where it is right, or made
    so that this does not mend it.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if device != "cpu" or interpreter is None or not _loses_bits(interpreter):
        yield
        return
    import numpy as np
    import triton.language as tl

    original = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, *rest: Any) -> Any:
        if source == tl.bfloat16 and target == tl.float32:
            return (values.view(np.uint16).astype(np.uint32) << 16).reshape(values.shape)
        return original(values, source, target, *rest)

    with patch.object(interpreter, "_convert_float", convert):
        yield


@contextmanager
def patched_once(device: str) -> Iterator[None]:
    """While this lasts, a launch puts the interpreter's functions into Triton's language once.

    The interpreter does it again for every device function that a program calls, where it finds nothing left to do
    (Triton 3.6 to 3.9): a quarter of the time of all cases.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if device != "cpu" or not {"_patch_lang", "_LangPatchScope"} <= vars(interpreter or object).keys():
        yield
        return
    import triton.language as tl

    original = interpreter._patch_lang

    def patch_language(function: Any) -> Any:
        modules = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if modules and not any(tl.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return original(function)

    with patch.object(interpreter, "_patch_lang", patch_language):
        yield


@contextmanager
def described_once(device: str) -> Iterator[None]:
    """While this lasts, what types and tensors say of themselves is computed once for every element type and shape.

    The interpreter computes shapes, names and NumPy's types anew with every operation (Triton 3.6 to 3.9): two fifths
    of the time of all cases.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if device != "cpu" or not _describes(interpreter):
        yield
        return
    import triton.language as tl

    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    numpy_type = interpreter._get_np_dtype
    types: dict[Any, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    known: dict[str, Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key], element_ty=element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, None, type)
            tensors[type.name] = dict(vars(self))
        vars(self).update(tensors[type.name], handle=handle, type=type, dtype=type.scalar)

    def dtype_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = numpy_type(kind)
        return known[name]

    with (
        patch.object(tl.block_type, "__init__", block_type),
        patch.object(tl.tensor, "__init__", tensor),
        patch.object(interpreter, "_get_np_dtype", dtype_of),
    ):
        yield


@contextmanager
def reduced_at_once(device: str) -> Iterator[None]:
    """While this lasts, a reduction combines whole slices of a block, in the order of the interpreter.

    But for sums and extrema it combines value by value (Triton 3.6 to 3.9): nine tenths of the time of rotated codes.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if device != "cpu" or not hasattr(getattr(interpreter, "ReduceOps", None), "generic_reduce"):
        yield
        return
    import numpy as np

    original = interpreter.ReduceOps.generic_reduce

    def reduce(self: Any, values: Any) -> Any:
        if self.axis is None or len(values[0].shape) < 2:
            return original(self, values)
        kinds, length = [value.dtype for value in values], int(values[0].shape[self.axis])
        data = [value.handle.data for value in values]

        def tensors(parts: Any) -> list[Any]:
            return [self.to_tensor(part, kind) for part, kind in zip(parts, kinds, strict=True)]

        total = tensors(part.take(0, self.axis) for part in data)
        for i in range(1, length):
            found = self.combine_fn.fn(*total, *tensors(part.take(i, self.axis) for part in data))
            total = tensors(x.handle.data for x in (found if isinstance(found, tuple) else (found,)))
        if not self.keep_dims:
            return total
        return tensors(np.expand_dims(x.handle.data, self.axis) for x in total)

    with patch.object(interpreter.ReduceOps, "generic_reduce", reduce):
        yield


@contextmanager
def without_warnings(device: str) -> Iterator[None]:
    """While this lasts, the interpreter's arithmetic is silent about NaN and infinities: they are fed on purpose."""
    if device != "cpu":
        yield
        return
    import numpy as np

    with np.errstate(all="ignore"):
        yield


def _describes(interpreter: Any) -> bool:
    """Whether types and tensors are made as they are known to be."""
    if not hasattr(interpreter, "_get_np_dtype"):
        return False
    import triton.language as tl

    made = [list(inspect.signature(kind.__init__).parameters) for kind in (tl.block_type, tl.tensor)]
    return made == [["self", "element_ty", "shape"], ["self", "handle", "type"]]


def _loses_bits(interpreter: Any) -> bool:
    """Whether the conversion is the one that is known, and wrong for subnormals."""
    import numpy as np
    import triton.language as tl

    words = np.arange(1, 0x80, dtype=np.uint16)
    try:
        found = interpreter._convert_float(words, tl.bfloat16, tl.float32, None).view(np.uint32)
    except (AttributeError, TypeError, ValueError):
        return False
    return not np.array_equal(found, words.astype(np.uint32) << 16)
