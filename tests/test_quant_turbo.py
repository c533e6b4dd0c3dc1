"""Rotations, codebooks and scales by norm: published bytes through reference and generated kernels, and accuracy."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kvgen import harness, reference
from kvgen.harness.pools import PoolFactory
from kvgen.layout import KernelHints, Layout, ScheduleHints
from kvgen.quant.rotation import hadamard
from kvgen.quant.turbo import CODEBOOKS, Codebook, decode, encode, norm_ratio, stretch
from kvgen.resolve import load_text
from tests.generated import module_of
from tests.quantised import INF, NAN, encoding_of, hexes
from tests.test_quant_narrow import layout_of, stored

RAMP = [float(x) for x in range(-8, 8)]
BYTES = [
    (2, [0.0] * 16, "AA AA AA AA", "00"),
    (3, [0.0, -0.0] * 8, "24 49 92 24 49 92", "00"),
    (4, [0.0] * 16, "88 88 88 88 88 88 88 88", "00"),
    (2, RAMP, "40 55 AA FA", "4A"),
    (3, RAMP, "40 12 69 64 6B FB", "46"),
    (4, RAMP, "10 21 43 65 98 BA DC EE", "44"),
    (4, [NAN] * 16, "00 00 00 00 00 00 00 00", "00"),
    (2, [NAN, 1.0] + [0.0] * 14, "AC AA AA AA", "2C"),
    (4, [1.0] + [0.0] * 15, "8F 88 88 88 88 88 88 88", "2C"),
    (3, [2.0**-30, -(2.0**-30)] * 8, "C7 71 1C C7 71 1C", "00"),
    (2, [1e30, -INF] + [0.0] * 14, "A2 AA AA AA", "7E"),
    (4, [2.732590, *CODEBOOKS[2].all_bounds], "1F 32 54 76 98 BA DC FE", "38"),
]
"""Bits of a code; a group; its codes; its scale."""

PLACES = {
    "planar": "{order: block, fields: [{key: slot head dim}, {key.scale: slot head dim//16}]}",
    "odd_rows": "{order: block slot head, fields: [{key: dim}, {key.scale: dim//16}]}",
}


@cache
def made(bits: int, place: str) -> tuple[Layout, ModuleType]:
    dims = 32 if place == "planar" else 16  # a row of 5, 7 or 9 bytes where it is odd
    layout = load_text(
        f"name: turbo{bits}_{place}\naxes: {{head: 2, dim: {dims}}}\nblock_size: 4\n"
        f"streams: {{key: {{dtype: float32, quant: {{mode: turbo{bits}}}}}}}\nbuffers: {{cache: {PLACES[place]}}}\n"
    )
    return layout, module_of(layout)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("bits", "group", "codes", "scale"), BYTES)
def test_bytes(bits: int, group: list[float], codes: str, scale: str, place: str) -> None:
    """A group is the last one of head 1 of the token in slot 2 of block 1."""
    layout, module = made(bits, place)
    pool = PoolFactory(layout, "cpu", 0).make()
    row = torch.zeros(1, 2, 32 if place == "planar" else 16)
    row[0, 1, -16:] = torch.tensor(group)
    reference.append(layout, {"key": row}, pool.expected, torch.tensor([6]))
    module.append(row, pool.actual["cache"], torch.tensor([6]))
    whole = 2 * bits  # bytes of a group
    for found in (pool.expected["cache"][1], pool.actual["cache"][1]):
        if place == "odd_rows":
            held, scales = found[2, 1, :whole], found[2, 1, whole:]
        else:
            held, scales = (
                found[: 32 * bits].view(4, 2, -1)[2, 1, -whole:],
                found[32 * bits :].view(4, 2, -1)[2, 1, -1:],
            )
        assert (hexes(held), hexes(scales)) == (codes, scale)
    assert torch.equal(pool.expected["cache"], pool.actual["cache"])
    held, scales = module.gather_codes(pool.actual["cache"], torch.tensor([6]))
    assert (hexes(held[0, 1, -whole:]), hexes(scales[0, 1, -1:])) == (codes, scale)


def test_every_value_counts_in_the_norm() -> None:
    """One value of a group and fifteen zeros, at each place: the same scale everywhere."""
    layout, module = made(4, "odd_rows")
    rows = torch.eye(16).unsqueeze(1).expand(16, 2, 16).contiguous()
    pools = [module.allocate(4) for _ in range(2)]
    module.append(rows, pools[0], torch.arange(16))
    reference.append(layout, {"key": rows}, {"cache": pools[1]}, torch.arange(16))
    for pool in pools:
        assert set(hexes(pool[..., 8:]).split()) == {"2C"}
    assert torch.equal(*pools)


def near_a_bound(book: Codebook, tokens: int) -> tuple[Tensor, Tensor]:
    """Groups scaled so that their scale lies within some 2**-24 of the middle between two codes, and their centroids:
    [tokens, 2, 2, 16]."""
    generator = torch.Generator().manual_seed(book.bits)
    codes = torch.randint(0x10, 0x60, (tokens, 2, 2), generator=generator).to(torch.uint8)
    low, high = (c.view(torch.float8_e4m3fn).double() for c in (codes, codes + 1))
    rows = torch.randn(tokens, 2, 2, 16, generator=generator)
    for _ in range(3):  # nearer each time
        amax = rows.abs().amax(dim=-1, keepdim=True)
        chosen = decode(book, encode(book, encoding_of(book.name), rows * stretch(book.centroids[-1], amax)))
        ratio = rows.double().norm(dim=-1) / chosen.double().norm(dim=-1)
        rows = rows * ((low + high) / 2 / ratio).float().unsqueeze(-1)
    return rows, chosen


@pytest.mark.parametrize("book", CODEBOOKS, ids=lambda book: book.name)
def test_scales_near_a_bound(book: Codebook) -> None:
    layout, module = made(book.bits, "planar")
    rows, chosen = near_a_bound(book, 64)
    in_float32 = rows.square().sum(-1).sqrt() / chosen.square().sum(-1).sqrt()
    exact = norm_ratio(rows.abs(), chosen).squeeze(-1)
    assert (in_float32.to(torch.float8_e4m3fn).float() != exact.to(torch.float8_e4m3fn).float()).sum() > 16
    pools, slots = [module.allocate(16) for _ in range(2)], torch.arange(64)
    reference.append(layout, {"key": rows.flatten(-2)}, {"cache": pools[0]}, slots)
    module.append(rows.flatten(-2), pools[1], slots)
    assert torch.equal(*pools)


def test_a_group_of_zeros_comes_back_as_zeros() -> None:
    for bits in (2, 3, 4):
        _, back = stored(layout_of(f"{{mode: turbo{bits}}}", 16, 16), torch.zeros(1, 16))
        assert back.tolist() == [[0.0] * 16]


@pytest.mark.parametrize("book", CODEBOOKS, ids=lambda book: book.name)
def test_bounds(book: Codebook) -> None:
    """At a bound a value goes up, just under it down; bounds lie in the middle between centroids."""
    bounds = torch.tensor(book.all_bounds)
    under = torch.nextafter(bounds, torch.tensor(-INF))
    assert encode(book, encoding_of(book.name), bounds).tolist() == list(range(1, 1 << book.bits))
    assert encode(book, encoding_of(book.name), under).tolist() == list(range((1 << book.bits) - 1))
    middles = [(low + high) / 2 for low, high in zip(book.values, book.values[1:], strict=False)]
    assert book.all_bounds == pytest.approx(middles, abs=1.1e-6)


@pytest.mark.parametrize(("book", "expected"), [*zip(CODEBOOKS, (0.117482, 0.034548, 0.009501), strict=True)])
def test_centroids_are_those_of_normal_values(book: Codebook, expected: float) -> None:
    """The mean square error over N(0, 1), and each centroid the mean of what is coded by it."""
    x = torch.linspace(-9, 9, 900_001, dtype=torch.float64)
    weight = (-x.square() / 2).exp() / math.sqrt(2 * math.pi) * (x[1] - x[0])
    codes = encode(book, encoding_of(book.name), x.float()).long()
    values = torch.tensor(book.values, dtype=torch.float64)
    assert (weight * (x - values[codes]).square()).sum().item() == pytest.approx(expected, abs=1e-6)
    mass = torch.zeros_like(values).scatter_add(0, codes, weight)
    means = torch.zeros_like(values).scatter_add(0, codes, weight * x) / mass
    assert torch.allclose(means, values, atol=5e-5)


def test_rotation_step_by_step() -> None:
    """Float32 sums and differences in the order that is said, one value at a time."""
    row = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-8, 8)
    expected = row.clone()
    for apart in (1, 2, 4, 8):
        for low in (i for i in range(16) if not i & apart):
            a, b = expected[:, low].clone(), expected[:, low + apart].clone()
            expected[:, low], expected[:, low + apart] = a + b, a - b
    assert torch.equal(hadamard(row), expected * 0.25)
    assert torch.allclose(hadamard(hadamard(row)), row, rtol=0, atol=1e-4)
    signs = hadamard(torch.eye(8)).sign()
    assert torch.equal(signs, torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(8)] for i in range(8)]))


def rotated(encoding: str) -> Layout:
    return load_text(
        "name: rotated\naxes: {head: 2, dim: 8}\nblock_size: 4\n"
        f"streams: {{key: {{dtype: float32, rotate: hadamard, {encoding}}}}}\n"
        "buffers:\n  cache: {holds: key, order: block slot head dim}\n"
    )


def test_rotated_values_are_handed_out_on_demand() -> None:
    """gather turns back; a query that is turned like the keys meets them as they are."""
    layout = rotated("store: bfloat16")
    module = module_of(layout)
    cache = module.allocate(2)
    row, slots = torch.tensor([[[8.0, *[0.0] * 7], [1.0] * 8]]), torch.tensor([5])
    module.append(row, cache, slots)
    turned = module.gather(cache, slots, dtype=torch.float32, rotated=True)
    eighth = torch.tensor(8.0) * torch.tensor(1 / math.sqrt(8))
    assert turned[0, 0].tolist() == [eighth.bfloat16().item()] * 8
    assert torch.equal(module.gather(cache, slots, dtype=torch.float32), hadamard(turned))
    assert (module.gather(cache, slots)[0, 0].float() - row[0, 0]).abs().max() < 0.04


def test_codes_are_written_two_bytes_at_a_time_at_even_addresses() -> None:
    """The same bytes at odd ones: of a cache that begins at one, and of one whose every other block does."""
    _, module = made(3, "planar")
    rows, slots = torch.randn(9, 2, 32, generator=torch.Generator().manual_seed(3)), torch.arange(9)
    size = math.prod(module.allocate(1).shape)
    found = []
    for start, step, even in ((0, size, True), (1, size, False), (0, size + 1, False), (2, size + 2, True)):
        cache = torch.full((3 * size + 8,), 0x5A, dtype=torch.uint8).as_strided((3, size), (step, 1), start)
        assert module._even(cache) is even
        module.append(rows, cache, slots)
        found.append(cache.contiguous())
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert not torch.equal(found[0][0], found[0][2])


@pytest.mark.parametrize("hints", [KernelHints(1, 1, 1), KernelHints(2, "all", 1), KernelHints(8, 2, 4)], ids=str)
def test_every_schedule_gives_the_same_bytes(hints: KernelHints) -> None:
    layout = load_text(
        "name: scheduled\naxes: {head: 3, dim: 32}\nblock_size: 4\nstreams:\n"
        "  key: {rotate: hadamard, quant: {mode: turbo3}}\n"
        "  value: {rotate: hadamard, quant: {mode: int8, scale: {per: token head dim//8}}}\nbuffers:\n"
        "  key_cache: {order: block slot head, fields: [key, {key.scale: dim//16}]}\n"
        "  value_cache: {order: block head dim slot, holds: value}\n  scales: {value.scale: token head dim//8}\n"
    )
    layout = replace(layout, schedule=ScheduleHints(hints, hints))
    found = harness.run(layout, module_of(layout), only=["append/T7", "append/then_gather", "gather/rotated"])
    assert found.ok, str(found)


SQNR = [
    *[(f"rotate: hadamard, quant: {{mode: turbo{bits}}}", db) for bits, db in ((2, 8.89), (3, 16.17), (4, 22.32))],
    *[(f"quant: {{mode: turbo{bits}}}", db) for bits, db in ((2, 8.89), (3, 16.17), (4, 22.32))],
]


def error(quant: str, values: Tensor, *, seen: Any = slice(None)) -> float:
    """Signal over noise in dB, of the columns that are ``seen``."""
    dims, asymmetric = values.shape[1], "asymmetric" in quant
    group = 16 if "turbo" in quant or "nvfp4" in quant else 32 if "dim//32" in quant else 0
    encoding, rotate = quant.removeprefix("rotate: hadamard, ").removeprefix("quant: "), quant.startswith("rotate")
    layout = layout_of(f"{encoding}{', rotate: hadamard' if rotate else ''}", dims, group, zero=asymmetric)
    _, back = stored(layout, values)
    exact = values.double()[:, seen]
    return (10 * (exact.square().sum() / (back.double()[:, seen] - exact).square().sum()).log10()).item()


@pytest.mark.parametrize(("quant", "expected"), SQNR)
def test_accuracy(quant: str, expected: float) -> None:
    values = torch.randn(16384, 128, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    assert abs(error(quant, values) - expected) < 0.1


PER_ROW = "quant: {mode: MODE, scale: {per: token head}}"
ROWS = [
    (PER_ROW.replace("MODE", "int4_asymmetric"), 1.2),
    ("rotate: hadamard, " + PER_ROW.replace("MODE", "int4_asymmetric"), 10.9),
    (PER_ROW.replace("MODE", "int8"), 22.9),
    (PER_ROW.replace("MODE", "fp8_e4m3"), 31.5),
    ("quant: {mode: nvfp4}", 9.9),
]


def loud_channels() -> tuple[Tensor, list[int]]:
    """Normal values with four channels 20 times as large, and the other channels."""
    loud = [3, 40, 77, 100]
    values = torch.randn(16384, 128, generator=torch.Generator().manual_seed(0))
    values[:, loud] *= 20
    return values.bfloat16().float(), [i for i in range(128) if i not in loud]


@pytest.mark.parametrize(("quant", "expected"), ROWS)
def test_axes_and_rotation_have_the_effect_they_claim(quant: str, expected: float) -> None:
    values, others = loud_channels()
    assert abs(error(quant, values, seen=others) - expected) < 0.1


def test_groups_along_tokens_leave_loud_channels_alone() -> None:
    """Per channel over 32 tokens: a channel is a row here."""
    values, others = loud_channels()
    found = error("quant: {mode: int4_asymmetric, scale: {per: token head dim//32}}", values.T[others].contiguous())
    assert abs(found - 22.1) < 0.1
