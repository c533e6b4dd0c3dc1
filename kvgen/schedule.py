"""The schedule: how a plan's tokens, heads and dims are divided among programs. It never changes a byte.

Rules of legality:

* every value of a token is in exactly one program's tile;
* a tile's sides are powers of two (``tl.arange``); an extent that is none is masked;
* a stream that all heads share forbids dividing heads among programs, since each would write it;
* a reduction, the largest magnitude under one scale or the squares of a norm, lies in one program's tile;
* a query's heads are divided among programs of their own, several heads each: they follow those of the KV heads.

What is fast was measured (H200, bf16): one program per token with all heads where ``dim`` is the fastest axis of the
cache (of rows that are short and only moved two tokens, in calls of any size), tiles of some tokens with the tokens
along the lanes where ``slot`` is, and of one head of tokens that fill lines together where rows are in short runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvgen.axes import padded_side
from kvgen.lanes import LINES, VECTOR, dims_beside, lane, runs_in_lines
from kvgen.layout import KernelHints, Layout, Record, Stream
from kvgen.lower import SLOT_NUMBER, planes
from kvgen.plan import Copy, Norm, Plan
from kvgen.quant import MODES
from kvgen.rows import Rows, whole_rows

TARGET_VALUES = 1024  # values a program moves at the least, where tokens are many: 4 warps of 16-byte accesses
MAX_VALUES = 8192  # values of one stream held by a program at the most
LANES = 32  # threads of a warp
ELEMENTS = 8  # values of the widest access, of 16 bits each
DYNAMIC_SIDE = 128  # what an extent known at launch is taken for here
FEW_TOKENS = 64  # up to here a program takes one token even where it could take more
FEW_ENCODED = 256  # the same where values are encoded as they are appended, or rows of codes gathered in pairs
SOME_TOKENS = 1024  # up to here more warps a program pay where values are encoded
MANY_TOKENS = 8192  # from here on a program takes more heads of a query that share much
SLOT_TILE = 16  # tokens a program takes together where slots are the fastest axis
BAND = 16  # dims of these that it stores at a time where they are no run: addresses of all would take most registers
LINES_PER_WARP = 4096  # values of one stream that a warp takes where runs of several tokens are lines,
FEW_IN_LINES = 512  # and those of a program where tokens are few
STAGED_VALUES = 1024  # values of one stream that a program works on at the most
STAGED_PER_WARP = 512  # values a warp works on,
TURNED_PER_WARP = 1024  # more of a query that is only turned,
STAGED_FEW = 128  # and few with few tokens
SCALES_TOO = 64  # registers of a thread that makes codes of few values, and of their scales
LOOKING_UP = 64  # registers of a thread that looks up the codes of a group: all look-ups are under way at once


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of one stream: its vector axes, slowest first, and their padded sides (None: known at launch).

    ``runs``: tokens lie along the lanes, and a run of slots in one block is addressed as such; ``band``: how many dims
    of others are stored at a time (0: all). ``held``: how many dims that lie side by side are loaded for one thread,
    where that is more than one access has (else 0), and ``few_held`` where there are few tokens.
    """

    order: tuple[str, ...]
    sides: tuple[int | None, ...]
    runs: bool = False
    band: int = 0
    held: int = 0
    few_held: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """``tokens`` and ``heads`` (None: all) of one program, its warps, and a tile for each stream.

    ``by_count``: in a call of ``few`` tokens or less a program takes ``few_tokens`` instead, so that there are enough
    programs; up to ``some`` it has ``few_warps``, since a single program's time counts more than how many run at once.
    """

    tokens: int
    by_count: bool
    heads: int | None
    num_warps: int
    few_warps: int
    tiles: tuple[Tile, ...]
    few_tokens: int = 1
    few: int = FEW_TOKENS
    some: int = SOME_TOKENS
    registers: int = 0  # of a thread at the most, and about as many are taken then (0: the compiler's choice)
    few_registers: int = 0  # and up to ``some`` tokens
    together: bool = False  # a barrier keeps all loads of a program before what waits for one of them
    rows: tuple[Rows, ...] = ()  # of records, where they are not written field by field
    query_heads: int = 0  # of a program that works on the query,
    many_query_heads: int = 0  # and where there are many tokens
    query_tile: Tile | None = None


