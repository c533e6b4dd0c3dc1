"""``kvgen plan`` and ``kvgen diff``: runs of bytes that do move a cache, and what is said of two layouts."""

from __future__ import annotations

import itertools
import json
import os
import re
from functools import cache

import pytest
import torch

from kvgen import reference_transfer, views
from kvgen.canonical import canonical
from kvgen.compare import compare
from kvgen.descriptors import Chunk, Heads, chunk, descriptors, heads_of_rank, shards
from kvgen.harness.pools import Sizes, compact_strides, random_bytes, tensor_shape
from kvgen.layout import Layout
from kvgen.resolve import load_text
from kvgen.spots import same_bytes
from kvgen.transfer import DESTINATION, SOURCE, Transfer, same_encoding, side
from tests.command import kvgen
from tests.generated import SHIPPED, shipped

LAYERS = 2
WHOLE = Heads()
SMALL = {"contiguous_nhd": 48, "contiguous_hnd": 32, "lmcache_2ltd": 64}
"""Requests and chunks are long; these are block sizes for here."""


@cache
def small(name: str, heads: int | None = None, block_size: int | None = None) -> Layout:
    """A shipped layout with two heads, or so many."""
    text = re.sub(r"^(axes: \{.*?\bhead: )\d+", rf"\g<1>{heads or 2}", canonical(shipped(name)), flags=re.M)
    size = block_size or SMALL.get(name)
    return load_text(re.sub(r"^block_size: \d+", f"block_size: {size}", text, flags=re.M) if size else text)


