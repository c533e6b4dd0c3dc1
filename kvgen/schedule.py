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
from kvgen.lanes import LINES, VECTOR, runs_in_lines
from kvgen.layout import KernelHints, Layout, Record, Stream
from kvgen.lower import planes
from kvgen.plan import Copy, Norm, Plan
from kvgen.quant import MODES
from kvgen.rows import Rows, whole_rows
from kvgen.tiles import ELEMENTS, LANES, Tile, by_channel, by_norm, dims_held, lane_of, tile_of, worked_on_together

TARGET_VALUES = 1024  # values a program moves at the least, where tokens are many: 4 warps of 16-byte accesses
MAX_VALUES = 8192  # values of one stream held by a program at the most
DYNAMIC_SIDE = 128  # what an extent known at launch is taken for here
FEW_TOKENS = 64  # up to here a program takes one token even where it could take more
FEW_ENCODED = 256  # the same where values are encoded as they are appended, or rows of codes gathered in pairs
SOME_TOKENS = 1024  # up to here more warps a program pay where values are encoded
MANY_TOKENS = 8192  # from here on a program takes more heads of a query that share much
SLOT_TILE = 16  # tokens a program takes together where slots are the fastest axis
LINES_PER_WARP = 4096  # values of one stream that a warp takes where runs of several tokens are lines,
FEW_IN_LINES = 512  # and those of a program where tokens are few
STAGED_VALUES = 1024  # values of one stream that a program works on at the most
STAGED_PER_WARP = 512  # values a warp works on,
TURNED_PER_WARP = 1024  # more of a query that is only turned,
STAGED_FEW = 128  # and few with few tokens
SCALES_TOO = 64  # registers of a thread that makes codes of few values, and of their scales
LOOKING_UP = 64  # registers of a thread that looks up the codes of a group: all look-ups are under way at once


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


@dataclass(frozen=True, slots=True)
class _Work:
    """Facts of a plan that several choices rest on.

    ``slot_minor``: some tile has its tokens along the lanes. ``beside``: how many tokens have short runs that fill
    lines together (else 1). ``heads``: those of a program (None: all). ``widest``: values of the longest row of a
    head, and ``row`` of all heads of a program, padding included.
    """

    layout: Layout
    plan: Plan
    wish: KernelHints
    streams: tuple[Stream, ...]
    slot_minor: bool
    beside: int
    heads: int | None
    widest: int
    row: int

    @property
    def appends(self) -> bool:
        return self.plan.kind == "append"

    @property
    def worked_on(self) -> bool:
        return bool(self.plan.staged) or any(stream.encoding for stream in self.streams)

    @property
    def moved(self) -> bool:
        """Whether values are moved as they come, rows as rows."""
        return not (self.worked_on or self.slot_minor)

    @property
    def rows(self) -> bool:
        """Whether rows become codes of a byte or more, or are made of these, row by row."""
        return self.worked_on and not (self.slot_minor or self.plan.staged) and all(map(_by_row, self.streams))

    @property
    def in_pairs(self) -> bool:
        """Whether rows of codes are gathered by twos."""
        whole = self.rows and self.plan.kind == "gather" and self.row == TARGET_VALUES
        return whole and _aligned(self.layout, self.plan) == VECTOR

    @property
    def whole_groups(self) -> bool:
        """Whether a thread has all values of a group."""
        return self.appends and any(map(by_norm, self.streams))


def schedule(layout: Layout, plan: Plan) -> Schedule:
    """The schedule for a plan: the layout's own choice where it makes one, else by the rules above."""
    work = _work(layout, plan)
    tokens, whole = _tokens_of_program(work)
    num_warps = work.wish.num_warps or _warps(work, tokens, whole)
    tiles = tuple(
        tile_of(layout, plan, copy, tokens, work.heads, plan.kind == "gather", work.beside > 1) for copy in plan.copies
    )
    found = _with_few(work, Schedule(tokens, False, work.heads, num_warps, num_warps, tiles))
    together = _together(layout, plan, tokens, work.slot_minor)
    found = replace(_holding(layout, plan, found), together=together, rows=whole)
    registers = _registers(layout, plan, found)
    found = replace(found, registers=registers, few_registers=registers or _few_registers(plan, found))
    return found if plan.query is None else _with_query(layout, plan, work.wish, found)


