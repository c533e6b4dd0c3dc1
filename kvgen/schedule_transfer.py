"""How the copies of a transfer are divided among programs. It never changes a byte.

A tile has some tokens and all heads. Where one side has ``slot`` as its fastest axis the tile is wide enough along the
tokens for whole sectors there; what one side reads along ``dim`` and the other writes along ``slot`` is turned in
between. A few programs that stride over all the work take larger tiles, so that each has more in flight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvgen.layout import Layout
from kvgen.plan import Copy, Plan
from kvgen.schedule import DYNAMIC_SIDE, SECTOR, VECTOR, Tile, lane, padded_side
from kvgen.transfer import Transfer, most_together

TILE_BYTES = 8192  # of one stream in a tile: two 16-byte accesses for each thread of 8 warps
CAPPED_BYTES = 32768
ENCODED_VALUES = 2048  # values that are computed with take registers
MOST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class TransferSchedule:
    """Tokens of a tile and warps; ``capped_tokens`` and ``capped_warps`` where the grid is. A tile for each copy.

    ``heads`` of a tile, None for all of them. ``groups`` are the dims of each encoded stream that share a scale, as its
    tile is cut. ``together``: tokens of a tile, where some share what is made of them all; it is padded to ``tokens``.
    """

    tokens: int
    num_warps: int
    capped_tokens: int
    capped_warps: int
    heads: int | None
    tiles: tuple[Tile, ...]
    groups: dict[str, int | None]
    together: int | None = None


def schedule_transfer(transfer: Transfer, plan: Plan) -> TransferSchedule:
    """The schedule of one function of a transfer."""
    groups = {copy.stream: _group(transfer, copy.stream) for copy in plan.copies if not copy.leaf}
    encoded = any(not copy.leaf for copy in plan.copies)
    least = max(padded_side(most_together(transfer)), *(_least(copy) for copy in plan.copies))
    budget = ENCODED_VALUES if encoded else TILE_BYTES
    heads = _heads(transfer, plan, budget // least)
    widest = max(_row(transfer, copy, heads) for copy in plan.copies)
    tokens = _tokens(transfer, budget // widest, least)
    most = budget if encoded else max(budget, CAPPED_BYTES * _narrowest(transfer) // VECTOR)
    capped = _tokens(transfer, most // widest, least)
    tiles = tuple(_tile(transfer, copy, groups.get(copy.stream), heads) for copy in plan.copies)
    per_warp, most_warps = 512 if encoded else 1024, 8
    if together := most_together(transfer) if most_together(transfer) > 1 else None:
        tokens = capped = padded_side(together)
        most_warps = 16
    warps, capped_warps = (max(1, min(16, padded_side(math.ceil(n * widest / per_warp)))) for n in (tokens, capped))
    return TransferSchedule(tokens, min(warps, most_warps), capped, capped_warps, heads, tiles, groups, together)


def _heads(transfer: Transfer, plan: Plan, budget: int) -> int | None:
    """Heads of a tile, two or more where all would be past ``budget``; None for all, as where these share something."""
    extent = most_heads(transfer)
    leaves = {leaf.name: leaf for layout in transfer.sides for leaf in layout.leaves}
    shared = any("head" not in [axis.name for axis in leaf.axes] for leaf in leaves.values())
    if extent is None or shared:
        return None
    widest = max(_row(transfer, copy, 1) for copy in plan.copies)
    heads = max(2, 1 << max(budget // widest, 1).bit_length() - 1)
    return heads if heads < padded_side(extent) else None


def _group(transfer: Transfer, stream: str) -> int | None:
    """The destination's groups are reduced over; the source's only tell which scale is whose."""
    return transfer.destination.stream(stream).group or transfer.source.stream(stream).group


def _row(transfer: Transfer, copy: Copy, heads: int | None) -> int:
    """Bytes of a token that a tile holds, padding included; values where they are encoded."""
    stream = transfer.source.stream(copy.stream)
    extents = [heads or most_heads(transfer) if axis.name == "head" else axis.extent for axis in stream.axes]
    sides = [padded_side(extent) or DYNAMIC_SIDE for extent in extents]
    return math.prod(sides) * (stream.itemsize if copy.leaf == copy.stream else 1)


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
    return Tile(tuple(kept), tuple(sides[name] for name in kept))


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
