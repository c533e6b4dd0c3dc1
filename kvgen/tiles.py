"""Tiles: the vector axes of one stream in a program, and what of them its threads have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvgen.axes import padded_side
from kvgen.lanes import dims_beside, lane
from kvgen.layout import Layout, Stream
from kvgen.lower import SLOT_NUMBER
from kvgen.plan import Copy, Plan
from kvgen.quant import MODES

LANES = 32  # threads of a warp
ELEMENTS = 8  # values of the widest access, of 16 bits each
BAND = 16  # dims that are stored at a time where slots are no run: addresses of all would take most registers


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


def tile_of(
    layout: Layout, plan: Plan, copy: Copy, tokens: int, heads: int | None, vector: bool, in_lines: bool = False
) -> Tile:
    """Tile axes in logical order, but for the one along the lanes, which goes last.

    A token that is appended alone is no axis; one that is gathered is (``vector``): its row may be zeroed. Where tokens
    are along the lanes and some dims lie side by side, each lane gathers those: the sectors that it reads are whole.
    ``in_lines``: lanes walk a run, the tokens beside it, then the next runs of these: both sides' lines are whole.
    """
    view = plan.cache_view(copy)
    last = along = lane_of(layout, plan, copy)
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
    apart = copy.stages or stream.group or by_channel(stream) or stream.axes[-1].extent is None
    return 1 if apart or run is None or run & (run - 1) else run


def dims_held(layout: Layout, plan: Plan, copy: Copy, tile: Tile, num_warps: int) -> int:
    """Dims that are loaded for one thread, side by side: what shares a scale and what shares bytes is in one.

    Only of codes that share bytes, where values are worked on as they are loaded; but for scales by norm, whose groups
    are whole in any case, no lane is masked.
    """
    stream = layout.stream(copy.stream)
    packed = plan.kind == "append" and plan.cache_view(copy).pack and stream.scale and stream.scale.dynamic
    if packed and not copy.stages and by_norm(stream) and "group" in tile.order:
        # Where threads have less, the lanes of a group would lie apart: Triton 3.6 reduces those wrongly.
        whole = None not in tile.sides and math.prod(tile.sides) >= stream.group * LANES * num_warps
        return stream.group if whole else 0
    if not packed or copy.stages or worked_on_together(stream) or by_channel(stream) or "token" in tile.order:
        return 0
    sides = dict(zip(tile.order, tile.sides, strict=True))
    extents = {axis.name: axis.extent for axis in stream.axes}
    dims, heads = extents["dim"], extents.get("head", 1)
    if dims is None or heads is None or heads % sides.get("head", 1) or sides["dim"] * sides.get("group", 1) != dims:
        return 0
    held = min(dims, math.prod(tile.sides) // (LANES * num_warps))
    return held if held > ELEMENTS else 0


def lane_of(layout: Layout, plan: Plan, copy: Copy) -> str:
    """The lane of a copy; of rows that are turned it is ``dim``."""
    encoding = layout.stream(copy.stream).encoding
    return "dim" if encoding and encoding.rotation else lane(plan.cache_view(copy))


def worked_on_together(stream: Stream) -> bool:
    """Whether all values of a row or a group are at hand at a time: that takes registers."""
    return stream.encoding is not None and (stream.encoding.rotation is not None or by_norm(stream))


def by_norm(stream: Stream) -> bool:
    mode = MODES.get(stream.encoding.mode) if stream.encoding else None
    return mode is not None and mode.by_norm


def by_channel(stream: Stream) -> bool:
    """Whether each value has a scale of its own, which takes as many registers again."""
    return stream.scale is not None and any(axis.name == "dim" and axis.step == 1 for axis in stream.scale.axes)
