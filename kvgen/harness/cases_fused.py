"""Cases of ``append_fused`` and ``append_fused_<stream>``: stages on the way into the cache, and the query beside
it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvgen import reference, reference_fused
from kvgen.encodings import append_refusal
from kvgen.harness.bench import Bench, Case
from kvgen.harness.cases_append import dead_slots, poison
from kvgen.harness.cases_refuse import refuse
from kvgen.harness.compare import Mismatch, adopt_nans, compare_bytes, compare_rows
from kvgen.harness.fused_bounds import adopt_within_bounds, inexact
from kvgen.harness.pools import Pool
from kvgen.harness.values import random_values
from kvgen.layout import Layout
from kvgen.stages import Rope, rope_of, weighted

ROWS = 37
"""Positions of a table."""

TOKENS = 5

MANY = 70
"""Tokens of a prefill: more than the few of which a program takes one."""


def fused_cases(layout: Layout, device: str, variants: int) -> Iterator[Case]:
    """Every case of a layout; none where nothing is fused."""
    if layout.fuse is None:
        return
    whole = not any(append_refusal(layout, stream.name) for stream in layout.streams)
    names = [s.name for s in layout.streams if layout.fuse.of(s.name)]
    for only in [*([None] if whole else []), *names]:
        function = f"append_fused_{only}" if only else "append_fused"

        def case(name: str, body: Callable[..., None], *args: Any, function: str = function, only=only, **options: Any):
            return Case(f"{function}/{name}", function, lambda bench: body(bench, only, *args, **options))

        yield case("T7", _append, 7)
        yield case("skipped", _skipped)
        if only and whole:
            continue
        for count in (0, 1):
            yield case(f"T{count}", _append, count)
        yield case("prefill", _prefill)
        yield case("int32", _append, 7, integers="int32")
        for variant in range(1, variants):
            yield case(f"dtype{variant}", _append, 7, variant=variant)
        for geometry in ("padded", "padded_odd", "inside", "transposed", "misaligned"):
            yield case(geometry, _append, 9, geometry=geometry)
        yield case("source_fused", _append, 7, style="fused")
        yield case("source_odd", _append, 7, style="odd")
        yield case("own_types", _append, 7, own_types=True)
        yield case("longer_sources", _append, 5, spare=6)
        yield case("all_skipped", _append, 4, skipped=True)
        parts = [*_names(layout, only), *(["query"] if _with_query(layout, only) else [])]
        rope = _rope(layout, parts)
        if rope and not rope.theta:
            yield case("positions_past_the_table", _past_the_table)
        if rope and layout.fuse.mrope:
            yield case("equal_positions", _equal_positions)
        if "query" in parts:
            yield case("query_in_place", _append, 7, in_place=True)
        if layout.layers:
            yield case("last_layer", _append, 5, layer=-1)
        yield case("edges", _edges)
        if device.startswith("cuda"):
            yield case("graph", _graph)
        for what, change in _refusals(layout, only):
            yield case(f"refuses_{what}", partial(_refused, what=what, change=change))


@dataclass(slots=True)
class Inputs:
    """Everything that a fused append takes besides buffers, twice where it is written.

    ``given`` are the dense tensors by argument, ``parts`` the same by stream; ``out`` is the query's output with its
    storage, for the module and the reference.
    """

    given: dict[str, Tensor]
    parts: dict[str, Tensor]
    positions: Tensor | None
    weights: dict[str, Tensor]
    tables: dict[str, Tensor]
    out: list[Tensor] = field(default_factory=list)
    storage: list[Tensor] = field(default_factory=list)


def _names(layout: Layout, only: str | None) -> tuple[str, ...]:
    return tuple(s.name for s in layout.streams) if only is None else (only,)


def _with_query(layout: Layout, only: str | None) -> bool:
    """Whether a function works on the query."""
    return layout.query is not None and bool(layout.fuse.of("query")) and only in (None, layout.fuse.query_like)


def _shape(bench: Bench, name: str) -> tuple[int, ...]:
    if name == "query":
        return tuple(axis.extent for axis in bench.layout.query.axes)
    return bench.sizes.stream_shape(bench.layout, name)


def _values(bench: Bench, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Numbers where something is worked out of them, any bit pattern where they are stored as they come."""
    if bench.layout.fuse.packed or bench.layout.fuse.of(name):
        return random_values(tuple(shape), dtype, bench.generator).to(bench.device)
    return bench.values(name, shape, dtype)


