"""What the cases share: inputs, calls of the module under test beside the reference, and the comparison of both."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvgen import reference
from kvgen.harness.compare import Mismatch, Written, adopt_nans, compare_bytes, compare_pool, compare_rows
from kvgen.harness.pools import Pool, PoolFactory, random_bytes
from kvgen.harness.values import fill_static, random_values, scale_arguments, static_scales
from kvgen.layout import Layout, leaves_of

RUN = 48
"""Most slots of a page in a run: a page may be a whole request."""

PREFILL = 260
"""Tokens of a prefill: so many that schedules which take larger tiles for more tokens do."""

BEHIND = 128
"""Integers that lie behind those of a call, as many as a program reads at once."""

DTYPES = {"int32": torch.int32, "int64": torch.int64}


@dataclass(frozen=True, slots=True)
class Case:
    """``name`` is ``function/what``; ``function`` is what it is about, ``needs`` what it calls besides."""

    name: str
    function: str
    body: Callable[[Bench], None]
    needs: tuple[str, ...] = ()

    @property
    def refuses(self) -> bool:
        """Whether it is about what a generated function must not take."""
        return "/refuses_" in self.name


class Bench:
    """One case's workbench. Everything random comes from the seed and the case's name, so a case repeats alone."""

    def __init__(self, layout: Layout, module: Any, pools: PoolFactory, seed: int, case: str) -> None:
        self.layout, self.module, self.pools = layout, module, pools
        self.device, self.sizes = pools.device, pools.sizes
        self.generator = torch.Generator().manual_seed(seed * 65_537 + zlib.crc32(case.encode()))
        self.streams = tuple(s.name for s in layout.streams)
        self.encoded = frozenset(s.name for s in layout.streams if s.encoding)
        self.scales = static_scales(layout, self.sizes, self.device, 0)

    @property
    def layer(self) -> int | None:
        """The layer in the middle, None without a layer axis."""
        return None if self.layout.layers is None else self.sizes.layers // 2

    def pool(self, geometry: str = "compact", variant: int = 0) -> Pool:
        pool = self.pools.make(geometry, variant)
        fill_static(self.layout, pool)
        return pool

    def shuffle(self, count: int) -> list[int]:
        return torch.randperm(count, generator=self.generator).tolist()

    def below(self, count: int) -> int:
        """Any number from 0 on."""
        return int(torch.randint(count, (1,), generator=self.generator))

    def tensor(self, values: Sequence[int], dtype: str | torch.dtype = "int64") -> Tensor:
        """Integers on the device, zeros behind them: what reads on finds slot 0. ``dtype`` by name or as torch has.

        What an int32 cannot hold becomes its largest.
        """
        kind = DTYPES[dtype] if isinstance(dtype, str) else dtype
        most = torch.iinfo(kind).max
        known = [min(value, most) for value in values]
        return torch.tensor([*known, *[0] * BEHIND], dtype=kind, device=self.device)[: len(known)]

    def slots(self, count: int) -> list[int]:
        """Distinct live slots in random order: page edges first, then any; the named skip slot is not among them."""
        n, total = self.sizes.block_size, self.sizes.slots
        edges = [total - 1, 0, n - 1, n % total, total - n]
        others = self.shuffle(total)
        chosen = [s for s in dict.fromkeys([*edges, *others]) if s != self.layout.slots.skip][:count]
        return [chosen[i] for i in self.shuffle(len(chosen))]

    def prefill(self) -> list[int]:
        """More tokens than a decode step has: runs of slots as a prefill has them, whole pages among them.

        One page in order from its first slot, one after a skipped token, one shuffled, one without its last slot, one
        entered in its middle; then skipped tokens up to a length at which kernels may take other tiles.
        """
        n, length = self.sizes.block_size, min(self.sizes.block_size, RUN)
        pages = [page * n for page in self.shuffle(self.sizes.blocks)]
        runs = [[page + i for i in range(length)] for page in pages]
        middle = len(runs) // 2
        runs[middle] = [runs[middle][i] for i in self.shuffle(length)]
        runs[-1] = runs[-1][:-1]
        if len(runs) > 2:
            runs[1] = [-1, *runs[1]]
        if len(runs) > 4:
            runs[3] = runs[3][length // 2 :]
        slots = [s for run in runs for s in run if s != self.layout.slots.skip]
        return [*slots, *[-1] * (PREFILL - len(slots))]

    def random(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Every bit pattern of a type, NaNs with their payloads included."""
        count = dtype.itemsize
        for size in shape:
            count *= size
        return random_bytes(count, self.generator).view(dtype).view(*shape).to(self.device)

    def values(self, stream: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What a stream is fed, a row for each entry of the first dimension: bit patterns, or numbers to encode."""
        if stream not in self.encoded or not shape[0]:
            return self.random(shape, dtype)
        return random_values(tuple(shape), dtype, self.generator).to(self.device)

    def sources(self, count: int, pool: Pool, style: str = "dense") -> dict[str, Tensor]:
        """``[count, *axes]`` of every stream: ``dense``, sliced from a ``fused`` QKV projection, from a tensor that
        joins the streams along ``dim`` (``joint``), or ``odd``, where a row starts at any element."""
        shapes = {s: self.sizes.stream_shape(self.layout, s) for s in self.streams}
        if style == "dense":
            return {s: self.values(s, (count, *shapes[s]), pool.dtypes[s]) for s in self.streams}
        if style == "joint" and len({(shapes[s][:-1], pool.dtypes[s]) for s in self.streams}) == 1:
            first = shapes[self.streams[0]][:-1]
            shape = (count, *first, sum(x[-1] for x in shapes.values()))
            joined = self.values(self.streams[0], shape, pool.dtypes[self.streams[0]])
            return dict(zip(self.streams, joined.split([x[-1] for x in shapes.values()], dim=-1), strict=True))
        query, result = 2 * shapes[self.streams[0]][-1] if style == "fused" else 3, {}
        for s in self.streams:
            width = torch.Size(shapes[s]).numel()
            # Odd rows are of another length for each stream.
            apart = 2 * len(result) + 1 if style == "odd" else 0
            row = self.values(s, (count, query + 2 * width + apart), pool.dtypes[s])
            result[s] = row[:, query : query + width].unflatten(1, shapes[s])
        return result

    def same_source(self, count: int, pool: Pool) -> dict[str, Tensor]:
        """Slices of one fused ``[T, (Hq + 2·H)·D]`` tensor; the streams must share a type."""
        shapes = {s: self.sizes.stream_shape(self.layout, s) for s in self.streams}
        widths = [torch.Size(x).numel() for x in shapes.values()]
        query = 2 * widths[0]
        fused = self.values(self.streams[-1], (count, query + sum(widths)), pool.dtypes[self.streams[0]])
        parts = fused[:, query:].split(widths, dim=1)
        return {s: part.unflatten(1, shapes[s]) for s, part in zip(self.streams, parts, strict=True)}

    # Calls. Positional arguments are dicts in the documented order, so that a refusal can replace one by name.

    def holders(self, streams: Sequence[str]) -> tuple[str, ...]:
        """Names of the buffers that hold any of the streams, or their scales."""
        leaves = {leaf.name for leaf in self.layout.leaves if leaf.stream in streams}
        return tuple(b.name for b in self.layout.buffers if leaves.intersection(leaves_of(b.place)))

    def remap_table(self, targets: Sequence[int], dtype: str = "int64") -> Tensor:
        """A table from slot to slot. Before its first entry, as behind its last, a slot of the pool is named."""
        return self.tensor([self.sizes.slots - 1, *targets], dtype)[1:]

    def remap_args(self, remap: Tensor | None) -> dict[str, Tensor]:
        """The remap table where the layout has one; without a table given, every slot stands for itself."""
        if self.layout.slots.remap is None:
            return {}
        table = self.remap_table(range(self.sizes.slots)) if remap is None else remap
        return {self.layout.slots.remap: table}

    def layer_args(self, layer: int | None) -> dict[str, int]:
        return {} if self.layout.layers is None else {"layer": self.layer if layer is None else layer}

    def rank_args(self, rank: int) -> dict[str, int]:
        return {} if self.layout.slots.shard is None else {"rank": rank}

    def scale_args(self, streams: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Static scales of the streams, by argument."""
        found = [scale for s in streams or self.streams for scale in scale_arguments(self.layout.stream(s))]
        return {scale.argument: self.scales[scale.argument] for scale in found}

    def dtype_args(self, pool: Pool) -> dict[str, torch.dtype]:
        """The type to gather as, where a plain stream of several types lies in bytes, and all of them come as one."""
        plain = [s for s in self.layout.streams if s.encoding is None]
        kinds = {pool.dtypes[s.name] for s in plain}
        holders = {leaf: buffer for buffer in self.layout.buffers for leaf in leaves_of(buffer.place)}
        open_choice = any(len(s.dtypes) > 1 and holders[s.name].dtypes != s.dtypes for s in plain)
        return {"dtype": kinds.pop()} if open_choice and len(kinds) == 1 else {}

    def read_dtype(self, stream: str, pool: Pool, asked: torch.dtype | None) -> torch.dtype:
        """The type a stream is gathered as."""
        if stream not in self.encoded:
            return pool.dtypes[stream]
        return asked or getattr(torch, self.layout.stream(stream).dtypes[0])

    def block_size_args(self) -> dict[str, int]:
        return {} if self.layout.block_size is not None else {"block_size": self.sizes.block_size}

    def append_args(self, pool: Pool, sources, slots, streams=None, remap=None) -> dict[str, Any]:
        streams = streams or self.streams
        args = {s: sources[s] for s in streams}
        args |= {b: pool.actual[b] for b in self.holders(streams)}
        return args | {"slot_mapping": slots} | self.remap_args(remap) | self.scale_args(streams)

    def append(
        self,
        pool: Pool,
        sources: dict[str, Tensor],
        slots: Tensor,
        *,
        stream: str | None = None,
        remap: Tensor | None = None,
        layer: int | None = None,
        times: int = 1,
    ) -> None:
        """Append through the module and the reference, and compare every byte of the pool."""
        streams = self.streams if stream is None else (stream,)
        call = getattr(self.module, "append" if stream is None else f"append_{stream}")
        args, options = self.append_args(pool, sources, slots, streams, remap), self.layer_args(layer)
        for _ in range(times):
            call(*args.values(), **options)
        held = {b: pool.expected[b] for b in self.holders(streams)}
        table = next(iter(self.remap_args(remap).values()), None)
        wanted = {s: sources[s] for s in streams}
        reference.append(self.layout, wanted, held, slots, remap=table, scales=self.scales, **options)
        self.check(pool, slots, streams, table, options.get("layer"))

    def check(
        self, pool: Pool, slots: Tensor | None = None, streams=(), remap=None, layer=None, staged: bool = False
    ) -> None:
        """Compare the whole pool; without slots nothing may have been written. ``staged``: by a fused append."""
        numbers = set()
        if slots is not None:
            numbers = set(reference.resolve_slots(self.layout, slots, self.sizes.slots, remap)[1].tolist())
        compare_pool(self.layout, pool, Written(streams, numbers, layer, staged=staged))
        pool.written |= slots is not None
        if not pool.written:
            self.pools.keep(pool)

    def outputs(
        self, count: int, pool: Pool, style: str, asked: torch.dtype | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Poisoned ``out`` tensors ``[count, *axes]`` and the storages they lie in; ``strided`` ones have wide rows."""
        views, storages = {}, {}
        for s in self.streams:
            shape = self.sizes.stream_shape(self.layout, s)
            row = torch.Size(shape).numel()
            stride = row + (5 if style == "strided" else 0)
            storages[s] = self.random((16 + count * stride + 16,), self.read_dtype(s, pool, asked))
            rows = storages[s][16 : 16 + count * stride].view(count, stride)[:, :row]
            views[s] = rows.unflatten(1, shape)
        return views, storages

    def pack(self, tensors: dict[str, Tensor]) -> Any:
        """Outputs as the module takes them: a tuple, or the tensor itself if there is one stream."""
        values = tuple(tensors[s] for s in self.streams)
        return values[0] if len(values) == 1 else values

    def unpack(self, result: Any) -> dict[str, Tensor]:
        values = tuple(result) if isinstance(result, tuple | list) else (result,)
        if len(values) != len(self.streams) or not all(isinstance(value, Tensor) for value in values):
            raise Mismatch(f"expected one tensor per stream ({', '.join(self.streams)}), got {_kind(result)}")
        return dict(zip(self.streams, values, strict=True))

    def read(
        self,
        function: str,
        pool: Pool,
        args: dict[str, Any],
        options: dict[str, Any],
        count: int,
        expect: Callable[..., dict[str, Tensor]],
        slots: list[int | None],
        out: str | None = None,
        zero_skipped: bool = False,
    ) -> dict[str, Tensor]:
        """Call a gathering function and ``expect`` (the reference's), compare rows, what is around them, and pool."""
        options = self.dtype_args(pool) | options
        shared = options | {"scales": self.scales}
        if zero_skipped:
            options["zero_skipped"] = shared["zero_skipped"] = True
        storages: dict[str, Tensor] = {}
        if out is not None:
            views, storages = self.outputs(count, pool, out, options.get("dtype"))
            copies = {s: x.clone() for s, x in storages.items()}
            shared["out"] = {s: copies[s].as_strided(v.shape, v.stride(), v.storage_offset()) for s, v in views.items()}
            options["out"] = self.pack(views)
        result = self.unpack(getattr(self.module, function)(*args.values(), **options))
        wanted = expect(**shared)
        for s in self.streams:
            if s in self.encoded:
                adopt_nans(result[s], wanted[s])
            compare_rows(s, result[s], wanted[s], slots)
            if out is not None:
                compare_rows(s, views[s], wanted[s], slots)
                compare_bytes(f"output of {s}", storages[s], copies[s])
        self.check(pool)
        return result

    def gather(
        self,
        pool: Pool,
        slots: Tensor,
        *,
        remap: Tensor | None = None,
        layer: int | None = None,
        out: str | None = None,
        zero_skipped: bool = False,
        dtype: torch.dtype | None = None,
        rotated: bool = False,
    ) -> dict[str, Tensor]:
        """Gather by slots; ``out`` is None, ``dense`` or ``strided``."""
        table = self.remap_args(remap)
        keep, numbers = reference.resolve_slots(self.layout, slots, self.sizes.slots, next(iter(table.values()), None))
        live = iter(numbers.tolist())
        rows = [next(live) if kept else None for kept in keep.tolist()]
        args = {b.name: pool.actual[b.name] for b in self.layout.buffers} | {"slots": slots} | table | self.scale_args()

        def expect(**options: Any) -> dict[str, Tensor]:
            return reference.gather(
                self.layout, pool.expected, slots, remap=next(iter(table.values()), None), **options
            )

        options = self.layer_args(layer) | ({} if dtype is None else {"dtype": dtype})
        options |= {"rotated": True} if rotated else {}
        return self.read("gather", pool, args, options, len(slots), expect, rows, out, zero_skipped)


def _kind(result: Any) -> str:
    return f"{len(result)} of them" if isinstance(result, tuple | list) else type(result).__name__
