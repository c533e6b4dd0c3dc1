"""``LAYOUT`` of a generated module: the layout as plain data, for programs that use the module."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvgen import sizes, stages
from kvgen.canonical import per
from kvgen.layout import Buffer, Encoding, Layout, Scale, Stream, Zero, leaves_of


def describe(layout: Layout) -> dict[str, Any]:
    """Names, extents, encodings and slots, in the words of the language; an extent that the launch decides is None."""
    slots = layout.slots
    return {
        "name": layout.name,
        "summary": layout.summary,
        "block_size": layout.block_size,
        "contiguous": layout.contiguous,
        "num_layers": layout.layers.extent if layout.layers else None,
        "streams": {stream.name: _stream(layout, stream) for stream in layout.streams},
        "buffers": {buffer.name: _buffer(layout, buffer) for buffer in layout.buffers},
        "slots": {
            "dtype": slots.dtype,
            "skip": slots.skip,
            "remap": slots.remap,
            "shard": asdict(slots.shard) if slots.shard else None,
        },
        "fuse": stages.describe(layout) if layout.fuse else None,
    }


def _stream(layout: Layout, stream: Stream) -> dict[str, Any]:
    return {
        "axes": {axis.name: axis.extent for axis in stream.axes},
        "dtypes": list(stream.dtypes),
        "encoding": _encoding(layout, stream.encoding) if stream.encoding else None,
    }


def _encoding(layout: Layout, encoding: Encoding) -> dict[str, Any]:
    return _said(
        rotate=encoding.rotation,
        mode=encoding.mode,
        code=encoding.code,
        round=encoding.rounding if encoding.clamp else None,
        clamp=list(encoding.clamp) if encoding.clamp else None,
        zero=_zero(encoding.zero) if encoding.zero else None,
        scale=_scale(layout, encoding.scale) if encoding.scale else None,
    )


def _zero(zero: Zero) -> dict[str, Any]:
    return _said(kind=zero.kind, dtype=zero.dtype, clamped=zero.clamped or None, stored=zero.name)


def _scale(layout: Layout, scale: Scale) -> dict[str, Any]:
    """A scale, ``stored`` in a buffer under that name or handed in as ``argument``."""
    computed = {
        "grid": scale.grid,
        "exponent": scale.exponent if scale.grid == "pow2" else None,
        "range": scale.code_range,
        "floor": {scale.floor_on: scale.floor} if scale.floor_on else None,
        "encode": scale.encode,
    }
    return _said(
        per=per(layout, scale).split(),
        source="dynamic" if scale.dynamic else "static",
        **{"stored": scale.name} if scale.stored else {"argument": scale.argument},
        dtype=scale.dtype,
        **computed if scale.dynamic else {"given": scale.given},
        arithmetic=scale.arithmetic,
        scale=_outer(layout, scale.scale) if scale.scale else None,
    )


def _outer(layout: Layout, scale: Scale) -> dict[str, Any]:
    return {"per": per(layout, scale).split(), "argument": scale.argument, "dtype": scale.dtype}


def _said(**parts: Any) -> dict[str, Any]:
    """What applies."""
    return {key: value for key, value in parts.items() if value is not None}


def _buffer(layout: Layout, buffer: Buffer) -> dict[str, Any]:
    return {
        "order": sizes.order(layout, buffer.place),
        "holds": list(leaves_of(buffer.place)),
        "dtypes": list(buffer.dtypes),
        "bytes_per_token": str(sizes.token_bytes(layout, buffer)),
    }
