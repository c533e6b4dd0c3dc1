"""The PyTorch oracle: the functions of a generated module, derived from the layout's places alone.

A buffer is viewed as bytes, its dimensions are unflattened into digits, records are narrowed to their fields, and the
digits are permuted into logical order. No address is ever computed here: slot numbers are unravelled over the sizes of
the digits that hold them and PyTorch's own indexing does the rest, so nothing is shared with the code that prints
addresses. Only the pages that a call names are touched, whatever the strides.

``layout`` comes first everywhere; streams and buffers are dicts of tensors by name. Shapes: T tokens, R requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvgen.axes import Digit
from kvgen.layout import Buffer, Dim, Holds, Layout, Pad, Place, Record, leaves_of


@dataclass(frozen=True, slots=True)
class ByteView:
    """The bytes of a leaf or of padding inside a buffer's tensor, uint8: a dimension per digit, then the value's bytes.

    ``digits`` name the leading dimensions: those of ``block``, then of ``slot``, then of every other axis in logical
    order, each from the slowest down.
    """

    tensor: Tensor
    digits: tuple[Digit, ...]

    @property
    def token_dims(self) -> int:
        """How many leading dimensions make up the slot number."""
        return sum(digit.axis in ("block", "slot") for digit in self.digits)

    def at(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Index of the slot numbers ``[n]``: one tensor per dimension of ``block`` and ``slot``."""
        return torch.unravel_index(numbers, self.tensor.shape[: self.token_dims])

    def select(self, axis: str, index: int) -> ByteView:
        """The view with one axis held at ``index``; padding may repeat over some digits of it, or none."""
        tensor = self.tensor
        for i in reversed(range(len(self.digits))):
            if self.digits[i].axis == axis:
                tensor = tensor.select(i, self.digits[i].of(index))
        return ByteView(tensor, tuple(d for d in self.digits if d.axis != axis))


def extents(layout: Layout, buffers: Mapping[str, Tensor]) -> dict[str, int]:
    """Extents of ``block``, ``slot`` and every dynamic axis, read from the tensors. ValueError if they disagree."""
    # Constant extents stand in the digits themselves (streams may differ in them): only the others are collected.
    sizes = {} if layout.block_size is None else {"slot": layout.block_size}
    for _ in range(4):
        for name, tensor in buffers.items():
            for i, dim in enumerate(layout.buffer(name).place.dims):
                _learn(sizes, dim, tensor.shape[i], name)
    return sizes


def _learn(sizes: dict[str, int], dim: Dim, length: int, buffer: str) -> None:
    unknown = [digit for digit in dim.digits if digit.size is None]
    missing = [digit for digit in unknown if digit.axis not in sizes]
    if len(missing) > 1 or not unknown:
        return
    last = (missing or unknown)[0]
    rest = math.prod(_size(digit, sizes) for digit in dim.digits if digit is not last)
    extent, left = divmod(length, rest)
    if left:
        raise ValueError(f"{buffer}: a dimension of {length} is no multiple of {rest}")
    if sizes.setdefault(last.axis, extent * last.div) != extent * last.div:
        raise ValueError(f"{buffer}: {last.axis} is {extent * last.div}, another buffer has {sizes[last.axis]}")


def _size(digit: Digit, sizes: Mapping[str, int]) -> int:
    return digit.size if digit.size is not None else sizes[digit.axis] // digit.div


def num_slots(layout: Layout, buffers: Mapping[str, Tensor]) -> int:
    """Slots in the pool: blocks × block_size."""
    sizes = extents(layout, buffers)
    return sizes["block"] * sizes["slot"]


def leaf_views(layout: Layout, buffers: Mapping[str, Tensor]) -> dict[str, ByteView]:
    """Where each leaf that lies in ``buffers`` is; a leaf of a pair is already held at its side of ``kv``."""
    sizes = extents(layout, buffers)
    views = {}
    for name, tensor in buffers.items():
        for content, view in _parts(layout.buffer(name), tensor, sizes):
            if isinstance(content, Holds):
                for side, leaf in enumerate(content.leaves):
                    views[leaf] = view.select("kv", side)
    return views


