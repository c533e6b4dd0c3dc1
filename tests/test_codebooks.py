"""Codes and centroids as NVIDIA's processors find them, in tables that the threads of a warp have together.

The line that codes are guessed by rises, and so do its rounded values: it is right everywhere if it is right at the
bounds and just before them. The interpreter has no threads: a table is a tensor there, and the rest is as printed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kvgen import runtime
from kvgen.emit import render_layout
from kvgen.emit.codebook import eights, line
from kvgen.quant.turbo import CODEBOOKS, Codebook, decode, encode
from tests.quantised import INF, NAN, encoding_of
from tests.test_quant_narrow import layout_of

IN_TABLES = {
    'tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r,r", [0], tl.int32, True, 1)': "tl.arange(0, 32)",
    'tl.inline_asm_elementwise(shuffle, "=f,f,r", [each, lane], tl.float32, False, 1)': (
        "tl.gather(each, tl.reshape(lane & 31, [lane.numel]), 0)"
    ),
    # Triton 3.6's interpreter keeps NaN, processors do not.
    "tl.minimum(tl.maximum(x, 0.0), 1.0)": "tl.minimum(tl.where(x > 0.0, x, 0.0), 1.0)",
}

PROBE = """

@triton.jit
def probe(x_ptr, code_ptr, value_ptr, COUNT: tl.constexpr):
    each = tl.arange(0, COUNT)
    code = _{name}_codes(tl.load(x_ptr + each), _{name}_table(True), True)
    tl.store(code_ptr + each, code)
    tl.store(value_ptr + each, _{name}_values(code + each * {count}, True))


@triton.jit
def probe_squares(code_ptr, square_ptr, GROUPS: tl.constexpr):
    codes = tl.load(code_ptr + tl.arange(0, 16 * GROUPS))
    words = _eights(codes, GROUPS, {eights})
    tl.store(square_ptr + tl.arange(0, GROUPS), _{name}_squares(words, False))
"""
ABOVE = 0x4B000000  # 2**23: codes are what a sum with it ends in


@cache
def probed(book: Codebook) -> ModuleType:
    text = render_layout(layout_of(f"{{mode: {book.name}}}", 16, 16))
    for asm, table in IN_TABLES.items():
        assert text.count(asm) == 1
        text = text.replace(asm, table)
    text += PROBE.format(name=book.name, count=1 << book.bits, eights=eights(book.name))
    return runtime.import_module(f"probed_{book.name}", text)


def found(book: Codebook, x: Tensor) -> tuple[Tensor, Tensor]:
    """What ends in the codes of values, and the centroids of numbers that end in these codes."""
    count = 1 << (len(x) - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, count - len(x)))
    code, value = torch.zeros(count, dtype=torch.int32), torch.zeros(count)
    probed(book).probe[(1,)](x, code, value, count)
    return code, value


def values_of(book: Codebook) -> Tensor:
    """Numbers next to bounds and to 0 on both sides, all of 16 bits, and what is none."""
    bounds = torch.tensor([*book.all_bounds, *book.values])
    below, above = (torch.nextafter(bounds, torch.tensor(side)) for side in (-INF, INF))
    short = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    short = torch.cat([short.view(dtype).float() for dtype in (torch.bfloat16, torch.float16)])
    random = torch.randn(1 << 15, generator=torch.Generator().manual_seed(book.bits)) * 1.5
    rare = torch.tensor([0.0, -0.0, INF, -INF, NAN, -NAN, 1e-45, -1e-45, 1.2e-38, -1.2e-38])
    return torch.cat([bounds, below, above, rare, short, random])


@pytest.mark.parametrize("book", CODEBOOKS, ids=lambda book: book.name)
def test_tables_of_threads(book: Codebook) -> None:
    x = values_of(book)
    code, value = (each[: len(x)] for each in found(book, x))
    expected = encode(book, encoding_of(book.name), x)
    assert torch.equal(code, expected.int() + ABOVE)
    assert torch.equal(value, decode(book, expected))


@pytest.mark.parametrize("book", CODEBOOKS, ids=lambda book: book.name)
def test_squares_are_counted(book: Codebook) -> None:
    """Of groups of one code each, and of any codes: each in 2**-24, and their sum as a float32."""
    count, groups = 1 << book.bits, 256
    codes = torch.randint(count, (groups, 16), generator=torch.Generator().manual_seed(book.bits), dtype=torch.int32)
    codes[:count] = torch.arange(count, dtype=torch.int32)[:, None]
    found = torch.zeros(groups)
    probed(book).probe_squares[(1,)](codes + ABOVE, found, groups)
    squares = (decode(book, codes).double().square() * 2**24).round().long()
    assert torch.equal(found, squares.sum(1).float())


@pytest.mark.parametrize("book", CODEBOOKS, ids=lambda book: book.name)
def test_a_line_guesses_codes(book: Codebook) -> None:
    """At the bound below a code it is between a half and one and a half less, but for what it is held to."""
    slope, height = line(book)
    bounds = torch.tensor(book.all_bounds).double()
    guess = (bounds * slope + 0.5).clamp(0, 1) * height
    less = torch.arange(1, 1 << book.bits) - guess
    assert less.min() > 0.51
    assert less.max() < 1.49
    assert height == len(bounds) - 1


def test_no_line_through_bounds_far_apart() -> None:
    book = replace(CODEBOOKS[1], bounds=(0.1, 0.9, 1.0))
    with pytest.raises(ValueError, match=re.escape("no line through the bounds of turbo3")):
        line(book)