def _dense(bench: Bench, only: str | None, count: int, pool: Pool, style: str) -> tuple[dict, dict]:
    """Dense tensors by argument, and the streams' parts of them."""
    layout = bench.layout
    names = [*(["query"] if _with_query(layout, only) else []), *_names(bench.layout, only)]
    kinds = pool.dtypes | ({"query": pool.dtypes[layout.fuse.query_like or bench.streams[0]]} if layout.query else {})
    pads = {"dense": (0, 0), "fused": (32, 16), "odd": (3, 2)}[style]
    if layout.fuse.packed:
        width = sum(torch.Size(_shape(bench, n)).numel() for n in ("query", *bench.streams))
        wide = _values(bench, "query", (count, sum(pads) + width), pool.dtypes[bench.streams[0]])
        packed = wide[:, pads[0] : pads[0] + width]
        parts = reference_fused.columns(layout, packed)
        return {"qkv": packed}, {name: parts[name] for name in names}
    parts = {}
    for name in names:
        shape = _shape(bench, name)
        width = torch.Size(shape).numel()
        wide = _values(bench, name, (count, sum(pads) + width), kinds[name])
        parts[name] = wide[:, pads[0] : pads[0] + width].unflatten(1, shape)
    return parts, parts


def _inputs(
    bench: Bench,
    only: str | None,
    count: int,
    pool: Pool,
    style: str = "dense",
    integers: str = "int64",
    own_types: bool = False,
) -> Inputs:
    """``own_types``: weights and tables of the type of the values, and not of float32."""
    layout, fuse = bench.layout, bench.layout.fuse
    given, parts = _dense(bench, only, count, pool, style)
    kind = pool.dtypes[bench.streams[0]] if own_types else torch.float32
    weights = {
        name: _row(bench, parts[name].shape[-1]).to(parts[name].dtype if own_types else torch.float32)
        for name in parts
        if weighted(fuse.of(name))
    }
    rope, tables, positions = _rope(layout, parts), {}, None
    if rope is not None:
        split = {"joined": {"cos_sin": rope.rotary_dim}, "split": {"cos": rope.pairs, "sin": rope.pairs}}
        tables = {name: _table(bench, width, kind) for name, width in split.get(rope.cos_sin, {}).items()}
        positions = _positions(bench, count, integers)
    found = Inputs(given, parts, positions, weights, tables)
    if "query" in parts:
        _add_out(bench, found)
    return found


def _rope(layout: Layout, names: Collection[str]) -> Rope | None:
    """A rotary embedding that some of these streams go through."""
    return rope_of([step for name in names for step in layout.fuse.of(name)])


def _row(bench: Bench, length: int) -> Tensor:
    return torch.randn(length, generator=bench.generator).to(bench.device)


def _table(bench: Bench, width: int, kind: torch.dtype) -> Tensor:
    """Rows of a wider table with NaN around: reading past its end or its columns shows."""
    wide = torch.full((ROWS + 2, width + 16), float("nan"))
    wide[1:-1, :width] = torch.rand(ROWS, width, generator=bench.generator) * 2 - 1
    return wide.to(kind).to(bench.device)[1:-1, :width]


def _positions(bench: Bench, count: int, integers: str) -> Tensor:
    """One position a token, or three unlike ones, in rows of a wider tensor."""
    rows = 3 if bench.layout.fuse.mrope else 1
    values = torch.randint(0, ROWS, (rows, count + 3), generator=bench.generator)
    values = values.to(getattr(torch, integers)).to(bench.device)[:, :count]
    return values if bench.layout.fuse.mrope else values[0]


