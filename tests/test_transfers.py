"""Transfers: what the harness finds, what is moved and what keeps its bytes, and what a call refuses."""

from __future__ import annotations

import inspect
import os
import re
from types import SimpleNamespace

import pytest
import torch

from kvgen import harness, runtime
from kvgen.axes import Axis
from kvgen.canonical import canonical
from kvgen.descriptors import shards
from kvgen.documents import load_text
from kvgen.emit import render_layout
from kvgen.harness.pools import Sizes, tensor_shape
from kvgen.lower_transfer import lower_transfer
from kvgen.schedule_transfer import Program, schedule_transfer
from kvgen.transfer import Transfer, token_refusal
from tests import pairs
from tests.generated import ROOT, TRANSFERS, module_of, transfer

SMALL = "axes: {head: 2, dim: 16}, block_size: 4"


def made(source: str, destination: str, rest: str = "") -> Transfer:
    text = f"name: made\ntransfer:\n  from: {source}\n  to: {destination}\n{rest}\n"
    return load_text(text, str(ROOT / "layouts" / "transfers" / "made.yaml"))


def assert_passes(what: Transfer, *only: str) -> None:
    report = harness.run(what, module_of(what), only=only or None)
    assert report.ok, str(report)
    assert report.count("passed") >= len(only)


@pytest.mark.parametrize(
    ("source", "destination", "rest"),
    [
        (f"{{layout: paged_nhd, {SMALL}}}", f"{{layout: paged_hnd, {SMALL}}}", ""),
        (f"{{layout: paged_x_vector, {SMALL}}}", f"{{layout: packed_nhd, {SMALL}}}", "layers: all"),
        (f"{{layout: stacked_nhd, {SMALL}}}", f"{{layout: cross_layer_hnd, {SMALL}}}", "layers: all"),
        (f"{{layout: flat_slots, {SMALL}}}", "{layout: swa_nhd, axes: {head: 3, dim: 16}, block_size: 6}", ""),
    ],
    ids=["nhd_to_hnd", "x_vector_to_packed", "stacked_to_cross_layer", "three_heads_of_six"],
)
def test_every_case(source: str, destination: str, rest: str) -> None:
    assert_passes(made(source, destination, rest))


def test_a_buffer_that_is_not_read_is_a_list_as_others_are() -> None:
    """Latent and rope lie in two pools, and are read in the first."""
    what = made("{layout: mla_assembled, block_size: 4}", "{layout: mla, block_size: 6}", "layers: all")
    assert_passes(what, "transfer/T7", "transfer/tables", "transfer_blocks/one")


def test_the_only_layer_of_a_side_has_an_index_as_others_have() -> None:
    one = SMALL.replace("16", "16, layer: 1")
    what = made(f"{{layout: cross_layer_nhd, {one}}}", f"{{layout: paged_hnd, {SMALL}}}")
    assert_passes(what, "transfer/T7", "transfer/edge_layers", "transfer_blocks/one")
    pool, key, value = torch.ones(1, 1, 4, 2, 32), *torch.zeros(2, 1, 2, 4, 16)
    given = [tensor.bfloat16() for tensor in (pool, key, value)]
    with pytest.raises(ValueError, match=r"src_layer: expected 0 to 1 \(exclusive\), got 1"):
        module_of(what).transfer(*given, torch.tensor([0]), torch.tensor([0]), src_layer=1)


def test_memory_of_another_gpu_is_refused_as_such() -> None:
    check, first = module_of(transfer("nhd_to_hnd"))._check_reach, torch.device("cuda:0")
    expected = "src_key_cache: expected device cuda:0 or pinned host memory, got cuda:1, another GPU, whose memory"
    with pytest.raises(ValueError, match=expected):
        check("src_key_cache", SimpleNamespace(device=torch.device("cuda:1")), first)
    with pytest.raises(ValueError, match=r"got unpinned memory of cpu$"):
        check("src_key_cache", torch.zeros(1), first)


def test_padding_between_dims_is_filled() -> None:
    buffers = "{c: {order: (block dim) slot head, fields: [key, {pad: 3}, value, {pad: 4, fill: 90}]}}"
    sizes = "axes: {head: 3, dim: 6}, block_size: 4"
    what = made(f"{{layout: paged_nhd, {sizes}}}", f"{{layout: packed_nhd, {sizes}, buffers: {buffers}}}")
    assert_passes(what, "transfer/T7", "transfer/heads")


