"""What two layouts differ in, fact by fact, in the words of the layout language."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvgen import sizes
from kvgen.axes import Axis
from kvgen.canonical import per
from kvgen.layout import Buffer, Dim, Field, Holds, Layout, Pad, Place, Record, Stream, leaves_of
from kvgen.packing import unpacked
from kvgen.spots import same_bytes

NONE = "none"

DETAILS = ("rounding", "clamp", "rotation")
"""What is told of an encoding, and of its scale besides its axes, only where both layouts have one."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact: of ``subject`` (``layout``, ``slots``, a stream, a leaf), and what either layout has there."""

    subject: str
    aspect: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """All differences of two layouts, and whether they are the same bytes under other spellings or names.

    ``same_slots``: slot numbers mean the same and the same ones are skipped.
    """

    differences: tuple[Difference, ...]
    same_bytes: bool
    same_slots: bool

    @property
    def alike(self) -> bool:
        """Whether one may stand for the other: pools and slot mappings of either fit both."""
        return self.same_bytes and self.same_slots


def compare(first: Layout, second: Layout) -> Comparison:
    """Everything in which two layouts differ; names of the layouts and their summaries aside."""
    a, b = (dict(_facts(layout)) for layout in (first, second))
    found = tuple(
        Difference(*key, a.get(key, NONE), b.get(key, NONE))
        for key in dict.fromkeys([*a, *b])
        if a.get(key, NONE) != b.get(key, NONE) and (_told_alone(key[1]) or (key in a and key in b))
    )
    same = same_bytes(first, second)
    if same:
        found += tuple(_tensors(first, second))
    return Comparison(found, same, first.slots == second.slots)


def _tensors(first: Layout, second: Layout) -> Iterator[Difference]:
    """How the dimensions of tensors differ that are the same bytes."""
    for buffer in first.buffers:
        others = [other for other in second.buffers if other.name == buffer.name]
        orders = [
            sizes.order(layout, b.place) for layout, b in ((first, buffer), *((second, other) for other in others))
        ]
        if len(set(orders)) > 1:
            yield Difference(buffer.name, "dimensions", *orders)


def _told_alone(aspect: str) -> bool:
    return aspect not in DETAILS and (aspect == "scale per" or not aspect.startswith("scale "))


def _facts(layout: Layout) -> Iterator[tuple[tuple[str, str], str]]:
    size = "dynamic" if layout.block_size is None else str(layout.block_size)
    yield ("layout", "block size"), size
    yield ("layout", "slots are counted in"), "requests" if layout.contiguous else "blocks"
    yield ("layout", "layers"), NONE if layout.layers is None else _extent(layout.layers)
    yield ("layout", "regions"), NONE if layout.regions is None else f"{_extent(layout.regions)} layers"
    yield ("layout", "tensors"), ", ".join(buffer.name for buffer in layout.buffers)
    yield ("layout", "bytes a token and layer"), str(sizes.token_bytes(layout).plain)
    for stream in layout.streams:
        for aspect, value in _stream(layout, stream):
            yield (stream.name, aspect), value
    for buffer in layout.buffers:
        yield from _places(layout, buffer)
    slots = layout.slots
    yield ("slots", "dtype"), slots.dtype
    yield ("slots", "skipped besides negatives"), NONE if slots.skip is None else str(slots.skip)
    yield ("slots", "remapped through"), slots.remap or NONE
    shard = slots.shard
    dealt = f"{shard.world} ranks, {shard.interleave} tokens at a time" if shard else NONE
    yield ("slots", "dealt to"), dealt
    yield ("schedule", "append"), str(_hints(layout.schedule.append))
    yield ("schedule", "gather"), str(_hints(layout.schedule.gather))
    yield ("module", "functions"), ", ".join(layout.functions) or "all"


def _hints(hints) -> str:
    given = {name: getattr(hints, name) for name in ("tokens", "heads", "num_warps")}
    return ", ".join(f"{name} {value}" for name, value in given.items() if value is not None) or "chosen by kvgen"


