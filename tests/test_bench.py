"""``kvgen bench`` without a GPU: inputs, what is compared, who is refused, and all that is made of times."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvgen import harness
from kvgen.against import parse
from kvgen.bench import compare, markdown, plot, results, rivals, run, table, targets, timing
from kvgen.bench.functions import FUNCTIONS
from kvgen.bench.libraries import flashinfer, vllm
from kvgen.bench.results import Row, Run, Timing
from kvgen.bench.rivals import Rival
from kvgen.bench.task import PROMPT, Scene, number_of_sets
from kvgen.diagnostics import KvgenError
from kvgen.resolve import load_text
from tests import rivals as adapters
from tests.command import kvgen
from tests.generated import module_of, shipped, transfer
from tools import make_benchmarks

command = sys.modules["kvgen.cli.bench"]  # the package has the function under that name


class FakeClock:
    """Times that follow from how often it was asked: 10 µs, 20 µs, … on the device, 4 µs on the host beside 5."""

    def __init__(self):
        self.asked = []

    def device_time(self, calls):
        self.asked.append(len(calls))
        calls[0]()
        return 10.0 * len(self.asked)

    def host_time(self, calls):
        return 4.0, 5.0

    def copy_rate(self):
        return 4e12


def plan(*tokens, functions=None, against=(), **options):
    return run.Plan("cpu", dict.fromkeys(tokens, functions), tuple(against), 0, 0, **options)


def measured(name, *tokens, functions=None, against=(), clock=None):
    layout = shipped(name) if isinstance(name, str) else name
    return list(run.measure(layout, module_of(layout), plan(*tokens, functions=functions, against=against), clock))


TORCH = Rival("torch", rivals.torch_indexing)
COMMON = ("append", "gather", "gather_paged", "copy_blocks", "zero_blocks")
SMALL = """
name: small
axes: {head: 2, dim: 8}
block_size: 4
buffers:
  k: {holds: key, order: block head dim//4 slot dim%4}
  v: {holds: value, order: block slot head dim}
"""


# inputs


@pytest.mark.parametrize("tokens", [1, 5, 300, PROMPT + 9])
def test_slots_are_distinct_and_the_tables_lead_to_them(tokens):
    layout = load_text(SMALL + "slots: {skip: 0}\n")
    scene = Scene(layout, "cpu", tokens)
    first, second = scene.tasks(tokens, 2)
    assert not torch.equal(first.slots, second.slots) or tokens == 1
    for task in (first, second):
        assert len(task.slots.unique()) == tokens
        assert 0 < int(task.slots.min()) <= int(task.slots.max()) < scene.sizes.slots
        rows = task.block_table[task.request_ids].long()
        blocks = rows.gather(1, (task.positions // 4)[:, None]).flatten()
        assert torch.equal(blocks * 4 + task.positions % 4, task.slots)
        counts = task.cu_seq_lens.diff()
        assert torch.equal(task.seq_lens, task.starts + counts)
        assert task.cu_seq_lens.tolist()[:: len(counts)] == [0, tokens]
        assert torch.equal(task.request_ids.bincount(), counts)
        assert [s.shape for s in task.streams.values()] == [(tokens, 2, 8)] * 2
    assert len(counts) == {1: 1, 5: 5, 300: 1, PROMPT + 9: 2}[tokens]
    again = Scene(layout, "cpu", tokens).tasks(tokens, 1)[0]
    assert torch.equal(again.streams["key"], first.streams["key"])


def test_streams_are_slices_of_one_projection():
    task = Scene(shipped("paged_nhd"), "cpu", 2).tasks(2, 1)[0]
    key, value = task.streams.values()
    assert key.stride(0) == value.stride(0) == (32 + 8 + 8) * 128
    assert value.data_ptr() - key.data_ptr() == 8 * 128 * 2


def test_a_pool_is_as_large_as_asked_and_never_too_small():
    assert Scene(shipped("paged_nhd"), "cpu", 1, 1000).sizes.blocks == 62
    assert Scene(shipped("cross_layer_nhd"), "cpu", 1, 1024).sizes.blocks == 16  # of four layers
    assert Scene(shipped("paged_nhd"), "cpu", 300, 16).sizes.blocks == 36  # pairs of 18


def test_open_extents_are_likely_ones():
    text = "name: x\naxes: {head: dynamic, dim: dynamic}\nblock_size: dynamic\nbuffers:\n"
    layout = load_text(
        text + "  k: {holds: key, order: block slot head dim}\n  v: {holds: value, order: block slot head dim}\n"
    )
    scene = Scene(layout, "cpu", 1, 64)
    assert [tuple(b.shape) for b in scene.buffers.values()] == [(4, 16, 8, 128)] * 2
    assert scene.extents == {"slot": 16, "head": 8, "dim": 128}


def test_sets_do_not_fit_into_the_cache_together():
    assert number_of_sets(1 << 20, 50 << 20) == 64
    assert number_of_sets(5 << 20, 50 << 20) == 20
    assert number_of_sets(1 << 28, 50 << 20) == 8


# results are compared


@pytest.mark.parametrize("name", ["paged_x_vector", "mla_fp8_record", "cross_layer_nhd", "nhd_int4_group", "swa_nhd"])
def test_torch_finds_the_same_bytes(name):
    rows = measured(name, 3, against=[TORCH])
    functions = [f for f in COMMON if f != "append" or name != "nhd_int4_group"]
    assert [row.function for row in rows] == functions
    assert [[t.name for t in row.timings] for row in rows] == [["kvgen", "torch"]] * len(functions)
    assert [t.note for row in rows for t in row.timings] == [""] * 2 * len(functions)


def test_prompts_too():
    rows = measured(load_text(SMALL), 270, against=[TORCH])
    assert [row.function for row in rows] == list(COMMON)
    assert [row.bytes for row in rows] == [270 * 128] * 3 + [2 * 67 * 4 * 64, 67 * 4 * 64]
    assert all(timing.note == "" for row in rows for timing in row.timings)


def test_of_a_shard_nothing_is_gathered_by_pages():
    rows = measured("context_parallel_nhd", 1)
    assert [row.function for row in rows] == ["append", "gather", "copy_blocks", "zero_blocks"]


def test_an_adapter_that_agrees_is_timed():
    clock = FakeClock()
    functions = ("append", "gather", "gather_paged")
    rows = measured("paged_nhd", 2, functions=functions, against=[Rival("mine", adapters.right)], clock=clock)
    assert [list(row.timings) for row in rows] == [
        [Timing("kvgen", 10.0, 4.0, "", 5.0), Timing("mine", 20.0, 4.0, "", 5.0)],
        [Timing("kvgen", 30.0, 4.0, "", 5.0), Timing("mine", 40.0, 4.0, "", 5.0)],
        [Timing("kvgen", 50.0, 4.0, "", 5.0)],
    ]
    assert rows[0].ours.of_add == 0.8
    assert clock.asked == [8] * 5
    assert rows[0].rate(rows[0].ours) == pytest.approx(2 * 8192 / 10e-6)
    assert rows[0].ratio(rows[0].timings[1]) == 2.0


@pytest.mark.parametrize(
    ("adapter", "notes"),
    [
        (
            adapters.off_by_one,
            [r"differs: byte \d+ and \d+ more of 65536 of key_cache", "differs: it gives 1 tensors, not 2"],
        ),
        (adapters.broken, ["raised RuntimeError: no kernel"] * 2),
    ],
)
def test_an_adapter_that_differs_is_said_and_not_timed(adapter, notes):
    clock = FakeClock()
    rows = measured("paged_nhd", 2, functions=("append", "gather"), against=[Rival("bad", adapter), TORCH], clock=clock)
    for row, note in zip(rows, notes, strict=True):
        ours, bad, torch_ = row.timings
        assert (bad.device_us, bad.host_us) == (None, None)
        assert re.fullmatch(note, bad.note)
        assert ours.device_us
        assert torch_.device_us
    assert len(clock.asked) == 4


def test_differences_are_counted_over_parts(monkeypatch):
    monkeypatch.setattr(compare, "PART", 4)
    left, right = torch.zeros(11, dtype=torch.uint8), torch.zeros(11, dtype=torch.uint8)
    right[[5, 7, 10]] = 1
    assert compare._unequal(left, right) == "byte 5 and 2 more of 11"


def test_rows_of_another_type_or_shape_differ():
    for change, note in ((lambda x: x.float(), "torch.float32"), (lambda x: x[:1], r"(1, 8, 128)")):
        adapter = Rival(
            "bad", lambda task, change=change: lambda: tuple(change(x) for x in rivals.torch_indexing(task)())
        )
        ((row),) = measured("paged_nhd", 2, functions=("gather",), against=[adapter])
        assert note in row.timings[1].note
        assert row.timings[1].note.startswith("differs: key is ")


def test_what_cannot_be_captured_has_a_host_time_only():
    adapter = Rival("eager", lambda task: rivals.Eager(rivals.torch_indexing(task)))
    (row,) = measured("paged_nhd", 2, functions=("append",), against=[adapter], clock=FakeClock())
    assert row.timings[1] == Timing("eager", None, 4.0, "not captured in a graph", 5.0)
    assert row.ratio(row.timings[1]) is None


def test_the_reference_is_compared_and_not_timed():
    (row,) = measured("nhd_fp8_tensor", 2, functions=("append",), against=[TORCH], clock=FakeClock())
    assert row.timings[1] == Timing("torch", None, None, "kvgen's reference: compared, not timed")


def test_of_many_tokens_the_reference_is_shown_some(monkeypatch):
    monkeypatch.setattr(run, "REFERRED", 2)
    shown = []
    original = rivals.torch_reference

    def counted(task):
        shown.append(task.tokens)
        return original(task)

    for name, functions in (("nhd_fp8_tensor", ("append", "gather")), ("nhd_fused", ("append_fused",))):
        rows = measured(name, 5, functions=functions, against=[Rival("torch", counted)])
        assert [row.timings[1].note for row in rows] == [""] * len(rows)
    assert shown == [5, 2] * 3


# transfers and fused appends


@pytest.mark.parametrize(
    ("name", "tokens", "read_and_written"),
    [
        ("nhd_to_hnd", 3, 2 * 3 * 4096),
        ("nhd_head_shard", 20, 2 * 20 * 2048),  # half of the heads
        ("nhd_64_to_16", 20, 4 * 2 * 20 * 4096),  # all layers
        ("mla_to_host", 20, 4 * 2 * 20 * 1152),
    ],
)
def test_transfers_move_what_the_reference_does(name, tokens, read_and_written):
    what = transfer(name)
    module = module_of(what)
    others = (TORCH, Rival("copy", rivals.copy), rivals.capped(module, 1))
    found = list(run.measure(what, module, plan(tokens, against=others), FakeClock()))
    assert [(row.function, row.bytes) for row in found] == [
        ("transfer", read_and_written),
        ("transfer_blocks", read_and_written),
    ]
    for row in found:
        assert [(t.name, t.device_us is None) for t in row.timings] == [
            ("kvgen", False),
            ("torch", True),
            ("copy", False),
            ("1 programs", False),
        ]
        assert row.timings[1].note == "kvgen's reference: compared, not timed"


def test_a_transfer_that_moves_other_bytes_differs():
    what = transfer("nhd_to_hnd")

    def late(task):
        return lambda: task.sides[1].pools[0]["dst_key_cache"][task.blocks[1][0].long()].zero_()

    (row,) = run.measure(what, module_of(what), plan(9, functions=("transfer",), against=[Rival("x", late)]), None)
    assert row.timings[1].note.startswith("differs: byte ")


@pytest.mark.parametrize(("name", "token"), [("nhd_fused", 8192 + 512), ("mla_record_fused", 1152 + 656 + 4096 + 256)])
def test_a_fused_append_beside_the_reference(name, token):
    (row,) = measured(name, 3, functions=("append_fused",), against=[TORCH])
    assert row.bytes == 3 * token
    assert [t.note for t in row.timings] == ["", ""]


def almost(what, factor):
    """The reference, with another value, another query, or a byte changed that belongs to no token."""

    def adapter(task):
        parts = dict(task.fused.parts)
        if what == "value":
            parts["value"] = parts["value"] * factor
        reference = rivals.torch_reference(replace(task, fused=replace(task.fused, parts=parts)))

        def write():
            reference()
            if what == "query":
                task.fused.query_out[-1, -1, -1] = factor
            if what == "elsewhere":
                free = next(slot for slot in range(task.blocks * 16) if slot not in task.slots.tolist())
                task.buffers["kv_cache"][free // 16, 0, free % 16, 0] = factor

        return write

    return Rival(what, adapter)


@pytest.mark.parametrize(
    ("what", "factor", "note"),
    [
        ("value", 1.0, ""),
        ("value", 1.004, ""),  # less than bfloat16 tells apart, more than nothing
        ("value", 1.1, "differs: 4"),
        ("query", 9.0, "differs: 1 of 24576 values of query_out"),
        ("elsewhere", 1.0, "differs: byte "),
    ],
)
def test_values_of_a_fused_append_may_be_rounded_otherwise(what, factor, note):
    (row,) = measured("packed_hnd_fused", 6, functions=("append_fused",), against=[almost(what, factor), TORCH])
    assert row.timings[1].note.startswith(note)
    assert bool(row.timings[1].note) == bool(note)
    assert row.timings[2].note == ""


def test_a_chain_of_library_kernels_stands_for_a_fused_append(libraries):
    for name in ("nhd_fused", "packed_hnd_fused"):
        (row,) = measured(name, 5, functions=("append_fused",), against=LIBRARIES)
        assert [(t.name, t.note) for t in row.timings] == [("kvgen", ""), ("flashinfer", "")]
    assert libraries.layouts == ["NHD", "HND"]


def test_rope_codes_and_append_are_one_launch_of_a_library(libraries):
    """Where one scale serves keys and values."""
    text = Path("layouts/nhd_fp8_fused_once.yaml").read_text()
    layout = load_text(text.replace("value: key\n", "value: {quant: {mode: fp8_e4m3, scale: key}}\n"))
    (row,) = measured(layout, 5, functions=("append_fused",), against=LIBRARIES)
    assert [(t.name, t.note) for t in row.timings] == [("kvgen", ""), ("flashinfer", "")]
    assert libraries.layouts == ["fp8"]


@pytest.mark.parametrize("name", ["nhd_fused_mrope", "nhd_fp8_fused_once", "mla_record_fused"])
def test_which_fused_appends_have_no_chain(libraries, name):
    (row,) = measured(name, 2, functions=("append_fused",), against=LIBRARIES)
    assert [t.name for t in row.timings] == ["kvgen"]


# libraries


def flashinfer_semantics(key, value, batch, positions, pool, indices, indptr, last, kv_layout="NHD"):
    """What its documentation says, token by token."""
    assert {t.dtype for t in (batch, positions, indices, indptr, last)} == {torch.int32}
    for t in range(len(key)):
        request, position = int(batch[t]), int(positions[t])
        size = pool[0].shape[1 if kv_layout == "NHD" else 2]
        pages = int(indptr[request + 1] - indptr[request])
        assert position < (pages - 1) * size + int(last[request]) <= pages * size
        page, entry = int(indices[int(indptr[request]) + position // size]), position % size
        for cache, rows in zip(pool, (key, value), strict=True):
            where = cache[page, entry] if kv_layout == "NHD" else cache[page, :, entry]
            where.copy_(rows[t])


@pytest.fixture
def libraries(monkeypatch):
    """Stand-ins for FlashInfer and for vLLM's operator, on the CPU."""
    module = types.ModuleType("flashinfer")
    module.layouts = []

    def append_paged_kv_cache(*arguments):
        module.layouts.append(arguments[-1])
        assert arguments[4][0].stride() == arguments[4][1].stride()
        flashinfer_semantics(*arguments)

    def append_paged_mla_kv_cache(latent, rope, batch, positions, latents, ropes, *pages):
        assert latents.shape[2] + ropes.shape[2] == 576
        flashinfer_semantics(latent, rope, batch, positions, (latents, ropes), *pages)

    def turn(positions, query, key, dim, table, neox):
        assert neox
        cos, sin = (x.unsqueeze(1) for x in table[positions].chunk(2, dim=1))
        for rows in (query, key):
            a, b = rows.unflatten(1, (-1, dim)).float().chunk(2, dim=2)
            rows.copy_(torch.cat([a * cos - b * sin, b * cos + a * sin], dim=2).flatten(1))

    def codes_too(query, key, _, rest, value, table, at, pool, indices, bounds, batch, positions, **options):
        assert (query.shape[1], rest.shape[2], options["page_size"]) == (1, 0, pool[0].shape[1])
        turn(at, query.flatten(1), turned := key.flatten(1).clone(), key.shape[2], table, options["is_neox"])
        last = torch.full((len(bounds) - 1,), options["page_size"], dtype=torch.int32)
        rows = [(x.float() * options["quant_scale_kv"]).to(torch.float8_e4m3fn) for x in (turned.view_as(key), value)]
        flashinfer_semantics(*rows, batch, positions, pool, indices, bounds, last, options["kv_layout"])
        module.layouts.append("fp8")

    module.rope = types.ModuleType("flashinfer.rope")
    module.rope.rope_quantize_fp8_append_paged_kv_cache = codes_too
    module.append_paged_kv_cache = append_paged_kv_cache
    module.apply_rope_with_cos_sin_cache_inplace = turn
    module.page = types.ModuleType("flashinfer.page")
    module.page.append_paged_mla_kv_cache = append_paged_mla_kv_cache
    for part in (module.page, module.rope):
        monkeypatch.setitem(sys.modules, part.__name__, part)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm._C", types.ModuleType("vllm._C"))
    library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    library.define(
        "reshape_and_cache_flash(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, "
        "Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()"
    )

    def reshape_and_cache_flash(key, value, key_cache, value_cache, slots, kind, k_scale, v_scale):
        size = key_cache.shape[1]
        for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
            if kind == "fp8":
                rows = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            cache[slots // size, slots % size] = rows

    library.define(
        "concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor! kv_cache, Tensor slot_mapping, str kv_cache_dtype, "
        "Tensor scale) -> ()"
    )

    def concat_and_cache_mla(latent, rope, cache, slots, kind, scale):
        assert (kind, cache.shape[2]) == ("auto", 576)
        cache[slots // cache.shape[1], slots % cache.shape[1]] = torch.cat([latent, rope], dim=1)

    library.impl("reshape_and_cache_flash", reshape_and_cache_flash, "CPU")
    library.impl("concat_and_cache_mla", concat_and_cache_mla, "CPU")
    yield module
    library._destroy()


LIBRARIES = (Rival("flashinfer", flashinfer), Rival("vllm", vllm))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("paged_nhd", ["NHD"]), ("packed_hnd", ["HND"]), ("cross_layer_nhd", ["NHD"]), ("nhd_fp8_tensor", [])],
)
def test_libraries_are_called_as_they_want(libraries, name, kinds):
    (row,) = measured(name, 3, functions=("append",), against=LIBRARIES)
    assert {t.name: t.note for t in row.timings[1:]} == {"flashinfer": "", "vllm": ""} if kinds else {"vllm": ""}
    assert libraries.layouts == kinds


@pytest.mark.parametrize(("name", "others"), [("mla", ["flashinfer", "vllm"]), ("mla_split", ["flashinfer"])])
def test_rows_of_mla(libraries, name, others):
    (row,) = measured(name, 70, functions=("append",), against=LIBRARIES)
    assert [(t.name, t.note) for t in row.timings[1:]] == [(other, "") for other in others]


def test_libraries_are_called_once_before(libraries):
    called = []
    adapter = lambda task: lambda: called.append((task.function, next(iter(task.streams))))  # noqa: E731
    documents = [shipped(name) for name in ("paged_nhd", "packed_nhd", "mla", "nhd_fused")]
    documents.append(transfer("nhd_to_hnd"))
    known = [Rival("mine", adapter, "1.0"), Rival("torch", adapter)]
    rivals.prepare(known, documents, None, "cpu")
    assert sorted(called) == [("append", "key"), ("append", "latent"), ("append_fused", "key")]
    called.clear()
    rivals.prepare(known, documents, {"append_fused", "gather"}, "cpu")
    assert called == [("append_fused", "key")]


def test_prompts_of_flashinfer(libraries):
    layout = load_text(SMALL.replace("head dim//4 slot dim%4", "slot head dim"))
    rows = measured(layout, 270, functions=("append",), against=LIBRARIES)
    assert [timing.note for timing in rows[0].timings] == ["", "", ""]


@pytest.mark.parametrize("name", ["paged_x_vector", "mla_assembled", "nhd_fp8_token_head", "swa_nhd", "nhd_bf16k_fp8v"])
def test_libraries_do_not_take_part_where_they_cannot(libraries, name):
    layout = shipped(name)
    task = Scene(layout, "cpu", 2).tasks(2, 1)[0]
    found = [rival.adapter(task.of(f.name)) for rival in LIBRARIES for f in FUNCTIONS]
    assert found == [None] * len(found)


def test_known_rivals_are_those_that_are_installed(monkeypatch):
    """Without a GPU libraries take no part, installed or not."""
    module = types.ModuleType("flashinfer")
    module.__version__ = "0.6.18"
    module.__spec__ = object()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert [rival.name for rival in rivals.known_rivals("cpu")] == ["torch", "copy"]
    assert [(rival.name, rival.version) for rival in rivals.known_rivals("cuda")] == [
        ("torch", ""),
        ("copy", ""),
        ("flashinfer", "0.6.18"),
    ]


PAGES = """
name: pages
axes: {head: 2, dim: 8}
block_size: 4
buffers:
"""
PLAIN = "  k: {holds: key, order: head (block slot) dim}\n  v: {holds: value, order: block slot head dim}\n"
PADDED = "  p: {order: block slot, fields: [{order: head, fields: [key, value]}, {pad: 8}]}\n"


@pytest.mark.parametrize(("buffers", "others"), [(PLAIN, ["torch"]), (PADDED, [])])
def test_pages(buffers, others):
    """What padding becomes is not the same: torch takes no part there."""
    clock = FakeClock()
    rows = measured(
        load_text(PAGES + buffers), 9, functions=("copy_blocks", "zero_blocks"), against=[TORCH], clock=clock
    )
    assert [(row.function, row.bytes) for row in rows] == [("copy_blocks", 2 * 2 * 256), ("zero_blocks", 2 * 256)]
    assert [[(t.name, t.note) for t in row.timings[1:]] for row in rows] == [[(name, "") for name in others]] * 2


def test_bytes_that_torch_cannot_index_by_their_type():
    text = PAGES.replace("buffers", "streams: {key: {dtype: float8_e4m3fn}, value: key}\nbuffers") + PLAIN
    rows = measured(load_text(text), 5, against=[TORCH])
    assert [row.bytes for row in rows] == [5 * 64] * 3 + [256, 128]
    assert [[t.note for t in row.timings] for row in rows] == [["", ""]] * 5


def test_pages_that_are_not_copied_differ():
    def lazy(task):
        return lambda: None

    rows = measured(load_text(PAGES + PLAIN), 9, functions=("copy_blocks",), against=[Rival("lazy", lazy)])
    assert rows[0].timings[1].note.startswith("differs: byte ")


@pytest.mark.parametrize(
    ("target", "function", "note"),
    [
        ("tests.rivals:write", "append", ""),
        ("append=tests.rivals:write(key, value, key_cache, value_cache, slots=slot_mapping)", "append", ""),
        (
            "append=tests.rivals:write(value, key, key_cache, value_cache, slots=slot_mapping)",
            "append",
            "differs: byte ",
        ),
        ("gather=tests.rivals:read(key_cache, value_cache, slots)", "gather", ""),
        ("gather=tests.rivals:read", "gather", "raised TypeError: read() got an unexpected keyword argument 'out'"),
    ],
)
def test_functions_that_are_called_as_the_generated_ones(target, function, note):
    module = module_of(shipped("paged_nhd"))
    rival = rivals.against(parse(target), module)
    rows = measured("paged_nhd", 3, functions=("append", "gather"), against=[rival])
    found = {row.function: row.timing(target) for row in rows}
    assert found.pop(function).note.startswith(note) if note else found.pop(function).note == ""
    assert list(found.values()) == [None]


def test_a_library_that_does_not_work_is_left_out(monkeypatch, tmp_path):
    (tmp_path / "flashinfer.py").write_text("raise OSError('no driver')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert [rival.name for rival in rivals.known_rivals("cuda")] == ["torch", "copy"]


def test_adapters_by_name():
    assert rivals.load_adapter("tests.rivals:right") == Rival("tests.rivals:right", adapters.right)
    for name in ("nowhere:f", "tests.rivals:nothing", "tests.rivals", "tests.rivals:number", ":", ""):
        with pytest.raises(KvgenError) as caught:
            rivals.load_adapter(name)
        assert [d.code for d in caught.value.diagnostics] == ["KV742"]


# the clock


class FakeCuda:
    """Records what is captured; every event is ``step`` milliseconds later than the one before."""

    def __init__(self):
        self.events = self.captured = self.replays = 0
        self.capturing = False
        self.step = 3.0
        outer = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                outer.events += 1
                self.at = outer.events

            def elapsed_time(self, other):
                return (other.at - self.at) * outer.step

        class CUDAGraph:
            def replay(self):
                outer.replays += 1

        self.Event, self.CUDAGraph = Event, CUDAGraph

    @contextlib.contextmanager
    def graph(self, graph):
        self.capturing = True
        yield
        self.capturing = False

    def synchronize(self):
        assert not self.capturing

    def mem_get_info(self):
        return 4096, 4096

    def call(self):
        self.captured += self.capturing


@pytest.fixture
def clock(monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(timing, "SETTLE", 0.0)
    monkeypatch.setattr(torch, "cuda", FakeCuda())
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device, **options: zeros(*sizes, **options))
    return timing.CudaClock()


def test_a_graph_goes_through_all_calls_and_is_divided_by_them(clock):
    assert clock.device_time([clock.cuda.call] * 8) == 3000 / 8
    assert (clock.cuda.captured, clock.cuda.replays) == (8, 2 + 7)


def test_a_short_graph_goes_through_them_again(clock):
    clock.cuda.step = 0.1
    assert clock.device_time([clock.cuda.call] * 8) == pytest.approx(100 / 48)  # six times 100 µs
    assert (clock.cuda.captured, clock.cuda.replays) == (8 + 48, 2 + 33)  # 20 ms
    clock.cuda.step = 0.001
    assert clock.device_time([clock.cuda.call]) == pytest.approx(1 / 16)


def test_a_slow_call_is_not_made_a_hundred_times(clock, monkeypatch):
    """And ``add_`` as often: what the first calls after a pause cost more is in both times, or in neither."""
    now, made = [0.0], [0, 0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call(which, seconds):
        made[which] += 1
        now[0] += seconds

    monkeypatch.setattr(clock, "slots", SimpleNamespace(add_=lambda number: call(1, 4e-6)))
    for seconds, count in ((5e-6, 50), (1e-3, 2 + 1), (0.5, 1 + 1)):
        made[:] = [0, 0]
        assert clock.host_time([lambda seconds=seconds: call(0, seconds)]) == pytest.approx((seconds * 1e6, 4))
        assert made == [2 + timing.HOST_ROUNDS * count, timing.HOST_ROUNDS * count]


def test_a_machine_that_is_slow_for_a_while_is_so_for_both(clock, monkeypatch):
    """Calls and ``add_`` take turns: half of the rounds at a third of the speed leave the ratio as it is."""
    now, rounds = [0.0], [0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call(microseconds):
        now[0] += microseconds * 1e-6 * (3 if rounds[0] > timing.HOST_ROUNDS + 2 else 1)

    monkeypatch.setattr(clock, "slots", SimpleNamespace(add_=lambda number: call(8)))
    monkeypatch.setattr(clock.cuda, "synchronize", lambda: rounds.__setitem__(0, rounds[0] + 1))
    ours, add = clock.host_time([lambda: call(6)])
    assert ours / add == pytest.approx(0.75)


def test_the_time_of_a_copy_is_the_median_of_three(monkeypatch):
    times = iter([7.0, 30.0, 1.0, 9.0, 8.0, 2.0, 6.0, 4.0])  # an append and three copies, twice
    clock = FakeClock()
    monkeypatch.setattr(clock, "device_time", lambda calls: next(times))
    found = measured("paged_nhd", 2, 3, functions=("append",), against=[Rival("copy", rivals.copy)], clock=clock)
    assert [(row.ours.device_us, row.timing("copy").device_us) for row in found] == [(7.0, 9.0), (8.0, 4.0)]
    assert found[0].of_copy == 9 / 7


def test_a_large_copy_is_made_in_pieces(monkeypatch):
    zeros, made = torch.zeros, []
    monkeypatch.setattr(torch, "zeros", lambda *sizes, **options: made.append(zeros(*sizes, **options)) or made[-1])
    monkeypatch.setattr(rivals, "PIECE", 3000)
    task = Scene(shipped("paged_nhd"), "cpu", 2).tasks(2, 1)[0].of("append", 16384)
    call = rivals.copy(task).make()
    source, target = made[-2:]
    source.random_()
    call()
    assert len(source) == 8192
    assert torch.equal(source, target)


# what is made of times

RUN = Run(
    "NVIDIA H200",
    "2026-11-29",
    {"kvgen": "0.1.0", "torch": "2.11.0", "flashinfer": "0.6.18"},
    1 << 20,
    4.25e12,
    (
        Row("paged_nhd", "append", 32, 262144, 64, (Timing("kvgen", 1.46, 9.5, "", 10), Timing("torch", 12.0, 30.0))),
        Row(
            "paged_nhd",
            "append",
            32768,
            268435456,
            8,
            (
                Timing("kvgen", 69.9, 9.7, "", 10.0),
                Timing("torch", 387.0, 31.0),
                Timing("flashinfer", 73.9, 14.0),
                Timing("copy", 64.3, None),
                Timing("mine:f", None, None, "differs: byte 5 and 2 more of 8 of key_cache"),
            ),
        ),
        Row("mla", "append", 32, 73728, 64, (Timing("kvgen", 1.51, 9.4, "", 8.0),)),
        Row(
            "mla",
            "gather",
            32,
            73728,
            64,
            (Timing("kvgen", 1.3, 20.0), Timing("torch", None, 900.0, "not captured in a graph")),
        ),
    ),
)


def test_json_reads_back_and_has_the_rates():
    text = results.to_json(RUN)
    assert results.from_json(text, "x") == RUN
    row = json.loads(text)["rows"][1]
    assert row["of_copy"] == pytest.approx(64.3 / 69.9)
    assert row["timings"][0]["bytes_per_s"] == pytest.approx(3.8403e12, rel=1e-4)
    assert row["timings"][0]["of_add"] == pytest.approx(0.97)
    assert row["timings"][2]["ratio"] == pytest.approx(73.9 / 69.9)
    assert row["timings"][4]["bytes_per_s"] is None


def test_results_of_one_machine_are_one_run():
    one, other = replace(RUN, rows=RUN.rows[:2]), replace(RUN, rows=RUN.rows[2:], copy_rate=4e12)
    assert results.merged([one, other]) == RUN
    for change in ({"device": "NVIDIA B200"}, {"versions": {"kvgen": "0.2.0"}}):
        with pytest.raises(KvgenError):
            results.merged([one, replace(other, **change)])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 2, "rows": [{}]}'])
def test_other_json_is_refused(text):
    with pytest.raises(KvgenError) as caught:
        results.from_json(text, "some.json")
    assert [d.code for d in caught.value.diagnostics] == ["KV743"]


def test_a_table_has_times_rates_and_ratios(capsys):
    from rich.console import Console

    rows = [row for row in RUN.rows if row.layout == "paged_nhd"]
    Console(width=200).print(table.layout_table(rows, timed=True))
    title, head, first, second = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    assert title == "paged_nhd"
    assert head.startswith("function tokens bytes kvgen µs GB/s of copy host µs of add_ torch µs host µs flashinfer")
    assert first == "append 32 262,144 1.46 180 – 9.50 ×0.95 12.0 ×8.22 30.0"
    assert second.startswith("append 32768 268,435,456 69.9 3840 92% 9.70 ×0.97 387 ×5.54 31.0 73.9 ×1.06 14.0 64.3 ×0")
    assert table.notes(rows) == ["append, mine:f, 32768 tokens: differs: byte 5 and 2 more of 8 of key_cache"]


def test_markdown():
    assert markdown.markdown(RUN, "append", ["mla", "paged_nhd"]) == (
        "| append | 32 tokens | 32768 |\n"
        "|---|---|---|\n"
        "| mla | 1.51 | – |\n"
        "| paged_nhd | 1.46 | 69.9 (3.84 TB/s, 92%) |\n"
        "| – torch | 12.0 (×8.22) | 387 (×5.54) |\n"
        "| – flashinfer 0.6.18 | – | 73.9 (×1.06) |\n"
        "| – copy | – | 64.3 (×0.92) |\n"
    )
    assert markdown.host_markdown(RUN) == (
        "| eager call | median, µs | range | of `slots.add_(0)` | range |\n"
        "|---|---|---|---|---|\n"
        "| append, kvgen | 9.50 | 9.40 – 9.70 | ×0.97 | ×0.95 – ×1.18 |\n"
        "| append, torch | 30.5 | 30.0 – 31.0 | – | – |\n"
        "| append, flashinfer 0.6.18 | 14.0 | 14.0 – 14.0 | – | – |\n"
        "| gather, kvgen | 20.0 | 20.0 – 20.0 | – | – |\n"
        "| `slots.add_(0)` of torch | 10.0 | 8.00 – 10.0 | | |\n"
    )


def row(layout, function, tokens, nbytes, ours, **others):
    """``ours`` is the device's time, and the host's behind it; of others the device's."""
    device, host = ours if isinstance(ours, tuple) else (ours, None)
    timings = [Timing("kvgen", device, host, "", host and 6.5)]
    timings += [Timing(name.replace("_", " "), time, None) for name, time in others.items()]
    return Row(layout, function, tokens, nbytes, 8, tuple(timings))


WIDE = replace(
    RUN,
    rows=(
        row("paged_nhd", "append", 32, 262144, (1.5, 4.0), torch=6.0, flashinfer=2.25, copy=1.6),
        row("paged_nhd", "append", 32768, 268435456, (70.0, 7.0), torch=300.0, flashinfer=69.0, copy=68.0),
        row("nhd_fp8_tensor", "append", 32768, 201326592, (60.0, 5.0), torch=None, copy=51.0),
        row("mla", "append", 32, 73728, (1.6, 6.5), torch=5.8, copy=1.5),
        row("nhd_fused", "append", 32, 262144, (1.6, 5.0), torch=6.0, copy=1.6),
        row("nhd_fused", "append_fused", 32, 278528, 2.08, torch=None, flashinfer=5.0, copy=1.6),
        row("packed_hnd_fused", "append", 32, 262144, (1.5, 5.0), copy=1.6),
        row("packed_hnd_fused", "append_fused", 32, 802816, 4.0, copy=1.6),
        row("nhd_to_hnd", "transfer_blocks", 4096, 33554432, 20.0, torch=None, copy=17.0, **{"8_programs": 40.0}),
        row("nhd_to_host", "transfer_blocks", 4096, 33554432, 320.0, torch=None, copy=300.0),
    ),
)


def test_a_survey_has_the_best_rival_of_every_layout():
    assert make_benchmarks.families(WIDE)["MLA and indexers"] == ["mla"]
    text = markdown.survey(WIDE, "append", make_benchmarks.families(replace(WIDE, rows=WIDE.rows[:4])))
    assert text == (
        "| append | 32 tokens | 32768 | TB/s | of a copy | best rival |\n"
        "|---|---|---|---|---|---|\n"
        "| *keys and values as they come* | | | | | |\n"
        "| paged_nhd | 1.50 ×1.50 | 70.0 ×0.99 | 3.83 | 97% | flashinfer |\n"
        "| *fp8* | | | | | |\n"
        "| nhd_fp8_tensor | – | 60.0 | 3.36 | 85% | – |\n"
        "| *MLA and indexers* | | | | | |\n"
        "| mla | 1.60 ×3.62 | – | 0.05 | 94% | torch |\n"
    )


def test_fused_appends_and_transfers_in_tables():
    assert markdown.fused(WIDE) == (
        "| append_fused | 32 tokens |\n|---|---|\n"
        "| nhd_fused | 2.08 (0.13 TB/s, 77%) |\n"
        "| – of its append | ×1.30 |\n"
        "| – flashinfer 0.6.18 | 5.00 (×2.40) |\n"
        "| packed_hnd_fused | 4.00 (0.20 TB/s, 40%) |\n"
        "| – of its append | ×2.67 |\n"
    )
    assert markdown.transfers(WIDE) == (
        "| transfer | 4096 tokens | 8 programs |\n|---|---|---|\n"
        "| nhd_to_hnd | 1.68 TB/s (85%) | 0.839 TB/s (42%) |\n"
        "| nhd_to_host | 0.105 TB/s (94%) | – |\n"
    )


def test_targets_are_judged_in_a_table():
    found = targets.summary(WIDE).splitlines()
    assert found == [
        "| target | met by | furthest from it (tokens) |",
        "|---|---|---|",
        "| append of 4096 tokens or more: 95% of the best rate of as many bytes or fewer | 2 of 2 | – |",
        "| append: not behind others that do the same | 2 of 3 | paged_nhd ×0.99 (32768) |",
        "| append of 32: 1.55 µs; in the median ×0.97 of a copy's time | 2 of 4 | mla 1.60 (32), nhd_fused 1.60 (32) |",
        "| fused append of 256 or fewer: ×1.25 of the plain one | 0 of 1 | nhd_fused ×1.30 (32) |",
        "| transfer of 4096 or more: 90% of a copy's rate | 1 of 2 | nhd_to_hnd 85% (4096) |",
        "| eager append of 256 or fewer: 0.8 of what `slots.add_(0)` costs its caller | 3 of 4 | mla ×1.00 (32) |",
    ]
    many = [row(f"x{i}", "append", 4096, 100, 10.0 + i, copy=9.0) for i in range(8)]
    line = targets.summary(replace(WIDE, rows=tuple(many))).splitlines()[2]
    named = ", ".join(f"x{i} {10 / (10 + i):.0%} (4096)" for i in (7, 6, 5, 4, 3))
    assert line.endswith(f" | 1 of 8 | {named} |")
    # a is held to the rival of b, which moves 4 % more; b and c are not to d, which moves 6 % more; e is to all.
    rows = [
        row("a", "append", 4096, 100, 100.0),
        row("b", "append", 4096, 104, 104.0, torch=88.0),
        row("c", "append", 4096, 104, 90.0),
        row("d", "append", 4096, 111, 70.0),
        row("e", "append", 4096, 900, 900.0),
    ]
    line = targets.summary(replace(WIDE, rows=tuple(rows))).splitlines()[2]
    assert line.endswith(" | 2 of 5 | e 63% (4096), a 85% (4096), b 85% (4096) |")
    wide = row("q", "append", 32768, 100, 60.0), row("q", "append_fused", 32768, 300, 1e-4)
    line = targets.summary(replace(WIDE, rows=wide)).splitlines()[3]
    assert line == "| fused append of 32768 with its query: 3 TB/s | 1 of 1 | – |"


def test_pages_are_filled_between_their_marks(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    page, picture, data = tmp_path / "page.md", tmp_path / "append.svg", tmp_path / "run.json"
    page.write_text(
        "a\n<!-- bench: machine -->\nold\n<!-- end of bench -->\nb\n<!-- bench: append mla -->\n<!-- end of bench -->\n"
    )
    data.write_text(results.to_json(RUN))
    arguments = [str(data), "--page", str(page), "--plot", str(picture), "--layouts", "paged_nhd", "mla"]
    assert make_benchmarks.main(arguments) == 0
    text = page.read_text()
    assert text == make_benchmarks.filled(text, RUN)
    assert text.splitlines()[:3] == ["a", "<!-- bench: machine -->", ""]
    assert (
        "NVIDIA H200, kvgen 0.1.0, torch 2.11.0, flashinfer 0.6.18, 2026-11-29; a large copy runs at 4.25 TB/s." in text
    )
    assert "\nNot in it: aiter_shuffle, aiter_shuffle_fp8, apart_to_packed, block_v1, " in text
    assert text.endswith("| mla | 1.51 (0.05 TB/s) |\n\n<!-- end of bench -->\n")
    assert "old" not in text
    assert picture.read_bytes().startswith(b"<?xml")
    page.write_text("<!-- bench: stubbed -->\nold\n<!-- end of bench -->\n")
    assert make_benchmarks.main(arguments) == 0
    assert "\nold\n" in page.read_text()
    host = [tmp_path / "36.json", tmp_path / "39.json"]
    for path, time in zip(host, (1.5, 1.25), strict=True):
        path.write_text(json.dumps({"torch": "2.1", "triton": path.stem, "tokens": 32, "times": {"mla": time}}))
    assert make_benchmarks.main([*arguments, "--host", *map(str, host)]) == 0
    assert page.read_text().splitlines()[2:5] == [
        "| append of 32 tokens, µs | triton 36, torch 2.1 | triton 39, torch 2.1 |",
        "|---|---|---|",
        "| mla | 1.50 | 1.25 |",
    ]
    data.write_text("{}")
    assert make_benchmarks.main(arguments) == 1


def test_the_same_run_gives_the_same_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    for name in ("a.svg", "b.svg", "c.png"):
        plot.plot(RUN, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    plot.plot(replace(RUN, rows=RUN.rows[:1]), tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() != (tmp_path / "b.svg").read_bytes()


# the command


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def timed(monkeypatch):
    monkeypatch.setattr(command, "device_and_clock", lambda dry_run: ("cpu", None if dry_run else FakeClock()))
    monkeypatch.setattr(run, "last_level_cache", lambda device: 0)


def test_a_run_is_printed_and_written(folder, timed):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    arguments = ("bench", "paged_nhd", "--tokens", "2", "--function", "append", "--no-check", "--pool-tokens", 64)
    arguments += ("--adapter", "tests.rivals:right", "--against", "tests.rivals:write")
    for _ in range(2):  # the second time over what the first wrote
        result = kvgen(*arguments, "--json", "a/b.json", "--plot", "a/b.svg")
        assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[0].endswith("a large copy runs at 4.00 TB/s")
    assert "append         2  16,384      10.0   1.6     400%     4.00    ×0.80  20.0 ×2.00" in result.out
    written = results.from_json(Path("a/b.json").read_text(), "")
    assert [timing.name for timing in written.rows[0].timings] == [
        *("kvgen", "torch", "copy", "tests.rivals:right", "tests.rivals:write")
    ]
    assert (written.pool_tokens, written.copy_rate, written.rows[0].ours.of_add) == (64, 4e12, 0.8)
    assert Path("a/b.svg").exists()


def test_what_the_harness_finds_wrong_is_not_timed(folder, timed, monkeypatch):
    original = harness.run
    asked = []

    def failing(layout, module, **options):
        asked.append(options["only"])
        del module.append
        return original(layout, module, **options | {"only": ["append/T1", "append/T0"]})

    monkeypatch.setattr(harness, "run", failing)
    arguments = ("bench", "paged_nhd", "--tokens", "1", "--function", "append", "--pool-tokens", "64")
    result = kvgen(*arguments, "--json", "a.json")
    assert result.code == 1
    assert result.err.startswith("error[KV741]: paged_nhd is not timed: the harness fails in append/T0 and 1 more")
    assert "  help: `kvgen test paged_nhd` says what differs" in result.err
    assert asked == [["append"]]
    assert results.from_json(Path("a.json").read_text(), "").rows == ()
    assert kvgen(*arguments, "--no-check").code == 0


def test_a_function_may_have_numbers_of_tokens_of_its_own(folder):
    Path("small.yaml").write_text(SMALL)
    asked = ("--function", "gather=2,9", "--function", "append", "--tokens", "1,2")
    result = kvgen("bench", "small.yaml", "--dry-run", "--no-check", *asked)
    lines = [line.split()[:2] for line in result.out.splitlines()[4:]]
    assert lines == [["append", "1"], ["append", "2"], ["gather", "2"], ["gather", "9"]]
    assert kvgen("bench", "small.yaml", "--dry-run", "--function", "gather=x").code == 2
    assert "KV710" in kvgen("bench", "small.yaml", "--dry-run", "--function", "scatter=1").err


def test_a_dry_run_times_nothing(folder):
    Path("small.yaml").write_text(SMALL)
    result = kvgen("bench", "small.yaml", "--dry-run", "--function", "gather")
    assert (result.code, result.err) == (0, "")
    lines = [line.split() for line in result.out.splitlines()[-3:]]
    assert lines == [
        ["function", "tokens", "bytes", "torch"],
        ["gather", "1", "128", "same", "bytes"],
        ["gather", "32", "4,096", "same", "bytes"],
    ]


def test_transfers_have_a_reference_a_copy_and_caps(folder):
    result = kvgen("bench", "nhd_to_fp8", "--dry-run", "--no-check", "--tokens", "1,20", "--programs", "2")
    assert (result.code, result.err) == (0, "")
    lines = [" ".join(line.split()) for line in result.out.splitlines()[2:]]
    assert lines[:6] == [
        "nhd_to_fp8",
        "function tokens bytes torch 2 programs",
        "transfer 1 6,208 same bytes same bytes",
        "transfer_blocks 1 6,208 same bytes same bytes",
        "transfer 20 124,160 same bytes same bytes",
        "transfer_blocks 20 124,160 same bytes same bytes",
    ]
    # Codes that are moved under a scale that is an argument want none.
    Path("moved.yaml").write_text(
        "name: moved\ntransfer: {from: nhd_fp8_tensor, to: {layout: nhd_fp8_tensor, block_size: 24}}"
    )
    result = kvgen("bench", "moved.yaml", "--dry-run", "--tokens", "20")
    assert [line.split() for line in result.out.splitlines()[-2:]] == [
        ["transfer", "20", "81,920", "same", "bytes"],
        ["transfer_blocks", "20", "81,920", "same", "bytes"],
    ]
    assert kvgen("tune", "nhd_to_hnd", "--dry-run").err.startswith("error[KV701]: nhd_to_hnd is a transfer and no")


def test_memory_that_is_too_small_ends_a_layout_not_the_run(folder, timed, monkeypatch):
    def scarce(layout, *rest):
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    monkeypatch.setattr(run, "measure", scarce)
    result = kvgen("bench", "paged_nhd", "mla", "--no-check")
    assert result.code == 2
    assert result.err.count("error[KV744]") == 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            [],
            2,
            "error[KV713]: torch finds no CUDA device\n  help: nothing is timed on a CPU; --dry-run does everything",
        ),
        (["--tokens", "1,x"], 2, "is no list of numbers"),
        (["--tokens", "0"], 2, "is no list of numbers"),
        (["--tokens", ""], 2, "is no list of numbers"),
        (["--dry-run", "--json", "x.json"], 2, "a dry run has no times to write"),
        (["--dry-run", "--adapter", "nowhere:f"], 2, "error[KV742]: nowhere:f cannot be imported"),
        (["--dry-run", "--function", "nothing"], 2, "error[KV710]"),
        (["--dry-run", "--against", "a b"], 2, "error[KV715]"),
        (["--dry-run", "--against", "mix=tests.rivals:write"], 2, "error[KV715]"),
    ],
)
def test_called_wrongly(folder, monkeypatch, arguments, code, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = kvgen("bench", "paged_nhd", *arguments)
    assert result.code == code
    assert said in " ".join(result.err.split()) or said in result.err


def test_without_matplotlib(folder, monkeypatch):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    result = kvgen("bench", "paged_nhd", "--plot", "x.svg")
    assert result.code == 2
    assert result.err.startswith(
        "error[KV714]: a plot needs matplotlib, which is not installed\n  help: it is in the extra"
    )
