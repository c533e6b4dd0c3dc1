"""Schedules: what is chosen, and that no choice changes a byte."""

import dataclasses
import importlib.util
import re
from itertools import product
from pathlib import Path

import pytest
import torch

from kvgen import reference
from kvgen.emit.render import render_raw
from kvgen.layout import FewHints, KernelHints, ScheduleHints
from kvgen.lower import lower
from kvgen.resolve import load, load_text
from kvgen.schedule import Schedule, schedule
from tests.generated import rendered

ROOT = Path(__file__).resolve().parents[2]


def chosen(name: str, function: str = "append") -> Schedule:
    layout = load(ROOT / "layouts" / f"{name}.yaml")
    return schedule(layout, next(plan for plan in lower(layout) if plan.name == function))


def test_one_token_with_all_heads_where_dim_is_fastest() -> None:
    for name in ("paged_nhd", "paged_hnd", "packed_hnd", "cross_layer_nhd"):
        found = chosen(name)
        assert (found.tokens, found.heads, found.num_warps) == (1, None, 2)
        assert [tile.order for tile in found.tiles] == [("head", "dim"), ("head", "dim")]


def test_a_tile_of_tokens_where_slot_is_fastest() -> None:
    found = chosen("paged_x_vector")
    assert (found.tokens, found.by_count, found.heads, found.num_warps) == (16, True, 1, 2)
    assert (found.few_tokens, found.few, found.some, found.few_warps) == (1, 64, 64, 1)
    assert [tile.order for tile in found.tiles] == [("dim", "token")] * 2
    assert [(tile.runs, tile.band) for tile in found.tiles] == [
        (True, 0),
        (True, 16),
    ]  # one address a vector, or a value
    assert found.together
    gathered = [(tile.order, tile.sides, tile.runs) for tile in chosen("paged_x_vector", "gather").tiles]
    assert gathered == [(("token", "run", "dim"), (16, 16, 8), False), (("dim", "token"), (128, 16), True)]


def test_small_rows_share_a_program() -> None:
    for function in ("append", "gather"):
        found = chosen("mla", function)
        assert (found.tokens, found.by_count, found.num_warps, found.few_warps) == (2, False, 1, 2)
    found = chosen("mla_fp8_record")
    assert (found.tokens, found.by_count, found.few, found.num_warps) == (4, True, 256, 2)


def test_tokens_whose_runs_fill_lines_share_a_program() -> None:
    """Lanes walk a run, the tokens beside it, then the next run of these: what is read and written are lines."""
    functions = ("append", "append_positions", "gather", "gather_paged")
    for name, heads, few, sides in (
        ("paged_nz", 1, 4, [(8, 8, 16)] * 2),
        ("mla_nz", None, 1, [(8, 32, 16), (8, 4, 16)]),
    ):
        for found in (chosen(name, function) for function in functions):
            assert (found.tokens, found.by_count, found.few, found.few_tokens) == (8, True, 256, few)
            assert (found.heads, found.num_warps, found.few_warps) == (heads, 1, 1)
            assert [(tile.order, tile.sides) for tile in found.tiles] == [
                (("token", "run", "dim"), side) for side in sides
            ]
    narrow, latent = ((ROOT / "layouts" / f"{name}.yaml").read_text() for name in ("paged_nz", "mla_nz"))
    wide, tiny = narrow.replace("16", "32"), narrow.replace("16", "8")  # runs that are no short ones, and vectors
    texts = [(wide, 1), (wide.replace("32", "64"), 1), (tiny, 16), (latent.replace("512", "2048"), 4)]
    for text, tokens in texts:
        layout = load_text(text)
        assert schedule(layout, lower(layout)[0]).tokens == tokens
    layout = load_text(latent.replace("512", "400").replace("dim: 64", "dim: 16"))
    assert [tile.sides for tile in schedule(layout, lower(layout)[0]).tiles] == [(8, 32, 16), (8, 16)]
    alone = dataclasses.replace(layout.schedule, append=KernelHints(tokens=1))
    found = schedule(dataclasses.replace(layout, schedule=alone), lower(layout)[0])
    assert (found.tokens, found.by_count, [tile.order for tile in found.tiles]) == (1, False, [("dim",)] * 2)


