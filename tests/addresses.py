"""Compare the reference's views, and what a module wrote, with addresses found by brute force."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvgen import reference
from kvgen.harness.bench import Bench
from kvgen.harness.pools import Pool, PoolFactory
from kvgen.harness.values import scale_arguments
from kvgen.layout import Layout
from kvgen.quant.rows import Given, argument_scale, counts, encode_rows
from kvgen.quant.scales import spread
from kvgen.views import leaf_places
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
    places = leaf_places(layout, pool.actual)
    assert set(places) == {leaf for b in buffers.values() for leaf in b.values}
    for buffer in buffers.values():
        for leaf, found in buffer.values.items():
            view = places[leaf].pop(0)
            assert np.array_equal(_addresses(view, pools, layout, leaf), _dense(found, pools, layout, leaf)), leaf
    assert not any(places.values())
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
    """First byte of each value, ``[block, slot, layer, *axes]`` with the layer left out where there is none.

    Where codes share bytes, it is the number of the code, counted from the storage's first.
    """
    first = _offsets(view.tensor)[..., 0]
    if view.pack is not None:
        first = np.stack([first * view.pack.size + part for part in range(view.pack.size)], axis=view.pack_dim)
    extents = _extents(pools, layout, leaf)
    axes = {axis.name: axis.step for axis in layout.leaf(leaf).axes}
    steps = [axes.get(name, 1) for name in extents]
    first = first.reshape([-(-extent // step) for extent, step in zip(extents.values(), steps, strict=True)])
    for i, (extent, step) in enumerate(zip(extents.values(), steps, strict=True)):
        first = first.repeat(step, axis=i).take(range(extent), axis=i)  # groups, the last of them short
    return first


def _extents(pools: PoolFactory, layout: Layout, leaf: str) -> dict[str, int]:
    """Extents of what a leaf varies over, in logical order."""
    stream, sizes = layout.stream(layout.leaf(leaf).stream), pools.sizes
    own = {a.name: n for a, n in zip(stream.axes, sizes.stream_shape(layout, stream.name), strict=True)}
    bits = {a.name: a.extent for a in layout.leaf(leaf).axes if a.name == "bit"}
    own = {name: n for name, n in own.items() if name != "dim"} | bits | {"dim": own["dim"]}
    whole = {"block": sizes.blocks, "slot": sizes.block_size, "layer": sizes.layers} | own
    varies = {axis.name for axis in layout.leaf(leaf).axes} | ({"layer"} if layout.layers else set())
    return {name: extent for name, extent in whole.items() if name in varies}


def _dense(found: Found, pools: PoolFactory, layout: Layout, leaf: str) -> np.ndarray:
    extents = _extents(pools, layout, leaf)
    address = found.address
    if found.part is not None:
        address = address * (int(found.part.max()) + 1) + found.part
    dense = np.broadcast_to(address, [extents.get(a, 1) for a in AXES])
    dense = dense.transpose([AXES.index(a) for a in ["block", "slot", "layer", "kv", "head", "bit", "dim"]])
    return dense.reshape(list(extents.values()))


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
    elements = _elements(bench, sources)
    for name, buffer in brute_buffers(text, pools, pool).items():
        for token, number in enumerate(slots[:-2]):
            at = SimpleNamespace(
                layer=layer, block=number // pools.sizes.block_size, slot=number % pools.sizes.block_size
            )
            for leaf, found in buffer.values.items():
                _put_token(expected[name], found, elements[leaf][token], at)
            for pad in buffer.pads:
                if pad.fill is not None:
                    expected[name][_token(pad.address, at)] = pad.fill
        got = pool.storages[name].actual.numpy()
        wrong = np.flatnonzero(got != expected[name])
        assert not len(wrong), (
            f"{name}: byte {wrong[0]} is {got[wrong[0]]}, brute force says {expected[name][wrong[0]]}"
        )


def _elements(bench: Bench, sources: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What each leaf gets of the rows ``[T, *axes]``; a scale once for every value of its group."""
    found = {}
    for name, source in sources.items():
        stream, scale = bench.layout.stream(name), bench.layout.stream(name).scale
        found[name] = source
        if stream.encoding is None:
            continue
        given = None
        for part in scale_arguments(stream):
            shape = counts(stream, part, source.shape[1:])
            given = argument_scale(part, bench.scales[part.argument], shape, bench.layer or 0)
        if given is not None and scale.dynamic:
            given = Given(outer=given.scale)
        found |= encode_rows(stream, source, given)
        for bits in (axis.extent for axis in bench.layout.leaf(name).axes if axis.name == "bit"):
            found[name] = torch.stack([found[name] >> bit & 1 for bit in range(bits)], dim=-2)
        for part in (scale, stream.encoding.zero) if scale is not None and scale.dynamic else ():
            if part is not None:
                found[part.name] = spread(scale, found[part.name], stream.axes, source.shape[1:])
    return found


def _token(address: np.ndarray, at: SimpleNamespace) -> np.ndarray:
    """Addresses of one token and layer; axes an address does not vary over are kept at 0."""
    layer, block, slot = (min(i, n - 1) for i, n in zip((at.layer, at.block, at.slot), address.shape[:3], strict=True))
    return address[layer, block, slot]


def _put_token(storage: np.ndarray, found: Found, token: torch.Tensor, at: SimpleNamespace) -> None:
    values = token.contiguous().view(torch.uint8).numpy().reshape(-1, found.itemsize)
    first = np.broadcast_to(_token(found.address, at), (1, *_token(found.address, at).shape[1:])).reshape(-1)
    if found.part is not None:
        which = np.broadcast_to(_token(found.part, at), _token(found.address, at).shape).reshape(-1)
        places = ((part, bit) for part in np.unique(which) for bit in range(found.bits))
        for part, bit in places:  # two codes of a byte are not written at once
            mine, place = which == part, int(part) * found.bits + bit
            byte, inside = first[mine] + place // 8, np.uint8(place % 8)
            written = (values[mine, 0] >> np.uint8(bit) & 1) << inside
            storage[byte] = storage[byte] & ~(np.uint8(1) << inside) | written
        return
    for byte in range(found.itemsize):
        storage[first + byte] = values[:, byte]
