"""The PyTorch oracle: the functions of a generated module, derived from the layout's places alone.

Where values lie is told by PyTorch's views (``kvgen.views``), what they mean by ``kvgen.quant``: nothing is shared with
the code that prints addresses and encoders. Only the pages that a call names are touched, whatever the strides.

``layout`` comes first everywhere; streams and buffers are dicts of tensors by name. Shapes: T tokens, R requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from kvgen.encodings import append_refusal
from kvgen.layout import Layout, Scale, Stream, leaves_of
from kvgen.quant import casts
from kvgen.quant import rows as encoded
from kvgen.views import ByteView, extents, leaf_places, leaf_views, num_slots, pad_views

__all__ = [
    "ByteView",
    "append",
    "append_positions",
    "concat_mla_key",
    "extents",
    "fill_slots",
    "gather",
    "gather_codes",
    "gather_codes_paged",
    "gather_paged",
    "leaf_places",
    "leaf_views",
    "locate",
    "num_slots",
    "pad_views",
    "resolve_slots",
    "slot_mapping",
]


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


def last_writers(numbers: Tensor) -> Tensor:
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
    scales: Mapping[str, Tensor] | None = None,
) -> None:
    """Write tokens in place: ``sources[stream]`` is ``[T', *axes]``, ``slot_mapping`` ``[T]``, T' ≥ T.

    Only streams in ``sources`` are written, with their scales and filled padding of the buffers they lie in. Of tokens
    that share a slot the last one wins. ``layer`` is required where a buffer has a ``layer`` axis; ``scales`` are the
    static scales that are arguments, by name. ValueError for a stream that cannot be appended.
    """
    for name in sources:
        if reason := append_refusal(layout, name):
            raise ValueError(f"{name}: cannot be appended: {reason}")
    sizes = extents(layout, buffers)
    layer = _check_layer(layout, sizes, layer)
    keep, numbers = resolve_slots(layout, slot_mapping, num_slots(layout, buffers), remap)
    if not len(numbers):
        return
    last = last_writers(numbers)
    tokens, numbers = keep.nonzero().flatten()[last], numbers[last]
    pool = Pool(layout, buffers, layer, scales or {})
    written: set[str] = set()
    for name, source in sources.items():
        stream, rows = layout.stream(name), {name: source[tokens]}
        if stream.encoding is not None:
            rows = encoded.encode_rows(stream, source[tokens], pool.write_scale(stream, numbers))
        for leaf, elements in rows.items():
            pool.write(leaf, numbers, elements)
        written |= rows.keys()
    for name, pad, view in pad_views(layout, buffers):
        if pad.fill is not None and written.intersection(leaves_of(layout.buffer(name).place)):
            view = view.select("layer", layer)
            view.tensor[view.at(numbers, sizes["slot"])] = pad.fill


class Pool:
    """One layer of the buffers, read and written by leaf and slot numbers ``[n]``."""

    def __init__(self, layout: Layout, buffers: Mapping[str, Tensor], layer: int, scales: Mapping[str, Tensor]) -> None:
        self.sizes, self.layer, self.scales = extents(layout, buffers), layer, scales
        self.places, self.tensors = leaf_places(layout, buffers), buffers

    def shape(self, stream: Stream) -> list[int]:
        return [axis.extent if axis.extent is not None else self.sizes[axis.name] for axis in stream.axes]

    def read(self, leaf: str, numbers: Tensor, shape: list[int]) -> Tensor:
        """Bytes ``[n, *shape[:-1], shape[-1] · itemsize]`` of a leaf; of one that all tokens share, n times.

        Codes that share a byte come one a byte.
        """
        view = self.places[leaf][0].select("layer", self.layer)
        return view.read(view.at(numbers, self.sizes["slot"])).reshape(len(numbers), *shape[:-1], -1)

    def write(self, leaf: str, numbers: Tensor, elements: Tensor) -> None:
        """Elements ``[n, …]``, in logical order, to every place of a leaf."""
        data = elements.contiguous().view(torch.uint8)
        for place in self.places[leaf]:
            view = place.select("layer", self.layer)
            view.write(view.at(numbers, self.sizes["slot"]), data)

    def write_scale(self, stream: Stream, numbers: Tensor) -> encoded.Given | None:
        """What is known of the scale before codes are written; None where there is none, or none yet."""
        scale = stream.encoding.scale
        if scale is not None and scale.dynamic:
            outer = self._outer(stream)
            return None if outer is None else encoded.Given(outer=outer)
        return self.given_scale(stream, numbers)

    def _outer(self, stream: Stream) -> Tensor | None:
        """The static scale that a scale is counted in."""
        outer = stream.encoding.scale.scale
        return None if outer is None else self._argument(stream, outer).scale

    def _argument(self, stream: Stream, scale: Scale) -> encoded.Given:
        if scale.argument not in self.scales:
            raise ValueError(f"{scale.argument}: the layout asks for it")
        counts = encoded.counts(stream, scale, self.shape(stream))
        return encoded.argument_scale(scale, self.scales[scale.argument], counts, self.layer)

    def given_scale(self, stream: Stream, numbers: Tensor) -> encoded.Given | None:
        """The scale that codes are read with; None where there is none."""
        scale = stream.encoding.scale
        if scale is None:
            return None
        if not scale.stored:
            return self._argument(stream, scale)
        counts, zero = encoded.counts(stream, scale, self.shape(stream)), stream.encoding.zero
        under = None if zero is None else encoded.load(zero.dtype, self.read(zero.name, numbers, counts))
        return encoded.stored_scale(scale, self.read(scale.name, numbers, counts), self._outer(stream), under)


def gather(
    layout: Layout,
    buffers: Mapping[str, Tensor],
    slots: Tensor,
    *,
    remap: Tensor | None = None,
    layer: int | None = None,
    scales: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    rotated: bool = False,
    out: Mapping[str, Tensor] | None = None,
    zero_skipped: bool = False,
) -> dict[str, Tensor]:
    """Tokens of ``slots [T]``, ``[T, *axes]`` per stream: bit by bit, or decoded and rounded once to their type.

    Rows of skipped tokens keep what ``out`` had, or become zero with ``zero_skipped``; without ``out`` they are zero.
    ``dtype`` is the type of decoded streams, and of plain ones in byte buffers if it is one of theirs; by default the
    first one of the stream. What was rotated is turned back unless it is wanted ``rotated``.
    """
    keep, numbers = resolve_slots(layout, slots, num_slots(layout, buffers), remap)
    pool = Pool(layout, buffers, _check_layer(layout, extents(layout, buffers), layer), scales or {})
    result = {}
    for stream in layout.streams:
        shape = pool.shape(stream)
        if out is None:
            kind = _row_type(layout, stream, buffers, dtype)
            rows = torch.zeros(len(slots), *shape, dtype=kind, device=slots.device)
        else:
            rows = out[stream.name]
        if zero_skipped:
            rows[: len(slots)][~keep] = 0
        if len(numbers):
            values = pool.read(stream.name, numbers, shape)
            if stream.encoding is not None:
                given = pool.given_scale(stream, numbers)
                values = encoded.decode_rows(stream, values, given, rotated).to(rows.dtype)
            rows[: len(slots)][keep] = values.view(rows.dtype)
        result[stream.name] = rows
    return result


def gather_codes(
    layout: Layout,
    buffers: Mapping[str, Tensor],
    slots: Tensor,
    *,
    remap: Tensor | None = None,
    layer: int | None = None,
    out: Mapping[str, Tensor] | None = None,
    zero_skipped: bool = False,
) -> dict[str, Tensor]:
    """What is stored for tokens of ``slots [T]``, bit by bit and by leaf (``key``, ``key.scale``): ``[T, (head,) n]``.

    n counts values, the bytes of codes that share some, or groups of dims under a scale, 1 where a row shares one.
    Skipped rows are as those of ``gather``.
    """
    keep, numbers = resolve_slots(layout, slots, num_slots(layout, buffers), remap)
    pool = Pool(layout, buffers, _check_layer(layout, extents(layout, buffers), layer), {})
    result = {}
    for leaf in layout.leaves:
        view = pool.places[leaf.name][0].select("layer", pool.layer)
        data = view.tensor[view.at(numbers, pool.sizes["slot"])]
        heads = [pool.sizes.get("head") or axis.extent for axis in leaf.axes if axis.name == "head"]
        plain = layout.stream(leaf.stream).encoding is None
        kind = _row_type(layout, layout.stream(leaf.stream), buffers, None) if plain else getattr(torch, leaf.dtypes[0])
        width = math.prod(view.tensor.shape[view.token_dims :]) // math.prod(heads)
        shape = (len(slots), *heads, width // kind.itemsize)
        rows = torch.zeros(shape, dtype=kind, device=slots.device) if out is None else out[leaf.name]
        result[leaf.name], held = rows, rows.view(torch.uint8)
        if zero_skipped:
            held[~keep] = 0
        held[keep] = data.reshape(len(numbers), *heads, width)
    return result


def _row_type(layout: Layout, stream: Stream, buffers: Mapping[str, Tensor], asked: torch.dtype | None) -> torch.dtype:
    """The element type a stream is read as where the caller gives no output."""
    kinds = [getattr(torch, name) for name in stream.dtypes]
    if stream.encoding is not None:
        return asked or kinds[0]
    holder = next(buffers[b.name] for b in layout.buffers if stream.name in leaves_of(b.place))
    if holder.dtype != torch.uint8:
        return holder.dtype
    return asked if asked in kinds else kinds[0]


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
    scales: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    rotated: bool = False,
    out: Mapping[str, Tensor] | None = None,
    zero_skipped: bool = False,
) -> dict[str, Tensor]:
    """Tokens of ragged requests: row i of request r is position ``starts[r] + i - cu_seq_lens[r]``.

    Positions at or past ``seq_lens[r]`` and rows of no request are skipped. ``out`` or ``total_tokens`` gives T.
    """
    count = _rows(out, total_tokens)
    slots = _ragged_slots(layout, buffers, block_table, seq_lens, cu_seq_lens, starts, count, rank)
    options = {"remap": remap, "layer": layer, "scales": scales, "dtype": dtype, "rotated": rotated}
    return gather(layout, buffers, slots, **options, out=out, zero_skipped=zero_skipped)


def gather_codes_paged(
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
    out: Mapping[str, Tensor] | None = None,
    zero_skipped: bool = False,
) -> dict[str, Tensor]:
    """What ``gather_codes`` gives, of the tokens that ``gather_paged`` reads."""
    count = _rows(out, total_tokens)
    slots = _ragged_slots(layout, buffers, block_table, seq_lens, cu_seq_lens, starts, count, rank)
    return gather_codes(layout, buffers, slots, remap=remap, layer=layer, out=out, zero_skipped=zero_skipped)


def _rows(out: Mapping[str, Tensor] | None, total_tokens: int | None) -> int:
    """T of ragged requests."""
    if out is None and total_tokens is None:
        raise ValueError("total_tokens: needed where there is no out")
    return total_tokens if out is None else len(next(iter(out.values())))


def _ragged_slots(
    layout: Layout,
    buffers: Mapping[str, Tensor],
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seq_lens: Tensor,
    starts: Tensor | None,
    count: int,
    rank: int,
) -> Tensor:
    """The slot number of every row of ragged requests, -1 where it has none."""
    row = torch.arange(count, device=block_table.device)
    request = _request_of(row, cu_seq_lens)
    position = row - _entry(cu_seq_lens, request, 0) + (0 if starts is None else _entry(starts, request, 0))
    position = torch.where(position < _entry(seq_lens, request, 0), position, -1)
    size = extents(layout, buffers)["slot"]
    return locate(layout, block_table, request, position, size, rank)


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
    scales: Mapping[str, Tensor] | None = None,
) -> None:
    """``append`` of token t at ``positions[t]`` of request ``request_ids[t]``, or of request t without them."""
    token = torch.arange(len(positions), device=positions.device)
    request = token if request_ids is None else request_ids.long()
    slots = locate(layout, block_table, request, positions.long(), extents(layout, buffers)["slot"], rank)
    append(layout, sources, buffers, slots, remap=remap, layer=layer, scales=scales)


def concat_mla_key(k_nope: Tensor, k_rope: Tensor, out: Tensor | None = None) -> Tensor:
    """``[T, H, Dn + Dr]``: ``k_nope [T, H, Dn]`` beside ``k_rope [T, Dr]`` or ``[T, 1, Dr]``, which all heads share.

    T is the length of ``out``; without it that of ``k_nope``, whose type the result has then.
    """
    _, heads, dim = k_nope.shape
    if out is None:
        out = k_nope.new_empty(len(k_nope), heads, dim + k_rope.shape[-1])
    shared = (k_rope if k_rope.dim() == 3 else k_rope.unsqueeze(1)).expand(-1, heads, -1)
    for part, target in ((k_nope, out[..., :dim]), (shared, out[..., dim:])):
        part = part[: len(out)]
        if part.dtype != out.dtype:
            part = casts.cast(str(out.dtype).removeprefix("torch."), part.float()).view(out.dtype)
        target.copy_(part)
    return out


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