def test_warps_of_fused_appends() -> None:
    """Few tokens take more warps where there is no query."""
    expected = {
        "nhd_fused": (2, 4, 0),
        "nhd_fp8_fused_chain": (2, 4, 0),
        "nhd_fp8_fused_once": (2, 4, 0),
        "packed_hnd_fused": (2, 2, 8),
        "nhd_fused_mrope": (2, 2, 8),
        "mla_record_fused": (1, 1, 16),
    }
    for name, choice in expected.items():
        found = chosen(name, "append_fused")
        assert (found.tokens, found.num_warps, found.few_warps, found.query_heads) == (1, *choice), name


def test_warps_of_one_token_that_is_worked_on() -> None:
    warps = {"nhd_fp8_tensor": 2, "nhd_int8_token_head": 2, "nhd_mxfp8": 1, "nhd_nvfp4": 1}
    for name, many in warps.items():
        found = chosen(name)
        assert (found.tokens, found.num_warps, found.few_warps) == (1, many, 4), name


def test_rows_wait_for_their_slots_where_most_tokens_are_skipped() -> None:
    """Those of other ranks are not read; of a window's all are appended, and read before its table is asked."""
    assert (chosen("context_parallel_nhd").num_warps, chosen("context_parallel_nhd", "gather").num_warps) == (1, 2)
    assert chosen("swa_nhd").num_warps == 2
    for name, ahead in (("context_parallel_nhd", False), ("swa_nhd", True)):
        text = rendered(name)
        kernel = text[text.index("def _append_kernel(") :].partition("@triton.jit")[0]
        assert (kernel.index("value = tl.load(") < kernel.index("valid = ")) == ahead


def test_a_thread_has_what_one_access_takes() -> None:
    """Rows of 264 bytes are written whole, those of heads alone by 8 bytes at a time, rows of 128 by 16."""
    layout = load(ROOT / "layouts" / "packed_fp8_token_head.yaml")
    hints = dataclasses.replace(layout.schedule, append=KernelHints(tokens=1, heads=4))
    found = schedule(dataclasses.replace(layout, schedule=hints), lower(layout)[0])
    assert (found.num_warps, found.rows) == (2, ())  # of half as many values
    for name in ("packed_fp8_token_head", "nhd_fp8_token_head"):
        assert (chosen(name).num_warps, chosen(name).few_warps) == (2, 4)


def test_loads_are_kept_together_where_ptxas_would_part_them() -> None:
    """Of rows that are moved or divided by exponents, and of tiles under given scales or beside what is moved."""
    together = {"paged_nhd": True, "nhd_mxfp8": True, "nhd_mxfp4": False, "nhd_fp8_tensor": False, "nhd_int4": False}
    together |= {"mla_fp8": True, "paged_x_vector_fp8": True, "mla": False, "mla_fp8_record": True}
    together |= {"indexer_planar": False, "aiter_shuffle": True, "aiter_shuffle_fp8": True}
    together |= {"swa_nhd": True, "context_parallel_nhd": False}
    assert {name: chosen(name).together for name in together} == together
    text = rendered("mla_fp8")
    kernel = text[text.index("def _append_kernel(") :].partition("@triton.jit")[0]
    for earlier, later in (("rope = tl.load(", "tl.debug_barrier()"), ("tl.debug_barrier()", "valid = ")):
        assert kernel.index(earlier) < kernel.index(later)


