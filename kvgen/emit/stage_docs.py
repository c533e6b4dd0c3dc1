"""The prose of fused appends: what happens to values on their way, and what it takes besides them."""

from __future__ import annotations

import textwrap

from kvgen.emit.names import dense, extent_name
from kvgen.layout import Layout
from kvgen.lower_fuse import PACKED, packed_width
from kvgen.plan import Copy, Norm, Plan, Rotary

WIDTH = 112


def verbs(plan: Plan) -> str:
    """``normed and rotated``."""
    kinds = {type(stage) for copy in plan.staged for stage in copy.stages}
    return " and ".join(word for kind, word in ((Norm, "normed"), (Rotary, "rotated")) if kind in kinds)


def input_lines(layout: Layout, plan: Plan) -> list[str]:
    """The dense tensors that come in, and the query's output."""
    names = [*(["query"] if plan.query else []), *plan.streams]
    if layout.fuse.packed:
        parts = " | ".join(s.name for s in (layout.query, *layout.streams))
        lines = [f"{PACKED} [T, {packed_width(layout)}]: {parts}, of T tokens or more, with any row stride."]
    else:
        any_strides = "of T tokens or more, with any strides but the last."
        lines = [f"{name} {dense(layout, name)}, {any_strides}" for name in names]
    if plan.query:
        own = f"the query's columns of {PACKED}" if layout.fuse.packed else "query itself"
        lines.append(f"query_out {dense(layout, 'query')}, of the type of the query: written; it may be {own}.")
    return lines


def stage_lines(layout: Layout, plan: Plan) -> list[str]:
    """What happens to whom, in which order, and what it takes."""
    lines: list[str] = []
    told: dict[str, list[str]] = {}
    for copy in plan.staged:
        what = ", then ".join(_stage(stage) for stage in copy.stages)
        told.setdefault(what, [])
        if copy.stream not in told[what]:
            told[what].append(copy.stream)
    for what, names in told.items():
        lines += textwrap.wrap(f"{' and '.join(names)}: {what}.", WIDTH, subsequent_indent="  ")
    if plan.staged:
        lines += _rounding(layout, plan)
    weights = {stage.weight.tensor: copy for copy in plan.staged for stage in copy.stages if _weighted(stage)}
    for name, copy in weights.items():
        dim = extent_name(layout, copy.stream, "dim")
        lines.append(f"{name} [{dim}], float32 or of the type of {copy.source.tensor}.")
    return lines + _positions(plan)


def _weighted(stage: object) -> bool:
    return isinstance(stage, Norm) and stage.weight is not None


def _stage(stage: Norm | Rotary) -> str:
    if isinstance(stage, Norm):
        weight = ""
        if stage.weight is not None:
            weight = f" * (1 + {stage.weight.tensor})" if stage.plus_one else f" * {stage.weight.tensor}"
        return f"RMS norm, x / sqrt(mean(x**2) + {stage.eps!r}){weight}, squares summed in {stage.sum}"
    rope = stage.rope
    pair = f"i and i + {rope.pairs}" if rope.style == "neox" else "2i and 2i + 1"
    return f"RoPE of values {rope.start} to {rope.start + rope.rotary_dim}, in pairs {pair}"


def _rounding(layout: Layout, plan: Plan) -> list[str]:
    stages = [stage for copy in plan.staged for stage in copy.stages]
    if layout.fuse.rounding == "chain":
        lines = ["All of it is float32, rounded to the type of the source after each step, as separate kernels do."]
    else:
        lines = ["All of it is float32 until it is stored, rounded once."]
    if any(isinstance(stage, Norm) and stage.sum == "float32" for stage in stages):
        lines.append("The sum of squares depends on the order of its terms: a norm is right to (dim + 16) * 2**-24.")
    if any(isinstance(stage, Rotary) and stage.rope.theta is not None for stage in stages):
        lines.append(
            "cos and sin are the device's: a pair (a, b) is right to (|a| + |b|) * 2**-21 before it is rounded."
        )
    return lines


def _positions(plan: Plan) -> list[str]:
    """Positions, and where their angles come from."""
    rotary = plan.rotary
    if rotary is None:
        return []
    shape = "[T]" if rotary.mrope is None else "[3, T] (time, height, width; [T] where they are equal)"
    lines = [f"positions {shape}, of T tokens or more, int32 or int64: what the pairs of a token turn by."]
    if rotary.mrope:
        lines.append(f"  {_assigned(rotary)}")
    found: dict[str, Copy] = {}
    for copy in plan.staged:
        for stage in copy.stages:
            if isinstance(stage, Rotary) and stage.cos is not None:
                found.setdefault(stage.cos.tensor, copy)
            elif isinstance(stage, Rotary):
                theta = f"{stage.rope.theta!r} ** (-2 * i / {stage.rope.rotary_dim})"
                lines.append(f"Pair i of {copy.stream} turns by float32(position) * float32({theta}).")
    for name, copy in found.items():
        rope = next(s.rope for s in copy.stages if isinstance(s, Rotary))
        kinds = f"float32 or of the type of {copy.source.tensor}"
        if name == "cos_sin":
            lines.append(f"cos_sin [positions, {rope.rotary_dim}], {kinds}: {rope.pairs} cosines, {rope.pairs} sines.")
        else:
            lines.append(f"cos and sin [positions, {rope.pairs}], {kinds}.")
        lines.append("A token whose position is negative or past the table is skipped, as one without a slot is.")
    return lines


def _assigned(rotary: Rotary) -> str:
    time, height, width = rotary.mrope.sections
    if rotary.mrope.assign == "sections":
        return f"The first {time} pairs turn by time, the next {height} by height, the last {width} by width."
    if rotary.mrope.assign == "modulo":
        return "Pair i turns by row i % 3."
    return f"Pair i turns by row i % 3 if that is 1 and i < {3 * height}, or 2 and i < {3 * width}; else by time."


def query_lines(plan: Plan) -> list[str]:
    """What becomes of the query of a skipped token."""
    if plan.query is None:
        return []
    lines = ["The query does not ask for slots: that of a token without one goes to query_out like any other."]
    if any(isinstance(s, Rotary) and s.cos is not None for s in plan.query.stages):
        lines.append("Only where a position has no row in the table, the row of query_out stays as it was.")
    return lines