class Pool:
    """Tensors of a layout with the smallest strides, in storages of random bytes.

    What lies in several places is the same in all of them, and padding has its fill, as append leaves them.
    """

    def __init__(self, layout: Layout, blocks: int, seed: int) -> None:
        self.layout, self.blocks = layout, blocks
        self.storages, self.tensors = {}, {}
        sizes = Sizes(blocks, layout.block_size, LAYERS, {})
        generator = torch.Generator().manual_seed(seed)
        for buffer in layout.buffers:
            shape = tensor_shape(layout, buffer, sizes)
            strides = compact_strides(buffer, shape)
            reach = (shape[0] * strides[0] + 64) * buffer.unit
            data = random_bytes(max(reach, buffer.unit * (sum(map(_times, shape, strides)) + 64)), generator)
            kind = getattr(torch, buffer.dtypes[0])
            whole = data[: len(data) // buffer.unit * buffer.unit]
            self.storages[buffer.name] = data
            self.tensors[buffer.name] = whole.view(kind).as_strided(shape, strides)
        for first, *others in views.leaf_places(layout, self.tensors).values():
            for other in others:
                other.tensor.copy_(first.tensor)
        for _, pad, view in views.pad_views(layout, self.tensors):
            if pad.fill is not None:
                view.tensor.fill_(pad.fill)

    @property
    def sizes(self) -> dict[str, int]:
        extent = self.layout.layers and self.layout.layers.extent
        return {"num_blocks": self.blocks, "num_requests": self.blocks, "num_layers": extent or LAYERS}

    def slots(self, blocks: list[int]) -> torch.Tensor:
        size = self.layout.block_size
        return torch.tensor([block * size + slot for block in blocks for slot in range(size)])


def _times(size: int, stride: int) -> int:
    return (size - 1) * stride


def run(found: Chunk, ends: tuple[Pool, Pool], blocks: tuple[list[int], list[int]], layer: int) -> None:
    """What a copy engine does with a plan."""
    source, destination = ends
    sizes = source.sizes, destination.sizes
    for move in found.moves:
        ours, theirs = source.storages[move.source.tensor], destination.storages[move.destination.tensor]
        for start, target, nbytes in descriptors(move, *sizes, *blocks, layer):
            theirs[target : target + nbytes] = ours[start : start + nbytes]
    for value, move in found.fills:
        theirs = destination.storages[move.destination.tensor]
        for _, target, nbytes in descriptors(move, sizes[1], sizes[1], blocks[1], blocks[1], layer):
            theirs[target : target + nbytes] = value


def copy(ends: tuple[Pool, Pool], blocks: tuple[list[int], list[int]], layer: int, heads: Heads = WHOLE) -> None:
    """The same by views of both sides: values by leaf, token and head."""
    source, destination = ends
    ours, theirs = (views.leaf_places(end.layout, end.tensors) for end in ends)
    layered = [end.layout.layers is not None for end in ends]
    for each in range(LAYERS) if all(layered) else [layer]:
        at = [each if has else 0 for has in layered]
        for leaf, places in theirs.items():
            view = ours[leaf][0].select("layer", at[0])
            rows = view.read(view.at(source.slots(blocks[0]), source.layout.block_size))
            axes = [axis.name for axis in source.layout.leaf(leaf).axes]
            for place in places:
                held = place.select("layer", at[1])
                index = held.at(destination.slots(blocks[1]), destination.layout.block_size)
                new = rows
                if heads.count is not None and "head" in axes:
                    counts = [_heads(end.layout, leaf) for end in ends]
                    new = held.read(index).reshape(len(rows), counts[1], -1).clone()
                    part = rows.reshape(len(rows), counts[0], -1)[:, heads.source : heads.source + heads.count]
                    new[:, heads.destination : heads.destination + heads.count] = part
                held.write(index, new)
        for _, pad, view in views.pad_views(destination.layout, destination.tensors):
            if pad.fill is not None:
                held = view.select("layer", at[1])
                held.tensor[held.at(destination.slots(blocks[1]), destination.layout.block_size)] = pad.fill


def check_texts(found: Chunk, ends: tuple[Pool, Pool], blocks: tuple[list[int], list[int]], layer: int) -> None:
    """Addresses as they are printed, evaluated for whole tokens, heads and dims, are those of the runs."""
    sizes = tuple(end.sizes for end in ends)
    for move in found.moves:
        listed = list(descriptors(move, *sizes, *blocks, layer))
        counts = [sizes[0]["num_layers"] if loop.count is None else loop.count for loop in move.loops]
        for end, text in enumerate(move.addresses):
            tensor_name = (move.source, move.destination)[end].tensor
            tensor = ends[end].tensors[tensor_name]
            names = sizes[end] | {tensor_name: 0, "blocks": blocks[end], "layer": layer}
            names["stride"] = lambda i, tensor=tensor: tensor.stride(i) * tensor.itemsize
            code = compile(text, "address", "eval")
            for run, indices in zip(listed, itertools.product(*map(range, counts)), strict=True):
                whole = dict.fromkeys(("token", "head", "dim", "bit"), 0)
                whole |= {"layer": 0} if any(loop.part == "layer" for loop in move.loops) else {}
                for loop, index in zip(move.loops, indices, strict=True):
                    whole[loop.part.partition("%")[0]] += index * loop.div
                assert eval(code, names | whole) == run[end], (text, indices)


def _heads(layout: Layout, leaf: str) -> int:
    return next(axis.extent for axis in layout.leaf(leaf).axes if axis.name == "head")


def check(first: Layout, second: Layout, heads: Heads = WHOLE, layer: int = 1) -> None:
    """The runs of a plan leave the bytes of a destination that a copy of values leaves."""
    found = chunk(first, second, heads)
    assert found.problems == ()
    source = Pool(first, found.source_blocks + 2, 1)
    planned, wanted = (Pool(second, found.destination_blocks + 2, 2) for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    blocks = tuple(
        torch.randperm(end.blocks, generator=generator)[:count].tolist()
        for end, count in ((source, found.source_blocks), (planned, found.destination_blocks))
    )
    check_texts(found, (source, planned), blocks, layer)
    run(found, (source, planned), blocks, layer)
    copy((source, wanted), blocks, layer, heads)
    for name, data in wanted.storages.items():
        assert torch.equal(planned.storages[name], data), f"{first.name} to {second.name}: {name}"


def fits(first: Layout, second: Layout) -> bool:
    alike = [(s.name, s.axes) for s in first.streams] == [(s.name, s.axes) for s in second.streams]
    return alike and all(same_encoding(s, second.stream(s.name)) for s in first.streams)


PAIRS = [(a, b) for a, b in itertools.product(SHIPPED, SHIPPED) if fits(small(a), small(b))]
"""All ordered pairs of shipped layouts whose bytes mean the same: KVGEN_ALL_PAIRS=1 runs all of them."""

CHOSEN = PAIRS if os.environ.get("KVGEN_ALL_PAIRS") else PAIRS[:: 1 + len(PAIRS) // 90]


@pytest.mark.parametrize(("first", "second"), CHOSEN)
def test_the_runs_move_what_a_copy_of_values_moves(first: str, second: str) -> None:
    found = chunk(small(first), small(second))
    if found.problems:
        assert any("tokens share" in problem or "share bytes" in problem for problem in found.problems)
        return
    check(small(first), small(second))


def test_the_pairs_are_many() -> None:
    assert len(PAIRS) > 300
    assert {name for pair in PAIRS for name in pair} == set(SHIPPED)


@pytest.mark.parametrize(("first", "second"), [(16, 64), (64, 16), (16, 24), (24, 16), (7, 5)])
@pytest.mark.parametrize("names", [("paged_nhd", "paged_hnd"), ("packed_hnd", "pair_nhd"), ("flat_slots", "block_v1")])
def test_block_sizes_may_differ(names: tuple[str, str], first: int, second: int) -> None:
    check(small(names[0], block_size=first), small(names[1], block_size=second))


@pytest.mark.parametrize("names", [("paged_nhd", "paged_hnd"), ("packed_hnd", "universal_tp"), ("stacked_nhd",) * 2])
@pytest.mark.parametrize(("heads", "source", "destination"), [(8, 1, 2), (8, 2, 1), (8, 4, 2), (2, 2, 4), (2, 4, 1)])
def test_heads_go_to_the_ranks_that_hold_them(names, heads: int, source: int, destination: int) -> None:
    """Every pair of ranks, and every head of every receiving rank once."""
    first, second = (small(n, heads_of_rank(heads, r)) for n, r in zip(names, (source, destination), strict=True))
    got: dict[int, list[int]] = {}
    for pair in shards(heads, source, destination):
        check(first, second, pair)
        start = pair.source_rank * heads // source + pair.source
        assert start == pair.destination_rank * heads // destination + pair.destination
        got.setdefault(pair.destination_rank, []).extend(range(start, start + pair.count))
    for rank in range(destination):
        first_head = rank * heads // destination
        assert got[rank] == list(range(first_head, first_head + max(1, heads // destination)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("paged_nhd", "host_page_first"),
        ("packed_hnd", "paged_x_vector"),
        ("mla", "mla_assembled"),
        ("packed_fp8_token_head", "packed_fp8_token_head"),
        ("nhd_nvfp4", "nhd_nvfp4"),
    ],
)
def test_the_runs_move_what_a_transfer_moves(first: str, second: str) -> None:
    """The pool that is left is the one that the reference of transfers leaves."""
    layouts = small(first), small(second)
    found = chunk(*layouts)
    source = Pool(layouts[0], found.source_blocks + 1, 1)
    planned, wanted = (Pool(layouts[1], found.destination_blocks + 1, 2) for _ in range(2))
    run(found, (source, planned), ([1], [0]), 1)
    what = Transfer("t", "", side(layouts[0], SOURCE), side(layouts[1], DESTINATION))
    ends = [
        reference_transfer.SideTensors(
            [{prefix + name: tensor for name, tensor in end.tensors.items()}], [1] if end.layout.layers else None
        )
        for prefix, end in ((SOURCE, source), (DESTINATION, wanted))
    ]
    reference_transfer.transfer(what, *ends, source.slots([1]), wanted.slots([0]))
    for name, data in wanted.storages.items():
        assert torch.equal(planned.storages[name], data), name


def test_a_shard_may_begin_inside_a_split_of_heads() -> None:
    """Twelve heads by six to three ranks: the second rank's are the last two of a six and the first two of the next."""
    split = "name: x\naxes: {head: 12, dim: 8}\nblock_size: 4\nbuffers:\n"
    split += "  kv: {holds: [key, value], order: head//6 block kv slot head%6 dim}\n"
    apart = "  a: {holds: key, order: block slot head dim}\n  b: {holds: value, order: block head slot dim}\n"
    whole = load_text(split)
    part = load_text("name: y\naxes: {head: 4, dim: 8}\nblock_size: 4\nbuffers:\n" + apart)
    for pair in shards(12, 1, 3):
        check(whole, part, pair)
    runs = [move.nbytes for move in chunk(whole, part, shards(12, 1, 3)[1]).moves]
    assert runs == [2 * 8 * 2, 8 * 2]  # two heads beside each other, and single ones
    for pair in shards(12, 3, 1):
        check(part, whole, pair)


@pytest.mark.parametrize(
    ("orders", "sizes", "heads"),
    [
        (("slot%5 block slot//5 dim head", "block slot head dim"), (25, 3), WHOLE),
        (("slot//3 head block dim slot%3", "block head slot//2 slot%2 dim"), (9, 4), WHOLE),
        (("head//4 dim slot head%4 block", "block head slot dim"), (6, 4), Heads(0, 0, 1, 2, 10)),
        (("block head%2 slot head//2 dim", "head%4 slot head//4 block dim"), (6, 6), Heads(0, 0, 4, 7, 4)),
    ],
)
def test_splits_of_the_two_sides_need_not_meet(orders: tuple[str, str], sizes: tuple[int, int], heads: Heads) -> None:
    """Tokens by fives and by threes, heads by fours from the second on: what an index adds depends on no other."""
    layouts = [
        load_text(
            f"name: x{i}\naxes: {{head: 12, dim: 4}}\nblock_size: {size}\n"
            f"streams: {{key: {{}}}}\nbuffers: {{c: {{key: '{order}'}}}}\n"
        )
        for i, (order, size) in enumerate(zip(orders, sizes, strict=True))
    ]
    check(*layouts, heads)


def test_a_layer_of_split_layers_is_reached_by_no_step() -> None:
    text = "name: x\naxes: {{head: 2, dim: 4{}}}\nblock_size: 4\nstreams: {{key: {{}}}}\nbuffers: {{c: {{key: {}}}}}\n"
    split = load_text(text.format(", layer: 4", "layer%2 block slot layer//2 head dim"))
    one = load_text(text.format("", "block slot head dim"))
    whole = load_text(text.format(", layer: 4", "layer block slot head dim"))
    for ends in ((split, one), (one, split)):
        (problem,) = chunk(*ends).problems
        assert problem.startswith("layers of key are split, and no one step leads to the next")
    assert chunk(split, whole).problems == ()


def test_a_scale_that_heads_share_does_not_go_apart() -> None:
    (problem, _) = chunk(small("hnd_int8_token", 8), small("hnd_int8_token", 4), Heads(0, 1, 4, 0, 4)).problems
    assert "all heads of a rank share key.scale" in problem
    assert chunk(small("hnd_int8_token", 8), small("hnd_int8_token", 8), Heads(count=8)).problems == ()


def moves(first: str, second: str) -> list[tuple[tuple[str, ...], int, int | str]]:
    return [(m.fields, m.nbytes, m.count.plain) for m in chunk(shipped(first), shipped(second)).moves]


def test_runs_are_as_long_as_they_can_be() -> None:
    page = 16 * 8 * 128 * 2
    assert moves("paged_nhd", "flat_slots") == [(("key",), page, 1), (("value",), page, 1)]
    assert moves("paged_nhd", "paged_hnd") == [(("key",), 256, 128), (("value",), 256, 128)]
    assert moves("packed_nhd", "packed_nhd") == [(("key", "value"), 2 * page, 1)]
    assert moves("mla_fp8_record", "mla_fp8_record") == [(("latent", "latent.scale", "rope"), 64 * 656, 1)]
    assert moves("indexer_planar", "indexer_planar") == [(("key", "key.scale"), 64 * 132, 1)]
    assert moves("mla_assembled", "mla_assembled") == [
        (("latent", "rope"), 64 * 1152, 1),
        (("latent", "padding"), 64 * 1152, 1),
    ]
    assert moves("host_layer_first", "host_page_direct")[0] == (("key",), page, "num_layers")
    assert moves("paged_x_vector", "paged_nhd") == [(("key",), 16, 2048), (("value",), 2, 16384)]


def test_addresses_name_strides_and_blocks() -> None:
    key, _ = chunk(shipped("paged_nhd"), small("block_v1", 8)).moves
    assert key.addresses == (
        "key_cache + blocks[token//16] * stride(0) + token%16 * stride(1) + head * stride(2)",
        "kv_cache + blocks[0] * stride(0) + token//16 * 16 * stride(3) + token%16 * stride(3) + head * stride(2)",
    )
    _, value = chunk(shipped("paged_nhd"), shipped("host_page_first")).moves
    assert value.addresses[1] == (
        "kv_buffer + blocks[0] * 16 * stride(1) + stride(0) + layer * stride(2) + token * stride(1)"
    )


# The commands.


def test_plan_says_what_an_engine_needs() -> None:
    facts = json.loads(kvgen("plan", "paged_nhd", "flat_slots", "--json").out)
    assert (facts["tokens"], facts["verdict"], facts["problems"]) == (16, "descriptors", [])
    key, value = facts["ranks"][0]["moves"]
    assert (key["bytes"], key["count"], key["loops"], key["short"]) == (32768, 1, [], False)
    assert (key["source"]["block"], value["destination"]["tensor"]) == (32768, "value_cache")
    text = kvgen("plan", "paged_nhd", "paged_hnd").out
    assert "a kernel should repack: runs of 256 bytes are shorter than 4096" in text
    assert "  key: 128 runs of 256 bytes, for token < 16, head < 8" in text
    assert (
        kvgen("plan", "paged_nhd", "paged_hnd", "--short", 256).out.splitlines()[1] == "a list of descriptors does it"
    )
    convert = kvgen("plan", "paged_nhd", "nhd_fp8_token_head")
    assert "a kernel must convert\n  key is encoded differently" in convert.out
    assert convert.code == 0


def test_plan_deals_heads_to_ranks() -> None:
    result = kvgen("plan", "universal_tp", "universal_tp", "--dst-tp", 4, "--layers", 3)
    assert "rank 0 to rank 3: heads 6 to 8 become 0 to 2" in result.out
    assert f"  key, value: 1 run of {2 * 3 * 2 * 16 * 128 * 2} bytes" in result.out
    facts = json.loads(kvgen("plan", "mla", "mla_split", "--src-tp", 2, "--dst-tp", 4, "--json").out)
    assert [(r["source_rank"], r["destination_rank"], r["heads"]) for r in facts["ranks"]] == [
        *((0, 0, None), (1, 1, None), (0, 2, None), (1, 3, None))
    ]


def test_plan_says_over_what_padding_is_filled(tmp_path) -> None:
    """Which the source has not: once for all ranks of the destination, with its loops."""
    text = "name: rows\naxes: {head: 4, dim: 64}\nblock_size: 8\nbuffers:\n"
    for file, pad in (("plain", "{pad: 96}"), ("filled", "{pad: 96, fill: 1}")):
        buffer = f"  kv: {{order: block slot head, fields: [key, value, {pad}]}}\n"
        (tmp_path / f"{file}.yaml").write_text(text + buffer)
    plain, filled = (str(tmp_path / f"{file}.yaml") for file in ("plain", "filled"))
    lines = [
        *("every rank of the destination", "  padding: 16 runs of 96 bytes, for token < 8, head < 2, set to 1"),
        "    at   kv + blocks[0] * stride(0) + 256 + token * stride(1) + head * stride(2)",
    ]
    assert "\n\n" + "\n".join(lines) + "\n\n" in kvgen("plan", plain, filled, "--dst-tp", 2).out
    out = kvgen("plan", plain, filled).out
    assert "  padding: 32 runs of 96 bytes, for token < 8, head < 4, set to 1\n" in out
    assert "every rank" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("mla", "paged_nhd"), "mla holds latent, rope, and paged_nhd key, value"),
        (("paged_nhd", "paged_nhd", "--dst-tp", 3), "8 heads cannot be dealt to 3 ranks evenly"),
        (("nhd_head_shard",), "key is head 8 dim 128 at the source, and head 4 dim 128 at the destination"),
        (("indexer_planar", "indexer_planar", "--short", 0), None),
        (("four.yaml", "four.yaml", "--layers", 9), None),
        (("prime.yaml", "paged_nhd"), "token has 524272 steps that are not even, and a plan lists 65536 at the most"),
    ],
)
def test_plan_refuses(arguments: tuple, words: str | None, tmp_path, monkeypatch) -> None:
    text = "name: four\naxes: {head: 2, dim: 64, layer: 4}\nblock_size: 8\nbuffers:\n"
    (tmp_path / "four.yaml").write_text(text + "  kv: {holds: [key, value], order: block layer kv slot head dim}\n")
    long = canonical(shipped("contiguous_hnd")).replace("block_size: 4096", "block_size: 32767")
    (tmp_path / "prime.yaml").write_text(re.sub("^name: .*", "name: prime", long))
    monkeypatch.chdir(tmp_path)
    result = kvgen("plan", *arguments)
    assert result.code == (1 if words else 2)
    assert words is None or f"error[KV716]: {words}" in result.err


def test_a_transfer_has_two_layouts_to_plan_for() -> None:
    """Those that it makes of others, and with the names of its arguments."""
    facts = json.loads(kvgen("plan", "nhd_16_to_64", "--json").out)
    assert [facts[side]["blocks"] for side in ("source", "destination")] == [4, 1]
    first = facts["ranks"][0]["moves"][0]
    assert (first["source"]["tensor"], first["destination"]["tensor"]) == ("src_key_cache", "dst_key_cache")
    assert (first["bytes"], first["count"]) == (32768, 4)
    one = kvgen("plan", "paged_nhd")
    assert (one.code, one.err.splitlines()[0]) == (2, "error[KV701]: paged_nhd is one layout")


def test_ranks_that_hold_the_same_heads_send_in_turn() -> None:
    assert [(pair.source_rank, pair.destination_rank) for pair in shards(2, 4, 8)] == [
        *((0, 0), (1, 1), (0, 2), (1, 3), (2, 4), (3, 5), (2, 6), (3, 7))
    ]


def test_plan_needs_sizes_that_are_numbers(tmp_path) -> None:
    path = tmp_path / "any_heads.yaml"
    path.write_text(
        "name: any_heads\naxes: {head: dynamic, dim: 64}\nblock_size: 16\nbuffers:\n"
        "  kv: {holds: [key, value], order: block kv slot head dim}\n"
    )
    assert "any_heads has sizes that only the launch knows" in kvgen("plan", path, "paged_nhd").err


def test_diff_tells_each_fact() -> None:
    result = kvgen("diff", "paged_nhd", "packed_hnd", "--json")
    facts = json.loads(result.out)
    assert (result.code, facts["same_bytes"], facts["same_slots"]) == (1, False, True)
    found = {(d["subject"], d["aspect"]): (d["first"], d["second"]) for d in facts["differences"]}
    assert found == {
        ("layout", "tensors"): ("key_cache, value_cache", "kv_cache"),
        ("key", "order"): ("block slot head dim", "block head slot dim"),
        ("key", "lies"): ("in a tensor of its own", "bytes 0 to 256 of a record of 512"),
        ("value", "order"): ("block slot head dim", "block head slot dim"),
        ("value", "lies"): ("in a tensor of its own", "bytes 256 to 512 of a record of 512"),
    }
    text = kvgen("diff", "nhd_fp8_token_head", "nhd_int8_token_head").out
    assert re.search(r"key +stored as +fp8_e4m3 → int8", text)
    assert re.search(r"key +scale range +448.0 → 127", text)
    shard = kvgen("diff", "paged_nhd", "context_parallel_nhd")
    assert shard.code == 1
    assert shard.out.startswith(
        "paged_nhd and context_parallel_nhd are the same bytes; their slots are not found alike"
    )


SPELLINGS = [
    ("{holds: [key, value], order: block slot head (kv dim)}", "{order: block slot head, fields: [key, value]}"),
    (
        "{holds: [key, value], order: block slot//4 kv slot%4 head dim//8 dim%8}",
        "{holds: [key, value], order: block slot//4 kv (slot%4 head) dim}",
    ),
    (
        "{holds: [key, value], order: kv (block slot) head dim}",
        "{holds: [key, value], order: kv block slot (head dim)}",
    ),
]


def of_buffer(text: str, name: str = "kv") -> Layout:
    return load_text(f"name: x\naxes: {{head: 8, dim: 128}}\nblock_size: 16\nbuffers:\n  {name}: {text}\n")


@pytest.mark.parametrize(("first", "second"), SPELLINGS)
def test_the_same_bytes_under_other_spellings(first: str, second: str) -> None:
    ours, theirs = of_buffer(first), of_buffer(second, "pages_of_all")
    assert same_bytes(ours, theirs)
    assert compare(ours, theirs).alike
    other = of_buffer(first.replace("[key, value]", "[value, key]"))
    assert not same_bytes(ours, other)


def test_diff_of_one_layout_with_itself() -> None:
    for name in SHIPPED:
        found = compare(shipped(name), shipped(name))
        assert (found.differences, found.alike) == ((), True)
    result = kvgen("diff", "paged_nhd", "paged_nhd")
    assert (result.code, result.out) == (0, "paged_nhd and paged_nhd are the same\n")
    assert kvgen("diff", "paged_nhd", "flat_slots").code == 0


def test_layouts_that_are_the_same_bytes() -> None:
    plain = [name for name in SHIPPED if "fused" not in name]  # a fused append changes no place
    found = {(a, b) for a, b in itertools.combinations(plain, 2) if same_bytes(shipped(a), shipped(b))}
    assert same_bytes(shipped("nhd_fused"), shipped("paged_nhd"))
    same = ["context_parallel_nhd", "flat_slots", "paged_nhd", "swa_nhd"]
    assert found == {*itertools.combinations(same, 2), ("flat_slots_fp8", "nhd_fp8_tensor")}
