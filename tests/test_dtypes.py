"""Streams that come in types of several sizes: each call decides, and each stream for itself."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgen import harness
from kvgen.documents import load_text
from kvgen.harness.interpreter import exact_widening
from kvgen.harness.pools import PoolFactory
from kvgen.layout import Layout
from tests.generated import module_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD = "axes: {head: 2, dim: 24}\nblock_size: 4\n"
STREAMS = (
    "streams:\n  key: {dtype: [float16, float32, bfloat16], quant: {mode: fp8_e4m3, scale: {per: token head}}}\n"
    "  value: {dtype: [float32, bfloat16, float16], store: bfloat16}\n"
)
CACHE = "buffers: {cache: {order: block slot head, fields: [key, key.scale, value]}}\n"


def layout() -> Layout:
    return load_text(f"name: sizes\n{HEAD}{STREAMS}{CACHE}")


@pytest.mark.parametrize(("key", "value"), [*product(DTYPES, DTYPES)])
def test_every_pair_of_types_is_appended(key: torch.dtype, value: torch.dtype) -> None:
    """The same numbers give the same bytes, whatever types they come in: all of these are exact in each."""
    module = module_of(layout())
    numbers = torch.arange(3 * 2 * 24).reshape(3, 2, 24) % 127 - 60
    slots = torch.tensor([5, 0, 2])
    pools = [module.allocate(2) for _ in range(2)]
    with exact_widening("cpu"):
        module.append(numbers.to(key), -numbers.to(value), pools[0], slots)
        module.append(numbers.half(), -numbers.float(), pools[1], slots)
        assert torch.equal(*pools)
        keys, values = module.gather(pools[0], slots, dtype=value)
    assert (keys.dtype, values.dtype) == (value, value)
    assert torch.equal(values, -numbers.to(value))
    assert (keys.float() - numbers).abs().max() <= 60 * 2**-4


def test_the_harness_tries_all_of_them() -> None:
    pools = PoolFactory(layout(), "cpu", 0)
    seen = {tuple(pools.make(variant=i).dtypes.values()) for i in range(pools.variants())}
    assert {pair[0] for pair in seen} == {pair[1] for pair in seen} == set(DTYPES)
    wanted = [f"append/{name}" for name in ("dtype1", "dtype2", "source_fused", "source_joint", "edges1", "edges2")]
    wanted += ["gather/dtype1", "gather/dtype2", "gather/as_float16", "gather/out_float32", "gather_codes/T0"]
    report = harness.run(layout(), module_of(layout()), only=wanted)
    assert report.ok, str(report)


def test_transfers_take_them(tmp_path: Path) -> None:
    buffer = "buffers: {cache: {key: block head slot dim}}\n"
    (tmp_path / "wide.yaml").write_text(f"name: wide\n{HEAD}streams: {{key: {{dtype: float32}}}}\n{buffer}")
    sizes = "streams: {key: {dtype: [float16, float32], store: float16}}\n"
    (tmp_path / "sizes.yaml").write_text(f"name: sizes\n{HEAD}{sizes}{buffer}")
    text = "name: narrowing\ntransfer: {from: wide, to: sizes}\nconvert: requantise\n"
    found = load_text(text, str(tmp_path / "narrowing.yaml"))
    report = harness.run(found, module_of(found))
    assert report.ok, str(report)


def test_one_operator_takes_any_size() -> None:
    module = module_of(layout())
    ops, pool = module.register_ops(), module.allocate(2).fill_(0)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def step(key: Any, value: Any, slots: Any) -> Any:
        ops.append(key, value, pool, slots)
        return ops.gather(pool, slots)[1]

    with exact_widening("cpu"):
        for kind, tokens in ((torch.float32, 3), (torch.bfloat16, 5)):
            rows = torch.randn(tokens, 2, 24).to(kind)
            assert torch.equal(step(rows.half(), rows, torch.arange(tokens)).float(), rows.bfloat16().float())
