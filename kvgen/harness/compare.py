"""Byte-by-byte comparison, and what a byte is: stream, slot, head, dim, or nothing anybody addresses."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvgen import reference
from kvgen.harness.pools import Pool
from kvgen.layout import Layout, Stream


@dataclass(frozen=True, slots=True)
class Difference:
    """The first byte that differs. Logical coordinates are None where the byte belongs to no value.

    ``where`` says what the byte is in words; ``block`` and ``slot`` are None for outputs, whose rows are named by their
    slot number where the case knows it.
    """

    where: str
    expected: int
    got: int
    tensor: str
    stream: str | None = None
    slot_number: int | None = None
    block: int | None = None
    slot: int | None = None
    layer: int | None = None
    head: int | None = None
    dim: int | None = None
    byte: int | None = None

    def __str__(self) -> str:
        return f"{self.where}: expected 0x{self.expected:02x}, got 0x{self.got:02x}"


class Mismatch(Exception):
    """A case failed; ``difference`` is there if it was a byte that did."""

    def __init__(self, message: str, difference: Difference | None = None) -> None:
        super().__init__(message)
        self.difference = difference


class Unsupported(Exception):
    """The module under test cannot be called as a case calls it: the case is skipped."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a call may change: these streams of these slot numbers, in this layer; with ``pages`` all of them in all.

    ``staged``: by a fused append.
    """

    streams: Collection[str]
    slots: Collection[int]
    layer: int | None = None
    pages: bool = False
    staged: bool = False


def compare_pool(layout: Layout, pool: Pool, written: Written) -> None:
    """Raise Mismatch at the first compared byte of any storage where module and reference disagree."""
    _adopt_cast_nans(layout, pool, written)
    for name, storage in pool.storages.items():
        at = storage.first_difference()
        if at is not None:
            difference = describe(layout, pool, name, at, written)
            raise Mismatch(str(difference), difference)


def adopt_nans(actual: Tensor, expected: Tensor) -> None:
    """Where both are NaN, ``expected`` takes the bits of ``actual``: a cast may leave any payload and sign."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return
    both = actual.isnan() & expected.isnan()
    word = {2: torch.int16, 4: torch.int32}[actual.element_size()]
    expected.view(word)[both] = actual.view(word)[both]


def _adopt_cast_nans(layout: Layout, pool: Pool, written: Written) -> None:
    """NaNs that a cast to 16 or 32 bits has written, or a stage; those of 8-bit codes are compared bit for bit."""
    numbers = torch.tensor(sorted(written.slots), dtype=torch.int64)
    casts = [s for s in layout.streams if s.name in written.streams and _is_rounded(layout, s, written)]
    if not casts or not len(numbers):
        return
    sides = [reference.leaf_places(layout, tensors) for tensors in (pool.actual, pool.expected)]
    for stream in casts:
        for places in zip(*(side[stream.name] for side in sides), strict=True):
            views = [place.select("layer", written.layer or 0) for place in places]
            if views[0].tensor.shape[-1] == 1:
                continue
            index = views[0].at(numbers.to(views[0].tensor.device), pool.sizes.block_size)
            kind = getattr(torch, stream.encoding.code) if stream.encoding else pool.dtypes[stream.name]
            actual, expected = (view.tensor[index].contiguous().view(kind) for view in views)
            adopt_nans(actual, expected)
            views[1].tensor[index] = expected.view(torch.uint8)


def _is_rounded(layout: Layout, stream: Stream, written: Written) -> bool:
    if stream.encoding is None:
        return written.staged and bool(layout.fuse.of(stream.name))
    return stream.encoding.mode == "cast"