def test_warps_of_gathers() -> None:
    """Rows of codes of a byte are gathered in pairs where accesses are wide; the slots of pages take no more warps."""
    gathered = {"paged_nhd": (1, 2), "nhd_int8_block": (2, 2), "packed_fp8_token_head": (1, 1)}
    gathered |= {"nhd_nvfp4": (1, 1), "nhd_bf16k_turbo3v": (1, 1), "paged_x_vector": (16, 4)}
    gathered |= {"paged_x_vector_fp8": (16, 4)}
    for name, expected in gathered.items():
        for function in ("gather", "gather_paged"):
            found = chosen(name, function)
            assert (found.tokens, found.num_warps) == expected, (name, function)
    assert [chosen(f"nhd_bf16k_turbo{bits}v", "gather").few_warps for bits in (2, 3, 4)] == [4, 2, 4]
    found = chosen("nhd_int8_block", "gather")
    assert (found.few_tokens, found.few, found.few_warps, found.some) == (1, 256, 4, 1024)


def test_groups_under_a_scale_by_norm_are_whole_in_a_thread() -> None:
    """64 threads have the 16 values of a group each, however many tokens there are."""
    found = chosen("nhd_bf16k_turbo4v")
    assert (found.tokens, found.num_warps, found.few_warps) == (1, 2, 2)


def test_registers_are_bounded_where_one_stream_is_looked_up() -> None:
    """By as many as all look-ups of a thread take at a time, in every append that makes codes."""
    for name, functions in {
        "nhd_bf16k_turbo3v": {"append": 64, "append_value": 64, "append_positions": 64, "append_key": 0, "gather": 0},
        "nhd_int4": {"append": 0},
    }.items():
        assert {function: chosen(name, function).registers for function in functions} == functions
    text = rendered("nhd_bf16k_turbo3v")
    assert text.count("**_registers(device, 64)") == 3
    layout = dataclasses.replace(
        load(ROOT / "layouts" / "nhd_bf16k_turbo3v.yaml"), schedule=ScheduleHints(KernelHints(num_warps=1))
    )
    assert schedule(layout, lower(layout)[0]).registers == 0  # a thread has two groups
    assert "_registers" not in rendered("nhd_int4")


def test_registers_are_bounded_of_few_tokens_whose_scales_are_codes_too() -> None:
    for name, few in {
        "nhd_nvfp4": 64,
        "planar_nvfp4": 64,
        "nhd_mxfp4": 64,
        "packed_nvfp4": 0,
        "nhd_int4": 0,
        "nhd_mxfp8": 0,
    }.items():
        assert (chosen(name).registers, chosen(name).few_registers) == (0, few), name
        assert chosen(name, "gather").few_registers == 0
    text = rendered("nhd_nvfp4")
    assert text.count("**_registers(device, 64 if num_tokens <= 1024 else 0)") == 4
    layout = dataclasses.replace(
        load(ROOT / "layouts" / "nhd_nvfp4.yaml"), schedule=ScheduleHints(KernelHints(num_warps=1))
    )
    assert schedule(layout, lower(layout)[0]).few_registers == 0  # a thread has as many values as of many tokens


def test_sides_are_powers_of_two_and_bounded() -> None:
    text = "name: x\naxes: {head: 96, dim: 80}\nblock_size: 16\nbuffers:\n"
    layout = load_text(text + "  pool: {holds: [key, value], order: block slot kv head dim}\n")
    found = schedule(layout, lower(layout)[0])
    assert found.heads == 64
    assert [tile.sides for tile in found.tiles] == [(64, 128), (64, 128)]


def test_a_stream_that_all_heads_share_is_never_divided_by_heads() -> None:
    text = "name: x\nblock_size: 4\nstreams: {key: {head: none, dim: 8}, value: {dim: 8}}\naxes: {head: 4}\nbuffers:\n"
    text += "  k: {holds: key, order: block slot dim}\n  v: {holds: value, order: block head dim slot}\n"
    layout = load_text(text)
    assert schedule(layout, lower(layout)[0]).heads is None


