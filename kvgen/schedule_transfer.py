"""How the copies of a transfer are divided among programs. It never changes a byte.

A tile has some tokens and all heads. Where one side has ``slot`` as its fastest axis the tile is wide enough along the
tokens for whole sectors there; what one side reads along ``dim`` and the other writes along ``slot`` is turned in
between. A few programs that stride over all the work take larger tiles; where blocks or registers allow none, they load
the next ones into shared memory while they write one: memory is as fast as there are bytes on their way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from kvgen.axes import padded_side
from kvgen.lanes import SECTOR, VECTOR, lane
from kvgen.layout import Layout
from kvgen.plan import Copy, Plan
from kvgen.schedule import DYNAMIC_SIDE
from kvgen.tiles import Tile, worked_on_together
from kvgen.transfer import Transfer, most_together, tokens_together

TILE_BYTES = 2048  # of one stream in a tile: four 16-byte accesses for each thread of a warp; more were no faster
TILE_PER_WARP = 2048
ROW_PER_WARP = 1024  # where that is a row of one token
BYTES_PER_WARP = 1024  # of one stream where the grid is capped, twice as many where values are turned
ENCODED_VALUES = 2048  # values that are computed with take registers
WORKED_ON_PER_WARP = 512  # of rows that are worked on as a whole;
ENCODED_PER_WARP = 1024  # of others that become codes,
DECODED_PER_WARP = 2048  # and of those that are only decoded: four accesses for each thread, as of bytes that are moved
OWNED_PER_WARP = 2048  # where threads have all values under a scale,
OWNED_CAPPED = 256  # or at least one access each, where the grid is capped
CHANNELS = 2  # dims with scales of several tokens that a thread has: those of one access of all lanes side by side
MOST_TOKENS = 64
CAPPED_BYTES = 32768  # of one stream where the grid is capped; of all streams where values are computed with
CAPPED_VALUES = 8192  # of one stream,
DECODED_VALUES = 16384  # or of one that is only decoded, by blocks
FULL_BYTES = 49152  # a tile that reads so many keeps memory busy without those that follow
STAGED_BYTES = 100352  # of tiles on their way, in shared memory: GPUs have 99 KiB of it for a program at the least
STAGED_BY_SLOTS = 81920  # the places of slots take registers
STAGED_PER_WARP = 4608  # of all streams
ASYNC = 4  # bytes of an access that can go to shared memory by itself
MOST_STAGES = 6
ENCODED_STAGES = 4  # values that are encoded take registers too,
FEW_STAGES = 3  # and more of them if they are decoded as well, turned, or encoded by slots,
FEWEST_STAGES = 2  # or turned by slots
SCALE_BYTES = 4
REGISTERS = 65536  # of a processor, for the programs that run on it,
MOST_REGISTERS = 255  # and of a thread


@dataclass(frozen=True, slots=True)
class Program:
    """Tokens and heads (None: all) of a tile, the warps that move it, and how many tiles are under way at a time."""

    tokens: int
    num_warps: int
    stages: int = 1
    heads: int | None = None

    @property
    def registers(self) -> int:
        """A bound on a thread's where tiles are under way (0: none): all that a processor has for one program.

        Left to itself ptxas fits them into half of that, where some are spilled.
        """
        return min(MOST_REGISTERS, REGISTERS // (32 * self.num_warps)) if self.stages > 1 else 0


@dataclass(frozen=True, slots=True)
class TransferSchedule:
    """What a program does where there is one for each tile, and where the grid is ``capped``. A tile for each copy.

    The tiles are those of ``plain``, which divides heads if ``capped`` does. ``groups`` are the dims of each encoded
    stream that share a scale, as its tile is cut. ``together``: tokens of a tile, where some share what is made of them
    all; the tile is padded.
    """

    plain: Program
    capped: Program
    tiles: tuple[Tile, ...]
    groups: dict[str, int | None]
    together: int | None = None

    @property
    def most_tokens(self) -> int:
        return max(self.plain.tokens, self.capped.tokens)

    @property
    def heads(self) -> int | None:
        return self.plain.heads


def schedule_transfer(transfer: Transfer, plan: Plan) -> TransferSchedule:
    """The schedule of one function of a transfer."""
    groups = {copy.stream: _group(transfer, copy.stream) for copy in plan.copies if not copy.leaf}
    encoded = any(not copy.leaf for copy in plan.copies)
    together = most_together(transfer)
    least = max(padded_side(together), *(_least(copy) for copy in plan.copies))
    budget = ENCODED_VALUES if encoded else TILE_BYTES
    heads = _heads(transfer, plan, budget // least)
    widest = max(_row(transfer, copy, heads) for copy in plan.copies)
    tiles = tuple(_tile(transfer, copy, groups.get(copy.stream), heads) for copy in plan.copies)
    owned = any(tile.held for tile in tiles)
    row = sum(_read(copy, tile) for copy, tile in zip(plan.copies, tiles, strict=True))
    encodes = any(transfer.destination.stream(name).encoding for name in groups)
    worked_on = any(worked_on_together(side.stream(name)) for side in transfer.sides for name in groups)
    per_warp = WORKED_ON_PER_WARP if worked_on else ENCODED_PER_WARP if encodes else DECODED_PER_WARP
    per_warp = OWNED_PER_WARP if owned else per_warp if encoded else TILE_PER_WARP
    by_slots = plan.placement == "slots"

    def program(wanted: int, per_warp: int, most_warps: int) -> Program:
        tokens = padded_side(together) if together > 1 else _tokens(transfer, wanted, least)
        return Program(tokens, _warps(tokens * widest, per_warp, most_warps), heads=heads)

    plain = program(budget // widest, per_warp, 16 if together > 1 else 8)
    if plain.tokens == 1 and not encoded:
        plain = replace(plain, num_warps=_warps(widest, ROW_PER_WARP, 8))
    if together > 1 or worked_on:
        capped = plain  # registers are short already
        if owned:  # alone on its processor a program takes as long as its threads do
            capped = program(0, OWNED_CAPPED, max(8, plain.num_warps))
    elif encoded:
        most = max(plain.tokens * row, CAPPED_BYTES * _narrowest(transfer) // VECTOR)
        decoded = any(transfer.source.stream(name).encoding for name in groups)
        values = CAPPED_VALUES if encodes or by_slots else DECODED_VALUES
        capped = program(min(most // row, values // widest), ENCODED_PER_WARP, 8)
        scales = SCALE_BYTES * capped.tokens * widest // min((size for size in groups.values() if size), default=VECTOR)
        stages = FEW_STAGES if decoded or by_slots else ENCODED_STAGES
        capped = _staged(transfer, plan, capped, row, stages, scales)
    else:
        most = max(4 * budget, CAPPED_BYTES * _narrowest(transfer) // VECTOR)
        per_warp = BYTES_PER_WARP * (2 if _turned(plan) else 1)
        capped = _filled(transfer, plan, program(most // widest, per_warp, 16), most // widest, row)
    return TransferSchedule(plain, capped, tiles, groups, together if together > 1 else None)


def _turned(plan: Plan) -> bool:
    return any(lane(view) == "token" for copy in plan.copies for view in (copy.source, copy.destination))


def _filled(transfer: Transfer, plan: Plan, program: Program, wanted: int, row: int) -> Program:
    """A program of a capped grid that moves bytes: with more heads or tiles where a block has too few tokens."""
    turned, by_slots = _turned(plan), plan.placement == "slots"
    if program.heads and turned and not (by_slots or plan.fills):
        times = 1 << max(wanted // program.tokens, 1).bit_length() - 1
        heads = min(program.heads * times, padded_side(most_heads(transfer)))
        times, row = heads // program.heads, row * heads // program.heads
        program = replace(program, heads=heads, num_warps=min(program.num_warps * times, 16))
    if program.tokens * row >= FULL_BYTES:
        return program
    few = replace(program, num_warps=_warps(program.tokens * row, STAGED_PER_WARP // (2 if turned else 1), 16))
    most = MOST_STAGES if not turned else FEWEST_STAGES if by_slots else FEW_STAGES
    return _staged(transfer, plan, few, row, most, program.tokens * row // 2 if turned else 0)


def _warps(amount: int, per_warp: int, most: int) -> int:
    return max(1, min(most, padded_side(math.ceil(amount / per_warp))))


def _staged(transfer: Transfer, plan: Plan, program: Program, row: int, most: int, spare: int) -> Program:
    """With as many tiles under way as shared memory has room for, where accesses are wide both ways.

    ``spare`` bytes are left for what threads exchange: scales, or a stream that is turned.
    """
    if _narrowest(transfer) < ASYNC or any(lane(copy.source) == "token" for copy in plan.copies):
        return program
    room = (STAGED_BY_SLOTS if plan.placement == "slots" else STAGED_BYTES) - spare
    return replace(program, stages=max(1, min(most, 1 + room // (program.tokens * row))))


def _heads(transfer: Transfer, plan: Plan, budget: int) -> int | None:
    """Heads of a tile, two or more where all would be past ``budget``; None for all, as where these share something."""
    extent = most_heads(transfer)
    leaves = {leaf.name: leaf for layout in transfer.sides for leaf in layout.leaves}
    shared = any("head" not in [axis.name for axis in leaf.axes] for leaf in leaves.values())
    if extent is None or shared:
        return None
    if any(map(partial(_by_channel, transfer), (copy.stream for copy in plan.copies))):
        return 1  # no thread has values of two
    widest = max(_row(transfer, copy, 1) for copy in plan.copies)
    heads = max(2, 1 << max(budget // widest, 1).bit_length() - 1)
    return heads if heads < padded_side(extent) else None


def _group(transfer: Transfer, stream: str) -> int | None:
    """The destination's groups are reduced over; the source's only tell which scale is whose.

    Where each channel has a scale of several tokens, a group is what a thread has of their rows.
    """
    found = transfer.destination.stream(stream).group or transfer.source.stream(stream).group
    return CHANNELS if found is None and _by_channel(transfer, stream) else found


def _by_channel(transfer: Transfer, stream: str) -> bool:
    """Whether each dim has a scale that is made of several tokens, of rows that a thread can have a part of."""
    dim, scale = transfer.source.stream(stream).axes[-1], transfer.destination.stream(stream).scale
    if tokens_together(transfer, stream) in (1, None) or transfer.source.stream(stream).encoding:
        return False
    whole = dim.extent is not None and padded_side(dim.extent) == dim.extent and dim.extent % CHANNELS == 0
    return whole and any(axis.name == "dim" and axis.step == 1 for axis in scale.axes)


def _held(transfer: Transfer, copy: Copy, group: int | None) -> int:
    """Dims side by side that a thread reads, where tokens share a scale: its part of a row, or of a group."""
    dim = transfer.source.stream(copy.stream).axes[-1]
    plain = not (copy.leaf or transfer.source.stream(copy.stream).encoding) and lane(copy.source) == "dim"
    if most_together(transfer) == 1 or not plain or group is None or padded_side(group) != group:
        return 0
    return group if dim.extent and padded_side(dim.extent) == dim.extent and dim.extent % group == 0 else 0


def _row(transfer: Transfer, copy: Copy, heads: int | None) -> int:
    """Bytes of a token that a tile holds, padding included; values where they are encoded."""
    stream = transfer.source.stream(copy.stream)
    extents = [heads or most_heads(transfer) if axis.name == "head" else axis.extent for axis in stream.axes]
    sides = [padded_side(extent) or DYNAMIC_SIDE for extent in extents]
    return math.prod(sides) * (stream.itemsize if copy.leaf == copy.stream else 1)


def _read(copy: Copy, tile: Tile) -> int:
    """Bytes of a token that a tile reads, padding included."""
    sides = [side or DYNAMIC_SIDE for name, side in zip(tile.order, tile.sides, strict=True) if name != "token"]
    return math.prod(sides) * copy.source.itemsize


def _narrowest(transfer: Transfer) -> int:
    """Bytes of the accesses that the rows of every stream allow, 16 at most: narrow ones take more registers."""
    return min(math.gcd(VECTOR, (s.axes[-1].extent or VECTOR) * s.itemsize) for s in transfer.source.streams)


def _least(copy: Copy) -> int:
    """Tokens that fill a sector where they are the fastest axis of a side."""
    views = [copy.source, copy.destination]
    return max(SECTOR // view.itemsize if lane(view) == "token" else 1 for view in views)


def _tokens(transfer: Transfer, wanted: int, least: int) -> int:
    """A power of two, no more than the blocks of either side hold."""
    tokens = max(min(wanted, MOST_TOKENS), least, 1)
    sizes = [layout.block_size for layout in transfer.sides if layout.block_size is not None]
    return 1 << (min([tokens, *sizes]).bit_length() - 1)


def _tile(transfer: Transfer, copy: Copy, group: int | None, heads: int | None) -> Tile:
    """Tokens, heads, and dims; of a leaf that varies over fewer axes, these."""
    layout = transfer.source
    sides: dict[str, int | None] = {"token": 0}
    for axis in _axes(layout, copy):
        if axis.name == "head":
            sides["head"] = heads or padded_side(most_heads(transfer))
        elif group and not copy.leaf:
            sides["group"], sides["dim"] = padded_side(-(-axis.extent // group)), padded_side(group)
        else:
            share = copy.source.pack.size if moves_bytes(copy) else 1
            sides["dim"] = None if axis.extent is None else padded_side(axis.count // share)
    kept = [name for name in sides if sides[name] != 1]
    held = _held(transfer, copy, group)
    return Tile(tuple(kept), tuple(sides[name] for name in kept), held=held, few_held=held)


def most_heads(transfer: Transfer) -> int | None:
    """Heads that a call can move: those that both sides have. None where only the launch knows."""
    extents = [a.extent for layout in transfer.sides for s in layout.streams for a in s.axes if a.name == "head"]
    return None if None in extents else min(extents, default=1)


def _axes(layout: Layout, copy: Copy):
    """The axes of what is moved, block and slot aside."""
    if not copy.leaf or copy.leaf == copy.stream:
        return layout.stream(copy.stream).axes
    return [axis for axis in layout.leaf(copy.leaf).axes if axis.name in ("head", "dim")]


def moves_bytes(copy: Copy) -> bool:
    """Whether codes that share bytes are moved as these: both sides put the same ones together."""
    first, second = copy.source, copy.destination
    return bool(copy.leaf and first.pack) and (first.pack, first.itemsize) == (second.pack, second.itemsize)
