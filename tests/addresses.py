"""Compare the reference's views, and what a module wrote, with addresses found by brute force."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvgen import reference
from kvgen.harness.bench import Bench
from kvgen.harness.pools import Pool, PoolFactory
from kvgen.layout import Layout
from tests.brute import AXES, Brute, Buffer, Found


def brute_of(text: str, pools: PoolFactory) -> Brute:
    sizes = pools.sizes
    dynamic = sizes.dynamic | {"slot": sizes.block_size, "layer": sizes.layers}
    return Brute(text, sizes.blocks, dynamic)


def brute_buffers(text: str, pools: PoolFactory, pool: Pool) -> dict[str, Buffer]:
    """Every buffer of a pool by brute force; its shape must be the one the pool was made with."""
    brute, found = brute_of(text, pools), {}
    for name, tensor in pool.actual.items():
        shape = brute.buffer(name).shape
        assert shape == tuple(tensor.shape), (name, shape, tuple(tensor.shape))
        found[name] = brute.buffer(name, tensor.stride(), tensor.storage_offset() * tensor.element_size())
    return found


def check_views(layout: Layout, text: str, geometry: str) -> None:
    """The reference finds every value and every padding where brute force does."""
    pools = PoolFactory(layout, "cpu", 0)
    pool = pools.make(geometry)
    buffers = brute_buffers(text, pools, pool)
    views = reference.leaf_views(layout, pool.actual)
    assert set(views) == {leaf for b in buffers.values() for leaf in b.values}
    for buffer in buffers.values():
        for leaf, found in buffer.values.items():
            assert np.array_equal(_addresses(views[leaf], pools, layout, leaf), _dense(found, pools, layout, leaf)), (
                leaf
            )
    pads = reference.pad_views(layout, pool.actual)
    brute_pads = [(name, pad) for name, b in buffers.items() for pad in b.pads]
    assert [(name, pad.fill) for name, pad, _ in pads] == [(name, pad.fill) for name, pad in brute_pads]
    for (_, _, view), (_, found) in zip(pads, brute_pads, strict=True):
        assert sorted(_offsets(view.tensor).flatten().tolist()) == sorted(np.unique(found.address).tolist())


def _offsets(view: torch.Tensor) -> np.ndarray:
    """Where each byte of a uint8 view lies in its storage."""
    offsets = np.full([1] * view.dim(), view.storage_offset(), dtype=np.int64)
    for i, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        shape = [1] * view.dim()
        shape[i] = size
        offsets = offsets + (np.arange(size) * stride).reshape(shape)
    return offsets


def _addresses(view: reference.ByteView, pools: PoolFactory, layout: Layout, leaf: str) -> np.ndarray:
    """First byte of each value, ``[block, slot, layer, *axes]`` with the layer left out where there is none."""
    first = _offsets(view.tensor)[..., 0]
    sizes = [pools.sizes.blocks, pools.sizes.block_size]
    if any(d.axis == "layer" for d in view.digits):
        sizes.append(pools.sizes.layers)
    return first.reshape(*sizes, *pools.sizes.stream_shape(layout, leaf))


def _dense(found: Found, pools: PoolFactory, layout: Layout, leaf: str) -> np.ndarray:
    sizes = pools.sizes
    axes = [a.name for a in layout.stream(leaf).axes]
    shape = {"block": sizes.blocks, "slot": sizes.block_size, "layer": found.address.shape[0], "kv": 1}
    shape |= {"head": 1} | dict(zip(axes, sizes.stream_shape(layout, leaf), strict=True))
    dense = np.broadcast_to(found.address, [shape[a] for a in AXES])
    order = ["block", "slot", "layer", "kv", "head", "dim"]
    dense = dense.transpose([AXES.index(a) for a in order])
    keep = [sizes.blocks, sizes.block_size] + ([sizes.layers] if layout.layers else [])
    return dense.reshape(*keep, *sizes.stream_shape(layout, leaf))


def check_written(layout: Layout, text: str, module: Any, geometry: str) -> None:
    """``append`` puts each token's bytes where brute force says, and changes no other byte of any storage."""
    pools = PoolFactory(layout, "cpu", 1)
    bench = Bench(layout, module, pools, 1, "brute")
    pool = pools.make(geometry)
    expected = {name: s.expected.clone().numpy() for name, s in pool.storages.items()}
    slots = [*bench.slots(5), -1, pools.sizes.slots]
    sources = bench.sources(len(slots), pool)
    args = bench.append_args(pool, sources, bench.tensor(slots))
    module.append(*args.values(), **bench.layer_args(None))
    layer = bench.layer or 0
    for name, buffer in brute_buffers(text, pools, pool).items():
        for token, number in enumerate(slots[:-2]):
            at = SimpleNamespace(
                layer=layer, block=number // pools.sizes.block_size, slot=number % pools.sizes.block_size
            )
            for leaf, found in buffer.values.items():
                _put_token(expected[name], found, sources[leaf][token], at)
            for pad in buffer.pads:
                if pad.fill is not None:
                    expected[name][_token(pad.address, at)] = pad.fill
        got = pool.storages[name].actual.numpy()
        wrong = np.flatnonzero(got != expected[name])
        assert not len(wrong), (
            f"{name}: byte {wrong[0]} is {got[wrong[0]]}, brute force says {expected[name][wrong[0]]}"
        )


def _token(address: np.ndarray, at: SimpleNamespace) -> np.ndarray:
    """Addresses of one token and layer; axes an address does not vary over are kept at 0."""
    layer, block, slot = (min(i, n - 1) for i, n in zip((at.layer, at.block, at.slot), address.shape[:3], strict=True))
    return address[layer, block, slot]


def _put_token(storage: np.ndarray, found: Found, token: torch.Tensor, at: SimpleNamespace) -> None:
    values = token.contiguous().view(torch.uint8).numpy().reshape(-1, found.itemsize)
    first = np.broadcast_to(_token(found.address, at), (1, *_token(found.address, at).shape[1:])).reshape(-1)
    for byte in range(found.itemsize):
        storage[first + byte] = values[:, byte]
