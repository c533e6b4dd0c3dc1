"""On a GPU: codes made by integers are those of the device's own casts, for every 16-bit value there is."""

import pytest
import torch
import triton
import triton.language as tl

from tests.generated import module_of, shipped

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "code", "largest"),
    [("nhd_fp8_tensor", torch.float8_e4m3fn, 448.0), ("nhd_e5m2_tensor", torch.float8_e5m2, 57344.0)],
)
def test_every_value_has_the_code_of_a_native_cast(
    name: str, code: torch.dtype, largest: float, source: torch.dtype
) -> None:
    values = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16).view(source).view(64, 8, 128)
    module = module_of(shipped(name))
    key_cache, value_cache = module.allocate(4, device="cuda")
    scale = torch.ones(1, device="cuda")
    module.append(values, values, key_cache, value_cache, torch.arange(64, device="cuda"), scale, scale)
    expected = values.float().clamp(-largest, largest).to(code)
    nan = torch.isnan(values)
    for cache in (key_cache, value_cache):
        found = cache.view(torch.uint8).view(64, 8, 128)
        assert torch.equal(found[~nan], expected.view(torch.uint8)[~nan])
        assert (found[nan] == 0x7F).all()
    read, _ = module.gather(key_cache, value_cache, torch.arange(64, device="cuda"), scale, scale, dtype=torch.float32)
    assert torch.equal(read[~nan], expected.float()[~nan])
    assert torch.isnan(read[nan]).all()


@triton.jit
def _divide_kernel(x_ptr, scale_ptr, found_ptr, expected_ptr, over: tl.constexpr):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    x, scale = tl.load(x_ptr + i), tl.load(scale_ptr + i)
    tl.store(found_ptr + i, over(x, scale))
    tl.store(expected_ptr + i, tl.where(scale == 0.0, 0.0, tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale))))


SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, 1.0, -1.0, 448.0, 3.4028235e38, -3.4028235e38]
SPECIAL += [float("inf"), -float("inf"), float("nan")]


def operands(kind: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 values and scales of all sizes, or of sizes whose quotients are near the codes, or with few bits."""
    generator = torch.Generator("cuda").manual_seed(7)
    bits, below = (torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator, device="cuda") for _ in range(2))
    if kind != "any":
        exponent = ((bits >> 23) & 0xFF) - below % 12 + 2
        below = (exponent.clamp(0, 254) << 23) | (below >> 8 & 0x7FFFFF)
    if kind == "few bits":
        bits, below = bits & -(1 << 16), below & -(1 << 19)
    x, scale = (n.to(torch.int32).view(torch.float32) for n in (bits, below))
    special = torch.cartesian_prod(torch.tensor(SPECIAL), torch.tensor(SPECIAL)).cuda()
    x[: len(special)], scale[: len(special)] = special[:, 0], special[:, 1]
    return x, scale


@pytest.mark.parametrize("kind", ["any", "near", "few bits"])
def test_quotients_are_those_of_a_division(kind: str) -> None:
    """But for those that no code tells apart: past 2**90 all have the largest code, below 2**-90 none but a sign."""
    count = 1 << 26
    x, scale = operands(kind, count)
    found, expected = torch.empty_like(x), torch.empty_like(x)
    over = module_of(shipped("nhd_nvfp4"))._over
    _divide_kernel[(count // 1024,)](x, scale, found, expected, over, enable_fp_fusion=False)
    for quotient in (found, expected):
        quotient.clamp_(-(2.0**90), 2.0**90)
        quotient[quotient.abs() < 2.0**-90] *= 0.0
        quotient.nan_to_num_(nan=2.0**100)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
