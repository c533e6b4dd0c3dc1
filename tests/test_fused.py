"""Fused appends against chains of plain PyTorch operations, formulas written out by hand, and their bounds."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kvgen import harness, reference_fused
from kvgen.canonical import canonical
from kvgen.emit.render import render_raw
from kvgen.emit.stages import _factors
from kvgen.harness.interpreter import exact_widening
from kvgen.layout import FewHints, KernelHints, Layout, ScheduleHints
from kvgen.resolve import load_text
from kvgen.show import describe, text
from kvgen.stages import Mrope, Rope
from tests.generated import module_of, shipped

HEADS, DIM, BLOCK = 3, 24, 4
PLACES = {
    "apart": "key_cache: {key: block slot head dim}, value_cache: {value: block slot head dim}",
    "rows": "cache: {order: block head slot, fields: [key, value]}",
    "minor": "key_cache: {key: block head dim//8 slot dim%8}, value_cache: {value: block head dim slot}",
}
FP8 = "{key: {quant: {mode: fp8_e4m3, scale: {per: [], source: static}}}, value: key}"


def layout_of(
    fuse: str, streams: str = "{key: {}, value: {}}", place: str = "apart", rest: str = "", dim: int = DIM
) -> Layout:
    head = f"name: fused\naxes: {{head: {HEADS}, dim: {dim}}}\nblock_size: {BLOCK}\nstreams: {streams}\n"
    return load_text(f"{head}buffers: {{{PLACES[place]}}}\nfuse: {{{fuse}}}\n{rest}")


@cache
def built(layout: Layout) -> ModuleType:
    return module_of(layout)


def call(layout: Layout, *args: Tensor, function: str = "append_fused") -> None:
    with exact_widening("cpu"):
        getattr(built(layout), function)(*args)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-3, 4, (shape[0], *[1] * (len(shape) - 1)), generator=generator)
    return (torch.randn(shape, generator=generator) * 2.0**powers).to(dtype)


def table(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    angle = torch.arange(rows)[:, None] * 1e4 ** (-torch.arange(width // 2) / (width // 2))
    return torch.cat([angle.cos(), angle.sin()], dim=1).to(dtype)


# A chain of separate operations, as an engine calls them: nothing of kvgen is in it.


def unfused_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    wide = x.double()
    inverse = (1 / torch.sqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + eps)).float()
    return (x.float() * inverse * (1 + weight.float() if plus_one else weight.float())).to(x.dtype)


def unfused_rope(x: Tensor, positions: Tensor, cos_sin: Tensor, width: int, interleaved: bool) -> Tensor:
    cos, sin = cos_sin[positions].float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., :width].float(), x[..., width:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        result = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        result = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([result.to(x.dtype), rest], dim=-1)


def unfused_fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


CHAINS = [
    ("key: [rms_norm, rope]", "bfloat16", "apart"),
    ("key: [{rms_norm: {weight: plus_one, eps: 1.0e-5}}, {rope: {rotary_dim: 16}}]", "float16", "rows"),
    ("key: [{rope: {rotary_dim: 16, style: interleaved}}, rms_norm]", "bfloat16", "minor"),
    ("key: [rms_norm, {rope: {style: interleaved}}]", "float32", "apart"),
]


@pytest.mark.parametrize("dim", [DIM, 16])
@pytest.mark.parametrize("coded", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize(("fuse", "dtype", "place"), CHAINS)
def test_chain_is_norm_rope_and_append_one_after_the_other(
    fuse: str, dtype: str, place: str, coded: bool, dim: int
) -> None:
    """Byte for byte; and without the roundings in between some bytes are others. Of rows of 16 values all turn."""
    coding = ", quant: {mode: fp8_e4m3, scale: {per: [], source: static}}" if coded else ""
    streams = f"{{key: {{dtype: {dtype}{coding}}}, value: {{dtype: {dtype}}}}}"
    kind, count = getattr(torch, dtype), 9
    key, value = numbers(count, HEADS, dim, dtype=kind), numbers(count, HEADS, dim, dtype=kind, seed=1)
    weight, positions = numbers(dim, dtype=kind, seed=2), torch.arange(count) * 5
    width = 16 if "16" in fuse else dim
    cos_sin, scale = table(50, width), torch.tensor([0.03])
    norm = lambda x: unfused_norm(x, weight, 1e-5 if "1.0e-5" in fuse else 1e-6, "plus_one" in fuse)  # noqa: E731
    rope = lambda x: unfused_rope(x, positions, cos_sin, width, "interleaved" in fuse)  # noqa: E731
    wanted = rope(norm(key)) if fuse.index("rms_norm") < fuse.index("rope") else norm(rope(key))
    wanted = unfused_fp8(wanted, scale) if coded else wanted
    slots = torch.randperm(5 * BLOCK, generator=torch.Generator().manual_seed(3))[:count]
    seen = {}
    for rounding in ("chain", "once"):
        layout = layout_of(f"{fuse}, rounding: {rounding}", streams, place, dim=dim)
        buffers = built(layout).allocate(5)
        buffers = buffers if isinstance(buffers, tuple) else (buffers,)
        call(layout, key, value, *buffers, slots, positions, weight, cos_sin, *([scale] if coded else []))
        held = dict(zip((b.name for b in layout.buffers), buffers, strict=True))
        rows = reference_fused.reference.leaf_views(layout, held)["key"]
        seen[rounding] = rows.tensor[rows.at(slots, BLOCK)].reshape(count, -1)
    assert torch.equal(seen["chain"], wanted.contiguous().view(torch.uint8).reshape(count, -1))
    if dtype != "float16" or not coded:  # hardly a code of 8 bits tells what was lost of 11
        assert torch.equal(seen["chain"], seen["once"]) == (dtype == "float32")


def test_chain_and_once_differ_in_some_codes() -> None:
    """Near one in twenty-five: that is what the rounding in between does to 8-bit codes."""
    count = 200
    key, weight = numbers(count, HEADS, DIM), torch.ones(DIM)
    slots, positions = torch.arange(count), torch.arange(count) % 64
    found = []
    for rounding in ("chain", "once"):
        layout = layout_of(f"key: [rms_norm, rope], rounding: {rounding}", FP8)
        cache = torch.zeros(50, BLOCK, HEADS, DIM, dtype=torch.uint8)
        caches = {"key_cache": cache, "value_cache": torch.zeros_like(cache)}
        sources = {"key": key, "value": key}
        options = {"weights": {"key": weight}, "tables": {"cos_sin": table(64, DIM)}}
        scales = {"key_scale": torch.tensor([0.02]), "value_scale": torch.tensor([0.02])}
        reference_fused.append_fused(layout, sources, caches, slots, positions, **options, scales=scales)
        found.append(cache)
    assert 0.02 < (found[0] != found[1]).double().mean() < 0.06


@pytest.mark.parametrize("rest", ["", "schedule: {append: {tokens: 4, heads: 1}}", "schedule: {append: {tokens: 1}}"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("dim", "style"), [(DIM, "neox"), (16, "neox"), (16, "interleaved")])
def test_every_schedule_gives_the_same_bytes(dim: int, style: str, place: str, rest: str) -> None:
    count = 6
    fuse = f"key: [rms_norm, {{rope: {{rotary_dim: 16, style: {style}}}}}], query: {{heads: 5, stages: key}}"
    layout = layout_of(fuse, place=place, rest=rest, dim=dim)
    query, key, value = numbers(count, 5, dim), numbers(count, HEADS, dim, seed=1), numbers(count, HEADS, dim, seed=2)
    weight, slots = numbers(dim, seed=3), torch.tensor([3, 9, -1, 0, 19, 7])
    out, positions = torch.zeros_like(query), torch.arange(count)
    made = built(layout).allocate(5)
    made = made if isinstance(made, tuple) else (made,)
    call(layout, query, key, value, out, *made, slots, positions, weight, weight, table(8, 16))
    mine = {name: torch.zeros_like(tensor) for name, tensor in zip([b.name for b in layout.buffers], made, strict=True)}
    sources, other = {"query": query, "key": key, "value": value}, torch.zeros_like(query)
    options = {"weights": {"key": weight, "query": weight}, "tables": {"cos_sin": table(8, 16)}}
    reference_fused.append_fused(layout, sources, mine, slots, positions, **options, query_out=other)
    assert torch.equal(out, other)
    assert all(torch.equal(a, b) for a, b in zip(made, mine.values(), strict=True))
    assert out.abs().amax((1, 2)).min() > 0, "the query of a skipped token is worked on too"


def turned_by(layout: Layout, positions: Tensor, width: int = DIM) -> Tensor:
    """Which position each pair of one token took: cosines are the positions, sines zero, and K is one."""
    rows = 7
    cos_sin = torch.cat([torch.arange(rows).float()[:, None].expand(-1, width // 2), torch.zeros(rows, width // 2)], 1)
    key = torch.ones(1, HEADS, width, dtype=torch.bfloat16)
    buffers = built(layout).allocate(1)
    call(layout, key, key, *buffers, torch.tensor([0]), positions, cos_sin.contiguous())
    return buffers[0][0, 0, 0, : width // 2].long()


@pytest.mark.parametrize(
    ("assign", "sections", "expected"),
    [
        ("sections", (6, 4, 2), "tttttthhhhww"),
        ("interleaved", (7, 4, 1), "thwthtthttht"),
        ("modulo", (6, 4, 2), "thwthwthwthw"),
        ("sections", (24, 20, 20), "t" * 24 + "h" * 20 + "w" * 20),
        ("interleaved", (24, 20, 20), "thw" * 20 + "tttt"),
        ("modulo", (24, 20, 20), "thw" * 21 + "t"),
    ],
)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_three_positions(assign: str, sections: tuple[int, int, int], expected: str, integers: torch.dtype) -> None:
    dim = 2 * sum(sections)
    layout = layout_of(f"key: [rope], positions: {{mrope: {list(sections)}, assign: {assign}}}", dim=dim)
    taken = turned_by(layout, torch.tensor([[1], [2], [5]], dtype=integers), dim)
    assert "".join({1: "t", 2: "h", 5: "w"}[int(p)] for p in taken) == expected
    alike = turned_by(layout, torch.tensor([[4], [4], [4]]), dim)
    assert torch.equal(alike, turned_by(layout, torch.tensor([4]), dim))
    assert torch.equal(alike, turned_by(layout_of("key: [rope]", dim=dim), torch.tensor([4]), dim))


def test_interleaved_and_modulo_differ_past_a_section() -> None:
    """Of 24, 20 and 20 pairs, in those that would be height and width from 60 on."""
    pair = torch.arange(64)
    by = {a: reference_fused.assigned(Mrope((24, 20, 20), a), pair) for a in ("sections", "interleaved", "modulo")}
    assert (by["interleaved"] != by["modulo"]).nonzero().flatten().tolist() == [61, 62]
    assert by["interleaved"][60:].tolist() == [0, 0, 0, 0]
    assert by["modulo"][60:].tolist() == [0, 1, 2, 0]
    assert by["sections"].tolist() == [0] * 24 + [1] * 20 + [2] * 20


@pytest.mark.parametrize("where", ["first", "last"])
def test_what_is_not_turned_is_copied(where: str) -> None:
    layout = layout_of(f"key: [{{rope: {{rotary_dim: 10, rotary: {where}}}}}]")
    key = numbers(5, HEADS, DIM)
    caches = built(layout).allocate(2)
    call(layout, key, key, *caches, torch.arange(5), torch.arange(1, 6), table(8, 10))
    rows = caches[0].flatten(0, 1)[:5]
    copied = slice(10, None) if where == "first" else slice(None, DIM - 10)
    turned = slice(None, 10) if where == "first" else slice(DIM - 10, None)
    assert torch.equal(rows[..., copied], key[..., copied])
    assert (rows[..., turned] != key[..., turned]).double().mean() > 0.8
    assert torch.equal(caches[1].flatten(0, 1)[:5], key)


@pytest.mark.parametrize(("theta", "width"), [(1e4, 64), (5e5, 128), (1e6, 128), (1.5e5, 96), (25e6, 256)])
def test_frequencies_are_the_float32_of_the_power(theta: float, width: int) -> None:
    """Made of a factor for each bit of the pair's number, as kernels do."""
    rope = Rope("neox", width, 0, "theta", theta)
    pair, made = torch.arange(rope.pairs), torch.ones(rope.pairs, dtype=torch.float64)
    for factor in _factors(rope):
        made = torch.where(pair & factor.bit != 0, made * float(factor.value), made)
    wanted = torch.tensor([theta ** (-2.0 * i / width) for i in range(rope.pairs)], dtype=torch.float64)
    assert torch.equal(made.float(), wanted.float())
    assert ((made - wanted).abs() / wanted).max() < 2**-49