def test_padding_of_heads_that_are_not_moved_keeps_its_bytes() -> None:
    buffers = "{c: {order: block head slot, fields: [key, {pad: 6, fill: 7}, value]}}"
    target = f"{{layout: packed_nhd, axes: {{head: 5, dim: 16}}, block_size: 4, buffers: {buffers}}}"
    what = made("{layout: paged_nhd, axes: {head: 4, dim: 16}, block_size: 4}", target)
    assert_passes(what, "transfer/heads", "transfer_blocks/one")


@pytest.mark.parametrize("name", TRANSFERS)
def test_shipped_transfer(name: str) -> None:
    what = transfer(name)
    assert_passes(what, *([] if token_refusal(what) else ["transfer/T1"]), "transfer_blocks/one")


SAMPLE = pairs.compatible()[int(os.environ.get("KVGEN_PAIRS", "0")) :: 150]
"""KVGEN_PAIRS=N starts the sample at the N-th pair; ``python -m tests.pairs`` runs them all."""

NARROW = [("nhd_bf16k_turbo2v", "nhd_int4"), ("packed_nvfp4", "nhd_nvfp4"), ("nhd_int4", "nhd_int4_group")]
NARROW += [("nhd_int4_planes", "nhd_fp8_token_head"), ("nhd_int4_planes", "nhd_int4_group")]
"""Codes of other widths on each side, and of one width; groups of dims into channels of their own; planes of bits."""


@pytest.mark.parametrize("pair", [*SAMPLE, *NARROW], ids="-".join)
def test_pairs_of_shipped_layouts(pair: tuple[str, str]) -> None:
    report = pairs.report(*pair)
    assert report.ok, str(report)


def test_codes_of_one_encoding_are_put_together_anew() -> None:
    axes = "axes: {head: 3, dim: 32}, block_size: 4"
    split = "order: block slot head dim%16 dim//16"
    buffers = f"{{key_cache: {{holds: key, {split}}}, value_cache: {{holds: value, {split}}}"
    buffers += ", key_scales: {holds: key.scale, order: block slot head dim//32}"
    buffers += ", value_scales: {holds: value.scale, order: block slot head dim//32}}"
    what = made(f"{{layout: nhd_int4, {axes}}}", f"{{layout: nhd_int4, {axes}, buffers: {buffers}}}")
    assert what.raw("key")
    assert_passes(what, "transfer/T7", "transfer_blocks/one")


@pytest.mark.parametrize("size", ["axes: {dim: dynamic}", "axes: {head: dynamic}", "block_size: dynamic"])
def test_sizes_that_the_launch_decides(size: str) -> None:
    both = made(f"{{layout: paged_nhd, {size}}}", f"{{layout: paged_hnd, {size}}}")
    assert_passes(both, "transfer/T7", "transfer_blocks/one")


def test_a_size_of_both_sides_must_be_one() -> None:
    module = module_of(made("{layout: paged_nhd, axes: {dim: dynamic}}", "{layout: paged_hnd, axes: {dim: dynamic}}"))
    source = [torch.zeros(2, 16, 8, 64, dtype=torch.bfloat16) for _ in range(2)]
    destination = [torch.zeros(2, 8, 16, 32, dtype=torch.bfloat16) for _ in range(2)]
    slots = torch.arange(4)
    with pytest.raises(ValueError, match=r"dst_key_cache: expected shape \(2, 8, 16, 64\), got \(2, 8, 16, 32\)"):
        module.transfer(*source, *destination, slots, slots)


ROWS = {
    92: "streams: {key: {head: none, dim: 46}, value: key}",
    132: "streams: {key: {head: none, dim: 66}, value: key}",
    528: "streams: {key: {head: none, dim: 528, dtype: int8}, value: key}",
    1536: "streams: {key: {head: none, dim: 768}, value: key}",
}


@pytest.mark.parametrize("size", ROWS)
def test_rows_of_any_size_end_where_they_end(size: int) -> None:
    """Both neighbours of a row, and of the pool's first and last, keep their bytes."""
    buffers = "buffers: {pool: {order: block slot, fields: [key, value]}}"
    side = f"{{layout: paged_nhd, {ROWS[size]}, {buffers}, block_size: 2, axes: {{head: 1}}}}"
    what = made(side, side)
    module = module_of(what)
    source, destination = (torch.randint(0, 256, (2, 2, 2 * size), dtype=torch.uint8) for _ in range(2))
    wanted = destination.clone()
    wanted[0, 0], wanted[1, 1] = source[1, 1], source[0, 0]
    kind = torch.int8 if size == 528 else torch.bfloat16
    pools = [tensor.view(kind) for tensor in (source, destination)]
    module.transfer(*pools, torch.tensor([3, 0]), torch.tensor([0, 3]))
    assert torch.equal(destination, wanted)