def _add_out(bench: Bench, found: Inputs, in_place: bool = False) -> None:
    """The query's output: poisoned rows of a wider tensor, or the query itself; the reference has a copy."""
    query = found.parts["query"]
    if in_place:
        base = next(iter(found.given.values())) if bench.layout.fuse.packed else query
        twin = base.clone()
        columns = reference_fused.columns(bench.layout, twin) if bench.layout.fuse.packed else {"query": twin}
        found.out, found.storage = [query, columns["query"]], [base, twin]
        found.parts = found.parts | {"query": query.clone()}
        return
    width = query.shape[1:].numel()
    wide = bench.random((len(query), width + 24), query.dtype)
    for storage in (wide, wide.clone()):
        found.out.append(storage[:, 8 : 8 + width].unflatten(1, query.shape[1:]))
        found.storage.append(storage)


def _arguments(
    bench: Bench, only: str | None, pool: Pool, found: Inputs, slots: Tensor, remap: Tensor | None = None
) -> dict[str, Any]:
    """The positional arguments, in the documented order."""
    streams = _names(bench.layout, only)
    args: dict[str, Any] = dict(found.given)
    if found.out:
        args["query_out"] = found.out[0]
    args |= {b: pool.actual[b] for b in bench.holders(streams)}
    args |= {"slot_mapping": slots} | bench.remap_args(remap)
    args |= {} if found.positions is None else {"positions": found.positions}
    order = (*streams, *(["query"] if "query" in found.parts else []))
    args |= {f"{name}_weight": found.weights[name] for name in order if name in found.weights}
    return args | found.tables | bench.scale_args(streams)


def _check(bench: Bench, only: str | None, pool: Pool, found: Inputs, slots: Tensor, layer: int | None = None) -> None:
    """The reference's turn, and the comparison of pool and output."""
    streams = _names(bench.layout, only)
    table = next(iter(bench.remap_args(None).values()), None)
    options = bench.layer_args(layer)
    held = {b: pool.expected[b] for b in bench.holders(streams)}
    reference_fused.append_fused(
        bench.layout,
        found.parts,
        held,
        slots,
        found.positions,
        weights=found.weights,
        tables=found.tables,
        query_out=found.out[1] if found.out else None,
        remap=table,
        scales=bench.scales,
        **options,
    )
    known = slots if found.positions is None else _live(found, slots)
    if inexact(bench.layout):
        adopt_within_bounds(bench, pool, known, streams, options.get("layer"))
    bench.check(pool, known, streams, table, options.get("layer"), staged=True)
    if found.out:
        _check_out(bench, found)


def _live(found: Inputs, slots: Tensor) -> Tensor:
    """Slots of the tokens that have angles; -1 for the others."""
    if not found.tables:
        return slots
    inside = (found.positions >= 0) & (found.positions < ROWS)
    inside = inside[..., : len(slots)]
    return torch.where(inside.all(0) if inside.dim() == 2 else inside, slots, -1)


def _check_out(bench: Bench, found: Inputs) -> None:
    actual, expected = found.out
    rows = expected.contiguous()
    adopt_nans(actual.contiguous(), rows)
    if inexact(bench.layout):
        close = (actual.float() - rows.float()).abs() <= rows.float().nan_to_num().abs().amax(-1, keepdim=True) * 2**-6
        rows = torch.where(close, actual, rows)
    compare_rows("query", actual.contiguous(), rows, [None] * len(rows))
    expected.copy_(rows)
    compare_bytes("output of query", *(storage.contiguous() for storage in found.storage))


def _append(
    bench: Bench,
    only: str | None,
    count: int,
    geometry: str = "compact",
    variant: int = 0,
    integers: str = "int64",
    style: str = "dense",
    own_types: bool = False,
    spare: int = 0,
    skipped: bool = False,
    in_place: bool = False,
    layer: int | None = None,
) -> None:
    """``count`` tokens; ``spare`` rows past them hold NaN and belong to nobody."""
    pool = bench.pool(geometry, variant)
    slots = dead_slots(bench, integers)[:count] if skipped else bench.slots(count)
    found = _inputs(bench, only, len(slots) + spare, pool, style, integers, own_types)
    for part in found.parts.values():
        part[len(slots) :] = poison(part)
    if in_place:
        _add_out(bench, found, in_place=True)
    _run(bench, only, pool, found, bench.tensor(slots, integers), None if layer is None else layer % bench.sizes.layers)


