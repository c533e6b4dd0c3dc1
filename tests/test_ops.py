"""Functions as PyTorch operators: what torch.compile makes of them, and that it is what the functions do."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from kvgen import reference
from kvgen.documents import load_text
from kvgen.functions import possible
from kvgen.harness.bench import Bench
from kvgen.harness.interpreter import exact_widening
from kvgen.harness.pools import PoolFactory
from kvgen.layout import Layout
from tests.generated import ROOT, SHIPPED, module_of, rendered, shipped, shipped_text

SMALL = {
    "paged_nhd": ("head: 8, dim: 128", "head: 2, dim: 16"),
    "cross_layer_nhd": ("head: 8, dim: 128", "head: 2, dim: 16"),
    "swa_nhd": ("head: 8, dim: 128", "head: 2, dim: 16"),
    "context_parallel_nhd": ("head: 8, dim: 128", "head: 2, dim: 16"),
    "mla": ("dim: 512", "dim: 48"),
    "nhd_int8_block": ("head: 8, dim: 128", "head: 2, dim: 16"),
    "nhd_fp8_head": ("head: 8, dim: 128", "head: 2, dim: 16"),
    "packed_fp8_token_head": ("head: 8, dim: 128", "head: 2, dim: 16"),
    "indexer_planar": ("dim: 128", "dim: 16"),
    "nhd_bf16k_turbo3v": ("head: 8, dim: 128", "head: 2, dim: 16"),
    "nhd_fused": ("head: 8, dim: 128", "head: 2, dim: 16"),
}


def small(name: str) -> Layout:
    return load_text(shipped_text(name).replace(*SMALL[name]).replace("rotary_dim: 128", "rotary_dim: 16"))


class Calls:
    """Arguments for every function of a layout, with tensors of the harness."""

    def __init__(self, layout: Layout, tokens: int = 4) -> None:
        self.layout, self.module = layout, module_of(layout)
        self.ops = self.module.register_ops()
        self.bench = Bench(layout, self.module, PoolFactory(layout, "cpu", 0), 0, "ops")
        self.pool = self.bench.pool()
        self.slots = self.bench.tensor(self.bench.slots(tokens))
        # Numbers, in a pool of zeros: what is compared here knows no equal NaNs.
        shapes = {s: (tokens, *self.bench.sizes.stream_shape(layout, s)) for s in self.bench.streams}
        self.sources = {s: torch.randn(shape).to(self.pool.dtypes[s]) for s, shape in shapes.items()}
        for name, buffer in self.pool.actual.items():
            buffer.view(torch.uint8).zero_()
            if (
                buffer.dtype.is_floating_point and buffer.dtype.itemsize == 1
            ):  # for operators of torch's own that know no float8
                self.pool.actual[name] = buffer.view(torch.uint8)
        if hasattr(self.module, "append"):
            args, options = self.append()
            self.module.append(*args, **options)

    def append(self) -> tuple[tuple, dict[str, Any]]:
        args = self.bench.append_args(self.pool, self.sources, self.slots)
        return tuple(args.values()), self.bench.layer_args(None)

    def gather(self) -> tuple[tuple, dict[str, Any]]:
        buffers = tuple(self.pool.actual[b.name] for b in self.layout.buffers)
        rest = (*self.bench.remap_args(None).values(), *self.bench.scale_args().values())
        return (*buffers, self.slots, *rest), self.bench.layer_args(None)

    def gather_codes(self) -> tuple[tuple, dict[str, Any]]:
        buffers = tuple(self.pool.actual[b.name] for b in self.layout.buffers)
        return (*buffers, self.slots, *self.bench.remap_args(None).values()), self.bench.layer_args(None)

    def gather_paged(self) -> tuple[tuple, dict[str, Any]]:
        args, options = self.gather_codes_paged()
        return (*args, *self.bench.scale_args().values()), options

    def gather_codes_paged(self) -> tuple[tuple, dict[str, Any]]:
        buffers = tuple(self.pool.actual[b.name] for b in self.layout.buffers)
        given = tuple(torch.tensor(x, dtype=torch.int32) for x in ([[0, 1], [2, 3]], [3, 5], [0, 3, 8]))
        options = self.bench.layer_args(None) | self.bench.rank_args(0)
        return (*buffers, *given, *self.bench.remap_args(None).values()), options | {"total_tokens": 8}

    def append_positions(self) -> tuple[tuple, dict[str, Any]]:
        values = {"block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), "positions": torch.tensor([3, 6])}
        args = self.bench.append_args(self.pool, self.sources, self.slots)
        at = list(args).index("slot_mapping")
        args = [*list(args.values())[:at], *values.values(), *list(args.values())[at + 1 :]]
        return tuple(args), self.bench.layer_args(None) | self.bench.rank_args(0)

    def append_fused(self) -> tuple[tuple, dict[str, Any]]:
        rows, angles = (torch.rand(shape).bfloat16() for shape in (16, (9, 16)))
        buffers = tuple(self.pool.actual.values())
        return (*self.sources.values(), *buffers, self.slots, torch.tensor([0, 8, -1, 3]), rows, angles), {}

    def append_fused_key(self) -> tuple[tuple, dict[str, Any]]:
        (key, _, keys, _, *rest), options = self.append_fused()
        return (key, keys, *rest), options

    def copy_blocks(self) -> tuple[tuple, dict[str, Any]]:
        return (*self.pool.actual.values(), torch.tensor([[0, 1], [-1, 0]])), {}

    def zero_blocks(self) -> tuple[tuple, dict[str, Any]]:
        return (*self.pool.actual.values(), torch.tensor([0, -1])), {}

    def gather_page_table(self) -> tuple[tuple, dict[str, Any]]:
        out = torch.zeros(3, 2, dtype=torch.int32)
        given = (torch.arange(6).view(2, 3), torch.tensor([1, 0]), torch.tensor([5, 20]), out, -7)
        return given, self.bench.block_size_args()

    def fill_slots(self) -> tuple[tuple, dict[str, Any]]:
        return (torch.tensor([2, 0]), 3, 5), self.bench.rank_args(0) | self.bench.block_size_args()

    def concat_mla_key(self) -> tuple[tuple, dict[str, Any]]:
        return (torch.randn(3, 2, 8), torch.randn(3, 4)), {}

    def slot_mapping(self) -> tuple[tuple, dict[str, Any]]:
        options = self.bench.rank_args(0) | self.bench.block_size_args() | {"num_tokens": 3}
        return (torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([3, 6])), options


FUNCTIONS = ("append", "append_positions", "gather", "gather_paged", "slot_mapping")
PAGES = ("copy_blocks", "zero_blocks", "gather_page_table", "fill_slots")
MORE = {
    "paged_nhd": PAGES,
    "context_parallel_nhd": PAGES,
    "indexer_planar": PAGES,
    # Where codes are float8 torch's own operators do not know them.
    "nhd_int8_block": ("gather_codes", "gather_codes_paged"),
    "nhd_fused": ("append_fused", "append_fused_key"),
    "mla": ("concat_mla_key",),
}


@pytest.mark.parametrize("name", [name for name in SMALL if name != "packed_fp8_token_head"])
def test_operators_are_what_torch_asks_of_them(name: str) -> None:
    """Schema, what is written, results in shapes and types, and functional graphs: of all functions."""
    calls = Calls(small(name))
    alone = [f"append_{stream}" for stream in calls.bench.streams]
    every = {name for name in calls.module.__all__ if hasattr(calls.ops, name)}
    assert every == {*FUNCTIONS, *PAGES, *alone, *MORE.get(name, ())} | (every & {"gather_codes", "gather_codes_paged"})
    with exact_widening("cpu"):
        for function in [*FUNCTIONS, *MORE.get(name, ())]:
            args, options = getattr(calls, function)()
            operator = getattr(calls.ops, function).default
            found = torch.library.opcheck(operator, args, options)
            assert set(found.values()) == {"SUCCESS"}, (function, found)


@pytest.mark.parametrize("name", ["paged_nhd", "packed_fp8_token_head"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_whatever_the_number_of_tokens(name: str, backend: str) -> None:
    """Append and gather in one graph without breaks, compiled once for all numbers of tokens; buffers are written."""
    calls = Calls(small(name))
    append, gather = calls.ops.append, calls.ops.gather
    buffers = tuple(calls.pool.actual.values())
    compiled = 0

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        nonlocal compiled
        compiled += 1
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    @torch.compile(backend=count, fullgraph=True, dynamic=True)
    def step(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        append(key * 2, value, *buffers, slots)
        keys, values = gather(*buffers, slots)
        return keys + 1, values

    layout, bench = calls.layout, calls.bench
    with exact_widening("cpu"):
        for tokens in (3, 7):
            slots = bench.tensor(bench.slots(tokens))
            sources = [torch.randn(tokens, 2, 16).bfloat16() for _ in range(2)]
            expected = {b: x.clone() for b, x in zip(calls.pool.actual, buffers, strict=True)}
            keys, values = step(*sources, slots)
            reference.append(layout, {"key": sources[0] * 2, "value": sources[1]}, expected, slots)
            wanted = reference.gather(layout, expected, slots)
            for buffer, other in zip(buffers, expected.values(), strict=True):
                assert torch.equal(buffer.view(torch.uint8), other.view(torch.uint8))
            assert torch.equal(keys, wanted["key"] + 1)
            assert torch.equal(values, wanted["value"])
    assert compiled == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_functions_are_their_operators_in_compiled_code(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Called themselves, in one graph without breaks, with the bytes and results that they give outside of it."""
    text = shipped_text("paged_nhd").replace(*SMALL["paged_nhd"]).replace("block_size: 16", "block_size: 4")
    cache, moves = module_of(load_text(text)), moving("paged_nhd stacked_nhd")[0]
    for module in (cache, moves):
        monkeypatch.setitem(sys.modules, module.__name__, module)  # where Dynamo looks for what functions call
        module.register_ops()
    called = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        called.append({str(node.target).split(".")[-1] for node in graph.graph.nodes if "kvgen_" in str(node.target)})
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    def step(key: Any, value: Any, table: Any, contexts: Any, page: Any, pools: Any) -> tuple[torch.Tensor, ...]:
        slots = cache.slot_mapping(table, context_lens=contexts)
        cache.append(key * 2, value, *pools[:2], slots)
        moves.transfer_blocks(*pools, table[:, 0].contiguous(), table[:, 1].contiguous())
        pages = cache.gather_page_table(table, contexts, contexts + 17, page, padding=-5)
        return *cache.gather(*pools[:2], slots), pages

    key, value = (torch.randn(2, 2, 16).bfloat16() for _ in range(2))
    table, contexts = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
    found = []
    with exact_widening("cpu"):
        for function in (step, torch.compile(step, backend=count, fullgraph=True)):
            pools = (*cache.allocate(4), torch.zeros(2, 4, 4, 2, 16, dtype=torch.bfloat16))
            page = torch.zeros(3, 2, dtype=torch.int32)
            results = function(key, value, table, contexts, page, pools)
            assert results[-1] is page
            found.append((*results, *pools))
    assert called == [{"slot_mapping", "append", "transfer_blocks", "gather_page_table", "gather"}]
    assert torch.equal(found[0][0], key * 2)
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


