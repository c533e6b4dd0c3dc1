"""The PyTorch oracle of fused appends: stages from their formulas, then ``reference.append``.

RMS norm: y = x · 1/sqrt(mean(x²) + eps) · (w or 1 + w): squares are summed, times 1/dim, and their root inverted in
float64 (or float32, if the layout says so), rounded once to float32; products are float32. RoPE turns the pair (a, b)
to (a · cos − b · sin, b · cos + a · sin), in float32; angles that are computed are float32(position) ·
float32(theta^(−2i / rotary_dim)).

Shapes: T tokens. ``layout`` comes first; streams, buffers, weights and tables are dicts of tensors by name.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvgen import reference
from kvgen.layout import Layout
from kvgen.stages import Fuse, Mrope, RmsNorm, Rope

__all__ = ["angles", "append_fused", "columns", "norm", "rotate", "stage_values"]


def append_fused(
    layout: Layout,
    sources: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    slot_mapping: Tensor,
    positions: Tensor | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
    tables: Mapping[str, Tensor] | None = None,
    query_out: Tensor | None = None,
    remap: Tensor | None = None,
    layer: int | None = None,
    scales: Mapping[str, Tensor] | None = None,
) -> None:
    """Write tokens in place after their stages: ``sources[stream]`` is ``[T', *axes]``, ``slot_mapping`` ``[T]``, T'
    ≥ T.

    ``positions`` are ``[T']``, or ``[3, T']`` for MRoPE; ``weights`` of norms by stream, ``tables`` named ``cos_sin``,
    or ``cos`` and ``sin``. A token whose position has no row in the table is skipped. ``sources["query"]`` goes to
    ``query_out``, whatever its slot is, unless it has no angle: then its row stays. All else is as in
    ``reference.append``.
    """
    count, tables = len(slot_mapping), tables or {}
    known = _known(layout.fuse, positions, tables, count, slot_mapping.device)
    staged = {}
    for name, source in sources.items():
        rows = torch.zeros_like(source[:count], dtype=torch.float32)
        if layout.fuse.of(name):
            where = None if positions is None else positions[..., :count][..., known]
            weight = (weights or {}).get(name)
            rows[known] = stage_values(layout, name, source[:count][known], where, weight, tables)
            plain = layout.stream(name).encoding is None
            staged[name] = rows.to(source.dtype) if plain else rows
        else:
            staged[name] = source
    if layout.query is not None and layout.query.name in staged:
        rows = staged.pop(layout.query.name)
        query_out[:count][known] = rows[known]
    slots = torch.where(known, slot_mapping.long(), -1)
    reference.append(layout, staged, buffers, slots, remap=remap, layer=layer, scales=scales)


def columns(layout: Layout, packed: Tensor) -> dict[str, Tensor]:
    """The parts of a packed tensor ``[T, columns]``, each ``[T, heads, dim]``: the query's, then those of the
    streams.
    """
    parts = (layout.query, *layout.streams)
    shapes = [[axis.extent for axis in part.axes] for part in parts]
    split = packed.split([heads * dim for heads, dim in shapes], dim=1)
    return {part.name: x.unflatten(1, shape) for part, x, shape in zip(parts, split, shapes, strict=True)}


def stage_values(
    layout: Layout,
    name: str,
    source: Tensor,
    positions: Tensor | None,
    weight: Tensor | None,
    tables: Mapping[str, Tensor],
) -> Tensor:
    """Rows ``[n, *axes]`` of a stream, or of the query, after its stages: float32, not rounded after the last one
    unless the layout's rounding is ``chain``.
    """
    fuse, values = layout.fuse, source.float()
    for step in fuse.of(name):
        if isinstance(step, RmsNorm):
            values = norm(values, step, weight, getattr(torch, fuse.norm_sum))
        else:
            values = rotate(values, step, *angles(step, fuse.mrope, positions, tables))
        if fuse.rounding == "chain":
            values = values.to(source.dtype).float()
    return values


def norm(values: Tensor, step: RmsNorm, weight: Tensor | None, kind: torch.dtype) -> Tensor:
    """Float32 rows ``[..., dim]``, each over the root of its mean square."""
    mean = values.to(kind).square().sum(-1, keepdim=True) * (1.0 / values.shape[-1])
    values = values * (1.0 / torch.sqrt(mean + step.eps)).float()
    if step.weight == "none":
        return values
    return values * (weight.float() + 1.0 if step.weight == "plus_one" else weight.float())


def angles(step: Rope, mrope: Mrope | None, positions: Tensor, tables: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[n, pairs]``, float32, of positions ``[n]`` or ``[3, n]``."""
    pair = torch.arange(step.pairs, device=positions.device)
    streams = positions.long().expand(3, positions.shape[-1])
    which = torch.zeros_like(pair) if mrope is None else assigned(mrope, pair)
    own = streams[which].T  # [n, pairs]
    if step.theta is not None:
        powers = [step.theta ** (-2.0 * i / step.rotary_dim) for i in range(step.pairs)]
        angle = own.float() * torch.tensor(powers, dtype=torch.float64, device=own.device).float()
        return angle.cos(), angle.sin()
    if step.cos_sin == "split":
        cos, sin = tables["cos"], tables["sin"]
    else:
        cos, sin = tables["cos_sin"].unflatten(1, (2, step.pairs)).unbind(1)
    return cos[own, pair].float(), sin[own, pair].float()


def assigned(mrope: Mrope, pair: Tensor) -> Tensor:
    """Which of the three positions (0 time, 1 height, 2 width) turns each pair."""
    turn = pair % 3
    if mrope.assign == "modulo":
        return turn
    sections = torch.tensor(mrope.sections, device=pair.device)
    if mrope.assign == "interleaved":
        return torch.where((turn > 0) & (pair < 3 * sections[turn]), turn, 0)
    return torch.repeat_interleave(torch.arange(3, device=pair.device), sections)


def rotate(values: Tensor, step: Rope, cos: Tensor, sin: Tensor) -> Tensor:
    """Float32 rows ``[n, (heads,) dim]`` turned by ``cos`` and ``sin`` ``[n, pairs]``."""
    shape = (step.pairs, 2) if step.style == "interleaved" else (2, step.pairs)
    side = -1 if step.style == "interleaved" else -2
    part = values.narrow(-1, step.start, step.rotary_dim).unflatten(-1, shape)
    a, b = part.unbind(side)
    if values.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=side).flatten(-2)
    return torch.cat([values[..., : step.start], turned, values[..., step.start + step.rotary_dim :]], dim=-1)


def _known(
    fuse: Fuse, positions: Tensor | None, tables: Mapping[str, Tensor], count: int, device: torch.device
) -> Tensor:
    """Which of the first ``count`` tokens have angles: all, unless a table ends before their positions."""
    known = torch.ones(count, dtype=torch.bool, device=device)
    rope = fuse.rope
    if rope is None or not tables:
        return known
    length = min(len(table) for table in tables.values())
    streams = positions[..., :count].expand(3 if fuse.mrope else 1, count)
    return known & ((streams >= 0) & (streams < length)).all(0)
