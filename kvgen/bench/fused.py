"""What a fused append takes besides streams, buffers and slots, made on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvgen.layout import Layout
from kvgen.stages import weighted

POSITIONS = 1 << 16
"""Rows of a table: positions are any of them."""

BASE = 1e6
"""Pair i of P turns by position · BASE^(−i / P)."""


@dataclass(frozen=True, slots=True, eq=False)
class Fused:
    """Inputs of ``append_fused``.

    ``given`` are the dense tensors in the order of its arguments: the query ``[T, heads, dim]`` where it has stages,
    and the streams; or the whole projection ``[T, columns]``. ``parts`` are the same by stream. ``query_out`` is shaped
    like the query. ``positions`` are ``[T]`` int64, ``[3, T]`` for MRoPE. ``weights`` are those of norms by stream,
    ``tables`` cosines and sines by argument, float32.
    """

    given: tuple[Tensor, ...]
    parts: dict[str, Tensor]
    query_out: Tensor | None
    positions: Tensor | None
    weights: dict[str, Tensor]
    tables: dict[str, Tensor]

    @property
    def arguments(self) -> list[Tensor]:
        """Those that come after buffers, slots and remap table, and before scales."""
        positions = [] if self.positions is None else [self.positions]
        return [*positions, *self.weights.values(), *self.tables.values()]


def tables_of(layout: Layout, device: str) -> dict[str, Tensor]:
    """Cosines and sines of every position and pair, float32, as the layout takes them; none where it computes them."""
    rope = layout.fuse.rope if layout.fuse else None
    if rope is None or rope.theta is not None:
        return {}
    turns = BASE ** (-torch.arange(rope.pairs, device=device) / rope.pairs)
    angle = torch.arange(POSITIONS, device=device)[:, None] * turns
    if rope.cos_sin == "split":
        return {"cos": angle.cos(), "sin": angle.sin()}
    return {"cos_sin": torch.cat([angle.cos(), angle.sin()], dim=1)}


def weights_of(layout: Layout, kinds: Mapping[str, torch.dtype], device: str) -> dict[str, Tensor]:
    """Weights of norms, of the type of the values, in the order of the arguments: the query's last."""
    query = [layout.query] if layout.query else []
    parts = [part for part in (*layout.streams, *query) if layout.fuse and weighted(layout.fuse.of(part.name))]
    return {part.name: _weight(part.axes[-1].extent, kinds[part.name], device) for part in parts}


def _weight(length: int, kind: torch.dtype, device: str) -> Tensor:
    generator = None if device == "meta" else torch.Generator(device).manual_seed(length)
    return torch.randn(length, generator=generator, device=device).to(kind)


def query_width(layout: Layout) -> int:
    """Values of a token of the query; 0 where the layout has none."""
    return math.prod(axis.extent for axis in layout.query.axes) if layout.query else 0


def fused_inputs(
    layout: Layout,
    streams: Mapping[str, Tensor],
    projection: Tensor,
    weights: Mapping[str, Tensor],
    tables: Mapping[str, Tensor],
    generator: torch.Generator | None,
) -> Fused | None:
    """The inputs of one call; None where nothing is fused. ``projection`` begins with the query, if there is one."""
    fuse, query = layout.fuse, layout.query
    if fuse is None:
        return None
    parts = dict(streams)
    if query is not None and fuse.of(query.name):
        shape = tuple(axis.extent for axis in query.axes)
        parts = {query.name: projection[:, : math.prod(shape)].unflatten(1, shape), **parts}
    tokens, device = len(projection), projection.device
    positions = None
    if fuse.rope is not None:
        shape = (3, tokens) if fuse.mrope else (tokens,)
        positions = torch.randint(POSITIONS, shape, generator=generator, device=device)
    given = (projection,) if fuse.packed else tuple(parts.values())
    out = torch.zeros(parts["query"].shape, dtype=projection.dtype, device=device) if "query" in parts else None
    return Fused(given, parts, out, positions, dict(weights), dict(tables))
