"""The PyTorch oracle of transfers: what a token's bytes, or its values, are on one side and become on the other.

Places are found by ``kvgen.views`` and values made by ``kvgen.quant``, as in ``kvgen.reference``. A side is a list of
its buffers, one dict of tensors for each layer; where the layout has a ``layer`` axis there is one dict, of which
``layers`` says which to use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvgen.axes import Axis
from kvgen.layout import Layout, Leaf, Stream, leaves_of
from kvgen.quant import rows as encoded
from kvgen.reference import Pool, last_writers
from kvgen.transfer import Transfer, leaves_of_stream, tokens_together
from kvgen.views import extents, num_slots, pad_views

Buffers = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Heads:
    """``count`` heads from ``source`` on become those from ``destination`` on; None: all of them."""

    source: int = 0
    destination: int = 0
    count: int | None = None


@dataclass(frozen=True, slots=True)
class SideTensors:
    """One side of a call: buffers of each layer, or one allocation and the layers of it."""

    buffers: Sequence[Buffers]
    layers: Sequence[int] | None = None
    scales: Mapping[str, Tensor] = field(default_factory=dict)

    def layer(self, index: int) -> tuple[Buffers, int]:
        return (self.buffers[index], 0) if self.layers is None else (self.buffers[0], self.layers[index])

    @property
    def count(self) -> int:
        return len(self.buffers) if self.layers is None else len(self.layers)


def transfer(
    what: Transfer,
    source: SideTensors,
    destination: SideTensors,
    src_slots: Tensor,
    dst_slots: Tensor,
    heads: Heads = Heads(),
    dtype: torch.dtype | None = None,
) -> None:
    """Move tokens in place, from ``src_slots [T]`` to ``dst_slots [T]``; of those with one destination the last wins.

    Pairs of which either is negative, past its pool, or the slot that its side skips, are left out. ``dtype`` is that
    of plain values in byte buffers that are worked on.
    """
    kept = _live(what.source, source.buffers[0], src_slots) & _live(what.destination, destination.buffers[0], dst_slots)
    numbers = src_slots[kept].long(), dst_slots[kept].long()
    last = last_writers(numbers[1])
    numbers = numbers[0][last], numbers[1][last]
    if not len(numbers[0]):
        return
    for index in range(source.count):
        ends = []
        for layout, side in ((what.source, source), (what.destination, destination)):
            buffers, layer = side.layer(index)
            ends.append(Pool(layout, buffers, layer, side.scales))
        for stream in what.source.streams:
            _stream(what, stream.name, (ends[0], ends[1]), numbers, heads, dtype)
        _fill(what.destination, *destination.layer(index), numbers[1], heads)


def block_slots(blocks: Tensor, block_size: int, num_tokens: int) -> Tensor:
    """The slot number of token i is ``blocks[i // N] * N + i % N``; of a negative block there is none."""
    token = torch.arange(num_tokens, device=blocks.device)
    block = blocks.long()[token // block_size]
    return torch.where(block < 0, -1, block * block_size + token % block_size)


def _live(layout: Layout, buffers: Buffers, slots: Tensor) -> Tensor:
    live = (slots >= 0) & (slots < num_slots(layout, buffers))
    return live if layout.slots.skip is None else live & (slots != layout.slots.skip)


def _stream(what: Transfer, name: str, ends: tuple[Pool, Pool], numbers, heads: Heads, dtype) -> None:
    source, destination = ends
    if what.raw(name):
        for leaf in leaves_of_stream(what.source, name):
            shape = _shape(what.source, source, leaf.name)
            rows = source.read(leaf.name, numbers[0], shape)
            held = _has_heads(leaf)
            _put(what.destination, destination, leaf.name, numbers[1], _cut(rows, heads) if held else rows, heads)
        return
    values = _values(what.source, source, name, numbers[0], dtype)
    stream = what.destination.stream(name)
    if stream.axes[0].name == "head" and heads.count is not None:  # beside what other heads would be
        whole = torch.zeros(len(values), *destination.shape(stream), device=values.device)
        whole[:, heads.destination : heads.destination + heads.count] = _cut(values, heads)
        values = whole
    if stream.encoding is None:
        elements = {name: values.to(_plain_type(what.destination, destination, stream, dtype))}
    elif (tokens := tokens_together(what, name)) > 1:
        elements = _encode_together(stream, tokens, values, destination.write_scale(stream, numbers[1]), numbers[1])
    else:
        elements = encoded.encode_rows(stream, values, destination.write_scale(stream, numbers[1]))
    for leaf, data in elements.items():
        shape = _shape(what.destination, destination, leaf)
        rows = data.contiguous().view(torch.uint8).reshape(len(data), *shape[:-1], -1)
        moved = Heads(heads.destination, heads.destination, heads.count)
        held = _has_heads(what.destination.leaf(leaf))
        _put(what.destination, destination, leaf, numbers[1], _cut(rows, moved) if held else rows, heads)


def _encode_together(
    stream: Stream, tokens: int, values: Tensor, given: encoded.Given | None, numbers: Tensor
) -> dict[str, Tensor]:
    """Elements of each leaf for ``values [n, *axes]``, where ``tokens`` in a row of slots share what is made of them.

    A group is a row that has tokens as its slowest axis; those that are not moved are NaN in it, which counts nothing.
    """
    groups, row = torch.unique(numbers // tokens, return_inverse=True)
    place = numbers % tokens
    whole = values.new_full((len(groups), tokens, *values.shape[1:]), torch.nan, dtype=torch.float32)
    whole[row, place] = values.float()
    scale = stream.scale
    shared = replace(scale, axes=tuple(axis for axis in scale.axes if axis.name not in ("block", "slot")))
    axes = (Axis("slot", tokens), *stream.axes)
    grouped = replace(stream, axes=axes, encoding=replace(stream.encoding, scale=shared))
    outer = given and encoded.Given(outer=given.outer.unsqueeze(1))
    found = encoded.encode_rows(grouped, whole, outer)
    return {leaf: elements[row, place] if leaf == stream.name else elements[row, 0] for leaf, elements in found.items()}


def _cut(rows: Tensor, heads: Heads) -> Tensor:
    """The heads that are moved, of ``[n, head, …]``."""
    return rows if heads.count is None else rows[:, heads.source : heads.source + heads.count]


def _has_heads(leaf: Leaf) -> bool:
    return any(axis.name == "head" for axis in leaf.axes)


def _shape(layout: Layout, pool: Pool, leaf: str) -> list[int]:
    """What a token has of a leaf: an extent for each axis of its stream, 1 where it does not vary."""
    stream = layout.stream(layout.leaf(leaf).stream)
    shape = pool.shape(stream)
    return shape if leaf == stream.name else encoded.counts(stream, stream.scale, shape)


def _values(layout: Layout, pool: Pool, name: str, numbers: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Float32 values of a stream, ``[n, *axes]``."""
    stream = layout.stream(name)
    rows = pool.read(name, numbers, pool.shape(stream))
    if stream.encoding is not None:
        return encoded.decode_rows(stream, rows, pool.given_scale(stream, numbers))
    return rows.contiguous().view(_plain_type(layout, pool, stream, dtype)).float()


def _plain_type(layout: Layout, pool: Pool, stream: Stream, asked: torch.dtype | None) -> torch.dtype:
    """What values are that are stored as they come: the tensor's elements, or of bytes what the caller says."""
    holder = next(buffer for buffer in layout.buffers if stream.name in leaves_of(buffer.place))
    tensor = pool.tensors[holder.name]
    return tensor.dtype if tensor.dtype != torch.uint8 else asked or getattr(torch, stream.dtypes[0])


def _put(layout: Layout, pool: Pool, leaf: str, numbers: Tensor, rows: Tensor, heads: Heads) -> None:
    """Write ``rows`` to every place of a leaf; heads that are not moved keep what each place has."""
    some = heads.count is not None and _has_heads(layout.leaf(leaf))
    for place in pool.places[leaf]:
        view = place.select("layer", pool.layer)
        index = view.at(numbers, pool.sizes["slot"])
        if not some:
            view.write(index, rows)
            continue
        whole = view.read(index).reshape(len(numbers), *_shape(layout, pool, leaf)[:-1], -1).clone()
        whole[:, heads.destination : heads.destination + heads.count] = rows
        view.write(index, whole)


def _fill(layout: Layout, buffers: Buffers, layer: int, numbers: Tensor, heads: Heads) -> None:
    """Padding with a fill is written with its token, that of a head with the head."""
    size = extents(layout, buffers)["slot"]
    for _, pad, view in pad_views(layout, buffers):
        if pad.fill is None:
            continue
        held = view.select("layer", layer)
        named = heads.count is not None and any(digit.axis == "head" for digit in held.digits)
        moved = range(heads.destination, heads.destination + heads.count) if named else ()
        for place in [held.select("head", head) for head in moved] if named else [held]:
            place.tensor[place.at(numbers, size)] = pad.fill