def describe(layout: Layout, pool: Pool, buffer: str, at: int, written: Written) -> Difference:
    """What the byte at offset ``at`` of a buffer's storage is, and whether the call had any business there."""
    storage = pool.storages[buffer]
    wanted, got = int(storage.expected[at]), int(storage.actual[at])
    for leaf, view in _views_in(layout, pool, buffer):
        index = find(view.tensor, at)
        if index is None:
            continue
        axes = {"byte": index[-1]}
        for digit, value in zip(view.digits, index, strict=False):
            axes[digit.axis] = axes.get(digit.axis, 0) + value * digit.div
        if view.pack is not None:  # the first code that differs in this byte
            part = 8 * index[-1] + ((wanted ^ got) & -(wanted ^ got)).bit_length() - 1
            axes[view.pack.axis] = axes.get(view.pack.axis, 0) + part // view.bits * view.pack.div
        slot = axes.setdefault("slot", 0)
        number = axes.setdefault("block", 0) * pool.sizes.block_size + slot
        own = layout.leaf(leaf).stream in written.streams and axes.get("layer") in (None, written.layer)
        inside = number in written.slots and (own or written.pages)
        names = ", ".join(f"{axis} {axes[axis]}" for axis in ("layer", "head", "bit", "dim", "byte") if axis in axes)
        place = f"slot number {number} (block {axes['block']}, slot {axes['slot']}), {names}"
        where = f"{buffer}, stream {leaf}, {place}"
        if not inside:
            whose = _whose(written, layout.leaf(leaf).stream, number, axes)
            where = f"byte outside every addressed value: {buffer}, {whose}; {leaf}, {place}"
        coordinates = {axis: axes.get(axis) for axis in ("block", "slot", "layer", "head", "dim", "byte")}
        return Difference(where, wanted, got, buffer, leaf, number, **coordinates)
    for name, pad, view in reference.pad_views(layout, pool.expected):
        if name == buffer and find(view.tensor, at) is not None:
            kind = "never written" if pad.fill is None else f"filled with {pad.fill}"
            return Difference(f"{buffer}, padding inside the record ({kind})", wanted, got, buffer)
    start = storage.placement.offset * layout.buffer(buffer).unit
    where = f"byte outside every addressed value: {buffer}, padding, {at - start:+} bytes from the tensor's first"
    return Difference(where, wanted, got, buffer)


def _views_in(layout: Layout, pool: Pool, buffer: str) -> Iterator[tuple[str, reference.ByteView]]:
    storage = pool.expected[buffer].untyped_storage().data_ptr()
    for leaf, views in reference.leaf_places(layout, pool.expected).items():
        yield from ((leaf, view) for view in views if view.tensor.untyped_storage().data_ptr() == storage)


def _whose(written: Written, stream: str, number: int, axes: dict[str, int]) -> str:
    if written.pages:
        return f"another block, {axes['block']}"
    if axes.get("layer") not in (None, written.layer):
        return f"layer {axes['layer']}"
    return f"the other stream, {stream}" if stream not in written.streams else f"neighbour slot {number}"


def find(tensor: Tensor, at: int) -> tuple[int, ...] | None:
    """Index of the element of a uint8 view that lies ``at`` bytes into its storage."""
    offsets = torch.full([1] * tensor.dim(), tensor.storage_offset(), dtype=torch.int64)
    for i, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        offsets = offsets + (torch.arange(size) * stride).view(-1, *[1] * (tensor.dim() - 1 - i))
    hits = (offsets == at).nonzero()
    return tuple(hits[0].tolist()) if len(hits) else None


def compare_rows(stream: str, actual: Tensor, expected: Tensor, slots: list[int | None]) -> None:
    """Compare gathered rows ``[T, (head,) dim]`` bit by bit; ``slots`` names each row's slot number."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise Mismatch(
            f"{stream}: expected {tuple(expected.shape)} {expected.dtype}, got {tuple(actual.shape)} {actual.dtype}"
        )
    got, wanted = (x.unsqueeze(-1).contiguous().view(torch.uint8) for x in (actual, expected))
    if torch.equal(got, wanted):
        return
    index = (got != wanted).nonzero()[0].tolist()
    row, *head, dim, byte = index
    number = slots[row] if row < len(slots) else None
    head_index = head[0] if head else None
    names = "".join(f", {k} {v}" for k, v in (("head", head_index), ("dim", dim), ("byte", byte)) if v is not None)
    origin = "a skipped row" if number is None else f"slot number {number}"
    where = f"output of {stream}, row {row} ({origin}){names}"
    values = int(wanted[tuple(index)]), int(got[tuple(index)])
    difference = Difference(where, *values, stream, stream, number, head=head_index, dim=dim, byte=byte)
    raise Mismatch(str(difference), difference)


def compare_bytes(name: str, actual: Tensor, expected: Tensor) -> None:
    """Compare whole storages of outputs: what lies around them must keep its bytes."""
    got, wanted = actual.view(torch.uint8), expected.view(torch.uint8)
    if torch.equal(got, wanted):
        return
    at = int((got != wanted).nonzero()[0])
    where = f"byte outside every addressed value: {name}, {at} bytes into its storage"
    difference = Difference(where, int(wanted[at]), int(got[at]), name)
    raise Mismatch(str(difference), difference)


def compare_numbers(name: str, actual: Tensor, expected: Tensor) -> None:
    """Compare slot numbers ``[T]``, element by element."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise Mismatch(
            f"{name}: expected {tuple(expected.shape)} {expected.dtype}, got {tuple(actual.shape)} {actual.dtype}"
        )
    if not torch.equal(actual, expected):
        at = int((actual != expected).nonzero()[0])
        raise Mismatch(f"{name}, token {at}: expected slot {int(expected[at])}, got {int(actual[at])}")
