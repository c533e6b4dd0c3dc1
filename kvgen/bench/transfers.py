"""The tensors of one transfer, made on the device and in pinned host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvgen import reference_transfer
from kvgen.bench import traffic
from kvgen.bench.task import POISON, bench_sizes, fill, new_buffer, source_dtype, storage_bytes
from kvgen.harness.pools import open_steps
from kvgen.harness.values import static_scales
from kvgen.layout import Layout, Stream, leaves_of
from kvgen.reference_transfer import Heads, SideTensors, block_slots
from kvgen.transfer import Transfer

LAYERS = 4
"""Layers of a transfer of all of them, where neither side says how many there are."""

PERIOD = 4099
"""Values of a source repeat after so many, a prime: no two pages are alike."""

Buffers = dict[str, Tensor]


class Side:
    """Pools of one side: those of every layer, or one of all of them."""

    def __init__(self, what: Transfer, layout: Layout, device: str, tokens: int, layers: int) -> None:
        self.layout, self.layers = layout, layers
        self.device = "cpu" if device == "cuda" and on_host(layout) else device
        sizes, step = bench_sizes(layout, 0, 0), open_steps(layout).get("block", 1)
        blocks = -(-tokens // sizes.block_size // step) * step
        self.sizes = replace(sizes, blocks=blocks, layers=layers if layout.layers else 1)
        self.listed = what.layers == "all" and layout.layers is None
        self.dtypes = {stream.name: source_dtype(stream) for stream in layout.streams}
        self.pinned = device == "cuda" and self.device == "cpu"
        self.pools = [self._pool() for _ in range(layers if self.listed else 1)]

    def _pool(self) -> Buffers:
        given = self.sizes, self.dtypes, self.device, self.pinned
        return {buffer.name: new_buffer(self.layout, buffer, *given) for buffer in self.layout.buffers}

    @property
    def extents(self) -> dict[str, int]:
        """Extents that the layout leaves open, and that of ``slot``."""
        return {"slot": self.sizes.block_size, **self.sizes.dynamic}

    @property
    def heads(self) -> int:
        shapes = [(s, self.sizes.stream_shape(self.layout, s.name)) for s in self.layout.streams]
        return next((shape[0] for s, shape in shapes if s.axes[0].name == "head"), 1)

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for pool in self.pools for tensor in pool.values()]

    def arguments(self, module: Any) -> list[Any]:
        """Buffers as the module takes them: tables of those of every layer, made once."""
        names = [buffer.name for buffer in self.layout.buffers]
        if not self.listed:
            return [self.pools[0][name] for name in names]
        return [module.pointer_table([pool[name] for pool in self.pools]) for name in names]

    def on(self, device: torch.device, layers: str, scales: Mapping[str, Tensor]) -> SideTensors:
        """What the reference takes: on one device, the layers that a call moves, all of them or that in the middle."""
        pools = [{name: x if x.device == device else x.to(device) for name, x in pool.items()} for pool in self.pools]
        if self.listed:
            return SideTensors(pools, None, scales)
        middle = [self.layers // 2 if self.layout.layers else 0]
        return SideTensors(pools, list(range(self.layers)) if layers == "all" else middle, scales)


def on_host(layout: Layout) -> bool:
    """Whether a layout is taken to lie in pinned host memory: its name says so, or that of a buffer."""
    names = [layout.name, *(buffer.name for buffer in layout.buffers)]
    return any("host" in name.split("_") for name in names)


@dataclass(frozen=True, slots=True, eq=False)
class TransferTask:
    """One call of ``function`` (``transfer`` or ``transfer_blocks``) of T tokens, whole shuffled blocks on both sides.

    ``pools`` are the buffers of both sides as the function takes them, ``buffers`` the destination's by name, and by
    layer where each has its own; ``blocks`` and ``slots`` of source and
    destination, int32 and int64; ``options`` what the call takes by name. ``moved`` are the bytes that are read
    and written.
    """

    function: str
    transfer: Transfer
    sides: tuple[Side, Side]
    pools: tuple[Any, ...]
    buffers: Buffers
    blocks: tuple[Tensor, Tensor]
    slots: tuple[Tensor, Tensor]
    scales: dict[str, Tensor]
    options: dict[str, Any]
    fused: None = None
    moved: int = 0

    @property
    def tokens(self) -> int:
        return len(self.slots[0])

    def of(self, function: str, moved: int = 0) -> TransferTask:
        """The same tensors for another function, which reads and writes so many bytes."""
        return replace(self, function=function, moved=moved)

    def reference(self) -> None:
        """What the reference makes of it, worked out on one device."""
        device = self.slots[0].device
        source, destination = (side.on(device, self.transfer.layers, self.scales) for side in self.sides)
        heads = Heads(0, 0, self.options.get("heads"))
        reference_transfer.transfer(self.transfer, source, destination, *self.slots, heads, self.options.get("dtype"))
        for pool, done in zip(self.sides[1].pools, destination.buffers, strict=True):
            for name, tensor in pool.items():
                if tensor is not done[name]:
                    tensor.copy_(done[name])


class TransferScene:
    """Both pools of a transfer, each for ``most`` tokens, and tasks over them."""

    def __init__(self, what: Transfer, module: Any, device: str, most: int) -> None:
        self.what, self.device = what, device
        known = [layout.layers or layout.regions for layout in what.sides]
        self.layers = next((axis.extent for axis in known if axis and axis.extent), LAYERS)
        unit = max(bench_sizes(layout, 0, 0).block_size for layout in what.sides)
        tokens = -(-most // unit) * unit
        source, destination = (Side(what, layout, device, tokens, self.layers) for layout in what.sides)
        self.sides = (source, destination)
        for tensor in source.tensors:
            self._fill(tensor)
        self.pools = (*source.arguments(module), *destination.arguments(module))
        self.scales = {
            name: scale
            for index, side in enumerate(self.sides)
            for name, scale in static_scales(side.layout, side.sizes, device, index, what.recoded).items()
        }

    def _fill(self, tensor: Tensor) -> None:
        """Numbers of both signs, or bytes that are finite in every type of a byte."""
        if self.device == "meta":
            return
        if tensor.is_floating_point() and tensor.itemsize > 1:
            values = torch.randn(PERIOD).to(tensor.dtype)
        else:
            values = (torch.arange(PERIOD) % 120).to(torch.uint8)
        flat = storage_bytes(tensor)
        period = values.view(torch.uint8).to(flat.device)
        whole = len(flat) // len(period) * len(period)
        flat[:whole].view(-1, len(period)).copy_(period)
        flat[whole:].copy_(period[: len(flat) - whole])

    def poison(self, byte: int = POISON) -> None:
        """Fill the whole destination."""
        for tensor in self.sides[1].tensors:
            fill(tensor, byte)

    def tasks(self, tokens: int, count: int) -> list[TransferTask]:
        """``count`` lists of blocks for calls of so many tokens; list after list the same on every run."""
        return [self._task(tokens, seed) for seed in range(count)]

    def _task(self, tokens: int, seed: int) -> TransferTask:
        generator = None if self.device == "meta" else torch.Generator(self.device).manual_seed(seed)
        blocks = []
        for side in self.sides:
            order = torch.randperm(side.sizes.blocks, generator=generator, device=self.device)
            blocks.append(order[: -(-tokens // side.sizes.block_size)].to(torch.int32))
        sizes = [side.sizes.block_size for side in self.sides]
        slots = [block_slots(each, size, tokens) for each, size in zip(blocks, sizes, strict=True)]
        destination = self.sides[1]
        named = [
            (f"{name}[{layer}]" if destination.listed else name, tensor)
            for layer, pool in enumerate(destination.pools)
            for name, tensor in pool.items()
        ]
        pair, lists = (blocks[0], blocks[1]), (slots[0], slots[1])
        return TransferTask(
            "",
            self.what,
            self.sides,
            self.pools,
            dict(named),
            pair,
            lists,
            self.scales,
            self._options(),
        )

    def _options(self) -> dict[str, Any]:
        """One layer of each side, as many heads as both have, a type for values in bytes: where a call is to say it."""
        options: dict[str, Any] = {}
        if self.what.layers == "one":
            options |= {f"{s.layout.prefix}layer": s.layers // 2 for s in self.sides if s.layout.layers}
        counts = [side.heads for side in self.sides]
        if counts[0] != counts[1]:
            options |= {"src_head": 0, "dst_head": 0, "heads": min(counts)}
        if any(self._untyped(side, stream) for side in self.sides for stream in side.layout.streams):
            options["dtype"] = torch.bfloat16
        return options

    def _untyped(self, side: Side, stream: Stream) -> bool:
        holders = [b.name for b in side.layout.buffers if stream.name in leaves_of(b.place)]
        plain = stream.encoding is None and not self.what.raw(stream.name)
        return plain and any(side.pools[0][name].dtype == torch.uint8 for name in holders)


def block_options(task: TransferTask) -> dict[str, Any]:
    """How many tokens are moved, where the lists of blocks may hold more."""
    tokens = task.tokens
    held = [len(blocks) * side.sizes.block_size for blocks, side in zip(task.blocks, task.sides, strict=True)]
    return {} if held == [tokens, tokens] else {"num_tokens": tokens}


def transferred(scene: TransferScene, tokens: int) -> int:
    """Bytes that a call reads at the source and writes at the destination."""
    least = min(side.heads for side in scene.sides)
    count = tokens * (scene.layers if scene.what.layers == "all" else 1)
    parts = [
        traffic.one_side(side.layout, side.extents, count, source=not index) * least // side.heads
        for index, side in enumerate(scene.sides)
    ]
    return sum(parts)
