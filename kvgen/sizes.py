"""Shapes, strides and sizes of a layout's buffers, for people: with names where the launch decides."""

from __future__ import annotations

from fractions import Fraction

from kvgen.amount import Amount
from kvgen.axes import Digit
from kvgen.layout import Buffer, Dim, Holds, Layout, Place, leaves_of
from kvgen.packing import unpacked

UNKNOWN = {
    "block": "num_blocks",
    "layer": "num_layers",
    "slot": "block_size",
    "head": "num_heads",
    "dim": "head_dim",
}
"""What the extent of an axis is called when only the launch knows it."""


def unknown(layout: Layout, axis: str) -> str:
    """The name of an extent that only the launch knows."""
    return "num_requests" if layout.contiguous and axis == "block" else UNKNOWN.get(axis, f"num_{axis}")


def axis_name(layout: Layout, axis: str) -> str:
    """The axis as the layout calls it: a contiguous cache has ``request`` and ``position``."""
    return {"block": "request", "slot": "position"}.get(axis, axis) if layout.contiguous else axis


def axis_extent(layout: Layout, leaf: str, axis: str) -> int | None:
    """The extent of an axis as a leaf has it (key and value may differ in ``dim``); None where the launch decides."""
    if axis == "kv":
        return 2
    if axis == "layer":
        return layout.layers.extent if layout.layers else None
    return next((a.extent for a in layout.leaf(leaf).axes if a.name == axis), None)


def digit_size(layout: Layout, digit: Digit) -> Amount:
    """How many values a digit takes."""
    if digit.size is not None:
        return Amount.of(digit.size)
    return Amount.of(unknown(layout, digit.axis)) * Fraction(1, digit.div)


def dim_size(layout: Layout, dim: Dim) -> Amount:
    size = Amount.of(1)
    for digit in dim.digits:
        size *= digit_size(layout, digit)
    return size


def place_strides(layout: Layout, place: Place) -> list[Amount]:
    """Bytes from one index of each dimension to the next where nothing more is padded than the layout asks for."""
    stride = Amount.of(place.pitch)
    strides = []
    for dim in reversed(place.dims):
        strides.insert(0, stride)
        stride *= dim_size(layout, dim)
    return strides


def shape(layout: Layout, buffer: Buffer) -> list[Amount]:
    """The tensor's shape in its elements, the record's dimension included."""
    content = buffer.place.content
    record = [] if isinstance(content, Holds) else [Amount.of(Fraction(content.size, buffer.unit))]
    return [dim_size(layout, dim) for dim in buffer.place.dims] + record


def strides(layout: Layout, buffer: Buffer) -> list[Amount]:
    """The smallest strides of the tensor, in its elements."""
    record = [] if isinstance(buffer.place.content, Holds) else [Amount.of(1)]
    return [stride * Fraction(1, buffer.unit) for stride in place_strides(layout, buffer.place)] + record


def buffer_bytes(layout: Layout, buffer: Buffer) -> Amount:
    """Bytes of the whole tensor with the smallest strides."""
    total = Amount.of(buffer.place.pitch)
    for dim in buffer.place.dims:
        total *= dim_size(layout, dim)
    return total


def page_bytes(layout: Layout, buffer: Buffer) -> Amount:
    """Bytes that one block of one layer takes in a buffer, padding included."""
    page = buffer_bytes(layout, buffer).per(unknown(layout, "block"))
    return page.per(layout.layers.extent or unknown(layout, "layer")) if has_layers(layout, buffer) else page


def all_layers_bytes(layout: Layout, buffer: Buffer) -> Amount:
    """Bytes that one block takes in a buffer that has all layers, padding included."""
    return page_bytes(layout, buffer) * (layout.layers.extent or unknown(layout, "layer"))


def has_layers(layout: Layout, buffer: Buffer) -> bool:
    """Whether a buffer has all layers, and not one."""
    return layout.layers is not None and _has_axis(buffer.place, "layer")


def token_bytes(layout: Layout, buffer: Buffer | None = None) -> Amount:
    """Bytes that one token of one layer takes, in one buffer or in all of them, padding included."""
    total = Amount()
    for each in layout.buffers if buffer is None else (buffer,):
        total += page_bytes(layout, each).per(layout.block_size or unknown(layout, "slot"))
    return total


def term(layout: Layout, place: Place, digit: Digit) -> str:
    """A digit as an order spells it."""
    spelled = digit.term(axis_extent(layout, leaves_of(place)[0], digit.axis))
    return axis_name(layout, digit.axis) + spelled.removeprefix(digit.axis)


def order(layout: Layout, place: Place) -> str:
    """The order of a place, slowest first: ``block slot head dim``, ``(block slot) head dim``."""
    parts = []
    for dim in unpacked(place):
        terms = " ".join(term(layout, place, digit) for digit in dim.digits)
        parts.append(f"({terms})" if len(dim.digits) > 1 else terms or "1")
    return " ".join(parts)


def size_text(count: int) -> str:
    """Bytes with a unit that a person can take in: ``32.0 KiB``."""
    number = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            return f"{count} bytes" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


def _has_axis(place: Place, axis: str) -> bool:
    if any(digit.axis == axis for dim in place.dims for digit in dim.digits):
        return True
    if isinstance(place.content, Holds):
        return False
    return any(isinstance(f.content, Place) and _has_axis(f.content, axis) for f in place.content.fields)