def test_computed_angles_are_within_their_bound() -> None:
    layout = layout_of("key: [{rope: {cos_sin: {theta: 1.0e4}}}]", "{key: {dtype: float32}, value: {dtype: float32}}")
    count = 40
    key, positions = numbers(count, HEADS, DIM, dtype=torch.float32), torch.randint(0, 200_000, (count,))
    caches = built(layout).allocate(10)
    call(layout, key, key, *caches, torch.arange(count), positions)
    frequency = torch.tensor([1e4 ** (-2.0 * i / DIM) for i in range(DIM // 2)], dtype=torch.float64).float()
    angle = (positions.float()[:, None, None] * frequency).double()
    a, b = key.double().chunk(2, dim=-1)
    exact = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)
    bound = (a.abs() + b.abs()).repeat(1, 1, 2) * 2**-21
    error = (caches[0].flatten(0, 1).double() - exact).abs()
    assert (error <= bound).all()
    assert error.max() > 0


@pytest.mark.parametrize(("kind", "bound"), [("float64", 4 * 2.0**-24), ("float32", (DIM + 16) * 2.0**-24)])
def test_norms_are_within_their_bound(kind: str, bound: float) -> None:
    """Three float32 roundings of the exact value, and those of a sum in float32."""
    streams = "{key: {dtype: float32}, value: {dtype: float32}}"
    layout = layout_of(f"key: [{{rms_norm: {{eps: 1.0e-6}}}}], norm: {{sum: {kind}}}", streams)
    key, weight = numbers(60, HEADS, DIM, dtype=torch.float32), numbers(DIM, dtype=torch.float32, seed=1)
    caches = built(layout).allocate(15)
    call(layout, key, key, *caches, torch.arange(60), weight)
    exact = key.double() / torch.sqrt(key.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    error = (caches[0].flatten(0, 1).double() - exact).abs() / exact.abs()
    assert error.max() <= bound


def test_sums_of_16_bit_squares_do_not_depend_on_their_order() -> None:
    """In float64, where magnitudes of a row are within 2¹⁵ (bfloat16) or 2¹² (float16) of each other."""
    generator = torch.Generator().manual_seed(0)
    for dtype, spread in ((torch.bfloat16, 15), (torch.float16, 12)):
        powers = torch.randint(0, spread, (2000, 128), generator=generator)
        rows = ((1 + torch.rand(2000, 128, generator=generator)) * 2.0**-powers).to(dtype).double().square()
        orders = [torch.randperm(128, generator=generator) for _ in range(3)]
        sums = [torch.stack([rows[:, i] for i in order]).cumsum(0)[-1] for order in orders]
        assert all(torch.equal(sums[0], other) for other in sums[1:])


def test_squares_are_added_where_threads_have_neighbours() -> None:
    """Where threads have a value each, or none, neighbours would have to be moved to one first."""
    assert "tl.sum(_squares(key, key_partner, (8, 32, 2))" in render_raw(shipped("nhd_fp8_fused_once"))
    small = layout_of("key: [rms_norm, rope]", FP8, dim=32)
    assert "tl.fma(key_wide, key_wide, key_partner_wide * key_partner_wide)" in render_raw(small)


@pytest.mark.parametrize("name", ["nhd_fp8_fused_once", "nhd_fp8_fused_chain"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_tokens_as_if_they_were_many(name: str, device: str) -> None:
    """Kernels of many tokens have a way of their own, and no case has so many."""
    few = ScheduleHints(append=KernelHints(few=FewHints(1, None, 4)))
    layout = dataclasses.replace(shipped(name), schedule=few)
    assert "num_tokens > 1," in render_raw(layout)
    report = harness.run(layout, module_of(layout), device=device, only="append_fused")
    assert report.ok, str(report)


def test_values_of_a_chain_are_short_when_they_are_divided() -> None:
    for rounding, kind in (("once", "tl.float32"), ("chain", "key_ptr.dtype.element_ty")):
        text = render_raw(layout_of(f"key: [rms_norm, rope], rounding: {rounding}", FP8))
        assert f"key = _over_one(key, scale, {kind})" in text
        assert "value = _over_one(value, scale, value_ptr.dtype.element_ty)" in text


def test_messages_at_launch_name_what_does_not_fit() -> None:
    layout = layout_of("key: [rms_norm, rope], query: {heads: 2, stages: key}")
    key, query = numbers(2, HEADS, DIM), numbers(2, 2, DIM)
    weight, cos_sin, positions = torch.ones(DIM), table(8, DIM), torch.zeros(2, dtype=torch.int64)
    caches = built(layout).allocate(1)
    right = [query, key, key, query, *caches, torch.tensor([0, 1]), positions, weight, weight, cos_sin]
    wrong = {
        7: (positions[None], ValueError, r"positions: expected 1 dimensions, got shape \(1, 2\)"),
        8: (None, TypeError, "key_weight: expected a tensor, got NoneType"),
        9: (weight[1:], ValueError, "query_weight: expected length 24, got 23"),
        10: (cos_sin[:, :12], ValueError, r"cos_sin: expected shape \(8, 24\), got \(8, 12\)"),
        3: (query.half(), TypeError, "query_out: expected dtype torch.bfloat16, got torch.float16"),
    }
    for place, (value, error, message) in wrong.items():
        args = list(right)
        args[place] = value
        with pytest.raises(error, match=message):
            call(layout, *args)
    call(layout, *right)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'cos_sin'"):
        call(layout, *right[:-1])


TEXTS = [
    "key: [rms_norm, rope]",
    "key: [{rms_norm: {eps: 0.001, weight: none}}], value: [{rms_norm: {weight: plus_one}}], norm: {sum: float32}",
    "key: [{rope: {style: interleaved, rotary_dim: 8, rotary: last, cos_sin: split}}], rounding: chain",
    "key: [{rope: {cos_sin: {theta: 1.0e6}}}], query: {heads: 2, stages: [rms_norm]}",
    "key: [rope], input: packed_qkv, query: {heads: 5}, positions: {mrope: [6, 4, 2], assign: modulo}",
    "value: [rope], input: packed_qkv, query: {heads: 5, stages: value}, positions: {mrope: [6, 4, 2]}",
]


@pytest.mark.parametrize("fuse", TEXTS)
def test_the_canonical_form_reads_back(fuse: str) -> None:
    layout = layout_of(fuse)
    again = load_text(canonical(layout))
    assert again == layout
    assert canonical(again) == canonical(layout)
    assert describe(layout)["fuse"].keys() == built(layout).LAYOUT["fuse"].keys()
    assert "fused      key: r" in text(layout) or "fused      value: rope" in text(layout)


# What the harness runs on layouts that are not shipped: other placements, encodings and stages.

SAMPLES = {
    "three_streams": (
        "axes: {dim: 16}\nblock_size: 4\n"
        "streams: {latent: {quant: {mode: int8, scale: {per: token}}}, rope: {dim: 8}}\n"
        "buffers: {cache: {order: block slot, fields: [latent, latent.scale, rope]}}\n"
        "fuse: {latent: [rms_norm], rope: [{rope: {cos_sin: split}}], query: {heads: 3, stages: rope}}"
    ),
    "groups": (
        "axes: {head: 2, dim: 32}\nblock_size: 4\n"
        "streams: {key: {quant: {mode: nvfp4}}, value: {quant: {mode: int4, scale: {per: token head dim//16}}}}\n"
        "buffers: {cache: {order: block slot head, fields: [key, key.scale, value, value.scale]}}\n"
        "fuse: {key: [rms_norm, {rope: {rotary_dim: 16, rotary: last}}], value: [{rms_norm: {weight: none}}]}"
    ),
    "layers": (
        "axes: {head: dynamic, dim: 12, layer: 3}\nblock_size: dynamic\n"
        "buffers: {cache: {holds: [key, value], order: block layer kv slot head dim}}\n"
        "fuse: {key: [{rope: {style: interleaved}}], rounding: chain}\nslots: {remap: window_slots, skip: 5}"
    ),
    "sizes": (
        "axes: {head: 2, dim: 16}\nblock_size: 4\n"
        "streams:\n  key: {dtype: [float32, bfloat16, float16], quant: {mode: fp8_e4m3, scale: {per: token head}}}\n"
        "  value: {dtype: float32, store: bfloat16}\n"
        "buffers: {cache: {order: block slot head, fields: [key, key.scale, value]}}\n"
        "fuse: {key: [rms_norm, rope], query: {heads: 3, stages: key}, rounding: chain}"
    ),
    "computed": (
        "axes: {head: 2, dim: 16}\nblock_size: 4\n"
        "buffers: {key_cache: {key: block head dim slot}, value_cache: {value: block slot head dim}}\n"
        "fuse:\n  key: [rms_norm, {rope: {cos_sin: {theta: 100.0}}}]\n"
        "  norm: {sum: float32}\n  query: {heads: 2, stages: key}"
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_harness_passes(name: str) -> None:
    layout = load_text(f"name: {name}\n{SAMPLES[name]}\n")
    wanted = [case.name for case in harness.cases(layout) if case.function.startswith("append_fused")]
    report = harness.run(layout, module_of(layout), only=wanted)
    assert report.ok, str(report)
    assert report.count("passed") == len(wanted) > 25


def test_bounds_that_are_left_are_noticed() -> None:
    """A layout whose bytes are not the same everywhere is held to what its values may be off by."""
    layout = load_text(f"name: computed\n{SAMPLES['computed']}\n")
    module = module_of(layout)

    class Off:
        def append_fused(self, query: Tensor, key: Tensor, *rest: Tensor) -> None:
            module.append_fused(query, (key.float() * 1.02).to(key.dtype), *rest)

    class OffInTheQuery:
        def append_fused(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *rest: Tensor) -> None:
            module.append_fused(query, key, value, out, *rest)
            out[: len(rest[2])] *= math.sqrt(1.1)

    # A norm undoes a factor, but for eps: it is the rotated, not normed values that are off.
    for wrong in (Off(), OffInTheQuery()):
        report = harness.run(layout, wrong, only=["append_fused/T7", "append_fused/edges"])
        assert report.failures, str(report)
