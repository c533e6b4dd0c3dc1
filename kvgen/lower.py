"""Layout to plans: places become views, by arithmetic on digits alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvgen.axes import Digit
from kvgen.encodings import append_refusal
from kvgen.layout import Buffer, Dim, Field, Holds, Layout, Pad, Place, Record, Scale, Stream, leaves_of
from kvgen.lower_fuse import fused_plans
from kvgen.plan import Copy, Fill, Plan, Step, View
from kvgen.values import STORED_ITEMSIZE

SLOT_NUMBER = "slot_number"
"""The axis that block and slot make together: ``block * block_size + slot``."""


def lower(layout: Layout) -> tuple[Plan, ...]:
    """Every copying function of a layout's module, in the order it prints them; not that of what is stored."""
    cache, fills = cache_views(layout), cache_fills(layout)
    names = tuple(stream.name for stream in layout.streams)

    def params(name: str, place: int) -> dict[str, View]:
        """Where a stream's scale, its zero and the scale of its scale lie; each place of codes may have its own."""
        encoding = layout.stream(name).encoding
        if encoding is None or encoding.scale is None:
            return {}
        scale = encoding.scale
        found = {"scale": nth(scale.name, place) if scale.stored else argument_view(scale)}
        if encoding.zero:
            found["zero"] = nth(encoding.zero.name, place)
        if scale.scale:
            found["outer"] = argument_view(scale.scale)
        return found

    def nth(name: str, place: int) -> View:
        return cache[name][min(place, len(cache[name]) - 1)]

    def append(name: str, streams: tuple[str, ...], placement: str = "slots") -> Plan:
        copies = tuple(
            Copy(s, dense_view(layout.stream(s), s), view, **params(s, place))
            for s in streams
            for place, view in enumerate(cache[s])
        )
        views = (view for copy in copies for view in _written(layout.stream(copy.stream), copy))
        touched = dict.fromkeys(view.tensor for view in views if view.tensor in fills)
        return Plan(name, "append", placement, copies, tuple(fill for t in touched for fill in fills[t]))

    def gather(name: str, placement: str) -> Plan:
        """What is stored more than once is read where it lies first."""
        copies = tuple(Copy(s, cache[s][0], dense_view(layout.stream(s), f"{s}_out"), **params(s, 0)) for s in names)
        return Plan(name, "gather", placement, copies)

    able = tuple(name for name in names if append_refusal(layout, name) is None)
    whole = able == names
    plans = (
        *([append("append", names)] if whole else []),
        *(append(f"append_{name}", (name,)) for name in able),
        *([append("append_positions", names, "positions")] if whole else []),
        *fused_plans(layout, able, append, dense_view),
        gather("gather", "slots"),
        gather("gather_paged", "requests"),
    )
    for plan in plans:
        verify(layout, plan)
    return plans


def cache_views(layout: Layout) -> dict[str, list[View]]:
    """The views of every leaf, one for each of its places."""
    found: dict[str, list[View]] = {}
    for buffer in layout.buffers:
        for name, view in _leaf_views(layout, buffer):
            found.setdefault(name, []).append(view)
    return found


def cache_fills(layout: Layout) -> dict[str, tuple[Fill, ...]]:
    """The filled padding of every buffer."""
    return {buffer.name: tuple(_fills(layout, buffer)) for buffer in layout.buffers}


def _written(stream: Stream, copy: Copy) -> tuple[View, ...]:
    """What append writes of a stream in the cache: scales that are handed in, in a buffer too, are only read."""
    computed = stream.scale is not None and stream.scale.dynamic
    views = (copy.destination, *((copy.scale, copy.zero) if computed else ()))
    return tuple(view for view in views if view is not None)


def dense_view(stream: Stream, tensor: str) -> View:
    """``[T, *axes]`` with any strides but the last, which is 1."""
    steps = [Step(Digit("token", 1, None), 0, 1)]
    last = len(stream.axes) - 1
    for i, axis in enumerate(stream.axes):
        if axis.extent != 1:
            steps.append(Step(Digit(axis.name, 1, axis.extent), None if i == last else i + 1, 1))
    return View(tensor, stream.itemsize, stream.itemsize, stream.itemsize, 0, tuple(steps))