def _run(bench: Bench, only: str | None, pool: Pool, found: Inputs, slots: Tensor, layer: int | None = None) -> None:
    function = getattr(bench.module, "append_fused" if only is None else f"append_fused_{only}")
    result = function(*_arguments(bench, only, pool, found, slots).values(), **bench.layer_args(layer))
    if result is not None:
        raise Mismatch(f"append_fused: expected None, got {type(result).__name__}")
    _check(bench, only, pool, found, slots, layer)


def _prefill(bench: Bench, only: str | None) -> None:
    pool, slots = bench.pool("padded"), bench.prefill()[:MANY]
    _run(bench, only, pool, _inputs(bench, only, len(slots), pool), bench.tensor(slots))


def _skipped(bench: Bench, only: str | None) -> None:
    """Skipped tokens stand between live ones: their rows hold NaN, the query's do not, and some have no angle."""
    pool = bench.pool()
    slots = [*bench.slots(4), *dead_slots(bench, "int64")]
    slots = bench.tensor([slots[i] for i in bench.shuffle(len(slots))])
    found = _inputs(bench, only, len(slots), pool)
    live = reference.resolve_slots(bench.layout, slots, bench.sizes.slots, None)[0]
    for name, part in found.parts.items():
        if name != "query":
            part[~live] = poison(part)
    if found.tables:
        found.positions[..., (~live).nonzero()[0]] = ROWS + 1
    _run(bench, only, pool, found, slots)


def _past_the_table(bench: Bench, only: str | None) -> None:
    """Positions that no row of the table belongs to: their tokens are skipped."""
    pool = bench.pool()
    slots = bench.slots(9)
    found = _inputs(bench, only, len(slots), pool)
    bad = [ROWS, -1, ROWS - 1, 2**31 - 1, -(2**31), 2**32, -(2**63)]
    for token, position in enumerate(bad[: len(slots)]):
        row = found.positions[token % 3] if bench.layout.fuse.mrope else found.positions
        row[token] = position
    _run(bench, only, pool, found, bench.tensor(slots))


def _equal_positions(bench: Bench, only: str | None) -> None:
    """Three equal positions, as one row and as three: the same bytes."""
    slots = bench.slots(7)
    pool = bench.pool()
    found = _inputs(bench, only, len(slots), pool)
    one = found.positions[0].clone()
    for positions in (one, one.expand(3, -1).contiguous()):
        found = replace(found, positions=positions)
        _run(bench, only, pool, found, bench.tensor(slots))


def _edges(bench: Bench, only: str | None) -> None:
    """Rows of zeros, of one large value, of NaN and infinities, of tiny values."""
    pool = bench.pool()
    slots = bench.slots(9)
    found = _inputs(bench, only, len(slots), pool)
    fills = (0.0, 1e4, float("nan"), float("inf"), 1e-6, -0.0)
    for part in found.parts.values():
        for row, fill in zip(part, fills, strict=False):
            row[..., ::2] = fill
            row[..., 1::2] = 0.0 if fill == fill and abs(fill) < 1 else 1.0
    _run(bench, only, pool, found, bench.tensor(slots))


