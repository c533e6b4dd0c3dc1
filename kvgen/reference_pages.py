"""The PyTorch oracle of functions on whole pages, derived from the layout's places alone.

As in ``kvgen.reference``, ``layout`` comes first and buffers are dicts of tensors by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kvgen.layout import Layout
from kvgen.views import ByteView, extents, leaf_places, pad_views


def page_views(layout: Layout, buffers: Mapping[str, Tensor]) -> list[ByteView]:
    """Every place whose bytes belong to a block: all places of all leaves, and padding that is filled."""
    leaves = [view for places in leaf_places(layout, buffers).values() for view in places]
    return leaves + [view for _, pad, view in pad_views(layout, buffers) if pad.fill is not None]


def copy_blocks(layout: Layout, buffers: Mapping[str, Tensor], pairs: Tensor) -> None:
    """Copy block ``pairs[i, 0]`` to ``pairs[i, 1]`` in place, in all layers; pairs that leave the pool are skipped.

    All sources are read before anything is written.
    """
    count = extents(layout, buffers)["block"]
    live = [(source, target) for source, target in pairs.tolist() if 0 <= source < count and 0 <= target < count]
    for view in page_views(layout, buffers):
        pages = [view.select("block", source).tensor.clone() for source, _ in live]
        for (_, target), page in zip(live, pages, strict=True):
            view.select("block", target).tensor.copy_(page)


def zero_blocks(layout: Layout, buffers: Mapping[str, Tensor], blocks: Tensor) -> None:
    """Zero every block of ``blocks [n]`` in place, in all layers; numbers outside the pool are skipped."""
    count = extents(layout, buffers)["block"]
    for view in page_views(layout, buffers):
        for block in blocks.tolist():
            if 0 <= block < count:
                view.select("block", block).tensor.zero_()


def gather_page_table(
    layout: Layout,
    req_to_page: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    padding: int = -1,
    *,
    block_size: int | None = None,
) -> Tensor:
    """Rows ``req_pool_indices`` of ``req_to_page`` into ``out``, each as far as its length; the rest is padding.

    A page has block_size tokens of each rank. An entry that the type of ``out`` cannot hold is padding too.
    """
    world = layout.slots.shard.world if layout.slots.shard else 1
    tokens = (block_size or layout.block_size) * world
    out.fill_(padding)
    for row, (index, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        if 0 <= index < len(req_to_page):
            count = min(max(-(-length // tokens), 0), req_to_page.shape[1], out.shape[1])
            entries = req_to_page[index, :count].long()
            narrow = entries.to(out.dtype)
            out[row, :count] = narrow.masked_fill(narrow.long() != entries, padding)
    return out
