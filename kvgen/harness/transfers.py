"""Run a transfer's cases on a module and compare it with the reference, byte by byte, on both sides."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvgen import reference_transfer as reference
from kvgen.encodings import append_refusal
from kvgen.harness.compare import Mismatch, Written, adopt_nans, compare_pool
from kvgen.harness.interpreter import mended
from kvgen.harness.pools import Pool, PoolFactory
from kvgen.harness.report import Report, Result, named, possible
from kvgen.harness.values import fill_static, random_values, static_scales
from kvgen.layout import Layout
from kvgen.reference import append as reference_append
from kvgen.reference_transfer import Heads, SideTensors, block_slots
from kvgen.transfer import Transfer, token_refusal
from kvgen.views import leaf_places

MANY = 150
"""Tokens of the longest call: more than one tile takes, and not a multiple of any."""


@dataclass(frozen=True, slots=True)
class TransferCase:
    """``name`` is ``function/what``; ``function`` is what it is about, ``needs`` what it calls besides."""

    name: str
    function: str
    body: Callable[[TransferBench], None]
    needs: tuple[str, ...] = ()


class Side:
    """The pools of one side: one of each layer, or one of all of them."""

    def __init__(self, what: Transfer, layout: Layout, device: str, seed: int, layers: int) -> None:
        self.layout, self.device = layout, device
        self.listed = what.layers == "all" and layout.layers is None
        count = layers if self.listed else 1
        salt = zlib.crc32(layout.prefix.encode()) % 1000
        self.factories = [PoolFactory(layout, device, seed + salt + 7919 * layer) for layer in range(count)]
        self.layers = layers
        self.pools: list[Pool] = []

    @property
    def sizes(self):
        return self.factories[0].sizes

    def make(self, geometry: str, variant: int) -> None:
        self.pools = [factory.make(geometry, variant) for factory in self.factories]
        for pool in self.pools:
            fill_static(self.layout, pool)

    def arguments(self) -> dict[str, Any]:
        """Buffers as the module takes them."""
        names = [buffer.name for buffer in self.layout.buffers]
        if self.listed:
            return {name: [pool.actual[name] for pool in self.pools] for name in names}
        return {name: self.pools[0].actual[name] for name in names}

    def tensors(self, layers: Sequence[int] | None, scales: dict[str, Tensor]) -> SideTensors:
        """The reference's copy."""
        held = None if self.listed else list(layers) if self.layout.layers else [0]
        return SideTensors([pool.expected for pool in self.pools], held, scales)


