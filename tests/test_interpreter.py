"""What the harness mends of Triton's interpreter: only while cases run, and only on the CPU."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import triton.language as tl

from kvgen.harness.interpreter import described_once, exact_widening, patched_once


def test_the_interpreter_widens_exactly_while_cases_run() -> None:
    """Triton's own conversion loses bits of subnormals; it is back in place afterwards."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    original = interpreter._convert_float
    values = torch.arange(0x7F80, dtype=torch.int16)

    def widened() -> torch.Tensor:
        data = interpreter._convert_float(values.numpy().view("uint16"), tl.bfloat16, tl.float32, None)
        return torch.from_numpy(data.view("float32"))

    with exact_widening("cpu"):
        assert torch.equal(widened(), values.view(torch.bfloat16).float())
    assert interpreter._convert_float is original
    with exact_widening("cuda"):
        assert interpreter._convert_float is original


def test_the_interpreter_patches_the_language_once_a_launch() -> None:
    """A call of a device function finds it patched; what a launch takes back is patched by the next one."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    original, load = interpreter._patch_lang, tl.load

    def changes(function) -> int:
        scopes.append(interpreter._patch_lang(function))
        return len(scopes[-1]._changes)

    kernel = type("Kernel", (), {"__globals__": {"tl": tl}})
    for _ in range(2):
        scopes: list = []
        with patched_once("cpu"):
            assert changes(kernel) > 100
            assert tl.load is not load
            assert changes(kernel) == 0
        for scope in reversed(scopes):
            scope.restore()
        assert tl.load is load
    with patched_once("cuda"):
        assert interpreter._patch_lang is original
    assert interpreter._patch_lang is original


def test_the_interpreter_describes_each_type_once() -> None:
    """As Triton itself does, of whatever the elements are; its own functions are in place again afterwards."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    kept = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
    pointers = [tl.pointer_type(tl.float32, space, const) for space, const in ((1, False), (3, False), (1, True))]
    elements = [tl.int1, tl.uint8, tl.int64, tl.bfloat16, tl.float32, tl.float8e4nv, *pointers]
    shapes = ([4], [8, 1, 2], [tl.constexpr(16)], [4])

    def described() -> list[dict]:
        found = []
        for element in elements:
            kinds = [element, *(tl.block_type(element, shape) for shape in shapes)]
            for handle, kind in enumerate(kinds):
                tensor = vars(tl.tensor(handle, kind))
                found += [vars(kind), tensor, {"numpy": interpreter._get_np_dtype(kind)}]
                assert kind.scalar is element
                assert tensor["type"] is kind
                assert tensor["dtype"] is element
        return [{key: (type(value), str(value)) for key, value in each.items()} for each in found]

    wanted = described()
    names = {element.name for element in elements}
    with (
        described_once("cpu"),
        patch.object(tl.core, "validate_block_shape", wraps=tl.core.validate_block_shape) as checks,
    ):
        assert described() == wanted
        assert described() == wanted
        assert checks.call_count == len(names) * (len(shapes) - 1)
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.int32, [3])
    with described_once("cuda"):
        assert (tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype) == kept
    assert (tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype) == kept
