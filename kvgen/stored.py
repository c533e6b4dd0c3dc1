"""What lies in the pool, as it lies there: a layout whose streams are the codes, scales and zeros of another."""

from __future__ import annotations

from dataclasses import replace

from kvgen.axes import Axis, Digit
from kvgen.layout import Holds, Layout, Leaf, Stream, holders
from kvgen.lower import cache_views, dense_view, verify
from kvgen.plan import Copy, Plan, Step, View


def stored_name(leaf: str) -> str:
    """What a leaf is called where it is handed out: ``key.scale`` is ``key_scale``."""
    return leaf.replace(".", "_")


def stored_layout(layout: Layout) -> Layout:
    """The layout with a plain stream for each leaf; its buffers, and the leaves that these hold, are the same.

    A stream of codes that share bytes counts these bytes along ``dim``, those of one bit after those of another where
    bits lie apart; one of scales or zeros their groups, 1 where a row shares one. It has ``head`` where its leaf has.
    """
    streams = tuple(_stream(layout, leaf) for leaf in layout.leaves)
    leaves = tuple(_leaf(stream, leaf) for stream, leaf in zip(streams, layout.leaves, strict=True))
    held = tuple(leaf for leaf in layout.leaves if leaf.name != leaf.stream)
    return replace(layout, streams=streams, leaves=(*leaves, *held), of_leaves=True, fuse=None, query=None)


def _leaf(stream: Stream, leaf: Leaf) -> Leaf:
    shared = (axis for axis in leaf.axes if axis.name in ("block", "slot", "bit"))
    return Leaf(stream.name, stream.name, (*shared, *stream.axes), stream.dtypes, stream.itemsize)


def _stream(layout: Layout, leaf: Leaf) -> Stream:
    axes = [axis for axis in leaf.axes if axis.name == "head"]
    dim = next((axis for axis in leaf.axes if axis.name == "dim"), Axis("dim", 1))
    held = _held(layout, leaf.name)
    count = dim.count if held.pack is None else dim.extent // held.pack.size * held.itemsize * _bits_apart(leaf)
    return Stream(stored_name(leaf.name), (*axes, Axis("dim", count)), leaf.dtypes, leaf.itemsize)


def _bits_apart(leaf: Leaf) -> int:
    """How many bits of a code lie apart, 1 where they lie together."""
    return next((axis.extent for axis in leaf.axes if axis.name == "bit"), 1)


def _held(layout: Layout, leaf: str) -> Holds:
    return next(h for buffer in layout.buffers for h in holders(buffer.place) if leaf in h.leaves)


def stored_plans(layout: Layout) -> tuple[tuple[Layout, Plan], ...]:
    """The plans that read all leaves of tokens by slot and by request, and the layout of their streams; none where none
    is encoded.

    Leaves in several places are read where they lie first.
    """
    if not any(stream.encoding for stream in layout.streams):
        return ()
    views, stored = cache_views(layout), stored_layout(layout)
    copies = tuple(
        Copy(stream.name, _counted(leaf, views[leaf.name][0]), dense_view(stream, f"{stream.name}_out"))
        for leaf, stream in zip(layout.leaves, stored.streams, strict=True)
    )
    plans = (
        Plan("gather_codes", "gather", "slots", copies),
        Plan("gather_codes_paged", "gather", "requests", copies),
    )
    for plan in plans:
        verify(stored, plan)
    return tuple((stored, plan) for plan in plans)


def _counted(leaf: Leaf, view: View) -> View:
    """The view with ``dim`` counted as the stream of its leaf has it: in values, groups, or the bytes of codes."""
    axis = next((axis for axis in leaf.axes if axis.name == "dim"), Axis("dim", 1))
    step = axis.step

    def counted(digit: Digit) -> Digit:
        if digit.axis == "bit":
            return Digit("dim", digit.div * axis.extent // view.pack.size, digit.size)
        if digit.axis != "dim":
            return digit
        if view.pack is None:
            return Digit("dim", digit.div // step, digit.size)
        above = digit.div >= view.pack.div * view.pack.size
        return Digit("dim", digit.div // (view.pack.size if above else 1) * view.itemsize, digit.size)

    steps = tuple(replace(s, digit=counted(s.digit)) for s in view.steps)
    if view.pack is None:
        return replace(view, steps=steps)
    bytes_of = (Step(Digit("dim", 1, view.itemsize), None, 1),) if view.itemsize > 1 else ()
    return replace(view, steps=(*steps, *bytes_of), itemsize=1, access=1, pack=None)