def argument_view(scale: Scale) -> View:
    """A scale that is handed in: a dimension per axis with any stride, ``[1]`` for none."""
    steps = tuple(
        Step(Digit(axis.name, axis.step, axis.count), i, 1) for i, axis in enumerate(scale.axes) if axis.count != 1
    )
    size = STORED_ITEMSIZE[scale.dtype]
    return View(scale.argument, size, size, size, 0, steps)


@dataclass(frozen=True, slots=True)
class Site:
    """Where a leaf or a padding lies: its steps and offset in bytes, tensor dimensions aside.

    ``leaf`` is the one it holds first, or the first of the record around it.
    """

    content: Holds | Pad
    leaf: str
    offset: int
    steps: tuple[Step, ...]


def _leaf_views(layout: Layout, buffer: Buffer) -> Iterator[tuple[str, View]]:
    for site in sites(layout, buffer):
        if not isinstance(site.content, Holds):
            continue
        for index, leaf in enumerate(site.content.leaves):
            yield leaf, replace(_side_view(buffer, site, site.content.itemsize, index), pack=site.content.pack)


def _fills(layout: Layout, buffer: Buffer) -> Iterator[Fill]:
    for site in sites(layout, buffer):
        if isinstance(site.content, Pad) and site.content.fill is not None:
            paired = any(step.digit.axis == "kv" for step in site.steps)
            for index in range(2 if paired else 1):
                stream = layout.leaf(site.leaf).stream
                yield Fill(stream, _side_view(buffer, site, 1, index), site.content.size, site.content.fill)


def _side_view(buffer: Buffer, site: Site, itemsize: int, index: int) -> View:
    """The view of a site where ``kv`` stands at ``index``."""
    steps, offset = [], site.offset
    for step in site.steps:
        if step.digit.axis != "kv":
            steps.append(step)
        elif step.dim is None:
            offset += index * step.factor
        elif index:
            steps.append(Step(Digit("kv", 1, 2), step.dim, step.factor * index))
    return _view(buffer, itemsize, offset, steps, site.steps)


