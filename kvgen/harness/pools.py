"""Pools for the cases: real tensors inside storages whose every byte is known, in each way a caller may hand them in.

A geometry says how a buffer's tensor lies in its storage. Whatever it is, a storage has bytes before, behind and
between what the tensor addresses; all of them hold a random pattern and are compared after a call. Each pool has two
copies of its storages: the module under test works on one, the reference on the other.
"""

from __future__ import annotations

import math
import mmap
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvgen.layout import Buffer, Layout, Record, leaves_of

GUARD = 512
"""Bytes at least before and behind a tensor, a multiple of every element size."""

WIDE_GUARD = 1 << 18
"""Bytes at most: a block, so that a block too far or too early still hits memory that is compared."""

HUGE_ELEMENTS = 2**31
"""Elements between the first and the last block of a huge pool: what no signed 32-bit number holds."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a layout leaves open, chosen for a run: blocks, and extents of the dynamic axes (never powers of two)."""

    blocks: int
    block_size: int
    layers: int
    dynamic: dict[str, int]

    @property
    def slots(self) -> int:
        return self.blocks * self.block_size

    def of(self, axis: str) -> int:
        known = {"block": self.blocks, "slot": self.block_size, "layer": self.layers, "kv": 2}
        return known[axis] if axis in known else self.dynamic[axis]

    def stream_shape(self, layout: Layout, name: str) -> tuple[int, ...]:
        """Shape of a token of a stream: ``(head, dim)`` or ``(dim,)``."""
        axes = layout.stream(name).axes
        return tuple(a.extent if a.extent is not None else self.dynamic[a.name] for a in axes)


def open_steps(layout: Layout) -> dict[str, int]:
    """What an extent that only the launch knows is a multiple of: its topmost digit's divisor, 1 where not named."""
    steps: dict[str, int] = {}
    for buffer in layout.buffers:
        for dim in (d for place in _places(buffer) for d in place.dims):
            for digit in dim.digits:
                if digit.size is None:
                    steps[digit.axis] = math.lcm(steps.get(digit.axis, 1), digit.div)
    return steps


