"""On a GPU: codes made by integers are those of the device's own casts, for every 16-bit value there is."""

import pytest
import torch
import triton
import triton.language as tl

from kvgen import harness, reference
from kvgen.quant.turbo import CODEBOOKS, Codebook
from kvgen.resolve import load_text
from tests import test_dtypes
from tests.generated import module_of, shipped
from tests.test_quant_turbo import made, near_a_bound

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
def _divide_kernel(x_ptr, scale_ptr, found_ptr, expected_ptr, over: tl.constexpr, source: tl.constexpr):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    x, scale = tl.load(x_ptr + i), tl.load(scale_ptr + i)
    tl.store(found_ptr + i, over(x, scale, source))
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


def sides(quotient: torch.Tensor) -> torch.Tensor:
    """Between which numbers of 12 bits a quotient lies, or which it is: all that codes depend on.

    Past 2**90 all have the largest code, below 2**-90 none but a sign.
    """
    quotient = quotient.clamp(-(2.0**90), 2.0**90).nan_to_num(nan=2.0**100)
    quotient[quotient.abs() < 2.0**-90] *= 0.0
    bits = quotient.view(torch.int32)
    return (bits & ~0xFFF) | ((bits & 0xFFF) != 0)


@pytest.mark.parametrize("kind", ["any", "near", "few bits"])
def test_quotients_are_those_of_a_division_as_far_as_codes_tell(kind: str) -> None:
    count = 1 << 26
    x, scale = operands(kind, count)
    found, expected = torch.empty_like(x), torch.empty_like(x)
    over = module_of(shipped("nhd_fp8_tensor"))._over
    source = tl.bfloat16 if kind == "few bits" else tl.float32
    _divide_kernel[(count // 1024,)](x, scale, found, expected, over, source, enable_fp_fusion=False)
    assert torch.equal(sides(found), sides(expected))


@triton.jit
def _divide_one_kernel(x_ptr, scale_ptr, found_ptr, expected_ptr, over: tl.constexpr, source: tl.constexpr):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    x, scale = tl.load(x_ptr + i), tl.load(scale_ptr + tl.program_id(0))
    tl.store(found_ptr + i, over(x, scale, source))
    tl.store(expected_ptr + i, tl.where(scale == 0.0, 0.0, tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale))))


@triton.jit
def _divide_ready_kernel(
    x_ptr,
    scale_ptr,
    found_ptr,
    expected_ptr,
    near_one: tl.constexpr,
    divisor: tl.constexpr,
    brought_near: tl.constexpr,
    over_known: tl.constexpr,
    source: tl.constexpr,
):
    """As _divide_one_kernel, of a scale whose inverse is found before."""
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    x, scale = tl.load(x_ptr + i), tl.load(scale_ptr + tl.program_id(0))
    tl.store(expected_ptr + i, tl.where(scale == 0.0, 0.0, tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale))))
    near = near_one(scale)
    by = divisor(scale, near, source, True)
    if not near:
        x = brought_near(x, by)
    tl.store(found_ptr + i, over_known(x, by, source, True))


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("kind", ["any", "near", "few bits"])
def test_quotients_under_one_scale(kind: str, ready: bool) -> None:
    """A program has a scale, and values near it where quotients are to be near the codes. Past 2**20 all have one."""
    x, scales = (operand.view(-1, 1024) for operand in operands("near" if kind == "few bits" else kind, 1 << 26))
    if kind != "any":
        x = x / scales * scales[:, :1]
    if kind == "few bits":
        x = x.bfloat16().float()
    x[:, : len(SPECIAL)] = torch.tensor(SPECIAL, device="cuda")
    x, scale = x.contiguous(), scales[:, 0].contiguous()
    scale[: len(SPECIAL)] = torch.tensor(SPECIAL, device="cuda")
    found, expected = torch.empty_like(x), torch.empty_like(x)
    source = tl.bfloat16 if kind == "few bits" else tl.float32
    if ready:
        m = module_of(shipped("nhd_fp8_fused_once"))
        kernel, functions = _divide_ready_kernel, (m._near_one, m._divisor, m._brought_near, m._over_known)
    else:
        kernel, functions = _divide_one_kernel, (module_of(shipped("paged_x_vector_fp8"))._over_one,)
    kernel[(len(scale),)](x, scale, found, expected, *functions, source, enable_fp_fusion=False)
    for quotient in (found, expected):  # below 2**-40 there is no code but a sign
        quotient[quotient.abs() < 2.0**-40] *= 0.0
    assert torch.equal(*(sides(quotient.clamp(-(2.0**20), 2.0**20)) for quotient in (found, expected)))