def _extent(axis: Axis) -> str:
    return "dynamic" if axis.extent is None else str(axis.extent)


def _stream(layout: Layout, stream: Stream) -> Iterator[tuple[str, str]]:
    axes = {axis.name: _extent(axis) for axis in stream.axes}
    yield "heads", axes.get("head", "shared by all heads")
    yield "dims", axes["dim"]
    yield "handed in as", " or ".join(stream.dtypes)
    encoding = stream.encoding
    if encoding is None:
        yield "stored as", "it comes"
        return
    yield "stored as", encoding.code if encoding.mode == "cast" else encoding.mode
    for name in DETAILS:
        value = getattr(encoding, name)
        if value is not None:
            yield name, str(value)
    scale, zero = encoding.scale, encoding.zero
    if scale is not None:
        yield "scale per", per(layout, scale) or "tensor"
        yield "scale is", "computed" if scale.dynamic else "stored by the caller" if scale.stored else "an argument"
        for name in ("dtype", "grid", "exponent", "code_range", "arithmetic", "given", "encode"):
            yield f"scale {name.removeprefix('code_')}", str(getattr(scale, name))
        yield "scale floor", f"{scale.floor:g} on {scale.floor_on}" if scale.floor_on else NONE
        yield "scale counted in", NONE if scale.scale is None else f"one per {per(layout, scale.scale) or 'tensor'}"
    if zero is not None:
        yield "zero", f"{zero.kind} in {zero.dtype}" + (", clamped" if zero.clamped else "")


def _places(layout: Layout, buffer: Buffer) -> Iterator[tuple[tuple[str, str], str]]:
    """Order and place of every leaf, numbered from the second place on; then what is padded."""
    counts: dict[str, int] = {}
    for leaves, order, lies in _walk(layout, buffer.place, (), ""):
        for leaf in leaves:
            counts[leaf] = counts.get(leaf, 0) + 1
            again = "" if _first(layout, buffer, leaf) and counts[leaf] == 1 else f" in {buffer.name}"
            yield (leaf, f"order{again}"), order
            yield (leaf, f"lies{again}"), lies or "in a tensor of its own"
    for index, (text, _) in enumerate(_padding(buffer.place)):
        yield (buffer.name, f"padding {index}"), text
    if buffer.place.align > 1:
        yield (buffer.name, "aligned to"), f"{buffer.place.align} bytes"


def _first(layout: Layout, buffer: Buffer, leaf: str) -> bool:
    return next(b for b in layout.buffers if leaf in leaves_of(b.place)) is buffer


def _walk(
    layout: Layout, place: Place, above: tuple[Dim, ...], lies: str
) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """The leaves of each place under a place, what they repeat over from the outside in, and where they lie."""
    content = place.content
    if isinstance(content, Holds):
        whole = Place((*above, *unpacked(place)), Holds(content.leaves, content.itemsize))
        turns = f"takes turns over kv: {' then '.join(content.leaves)}" if len(content.leaves) > 1 else ""
        yield content.leaves, _order(layout, whole), ", ".join(filter(None, (lies, turns)))
        return
    for field in content.fields:
        if isinstance(field.content, Place):
            yield from _walk(layout, field.content, (*above, *place.dims), _span(field, content, lies))


def _span(field: Field, record: Record, lies: str) -> str:
    end = field.offset + field.content.size
    own = f"bytes {field.offset} to {end} of a record of {record.size}"
    return f"{own}, in {lies}" if lies else own


def _order(layout: Layout, place: Place) -> str:
    """Terms from the slowest to the fastest; which of them share a dimension of the tensor is left out."""
    return " ".join(sizes.term(layout, place, digit) for dim in place.dims for digit in dim.digits)


def _padding(place: Place) -> Iterator[tuple[str, int]]:
    if isinstance(place.content, Holds):
        return
    for field in place.content.fields:
        if isinstance(field.content, Pad):
            fill = "never written" if field.content.fill is None else f"written as {field.content.fill}"
            yield f"{field.content.size} bytes at {field.offset}, {fill}", field.offset
        else:
            yield from _padding(field.content)