def test_registering_again_gives_the_same() -> None:
    layout = small("paged_nhd")
    first, second = (module_of(layout).register_ops() for _ in range(2))
    assert first is second
    assert first.append is second.append


def test_layouts_have_operators_of_their_own() -> None:
    """Also two of one name that differ."""
    one = module_of(small("paged_nhd"))
    other = module_of(load_text(shipped_text("paged_nhd").replace("head: 8, dim: 128", "head: 2, dim: 8")))
    assert one.register_ops() is not other.register_ops()


@pytest.mark.parametrize("name", SHIPPED)
def test_no_operator_takes_a_float(name: str) -> None:
    """And every argument of a function that is not ``out`` or ``zero_skipped`` is one of its operator."""
    schemas = re.findall(r"\(\s*['\"](\w+)(\(.*?\) -> .*?)['\"],\s+\w+,\s+\w+,?\s*\)", rendered(name))
    assert {function for function, _ in schemas} == {*possible(shipped(name))} - {"allocate", "register_ops"}
    for function, schema in schemas:
        assert not re.search(r"\bfloat|Scalar ", schema), schema
        signature = re.search(rf"^def {function}\((.*?)\):$", rendered(name), re.M | re.S)[1]
        names = re.findall(r"(\w+)(?:=\w+)?(?:,|$)", signature.replace("\n", " ").strip())
        taken = re.findall(r"(\w+)(?:=\w+)?(?:, |\))", schema.partition(" -> ")[0])
        absent = () if function == "gather_page_table" else ("out", "zero_skipped")
        assert [n for n in names if n not in absent] == taken, schema