def test_nothing_is_told_from_sizes() -> None:
    """Two heads, two tokens a block, two layers, two blocks, and two values a head."""
    two = "axes: {head: 2, dim: 2, layer: 2}, block_size: 2"
    source = (
        f"{{layout: paged_nhd, {two}, buffers: {{pool: {{holds: [key, value], order: block kv layer slot head dim}}}}}}"
    )
    target = (
        f"{{layout: paged_nhd, {two}, buffers: {{pool: {{holds: [value, key], order: dim layer head block slot kv}}}}}}"
    )
    what = made(source, target, "layers: all")
    pool = torch.arange(64, dtype=torch.int16).view(torch.bfloat16).view(2, 2, 2, 2, 2, 2)
    found = torch.zeros(2, 2, 2, 2, 2, 2, dtype=torch.bfloat16)
    module_of(what).transfer_blocks(pool, found, torch.tensor([0, 1]), torch.tensor([1, 0]))
    wanted = pool.view(torch.int16).permute(5, 2, 4, 0, 3, 1).flip(3).flip(5)
    assert torch.equal(found.view(torch.int16), wanted)


@pytest.mark.parametrize(("there", "back"), [("packed_hnd", "paged_x_vector"), ("nhd_nvfp4", "packed_nvfp4")])
def test_there_and_back_is_the_identity(there: str, back: str) -> None:
    """Of equal encodings the bytes come back as they were."""
    sides = [f"{{layout: {name}, axes: {{head: 2, dim: 32}}, block_size: 4}}" for name in (there, back)]
    modules = [module_of(made(*sides)), module_of(made(*sides[::-1]))]
    first, second = made(*sides).sides
    start, middle, end = buffers_of(first), buffers_of(second), buffers_of(first)
    slots = torch.arange(12)
    modules[0].transfer(*start, *middle, slots, slots.flip(0))
    modules[1].transfer(*middle, *end, slots.flip(0), slots)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(start, end, strict=True))


def buffers_of(layout) -> list[torch.Tensor]:
    """Three blocks of random bytes in every buffer."""
    sizes = Sizes(3, layout.block_size, 1, {})
    made = []
    for buffer in layout.buffers:
        shape = tensor_shape(layout, buffer, sizes)
        whole = torch.randint(0, 256, (*shape[:-1], shape[-1] * buffer.unit), dtype=torch.uint8)
        made.append(whole.view(getattr(torch, buffer.dtypes[0])))
    return made


