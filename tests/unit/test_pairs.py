"""Bytes of two codes each, as processors with casts to e4m3 make them: those of rounded quotients, near all ties.

A value times a reciprocal that is rounded misses x / scale by a part in 2**23 at the most. Added to a constant it
loses more than that: where it is a tie it is one again. Elsewhere it is on the right side if it is further from one
than what is lost: beside the 6 of e2m1 a part in 2**20 of the smallest tie, beside the 1024 of int4 a 2**14th. So codes
are right for scales under which no value comes that near to a tie without being one; and it is enough to look at values
that are next to ties. How codes and signs share bytes is said in PTX, of which some instructions are carried out here.
"""

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kvgen.emit import render_layout
from kvgen.quant import e2m1
from kvgen.resolve import load_text
from tests.generated import module_of, shipped, transfer
from tests.quantised import encoding_of

TIES = {"e2m1": torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]), "int4": torch.arange(7) + 0.5}
BITS = {torch.bfloat16: 8, torch.float16: 11}


def fma(a: Tensor, b: Tensor, c: Tensor | float) -> Tensor:
    """Of float32, whose products are exact in float64."""
    return (a.double() * b.double() + c).float()


def inverse(divisor: Tensor, missed: int) -> Tensor:
    """1 / divisor, corrected once, of a guess that is so many steps off."""
    guess = ((1 / divisor.double()).float().view(torch.int32) + missed).view(torch.float32)
    return fma(fma(-divisor, guess, 1.0), guess, guess.double())


def sums(code: str, x: Tensor, scale: Tensor, missed: int) -> Tensor:
    """What kernels cast: an eighth of sizes, and a constant."""
    size = (x * inverse(scale * 8.0, missed)).abs().nan_to_num(0.0, 1.0).clamp(0.0, 1.0)
    return size + 128.0 if code == "int4" else torch.minimum(size + 0.75, fma(size, torch.tensor(0.25), 1.15625))


def made(code: str, x: Tensor, scale: Tensor, missed: int) -> Tensor:
    """Codes without signs, as kernels make them."""
    found = sums(code, x, scale, missed)
    if code == "int4":
        return (found.half().view(torch.int16).int() - 0x5800).clamp(max=7)
    return found.to(torch.float8_e4m3fn).view(torch.uint8).int() - 0x34


def wanted(code: str, quotients: Tensor) -> Tensor:
    """The codes of rounded quotients, without signs."""
    if code == "int4":
        return quotients.abs().nan_to_num(0.0, 7.0).round().clamp(max=7.0).int()
    return (e2m1.encode(encoding_of("nvfp4"), quotients) & 7).int()


def beside_ties(code: str, scale: Tensor, bits: int) -> Tensor:
    """``[scales, values]`` of so many bits: those next to a tie on either side, and their neighbours."""
    exact = TIES[code].double() * scale.double()[:, None]
    step = torch.exp2(torch.floor(torch.log2(exact)) - (bits - 1))
    return ((torch.floor(exact / step)[..., None] + torch.arange(-1, 3)) * step[..., None]).flatten(1).float()


def wrong(code: str, scale: Tensor, bits: int) -> int:
    x, scale = beside_ties(code, scale, bits), scale[:, None]
    return sum(int((made(code, x, scale, missed) != wanted(code, x / scale)).sum()) for missed in (-1, 0, 1))


