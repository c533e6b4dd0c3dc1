"""The tensors of one call, made on the device: what the module and everything it is compared with are handed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvgen.bench.fused import Fused, fused_inputs, query_width, tables_of, weights_of
from kvgen.harness.pools import Pool, Sizes, compact_strides, open_steps, tensor_shape
from kvgen.harness.values import fill_static, static_scales
from kvgen.layout import Buffer, Layout, Stream, leaves_of

FEW = 256
"""Up to so many tokens a call is a decode step, one token of each request; above, prompts."""

PROMPT = 4096
"""Tokens of a prompt at the most."""

QUERY_HEADS = 32
"""Heads of the queries that lie before keys and values in a fused projection."""

SETS = (8, 64)
"""Sets of inputs at the least and at the most."""

LIKELY = {"head": 8, "dim": 128, "slot": 16, "layer": 4}
"""What extents are taken for that the layout leaves to the launch."""

POISON = 0xA5


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One call of ``function``: T tokens, their slots, and where those lie by request.

    ``streams`` by name, ``[T, *axes]``: what is appended, slices of one fused projection where there are heads.
    ``buffers`` by name: the pool of ``blocks`` of ``block_size`` slots, the same in every task. ``outputs``: what a
    gather fills, shaped like ``streams``.
    ``slots [T]`` int64, distinct. Token t is at ``positions[t]`` of request ``request_ids[t]`` (int64), whose row of
    ``block_table [R, columns]`` (int32) names its blocks; request r has tokens from ``starts[r]`` up to ``seq_lens[r]``
    (int32), which are those of rows ``cu_seq_lens[r]`` to ``cu_seq_lens[r + 1]`` (int32). ``scales`` are the static
    ones that are arguments, by name; ``remap`` the table of a layout that has one; ``layer`` None without layers.
    ``pairs [n, 2]`` int64 are the blocks to copy and to overwrite, all distinct, as many as so many tokens fill.
    ``fused`` is what ``append_fused`` takes besides, None where the layout has no such function. ``moved`` are the
    bytes that the call reads and writes.
    """

    function: str
    layout: Layout
    blocks: int
    block_size: int
    streams: dict[str, Tensor]
    buffers: dict[str, Tensor]
    outputs: dict[str, Tensor]
    slots: Tensor
    block_table: Tensor
    positions: Tensor
    request_ids: Tensor
    seq_lens: Tensor
    starts: Tensor
    cu_seq_lens: Tensor
    scales: dict[str, Tensor]
    remap: Tensor | None
    layer: int | None
    pairs: Tensor
    fused: Fused | None
    moved: int = 0

    @property
    def tokens(self) -> int:
        return len(self.slots)

    def of(self, function: str, moved: int = 0) -> Task:
        """The same tensors for another function, which reads and writes so many bytes."""
        return replace(self, function=function, moved=moved)


