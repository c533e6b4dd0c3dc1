"""On a GPU: codes made by integers are those of the device's own casts, for every 16-bit value there is."""

import pytest
import torch

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