LAYOUTS = {
    "vectors": """
  k: {holds: key, order: block head dim//4 slot dim%4}
  v: {holds: value, order: block head dim slot}
""",
    "splits": """
  k: {holds: key, order: head%3 block slot//2 dim slot%2 head//3}
  v: {holds: value, order: (block slot) head dim}
""",
    "record": """
  pool: {order: block slot, fields: [{pad: 1, fill: 3}, {order: head, fields: [key, {pad: 3}, value]}]}
""",
}
HINTS = [KernelHints(t, h, w) for t, h, w in product((1, 2, 8), (1, 2, "all"), (1,))]
HINTS += [KernelHints(8, 2, 1, few=FewHints(up_to, tokens, 2)) for up_to, tokens in ((15, 2), (16, 2), (16, 1))]


def test_few_tokens_take_a_schedule_of_their_own() -> None:
    layout = load(ROOT / "layouts" / "paged_nhd.yaml")
    hints = KernelHints(4, "all", 8, few=FewHints(100, 2, 1))
    variant = dataclasses.replace(layout, schedule=ScheduleHints(append=hints))
    text = render_raw(variant)
    append = text[text.index("def append(") : text.index("def append_key(")]
    assert "tokens = 2 if num_tokens <= 100 else 4\n" in append
    assert "num_warps=1 if num_tokens <= 100 else 8" in append
    gather = text[text.index("def gather(") : text.index("def gather_paged(")]
    assert "num_tokens <= 100" not in gather
    for few, tokens, warps in ((FewHints(9), 4, 8), (FewHints(9, 8), 4, 8), (FewHints(9, None, 2), 4, 2)):
        hints = dataclasses.replace(hints, few=few)
        found = schedule(dataclasses.replace(layout, schedule=ScheduleHints(append=hints)), lower(layout)[0])
        assert (found.few_tokens, found.by_count, found.few_warps) == (tokens, False, warps)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_schedule_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    text = f"name: {name}\naxes: {{head: 6, dim: 12}}\nblock_size: 6\nbuffers:\n"
    layout = load_text(text + LAYOUTS[name])
    generator = torch.Generator().manual_seed(5)
    slots = torch.tensor([0, 1, 2, 3, 4, 5, 17, -1, 11, 30, 12, 13, 14, 15, 6, 7])
    sources = {
        s.name: torch.randn(len(slots), 6, 12, generator=generator, dtype=torch.float32).bfloat16()
        for s in layout.streams
    }
    expected = None
    for number, hints in enumerate([KernelHints(), *HINTS]):
        variant = dataclasses.replace(layout, schedule=ScheduleHints(hints, hints))
        module = load_module(render_raw(variant), tmp_path / f"{name}_{number}.py")
        made = module.allocate(3)
        buffers = made if isinstance(made, tuple) else (made,)
        for buffer in buffers:
            buffer.view(torch.uint8).fill_(0xA5)
        if expected is None:
            expected = [buffer.clone() for buffer in buffers]
            named = {b.name: tensor for b, tensor in zip(layout.buffers, expected, strict=True)}
            reference.append(layout, sources, named, slots)
        module.append(*sources.values(), *buffers, slots)
        for mine, theirs in zip(buffers, expected, strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), hints
        inside = (slots >= 0) & (slots < 18)
        for read, source in zip(module.gather(*buffers, slots), sources.values(), strict=True):
            assert torch.equal(read[inside], source[inside]), hints
            assert not read[~inside].any(), hints