class Scene:
    """A layout's pool on a device, and tasks of up to ``most`` tokens over it.

    The pool has ``pool_tokens`` slots over all layers together, or as many as the tasks take if that is more.
    """

    def __init__(self, layout: Layout, device: str, most: int, pool_tokens: int = 0) -> None:
        self.layout, self.device = layout, device
        self.sizes = bench_sizes(layout, most, pool_tokens)
        self.dtypes = {stream.name: source_dtype(stream) for stream in layout.streams}
        self.buffers = {b.name: new_buffer(layout, b, self.sizes, self.dtypes, device) for b in layout.buffers}
        self.scales = static_scales(layout, self.sizes, device, 0)
        self.layer = None if layout.layers is None else self.sizes.layers // 2
        kinds = {name: getattr(torch, dtype) for name, dtype in self.dtypes.items()}
        kinds |= {layout.query.name: next(iter(kinds.values()))} if layout.query else {}
        self.weights, self.tables = weights_of(layout, kinds, device), tables_of(layout, device)
        self.remap = None if layout.slots.remap is None else torch.arange(self.sizes.slots, device=device)

    @property
    def extents(self) -> dict[str, int]:
        """Extents that the layout leaves open, and that of ``slot``."""
        return {"slot": self.sizes.block_size, **self.sizes.dynamic}

    def scramble(self) -> None:
        """Fill the whole pool with bytes that differ from place to place, the same ones every time."""
        for tensor in self.buffers.values():
            generator = torch.Generator(self.device).manual_seed(0)
            storage_bytes(tensor).random_(generator=generator)

    def poison(self, byte: int = POISON) -> None:
        """Fill the whole pool, but for static scales that lie in it."""
        for tensor in self.buffers.values():
            fill(tensor, byte)
        fill_static(self.layout, Pool(("bench", 0), self.sizes, {}, actual=self.buffers, expected=self.buffers))

    def tasks(self, tokens: int, count: int) -> list[Task]:
        """``count`` sets of inputs for calls of so many tokens; set after set the same on every run."""
        return [self._task(tokens, self._generator(seed)) for seed in range(count)]

    def _generator(self, seed: int) -> torch.Generator | None:
        """None where tensors have no values."""
        return None if self.device == "meta" else torch.Generator(self.device).manual_seed(seed)

    def _task(self, tokens: int, generator: torch.Generator | None) -> Task:
        table, starts, lengths = self._requests(tokens, generator)
        seq_lens = starts + lengths
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        request = torch.repeat_interleave(lengths, output_size=tokens)
        positions = torch.arange(tokens, device=self.device) - bounds[request] + starts[request]
        size = self.sizes.block_size
        slots = table[request, positions // size] * size + positions % size
        streams, projection = self._streams(tokens, generator)
        fused = fused_inputs(self.layout, streams, projection, self.weights, self.tables, generator)
        outputs = {name: torch.zeros(x.shape, dtype=x.dtype, device=self.device) for name, x in streams.items()}
        return Task(
            "",
            self.layout,
            self.sizes.blocks,
            size,
            streams,
            self.buffers,
            outputs,
            slots,
            table.int(),
            positions,
            request,
            seq_lens.int(),
            starts.int(),
            bounds.int(),
            self.scales,
            self.remap,
            self.layer,
            self._pairs(tokens, generator),
            fused,
        )

    def _pairs(self, tokens: int, generator: torch.Generator | None) -> Tensor:
        blocks = self._shuffled(self.sizes.blocks, None, generator)
        return blocks[: 2 * whole_blocks(tokens, self.sizes.block_size)].view(-1, 2)

    def _shuffled(self, count: int, without: int | None, generator: torch.Generator | None) -> Tensor:
        """All numbers below ``count`` but one, in random order."""
        if without is None or not 0 <= without < count:
            return torch.randperm(count, generator=generator, device=self.device)
        numbers = torch.randperm(count - 1, generator=generator, device=self.device)
        return numbers + (numbers >= without)

    def _requests(self, tokens: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        """Block table, first position and number of tokens of every request: whole prompts, or one token each."""
        size, skip = self.sizes.block_size, self.layout.slots.skip
        if tokens <= FEW:
            slots = self._shuffled(self.sizes.slots, skip, generator)[:tokens]
            return (slots // size)[:, None], slots % size, torch.ones_like(slots)
        longest = longest_prompt(self.layout, size)
        lengths = [min(longest, tokens - at) for at in range(0, tokens, longest)]
        columns = -(-lengths[0] // size)
        blocks = self._shuffled(self.sizes.blocks, None if skip is None else skip // size, generator)
        blocks = blocks[: len(lengths) * columns]
        lengths = torch.tensor(lengths, device=self.device)
        return blocks.view(-1, columns), torch.zeros_like(lengths), lengths

    def _streams(self, tokens: int, generator: torch.Generator | None) -> tuple[dict[str, Tensor], Tensor]:
        """The streams, and the projection that they are the last columns of, after those of the query.

        Streams of different types are tensors of their own, and the projection has the query alone.
        """
        shapes = {s.name: self.sizes.stream_shape(self.layout, s.name) for s in self.layout.streams}

        def random(width: int, dtype: str) -> Tensor:
            return torch.randn(tokens, width, generator=generator, device=self.device).to(getattr(torch, dtype))

        first = next(iter(shapes.values()))
        lead = query_width(self.layout) or (QUERY_HEADS * first[-1] if len(first) > 1 else 0)
        kind = next(iter(self.dtypes.values()))
        if len(set(self.dtypes.values())) > 1:
            streams = {s: random(math.prod(x), self.dtypes[s]).unflatten(1, x) for s, x in shapes.items()}
            return streams, random(lead, kind)
        widths = [math.prod(shape) for shape in shapes.values()]
        projection = random(lead + sum(widths), kind)
        parts = projection[:, lead:].split(widths, dim=1)
        return {s: part.unflatten(1, shape) for (s, shape), part in zip(shapes.items(), parts, strict=True)}, projection


def new_buffer(
    layout: Layout, buffer: Buffer, sizes: Sizes, dtypes: Mapping[str, str], device: str, pinned: bool = False
) -> Tensor:
    """Zeros with the smallest strides, of the type of a stream that lies in them as it comes."""
    shape = tensor_shape(layout, buffer, sizes)
    wanted = [dtypes.get(leaf) for leaf in leaves_of(buffer.place)]
    name = next((dtype for dtype in wanted if dtype in buffer.dtypes), buffer.dtypes[0])
    strides = compact_strides(buffer, shape)
    length = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    tensor = torch.zeros(length, dtype=getattr(torch, name), device=device, pin_memory=pinned)
    return tensor.as_strided(shape, strides)


def bench_sizes(layout: Layout, most: int, pool_tokens: int) -> Sizes:
    """Likely extents where the layout leaves them open, whole for every split, and blocks for a pool and its tasks."""
    steps = open_steps(layout)

    def likely(axis: str) -> int:
        return -(-LIKELY[axis] // steps.get(axis, 1)) * steps.get(axis, 1)

    interleave = layout.slots.shard.interleave if layout.slots.shard else 1
    block_size = layout.block_size or math.lcm(likely("slot"), interleave)
    layers = 1 if layout.layers is None else layout.layers.extent or likely("layer")
    longest = longest_prompt(layout, block_size)
    prompts, decode = -(-most // longest) * -(-min(most, longest) // block_size), -(-min(most, FEW) // block_size)
    # One more than tokens take: a block with a slot that nobody may use is left out.
    pairs = 2 * whole_blocks(most, block_size)
    blocks = max(pool_tokens // block_size // layers, prompts + 1, decode + 1, pairs)
    step = steps.get("block", 1)
    return Sizes(-(-blocks // step) * step, block_size, layers, {axis: likely(axis) for axis in ("head", "dim")})


def longest_prompt(layout: Layout, block_size: int) -> int:
    """How many tokens a prompt has at the most: a contiguous cache has one row for each request."""
    return min(PROMPT, block_size) if layout.contiguous else PROMPT


def whole_blocks(tokens: int, block_size: int) -> int:
    """How many blocks so many tokens fill, one at the least."""
    return max(tokens // block_size, 1)


def source_dtype(stream: Stream) -> str:
    """The type that a stream is handed in and gathered as: bfloat16 where it may be."""
    return "bfloat16" if "bfloat16" in stream.dtypes else stream.dtypes[0]


def storage_bytes(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage, what lies between its elements too."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def number_of_sets(bytes_of_one: int, cache_bytes: int) -> int:
    """How many sets of inputs leave nothing of the first in the cache when its turn comes again, within ``SETS``."""
    least, most = SETS
    return max(least, min(most, -(-2 * cache_bytes // max(bytes_of_one, 1))))


def fill(tensor: Tensor, byte: int) -> None:
    """Fill a tensor's whole storage, what lies between its elements too."""
    storage_bytes(tensor).fill_(byte)