def schedule(layout: Layout, plan: Plan) -> Schedule:
    """The schedule for a plan: the layout's own choice where it makes one, else by the rules above."""
    wish: KernelHints = getattr(layout.schedule, plan.kind)
    lanes = [_lane(layout, plan, copy) for copy in plan.copies]
    slot_minor = "token" in lanes
    widest = max(padded_side(layout.stream(copy.stream).axes[-1].extent) or DYNAMIC_SIDE for copy in plan.copies)
    most = STAGED_VALUES if plan.staged else MAX_VALUES
    worked_on = bool(plan.staged) or any(layout.stream(copy.stream).encoding for copy in plan.copies)
    streams = [layout.stream(name) for name in plan.streams]
    moved = not worked_on and not slot_minor
    beside = runs_in_lines(plan) if moved and wish.tokens != 1 else 1
    heads = _heads(layout, plan, wish.heads, slot_minor or beside > 1, most // widest)
    row = widest * (heads or padded_side(_head_extent(layout, plan)) or DYNAMIC_SIDE)
    encodes = worked_on and plan.kind == "append"
    whole = whole_rows(layout, plan) if heads is None and all(map(_by_row, streams)) else ()
    short = moved or bool(whole)
    tokens = wish.tokens or _tokens(layout, slot_minor, widest, 2 * row if plan.staged else row, short)
    if any(tokens * each.count == 1 or tokens * padded_side(each.total) > MAX_VALUES for each in whole):
        whole = ()
    rows = worked_on and not slot_minor and not plan.staged and all(map(_by_row, streams))
    in_pairs = rows and plan.kind == "gather" and row == TARGET_VALUES and _aligned(layout, plan) == VECTOR
    tokens = 2 if in_pairs and not wish.tokens else tokens
    tokens = tokens if wish.tokens else max(tokens, min(beside, MAX_VALUES // row))
    whole_groups = plan.kind == "append" and any(map(_by_norm, streams))  # a thread has all 16 values of one
    tokens = max(tokens, 512 // row) if whole_groups and not (slot_minor or wish.tokens) else tokens
    turned = slot_minor and (worked_on or plan.kind == "gather")
    per_warp = STAGED_PER_WARP if plan.staged else 512 if turned else 1024
    if beside > 1:
        per_warp = LINES_PER_WARP
    elif moved and tokens == 1 and not (plan.kind == "append" and layout.slots.selective):
        per_warp = 512  # fewer accesses of a thread are under way, but none waits for a slot
    if whole:
        per_warp = 512
    elif plan.kind == "append" and tokens == 1 and not (plan.staged or slot_minor):
        per_warp = min(per_warp, LANES * _in_a_thread(layout, plan, rows))
    if any(map(worked_on_together, streams)):
        per_warp = 512 if plan.kind == "append" else 1024
    elif plan.kind == "append" and any(map(_by_channel, streams)):
        per_warp = min(per_warp, 512)
    num_warps = wish.num_warps or max(1, min(8, padded_side(math.ceil(tokens * row / per_warp))))
    vector = plan.kind == "gather"
    tiles = tuple(_tile(layout, plan, copy, tokens, heads, vector, beside > 1) for copy in plan.copies)
    # Codes that are unpacked to be turned go through shared memory where a thread has few of them.
    slow = any(worked_on_together(stream) and not _in_tables(layout, plan, stream) for stream in streams)
    fewest = STAGED_FEW if plan.staged else 512 if slow else 256
    few_warps = max(num_warps, min(4, padded_side(math.ceil(row / fewest))))
    enough = whole_groups or plan.query is not None  # beside programs of a query more warps do not pay
    few_warps = num_warps if wish.num_warps or not worked_on or enough else few_warps
    if moved and tokens > 1 and not (beside > 1 or wish.num_warps):
        few_warps = min(8, padded_side(math.ceil(tokens * row / 512)))
    few_tokens = max(1, min(tokens // LINES, FEW_IN_LINES // row)) if beside > 1 else 1
    by_count = tokens > few_tokens and wish.tokens is None and (beside > 1 or not moved) and not whole_groups
    encoding = encodes and not (plan.staged or slot_minor)
    few = FEW_ENCODED if encoding or in_pairs or beside > 1 else FEW_TOKENS
    some = SOME_TOKENS
    if slot_minor and by_count and not wish.num_warps:
        few_warps, some = min(num_warps, padded_side(math.ceil(row / 256))), few
    found = Schedule(tokens, by_count, heads, num_warps, few_warps, tiles, few_tokens, few, some)
    if wish.few is not None:
        few, few_tokens = wish.few.up_to, min(wish.few.tokens or tokens, tokens)
        warps = wish.few.num_warps or num_warps
        found = Schedule(tokens, few_tokens < tokens, heads, num_warps, warps, tiles, few_tokens, few, few)
    together = _together(layout, plan, tokens, slot_minor)
    found = replace(_holding(layout, plan, found), together=together, rows=whole)
    registers = _registers(layout, plan, found)
    found = replace(found, registers=registers, few_registers=registers or _few_registers(plan, found))
    return found if plan.query is None else _with_query(layout, plan, wish, found)


def _together(layout: Layout, plan: Plan, tokens: int, slot_minor: bool) -> bool:
    """Whether the loads of an append are kept together: of single rows that are moved or become codes in little work,
    of tiles that are turned, and of others that become codes, under given scales or beside a stream that is only moved.

    Left to itself ptxas fits kernels into few registers, and has some loads wait until what others brought is used up.
    A barrier and a branch behind it cost some 20 ns: where there is much work on a row it is no faster with them.
    """
    if plan.kind != "append" or plan.staged or layout.slots.selective:
        return False
    streams = [layout.stream(name) for name in plan.streams]
    if tokens == 1:
        return all(stream.encoding is None or _bytes_under_exponents(stream) for stream in streams)
    if slot_minor:
        return True
    beside = len(plan.copies) == len(streams) and any(stream.encoding is None for stream in streams)
    return any(stream.encoding and stream.scale and (beside or not stream.scale.dynamic) for stream in streams)


def _registers(layout: Layout, plan: Plan, found: Schedule) -> int:
    """A bound on registers where a thread has one group of one stream whose codes are looked up.

    Left to itself ptxas fits such kernels into less than 50 registers, where look-ups wait for each other.
    """
    copies = zip(plan.copies, found.tiles, strict=True)
    held = [(layout.stream(copy.stream), math.prod(tile.sides)) for copy, tile in copies if tile.held]
    groups = [values // stream.group for stream, values in held if _by_norm(stream)]
    alone = plan.kind == "append" and len(held) == 1 and groups == [LANES * found.num_warps]
    return LOOKING_UP if alone else 0


def _few_registers(plan: Plan, found: Schedule) -> int:
    """The same of few tokens whose scales are codes of a byte too, for a row that one warp has where there are many.

    With four warps ptxas takes less than 40 registers, where one scale after the other is made.
    """
    copies = zip(plan.copies, found.tiles, strict=True)
    held = all(tile.held and copy.scale.itemsize == 1 for copy, tile in copies)
    spread = found.num_warps == 1 < found.few_warps
    return SCALES_TOO if plan.kind == "append" and held and spread else 0


def _bytes_under_exponents(stream: Stream) -> bool:
    """Whether a stream's codes take a byte each and are found without a division."""
    scale = stream.scale
    return scale is not None and scale.dynamic and scale.grid == "pow2" and MODES[stream.encoding.mode].bits == 8


def _with_query(layout: Layout, plan: Plan, wish: KernelHints, found: Schedule) -> Schedule:
    """As many query heads a program as give its warps enough to work on, and never one alone."""
    heads, dim = (axis.extent for axis in layout.stream(plan.query.stream).axes)
    row = found.tokens * padded_side(dim)
    normed = any(isinstance(stage, Norm) for stage in plan.query.stages)
    per_warp = STAGED_PER_WARP if normed else TURNED_PER_WARP
    each = min(padded_side(heads), max(2, found.num_warps * per_warp // row))
    tile = _tile(layout, plan, plan.query, found.tokens, each, vector=False)
    # Of three positions three rows of angles are read for each token and program: fewer programs read fewer.
    several = plan.rotary is not None and plan.rotary.mrope is not None
    many = 2 * each if normed and several and heads % (2 * each) == 0 and not wish.num_warps else each
    if many != each:
        sides = zip(tile.order, tile.sides, strict=True)
        tile = replace(tile, sides=tuple(None if axis == "head" else side for axis, side in sides))
    found = replace(found, query_heads=each, many_query_heads=many, query_tile=tile)
    if wish.num_warps:
        return found
    warps = max(found.num_warps, min(8, padded_side(math.ceil(each * row / per_warp))))
    return replace(found, num_warps=warps, few_warps=max(warps, found.few_warps))


def worked_on_together(stream: Stream) -> bool:
    """Whether all values of a row or a group are at hand at a time: that takes registers."""
    return stream.encoding is not None and (stream.encoding.rotation is not None or _by_norm(stream))


def _in_tables(layout: Layout, plan: Plan, stream: Stream) -> bool:
    """Whether codes that fill bytes are looked up: they cost so little that many threads for a row pay."""
    views = (plan.cache_view(copy) for copy in plan.copies if copy.stream == stream.name)
    return _by_norm(stream) and all(view.pack and view.itemsize == 1 and len(planes(view)) == 1 for view in views)


def _by_norm(stream: Stream) -> bool:
    mode = MODES.get(stream.encoding.mode) if stream.encoding else None
    return mode is not None and mode.by_norm


def _by_row(stream: Stream) -> bool:
    """Whether values are moved, or become codes of a byte or more under scales that whole rows share."""
    mode = MODES.get(stream.encoding.mode) if stream.encoding else None
    return stream.group is None and (mode is None or mode.bits >= 8)


def _aligned(layout: Layout, plan: Plan) -> int:
    """Bytes that a row of the cache begins at a multiple of, those of the widest access at the most."""
    places = [layout.buffer(plan.cache_view(copy).tensor).place for copy in plan.copies]
    return math.gcd(VECTOR, *(place.pitch for place in places if isinstance(place.content, Record)))


def _in_a_thread(layout: Layout, plan: Plan, rows: bool) -> int:
    """Values of a row that a thread takes of one token at the most: those of a group whose scale lies in the row, and
    of bytes as many as one access has.
    """
    groups = [layout.stream(copy.stream).group for copy in plan.copies if _scale_in_row(copy)]
    groups = [group for group in groups if group]
    bytes_each = all(
        MODES[stream.encoding.mode].bits >= 8 for stream in map(layout.stream, plan.streams) if stream.scale
    )
    aligned = [_aligned(layout, plan)] if rows or (groups and bytes_each) else []
    return min([*groups, *aligned], default=TARGET_VALUES)


def _scale_in_row(copy: Copy) -> bool:
    """Whether the scales of a row lie in it, beside its codes."""
    scale = copy.scale
    within = scale is not None and scale.tensor == copy.destination.tensor
    return within and all(step.digit.axis == "dim" for step in scale.steps if step.dim is None)


def _by_channel(stream: Stream) -> bool:
    """Whether each value has a scale of its own, which takes as many registers again."""
    return stream.scale is not None and any(axis.name == "dim" and axis.step == 1 for axis in stream.scale.axes)


def _tokens(layout: Layout, slot_minor: bool, widest: int, row: int, short: bool) -> int:
    """Tokens of one program where there are many; half as many where they are only moved, or in rows: ``short``."""
    if not slot_minor:
        return 1 if row >= TARGET_VALUES else min(8, (1 if short else 2) * TARGET_VALUES // row)
    tokens = max(1, min(SLOT_TILE, MAX_VALUES // widest))
    while layout.block_size is not None and tokens > layout.block_size:
        tokens //= 2
    return tokens


def _tile(
    layout: Layout, plan: Plan, copy: Copy, tokens: int, heads: int | None, vector: bool, in_lines: bool = False
) -> Tile:
    """Tile axes in logical order, but for the one along the lanes, which goes last.

    A token that is appended alone is no axis; one that is gathered is (``vector``): its row may be zeroed. Where tokens
    are along the lanes and some dims lie side by side, each lane gathers those: the sectors that it reads are whole.
    ``in_lines``: lanes walk a run, the tokens beside it, then the next runs of these: both sides' lines are whole.
    """
    view = plan.cache_view(copy)
    last = along = _lane(layout, plan, copy)
    beside = _beside(layout, plan, copy) if in_lines or (vector and last == "token") else 1
    sides: dict[str, int | None] = {"token": tokens}
    if beside > 1:  # of axes that are alike to it the compiler takes the first along the lanes
        sides["run"] = padded_side(-(-layout.stream(copy.stream).axes[-1].extent // beside))
        last = "dim"
    for axis in layout.stream(copy.stream).axes:
        if axis.name == "dim" and (group := layout.stream(copy.stream).group):
            sides["group"] = padded_side(-(-axis.extent // group))
            sides["dim"] = padded_side(group)
        elif axis.name == "dim" and beside > 1:
            sides["dim"] = beside
        else:
            sides[axis.name] = heads if axis.name == "head" and heads is not None else padded_side(axis.extent)
    order = [name for name in sides if name != last] + [last]
    kept = [name for name in order if sides[name] != 1 or (name == "token" and vector)]
    slots = {"slot", SLOT_NUMBER}
    fastest, whole = view.steps[-1].digit.axis in slots, tokens > 1 and view.unit == view.itemsize
    runs = whole and (fastest or (plan.kind == "append" and along == "token" and bool(view.axes & slots)))
    band = BAND if whole and fastest and plan.kind == "append" and _by_value(layout, copy) else 0
    return Tile(tuple(kept), tuple(sides[name] for name in kept), runs, band)


def _by_value(layout: Layout, copy: Copy) -> bool:
    """Whether any ``BAND`` dims of a row are stored by themselves: moved, or made codes under a scale of all dims."""
    stream = layout.stream(copy.stream)
    scaled = stream.scale is not None and any(axis.name == "dim" for axis in stream.scale.axes)
    apart = copy.stages or copy.zero or scaled or worked_on_together(stream)
    extent = stream.axes[-1].extent
    return not apart and extent is not None and extent > BAND and extent % BAND == 0


def _beside(layout: Layout, plan: Plan, copy: Copy) -> int:
    """Dims of a row that lie side by side in the cache and can be an axis of a tile, the others being another one."""
    stream, run = layout.stream(copy.stream), dims_beside(plan.cache_view(copy))
    apart = copy.stages or stream.group or _by_channel(stream) or stream.axes[-1].extent is None
    return 1 if apart or run is None or run & (run - 1) else run


def _holding(layout: Layout, plan: Plan, found: Schedule) -> Schedule:
    """The schedule with what its threads hold."""

    def holding(tile: Tile, copy: Copy) -> Tile:
        held, few = (_held(layout, plan, copy, tile, warps) for warps in (found.num_warps, found.few_warps))
        return replace(tile, held=held, few_held=few or ELEMENTS) if held else tile

    return replace(found, tiles=tuple(map(holding, found.tiles, plan.copies)))


def _held(layout: Layout, plan: Plan, copy: Copy, tile: Tile, num_warps: int) -> int:
    """Dims that are loaded for one thread, side by side: what shares a scale and what shares bytes is in one.

    Only of codes that share bytes, where values are worked on as they are loaded; but for scales by norm, whose groups
    are whole in any case, no lane is masked.
    """
    stream = layout.stream(copy.stream)
    packed = plan.kind == "append" and plan.cache_view(copy).pack and stream.scale and stream.scale.dynamic
    if packed and not copy.stages and _by_norm(stream) and "group" in tile.order:
        # Where threads have less, the lanes of a group would lie apart: Triton 3.6 reduces those wrongly.
        whole = None not in tile.sides and math.prod(tile.sides) >= stream.group * LANES * num_warps
        return stream.group if whole else 0
    if not packed or copy.stages or worked_on_together(stream) or _by_channel(stream) or "token" in tile.order:
        return 0
    sides = dict(zip(tile.order, tile.sides, strict=True))
    extents = {axis.name: axis.extent for axis in stream.axes}
    dims, heads = extents["dim"], extents.get("head", 1)
    if dims is None or heads is None or heads % sides.get("head", 1) or sides["dim"] * sides.get("group", 1) != dims:
        return 0
    held = min(dims, math.prod(tile.sides) // (LANES * num_warps))
    return held if held > ELEMENTS else 0


def _lane(layout: Layout, plan: Plan, copy: Copy) -> str:
    """The lane of a copy; of rows that are turned it is ``dim``."""
    encoding = layout.stream(copy.stream).encoding
    return "dim" if encoding and encoding.rotation else lane(plan.cache_view(copy))


def _heads(layout: Layout, plan: Plan, wish: int | str | None, slot_minor: bool, most: int) -> int | None:
    """Heads of one program, None for all of them; ``most`` where nothing else decides."""
    extent = _head_extent(layout, plan)
    streams = [layout.stream(copy.stream) for copy in plan.copies]
    shared = any("head" not in {axis.name for axis in stream.axes} for stream in streams)
    shared |= any(s.scale and s.scale.dynamic and "head" not in {a.name for a in s.scale.axes} for s in streams)
    if shared or extent is None or wish == "all":
        return None
    heads = wish or (1 if slot_minor else max(1, min(padded_side(extent), most)))
    return heads if heads < extent else None


def kv_parts(layout: Layout, plan: Plan, sched: Schedule) -> int:
    """How many programs divide the KV heads of their tokens."""
    return 1 if sched.heads is None else -(-_head_extent(layout, plan) // sched.heads)


def _head_extent(layout: Layout, plan: Plan) -> int | None:
    axes = (axis for copy in plan.copies for axis in layout.stream(copy.stream).axes)
    return next((axis.extent for axis in axes if axis.name == "head"), 1)