class TransferBench:
    """One case's workbench. Everything random comes from the seed and the case's name, so a case repeats alone."""

    def __init__(self, what: Transfer, module: Any, device: str, seed: int, case: str) -> None:
        self.what, self.module, self.device = what, module, device
        self.generator = torch.Generator().manual_seed(seed * 65_537 + zlib.crc32(case.encode()))
        known = [layout.layers or layout.regions for layout in what.sides]
        extents = [axis.extent for axis in known if axis]
        layers = next((extent for extent in extents if extent), 3)
        self.source, self.destination = (Side(what, layout, device, seed, layers) for layout in what.sides)
        self.sides = (self.source, self.destination)
        self.layers = layers
        self.scales = {
            name: tensor
            for index, side in enumerate(self.sides)
            for name, tensor in static_scales(side.layout, side.sizes, device, index, what.recoded).items()
        }

    def make(self, geometry: str = "compact", variant: int = 0, other: str | None = None) -> None:
        """Fresh pools; what is worked on holds numbers of all sizes, and bit patterns in some rows."""
        self.source.make(geometry, variant)
        self.destination.make(other or geometry, variant)
        layout = self.source.layout
        able = [s for s in layout.streams if not self.what.raw(s.name) and append_refusal(layout, s.name) is None]
        for pool in self.source.pools if able else ():
            slots = torch.arange(self.source.sizes.slots, device=self.device)
            rows = {
                s.name: random_values(
                    (len(slots), *self.source.sizes.stream_shape(layout, s.name)), pool.dtypes[s.name], self.generator
                ).to(self.device)
                for s in able
            }
            plain = replace(layout, slots=replace(layout.slots, skip=None))
            for layer in range(self.source.sizes.layers) if layout.layers else (None,):
                options = {"scales": self.scales, "layer": layer}
                for held in (pool.actual, pool.expected):
                    reference_append(plain, rows, held, slots, **options)

    def shuffle(self, count: int) -> list[int]:
        return torch.randperm(count, generator=self.generator).tolist()

    def tensor(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=self.device)

    def slots(self, side: Side, count: int) -> list[int]:
        """Distinct live slots in random order, the first and the last of the pool and of pages among them."""
        n, total = side.sizes.block_size, side.sizes.slots
        edges = [total - 1, 0, n - 1, n % total, total - n]
        chosen = list(dict.fromkeys([*edges, *self.shuffle(total)]))
        chosen = [slot for slot in chosen if slot != side.layout.slots.skip][:count]
        return [chosen[i] for i in self.shuffle(len(chosen))]

    def pair(self, count: int) -> tuple[list[int], list[int]]:
        count = min(count, *(side.sizes.slots - 1 for side in self.sides))
        return self.slots(self.source, count), self.slots(self.destination, count)

    def blocks(self, tokens: int) -> tuple[list[int], list[int], int]:
        """Distinct blocks of each side that hold at least so many tokens, and how many both hold."""
        lists = []
        for side in self.sides:
            count = min(-(-tokens // side.sizes.block_size), side.sizes.blocks)
            lists.append(self.shuffle(side.sizes.blocks)[:count])
        held = min(len(b) * side.sizes.block_size for b, side in zip(lists, self.sides, strict=True))
        return lists[0], lists[1], min(held, tokens)

    def layer_args(self, layers: tuple[int, int] | None = None) -> dict[str, int]:
        if self.what.layers == "all":
            return {}
        chosen = layers or tuple(side.sizes.layers // 2 for side in self.sides)
        pairs = zip(self.sides, chosen, strict=True)
        return {f"{side.layout.prefix}layer": layer for side, layer in pairs if side.layout.layers}

    def head_args(self, heads: Heads | None) -> tuple[Heads, dict[str, int]]:
        """Which heads are moved: where the sides differ in number, as many as both have."""
        counts = [self._heads(side) for side in self.sides]
        if heads is None and counts[0] != counts[1]:
            heads = Heads(0, 0, min(counts))
        if heads is None or not self.what.sharded:
            return Heads(), {}
        return heads, {"src_head": heads.source, "dst_head": heads.destination, "heads": heads.count}

    def _heads(self, side: Side) -> int:
        shapes = [(s, side.sizes.stream_shape(side.layout, s.name)) for s in side.layout.streams]
        return next((shape[0] for s, shape in shapes if s.axes[0].name == "head"), 1)

    def dtype_args(self) -> dict[str, torch.dtype]:
        """The type of plain values in bytes, where the module asks for one."""
        kinds = [
            pool.dtypes[stream.name]
            for side in self.sides
            for pool in side.pools[:1]
            for stream in side.layout.streams
            if not self.what.raw(stream.name)
            and stream.encoding is None
            and any(
                stream.name in leaf_places(side.layout, {b: t})
                for b, t in pool.expected.items()
                if t.dtype == torch.uint8
            )
        ]
        return {"dtype": kinds[0]} if kinds else {}

    def move(
        self,
        src: Sequence[int],
        dst: Sequence[int],
        *,
        dtype: torch.dtype = torch.int64,
        heads: Heads | None = None,
        layers: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        """Move tokens by slot numbers through module and reference, and compare every byte of both sides."""
        lists = self.tensor(src, dtype), self.tensor(dst, dtype)
        self._call("transfer", lists, lists, heads, layers, options)

    def move_blocks(self, src, dst, num_tokens: int | None = None, heads=None, layers=None, **options: Any) -> None:
        """The same by blocks."""
        given = self.tensor(src, torch.int32), self.tensor(dst, torch.int32)
        count = len(src) * self.source.sizes.block_size if num_tokens is None else num_tokens
        lists = [
            block_slots(blocks, side.sizes.block_size, count) for blocks, side in zip(given, self.sides, strict=True)
        ]
        if num_tokens is not None:
            options["num_tokens"] = num_tokens
        self._call("transfer_blocks", given, lists, heads, layers, options)

    def _call(self, function: str, given, slots, heads, layers, options: dict[str, Any]) -> None:
        prefix = "slots" if function == "transfer" else "blocks"
        moved, head_options = self.head_args(heads)
        types = self.dtype_args()
        args = self.source.arguments() | self.destination.arguments()
        args |= {f"src_{prefix}": given[0], f"dst_{prefix}": given[1]} | self.scales
        keywords = self.layer_args(layers) | head_options | types | options
        getattr(self.module, function)(*args.values(), **keywords)
        chosen = self.layer_args(layers)
        ends = []
        for side in self.sides:
            own = range(self.layers) if self.what.layers == "all" else [chosen.get(f"{side.layout.prefix}layer", 0)]
            ends.append(side.tensors(list(own), self.scales))
        reference.transfer(self.what, ends[0], ends[1], slots[0], slots[1], moved, types.get("dtype"))
        self.check(slots[1], chosen.get("dst_layer"))

    def check(self, slots: Tensor, layer: int | None) -> None:
        """Compare both sides; of the source nothing may have changed."""
        self._adopt()
        total = self.destination.sizes.slots
        live = {int(slot) for slot in slots.tolist() if 0 <= slot < total}
        names = [stream.name for stream in self.destination.layout.streams]
        for pool in self.source.pools:
            compare_pool(self.source.layout, pool, Written((), ()))
        for pool in self.destination.pools:
            compare_pool(self.destination.layout, pool, Written(names, live, layer))

    def _adopt(self) -> None:
        """NaNs that were rounded to a plain type may have any payload."""
        layout = self.destination.layout
        for stream in layout.streams:
            if self.what.raw(stream.name) or (stream.encoding and stream.encoding.mode != "cast"):
                continue
            for pool in self.destination.pools:
                sides = [leaf_places(layout, held)[stream.name] for held in (pool.actual, pool.expected)]
                for got, wanted in zip(*sides, strict=True):
                    kind = getattr(torch, stream.encoding.code) if stream.encoding else pool.dtypes[stream.name]
                    if kind.itemsize > 1:
                        values = [view.tensor.contiguous().view(kind) for view in (got, wanted)]
                        adopt_nans(*values)
                        wanted.tensor.copy_(values[1].view(torch.uint8).view(wanted.tensor.shape))


def transfer_cases(what: Transfer) -> Iterator[TransferCase]:
    """Every case of a transfer."""

    def case(function: str, name: str, body: Callable[..., None], *args: Any, **options: Any) -> TransferCase:
        return TransferCase(f"{function}/{name}", function, lambda bench: body(bench, *args, **options))

    if token_refusal(what) is None:
        for count in (0, 1, 7, MANY):
            yield case("transfer", f"T{count}", _tokens, count)
        yield case("transfer", "int32", _tokens, 5, dtype=torch.int32)
        for geometry in ("padded", "padded_odd", "inside", "transposed", "misaligned"):
            yield case("transfer", geometry, _tokens, 9, geometry)
        yield case("transfer", "one_side_padded", _tokens, 9, "compact", other="padded_odd")
        yield case("transfer", "dtype1", _tokens, 5, variant=1)
        yield case("transfer", "skipped", _skipped)
        yield case("transfer", "skipped_far", _skipped, far=True)
        yield case("transfer", "runs", _runs)
        yield case("transfer", "capped", _tokens, MANY, programs=1)
        if any(layout.layers for layout in what.sides) and what.layers == "one":
            yield case("transfer", "edge_layers", _edge_layers)
        if what.sharded:
            yield case("transfer", "heads", _heads)
        if what.layers == "all" and any(layout.layers is None for layout in what.sides):
            yield TransferCase("transfer/tables", "transfer", _tables, needs=("pointer_table",))
    elif what.sharded:
        yield case("transfer_blocks", "heads", _heads_of_blocks)
    yield case("transfer_blocks", "B0", _blocks, 0)
    yield case("transfer_blocks", "one", _blocks, 1)
    yield case("transfer_blocks", "many", _blocks, 1 << 30)
    yield case("transfer_blocks", "padded", _blocks, 1 << 30, "padded")
    yield case("transfer_blocks", "skipped", _skipped_blocks)
    yield case("transfer_blocks", "capped", _blocks, 1 << 30, programs=2)
    yield case("transfer_blocks", "cut", _cut_blocks)


def _tokens(bench, count, geometry="compact", *, other=None, variant=0, dtype=torch.int64, **options) -> None:
    bench.make(geometry, variant, other)
    bench.move(*bench.pair(count), dtype=dtype, **options)


def _skipped(bench: TransferBench, far: bool = False) -> None:
    """Pairs of which the one, the other or both are nowhere stand between live ones; ``far`` from the pool, or near."""
    bench.make()
    src, dst = bench.pair(9)
    totals = [side.sizes.slots for side in bench.sides]
    dead = [[2**32, -(2**63), 2**63 - 1] if far else [-1, -2, total, total + 1] for total in totals]
    pairs = [*zip(src[:4], dst[:4], strict=True), *zip(*dead, strict=True)]
    pairs += list(zip(src[4:], dead[1], strict=False))  # of places that no live pair has
    pairs += list(zip(dead[0], dst[4:], strict=False))
    for at, side in enumerate(bench.sides):
        if side.layout.slots.skip is not None:
            pair = [src[-1], dst[-1]]
            pair[at] = side.layout.slots.skip
            pairs.append(tuple(pair))
    pairs = [pairs[i] for i in bench.shuffle(len(pairs))]
    bench.move([pair[0] for pair in pairs], [pair[1] for pair in pairs])


def _runs(bench: TransferBench) -> None:
    """Whole pages in order on both sides, and one that is entered in its middle."""
    bench.make("padded")
    lists = []
    for side in bench.sides:
        n = side.sizes.block_size
        pages = bench.shuffle(side.sizes.blocks)[:3]
        lists.append([page * n + i for page in pages for i in range(min(n, 40))])
    count = min(map(len, lists))
    bench.move(lists[0][:count], lists[1][-count:])


def _edge_layers(bench: TransferBench) -> None:
    for layers in ((0, bench.destination.sizes.layers - 1), (bench.source.sizes.layers - 1, 0)):
        bench.make()
        bench.move(*bench.pair(5), layers=layers)


def _heads(bench: TransferBench) -> None:
    _some_heads(bench, lambda heads: bench.move(*bench.pair(6), heads=heads))


def _heads_of_blocks(bench: TransferBench) -> None:
    held = min(side.sizes.slots for side in bench.sides)
    _some_heads(bench, lambda heads: bench.move_blocks(*bench.blocks(held), heads=heads))


def _some_heads(bench: TransferBench, move: Callable[[Heads], None]) -> None:
    """Some heads to other places; where what is stored needs all of them, the refusal says so."""
    counts = [bench._heads(side) for side in bench.sides]
    count = max(1, min(counts) // 2)
    bench.make()
    try:
        move(Heads(counts[0] - count, 0, count))
        move(Heads(0, counts[1] - count, count))
    except ValueError as error:
        if "share" not in str(error):
            raise Mismatch(f"heads {count} of {counts}: {error}") from error


def _tables(bench: TransferBench) -> None:
    """Tables that were made before, and tensors that start at odd values."""
    bench.make("misaligned")
    tables = {}
    for side in bench.sides:
        if side.listed:
            tables |= {name: bench.module.pointer_table(tensors) for name, tensors in side.arguments().items()}
    arguments = [side.arguments() for side in bench.sides]
    for side, args in zip(bench.sides, arguments, strict=True):
        side.arguments = lambda args=args: {name: tables.get(name, tensor) for name, tensor in args.items()}
    bench.move(*bench.pair(9))


def _blocks(bench: TransferBench, tokens: int, geometry: str = "compact", **options: Any) -> None:
    bench.make(geometry)
    tokens = min(tokens, *(side.sizes.slots for side in bench.sides))
    src, dst, held = bench.blocks(tokens)
    sizes = [side.sizes.block_size for side in bench.sides]
    whole = len(src) * sizes[0] == len(dst) * sizes[1]
    bench.move_blocks(src, dst, None if whole else held, **options)


def _cut_blocks(bench: TransferBench) -> None:
    """A number of tokens that ends in the middle of a block."""
    bench.make("padded")
    src, dst, held = bench.blocks(min(side.sizes.slots for side in bench.sides))
    bench.move_blocks(src, dst, held - min(side.sizes.block_size for side in bench.sides) // 2 - 1)


def _skipped_blocks(bench: TransferBench) -> None:
    """Blocks that are just before the pool and just past it, of either side."""
    for first, last in ((-1, bench.destination.sizes.blocks), (bench.source.sizes.blocks, -1)):
        bench.make()
        src, dst, held = bench.blocks(min(side.sizes.slots for side in bench.sides))
        src[0], dst[-1] = first, last
        bench.move_blocks(src, dst, held)


def run_transfer(
    what: Transfer,
    module: Any,
    device: str,
    seed: int,
    only: str | Iterable[str] | None,
    functions: Collection[str] | None,
    call: str,
    track: Callable[[Sequence[Any]], Iterable[Any]],
) -> Report:
    """Run every case of a transfer, or those named by ``only``: ``run``, which says what the arguments are."""
    found = [case for case in transfer_cases(what) if functions is None or case.function in functions]
    found = named(possible(found, what.functions), only)
    with mended(device):
        results = tuple(_run(case, what, module, device, seed, call) for case in track(found))
    return Report(what.name, device, seed, results)


def _run(case: TransferCase, what: Transfer, module: Any, device: str, seed: int, call: str) -> Result:
    if not hasattr(module, case.function):
        return Result(case.name, case.function, "missing")
    where = "" if device == "cpu" else f" --device {device}"
    repeat = f"{call}{where} --seed {seed} --case {case.name}"
    try:
        case.body(TransferBench(what, module, device, seed, case.name))
    except Mismatch as mismatch:
        return Result(case.name, case.function, "failed", str(mismatch), mismatch.difference, repeat)
    except (Exception, SystemExit) as error:
        # A module under test may raise anything at all; the run goes on and says so.
        message = f"raised {type(error).__name__}: {str(error).strip() or 'without a message'}"
        return Result(case.name, case.function, "failed", message, None, repeat)
    return Result(case.name, case.function, "passed")