def _graph(bench: Bench, only: str | None) -> None:
    """Captured once, replayed with other slots, positions and values."""
    from kvgen.harness.cases_graph import capture

    pool = bench.pool()
    slots = bench.tensor([-1] * TOKENS)
    found = _inputs(bench, only, TOKENS, pool)
    args, options = _arguments(bench, only, pool, found, slots), bench.layer_args(None)
    function = getattr(bench.module, "append_fused" if only is None else f"append_fused_{only}")
    if found.out:  # the first call and the capture write it
        found.out[1].copy_(found.out[0])
    graph, _ = capture(lambda: function(*args.values(), **options))
    for _ in range(2):
        live = bench.slots(TOKENS - 1)
        slots.copy_(bench.tensor([*live, *[-1] * (TOKENS - len(live))]))
        fresh = _inputs(bench, only, TOKENS, pool)
        for name, tensor in found.given.items():
            tensor.copy_(fresh.given[name])
        if found.positions is not None:
            found.positions.copy_(fresh.positions)
        graph.replay()
        _check(bench, only, pool, found, slots)


Change = Callable[[Tensor], Any]


def _refusals(layout: Layout, only: str | None) -> Iterator[tuple[str, tuple[str, Change]]]:
    """What a function must refuse: an argument, and what is done to it."""
    query = _with_query(layout, only)
    parts = [*_names(layout, only), *(["query"] if query else [])]
    for name in parts:
        if weighted(layout.fuse.of(name)):
            weight = f"{name}_weight"
            yield f"{weight}_missing", (weight, lambda x: None)
            yield f"{weight}_shorter", (weight, lambda x: x[:-1])
            yield f"{weight}_dtype", (weight, lambda x: x.double())
            yield f"{weight}_rank", (weight, lambda x: x.unsqueeze(0))
            yield f"{weight}_strided", (weight, lambda x: torch.stack([x, x], 1)[:, 0])
    rope = _rope(layout, parts)
    if rope is not None:
        high = 3 if layout.fuse.mrope else 2
        yield "positions_rank", ("positions", lambda x: x.reshape(*[1] * (high - x.dim()), *x.shape))
        yield "positions_floats", ("positions", lambda x: x.float())
        yield "positions_short", ("positions", lambda x: x[..., : TOKENS - 1])
        yield "positions_no_tensor", ("positions", lambda x: x.tolist())
        if layout.fuse.mrope:
            yield "positions_two_rows", ("positions", lambda x: x[:2])
        for table in {"joined": ["cos_sin"], "split": ["cos", "sin"]}.get(rope.cos_sin, []):
            yield f"{table}_narrower", (table, lambda x: x[:, :-2])
            yield f"{table}_wider", (table, lambda x: torch.cat([x, x], 1))
            yield f"{table}_dtype", (table, lambda x: x.double())
            yield f"{table}_rank", (table, lambda x: x[0])
            yield f"{table}_strided", (table, lambda x: torch.stack([x, x], 2)[..., 0])
        if rope.cos_sin == "split":
            yield "sin_shorter", ("sin", lambda x: x[:-1])
    if query:
        yield "query_out_dtype", ("query_out", lambda x: x.double())
        yield "query_out_heads", ("query_out", lambda x: x[:, :-1])
        yield "query_out_short", ("query_out", lambda x: x[: TOKENS - 1])
        yield "query_out_expanded", ("query_out", lambda x: x[:1].expand(x.shape))
    if layout.fuse.packed:
        yield "qkv_narrower", ("qkv", lambda x: x[:, :-1])
        yield "qkv_wider", ("qkv", lambda x: torch.cat([x, x[:, :8]], 1))
        yield "qkv_rank", ("qkv", lambda x: x.unsqueeze(1))
        yield "qkv_short", ("qkv", lambda x: x[: TOKENS - 1])
    elif query:
        yield "query_heads", ("query", lambda x: x[:, :-1])


def _refused(bench: Bench, only: str | None, what: str, change: tuple[str, Change]) -> None:
    pool, (name, made) = bench.pool(), change
    slots = bench.slots(TOKENS)
    found = _inputs(bench, only, len(slots), pool)
    args = _arguments(bench, only, pool, found, bench.tensor(slots))
    args[name] = made(args[name])
    if len(slots) < TOKENS and what.endswith("_short"):
        return
    function = getattr(bench.module, "append_fused" if only is None else f"append_fused_{only}")
    refuse(bench, pool, name, lambda: function(*args.values(), **bench.layer_args(None)))
    if found.out:
        compare_bytes("output of query", *found.storage)
