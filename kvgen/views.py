"""Where the values of a layout lie in real tensors: PyTorch's own views of bytes, derived from the places alone.

A buffer is viewed as bytes, its dimensions are unflattened into digits, records are narrowed to their fields, and the
digits are permuted into logical order. No address is ever computed here, so nothing is shared with the code that
prints addresses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvgen.axes import Digit
from kvgen.layout import Buffer, Dim, Holds, Layout, Pad, Place, Record


@dataclass(frozen=True, slots=True)
class ByteView:
    """The bytes of a leaf or of padding inside a buffer's tensor, uint8: a dimension per digit, then the value's bytes.

    ``digits`` name the leading dimensions: those of ``block``, then of ``slot``, then of every other axis in logical
    order, each from the slowest down. Of codes that share bytes it is these that are told apart: ``pack`` is the digit
    that counts the codes of such a group of bytes, the first in the lowest bits of the first. They are of one bit where
    there are digits of ``bit``.
    """

    tensor: Tensor
    digits: tuple[Digit, ...]
    pack: Digit | None = None

    @property
    def token_dims(self) -> int:
        """How many leading dimensions make up the slot number."""
        return sum(digit.axis in ("block", "slot") for digit in self.digits)

    def at(self, numbers: Tensor, block_size: int) -> tuple[Tensor, ...]:
        """Index of the slot numbers ``[n]``: one tensor per dimension of ``block`` and ``slot``.

        What varies over one of the two only, or over groups of slots, is found under the one that holds the slot.
        """
        index: list[Tensor] = []
        for axis, number in (("block", numbers // block_size), ("slot", numbers % block_size)):
            own = [i for i, digit in enumerate(self.digits) if digit.axis == axis]
            if own:
                group = number // self.digits[own[-1]].div
                index += torch.unravel_index(group, [self.tensor.shape[i] for i in own])
        return tuple(index)

    @property
    def bits(self) -> int:
        """Of a value, or of a code where several share bytes."""
        return 8 * self.tensor.shape[-1] // (self.pack.size if self.pack else 1)

    @property
    def pack_dim(self) -> int:
        """The dimension before which that of ``pack`` stands where codes are told apart."""
        faster = (i for i, d in enumerate(self.digits) if d.axis == self.pack.axis and d.div < self.pack.div)
        last = max(i for i, digit in enumerate(self.digits) if digit.axis == self.pack.axis)
        return next(faster, last + 1)

    @property
    def bit_dims(self) -> list[int]:
        """The dimensions of ``bit`` in what is read, that of the tokens being the first."""
        return [1 + i - self.token_dims for i, digit in enumerate(self.digits) if digit.axis == "bit"]

    def read(self, index: tuple[Tensor, ...]) -> Tensor:
        """Values at an index of ``at``: ``[n, …]``, their bytes last; codes that share bytes apart, a byte each."""
        data = self.tensor[index]
        if self.pack is None:
            return data
        stream = sum(byte << 8 * i for i, byte in enumerate(data.long().unbind(-1))).unsqueeze(-1)
        codes = [(stream >> self.bits * part & (1 << self.bits) - 1).byte() for part in range(self.pack.size)]
        data = torch.stack(codes, dim=1 + self.pack_dim - self.token_dims)
        if not self.bit_dims:
            return data
        apart = data.flatten(self.bit_dims[0], self.bit_dims[-1]).unbind(self.bit_dims[0])
        return torch.stack([plane << bit for bit, plane in enumerate(apart)]).sum(0, dtype=torch.uint8)

    def write(self, index: tuple[Tensor, ...], data: Tensor) -> None:
        """Put what ``read`` gives, in any shape of as many values."""
        count, shape = len(index[0]), list(self.tensor.shape[self.token_dims :])
        if self.pack is None:
            self.tensor[index] = data.reshape(count, *shape)
            return
        at = self.pack_dim - self.token_dims
        if self.bit_dims:
            first, last = self.bit_dims[0] - 1, self.bit_dims[-1] - 1
            sizes, rest = shape[first : last + 1], shape[:first] + shape[last + 1 :]
            whole = data.long().reshape(count, *rest[: at - len(sizes)], self.pack.size, *rest[at - len(sizes) : -1], 1)
            planes = [whole >> bit & 1 for bit in range(math.prod(sizes))]
            data = torch.stack(planes, dim=1 + first).unflatten(1 + first, sizes)
        codes = data.long().reshape(count, *shape[:at], self.pack.size, *shape[at:-1], 1).unbind(1 + at)
        stream = sum((code & (1 << self.bits) - 1) << self.bits * part for part, code in enumerate(codes))
        self.tensor[index] = torch.cat([stream >> 8 * i & 255 for i in range(shape[-1])], dim=-1).byte()

    def select(self, axis: str, index: int) -> ByteView:
        """The view with one axis held at ``index``; padding may repeat over some digits of it, or none."""
        tensor = self.tensor
        for i in reversed(range(len(self.digits))):
            if self.digits[i].axis == axis:
                tensor = tensor.select(i, self.digits[i].of(index))
        return ByteView(tensor, tuple(d for d in self.digits if d.axis != axis), self.pack)


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


def leaf_places(layout: Layout, buffers: Mapping[str, Tensor]) -> dict[str, list[ByteView]]:
    """Every place of each leaf that lies in ``buffers``; a leaf of a pair is already held at its side of ``kv``."""
    sizes = extents(layout, buffers)
    places: dict[str, list[ByteView]] = {}
    for name, tensor in buffers.items():
        for content, view in _parts(layout.buffer(name), tensor, sizes):
            if isinstance(content, Holds):
                for side, leaf in enumerate(content.leaves):
                    places.setdefault(leaf, []).append(view.select("kv", side))
    return places


def leaf_views(layout: Layout, buffers: Mapping[str, Tensor]) -> dict[str, ByteView]:
    """Where each leaf that lies in ``buffers`` is read: the first of its places."""
    return {leaf: places[0] for leaf, places in leaf_places(layout, buffers).items()}


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
        yield place.content, _logical(data, digits, place.content.pack)
        return
    for field in place.content.fields:
        if isinstance(field.content, Pad):
            yield field.content, _logical(data.narrow(-1, field.offset, field.content.size), digits)
            continue
        inner = [digit for dim in field.content.dims for digit in dim.digits]
        shape = [*(_size(digit, sizes) for digit in inner), field.content.pitch]
        part = data.narrow(-1, field.offset, math.prod(shape)).unflatten(-1, shape)
        yield from _inside(field.content, part, (*digits, *inner), sizes)


def _logical(data: Tensor, digits: tuple[Digit, ...], pack: Digit | None = None) -> ByteView:
    axes = ("block", "slot", "layer", "kv", "head", "bit", "dim")
    rank = {axis: i for i, axis in enumerate(axes)}
    order = sorted(range(len(digits)), key=lambda i: (rank[digits[i].axis], -digits[i].div, digits[i].size == 1))
    return ByteView(data.permute(*order, len(digits)), tuple(digits[i] for i in order), pack)