def test_refusals_come_through() -> None:
    calls = Calls(small("paged_nhd"))
    args, options = calls.append()
    with pytest.raises(TypeError, match="slot_mapping: expected dtype"):
        calls.ops.append(*args[:-1], args[-1].float(), **options)


def moving(rest: str, *pools: str) -> tuple[ModuleType, list[torch.Tensor | list[torch.Tensor]]]:
    """A transfer of small layouts, and tensors for it; those of ``pools`` are lists, one for each of three layers."""
    small = "axes: {head: 2, dim: 16}, block_size: 4"
    source, destination, *keys = rest.split(" ")
    ends = f"from: {{layout: {source}, {small}}}, to: {{layout: {destination}, {small}}}"
    path = str(ROOT / "layouts" / "transfers" / "ops.yaml")
    what = load_text(
        f"name: ops_{source}\ntransfer: {{{ends}}}\n" + "\n".join(key.replace(":", ": ") for key in keys), path
    )
    given = []
    for layout in what.sides:
        for name, tensor in PoolFactory(layout, "cpu", 1).make().actual.items():
            tensor.view(torch.uint8).zero_()
            given.append([tensor, tensor.clone(), tensor.clone()] if name in pools else tensor)
    return module_of(what), given


MOVES = {
    "one layer": ("paged_nhd stacked_nhd",),
    "lists": ("paged_nhd host_layer_first layers:all", "src_key_cache", "src_value_cache"),
    "written lists": ("host_layer_first paged_nhd layers:all", "dst_key_cache", "dst_value_cache"),
    "integers": ("paged_nhd nhd_int8_token_head convert:requantise",),
}


