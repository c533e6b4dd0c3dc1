"""Pairs of e2m1 codes, as processors with casts to e4m3 make them: those of rounded quotients, proved near all ties.

A value times a reciprocal that is rounded misses x / scale by a part in 2**23 at the most. Added to 6 it loses more
than that: where it is a tie it is one again. Elsewhere it is on the right side if it is further from one than what is
lost, which is a part in 2**20 of the smallest tie. So codes are right for scales under which no value comes that near
to a tie without being one; and it is enough to look at values that are next to ties.
"""

import pytest
import torch
from torch import Tensor

from kvgen.quant import e2m1
from tests.quantised import encoding_of

TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
BITS = {torch.bfloat16: 8, torch.float16: 11}


def fma(a: Tensor, b: Tensor, c: Tensor | float) -> Tensor:
    """Of float32, whose products are exact in float64."""
    return (a.double() * b.double() + c).float()


def inverse(divisor: Tensor, missed: int) -> Tensor:
    """1 / divisor, corrected once, of a guess that is so many steps off."""
    guess = ((1 / divisor.double()).float().view(torch.int32) + missed).view(torch.float32)
    return fma(fma(-divisor, guess, 1.0), guess, guess.double())


def pairs(x: Tensor, scale: Tensor, missed: int) -> Tensor:
    """Codes without signs, as kernels make them."""
    size = (x * inverse(scale * 8.0, missed)).abs().nan_to_num(0.0, 1.0).clamp(0.0, 1.0)
    size = torch.minimum(size + 0.75, fma(size, torch.tensor(0.25), 1.15625))
    return size.to(torch.float8_e4m3fn).view(torch.uint8).int() - 0x34


def sizes(quotients: Tensor) -> Tensor:
    """The reference's codes without signs."""
    return e2m1.encode(encoding_of("nvfp4"), quotients) & 7


def beside_ties(scale: Tensor, bits: int) -> Tensor:
    """``[scales, values]`` of so many bits: those next to a tie on either side, and their neighbours."""
    exact = TIES.double() * scale.double()[:, None]
    step = torch.exp2(torch.floor(torch.log2(exact)) - (bits - 1))
    return ((torch.floor(exact / step)[..., None] + torch.arange(-1, 3)) * step[..., None]).flatten(1).float()


def wrong(scale: Tensor, bits: int) -> int:
    x, scale = beside_ties(scale, bits), scale[:, None]
    return sum(int((pairs(x, scale, missed) != sizes(x / scale)).sum()) for missed in (-1, 0, 1))


def apart_from_ties(outer: Tensor, bits: int) -> Tensor:
    """Whether kernels take scales that are counted in these for such."""
    odd = (torch.arange(1, 16, 2)[:, None] * torch.arange(1, 8, 2)).flatten().float()
    product = odd * outer[:, None]
    more = 1 << 24 - bits
    short = (product.view(torch.int32) + more // 2) & -more
    distance = fma(odd, outer[:, None], -short.view(torch.float32).double()).abs()
    return ~((distance > 0) & (distance < product * 1.2e-06)).any(1)


@pytest.mark.parametrize("bits", BITS.values())
def test_scales_of_11_bits_or_less(bits: int) -> None:
    """Those in float16 or e4m3, and powers of two."""
    assert wrong(torch.arange(1, 1 << 11).float(), bits) == 0


@pytest.mark.parametrize("bits", BITS.values())
def test_scales_counted_in_others(bits: int) -> None:
    """Of others that make some come near ties, too near or not, and of ordinary ones."""
    random = torch.Generator().manual_seed(bits)
    near = torch.randint(1 << bits - 1, 1 << bits, (60, 1), generator=random) / torch.arange(1, 106, 2)
    steps = torch.randint(-6, 7, near.shape, generator=random) * torch.randint(0, 3, near.shape, generator=random) ** 2
    near = (near.float().view(torch.int32) + steps.int()).view(torch.float32).flatten()
    ordinary = torch.rand(1000, generator=random) + 0.01
    codes = torch.arange(1, 16)
    for outer, most in ((near, 1.0), (ordinary, 0.12)):
        apart = apart_from_ties(outer, bits)
        assert wrong((outer[apart, None] * codes).flatten(), bits) == 0
        assert (~apart).float().mean() < most
    assert wrong((near[~apart_from_ties(near, bits), None] * codes).flatten(), bits) > 1000


def test_all_sizes() -> None:
    """All numbers of 16 bits, infinities and what is no number among them, under a scale of 1."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for values in (x.view(torch.bfloat16).float(), x.view(torch.float16).float()):
        assert torch.equal(pairs(values, torch.ones(()), 0), sizes(values).int())
