"""Layouts of engines, against what those engines' own code does with dense tensors: views, permutations, rows of bytes.

Every slot of a small pool is written, in a shuffled order, and both heads of two. Where codes belong is what is asked;
values are such that each code and scale is told without rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvgen import reference
from kvgen.resolve import load_text
from tests.generated import module_of, shipped_text

Pools = dict[str, Tensor]

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""The magnitudes of four-bit floats, by code."""


def blocks(values: Tensor, size: int) -> Tensor:
    """Rows by slot number as pages, ``[blocks, size, ...]``."""
    return values.unflatten(0, (-1, size))


def tiles(matrix: Tensor, height: int, width: int) -> Tensor:
    """The last two dimensions, rows and columns, as tiles: columns of tiles first, then rows, ``FRACTAL_NZ``."""
    rows, columns = matrix.shape[-2:]
    found = matrix.unflatten(-1, (columns // width, width)).unflatten(-3, (rows // height, height))
    return found.movedim(-2, -4).flatten(-3, -2)


def fp8(values: Tensor, scales: Tensor) -> Tensor:
    return (values / scales).to(torch.float8_e4m3fn).view(torch.uint8)


def fp4(values: Tensor, scales: Tensor) -> Tensor:
    """Two codes a byte, the even dim in the low half; ``scales`` of 16 dims each."""
    scaled = values / scales.repeat_interleave(16, -1)
    codes = (scaled.abs()[..., None] == E2M1).int().argmax(-1) | scaled.signbit() * 8
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def in_fours(scales: Tensor) -> Tensor:
    """Scales ``[blocks, head, slot, group]`` as FlashInfer's ``trtllm-gen`` kernels read those of V."""
    size, groups = scales.shape[-2:]
    split = scales.unflatten(-1, (4, groups // 4)).unflatten(-3, (size // 4, 4))
    return split.permute(0, 1, 2, 4, 5, 3).reshape(scales.shape)


def aiter_shuffle(key: Tensor, value: Tensor) -> Pools:
    key, value = blocks(key, 16), blocks(value, 16)
    return {
        "key_cache": key.unflatten(-1, (-1, 8)).permute(0, 2, 3, 1, 4),
        "value_cache": value.unflatten(1, (-1, 8)).permute(0, 3, 1, 4, 2),
    }


def aiter_shuffle_fp8(key: Tensor, value: Tensor) -> Pools:
    pools = {}
    for name, values in (("key", blocks(key, 32)), ("value", blocks(value, 32))):
        scales = values.abs().amax(-1, keepdim=True).float() / 448
        codes = fp8(values.float(), scales)
        along_dims, along_slots = codes.unflatten(-1, (-1, 16)), codes.unflatten(1, (-1, 16))
        vectors = along_dims.permute(0, 2, 3, 1, 4) if name == "key" else along_slots.permute(0, 3, 1, 4, 2)
        pools |= {f"{name}_cache": vectors, f"{name}_scales": scales.squeeze(-1).permute(0, 2, 1)}
    return pools


def paged_nz(key: Tensor, value: Tensor) -> Pools:
    """A page is a matrix of slots and of all heads' dims."""
    return {f"{n}_cache": tiles(blocks(v.flatten(1), 128), 16, 16) for n, v in (("key", key), ("value", value))}


def mla_nz(latent: Tensor, rope: Tensor) -> Pools:
    return {f"{n}_cache": tiles(blocks(v, 128)[:, None], 16, 16) for n, v in (("latent", latent), ("rope", rope))}


def flat_mla_fp8_cast(latent: Tensor, rope: Tensor) -> Pools:
    return {"kv_buffer": torch.cat([latent, rope], -1).to(torch.float8_e4m3fn)[:, None]}


def mla_v4_planar(nope: Tensor, rope: Tensor) -> Pools:
    """Rows of 576 bytes, then 8 bytes of exponents a row, the last of them 0; what fills the page up is not written."""
    groups = nope.float().unflatten(-1, (7, 64))
    exponents = (groups.abs().amax(-1) / 448).log2().ceil()
    codes = fp8(groups, exponents.exp2()[..., None]).flatten(1)
    rows = torch.cat([codes, rope.view(torch.uint8)], -1)
    scales = torch.nn.functional.pad((exponents + 127).to(torch.uint8), (0, 1))
    return {"cache": torch.cat([blocks(rows, 64).flatten(1), blocks(scales, 64).flatten(1)], 1)}


def indexer_mxfp4(key: Tensor) -> Pools:
    """Rows of 64 bytes, then 4 bytes of exponents a row."""
    groups = key.float().unflatten(-1, (4, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    codes = fp4(key.float(), exponents.exp2().repeat_interleave(2, -1))
    exponents = (exponents + 127).to(torch.uint8)
    return {"index_cache": torch.cat([blocks(codes, 64).flatten(1), blocks(exponents, 64).flatten(1)], 1)}


def planes(key: Tensor, value: Tensor, size: int) -> list[Tensor]:
    """K's codes, its scales, V's codes and its scales of each page, heads before slots."""
    found = []
    for values, placed in ((key, lambda scales: scales), (value, in_fours)):
        rows = blocks(values, size).transpose(1, 2).float()
        scales = rows.unflatten(-1, (-1, 16)).abs().amax(-1) / 6
        found += [fp4(rows, scales), placed(scales.to(torch.float8_e4m3fn).view(torch.uint8))]
    return found


def planar_nvfp4(key: Tensor, value: Tensor) -> Pools:
    return {"kv_cache": torch.cat([plane.flatten(1) for plane in planes(key, value, 16)], 1)}


def cross_layer_nvfp4(key: Tensor, value: Tensor) -> Pools:
    """Of a single layer."""
    keys, key_scales, values, value_scales = planes(key, value, 32)
    scales = torch.cat([key_scales.flatten(1), value_scales.flatten(1)], 1)
    return {"kv_pool": torch.stack([keys, values], 1)[:, None], "scale_pool": scales[:, None]}


def octets(pool: Tensor) -> Tensor:
    return pool.contiguous().view(torch.uint8)


def plain(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(-32, 33, shape).bfloat16() / 4


def powers(*shape: int) -> Tensor:
    """Powers of two and their halves, up or down: every group of dims has a largest magnitude of its own."""
    return torch.randint(-3, 4, shape).float().exp2()


def scaled(shape: tuple[int, ...], group: int, magnitudes: Tensor) -> Tensor:
    """Magnitudes of codes of either sign, the largest one first in each group, times a power of two of the group."""
    picked = magnitudes[torch.randint(len(magnitudes), (*shape[:-1], shape[-1] // group, group))]
    picked *= torch.randint(2, picked.shape) * 2 - 1
    picked[..., 0] = magnitudes.max()
    return (picked * powers(*picked.shape[:-1], 1)).flatten(-2).bfloat16()


E4M3 = torch.tensor([0, 1, 18, 104, 240, 448]).float()

ENGINES: list[tuple[Callable[..., Pools], Callable[[tuple[int, ...]], Tensor]]] = [
    (aiter_shuffle, plain),
    (aiter_shuffle_fp8, lambda shape: scaled(shape, 128, E4M3)),
    (paged_nz, plain),
    (mla_nz, plain),
    (flat_mla_fp8_cast, plain),
    (mla_v4_planar, lambda shape: scaled(shape, 64, E4M3)),
    (indexer_mxfp4, lambda shape: scaled(shape, 32, E2M1)),
    (planar_nvfp4, lambda shape: scaled(shape, 16, E2M1)),
    (cross_layer_nvfp4, lambda shape: scaled(shape, 16, E2M1)),
]


@pytest.mark.parametrize(("engine", "values"), ENGINES, ids=[engine.__name__ for engine, _ in ENGINES])
def test_bytes_lie_where_the_engine_has_them(engine: Callable[..., Pools], values) -> None:
    torch.manual_seed(1)
    layout = load_text(shipped_text(engine.__name__).replace("head: 8", "head: 2"))
    slots = torch.randperm(2 * layout.block_size)
    streams = {s.name: values((len(slots), *(axis.extent for axis in s.axes))) for s in layout.streams}
    wanted = engine(**{name: rows[slots.argsort()] for name, rows in streams.items()})
    scales = {f"{name}_scale_scale": torch.ones(1) for name in streams if "nvfp4" in layout.name}
    layers, layer = ({"num_layers": 1}, {"layer": 0}) if layout.layers else ({}, {})
    module = module_of(layout)

    def generated(buffers: Pools) -> None:
        module.append(*streams.values(), *buffers.values(), slots, **layer, **scales)

    def referred(buffers: Pools) -> None:
        reference.append(layout, streams, buffers, slots, **layer, scales=scales)

    for write in (generated, referred):
        found = module.allocate(2, **layers)
        buffers = dict(
            zip([b.name for b in layout.buffers], found if isinstance(found, tuple) else [found], strict=True)
        )
        for buffer in buffers.values():
            buffer.view(torch.uint8).fill_(0xA5)
        write(buffers)
        assert buffers.keys() == wanted.keys()
        for name, pool in wanted.items():
            assert buffers[name].shape == pool.shape, name
            assert torch.equal(octets(buffers[name]), octets(pool)), f"{write.__name__}: {name}"