@pytest.mark.parametrize("name", MOVES)
def test_operators_of_transfers(name: str) -> None:
    module, given = moving(*MOVES[name])
    ops = module.register_ops()
    lists = {"transfer": ([1, 5, -1], [0, 2, 3]), "transfer_blocks": ([1, 0], [0, 2])}
    with exact_widening("cpu"):
        for function, numbers in lists.items():
            args = (*given, *map(torch.tensor, numbers))
            found = torch.library.opcheck(getattr(ops, function).default, args, {"heads": 1, "programs": 3})
            assert set(found.values()) == {"SUCCESS"}, (function, found)


def test_pages_move_in_one_graph() -> None:
    """Functions on pages and a transfer, compiled once for all numbers of pages; everything is written in order."""
    text = shipped_text("paged_nhd").replace(*SMALL["paged_nhd"]).replace("block_size: 16", "block_size: 4")
    ops = module_of(load_text(text)).register_ops()
    moves, _ = moving("paged_nhd stacked_nhd")
    away = moves.register_ops()
    compiled = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=compiled, fullgraph=True, dynamic=True)
    def step(blocks: torch.Tensor, pairs: torch.Tensor, key: Any, value: Any, out: Any) -> torch.Tensor:
        ops.zero_blocks(key, value, blocks)
        ops.copy_blocks(key, value, pairs)
        away.transfer_blocks(key, value, out, pairs[:, 0].contiguous(), pairs[:, 1].contiguous())
        return ops.fill_slots(blocks, 1, blocks.shape[0])

    for count in (3, 4):
        pool, out = torch.randn(2, 8, 4, 2, 16).bfloat16(), torch.zeros(2, 8, 4, 2, 16).bfloat16()
        before = pool.clone()
        pairs = torch.arange(2 * count).view(count, 2)
        found = step(pairs[:, 1].contiguous(), pairs, *pool, out)
        positions = torch.arange(1, count + 1)
        assert torch.equal(found, pairs[positions // 4, 1] * 4 + positions % 4)
        for side in (0, 1):
            assert torch.equal(pool[side, pairs[:, 1]], before[side, pairs[:, 0]])
            assert torch.equal(out[side, pairs[:, 1]], before[side, pairs[:, 0]])
    assert compiled.frame_count == 1