def apart_from_ties(outer: Tensor, bits: int) -> Tensor:
    """Whether kernels take scales that are counted in these for such."""
    odd = (torch.arange(1, 16, 2)[:, None] * torch.arange(1, 8, 2)).flatten().float()
    product = odd * outer[:, None]
    more = 1 << 24 - bits
    short = (product.view(torch.int32) + more // 2) & -more
    distance = fma(odd, outer[:, None], -short.view(torch.float32).double()).abs()
    return ~((distance > 0) & (distance < product * 1.2e-06)).any(1)


@pytest.mark.parametrize("bits", BITS.values())
@pytest.mark.parametrize("code", TIES)
def test_scales_of_11_bits_or_less(code: str, bits: int) -> None:
    """Those in float16 or e4m3, and powers of two."""
    assert wrong(code, torch.arange(1, 1 << 11).float(), bits) == 0


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
        assert wrong("e2m1", (outer[apart, None] * codes).flatten(), bits) == 0
        assert (~apart).float().mean() < most
    assert wrong("e2m1", (near[~apart_from_ties(near, bits), None] * codes).flatten(), bits) > 1000


@pytest.mark.parametrize("code", TIES)
def test_all_sizes(code: str) -> None:
    """All numbers of 16 bits, infinities and what is no number among them, under a scale of 1."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for values in (x.view(torch.bfloat16).float(), x.view(torch.float16).float()):
        assert torch.equal(made(code, values, torch.ones(()), 0), wanted(code, values))


def bits_of(x: Tensor) -> Iterator[int]:
    return iter((x.view(torch.int32).long() & 0xFFFFFFFF).tolist())


def cast(number: int, dtype: torch.dtype) -> int:
    value = torch.tensor([number - (number >> 31 << 32)], dtype=torch.int32).view(torch.float32).to(dtype)
    return int.from_bytes(bytes(value.view(torch.uint8).tolist()), "little")


def whole(number: int) -> int:
    """The nearest integer of a float32, ties to even; 0 of what is no number."""
    value = torch.tensor([number - (number >> 31 << 32)], dtype=torch.int32).view(torch.float32).double()
    return int(value.nan_to_num(0.0).round().clamp(-(2.0**31), 2.0**31 - 1))


def eight_bits(number: int) -> int:
    """What an integer of 32 bits becomes, held to 8 with their sign."""
    return max(-128, min(number - (number >> 31 << 32), 127)) & 0xFF


OPERATIONS = {
    "cvt.rn.satfinite.e4m3x2.f32": lambda a, b: cast(a, torch.float8_e4m3fn) << 8 | cast(b, torch.float8_e4m3fn),
    "cvt.rni.s32.f32": whole,
    "cvt.pack.sat.s8.s32.b32": lambda a, b, c: c << 16 | eight_bits(a) << 8 | eight_bits(b),
    "cvt.rn.f16x2.f32": lambda a, b: cast(a, torch.float16) << 16 | cast(b, torch.float16),
    "mov.b32": lambda low, high=0: low | high << 16,
    "min.u16x2": lambda a, b: min(a & 0xFFFF, b & 0xFFFF) | min(a >> 16, b >> 16) << 16,
    "shf.l.wrap.b32": lambda low, high, by: high << by | low >> 32 - by,
    "prmt.b32": lambda a, b, order: sum(((a | b << 32) >> 8 * (order >> 4 * i & 15) & 0xFF) << 8 * i for i in range(4)),
    "lop3.b32": lambda a, b, c, table: {0xF8: a | b & c, 0x80: a & b & c, 0x28: (a ^ b) & c, 0x96: a ^ b ^ c}[table],
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mul.lo.u32": lambda a, b: a * b,
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "shl.b32": lambda a, by: a << by,
    "shr.u32": lambda a, by: a >> by,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
}
"""Instructions of PTX by name, on whole words: the lowest 32 bits count."""


def word(ptx: str, operands: list[int]) -> int:
    """What a block of PTX leaves in its first operand."""
    known = {f"${i}": operand for i, operand in enumerate(operands, 1)}
    for line in re.findall(r"^ +(\w[^;]*);", ptx, re.M):
        name, to, *sources = re.findall(r"[^\s,{}]+", line)
        known[to] = OPERATIONS[name](*(known[s] if s in known else int(s, 0) for s in sources)) & 0xFFFFFFFF
    return known["$0"]


def words_of_eight(code: str) -> Iterator[tuple[list[int], list[int]]]:
    """What words of eight are made of, sizes and then eighths, and the codes: of all quotients in steps of an eighth.

    And of zeros with either sign; in random order.
    """
    x = torch.cat([torch.arange(-72, 73) / 8, torch.tensor([-0.0] * 15)])
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    size = wanted(code, x)
    codes = torch.where(x.signbit(), (16 - size) & 15 if code == "int4" else size | 8, size).view(-1, 8)
    for eight, made_of in zip(x.view(-1, 8), codes.tolist(), strict=True):
        yield [*bits_of(sums(code, eight, torch.ones(()), 0)), *bits_of(eight / 8)], made_of


PAIRED = [0, 2, 4, 6, 1, 3, 5, 7]
"""Codes by which operand they are: those of even numbers first."""


@pytest.mark.parametrize(
    ("code", "name", "constant"), [("e2m1", "nhd_mxfp4", "_E2M1_PAIRS"), ("int4", "nhd_int4", "_INT4_PAIRS")]
)
def test_words_of_eight_codes(code: str, name: str, constant: str) -> None:
    ptx = getattr(module_of(shipped(name)), constant).value
    for operands, codes in words_of_eight(code):
        expected = sum(codes[i] << 4 * i for i in range(8))
        assert word(ptx, [operands[i + 8 * half] for half in (0, 1) for i in PAIRED]) == expected


def above_a_minimum(x: Tensor, scale: Tensor, missed: int) -> Tensor:
    """What kernels cut codes above a minimum out of: quotients of two parts that count 2**-15, held to 0 and 1."""
    near = inverse(scale, missed)
    below = (near.view(torch.int32) - 1).view(torch.float32)
    rest = (fma(-scale, below, 1.0) * near).view(torch.int32) + 1
    below, rest = below * 2.0**-15, rest.view(torch.float32) * 2.0**-15
    held, add = re.findall(r"(?:fma|add)\.[^;]*", module_of(transfer("nhd_to_int4_group"))._UINT4_WHOLE.value)
    assert held.startswith("fma.rn.sat.f32")  # held to 0 and 1, and 0 where it is no number
    constant = torch.tensor([int(add.rpartition("0f")[2], 16)], dtype=torch.int32).view(torch.float32)
    return fma(x, below, x * rest).nan_to_num(0.0, 1.0).clamp(0.0, 1.0) + constant


def test_codes_above_a_minimum() -> None:
    """Of float32 next to ties on either side, under scales of 11 bits: a quotient is a tie where it is one exactly."""
    scale, ties = torch.arange(1, 1 << 11).float()[:, None, None], torch.arange(15) + 0.5
    x = (ties * scale[..., 0]).view(torch.int32)[..., None] + torch.arange(-3, 4, dtype=torch.int32)
    x = x.view(torch.float32)
    for missed in (-1, 0, 1):
        codes = above_a_minimum(x, scale, missed).view(torch.int32) & 0xFFFF
        assert torch.equal(codes.clamp(max=15), (x / scale).round().clamp(max=15).int())


def test_words_of_eight_codes_above_a_minimum() -> None:
    """Of all quotients from -2 to 18 in steps of an eighth, and of what is no code: infinities, and no number."""
    ptx = module_of(transfer("nhd_to_int4_group"))._UINT4_PAIRS.value
    others = torch.tensor([1e5, 3e38, torch.inf, -torch.inf, torch.nan, -0.0, 1e-40])
    x = torch.cat([torch.arange(-16, 145) / 8, others])
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    for eight in x.view(-1, 8):
        codes = eight.nan_to_num(0.0).clamp(0.0, 15.0).round().int().tolist()
        operands = list(bits_of(above_a_minimum(eight, torch.ones(()), 0)))
        assert word(ptx, [operands[i] for i in PAIRED]) == sum(code << 4 * i for i, code in enumerate(codes))


def test_words_of_planes() -> None:
    """Each byte has one bit of eight codes."""
    ptx = module_of(shipped("nhd_int4_planes"))._INT4_PLANES.value
    for operands, codes in words_of_eight("int4"):
        expected = sum((codes[i] >> bit & 1) << 8 * bit + i for i in range(8) for bit in range(4))
        assert word(ptx, operands) == expected


def test_words_of_four_integers() -> None:
    """All numbers from -130 to 130 in steps of an eighth, with the lower bound that kernels hold them to before."""
    ptx = module_of(shipped("hnd_int8_token"))._INT8_WORD.value
    x = torch.cat([torch.arange(-1040, 1041) / 8, torch.tensor([3e38, torch.inf, torch.nan])]).clamp(min=-127.0)
    for four in x.view(-1, 4):
        codes = [0 if number.isnan() else int(number.round().clamp(max=127.0)) & 0xFF for number in four]
        assert word(ptx, list(bits_of(four))) == sum(code << 8 * i for i, code in enumerate(codes))


@pytest.mark.parametrize("steps", [127.0, 448.0, 57344.0])
def test_magnitudes_over_steps(steps: float) -> None:
    """All mantissas: in float64 sums are exact, or not so near to a middle as to be mistaken."""
    amax, divisor = torch.arange(1 << 23, 1 << 24).float(), torch.tensor(steps)
    ratio = amax * (1 / divisor)
    rest = fma(-ratio, divisor, amax.double())
    assert torch.equal(fma(rest, 1 / divisor, ratio.double()), amax / divisor)


@pytest.mark.parametrize("arithmetic", ["divide", "multiply"])
def test_distances_are_divided_as_they_are(arithmetic: str) -> None:
    """The lowest and the highest value may be infinitely far from each other, whatever the floor of their scale is."""
    scale = f"per: token head, source: dynamic, dtype: float32, floor: {{scale: 1.0e-4}}, arithmetic: {arithmetic}"
    text = f"""
name: nibbles
axes: {{head: 2, dim: 32}}
block_size: 16
streams:
  key: {{dtype: float32, quant: {{mode: int4_asymmetric, scale: {{{scale}}}}}}}
buffers:
  cache: {{order: block slot head, fields: [key, key.scale, key.zero]}}
"""
    found = render_layout(load_text(text))
    assert "scale = tl.div_rn(amax, 15.0)" in found
    assert "_over_steps(" not in found
    assert "_reciprocal(" not in found
