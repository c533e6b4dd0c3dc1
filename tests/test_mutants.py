"""Mistakes planted in generated text: each is reported by the harness.

One counts only if the module builds, runs without an exception and changes a byte: that is seen by running it beside
the module it was made from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from kvgen import harness, runtime
from kvgen.emit import render_layout
from kvgen.harness.bench import Bench
from kvgen.harness.pools import PoolFactory
from kvgen.layout import Layout
from kvgen.resolve import load_text
from tests.generated import shipped_text


@dataclass(frozen=True)
class Mutant:
    """``pattern`` → ``replacement`` inside one function of the text; ``case`` must report it.

    Stray writes stay within a block of the pool, where the harness has bytes to compare: bounds are moved by a slot or
    two and not taken away, since what lies past those bytes belongs to the process.
    """

    name: str
    layouts: tuple[str, ...]
    function: str
    pattern: str
    replacement: str
    case: str

    def apply(self, text: str) -> str:
        start = text.index(f"def {self.function}(")
        end = re.compile(r"^(?:def |@)", re.M).search(text, start + 4)
        stop = end.start() if end else len(text)
        body, count = re.subn(self.pattern, self.replacement, text[start:stop])
        assert count, f"{self.name}: nothing in {self.function} is like {self.pattern!r}; the text has changed"
        return text[:start] + body + text[stop:]


DIM_MINOR = ("paged_nhd", "paged_hnd", "block_v1", "packed_hnd", "cross_layer_nhd")
SLOT_LINE = r"slot = slot_number % BLOCK_SIZE"

MUTANTS = [
    Mutant(
        "slot plus one", DIM_MINOR, "_append_kernel", SLOT_LINE, "slot = (slot_number + 1) % BLOCK_SIZE", "append/T1"
    ),
    Mutant(
        "slot minus one", DIM_MINOR, "_append_kernel", SLOT_LINE, "slot = (slot_number + 15) % BLOCK_SIZE", "append/T1"
    ),
    Mutant("skip of -1 lost", DIM_MINOR, "_append_kernel", r"slot_number >= 0", "slot_number >= -1", "append/skipped"),
    Mutant("bound too high", DIM_MINOR, "_append_kernel", r"< num_slots\)", "< num_slots + 2)", "append/skipped"),
    Mutant("bound too low", DIM_MINOR, "_append_kernel", r"< num_slots\)", "< num_slots - 1)", "append/T7"),
    Mutant("tail mask lost", ("tails",), "_append_kernel", r"(key,)\s+mask=[^\n]*,\n", r"\1\n", "append/T7"),
    Mutant(
        "V with K's strides",
        ("paged_nhd", "paged_hnd"),
        "_append_kernel",
        r"\* value_cache_stride",
        "* key_cache_stride",
        "append/padded",
    ),
    Mutant(
        "32-bit address",
        ("paged_nhd", "paged_hnd"),
        "_append_kernel",
        r"block \* key_cache_stride_block",
        "(block * key_cache_stride_block).to(tl.int32)",
        "append/huge",
    ),
    Mutant("wrong split", ("paged_x_vector",), "_append_kernel", r"\(dim // 8\)", "(dim // 16)", "append/T1"),
    Mutant("wrong remainder", ("paged_x_vector",), "_append_kernel", r"\(dim % 8\)", "(dim % 4)", "append/T1"),
    Mutant(
        "halves swapped",
        ("packed_nhd", "packed_hnd", "cross_layer_nhd"),
        "_append_kernel",
        r"(?s)(\+ dim\[None, :\]),(\s+key,.*?\+ dim\[None, :\])\s+\+ 128,",
        r"\1 + 128,\2,",
        "append/T1",
    ),
    Mutant("V on top of K", ("block_v1", "pair_nhd"), "_append_kernel", r"\+ kv_cache_stride_kv\n", "\n", "append/T1"),
    Mutant(
        "layer ignored",
        ("cross_layer_nhd", "cross_layer_hnd"),
        "_append_kernel",
        r"\+ layer \* kv_cache_stride_layer",
        "",
        "append/last_layer",
    ),
    Mutant(
        "heads a slot apart",
        ("packed_hnd",),
        "_append_kernel",
        r"\* kv_cache_stride_head",
        "* kv_cache_stride_slot",
        "append/T1",
    ),
    Mutant(
        "head stride assumed",
        ("paged_nhd", "paged_hnd"),
        "_append_kernel",
        r"\* key_stride_head",
        "* HEAD_DIM",
        "append/source_joint",
    ),
    Mutant(
        "token stride assumed",
        ("paged_nhd", "packed_nhd"),
        "_append_kernel",
        r"\* key_stride_token",
        "* (NUM_HEADS * HEAD_DIM)",
        "append/source_fused",
    ),
    Mutant(
        "block stride assumed",
        ("paged_nhd", "paged_hnd"),
        "_append_kernel",
        r"\* key_cache_stride_block",
        "* (BLOCK_SIZE * NUM_HEADS * HEAD_DIM)",
        "append/inside",
    ),
    Mutant(
        "one stream writes a slot too far",
        ("paged_nhd", "block_v1"),
        "_append_value_kernel",
        SLOT_LINE,
        "slot = (slot_number + 1) % BLOCK_SIZE",
        "append_value/alone",
    ),
    Mutant(
        "run of slots shifted",
        ("paged_x_vector",),
        "_append_kernel",
        r"(?<!\w)run_slot = ",
        "run_slot = 1 + ",
        "append/prefill",
    ),
    Mutant(
        "gather of V from K", ("paged_nhd",), "_gather_kernel", r"value_cache_ptr\n", "key_cache_ptr\n", "gather/T1"
    ),
    Mutant(
        "skipped rows zeroed",
        ("paged_nhd", "packed_nhd"),
        "_gather_kernel",
        r"written = valid\n",
        "written = in_range\n",
        "gather/skipped_strided",
    ),
    Mutant(
        "page past the table",
        ("paged_nhd", "context_parallel_nhd"),
        "_slot_of",
        r"column < num_columns",
        "column <= num_columns",
        "slot_mapping/request_ids_int64",
    ),
    Mutant(
        "position off by one",
        ("paged_nhd",),
        "_slot_mapping_kernel",
        r"(position = tl\.load\(context_lens_ptr[^\n]*)",
        r"\1 + 1",
        "slot_mapping/decode_context_lens_int64",
    ),
    Mutant(
        "owner of the wrong rank",
        ("context_parallel_nhd",),
        "_slot_of",
        r"== rank",
        "!= rank",
        "slot_mapping/request_ids_int64",
    ),
]


def layout_text(name: str) -> str:
    """A shipped layout, or ``tails``: heads and dims that fill no power of two."""
    if name == "tails":
        return shipped_text("paged_nhd").replace("head: 8, dim: 128", "head: 6, dim: 46")
    return shipped_text(name)


PAIRS = [pytest.param(m, name, id=f"{m.name}-{name}") for m in MUTANTS for name in m.layouts]


@pytest.mark.parametrize(("mutant", "name"), PAIRS)
def test_is_reported(mutant: Mutant, name: str) -> None:
    layout = load_text(layout_text(name))
    text = render_layout(layout)
    right = runtime.import_module(layout.name, text)
    wrong = runtime.import_module(layout.name, mutant.apply(text))
    case = mutant.case + ("_rank0" if layout.slots.shard else "")
    assert harness.run(layout, right, only=case).ok
    assert changes_a_byte(layout, right, wrong, case)
    (result,) = harness.run(layout, wrong, only=case).results
    assert result.outcome == "failed"
    assert "raised" not in result.message, result.message
    assert result.difference is not None or case.startswith("slot_mapping")


class Recorder:
    """A module whose calls are passed on, and everything that they return or may have written kept as bytes."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.seen = module, []

    def __getattr__(self, name: str):
        function = getattr(self.module, name)

        def call(*args, **options):
            result = function(*args, **options)
            tensors = [*args, *(result if isinstance(result, tuple) else [result]), *(options.get("out") or ())]
            self.seen += [as_bytes(t) for t in tensors if isinstance(t, torch.Tensor)]
            return result

        return call


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A storage's bytes; of one that takes gigabytes, those of the tensor."""
    if tensor.untyped_storage().nbytes() > 1 << 30:
        return tensor.contiguous().view(torch.uint8)
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()


def changes_a_byte(layout: Layout, right: ModuleType, wrong: ModuleType, case: str) -> bool:
    """Whether the two modules leave different bytes behind on the inputs of one case. Exceptions pass."""
    seen = []
    for module in (right, wrong):
        recorder = Recorder(module)
        body = next(c.body for c in harness.cases(layout) if c.name == case)
        try:
            body(Bench(layout, recorder, PoolFactory(layout, "cpu", 0), 0, case))
        except harness.Mismatch:
            assert module is wrong
        seen.append(recorder.seen)
    # A case that stops at its first difference may have made fewer calls.
    return any(not torch.equal(a, b) for a, b in zip(*seen, strict=False))


def test_ten_kinds_in_three_layouts() -> None:
    """What the planted mistakes cover: enough kinds, and in more than one layout."""
    assert len(MUTANTS) >= 10
    assert len({name for m in MUTANTS for name in m.layouts}) >= 3


def test_the_recorder_tells_no_difference_where_there_is_none() -> None:
    layout = load_text(shipped_text("paged_nhd"))
    module = runtime.import_module(layout.name, render_layout(layout))
    assert not changes_a_byte(layout, module, module, "append/T1")
