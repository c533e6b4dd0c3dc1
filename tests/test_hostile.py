"""Tensors that no caller should hand in: errors that name them, or the right bytes, and never a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvgen.documents import load_text as load_document
from kvgen.harness.bench import Bench
from kvgen.harness.interpreter import exact_widening
from kvgen.harness.pools import PoolFactory
from kvgen.layout import Layout
from kvgen.resolve import load_text
from tests.generated import ROOT, module_of, shipped_text

# What torch says of such tensors before kvgen has seen them.
pytestmark = [pytest.mark.filterwarnings(f"ignore:.*{what}:UserWarning") for what in ("FakeTensor", "nested tensors")]

LAYOUTS = {
    "paged_nhd": ("head: 8, dim: 128", "head: 2, dim: 16"),
    "paged_x_vector": ("head: 8, dim: 128", "head: 2, dim: 16"),
    "cross_layer_nhd": ("head: 8, dim: 128", "head: 2, dim: 16"),
    "mla": ("dim: 512", "dim: 48"),
    "packed_fp8_token_head": ("head: 8, dim: 128", "head: 2, dim: 16"),
}


class Ours(torch.Tensor):
    """A subclass that changes nothing."""


def faked(tensor: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode().from_tensor(tensor)


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "meta": lambda x: x.to("meta"),
    "fake": faked,
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "complex": lambda x: torch.zeros(x.shape, dtype=torch.complex64),
    "bool": lambda x: torch.zeros(x.shape, dtype=torch.bool),
    "array": lambda x: x.float().numpy(),
    "nothing": lambda x: None,
    "scalar": lambda x: x.flatten()[0],
    "no elements": lambda x: x[..., :0] if x.dim() > 1 else None,
    "all at one address": lambda x: x[..., :1].expand(x.shape),
    "every other element": lambda x: torch.stack([x, x], dim=-1).flatten(-2)[..., ::2],
}
TOLD_BY_TORCH = {"fake", "nested"}
"""What these are, PyTorch says itself: they have no memory, or no shape."""

SAME: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "subclass": lambda x: x.as_subclass(Ours),
    "requires_grad": lambda x: x.detach().requires_grad_() if x.dtype.itemsize > 1 and x.is_floating_point() else x,
}


def small(name: str) -> Layout:
    return load_text(shipped_text(name).replace(*LAYOUTS[name]))


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("name", LAYOUTS)
def test_is_refused_by_name(name: str, kind: str) -> None:
    """In every place of an append and a gather, before a byte is written."""
    layout = small(name)
    bench = Bench(layout, module_of(layout), PoolFactory(layout, "cpu", 0), 0, "hostile")
    pool = bench.pool()
    slots = bench.tensor(bench.slots(3))
    for function in ("append", "gather"):
        args = bench.append_args(pool, bench.sources(3, pool), slots)
        if function == "gather":
            args = {k: v for k, v in args.items() if k in pool.actual} | {"slots": slots}
        for argument in args:
            hostile = REFUSED[kind](args[argument])
            if hostile is None and kind != "nothing":
                continue
            given = args | {argument: hostile}
            errors = (TypeError, ValueError, *([RuntimeError] if kind in TOLD_BY_TORCH else []))
            with pytest.raises(errors) as caught:
                getattr(bench.module, function)(*given.values(), **bench.layer_args(None))
            if kind not in TOLD_BY_TORCH:  # of two tensors that do not agree, either may be named
                assert any(word in str(caught.value) for word in args), caught.value
    bench.check(pool)


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_without_memory_are_told_so(name: str) -> None:
    """Where all are on the device meta, nothing else is wrong with them."""
    layout = small(name)
    bench = Bench(layout, module_of(layout), PoolFactory(layout, "cpu", 0), 0, "hostile")
    pool, slots = bench.pool(), bench.tensor(bench.slots(3))
    args = bench.append_args(pool, bench.sources(3, pool), slots)
    calls = {"append": args, "gather": {k: v for k, v in args.items() if k in pool.actual} | {"slots": slots}}
    for function, given in calls.items():
        with pytest.raises(ValueError, match="tensors on the device meta have no memory"):
            getattr(bench.module, function)(*(x.to("meta") for x in given.values()), **bench.layer_args(None))


STRIDED = {"all at one address", "every other element"}
"""What tables of pages and pairs may be: they have any strides."""


@pytest.mark.parametrize("kind", REFUSED)
def test_of_pages_and_transfers_is_refused_by_name(kind: str) -> None:
    """In every place, before a byte is written."""
    layout = small("paged_nhd")
    bench = Bench(layout, module_of(layout), PoolFactory(layout, "cpu", 0), 0, "hostile")
    pool, other = bench.pool(), bench.pool()
    path = str(ROOT / "layouts" / "transfers" / "hostile.yaml")
    ends = "from: {layout: paged_nhd, SIZE}, to: {layout: paged_nhd, SIZE}".replace("SIZE", "axes: {head: 2, dim: 16}")
    moves = module_of(load_document(f"name: hostile\ntransfer: {{{ends}}}\n", path))
    blocks, (keys, values), others = torch.tensor([0, 1]), pool.actual.values(), other.actual.values()
    places = ("src_key_cache", "src_value_cache", "dst_key_cache", "dst_value_cache")
    sides = dict(zip(places, (keys, values, *others), strict=True))
    tables = {"req_to_page": torch.arange(6).view(2, 3), "req_pool_indices": blocks, "seq_lens": blocks}
    calls = {
        bench.module.copy_blocks: pool.actual | {"pairs": torch.tensor([[0, 1], [2, 3]])},
        bench.module.zero_blocks: pool.actual | {"blocks": blocks},
        bench.module.gather_page_table: tables | {"out": torch.zeros(2, 3, dtype=torch.int64)},
        moves.transfer: sides | {"src_slots": blocks, "dst_slots": blocks},
        moves.transfer_blocks: sides | {"src_blocks": blocks, "dst_blocks": blocks},
    }
    for call, args in calls.items():
        for argument, tensor in args.items():
            hostile = REFUSED[kind](tensor)
            if hostile is None and kind != "nothing":
                continue
            if argument in ("pairs", "req_to_page", "out") and (kind in STRIDED or kind == "no elements"):
                continue
            errors = (TypeError, ValueError, *([RuntimeError] if kind in TOLD_BY_TORCH else []))
            with pytest.raises(errors) as caught:
                call(*(args | {argument: hostile}).values())
            if kind not in TOLD_BY_TORCH:
                assert any(word in str(caught.value) for word in args), caught.value
    bench.check(pool)
    bench.check(other)


@pytest.mark.parametrize("kind", SAME)
@pytest.mark.parametrize("name", LAYOUTS)
def test_is_taken_for_what_it_is(name: str, kind: str) -> None:
    """Append and gather give what they give for plain tensors."""
    layout = small(name)
    bench = Bench(layout, module_of(layout), PoolFactory(layout, "cpu", 0), 0, "hostile")
    pool = bench.pool()
    pool.actual = {name: SAME[kind](buffer) for name, buffer in pool.actual.items()}
    slots = bench.tensor([-1, *bench.slots(3)])
    sources = {stream: SAME[kind](x) for stream, x in bench.sources(4, pool).items()}
    with exact_widening("cpu"):
        bench.append(pool, sources, SAME[kind](slots))
        bench.gather(pool, slots)