def mantissas(group: int, source: torch.dtype) -> torch.Tensor:
    """Groups whose largest has each mantissa of 8 bits, with every such value down to a 128th of it; rows of 128."""
    largest = 1.0 + torch.arange(128, device="cuda") / 128
    others = (largest[:, None] / 2.0 ** torch.arange(8, device="cuda")).flatten()
    others = torch.nn.functional.pad(others, (0, -len(others) % (group - 1))).view(-1, group - 1)
    pairs = torch.cat([largest[:, None, None].expand(-1, len(others), 1), others.expand(128, -1, -1)], dim=2)
    pairs = torch.where(pairs[..., :1] >= pairs.abs(), pairs, 0.0)
    pairs[..., 1::2] *= -1.0
    sizes = 2.0 ** torch.tensor([-110, -60, -24, -9, -1, 0, 7, 15, 90, 127] if source == torch.bfloat16 else [-9, 0, 5])
    return (pairs[None] * sizes.cuda()[:, None, None, None]).to(source).view(-1, 128)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    [
        "nhd_nvfp4",
        "nhd_mxfp4",
        "nhd_mxfp8",
        "nhd_int4",
        "nhd_int4_planes",
        "nhd_int8_token_head",
        "hnd_int8_token",
        "nhd_fp8_token_head",
        "nhd_bf16k_turbo2v",
        "nhd_bf16k_turbo3v",
        "nhd_bf16k_turbo4v",
    ],
)
def test_codes_are_those_of_the_reference(name: str, source: torch.dtype) -> None:
    """Every pair of mantissas of a value and the largest of its group, in many sizes, and every 16-bit value."""
    layout, module = shipped(name), module_of(shipped(name))
    kept = {} if all(stream.encoding for stream in layout.streams) else {"dtype": source}
    every = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16).view(source).view(-1, 128)
    rows = torch.cat([every, mantissas(layout.stream("key").group or 128, source)])
    rows = rows[: len(rows) // 8 * 8].view(-1, 8, 128)
    slots = torch.arange(len(rows), device="cuda")
    beside = (1.0000001, 1.9999998, 22.999996)  # under these some values come as near to ties as they can
    for outer in (1.0, *beside, 0.37, 3.1e-5, 1e-44, 3.3e-27, 7.7e21, 1.3e38, 0.0, -2.0, float("inf"), float("nan")):
        static = {n: torch.full((1,), outer, device="cuda") for n in ("key_scale_scale", "value_scale_scale")}
        static = static if name == "nhd_nvfp4" else {}
        found, expected = (module.allocate(-(-len(rows) // 16), device="cuda", **kept) for _ in range(2))
        module.append(rows, rows.flip(-1), *found, slots, *static.values())
        named = dict(zip([buffer.name for buffer in layout.buffers], expected, strict=True))
        reference.append(layout, {"key": rows, "value": rows.flip(-1)}, named, slots, scales=static)
        for buffer, cache, wanted in zip(layout.buffers, found, expected, strict=True):
            assert torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8)), buffer.name
        if not static:
            break


@triton.jit
def _scales_kernel(wrong_ptr, first, over_steps: tl.constexpr, reciprocal: tl.constexpr, steps: tl.constexpr):
    """How many of all float32 numbers from 2**-100 on are divided otherwise than by IEEE division."""
    bits = first + tl.program_id(0).to(tl.int64) * 4096 + tl.arange(0, 4096)
    x = bits.to(tl.uint32).to(tl.float32, bitcast=True)
    ratio = over_steps(x, steps) != tl.div_rn(x, steps)
    inverse = (reciprocal(x, True) != tl.div_rn(1.0, x)) & (x < 8.507059173023462e37)
    tl.atomic_add(wrong_ptr, tl.sum(ratio.to(tl.int32) + inverse.to(tl.int32), axis=0))


@pytest.mark.parametrize("steps", [127.0, 448.0])
def test_scales_are_divided_as_by_ieee(steps: float) -> None:
    """Every magnitude that counts where scales have a floor, and every scale."""
    module, wrong = module_of(shipped("nhd_fp8_token_head")), torch.zeros(1, dtype=torch.int32, device="cuda")
    first, last = 27 << 23, 0xFF << 23  # 2**-100 and infinity
    for start in range(first, last, 1 << 30):
        programs = (min(last, start + (1 << 30)) - start) // 4096
        functions = module._over_steps, module._reciprocal
        _scales_kernel[(programs,)](wrong, start, *functions, steps, enable_fp_fusion=False)
    assert wrong.item() == 0


@triton.jit
def _integers_kernel(wrong_ptr, codes: tl.constexpr):
    x = (tl.program_id(0).to(tl.int64) * 4096 + tl.arange(0, 4096)).to(tl.uint32).to(tl.float32, bitcast=True)
    wrong = codes(x, -127, 127, True) != codes(x, -127, 127, False)
    tl.atomic_add(wrong_ptr, tl.sum(wrong.to(tl.int32), axis=0))


def test_integers_of_every_float32() -> None:
    """Those that are made in words are those that are made one by one."""
    wrong = torch.zeros(1, dtype=torch.int32, device="cuda")
    _integers_kernel[(1 << 20,)](wrong, module_of(shipped("hnd_int8_token"))._int8_bytes, enable_fp_fusion=False)
    assert wrong.item() == 0


SHAPES = [(1, 16), (1, 32), (2, 16), (3, 48), (1, 128), (5, 256)]


@pytest.mark.parametrize(("heads", "dims"), SHAPES)
@pytest.mark.parametrize("mode", ["turbo2", "turbo3", "turbo4", "int8, scale: {per: token head}"])
def test_rows_that_are_turned_or_in_codebooks(mode: str, heads: int, dims: int) -> None:
    """Rows that fill a warp, and rows that leave threads without values, which compilers give copies."""
    turned = "" if dims == 48 else "rotate: hadamard, "
    scales = "token head dim//16" if "turbo" in mode else "token head"
    layout = load_text(
        f"name: turned\naxes: {{head: {heads}, dim: {dims}}}\nblock_size: 4\n"
        f"streams: {{key: {{{turned}quant: {{mode: {mode}}}}}}}\n"
        f"buffers:\n  codes: {{key: block slot head dim}}\n  scales: {{key.scale: {scales}}}\n"
    )
    names = ["append/T1", "append/T7", "append/then_gather", "gather/T7"]
    found = harness.run(layout, module_of(layout), device="cuda", only=names)
    assert found.ok, str(found)


@pytest.mark.parametrize("book", CODEBOOKS, ids=lambda book: book.name)
def test_scales_near_a_bound(book: Codebook) -> None:
    """Where float32 may tell another code than float64 does, and some 2**-24 further on to both sides."""
    layout, module = made(book.bits, "planar")
    near, slots = near_a_bound(book, 1 << 14)[0].flatten(-2).cuda(), torch.arange(1 << 14, device="cuda")
    for away in range(-24, 25):
        rows = near * (1 + away * 2.0**-23)
        found, expected = (module.allocate(1 << 12, device="cuda") for _ in range(2))
        module.append(rows, found, slots)
        reference.append(layout, {"key": rows}, {"cache": expected}, slots)
        assert torch.equal(found, expected)


def test_codes_of_six_bytes_at_odd_addresses() -> None:
    """Those at even ones are written two bytes at a time; a launch that was kept for them is none for others."""
    module = module_of(shipped("nhd_bf16k_turbo3v"))
    key, value = (torch.randn(40, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    slots = torch.arange(40, device="cuda")
    keys, cache = module.allocate(3, device="cuda")
    size = cache.stride(0)
    found = []
    for start, step in ((0, size), (1, size), (0, size), (0, size + 1), (2, size + 2)):
        storage = torch.full((3 * size + 8,), 0x5A, dtype=torch.uint8, device="cuda")
        cache = storage.as_strided(cache.shape, (step, *cache.stride()[1:]), start)
        module.append(key, value, keys, cache, slots)
        found.append(cache.contiguous())
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert not torch.equal(found[0][0], found[0][1])


def test_sources_of_several_sizes() -> None:
    layout = test_dtypes.layout()
    names = ["append/T7", "append/dtype1", "append/dtype2", "append/source_fused", "append/edges1", "append/edges2"]
    report = harness.run(layout, module_of(layout), device="cuda", only=[*names, "gather/dtype1", "gather/dtype2"])
    assert report.ok, str(report)
