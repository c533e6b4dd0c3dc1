"""The harness: what it says of right modules, of wrong ones, and of itself."""

from __future__ import annotations

import pytest
import torch

from kvgen import harness
from kvgen.harness.pools import Placement, PoolFactory, Storage
from kvgen.resolve import load_text
from tests.fake_module import FakeModule
from tests.generated import SHIPPED, module_of, shipped, shipped_text

SMALL = """
name: small
axes: {head: 3, dim: 6, layer: 2}
block_size: 5
buffers:
  key_cache: {holds: key, order: layer block slot head dim}
  value_cache:
    order: block layer slot head
    fields: [value, {pad: 4}]
"""


@pytest.fixture(scope="module")
def small():
    return load_text(SMALL)


ONE_HEAD = {f"{kind}{codes}" for kind in ("aiter_shuffle", "paged_x_vector") for codes in ("", "_fp8")}
"""Layouts whose programs have one head each: two heads are as good as eight here. On a GPU all of them are run."""


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_layout(name: str) -> None:
    """Every case of every shipped layout, interpreted on the CPU; of a fused one what it has beyond a plain one."""
    layout = load_text(shipped_text(name).replace("head: 8", "head: 2")) if name in ONE_HEAD else shipped(name)
    fused = [case.name for case in harness.cases(layout) if case.function.startswith("append_fused")]
    report = harness.run(layout, module_of(layout), device="cpu", only=fused or None)
    assert report.ok, str(report)
    assert report.count("passed") == len(report.results) > (30 if fused else 100)


def failure(layout, module, case: str) -> harness.Result:
    (result,) = harness.run(layout, module, only=case).results
    assert result.outcome == "failed", result
    return result


def test_a_right_module_passes(small) -> None:
    names = [c.name for c in harness.cases(small) if "refuses" not in c.name and not c.name.startswith("allocate")]
    report = harness.run(small, FakeModule(small), only=names)
    assert report.ok, str(report)


class ShiftsSlots(FakeModule):
    def write(self, sources, buffers, slots, **options) -> None:
        super().write(sources, buffers, torch.where(slots >= 0, slots + 1, slots), **options)


def test_names_the_value_that_differs(small) -> None:
    """One slot too far: the first byte that differs belongs to a token that was written, or to its neighbour."""
    result = failure(small, ShiftsSlots(small), "append/T1")
    found = result.difference
    assert (found.stream, found.tensor, found.layer) == ("key", "key_cache", 1)
    assert (found.head, found.dim) == (0, 0)
    assert found.slot_number == found.block * 5 + found.slot
    assert f"slot number {found.slot_number} (block {found.block}, slot {found.slot})" in result.message
    assert f"expected 0x{found.expected:02x}, got 0x{found.got:02x}" in result.message
    assert result.repeat == "kvgen test small --seed 0 --case append/T1"


class Flips(FakeModule):
    """Writes right, then flips a byte of one storage; ``where(tensor)`` says which, from the storage's start."""

    def __init__(self, layout, buffer: str, where) -> None:
        super().__init__(layout)
        self.buffer, self.where = buffer, where

    def write(self, sources, buffers, slots, **options) -> None:
        super().write(sources, buffers, slots, **options)
        tensor = buffers[self.buffer]
        data = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        data[self.where(tensor)] ^= 0xFF


def byte_of(*index: int):
    """Offset of an element's second byte."""

    def where(tensor: torch.Tensor) -> int:
        element = tensor.storage_offset() + sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        return element * tensor.element_size() + 1

    return where


@pytest.mark.parametrize(
    ("buffer", "where", "words"),
    [
        ("key_cache", byte_of(0, 2, 3, 1, 4), "byte outside every addressed value: key_cache, layer 0"),
        ("value_cache", byte_of(1, 0, 2, 2, 5), "byte outside every addressed value: value_cache, layer 0"),
        ("value_cache", byte_of(1, 1, 2, 2, 6), "padding inside the record"),
        ("key_cache", lambda tensor: 3, "byte outside every addressed value: key_cache, padding, -"),
        ("key_cache", lambda tensor: -1, "byte outside every addressed value: key_cache, padding, +"),
    ],
)
def test_names_bytes_nobody_may_touch(small, buffer: str, where, words: str) -> None:
    assert words in failure(small, Flips(small, buffer, where), "append/T1").message


@pytest.mark.parametrize("windows", [((0, 64),), ((3, 11), (16, 27), (33, 64))])
def test_every_byte_of_a_window_is_compared(windows) -> None:
    """And the first one that differs is found, wherever a window begins and ends."""
    inside = [at for start, end in windows for at in range(start, end)]
    wanted = torch.arange(64, dtype=torch.uint8)
    for at in range(64):
        got = wanted.clone()
        got[at:] ^= 0x80
        found = Storage(Placement((1,), 0, 64, windows), got, wanted).first_difference()
        assert found == min(i for i in inside if i >= at)
        got[at + 1 :] = wanted[at + 1 :]
        found = Storage(Placement((1,), 0, 64, windows), got, wanted).first_difference()
        assert found == (at if at in inside else None)


def test_names_the_neighbour(small) -> None:
    slots = set()

    class Neighbour(FakeModule):
        def write(self, sources, buffers, numbers, **options) -> None:
            super().write(sources, buffers, numbers, **options)
            slots.add((int(numbers[0]) + 1) % 25)
            other = numbers + 1 if int(numbers[0]) < 24 else numbers - 24
            super().write({"value": sources["value"]}, buffers, other, **options)

    result = failure(small, Neighbour(small), "append/T1")
    assert f"neighbour slot {slots.pop()}" in result.message


