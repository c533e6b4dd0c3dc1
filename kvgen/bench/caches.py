"""Pools seen as other code sees them: a tensor of values for each stream, by block and slot."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvgen.bench.task import Task
from kvgen.layout import Pad, Place
from kvgen.views import ByteView, leaf_places


def plain_caches(task: Task, codes: torch.dtype | None = None) -> dict[str, Tensor] | None:
    """A view ``[blocks, block_size, …]`` of every stream where it is stored, once, as it comes; None otherwise.

    What follows are its axes, one that strides do not join in several dimensions. ``codes`` is the type to view codes
    as; without it there is nothing for encoded streams.
    """
    layout = task.layout
    if any(_fills(buffer.place) for buffer in layout.buffers):
        return None
    if codes is None and any(stream.encoding for stream in layout.streams):
        return None
    places, found = leaf_places(layout, task.buffers), {}
    for name, rows in task.streams.items():
        view = _typed(places[name][0].select("layer", task.layer or 0), codes or rows.dtype)
        if view is None or len(places[name]) > 1:
            return None
        found[name] = view
    return found


def _fills(place: Place | Pad) -> bool:
    """Whether padding in it is written with its token."""
    if isinstance(place, Pad):
        return place.fill is not None
    return any(_fills(field.content) for field in getattr(place.content, "fields", ()))


def pads(place: Place | Pad) -> bool:
    """Whether there are bytes in it that nothing is stored in."""
    if isinstance(place, Pad):
        return place.fill is None
    return place.pitch != getattr(place.content, "size", place.pitch) or any(
        pads(field.content) for field in getattr(place.content, "fields", ())
    )


def _typed(view: ByteView, dtype: torch.dtype) -> Tensor | None:
    """Bytes as values, digits of an axis joined where strides allow it; None unless block and slot are one each."""
    try:
        tensor = view.tensor.view(dtype).squeeze(-1)
    except RuntimeError:  # values that are not aligned to their size
        return None
    axes = [digit.axis for digit in view.digits]
    for i in reversed(range(1, len(axes))):
        if axes[i] == axes[i - 1] and tensor.stride(i - 1) == tensor.stride(i) * tensor.shape[i]:
            tensor = tensor.flatten(i - 1, i)
            del axes[i]
    whole = view.pack is None and axes[:2] == ["block", "slot"] and "slot" not in axes[2:]
    return tensor if whole else None


def by_slot(cache: Tensor, block_size: int) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """The cache and what its rows are found by: their slots, or block and slot where the strides do not join these."""
    if cache.stride(0) == cache.stride(1) * block_size:
        return cache.flatten(0, 1), lambda slots: (slots,)
    return cache, lambda slots: (slots // block_size, slots % block_size)


def words(tensor: Tensor) -> Tensor:
    """Bytes in the place of types that torch has no indexing for."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