def pad_views(layout: Layout, buffers: Mapping[str, Tensor]) -> list[tuple[str, Pad, ByteView]]:
    """Every padding of every buffer: the buffer's name, the padding, and where it is."""
    sizes = extents(layout, buffers)
    return [
        (name, content, view)
        for name, tensor in buffers.items()
        for content, view in _parts(layout.buffer(name), tensor, sizes)
        if isinstance(content, Pad)
    ]


def _parts(buffer: Buffer, tensor: Tensor, sizes: Mapping[str, int]) -> Iterator[tuple[Holds | Pad, ByteView]]:
    place = buffer.place
    if tensor.dim() != buffer.ndim or tensor.element_size() != buffer.unit:
        raise ValueError(f"{buffer.name}: expected {buffer.ndim} dimensions of {buffer.unit}-byte elements")
    data = tensor.unsqueeze(-1).view(torch.uint8)
    if isinstance(place.content, Record):
        *outer, elements, unit = data.shape
        data = data.view(*outer, elements * unit)
    digits: list[Digit] = []
    for dim in place.dims:
        at = len(digits)
        split = [_size(digit, sizes) for digit in dim.digits]
        data = data.unflatten(at, split) if split else data.squeeze(at)
        digits += dim.digits
    yield from _inside(place, data, tuple(digits), sizes)


def _inside(place: Place, data: Tensor, digits: tuple[Digit, ...], sizes) -> Iterator[tuple[Holds | Pad, ByteView]]:
    """Parts of a place; ``data`` ends with the bytes of one of its values or records."""
    if isinstance(place.content, Holds):
        yield place.content, _logical(data, digits)
        return
    for field in place.content.fields:
        if isinstance(field.content, Pad):
            yield field.content, _logical(data.narrow(-1, field.offset, field.content.size), digits)
            continue
        inner = [digit for dim in field.content.dims for digit in dim.digits]
        shape = [*(_size(digit, sizes) for digit in inner), field.content.pitch]
        part = data.narrow(-1, field.offset, math.prod(shape)).unflatten(-1, shape)
        yield from _inside(field.content, part, (*digits, *inner), sizes)


def _logical(data: Tensor, digits: tuple[Digit, ...]) -> ByteView:
    axes = ("block", "slot", "layer", "kv", "head", "dim")
    rank = {axis: i for i, axis in enumerate(axes)}
    order = sorted(range(len(digits)), key=lambda i: (rank[digits[i].axis], -digits[i].div, digits[i].size == 1))
    return ByteView(data.permute(*order, len(digits)), tuple(digits[i] for i in order))


