"""Codes narrower than a byte, zeros under them and scales of scales: published bytes, edges, and accuracy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvgen import reference
from kvgen.harness.pools import PoolFactory
from kvgen.layout import Layout
from kvgen.quant import e2m1
from kvgen.quant.scales import load
from kvgen.resolve import load_text
from tests.generated import module_of, shipped
from tests.quantised import INF, NAN, encoding_of, hexes, numbers

HALF_SPLIT = "block slot head dim//32 dim%16 dim//16%2"


def layout_of(quant: str, dim: int = 128, group: int = 0, order: str = "block slot head dim", zero: bool = False):
    scales = f"block slot head{f' dim//{group}' if group else ''}"
    zeros = f"  key_zeros: {{holds: key.zero, order: {scales}}}\n" if zero else ""
    return load_text(
        f"name: narrow\naxes: {{head: 1, dim: {dim}}}\nblock_size: 16\n"
        f"streams: {{key: {{dtype: float32, quant: {quant}}}}}\nbuffers:\n"
        f"  key_cache: {{holds: key, order: {order}}}\n  key_scales: {{holds: key.scale, order: {scales}}}\n{zeros}"
    )


def stored(layout: Layout, rows: Tensor, g: float = 1.0) -> tuple[dict[str, Tensor], Tensor]:
    """What the first tokens of a pool hold of rows ``[T, dim]``, by buffer, and what they decode to."""
    blocks = -(-len(rows) // 16)
    buffers = {}
    for name, tensor in PoolFactory(layout, "cpu", 0).make().actual.items():
        buffers[name] = torch.zeros(blocks, *tensor.shape[1:], dtype=tensor.dtype)
    slots = torch.arange(len(rows))
    scales = {"key_scale_scale": torch.tensor([g])}
    reference.append(layout, {"key": rows.float().unsqueeze(1)}, buffers, slots, scales=scales)
    back = reference.gather(layout, buffers, slots, scales=scales, dtype=torch.float32)["key"].squeeze(1)
    return {name: tensor.flatten(0, 1)[: len(rows)] for name, tensor in buffers.items()}, back


@pytest.mark.parametrize(
    ("row", "codes", "scale", "back"),
    [
        ("0 .5 1 1.5 2 3 4 6 -0.0 -.5 -1 -1.5 -2 -3 -4 -6", "10 32 54 76 98 BA DC FE", "38", None),
        ("0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15", "10 22 43 54 65 66 76 77", "42", None),
        ("1 " * 16, "77 77 77 77 77 77 77 77", "23", 1.03125),
        ("0 " * 16, "00 00 00 00 00 00 00 00", "00", 0.0),
    ],
)
def test_nvfp4_bytes(row: str, codes: str, scale: str, back: float | None) -> None:
    held, values = stored(layout_of("{mode: nvfp4}", 16, 16), torch.tensor([numbers(row)]))
    assert hexes(held["key_cache"]) == codes
    assert hexes(held["key_scales"]) == scale
    assert back is None or values.unique().tolist() == [back]


def test_nvfp4_is_counted_in_its_static_scale() -> None:
    """sf = e4m3(amax / (6 g)); codes and values take sf · g; a scale that vanishes leaves codes of 0."""
    layout, row = layout_of("{mode: nvfp4}", 16, 16), torch.tensor([numbers("0 .5 1 1.5 2 3 4 6 0 -.5 -1 0 0 0 0 0")])
    for g in (0.25, 4.0):
        held, values = stored(layout, row * g, g)
        assert hexes(held["key_scales"]) == "38"
        assert torch.equal(values, row * g)
    held, values = stored(layout, row, 2.0**11)
    assert hexes(held["key_scales"]) == "00"
    assert not held["key_cache"].any()
    for words in ("0 " * 16, "0 .5 -1 0 0 0 0 0 nan inf 0 0 0 0 0 0"):
        held, values = stored(layout, torch.tensor([numbers(words)]), 0.0)
        assert not held["key_cache"].any()
        assert values.tolist() == [[0.0] * 16]
    with pytest.raises(ValueError, match="key_scale_scale"):
        reference.append(layout, {"key": row.unsqueeze(1)}, PoolFactory(layout, "cpu", 0).make().actual, torch.zeros(1))


def test_e2m1_rounds_to_the_even_code() -> None:
    ties = numbers("0.25 0.75 1.25 1.75 2.5 3.5 5 5.0001 6 7 1e38 inf nan 0.2 -0.0 -0.25 -6 -inf")
    found = e2m1.encode(encoding_of("nvfp4"), torch.tensor(ties)).tolist()
    assert found == [0, 2, 2, 4, 4, 6, 6, 7, 7, 7, 7, 7, 0, 0, 8, 8, 15, 15]
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(e2m1.encode(encoding_of("nvfp4"), e2m1.decode(codes)), codes)


def test_int4_bytes() -> None:
    row = torch.tensor([[-7.0, 7, 1, 2, 0.5, 1.5, -0.5, NAN]])
    held, values = stored(layout_of("{mode: int4, scale: {per: token head}}", 8), row)
    assert hexes(held["key_cache"]) == "79 21 20 00"
    assert held["key_scales"].item() == 1.0
    assert values.tolist() == [[-7, 7, 1, 2, 0, 2, 0, 0]]
    held, _ = stored(layout_of("{mode: int4, round: away, scale: {per: token head}}", 8), row)
    assert hexes(held["key_cache"]) == "79 21 21 0F"


def test_half_split() -> None:
    """Elements i and i + 16 of a group of 32 share a byte."""
    row = torch.arange(32).remainder(15).sub(7).float().unsqueeze(0)
    layout = layout_of("{mode: int4, scale: {per: token head dim//32}}", 32, 32, HALF_SPLIT)
    held, values = stored(layout, row)
    codes = row[0].int() & 15
    assert held["key_cache"].flatten().tolist() == (codes[:16] | codes[16:] << 4).tolist()
    assert torch.equal(values, row)


def test_stored_minimum() -> None:
    rows = torch.tensor([[0.0, 15, 7, 7.5], [5, 6, 7, 5], [NAN] * 4, [-INF, INF, 0, NAN], [-0.0] * 4, [1e6] * 4])
    held, values = stored(layout_of("{mode: int4_asymmetric, scale: {per: token head}}", 4, zero=True), rows)
    assert hexes(held["key_cache"][:3]) == "F0 87 80 0F 00 00"
    assert held["key_scales"].flatten().tolist()[2:] == [0, 65504, 0, 0]
    assert held["key_zeros"].flatten().tolist() == [0, 5, 0, -65504, 0, 65504]
    assert not held["key_zeros"][4].view(torch.uint8).any()
    assert hexes(held["key_cache"][3:]) == "F0 01 00 00 00 00"
    assert (values[1] - rows[1]).abs().max() < 0.07
    assert values[4].tolist() == [0] * 4


@pytest.mark.parametrize(("clamped", "first"), [("false", 5.0), ("true", 2.0)])
def test_zero_point(clamped: str, first: float) -> None:
    """Clamped without a range that reaches 0, a row of 5 to 7 decodes to 2."""
    zero = f"zero: {{kind: point, clamped: {clamped}}}"
    layout = layout_of(f"{{mode: int4_asymmetric, {zero}, scale: {{per: token head}}}}", 4, zero=True)
    rows = torch.tensor([[5.0, 6, 7, 5], [-5, 10, 0, NAN], [NAN, 0, 0, 0], [-15, 0, -1, -30]])
    held, values = stored(layout, rows)
    assert held["key_zeros"].dtype == torch.uint8
    assert held["key_zeros"].flatten().tolist() == [0, 5, 0, 15]
    assert abs(values[0, 0].item() - first) < 0.2
    assert hexes(held["key_cache"][1:3]) == "F0 05 00 00"


@pytest.mark.parametrize(
    ("expected", "quant", "group", "zero"),
    [
        (18.61, "{mode: int4, scale: {per: token head}}", 0, False),
        *[
            (db, f"{{mode: int4_asymmetric, scale: {{per: token head dim//{n}}}}}", n, True)
            for n, db in ((64, 20.95), (32, 22.14), (16, 23.74))
        ],
        *[
            (db, f"{{mode: int4_asymmetric, zero: {{kind: point}}, scale: {{per: token head dim//{n}}}}}", n, True)
            for n, db in ((64, 20.81), (32, 21.85), (16, 23.16))
        ],
        (20.44, "{mode: nvfp4}", 16, False),
        (18.76, "{mode: mxfp4}", 32, False),
        (18.80, "{mode: mxfp4, scale: {range: 4, exponent: floor}}", 32, False),
    ],
)
def test_accuracy(expected: float, quant: str, group: int, zero: bool) -> None:
    values = torch.randn(16384, 128, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    _, back = stored(layout_of(quant, 128, group, zero=zero), values)
    exact = values.double()
    found = 10 * (exact.square().sum() / (back.double() - exact).square().sum()).log10()
    assert abs(found.item() - expected) < 0.1


def test_what_is_stored_is_handed_out_as_it_lies() -> None:
    """Bytes of codes in the order of their dims; scales and zeros by group, each token with those that it shares."""
    layout = shipped("nhd_int4_group")
    pool, slots = PoolFactory(layout, "cpu", 0).make(), torch.tensor([33, -1, 65])
    found = reference.gather_codes(layout, pool.actual, slots)
    shapes = {name: (tuple(rows.shape), rows.dtype) for name, rows in found.items()}
    assert shapes == {
        f"{name}{part}": ((3, 8, count), torch.float16 if part else torch.uint8)
        for name, groups in (("key", 128), ("value", 4))
        for part, count in (("", 64), (".scale", groups), (".zero", groups))
    }
    stored = {name: tensor.view(torch.uint8) for name, tensor in pool.actual.items()}
    assert torch.equal(found["key"][2], stored["key_cache"][1, 1])
    assert torch.equal(found["key.scale"][0].view(torch.uint8), stored["key_params"][0, 1, ..., :2].flatten(1))
    assert torch.equal(found["value.zero"][2].view(torch.uint8), stored["value_params"][1, 1, ..., 2:].flatten(1))
    assert not any(rows[1].view(torch.uint8).any() for rows in found.values())
    made = module_of(layout).gather_codes(*pool.actual.values(), slots)
    for mine, theirs in zip(made, found.values(), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_a_stream_whose_tokens_share_a_scale_is_not_appended() -> None:
    layout = shipped("nhd_int4_group")
    pool = PoolFactory(layout, "cpu", 0).make()
    row = torch.ones(1, 8, 128).bfloat16()
    with pytest.raises(ValueError, match="32 tokens share a dynamic scale"):
        reference.append(layout, {"key": row, "value": row}, pool.expected, torch.tensor([0]))
    reference.append(layout, {"value": row}, pool.expected, torch.tensor([0]))
    cache = torch.zeros_like(pool.expected["key_cache"])
    cache[0, 33, 0, 0] = 0xF1
    params = torch.zeros_like(pool.expected["key_params"])
    params[0, 1, 0, :2] = torch.tensor([[2.0, -1.0], [0.5, 3.0]]).half()
    buffers = pool.expected | {"key_cache": cache, "key_params": params}
    rows = reference.gather(layout, buffers, torch.tensor([33, 31]))["key"]
    assert rows[0, 0, :3].tolist() == [1.0, 10.5, 0.0]
    assert not rows[1].any()


@pytest.mark.parametrize(
    ("quant", "group", "zero", "most"),
    [
        ("{mode: int4, scale: {per: token head}}", 0, False, 0.5),
        ("{mode: int4, scale: {per: token head, grid: pow2, dtype: float32}}", 0, False, 0.5),
        ("{mode: int4_asymmetric, scale: {per: token head dim//32}}", 32, True, 0.5),
        ("{mode: int4_asymmetric, zero: {kind: point}, scale: {per: token head dim//32}}", 32, True, 0.5),
        ("{mode: nvfp4}", 16, False, 0.5),
        ("{mode: mxfp4}", 32, False, 0.5),
        ("{mode: mxfp4, scale: {range: 4, exponent: floor}}", 32, False, 1.0),
    ],
)
def test_round_trip_within_a_step_and_stable(quant: str, group: int, zero: bool, most: float) -> None:
    """An error of half a step, or of one where codes saturate; values that were decoded come back as they were."""
    layout = layout_of(quant, 64, group, zero=zero)
    exponents = torch.linspace(0, 8, 300).view(300, 1)
    rows = torch.randn(300, 64, generator=torch.Generator().manual_seed(5)) * 2**exponents
    held, back = stored(layout, rows)
    encoding = layout.stream("key").encoding
    step = load(encoding.scale.dtype, held["key_scales"]).repeat_interleave(group or 64, -1).view_as(rows)
    if encoding.code == "e2m1":
        step = step * 2.0 ** (torch.frexp(rows.abs() / step).exponent - 2).clamp(-1, 1)
    assert ((back - rows).abs() <= most * 1.001 * step).all()
    assert torch.equal(stored(layout, back)[1], back)
