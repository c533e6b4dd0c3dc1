"""Transfers: two layouts of the same streams, and how each stream gets from one to the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvgen.axes import Axis
from kvgen.encodings import append_refusal
from kvgen.layout import Encoding, Layout, Leaf, Scale, Stream

SOURCE, DESTINATION = "src_", "dst_"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies from pools of one layout to pools of another.

    Buffers and arguments of the two are told apart by the prefixes ``src_`` and ``dst_``. ``layers``: one layer a call,
    or all of them. ``requantise``: encodings may change, through float32. ``programs`` caps the grid, None does not.
    """

    name: str
    summary: str
    source: Layout
    destination: Layout
    layers: Literal["one", "all"] = "one"
    requantise: bool = False
    programs: int | None = None

    @property
    def sides(self) -> tuple[Layout, Layout]:
        return self.source, self.destination

    def raw(self, stream: str) -> bool:
        """Whether the bytes of a stream are moved as they are."""
        return same_encoding(self.source.stream(stream), self.destination.stream(stream), self.requantise)

    @property
    def sharded(self) -> bool:
        """Whether a call moves some of the heads: ``src_head``, ``dst_head`` and ``heads`` are its arguments."""
        return any(axis.name == "head" for stream in self.source.streams for axis in stream.axes)


def side(layout: Layout, prefix: str) -> Layout:
    """A layout as one side of a transfer: its buffers, and the scales that it is handed, begin with ``prefix``.

    What is fused into its append is no business of what moves.
    """
    streams = tuple(_prefixed(stream, prefix) for stream in layout.streams)
    buffers = tuple(replace(buffer, name=prefix + buffer.name) for buffer in layout.buffers)
    return replace(layout, prefix=prefix, streams=streams, buffers=buffers, fuse=None, query=None)


def _prefixed(stream: Stream, prefix: str) -> Stream:
    scale = stream.scale
    if scale is None:
        return stream
    outer = scale.scale and replace(scale.scale, prefix=prefix)
    return replace(stream, encoding=replace(stream.encoding, scale=replace(scale, prefix=prefix, scale=outer)))


def same_encoding(source: Stream, destination: Stream, requantise: bool = False) -> bool:
    """Whether bytes alone decode alike on both sides.

    Scales that lie in buffers travel with the codes. Scales that are handed in are one and the same for both sides, but
    where ``requantise`` lets them differ.
    """
    if _meaning(source) != _meaning(destination):
        return False
    scale = source.scale
    return scale is None or not requantise or (scale.stored and scale.scale is None)


def _meaning(stream: Stream) -> Encoding | None:
    """The encoding without what says how codes and scales come about, which readers of bytes need not know."""
    encoding = stream.encoding
    if encoding is None:
        return None
    zero = encoding.zero and replace(encoding.zero, clamped=False)
    scale = encoding.scale and _scale_meaning(encoding.scale)
    return replace(encoding, rounding="even", clamp=None, zero=zero, scale=scale)


def _scale_meaning(scale: Scale) -> Scale:
    return Scale(
        name=scale.name,
        axes=tuple(Axis(axis.name, None, axis.step) for axis in scale.axes),
        dynamic=False,
        dtype=scale.dtype,
        stored=scale.stored,
        given=scale.given,
        scale=scale.scale and _scale_meaning(scale.scale),
    )


def leaves_of_stream(layout: Layout, stream: str) -> tuple[Leaf, ...]:
    return tuple(leaf for leaf in layout.leaves if leaf.stream == stream)


def shared_by_tokens(leaf: Leaf) -> int | None:
    """Tokens that share a value of a leaf: 1 where each has its own, None where all of a block do."""
    return next((axis.step for axis in leaf.axes if axis.name == "slot"), None)


def token_refusal(transfer: Transfer) -> str | None:
    """Why single tokens cannot be moved, only whole blocks; None where they can."""
    for stream in transfer.source.streams:
        if not transfer.raw(stream.name):
            continue
        for leaf in leaves_of_stream(transfer.source, stream.name):
            tokens = shared_by_tokens(leaf)
            if tokens != 1:
                whose = "all tokens of a block" if tokens is None else f"{tokens} tokens"
                return f"{whose} share `{leaf.name}`, which goes with them all or with none"
    return None


def write_refusal(transfer: Transfer, stream: str) -> str | None:
    """Why a stream cannot be encoded at the destination; None where it can, or where its bytes are moved."""
    return None if transfer.raw(stream) else append_refusal(transfer.destination, stream)