def choose_sizes(layout: Layout) -> Sizes:
    """Small sizes that keep every split of the layout whole."""
    steps = open_steps(layout)
    interleave = layout.slots.shard.interleave if layout.slots.shard else 1
    block_size = layout.block_size or math.lcm(steps.get("slot", 1), interleave) * 7
    layers = 1 if layout.layers is None else layout.layers.extent or steps.get("layer", 1) * 3
    dynamic = {"head": steps.get("head", 1) * 3, "dim": steps.get("dim", 1) * (3 if steps.get("dim", 1) >= 8 else 44)}
    unit = steps.get("block", 1)
    small = Sizes(unit, block_size, layers, dynamic)
    page = sum(math.prod(tensor_shape(layout, b, small)) * b.unit for b in layout.buffers) // unit
    few = next(n for n, budget in ((5, 1 << 20), (3, 1 << 23), (2, math.inf)) if page <= budget)
    few = max(few, 3) if layout.contiguous else few  # rows of several requests, and one of none
    blocks = -(-few // unit) * unit
    return Sizes(blocks, block_size, layers, dynamic)


def _places(buffer: Buffer):
    pending = [buffer.place]
    while pending:
        place = pending.pop()
        yield place
        if isinstance(place.content, Record):
            pending += [f.content for f in place.content.fields if hasattr(f.content, "dims")]


def tensor_shape(layout: Layout, buffer: Buffer, sizes: Sizes) -> tuple[int, ...]:
    """The buffer's shape in elements: one dimension per dimension of its order, then its record."""
    shape = []
    for dim in buffer.place.dims:
        digits = (d.size if d.size is not None else sizes.of(d.axis) // d.div for d in dim.digits)
        shape.append(math.prod(digits))
    if isinstance(buffer.place.content, Record):
        shape.append(buffer.place.content.size // buffer.unit)
    return tuple(shape)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a tensor lies in its storage, in elements. ``windows`` are the stretches of bytes that are compared."""

    strides: tuple[int, ...]
    offset: int
    nbytes: int
    windows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """How buffers of a pool differ: by ``index``. ``grain``: elements that a value takes, several in a byte buffer."""

    index: int
    grain: int


def compact_strides(buffer: Buffer, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The smallest strides, in elements: those that ``allocate`` makes."""
    return _strides(buffer, shape, lambda i, stride: stride)


def _strides(buffer: Buffer, shape, grow: Callable[[int, int], int], order: tuple[int, ...] | None = None):
    """Strides from the innermost out, each through ``grow(i, stride)``. ``order`` lists dimensions, slowest first."""
    record = isinstance(buffer.place.content, Record)
    strides = [0] * len(shape)
    strides[-1] = 1
    # A record takes its aligned pitch, which may be more than the dimension that stands for it.
    step = buffer.place.pitch // buffer.unit if record else shape[-1]
    for i in reversed(order or tuple(range(len(shape) - 1))):
        strides[i] = grow(i, step)
        step = strides[i] * shape[i]
    return tuple(strides)


def _span(shape, strides) -> int:
    return sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1


def _placed(buffer: Buffer, shape, strides, offset: int = 0) -> Placement:
    block = strides[_block_dim(buffer)] * buffer.unit
    guard = -(-min(block, WIDE_GUARD) // GUARD) * GUARD
    start = guard // buffer.unit + offset
    nbytes = 2 * guard + (offset + _span(shape, strides) + 64) * buffer.unit
    nbytes = -(-nbytes // GUARD) * GUARD
    return Placement(strides, start, nbytes, ((0, nbytes),))


def _block_dim(buffer: Buffer) -> int:
    """The dimension of the slowest part of ``block``."""
    divs = {i: d.div for i, dim in enumerate(buffer.place.dims) for d in dim.digits if d.axis == "block"}
    return max(divs, key=divs.__getitem__)


def place_compact(buffer: Buffer, shape, spread: Spread) -> Placement:
    return _placed(buffer, shape, compact_strides(buffer, shape))


def place_padded(buffer: Buffer, shape, spread: Spread) -> Placement:
    """Padding after every dimension, in 16-byte steps that leave wide accesses legal, and other for each buffer."""
    pad = 16 // buffer.unit * (spread.index + 1)
    record = buffer.place.align // buffer.unit if buffer.place.align > buffer.unit else 1
    return _placed(
        buffer, shape, _strides(buffer, shape, lambda i, s: -(-s // record) * record + math.lcm(pad, record))
    )


def place_padded_odd(buffer: Buffer, shape, spread: Spread) -> Placement:
    """Padding of an odd number of values, so that nothing but single values is aligned."""
    return _placed(
        buffer, shape, _strides(buffer, shape, lambda i, s: s + (2 * spread.index + 1 + i % 2 * 4) * spread.grain)
    )


def place_inside(buffer: Buffer, shape, spread: Spread) -> Placement:
    """One layer of a block that holds three: other layers' bytes lie between the blocks."""
    outer = _block_dim(buffer)
    strides = _strides(buffer, shape, lambda i, s: 3 * s if i == outer else s)
    return _placed(buffer, shape, strides, strides[outer] // 3)


def place_transposed(buffer: Buffer, shape, spread: Spread) -> Placement:
    """Dimensions in another order in memory than in the tensor, as engines hand in permuted views."""
    outer = len(shape) - 1
    turn = spread.index + 1 if outer > 2 else 0
    order = tuple((i + turn) % outer for i in reversed(range(outer)))
    return _placed(buffer, shape, _strides(buffer, shape, lambda i, s: s, order))


def place_misaligned(buffer: Buffer, shape, spread: Spread) -> Placement:
    """A tensor that starts at an odd value."""
    return _placed(buffer, shape, compact_strides(buffer, shape), (1 + 2 * spread.index) * spread.grain)


def place_odd_bytes(buffer: Buffer, shape, spread: Spread) -> Placement:
    """A byte buffer that starts at an odd byte; others start where they always do."""
    return _placed(buffer, shape, compact_strides(buffer, shape), spread.grain > 1)


def place_huge(buffer: Buffer, shape, spread: Spread) -> Placement:
    """Blocks so far apart that the last lies more than 2³¹ elements from the first.

    As much lies before the tensor: an address that wraps to a negative offset still hits memory of the pool, and shows
    as a missing write instead of ending the process. Only the surroundings of addressed bytes are compared.
    """
    outer = _block_dim(buffer)
    if outer == len(shape) - 1:  # its stride is 1: another dimension has to be the wide one
        outer = 0
    if len(shape) == 1:
        return place_compact(buffer, shape, spread)
    inner = [n if i != outer else 1 for i, n in enumerate(shape)]
    strides = list(compact_strides(buffer, tuple(inner)))
    step = max(_span(inner, strides) + 64, HUGE_ELEMENTS // max(shape[outer] - 1, 1) + 64)
    strides[outer] = -(-step // 64) * 64
    start = HUGE_ELEMENTS + GUARD
    width = _span(inner, strides) * buffer.unit
    windows = []
    for i in range(shape[outer]):
        at = (start + i * strides[outer]) * buffer.unit
        windows.append((at - GUARD, at + width + GUARD))
    nbytes = windows[-1][1] + GUARD
    return Placement(tuple(strides), start, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, tuple(windows))


GEOMETRIES: dict[str, Callable[[Buffer, tuple[int, ...], Spread], Placement]] = {
    "compact": place_compact,
    "padded": place_padded,
    "padded_odd": place_padded_odd,
    "inside": place_inside,
    "transposed": place_transposed,
    "misaligned": place_misaligned,
    "odd_bytes": place_odd_bytes,
    "huge": place_huge,
}


def random_bytes(count: int, generator: torch.Generator, device: str = "cpu") -> Tensor:
    """``[count]`` uint8, every bit pattern, the same on every device."""
    words = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[:count].to(device)


def virtual_bytes(count: int, device: str) -> Tensor:
    """``[count]`` uint8 that takes memory only where it is touched (CPU), or is really there (other devices)."""
    if device != "cpu":
        return torch.empty(count, dtype=torch.uint8, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, count, flags=flags), dtype=torch.uint8)


@dataclass(slots=True)
class Storage:
    """One buffer's bytes twice: as the module under test leaves them, and as the reference does."""

    placement: Placement
    actual: Tensor
    expected: Tensor

    def first_difference(self) -> int | None:
        """Offset of the first byte that differs, None if all compared bytes agree."""
        for start, end in self.placement.windows:
            got, wanted = self.actual[start:end], self.expected[start:end]
            if not torch.equal(_words(got), _words(wanted)):
                return start + int((got != wanted).nonzero()[0])
        return None


@dataclass(slots=True)
class Pool:
    """Tensors of all buffers of a layout, for the module (``actual``) and for the reference (``expected``).

    ``dtypes`` are those that the streams come in, and of plain ones those they lie in; ``key`` is how it was asked for.
    """

    key: tuple[str, int]
    sizes: Sizes
    dtypes: dict[str, torch.dtype]
    storages: dict[str, Storage] = field(default_factory=dict)
    actual: dict[str, Tensor] = field(default_factory=dict)
    written: bool = False
    expected: dict[str, Tensor] = field(default_factory=dict)


class PoolFactory:
    """Makes pools of one layout. The random contents of a geometry depend on the seed alone."""

    def __init__(self, layout: Layout, device: str, seed: int) -> None:
        self.layout, self.device, self.seed = layout, device, seed
        self.sizes = choose_sizes(layout)
        self._contents: dict[tuple[str, str], list[Tensor]] = {}
        self._unwritten: dict[tuple[str, int], Pool] = {}

    def keep(self, pool: Pool) -> None:
        """Hand back a pool that nothing was written to: the next case may have it as if it were fresh."""
        if pool.key == ("compact", 0):
            self._unwritten[pool.key] = pool

    def variants(self) -> int:
        """How many choices of element types there are."""
        lists = {s.dtypes for s in self.layout.streams if s.encoding is None}
        if len(lists) > 1 and any(_raw(b) for b in self.layout.buffers):
            return 1  # values come back as the first type of their stream: the caller names one type for all
        # Codes lie in buffers of types that have nothing to do with those the stream comes in.
        codes = [self._sources(b) * len(b.dtypes) for b in self.layout.buffers if self._encoded(b)]
        return max([*map(len, lists), *codes])

    def _encoded(self, buffer: Buffer) -> bool:
        leaves = map(self.layout.leaf, leaves_of(buffer.place))
        return any(self.layout.stream(leaf.stream).encoding for leaf in leaves)

    def _sources(self, buffer: Buffer) -> int:
        """How many types its streams come in, at most."""
        leaves = map(self.layout.leaf, leaves_of(buffer.place))
        return max(len(self.layout.stream(leaf.stream).dtypes) for leaf in leaves)

    def make(self, geometry: str = "compact", variant: int = 0) -> Pool:
        """A fresh pool; ``variant`` picks among the accepted element types."""
        if (geometry, variant) in self._unwritten:
            return self._unwritten.pop((geometry, variant))
        pool = Pool((geometry, variant), self.sizes, {})
        for index, buffer in enumerate(self.layout.buffers):
            turn = variant // self._sources(buffer) if self._encoded(buffer) else variant
            kind = getattr(torch, buffer.dtypes[turn % len(buffer.dtypes)])
            for name in leaves_of(buffer.place):
                stream = self.layout.stream(self.layout.leaf(name).stream)
                own = getattr(torch, stream.dtypes[variant % len(stream.dtypes)])
                pool.dtypes[stream.name] = own if _raw(buffer) or stream.encoding else kind
            shape = tensor_shape(self.layout, buffer, self.sizes)
            grain = max(self.layout.leaf(n).itemsize for n in leaves_of(buffer.place)) // buffer.unit
            placement = GEOMETRIES[geometry](buffer, shape, Spread(index, grain))
            storage = Storage(placement, *self._copies(geometry, buffer, placement))
            pool.storages[buffer.name] = storage
            pool.actual[buffer.name] = _view(storage.actual, kind, shape, placement)
            pool.expected[buffer.name] = _view(storage.expected, kind, shape, placement)
        return pool

    def _copies(self, geometry: str, buffer: Buffer, placement: Placement) -> tuple[Tensor, Tensor]:
        key = (geometry, buffer.name)
        if key not in self._contents:
            # Contents differ between buffers: bytes read from the wrong one must show.
            salt = zlib.crc32(f"{geometry} {buffer.name}".encode())
            generator = torch.Generator().manual_seed(self.seed * 65_537 + salt)
            self._contents[key] = [random_bytes(b - a, generator, self.device) for a, b in placement.windows]
        contents = self._contents[key]
        if len(contents) == 1 and geometry != "huge":
            return contents[0].clone(), contents[0].clone()
        copies = tuple(virtual_bytes(placement.nbytes, self.device) for _ in range(2))
        for copy in copies:
            for (start, end), data in zip(placement.windows, contents, strict=True):
                copy[start:end] = data
        return copies


def _words(data: Tensor) -> Tensor:
    """Bytes by the eight where they can be taken so: PyTorch compares them one at a time."""
    whole = data.storage_offset() % 8 == 0 and len(data) % 8 == 0
    return data.view(torch.int64) if whole else data


def _raw(buffer: Buffer) -> bool:
    return buffer.dtypes == ("uint8",)


def _view(storage: Tensor, kind: torch.dtype, shape, placement: Placement) -> Tensor:
    whole = storage[: len(storage) // kind.itemsize * kind.itemsize].view(kind)
    return whole.as_strided(shape, placement.strides, placement.offset)
