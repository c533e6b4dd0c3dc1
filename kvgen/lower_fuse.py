"""The fused append of a layout as plans: the plain ones with stages between their two sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvgen.axes import Digit, product
from kvgen.layout import Layout
from kvgen.plan import Copy, Norm, Plan, Rotary, Stage, Step, View
from kvgen.stages import RmsNorm, Rope

PACKED = "qkv"
"""The tensor that holds the query and all streams."""


def fused_plans(
    layout: Layout, able: tuple[str, ...], append: Callable[[str, tuple[str, ...]], Plan], dense: Callable[..., View]
) -> Iterator[Plan]:
    """``append_fused`` where all streams can be appended, and one function for each stream that has stages.

    ``append`` makes the plain plan of some streams, ``dense`` the view of a dense tensor. The query goes with the
    stream it is like.
    """
    fuse = layout.fuse
    if fuse is None:
        return
    names = tuple(stream.name for stream in layout.streams)
    query = _query(layout, dense)
    if able == names:
        yield _with_stages(layout, append("append_fused", names), query)
    for name in able:
        if fuse.of(name):
            along = query if fuse.query_like == name else None
            yield _with_stages(layout, append(f"append_fused_{name}", (name,)), along)


def _with_stages(layout: Layout, plan: Plan, query: Copy | None) -> Plan:
    copies = tuple(
        replace(copy, source=_source(layout, copy.stream, copy.source), stages=stages(layout, copy.stream))
        for copy in plan.copies
    )
    return replace(plan, copies=copies, query=query)


def _query(layout: Layout, dense: Callable[..., View]) -> Copy | None:
    """The query's way from its tensor, or from its columns of the packed one, to its output; None where nothing
    happens to it.
    """
    query = layout.query
    if query is None or not layout.fuse.of(query.name):
        return None
    source = _source(layout, query.name, dense(query, query.name))
    return Copy(query.name, source, dense(query, f"{query.name}_out"), stages=stages(layout, query.name))


def _source(layout: Layout, name: str, view: View) -> View:
    """Where the values of a stream come from: a tensor of their own, or their columns of the packed one."""
    if not layout.fuse.packed:
        return view
    offset = 0
    for stream in (layout.query, *layout.streams):
        if stream.name == name:
            break
        offset += product(axis.extent for axis in stream.axes)
    sizes = {axis.name: product(a.extent for a in stream.axes[i + 1 :]) for i, axis in enumerate(stream.axes)}
    steps = tuple(s if s.digit.axis == "token" else Step(s.digit, None, sizes[s.digit.axis]) for s in view.steps)
    return replace(view, tensor=PACKED, offset=offset, steps=steps)


def packed_width(layout: Layout) -> int:
    """Columns of the packed tensor."""
    return sum(product(axis.extent for axis in stream.axes) for stream in (layout.query, *layout.streams))


def stages(layout: Layout, name: str) -> tuple[Stage, ...]:
    """The stages of a stream, with where each of their parameters lies."""
    fuse, chain = layout.fuse, layout.fuse.rounding == "chain"
    found: list[Stage] = []
    for step in fuse.of(name):
        if isinstance(step, RmsNorm):
            weight = None if step.weight == "none" else weight_view(layout, name)
            found.append(Norm(step.eps, weight, step.weight == "plus_one", fuse.norm_sum, chain))
        else:
            found.append(Rotary(step, *_tables(step), fuse.mrope, chain))
    return tuple(found)


def weight_view(layout: Layout, name: str) -> View:
    """``[dim]``, of float32 or of the type of the source."""
    dim = layout.stream(name).axes[-1]
    return View(f"{name}_weight", 4, 4, 4, 0, (Step(Digit("dim", 1, dim.extent), None, 1),))


def _tables(rope: Rope) -> tuple[View | None, View | None]:
    """Where cosines and sines lie: in halves of a row, or in tables of their own."""
    steps = (Step(Digit("position", 1, None), 0, 1), Step(Digit("pair", 1, None), None, 1))
    if rope.cos_sin == "theta":
        return None, None
    if rope.cos_sin == "split":
        return View("cos", 4, 4, 4, 0, steps), View("sin", 4, 4, 4, 0, steps)
    return View("cos_sin", 4, 4, 4, 0, steps), View("cos_sin", 4, 4, 4, rope.pairs, steps)