def _view(buffer: Buffer, itemsize: int, offset: int, steps: list[Step] | tuple[Step, ...], all_steps) -> View:
    """A view in tensor elements, from offsets and constant steps in bytes."""
    unit = buffer.unit
    # The power of two that divides every byte address of the leaf, on tensors whose own strides are multiples of it.
    pitches = [buffer.place.pitch] if isinstance(buffer.place.content, Record) else []
    constants = [step.factor for step in all_steps if step.dim is None]
    access = math.gcd(itemsize & -itemsize, offset, *constants, *pitches)
    if unit > 1:
        offset //= unit
        steps = [s if s.dim is not None else Step(s.digit, None, s.factor // unit) for s in steps]
    return View(buffer.name, itemsize, unit, access, offset, tuple(steps))


def sites(layout: Layout, buffer: Buffer) -> Iterator[Site]:
    """Every leaf and padding of a buffer. Constant steps and offsets are in bytes."""
    place = buffer.place
    steps: list[Step] = []
    last = len(place.dims) - 1
    for i, dim in enumerate(place.dims):
        inner = isinstance(place.content, Holds) and i == last  # the last dimension of a tensor has stride 1
        pitch = place.content.itemsize if inner else 1
        steps += _dim_steps(dim, None if inner else i, pitch)
    yield from _descend(layout, place, 0, tuple(steps))


def _descend(layout: Layout, place: Place, offset: int, steps: tuple[Step, ...]) -> Iterator[Site]:
    if isinstance(place.content, Holds):
        yield Site(place.content, place.content.leaves[0], offset, steps)
        return
    for field in place.content.fields:
        if isinstance(field.content, Pad):
            yield Site(field.content, leaves_of(place)[0], offset + field.offset, steps)
        else:
            yield from _field_sites(layout, field, offset + field.offset, steps)


def _field_sites(layout: Layout, field: Field, offset: int, steps: tuple[Step, ...]) -> Iterator[Site]:
    place = field.content
    inner: list[Step] = []
    pitch = place.pitch
    for dim in reversed(place.dims):
        inner = _dim_steps(dim, None, pitch) + inner
        pitch *= dim.size
    yield from _descend(layout, place, offset, (*steps, *inner))


def _dim_steps(dim: Dim, tensor_dim: int | None, pitch: int) -> list[Step]:
    """Steps of the digits that share a dimension, ``pitch`` being one step of the dimension itself."""
    steps: list[Step] = []
    factor: int | None = pitch
    for digit in reversed(dim.digits):
        if factor is None:  # a dynamic block_size below block: together they are the slot number
            below = steps.pop(0)
            assert digit == Digit("block", 1, None) and below.digit == Digit("slot", 1, None)
            steps.insert(0, Step(Digit(SLOT_NUMBER, 1, None), tensor_dim, below.factor))
            continue
        if digit.size != 1:
            steps.insert(0, Step(digit, tensor_dim, factor))
        factor = None if digit.size is None else factor * digit.size
    return steps


def coalesce(layout: Layout, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Join digits that are neighbours both in storage and in radix, so that they print as one.

    The lowest digit of ``block`` above the topmost of ``slot`` makes a digit of the slot number.
    """
    joined: list[Step] = []
    for step in steps:
        while joined and (merged := _join(layout, joined[-1], step)) is not None:
            joined.pop()
            step = merged
        joined.append(step)
    return tuple(joined)


def _join(layout: Layout, slow: Step, fast: Step) -> Step | None:
    high, low = slow.digit, fast.digit
    if slow.dim != fast.dim or low.size is None or slow.factor != fast.factor * low.size:
        return None
    size = None if high.size is None else high.size * low.size
    if high.axis == low.axis and high.div == low.div * low.size:
        return Step(Digit(low.axis, low.div, size), fast.dim, fast.factor)
    if (high.axis, high.div) == ("block", 1) and low.axis == "slot" and low.div * low.size == layout.block_size:
        return Step(Digit(SLOT_NUMBER, low.div, size), fast.dim, fast.factor)
    return None


def planes(view: View) -> tuple[View, ...]:
    """A view of each bit of codes whose bits lie apart, the lowest first; the view itself where they lie together."""
    count = math.prod(step.digit.size for step in view.steps if step.digit.axis == "bit")
    return tuple(_plane(view, bit) for bit in range(count)) if count > 1 else (view,)


def _plane(view: View, bit: int) -> View:
    """The view where ``bit`` stands still."""
    steps, offset = [], view.offset
    for step in view.steps:
        index = step.digit.of(bit) if step.digit.axis == "bit" else None
        if index is None:
            steps.append(step)
        elif step.dim is None:
            offset += index * step.factor
        elif index:
            steps.append(Step(Digit("kv", 1, 2), step.dim, step.factor * index))
    return replace(view, offset=offset, steps=tuple(steps))


def verify(layout: Layout, plan: Plan) -> None:
    """Assert what every later stage relies on: both sides of a copy span the same stream, digits tile their axes."""
    for copy in plan.copies:
        cache, dense = plan.cache_view(copy), plan.dense_view(copy)
        leaf = layout.leaf(copy.stream)
        known = {axis.name: axis.extent for axis in leaf.axes} | {"block": None, "slot": layout.block_size, "kv": 2}
        known |= {SLOT_NUMBER: None, "layer": layout.layers.extent if layout.layers else None}
        assert cache.axes <= known.keys(), (plan.name, copy.stream, cache.axes)
        assert dense.axes - {"token"} <= {axis.name for axis in layout.stream(copy.stream).axes}
        for name in ("head", "bit", "dim", "slot"):
            packed = [cache.pack] if cache.pack else []
            digits = [digit for digit in [*(s.digit for s in cache.steps), *packed] if digit.axis == name]
            digits.sort(key=lambda digit: digit.div)
            reach = next((axis.step for axis in leaf.axes if axis.name == name), 1)
            for digit in digits:
                assert digit.div == reach, (plan.name, copy.stream, digit)
                reach = None if digit.size is None else reach * digit.size
            if digits:
                assert reach == known[name], (plan.name, copy.stream, name)
        assert all(step.factor > 0 for step in cache.steps)
        assert all(set(stage.over) <= dense.axes | {"dim"} for stage in copy.stages)
    for fill in plan.fills:
        assert "block" in fill.view.axes or SLOT_NUMBER in fill.view.axes
    assert all(leaves_of(buffer.place) for buffer in layout.buffers)