@pytest.mark.parametrize(
    ("mode", "order", "times"),
    [
        ("fp8_e4m3", "block head slot dim", 1),
        ("fp8_e4m3", "block head dim slot", 2),
        ("int4", "block head slot dim", 1),
        ("int4", "block slot head dim//8 dim%4 dim//4%2", 2),
    ],
)
def test_what_lies_in_two_places_is_encoded_once(mode: str, order: str, times: int, tmp_path: Path) -> None:
    """Where one tile serves both, and codes share bytes alike."""
    layout = load_text(
        "name: twice\naxes: {head: 2, dim: 32}\nblock_size: 8\n"
        f"streams: {{key: {{quant: {{mode: {mode}, scale: {{per: token head, source: dynamic}}}}}}}}\n"
        f"buffers: {{a: {{key: block slot head dim}}, b: {{key: {order}}}, s: {{key.scale: block slot head}}}}\n"
    )
    text = render_raw(dataclasses.replace(layout, functions=("append", "allocate")))
    kernel = text[text.index("def _append_kernel(") :]
    assert len(re.findall(r"_(?:codes|pairs)\w*\(key", kernel[: kernel.index("\n@triton.jit")])) == times
    module = load_module(text, tmp_path / "twice.py")
    key, slots = torch.randn(5, 2, 32).bfloat16(), torch.tensor([3, 0, -1, 15, 8])
    found, expected = module.allocate(2), module.allocate(2)
    module.append(key, *found, slots)
    reference.append(layout, {"key": key}, {b.name: x for b, x in zip(layout.buffers, expected, strict=True)}, slots)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_many_tokens_take_more_heads_of_a_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where angles are those of three positions; grid and kernel agree on how many, and the bytes are the same."""
    layout = load(ROOT / "layouts" / "nhd_fused_mrope.yaml")
    text = render_raw(layout)
    assert "query_heads = 8 if num_tokens < 8192 else 16" in text
    assert "NUM_QUERY_HEADS_TILE" not in render_raw(load(ROOT / "layouts" / "packed_hnd_fused.yaml"))
    monkeypatch.setattr("kvgen.emit.query.MANY_TOKENS", 2)
    few, many = load_module(text, tmp_path / "few.py"), load_module(render_raw(layout), tmp_path / "many.py")
    generator = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(3, h, 128, generator=generator).bfloat16() for h in (32, 8, 8))
    weights = torch.randn(2, 128, generator=generator).bfloat16()
    table, positions = torch.randn(9, 128, generator=generator), torch.tensor([[0, 8, 3], [1, 9, 4], [2, 7, 5]])
    found = []
    for module in (few, many):
        out, caches = torch.full_like(query, 7.0), module.allocate(1)
        module.append_fused(query, key, value, out, *caches, torch.tensor([3, 1, 2]), positions, *weights, table)
        found.append((out, *caches))
    assert torch.equal(found[0][0][1], torch.full_like(query[1], 7.0))  # one of its positions is past the table
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


def load_module(text: str, path: Path):
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["nhd_nvfp4", "nhd_int4", "nhd_int4_planes"])
def test_a_thread_holds_whole_groups(name: str, tmp_path: Path) -> None:
    """Where tokens are many values are loaded in runs of 32; in few tokens there are more threads than that."""
    layout = load(ROOT / "layouts" / f"{name}.yaml")
    text = render_raw(layout)
    assert "8 if num_tokens <= 1024 else 32" in text[: text.index("def append_key(")]
    generator = torch.Generator().manual_seed(5)
    key, value = torch.randn(2, 5, 8, 128, generator=generator).bfloat16()
    slots = torch.tensor([3, -1, 17, 0, 30])
    scales = {scale.scale.argument: torch.ones(1) for s in layout.streams if (scale := s.scale).scale}
    for warps, held in ((1, 32), (2, 16), (4, 0)):
        variant = dataclasses.replace(layout, schedule=ScheduleHints(append=KernelHints(num_warps=warps)))
        assert [tile.held for tile in schedule(variant, lower(variant)[0]).tiles] == [held] * 2
        module = load_module(render_raw(variant), tmp_path / f"{name}_{warps}.py")
        found, expected = module.allocate(2), module.allocate(2)
        module.append(key, value, *found, slots, *scales.values())
        named = {b.name: tensor for b, tensor in zip(layout.buffers, expected, strict=True)}
        reference.append(layout, {"key": key, "value": value}, named, slots, scales=scales)
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