def resolve_slots(layout: Layout, slots: Tensor, pool_slots: int, remap: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(kept, numbers)``: which of the ``[T]`` slots are not skipped, and the slot number of each of those."""
    slots = slots.long()
    keep = slots >= 0
    if layout.slots.skip is not None:
        keep &= slots != layout.slots.skip
    if remap is not None:
        keep &= slots < len(remap)
        slots = torch.where(keep, remap.long()[torch.where(keep, slots, 0)] if len(remap) else slots, -1)
        keep &= slots >= 0
    keep &= slots < pool_slots
    return keep, slots[keep]


def _last_writers(numbers: Tensor) -> Tensor:
    """Positions in ``numbers`` of the last occurrence of each value."""
    values, group = numbers.unique(return_inverse=True)
    index = torch.arange(len(numbers), device=numbers.device)
    return torch.full_like(values, -1).scatter_reduce(0, group, index, "amax")


def append(
    layout: Layout,
    sources: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    slot_mapping: Tensor,
    *,
    remap: Tensor | None = None,
    layer: int | None = None,
) -> None:
    """Write tokens in place: ``sources[stream]`` is ``[T', *axes]``, ``slot_mapping`` ``[T]``, T' ≥ T.

    Only streams in ``sources`` are written, and filled padding of the buffers they lie in. Of tokens that share a slot
    the last one wins. ``layer`` is required where a buffer has a ``layer`` axis.
    """
    layer = _check_layer(layout, extents(layout, buffers), layer)
    keep, numbers = resolve_slots(layout, slot_mapping, num_slots(layout, buffers), remap)
    if not len(numbers):
        return
    last = _last_writers(numbers)
    tokens, numbers = keep.nonzero().flatten()[last], numbers[last]
    views = leaf_views(layout, buffers)
    for name, source in sources.items():
        view = views[name].select("layer", layer)
        values = source[tokens].contiguous().view(torch.uint8)
        view.tensor[view.at(numbers)] = values.reshape(len(tokens), *view.tensor.shape[view.token_dims :])
    for name, pad, view in pad_views(layout, buffers):
        if pad.fill is not None and any(leaf in sources for leaf in leaves_of(layout.buffer(name).place)):
            view = view.select("layer", layer)
            view.tensor[view.at(numbers)] = pad.fill


def gather(
    layout: Layout,
    buffers: Mapping[str, Tensor],
    slots: Tensor,
    *,
    remap: Tensor | None = None,
    layer: int | None = None,
    dtype: torch.dtype | None = None,
    out: Mapping[str, Tensor] | None = None,
    zero_skipped: bool = False,
) -> dict[str, Tensor]:
    """Tokens of ``slots [T]``, ``[T, *axes]`` per stream, bit by bit.

    Rows of skipped tokens keep what ``out`` had, or become zero with ``zero_skipped``; without ``out`` they are zero.
    ``dtype`` names the type of values that lie in byte buffers; by default the first one of the stream.
    """
    keep, numbers = resolve_slots(layout, slots, num_slots(layout, buffers), remap)
    sizes, views, result = extents(layout, buffers), leaf_views(layout, buffers), {}
    layer = _check_layer(layout, sizes, layer)
    for stream in layout.streams:
        view = views[stream.name].select("layer", layer)
        holder = next(buffers[b.name] for b in layout.buffers if stream.name in leaves_of(b.place))
        raw = holder.dtype == torch.uint8
        kind = (dtype or getattr(torch, stream.dtypes[0])) if raw else holder.dtype
        shape = [axis.extent if axis.extent is not None else sizes[axis.name] for axis in stream.axes]
        fresh = torch.zeros(len(slots), *shape, dtype=kind, device=holder.device) if out is None else None
        rows = fresh if fresh is not None else out[stream.name]
        if zero_skipped:
            rows[: len(slots)][~keep] = 0
        if len(numbers):
            values = view.tensor[view.at(numbers)].reshape(len(numbers), *shape[:-1], -1)
            rows[: len(slots)][keep] = values.view(rows.dtype)
        result[stream.name] = rows
    return result


def _check_layer(layout: Layout, sizes: Mapping[str, int], layer: int | None) -> int:
    """The layer to select; 0 where there is none to select from."""
    if layout.layers is None:
        return 0
    count = layout.layers.extent if layout.layers.extent is not None else sizes["layer"]
    if layer is None or not 0 <= layer < count:
        raise ValueError(f"layer: expected 0 to {count} (exclusive), got {layer}")
    return layer


def slot_mapping(
    layout: Layout,
    block_table: Tensor,
    positions: Tensor | None = None,
    *,
    context_lens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    request_ids: Tensor | None = None,
    num_tokens: int | None = None,
    block_size: int | None = None,
    rank: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Slot numbers ``[T]`` of tokens given by request and position; -1 where a token has no slot on this rank.

    T is the length of ``out``, else ``num_tokens``, else the number of positions. ``block_table`` is
    ``[R, columns]``; ``query_start_loc`` ``[R + 1]``; the other tensors one entry per token or request.
    """
    given = positions if positions is not None else context_lens
    if given is None:
        raise ValueError("positions: either positions or context_lens is needed")
    ragged = positions is None and query_start_loc is not None
    if ragged and out is None and num_tokens is None:
        raise ValueError("num_tokens: context_lens with query_start_loc needs num_tokens or out")
    count = len(out) if out is not None else num_tokens if num_tokens is not None else len(given)
    token = torch.arange(count, device=block_table.device)
    if query_start_loc is not None:
        request = _request_of(token, query_start_loc)
    elif request_ids is not None:
        request = _entry(request_ids, token, -1)
    else:
        request = token
    if ragged:
        position = _entry(context_lens, request, 0) + token - _entry(query_start_loc, request, 0)
    else:
        position = _entry(given, token, -1)
    slots = locate(layout, block_table, request, position, block_size or layout.block_size, rank)
    return _deliver(layout, slots, out)


def fill_slots(
    layout: Layout,
    block_table_row: Tensor,
    start_pos: int,
    count: int,
    *,
    block_size: int | None = None,
    rank: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Slot numbers of ``count`` tokens of one request, from ``start_pos`` on; what is left of ``out`` is -1."""
    token = torch.arange(count if out is None else len(out), device=block_table_row.device)
    position = torch.where(token < count, token + start_pos, -1)
    request = torch.zeros_like(token)
    size = block_size or layout.block_size
    slots = locate(layout, block_table_row.unsqueeze(0), request, position, size, rank)
    return _deliver(layout, slots, out)


def gather_paged(
    layout: Layout,
    buffers: Mapping[str, Tensor],
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seq_lens: Tensor,
    *,
    remap: Tensor | None = None,
    starts: Tensor | None = None,
    total_tokens: int | None = None,
    layer: int | None = None,
    rank: int = 0,
    dtype: torch.dtype | None = None,
    out: Mapping[str, Tensor] | None = None,
    zero_skipped: bool = False,
) -> dict[str, Tensor]:
    """Tokens of ragged requests: row i of request r is position ``starts[r] + i - cu_seq_lens[r]``.

    Positions at or past ``seq_lens[r]`` and rows of no request are skipped. ``out`` or ``total_tokens`` gives T.
    """
    if out is None and total_tokens is None:
        raise ValueError("total_tokens: needed where there is no out")
    count = total_tokens if out is None else len(next(iter(out.values())))
    row = torch.arange(count, device=block_table.device)
    request = _request_of(row, cu_seq_lens)
    position = row - _entry(cu_seq_lens, request, 0) + (0 if starts is None else _entry(starts, request, 0))
    position = torch.where(position < _entry(seq_lens, request, 0), position, -1)
    size = extents(layout, buffers)["slot"]
    slots = locate(layout, block_table, request, position, size, rank)
    return gather(layout, buffers, slots, remap=remap, layer=layer, dtype=dtype, out=out, zero_skipped=zero_skipped)


def append_positions(
    layout: Layout,
    sources: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    block_table: Tensor,
    positions: Tensor,
    *,
    remap: Tensor | None = None,
    request_ids: Tensor | None = None,
    layer: int | None = None,
    rank: int = 0,
) -> None:
    """``append`` of token t at ``positions[t]`` of request ``request_ids[t]``, or of request t without them."""
    token = torch.arange(len(positions), device=positions.device)
    request = token if request_ids is None else request_ids.long()
    slots = locate(layout, block_table, request, positions.long(), extents(layout, buffers)["slot"], rank)
    append(layout, sources, buffers, slots, remap=remap, layer=layer)


def locate(
    layout: Layout, block_table: Tensor, request: Tensor, position: Tensor, block_size: int, rank: int = 0
) -> Tensor:
    """Local slot number of each (request, position) ``[T]``, int64; -1 where there is none on this rank.

    A virtual block holds block_size tokens of each of W ranks, dealt I at a time: owner
    ``(p % (N·W)) // I % W``, local slot ``(p % (N·W)) // (I·W) · I + p % I``; one rank is W = I = 1.
    """
    shard = layout.slots.shard
    world, interleave = (shard.world, shard.interleave) if shard else (1, 1)
    requests, columns = block_table.shape
    valid = (request >= 0) & (request < requests) & (position >= 0)
    position = torch.where(valid, position, 0)
    column, inside = position // (block_size * world), position % (block_size * world)
    valid &= (column < columns) & (inside // interleave % world == rank)
    if not valid.any():
        return torch.full_like(position, -1)
    block = block_table.long()[torch.where(valid, request, 0), torch.where(valid, column, 0)]
    valid &= block >= 0
    slot = inside // (interleave * world) * interleave + position % interleave
    return torch.where(valid, block * block_size + slot, -1)


def _request_of(token: Tensor, starts: Tensor) -> Tensor:
    """r with ``starts[r] <= token < starts[r + 1]``, -1 where there is none; ``starts`` is ``[R + 1]``, ascending."""
    request = torch.searchsorted(starts.long().contiguous(), token, right=True) - 1
    return torch.where(request < len(starts) - 1, request, -1)


def _entry(values: Tensor, index: Tensor, missing: int) -> Tensor:
    """``values[index]`` as int64, ``missing`` where the index is outside."""
    inside = (index >= 0) & (index < len(values))
    if not len(values):
        return torch.full_like(index, missing)
    return torch.where(inside, values.long()[torch.where(inside, index, 0)], missing)


def _deliver(layout: Layout, slots: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return slots.to(getattr(torch, layout.slots.dtype))
    return out.copy_(slots)