def test_heads_of_two_ranks_and_back() -> None:
    """Eight heads to two pools of four, and together again; other heads keep their bytes."""
    eight, four = (f"{{layout: paged_nhd, axes: {{head: {n}, dim: 16}}, block_size: 4}}" for n in (8, 4))
    apart, together = module_of(made(eight, four)), module_of(made(four, eight))
    whole = [torch.randn(3, 4, 8, 16).bfloat16() for _ in range(2)]
    slots = torch.arange(12)
    again = [torch.full((3, 4, 8, 16), 7.0).bfloat16() for _ in range(2)]
    for rank in range(2):
        part = [torch.zeros(3, 4, 4, 16).bfloat16() for _ in range(2)]
        apart.transfer(*whole, *part, slots, slots, src_head=4 * rank, dst_head=0, heads=4)
        for cache, held in zip(whole, part, strict=True):
            assert torch.equal(held, cache[:, :, 4 * rank : 4 * rank + 4])
        together.transfer(*part, *again, slots, slots.flip(0), src_head=1, dst_head=4 * rank + 1, heads=3)
    for cache, held in zip(whole, again, strict=True):
        moved = cache.view(12, 8, 16).flip(0).view(3, 4, 8, 16).clone()
        moved[:, :, ::4] = 7
        assert torch.equal(held, moved)


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(2, 4), (4, 2), (1, 4)])
def test_heads_that_several_ranks_hold(src_tp: int, dst_tp: int) -> None:
    """Two heads of a model, on more ranks than there are heads: each holds one, and two ranks hold the same."""
    sides = [max(1, 2 // tp) for tp in (src_tp, dst_tp)]
    module = module_of(
        made(
            f"{{layout: paged_nhd, axes: {{head: {sides[0]}, dim: 16}}, block_size: 4}}",
            f"{{layout: paged_hnd, axes: {{head: {sides[1]}, dim: 16}}, block_size: 8}}",
        )
    )
    model = [torch.randn(4, 4, 2, 16).bfloat16() for _ in range(2)]
    held = [heads_of(rank, src_tp) for rank in range(src_tp)]
    source = [[cache[:, :, first : first + sides[0]].clone() for cache in model] for first in held]
    ranks = [[torch.full((2, sides[1], 8, 16), 7.0).bfloat16() for _ in range(2)] for _ in range(dst_tp)]
    for move in shards(2, src_tp, dst_tp):
        ends = *source[move.source_rank], *ranks[move.destination_rank]
        heads = {"src_head": move.source, "dst_head": move.destination, "heads": move.count}
        module.transfer_blocks(*ends, torch.tensor([2, 0]), torch.tensor([1]), **heads)
    for rank, pools in enumerate(ranks):
        first = heads_of(rank, dst_tp)
        for cache, pool in zip(model, pools, strict=True):
            wanted = cache[[2, 0]].reshape(8, 2, 16)[:, first : first + sides[1]].transpose(0, 1)
            assert torch.equal(pool[1], wanted)
            assert bool((pool[0] == 7).all())


def heads_of(rank: int, ranks: int) -> int:
    """The first of two heads that a rank holds."""
    return rank * 2 // ranks


def test_heads_that_are_not_named_keep_their_bytes() -> None:
    """Codes and scales of one head into a record that others share with it."""
    one, three = (f"{{layout: packed_fp8_token_head, axes: {{head: {n}, dim: 16}}, block_size: 4}}" for n in (1, 3))
    source, destination = (torch.randint(0, 256, (2, 4, n, 40), dtype=torch.uint8) for n in (1, 3))
    wanted = destination.clone()
    wanted[1, :, 2] = source[0, :, 0]
    blocks = torch.tensor([0]), torch.tensor([1])
    module_of(made(one, three)).transfer_blocks(source, destination, *blocks, src_head=0, dst_head=2, heads=1)
    assert torch.equal(destination, wanted)


def test_one_scale_for_both_sides_is_no_argument() -> None:
    """The codes of equal static scales are moved; what is requantised takes a scale for each side."""
    side = f"{{layout: nhd_fp8_tensor, {SMALL}}}"
    assert scales_of(made(side, side)) == []
    four = ["src_key_scale", "src_value_scale", "dst_key_scale", "dst_value_scale"]
    assert scales_of(made(side, side, "convert: requantise")) == four


def scales_of(what: Transfer) -> list[str]:
    parameters = inspect.signature(module_of(what).transfer).parameters
    return [name for name in parameters if "scale" in name]


@pytest.fixture(scope="module")
def hnd():
    what = made(f"{{layout: paged_nhd, {SMALL}}}", f"{{layout: paged_hnd, {SMALL}}}", "layers: all")
    return runtime.import_module("hnd", render_layout(what))


def pools(dtype: torch.dtype = torch.bfloat16) -> list[list[torch.Tensor]]:
    nhd, head_first = (torch.zeros(2, 3, 4, 2, 16, dtype=dtype), torch.zeros(2, 3, 2, 4, 16, dtype=dtype))
    return [list(nhd), list(nhd.clone()), list(head_first), list(head_first.clone())]


SLOTS = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({0: None}, TypeError, "src_key_cache: expected a list of tensors, one a layer"),
        ({0: []}, ValueError, "src_key_cache: expected a tensor for each layer, got none"),
        ({1: pools()[1][:1]}, ValueError, "layers: expected one number on both sides, got 2 and 1 and 2 and 2"),
        ({2: pools(torch.float16)[2]}, TypeError, "dst_key_cache: expected dtype torch.bfloat16, as at the source"),
        ({3: pools()[0]}, ValueError, "dst_value_cache: expected shape"),
        ({0: [pools()[0][0], pools()[0][1].clone()[:2]]}, ValueError, r"src_key_cache\[1\]: expected shape"),
        ({4: torch.tensor([1])}, ValueError, "dst_slots: expected length 1, got 2"),
        ({4: torch.tensor([1.0])}, TypeError, "src_slots: expected dtype torch.int32 or torch.int64"),
        ({5: [1, 2]}, TypeError, "dst_slots: expected a tensor, got list"),
        ({"heads": 3}, ValueError, "heads: expected at most 2, as src_head counts, got 3"),
        ({"dst_head": 1}, ValueError, "dst_head: expected at most 0, with 2 of 2 heads, got 1"),
        ({"heads": 0}, ValueError, r"heads: expected 1 to 2\*\*62 \(exclusive\), got 0"),
        ({"programs": 0}, ValueError, r"programs: expected 1 to 2\*\*62 \(exclusive\), got 0"),
        ({"programs": 1.5}, TypeError, "programs: expected an integer, got 1.5"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(hnd, change: dict, kind: type, message: str) -> None:
    arguments = [*pools(), SLOTS, SLOTS]
    options = {key: value for key, value in change.items() if isinstance(key, str)}
    for index, value in change.items():
        if isinstance(index, int):
            arguments[index] = value
    with pytest.raises(kind, match=f"^{message}"):
        hnd.transfer(*arguments, **options)


def test_lists_of_blocks_hold_as_many_tokens(hnd) -> None:
    with pytest.raises(ValueError, match="dst_blocks: expected 8 tokens, as src_blocks hold, got 4"):
        hnd.transfer_blocks(*pools(), torch.tensor([0, 1]), torch.tensor([0]))
    with pytest.raises(ValueError, match="num_tokens: src_blocks hold 8, dst_blocks 4, got 5"):
        hnd.transfer_blocks(*pools(), torch.tensor([0, 1]), torch.tensor([0]), num_tokens=5)
    hnd.transfer_blocks(*pools(), torch.tensor([0, 1]), torch.tensor([0]), num_tokens=4)


SHARED = {
    "block head": ("{mode: int8, scale: {per: block head, source: dynamic}}", 6, "block head", "key.scale"),
    "block": ("{mode: fp8_e4m3, scale: {per: block, source: dynamic, arithmetic: multiply}}", 8, "block", "key.scale"),
    "channels": ("{mode: int8, scale: {per: token//6 dim, dtype: bfloat16}}", 12, "token//6 dim", "key.scale"),
    "zeros": (
        "{mode: int4_asymmetric, zero: {kind: point}, scale: {per: token//4 head dim//8}}",
        8,
        "head block slot//4 dim//8",
        "key.zero, key.scale",
    ),
    "scale of a scale": ("{mode: nvfp4, scale: {per: token//4 head dim//16}}", 8, "token//4 head", "key.scale"),
}


def into_shared(per: str) -> Transfer:
    """Groups lie across blocks of the source; several are in a block of the destination; some take no power of two."""
    quant, size, order, fields = SHARED[per]
    buffers = "c: {holds: key, order: token head dim}, v: {value: token dim head}"
    buffers = f"{{{buffers}, s: {{order: {order}, fields: [{fields}]}}}}"
    streams = f"{{key: {{quant: {quant}}}, value: {{dtype: bfloat16}}}}"
    axes = "axes: {head: 3, dim: 16}"
    target = f"{{layout: paged_nhd, {axes}, block_size: {size}, streams: {streams}, buffers: {buffers}}}"
    return made(f"{{layout: paged_hnd, {axes}, block_size: 4}}", target, "convert: requantise")


@pytest.mark.parametrize("per", SHARED)
def test_scales_that_tokens_share_are_made_of_all_of_them(per: str) -> None:
    what = into_shared(per)
    assert [plan.name for plan in lower_transfer(what)] == ["transfer_blocks"]
    assert_passes(what, *(f"transfer_blocks/{case}" for case in ("many", "skipped", "cut", "heads")))


@pytest.mark.parametrize("order", ["token head dim", "dim//8 block slot head dim%8"])
def test_tiles_of_whole_blocks(order: str) -> None:
    """Two blocks of the source in a tile, one slot number that is skipped, rows in one piece or in parts far apart."""
    axes, size = "axes: {head: 2, dim: 32}", "block_size: 4, slots: {skip: 9}"
    buffers = f"{{c: {{holds: key, order: {order}}}, v: {{holds: value, order: token head dim}}}}"
    source = f"{{layout: paged_nhd, {axes}, {size}, buffers: {buffers}}}"
    quant = "{quant: {mode: int4_asymmetric, scale: {per: token//8 head dim}}}"
    buffers = "{c: {holds: [key, value], order: token kv head dim}, "
    buffers += "k: {order: token//8 head dim, fields: [key.scale, key.zero]}, "
    buffers += "v: {order: token//8 head dim, fields: [value.scale, value.zero]}}"
    target = f"{{layout: paged_nhd, {axes}, block_size: 8, streams: {{key: {quant}, value: key}}, buffers: {buffers}}}"
    what = made(source, target, "convert: requantise")
    assert "_runs(32, KEY_DIM_RUN)" in render_layout(what)
    assert_passes(what, *(f"transfer_blocks/{case}" for case in ("many", "skipped", "cut", "heads")))


PARAMS = {
    "as they come": ("token//8 head dim", "token head dim//16", 32, "{0}.scale, {0}.zero", "float16", 2),
    "zeros first": ("token//8 head dim", "head token dim//16", 32, "{0}.zero, {0}.scale", "float32", 2),
    "heads between": ("token//8 dim head", "token dim//16 head", 32, "{0}.scale, {0}.zero", "float16", 0),
    "three groups": ("token//8 head dim", "token head dim//16", 48, "{0}.zero, {0}.scale", "float16", 0),
    "padding between": ("token//8 head dim", "token head dim//16", 32, "{0}.scale, pad: 2, {0}.zero", "float16", 0),
}
"""Where scales and zeros of channels and of groups lie, dims of a row, what is side by side, how many rows are one."""


@pytest.mark.parametrize("form", PARAMS)
def test_scales_and_zeros_of_a_row_are_written_at_once(form: str) -> None:
    *orders, dims, fields, kind, count = PARAMS[form]
    quants = [
        f"{{mode: int4_asymmetric, zero: {{dtype: {kind}}}, scale: {{per: {per}, dtype: {kind}}}}}"
        for per in ("token//8 head dim", "token head dim//16")
    ]
    streams = ", ".join(f"{name}: {{quant: {quant}}}" for name, quant in zip(("key", "value"), quants, strict=True))
    places = zip("kv", orders, ("key", "value"), strict=True)
    params = ", ".join(f"{name}: {{order: {order}, fields: [{fields.format(of)}]}}" for name, order, of in places)
    axes = f"axes: {{head: 2, dim: {dims}}}, block_size: 8"
    buffers = f"buffers: {{c: {{holds: [key, value], order: token kv head dim}}, {params}}}"
    target = f"{{layout: paged_nhd, {axes}, streams: {{{streams}}}, {buffers}}}"
    what = made(f"{{layout: paged_nhd, {axes}}}", target, "convert: requantise")
    assert len(re.findall(r"tl\.join\((?:stored_scale, stored|stored, stored_scale)\)", render_layout(what))) == count
    assert_passes(what, *(f"transfer_blocks/{case}" for case in ("many", "padded", "cut", "heads")))


def test_keys_of_kivi() -> None:
    """Scale and minimum of each channel over 32 tokens, that of tokens that are not moved left out."""
    axes = "axes: {head: 2, dim: 32}"
    module = module_of(
        made(f"{{layout: paged_nhd, {axes}}}", f"{{layout: nhd_int4_group, {axes}}}", "convert: requantise")
    )
    cache = torch.zeros(6, 16, 2, 32).bfloat16()
    tokens = torch.arange(64)
    key = (tokens % 16).view(64, 1, 1) * torch.linspace(0.5, 2.0, 32).bfloat16() + 1
    blocks = torch.tensor([5, 0, 3, 2])
    cache[blocks] = key.expand(64, 2, 32).reshape(4, 16, 2, 32).bfloat16()
    cache[2, 8:] = 1e4  # past the last token
    codes = [torch.zeros(3, 64, 2, 16, dtype=torch.uint8) for _ in range(2)]
    params = [torch.zeros(3, 2, 2, 32, 2).half(), torch.zeros(3, 64, 2, 1, 2).half()]
    module.transfer_blocks(cache, cache, *codes, *params, blocks, torch.tensor([1]), num_tokens=56)
    assert not params[0][[0, 2]].any()
    steps = (cache[5, 15].float() - 1) / 15
    assert torch.equal(params[0][1, :, :, :, 1], torch.ones(2, 2, 32).half())
    assert torch.equal(params[0][1, 0, :, :, 0], steps.half())
    assert torch.equal(params[0][1, 1], params[0][1, 0])
    low = codes[0][1, :56] & 15
    assert torch.equal(low, (tokens[:56] % 16).view(56, 1, 1).expand(56, 2, 16).byte())
    assert not codes[0][[0, 2]].any()
    assert not codes[0][1, 56:].any()


def test_lanes_past_a_row_do_not_count() -> None:
    """Beside 24 values there are 8 lanes whose code 0 means the minimum; scales of 4 tokens have rows without it."""
    quant = "{quant: {mode: int4_asymmetric, scale: {per: token//4 head}}}"
    buffers = (
        "{c: {holds: [key, value], order: token kv head dim}, s: {order: token//4 head, fields: [key.scale, key.zero]}"
    )
    buffers += ", u: {order: token//4 head, fields: [value.scale, value.zero]}}"
    axes = "axes: {head: 3, dim: 24}, block_size: 8"
    source = f"{{layout: paged_nhd, {axes}, streams: {{key: {quant}, value: key}}, buffers: {buffers}}}"
    what = made(source, f"{{layout: nhd_int8_token_head, {axes}}}", "convert: requantise")
    assert_passes(what, "transfer/T150", "transfer_blocks/one")


REGIONS = """{layout: paged_nhd, axes: {head: 2, dim: 16, layer: 3}, block_size: 4, buffers: {
    key_cache: {holds: key, order: block slot head dim, regions: [layer]},
    value_cache: {value: block head slot dim, regions: layer}}}"""


def test_regions_are_lists_of_so_many_layers() -> None:
    what = made(REGIONS, "{layout: cross_layer_hnd, axes: {head: 2, dim: 16}, block_size: 4}", "layers: all")
    assert_passes(what, "transfer/T7", "transfer/tables", "transfer_blocks/many")
    lists = [[torch.zeros(2, 4, 2, 16).bfloat16()] * 2, [torch.zeros(2, 2, 4, 16).bfloat16()] * 2]
    whole = torch.zeros(2, 2, 2, 4, 32).bfloat16()
    with pytest.raises(ValueError, match="layers: expected one number on both sides, got 2 and 2 and 3 and 2"):
        module_of(what).transfer(*lists, whole, SLOTS, SLOTS)


def test_pairs_and_layers_apart_are_handed_over_as_engines_keep_them() -> None:
    buffers = "{kv_cache: {holds: [key, value], order: block slot head dim, regions: [layer, kv]}}"
    source = f"{{layout: paged_nhd, axes: {{head: 2, dim: 16, layer: 3}}, block_size: 4, buffers: {buffers}}}"
    what = made(source, "{layout: block_v1, axes: {head: 2, dim: 16}, block_size: 4}", "layers: all")
    assert [buffer.name for buffer in what.source.buffers] == ["src_kv_cache_key", "src_kv_cache_value"]
    assert what.source.regions == Axis("layer", 3)
    pairs_of_layers = [[torch.randn(2, 4, 2, 16).bfloat16() for _ in range(2)] for _ in range(3)]
    stacked = [torch.zeros(2, 2, 2, 4, 16).bfloat16() for _ in range(3)]
    module_of(what).transfer(*zip(*pairs_of_layers, strict=True), stacked, SLOTS, SLOTS.flip(0))
    for halves, layer in zip(pairs_of_layers, stacked, strict=True):
        for side, half in enumerate(halves):
            assert torch.equal(layer[0, side, :, 1:3].transpose(0, 1), half[0, [2, 1]])
            assert not layer[1].any()


def test_a_layout_with_regions_reads_back() -> None:
    text = "name: apart\naxes: {head: 2, dim: 16, layer: 3}\nblock_size: 4\nbuffers:\n"
    text += "  keys: {key: block slot head dim, regions: layer}\n"
    text += "  values:\n    order: block slot\n    regions: [layer]\n    fields: [{value: head dim}, {pad: 4}]\n"
    layout = load_text(text)
    assert (layout.layers, layout.regions) == (None, Axis("layer", 3))
    assert canonical(layout).count("regions: [layer]") == 2
    assert load_text(canonical(layout)) == layout
    assert "layer" not in inspect.signature(module_of(layout).append).parameters


FAULTS = {
    "block size of the other side": ("dst_slot_number // DST_BLOCK_SIZE", "dst_slot_number // SRC_BLOCK_SIZE"),
    "a slot past the destination": ("& (dst_slot_number < dst_num_slots)", ""),
    "a negative slot of the source": ("& (src_slot_number >= 0)", ""),
    "heads from the first on": ("dst_heads = dst_head + head", "dst_heads = head"),
    "all heads of the tile": ("(head < HEADS)", "(head < 4)"),
    "every other tile": ("item += tl.num_programs(0)", "item += 2 * tl.num_programs(0)"),
    "one layer for all": ("layer = tile % num_layers", "layer = tile * 0"),
    "keys for values": ("        value,\n", "        key,\n"),
    "stride of the other tensor": ("* dst_value_cache_stride_slot", "* dst_key_cache_stride_slot"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault: str) -> None:
    target = "{layout: paged_hnd, axes: {head: 4, dim: 16}, block_size: 4}"
    what = made("{layout: paged_nhd, axes: {head: 4, dim: 16}, block_size: 6}", target, "layers: all")
    old, new = FAULTS[fault]
    text = render_layout(what)
    assert old in text
    cases = ("T7", "skipped", "heads", "capped", "padded_odd")
    module = runtime.import_module("faulty", text.replace(old, new))
    report = harness.run(what, module, only=[f"transfer/{case}" for case in cases])
    assert any(result.difference for result in report.failures), fault


SHARED_FAULTS = {
    "the first group of a block": ("dst_group_slot = first % DST_BLOCK_SIZE", "dst_group_slot = first % 32"),
    "the block of another group": (
        "dst_group_block = tl.load(dst_blocks_ptr + first // DST_BLOCK_SIZE)",
        "dst_group_block = tl.load(dst_blocks_ptr + (first - 32) // DST_BLOCK_SIZE, mask=first >= 32, other=0)",
    ),
    "groups of which nothing is moved": (
        "moved = tl.max(valid.to(tl.int32), ",
        "moved = tl.max((valid | ((dst_block >= 0) & (dst_block < dst_num_blocks))).to(tl.int32), ",
    ),
}


@pytest.mark.parametrize("fault", SHARED_FAULTS)
def test_a_planted_fault_in_what_tokens_share_is_noticed(fault: str) -> None:
    axes = "axes: {head: 2, dim: 32}"
    source = f"{{layout: paged_nhd, {axes}, block_size: 32}}"
    what = made(source, f"{{layout: nhd_int4_group, {axes}}}", "convert: requantise")
    old, new = SHARED_FAULTS[fault]
    text = render_layout(what)
    assert old in text
    module = runtime.import_module("faulty", text.replace(old, new))
    report = harness.run(what, module, only=["transfer_blocks/skipped", "transfer_blocks/cut"])
    assert any(result.difference for result in report.failures), fault


@pytest.mark.parametrize("sides", [("paged_nhd", "paged_x_vector"), ("paged_x_vector", "packed_hnd")], ids="-".join)
def test_a_capped_grid_takes_more_heads_where_blocks_hold_few_tokens(sides: tuple[str, str]) -> None:
    what = made(*(f"{{layout: {name}, axes: {{head: 6, dim: 128}}}}" for name in sides))
    slots, blocks = (schedule_transfer(what, plan) for plan in lower_transfer(what))
    assert [program.heads for each in (slots, blocks) for program in (each.plain, each.capped)] == [2, 2, 2, 8]
    assert render_layout(what).count("    head_tile = 2 if programs is None else 8\n") == 1
    assert_passes(what, "transfer/heads", "transfer/capped", "transfer_blocks/capped")


def test_programs_of_a_capped_grid_take_more_at_a_time() -> None:
    wide, narrow = "axes: {head: 8, dim: 128}", "axes: {head: 8, dim: 46}"
    cases = {
        "wide": (f"{{layout: paged_nhd, {wide}}}", f"{{layout: paged_hnd, {wide}}}", ""),
        "narrow": (f"{{layout: paged_nhd, {narrow}}}", f"{{layout: paged_hnd, {narrow}}}", ""),
        "small blocks": ("mla", "{layout: mla, block_size: 16}", ""),
        "encoded": ("paged_nhd", "nhd_fp8_token_head", "convert: requantise"),
        "decoded": ("nhd_fp8_token_head", "paged_nhd", "convert: requantise"),
        "from slots": ("paged_x_vector", "paged_nhd", ""),
        "together": ("paged_nhd", "nhd_int4_group", "convert: requantise"),
    }
    chosen = {}
    for name, case in cases.items():
        what = made(*case)
        schedule = schedule_transfer(what, lower_transfer(what)[-1])  # by blocks
        chosen[name] = schedule.plain, schedule.capped
    assert chosen == {
        "wide": (Program(1, 2), Program(16, 16)),
        "narrow": (Program(2, 1), Program(8, 4, 6)),
        "small blocks": (Program(2, 1), Program(16, 4, 6)),
        "encoded": (Program(2, 2), Program(8, 8, 4)),
        "decoded": (Program(2, 1), Program(16, 8, 3)),
        "from slots": (Program(16, 4, heads=2), Program(16, 16, heads=8)),
        "together": (Program(32, 2, heads=1), Program(32, 8, heads=1)),
    }


def test_tiles_under_way_may_have_all_registers_of_a_processor() -> None:
    """One program runs on it where the grid is capped; a thread has 255 at the most, and others have no bound."""
    bounds = [Program(32, warps, stages).registers for warps, stages in ((4, 6), (8, 3), (16, 2), (16, 1))]
    assert bounds == [255, 255, 128, 0]
    launches = re.findall(r"\*\*_registers\(device, .*\)", (ROOT / "generated" / "mla_to_host.py").read_text())
    assert launches == ["**_registers(device, 255 if stages > 1 else 0)"] * 2