def _work(layout: Layout, plan: Plan) -> _Work:
    wish: KernelHints = getattr(layout.schedule, plan.kind)
    streams = tuple(map(layout.stream, plan.streams))
    slot_minor = "token" in [lane_of(layout, plan, copy) for copy in plan.copies]
    widest = max(padded_side(layout.stream(copy.stream).axes[-1].extent) or DYNAMIC_SIDE for copy in plan.copies)
    known = _Work(layout, plan, wish, streams, slot_minor, 1, None, widest, 0)
    beside = runs_in_lines(plan) if known.moved and wish.tokens != 1 else 1
    most = STAGED_VALUES if plan.staged else MAX_VALUES
    heads = _heads(layout, plan, wish.heads, slot_minor or beside > 1, most // widest)
    row = widest * (heads or padded_side(_head_extent(layout, plan)) or DYNAMIC_SIDE)
    return replace(known, beside=beside, heads=heads, row=row)


def _tokens_of_program(work: _Work) -> tuple[int, tuple[Rows, ...]]:
    """Tokens of a program where there are many, and the records whose rows it writes whole."""
    layout, plan, row = work.layout, work.plan, work.row
    whole = whole_rows(layout, plan) if work.heads is None and all(map(_by_row, work.streams)) else ()
    wished = work.wish.tokens
    tokens = wished or _tokens(work, 2 * row if plan.staged else row, work.moved or bool(whole))
    if any(tokens * each.count == 1 or tokens * padded_side(each.total) > MAX_VALUES for each in whole):
        whole = ()
    if wished:
        return tokens, whole
    tokens = max(2 if work.in_pairs else tokens, min(work.beside, MAX_VALUES // row))
    return max(tokens, 512 // row) if work.whole_groups and not work.slot_minor else tokens, whole


def _warps(work: _Work, tokens: int, whole: tuple[Rows, ...]) -> int:
    """Warps of a program where there are many tokens, by how many values of one stream a warp takes."""
    layout, plan = work.layout, work.plan
    turned = work.slot_minor and (work.worked_on or plan.kind == "gather")
    per_warp = STAGED_PER_WARP if plan.staged else 512 if turned else 1024
    if work.beside > 1:
        per_warp = LINES_PER_WARP
    elif work.moved and tokens == 1 and not (work.appends and layout.slots.selective):
        per_warp = 512  # fewer accesses of a thread are under way, but none waits for a slot
    if whole:
        per_warp = 512
    elif work.appends and tokens == 1 and not (plan.staged or work.slot_minor):
        per_warp = min(per_warp, LANES * _in_a_thread(layout, plan, work.rows))
    if any(map(worked_on_together, work.streams)):
        per_warp = 512 if work.appends else 1024
    elif work.appends and any(map(by_channel, work.streams)):
        per_warp = min(per_warp, 512)
    return max(1, min(8, padded_side(math.ceil(tokens * work.row / per_warp))))


def _with_few(work: _Work, found: Schedule) -> Schedule:
    """The schedule with what is done where there are few tokens."""
    layout, plan, wish, row = work.layout, work.plan, work.wish, work.row
    tokens, num_warps = found.tokens, found.num_warps
    if wish.few is not None:
        few_tokens, few = min(wish.few.tokens or tokens, tokens), wish.few.up_to
        warps = wish.few.num_warps or num_warps
        by_count = few_tokens < tokens
        return replace(found, by_count=by_count, few_warps=warps, few_tokens=few_tokens, few=few, some=few)
    # Codes that are unpacked to be turned go through shared memory where a thread has few of them.
    slow = any(worked_on_together(stream) and not _in_tables(layout, plan, stream) for stream in work.streams)
    fewest = STAGED_FEW if plan.staged else 512 if slow else 256
    few_warps = max(num_warps, min(4, padded_side(math.ceil(row / fewest))))
    enough = work.whole_groups or plan.query is not None  # beside programs of a query more warps do not pay
    few_warps = num_warps if wish.num_warps or not work.worked_on or enough else few_warps
    if work.moved and tokens > 1 and not (work.beside > 1 or wish.num_warps):
        few_warps = min(8, padded_side(math.ceil(tokens * row / 512)))
    few_tokens = max(1, min(tokens // LINES, FEW_IN_LINES // row)) if work.beside > 1 else 1
    by_count = tokens > few_tokens and wish.tokens is None and (work.beside > 1 or not work.moved)
    by_count = by_count and not work.whole_groups
    encoding = work.worked_on and work.appends and not (plan.staged or work.slot_minor)
    few = FEW_ENCODED if encoding or work.in_pairs or work.beside > 1 else FEW_TOKENS
    some = SOME_TOKENS
    if work.slot_minor and by_count and not wish.num_warps:
        few_warps, some = min(num_warps, padded_side(math.ceil(row / 256))), few
    return replace(found, by_count=by_count, few_warps=few_warps, few_tokens=few_tokens, few=few, some=some)


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
    groups = [values // stream.group for stream, values in held if by_norm(stream)]
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
    tile = tile_of(layout, plan, plan.query, found.tokens, each, vector=False)
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


def _in_tables(layout: Layout, plan: Plan, stream: Stream) -> bool:
    """Whether codes that fill bytes are looked up: they cost so little that many threads for a row pay."""
    views = (plan.cache_view(copy) for copy in plan.copies if copy.stream == stream.name)
    return by_norm(stream) and all(view.pack and view.itemsize == 1 and len(planes(view)) == 1 for view in views)


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


def _tokens(work: _Work, row: int, short: bool) -> int:
    """Tokens of one program where there are many; half as many where they are only moved, or in rows: ``short``."""
    if not work.slot_minor:
        return 1 if row >= TARGET_VALUES else min(8, (1 if short else 2) * TARGET_VALUES // row)
    tokens = max(1, min(SLOT_TILE, MAX_VALUES // work.widest))
    while work.layout.block_size is not None and tokens > work.layout.block_size:
        tokens //= 2
    return tokens


def _holding(layout: Layout, plan: Plan, found: Schedule) -> Schedule:
    """The schedule with what its threads hold."""

    def holding(tile: Tile, copy: Copy) -> Tile:
        held, few = (dims_held(layout, plan, copy, tile, warps) for warps in (found.num_warps, found.few_warps))
        return replace(tile, held=held, few_held=few or ELEMENTS) if held else tile

    return replace(found, tiles=tuple(map(holding, found.tiles, plan.copies)))


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
