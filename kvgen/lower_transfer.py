"""A transfer to the plans of its functions: views of both sides, paired."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvgen.layout import Layout
from kvgen.lower import argument_view, cache_fills, cache_views, planes
from kvgen.plan import Copy, Params, Plan, View
from kvgen.transfer import Transfer, leaves_of_stream, token_refusal


def lower_transfer(transfer: Transfer) -> tuple[Plan, ...]:
    """Every function of a transfer's module: by slot numbers, unless tokens share something, and by blocks."""
    source, destination = (_Side(layout, cache_views(layout)) for layout in transfer.sides)
    copies = tuple(
        copy for stream in transfer.source.streams for copy in _copies(transfer, source, destination, stream.name)
    )
    fills = cache_fills(transfer.destination)
    written = tuple(fill for buffer in transfer.destination.buffers for fill in fills[buffer.name])
    by_blocks = Plan("transfer_blocks", "transfer", "blocks", copies, written)
    if token_refusal(transfer):
        return (by_blocks,)
    return Plan("transfer", "transfer", "slots", copies, written), by_blocks


@dataclass(frozen=True, slots=True)
class _Side:
    layout: Layout
    views: dict[str, list[View]]

    def params(self, stream: str, place: int) -> Params:
        """What codes of a stream mean; each place of codes may have a scale of its own."""
        encoding = self.layout.stream(stream).encoding
        if encoding is None or encoding.scale is None:
            return Params()
        scale = encoding.scale
        return Params(
            self.nth(scale.name, place) if scale.stored else argument_view(scale),
            self.nth(encoding.zero.name, place) if encoding.zero else None,
            argument_view(scale.scale) if scale.scale else None,
        )

    def nth(self, leaf: str, place: int) -> View:
        return self.views[leaf][min(place, len(self.views[leaf]) - 1)]


def _bytes(source: View, destination: View) -> Iterator[tuple[View, View]]:
    """The views of a leaf's bytes: where both sides have the bits of codes apart, each bit's."""
    ends = planes(source), planes(destination)
    if source.pack == destination.pack and len(ends[0]) == len(ends[1]):
        yield from zip(*ends, strict=True)
    else:
        yield source, destination


def _copies(transfer: Transfer, source: _Side, destination: _Side, stream: str) -> Iterator[Copy]:
    """What lies in several places is read where it lies first, and written everywhere."""
    if transfer.raw(stream):
        for leaf in leaves_of_stream(transfer.source, stream):
            for view in destination.views[leaf.name]:
                for read, write in _bytes(source.views[leaf.name][0], view):
                    yield Copy(stream, read, write, leaf=leaf.name)
        return
    read = source.params(stream, 0)
    for place, view in enumerate(destination.views[stream]):
        onto = destination.params(stream, place)
        yield Copy(stream, source.views[stream][0], view, read.scale, read.zero, read.outer, onto)
