"""What the harness mends of Triton's interpreter: only while cases run, and only on the CPU."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl

from kvgen.harness.interpreter import described_once, exact_widening, patched_once, reduced_at_once


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


@triton.jit
def _minus_half(a, b):
    return a - b * 0.5


@triton.jit
def _earlier(a, i, b, j):
    return tl.where(a < b, a, b), tl.where(a < b, i, j)


@triton.jit
def _reduce(x_ptr, out_ptr, at_ptr, bits_ptr, AXIS: tl.constexpr):
    first, second, third = (
        tl.arange(0, 4)[:, None, None],
        tl.arange(0, 2)[None, :, None],
        tl.arange(0, 8)[None, None, :],
    )
    index = first * 16 + second * 8 + third
    x = tl.load(x_ptr + index)
    ones = tl.full((4, 2, 8), 0, tl.int32)
    tl.store(out_ptr + index, tl.reduce(x, AXIS, _minus_half, keep_dims=True) + ones)
    _least, at = tl.reduce((x, index), AXIS, _earlier)
    tl.store(at_ptr + index, tl.expand_dims(at, AXIS) + ones)
    tl.store(bits_ptr + index, tl.xor_sum(x.to(tl.int32, bitcast=True), AXIS, keep_dims=True) ^ ones)


def test_reductions_combine_in_the_order_of_the_interpreter() -> None:
    """Of one tensor and of several, along any axis, with the axis kept and without; far fewer calls do it."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    for axis in range(3):
        found, calls = [], []
        for context in (reduced_at_once("cuda"), reduced_at_once("cpu")):
            out = [torch.zeros(64), torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)]
            with context, patch.object(_minus_half, "fn", wraps=_minus_half.fn) as combine:
                _reduce[(1,)](x, *out, AXIS=axis)
            found.append(out)
            calls.append(combine.call_count)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        length = (4, 2, 8)[axis]
        assert calls == [64 // length * (length - 1), length - 1]