def test_names_the_other_stream(small) -> None:
    class Both(FakeModule):
        def append_key(self, key, key_cache, slots, **options) -> None:
            other = {"key_cache": key_cache, "value_cache": self.seen}
            super().write({"key": key, "value": key}, other, slots, **options)

    module = Both(small)
    pools = PoolFactory(small, "cpu", 0)
    make = pools.make
    pools.make = lambda *args: setattr(module, "seen", (pool := make(*args)).actual["value_cache"]) or pool
    from kvgen.harness.run import _run

    case = next(c for c in harness.cases(small) if c.name == "append_key/alone")
    assert "the other stream, value" in _run(case, small, module, pools, 0, "").message


def test_names_the_row_of_an_output(small) -> None:
    class Forgets(FakeModule):
        def gather(self, *args, **options):
            key, value = super().gather(*args, **options)
            value[2, 1, 3] = -value[2, 1, 3]
            return key, value

    found = failure(small, Forgets(small), "gather/T7").difference
    assert (found.stream, found.head, found.dim, found.byte) == ("value", 1, 3, 1)
    assert found.expected ^ found.got == 0x80


def test_bytes_beside_an_output_count(small) -> None:
    class Spills(FakeModule):
        def gather(self, *args, out=None, **options):
            result = super().gather(*args, out=out, **options)
            out[0].as_strided((1,), (1,), out[0].storage_offset() + out[0].stride(0) - 1)[0] = 1.0
            return result

    message = failure(small, Spills(small), "gather/skipped_strided").message
    assert "byte outside every addressed value: output of key" in message


# A module that takes what it should refuse writes through a stride of 0.
@pytest.mark.filterwarnings("ignore:Use of index_put_ on expanded tensors")
def test_a_missing_refusal_is_reported(small) -> None:
    result = failure(small, FakeModule(small), "append/refuses_key_cache_expanded_dim2")
    assert "the call went through" in result.message


def test_a_refusal_names_its_tensor(small) -> None:
    class Vague(FakeModule):
        def append(self, *args, **options) -> None:
            raise ValueError("bad input")

    assert "does not name key" in failure(small, Vague(small), "append/refuses_key_dtype").message


@pytest.mark.parametrize(("error", "said"), [(KeyError("oops"), "KeyError: 'oops'"), (SystemExit(3), "SystemExit: 3")])
def test_an_exception_is_a_failure(small, error, said) -> None:
    class Raises(FakeModule):
        def append(self, *args, **options) -> None:
            raise error

    assert failure(small, Raises(small), "append/T1").message == f"raised {said}"


def test_a_missing_function_is_reported_once(small) -> None:
    report = harness.run(small, FakeModule(small), only="allocate")
    assert not report.ok
    assert report.missing == ("allocate",)
    assert str(report) == "MISSING allocate\nsmall on cpu, seed 0: 1 missing"


@pytest.mark.filterwarnings("ignore:Use of index_put_ on expanded tensors")
def test_a_case_alone_repeats_what_all_of_them_found(small) -> None:
    module = ShiftsSlots(small)
    together = {r.case: r.message for r in harness.run(small, module, only="append", seed=3).failures}
    for case in ("append/T7", "append/padded", "append/skipped"):
        (alone,) = harness.run(small, module, only=case, seed=3).results
        assert alone.message == together[case]


def test_seeds_differ(small) -> None:
    pools = [PoolFactory(small, "cpu", seed).make() for seed in (0, 1)]
    assert not torch.equal(*(p.storages["key_cache"].actual for p in pools))


def test_buffers_differ() -> None:
    """Bytes read from the wrong buffer could not be told apart otherwise."""
    pool = PoolFactory(shipped("paged_nhd"), "cpu", 0).make()
    key, value = (storage.actual for storage in pool.storages.values())
    assert not torch.equal(key[-4096:], value[-4096:])


def test_unknown_cases_are_refused(small) -> None:
    with pytest.raises(ValueError, match="no case is named append/T8"):
        harness.run(small, FakeModule(small), only=["append/T8", "gather"])


@pytest.mark.parametrize("dynamic", ["head", "dim", "block_size"])
def test_dynamic_extents_are_no_powers_of_two(dynamic: str) -> None:
    text = SMALL.replace("head: 3", "head: dynamic") if dynamic == "head" else SMALL
    text = text.replace("dim: 6", "dim: dynamic").replace("fields: [value, {pad: 4}]", "fields: [value]")
    if dynamic == "dim":
        text = text.replace(
            "order: block layer slot head\n    fields: [value]", "order: block layer slot head dim\n    holds: value"
        )
    else:
        text = text.replace("dim: dynamic", "dim: 6")
    text = text.replace("block_size: 5", "block_size: dynamic") if dynamic == "block_size" else text
    layout = load_text(text)
    sizes = PoolFactory(layout, "cpu", 0).sizes
    size = sizes.block_size if dynamic == "block_size" else sizes.dynamic[dynamic]
    assert size & (size - 1)
    names = [c.name for c in harness.cases(layout) if "refuses" not in c.name and not c.name.startswith("allocate")]
    assert harness.run(layout, FakeModule(layout), only=names).ok


def test_a_world_of_any_size(small) -> None:
    """Cases are those of a few ranks, and take no longer."""
    text = SMALL.replace("block_size: 5", "block_size: 4") + "slots: {shard: {world: 2147483647, interleave: 2}}\n"
    layout = load_text(text)
    names = [c.name for c in harness.cases(layout)]
    assert [n for n in names if n.startswith("slot_mapping/padded")] == [
        f"slot_mapping/padded_rank{rank}" for rank in (0, 1, 2147483647 // 2, 2147483646)
    ]
    only = [n for n in names if n.startswith(("slot_mapping", "append_positions", "gather_paged")) and "ref" not in n]
    report = harness.run(layout, FakeModule(layout), only=only)
    assert report.ok, str(report)
