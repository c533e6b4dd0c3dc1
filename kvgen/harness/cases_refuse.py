"""What a module must refuse: each a TypeError or ValueError that names the tensor, before a byte is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvgen.harness.bench import Bench, Case
from kvgen.harness.compare import Mismatch
from kvgen.harness.pools import Pool
from kvgen.harness.tables import Tables
from kvgen.layout import Layout

Change = Callable[[Tensor], Any]

TOKENS = 5


def refusal_cases(layout: Layout) -> Iterator[Case]:
    """Every refusal of a layout, one argument wrong in each."""
    for stream in layout.streams:
        for what, change in _source_changes(layout, stream.name):
            yield _append_case(stream.name, what, change)
        yield _gather_out_case(stream.name, "shape", lambda out: out[:, ..., :-1])
        yield _gather_out_case(stream.name, "dtype", lambda out: out.double())
        yield _gather_out_case(stream.name, "short", lambda out: out[:-1])
    for buffer in layout.buffers:
        for what, change in buffer_changes(layout, buffer.name):
            yield _append_case(buffer.name, what, change)
            yield _gather_case(buffer.name, what, change)
    if len(layout.buffers) > 1:
        yield Case("append/refuses_unequal_blocks", "append", _unequal_blocks)
        yield Case("append/refuses_shared_memory", "append", _shared_memory)
    if len(layout.streams) > 1:
        yield Case("gather/refuses_out_shared_memory", "gather", _shared_out)
    for what, change in _integer_changes():
        yield _append_case("slot_mapping", what, change)
        yield _gather_case("slots", what, change)
        if layout.slots.remap:
            yield _append_case(layout.slots.remap, what, change)
    yield _append_case("slot_mapping", "more_than_tokens", lambda slots: torch.cat([slots, slots]))
    if layout.layers:
        for layer in ("past", "negative"):
            yield Case(f"append/refuses_layer_{layer}", "append", lambda bench, layer=layer: _layer(bench, layer))
            yield Case(
                f"gather/refuses_layer_{layer}", "gather", lambda bench, layer=layer: _gather_layer(bench, layer)
            )
    yield from _mapping_cases()


def _source_changes(layout: Layout, name: str) -> Iterator[tuple[str, Change]]:
    axes = layout.stream(name).axes
    yield "negated", torch._neg_view  # the imaginary part of a conjugate is such a view
    yield "dtype", lambda x: x.double() if "float32" in layout.stream(name).dtypes else x.float()
    yield "integers", lambda x: torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    yield "rank_low", lambda x: x.flatten(1) if x.dim() > 2 else x[0]
    yield "rank_high", lambda x: x.unsqueeze(1).expand(-1, 2, *[-1] * (x.dim() - 1))
    yield "inner_stride", _double_stride
    yield "device", lambda x: x.to("meta")
    yield "short", lambda x: x[: TOKENS - 1]
    yield "no_tensor", lambda x: x.tolist()
    for i, axis in enumerate(axes, start=1):
        if axis.extent is not None:
            yield f"more_{axis.name}", lambda x, i=i: _longer(x, i, x.shape[i])
            yield f"one_more_{axis.name}", lambda x, i=i: _longer(x, i, 1)
            if axis.extent > 1:
                yield f"one_less_{axis.name}", lambda x, i=i: x.narrow(i, 0, x.shape[i] - 1)


def _double_stride(x: Tensor) -> Any:
    wide = torch.stack([x, x], dim=-1)
    return wide.flatten(-2)[..., ::2] if x.shape[-1] > 1 else None


def buffer_changes(layout: Layout, name: str) -> Iterator[tuple[str, Change]]:
    buffer = layout.buffer(name)
    yield "dtype", lambda x: torch.empty_strided(x.shape, x.stride(), dtype=torch.float64, device=x.device)
    yield "rank", lambda x: x.unsqueeze(0)
    yield "device", lambda x: x.to("meta")
    yield "no_tensor", lambda x: None
    yield "inner_stride", _double_stride
    for i, dim in enumerate(buffer.place.dims):
        if dim.size is None:
            if any(d.axis == "block" for d in dim.digits):
                yield f"expanded_dim{i}", lambda x, i=i: x.narrow(i, 0, 1).expand(x.shape) if x.shape[i] > 1 else None
            else:
                yield f"empty_dim{i}", lambda x, i=i: x.narrow(i, 0, 0)
            continue
        if i < buffer.ndim - 1 and dim.size > 1:
            yield f"expanded_dim{i}", lambda x, i=i: x.narrow(i, 0, 1).expand(x.shape)
        if dim.size > 1:
            yield f"one_less_dim{i}", lambda x, i=i: x.narrow(i, 0, x.shape[i] - 1)
        yield f"one_more_dim{i}", lambda x, i=i: _longer(x, i, 1)
    if buffer.ndim > len(buffer.place.dims):
        yield "one_less_record", lambda x: x[..., :-1]


def _integer_changes() -> Iterator[tuple[str, Change]]:
    yield "floats", lambda x: x.float()
    yield "int16", lambda x: x.short()
    yield "two_dims", lambda x: x.unsqueeze(1)
    yield "device", lambda x: x.to("meta")
    yield "no_tensor", lambda x: x.tolist()


def refuse(bench: Bench, pool: Pool, name: str | None, call: Callable[[], Any]) -> None:
    """The call must raise TypeError or ValueError, name the argument, and leave the pool alone."""
    try:
        call()
    except (TypeError, ValueError) as error:
        if name is not None and name not in str(error):
            raise Mismatch(f"the refusal does not name {name}: {type(error).__name__}: {error}") from error
    except Exception as error:
        raise Mismatch(f"expected TypeError or ValueError, got {type(error).__name__}: {error}") from error
    else:
        raise Mismatch(f"expected a refusal that names {name or 'what is wrong'}, the call went through")
    bench.check(pool)


def _named(argument: str, what: str) -> str | None:
    """What a refusal must name: the argument. Of two tensors whose devices differ, it may name either."""
    return None if what == "device" else argument


def _append_case(argument: str, what: str, change: Change) -> Case:
    def body(bench: Bench) -> None:
        pool = bench.pool()
        slots = bench.slots(TOKENS)
        sources = bench.sources(len(slots), pool)
        args = bench.append_args(pool, sources, bench.tensor(slots))
        changed = change(args[argument])
        if changed is None and what != "no_tensor":
            return
        args[argument] = changed
        if what == "short" and len(slots) < TOKENS:
            return
        named = None if what == "more_than_tokens" else _named(argument, what)
        refuse(bench, pool, named, lambda: bench.module.append(*args.values(), **bench.layer_args(None)))

    return Case(f"append/refuses_{argument}_{what}", "append", body)


def _gather_args(bench: Bench, pool: Pool, slots: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    args = {b.name: pool.actual[b.name] for b in bench.layout.buffers} | {"slots": slots} | bench.remap_args(None)
    args |= bench.scale_args()
    options = bench.layer_args(None) | bench.dtype_args(pool)
    return args, options


def _gather_case(argument: str, what: str, change: Change) -> Case:
    def body(bench: Bench) -> None:
        pool = bench.pool()
        args, options = _gather_args(bench, pool, bench.tensor(bench.slots(TOKENS)))
        changed = change(args[argument])
        if changed is None and what != "no_tensor":
            return
        args[argument] = changed
        refuse(bench, pool, _named(argument, what), lambda: bench.module.gather(*args.values(), **options))

    return Case(f"gather/refuses_{argument}_{what}", "gather", body)


def _gather_out_case(stream: str, what: str, change: Change) -> Case:
    def body(bench: Bench) -> None:
        pool = bench.pool()
        slots = bench.slots(TOKENS)
        args, options = _gather_args(bench, pool, bench.tensor(slots))
        views, _ = bench.outputs(len(slots), pool, "dense")
        views[stream] = change(views[stream])
        refuse(bench, pool, None, lambda: bench.module.gather(*args.values(), **options, out=bench.pack(views)))

    return Case(f"gather/refuses_out_{stream}_{what}", "gather", body)


def _unequal_blocks(bench: Bench) -> None:
    """Buffers that disagree in their number of blocks."""
    pool = bench.pool()
    slots = bench.slots(TOKENS)
    args = bench.append_args(pool, bench.sources(len(slots), pool), bench.tensor(slots))
    last = bench.layout.buffers[-1]
    for i, dim in enumerate(last.place.dims):
        top = [d for d in dim.digits if d.axis == "block" and d.size is None]
        if top:
            whole = pool.actual[last.name]
            fewer = whole.shape[i] // (bench.sizes.blocks // top[0].div)
            args[last.name] = whole.narrow(i, 0, whole.shape[i] - fewer)
    refuse(bench, pool, last.name, lambda: bench.module.append(*args.values(), **bench.layer_args(None)))


def _shared_memory(bench: Bench) -> None:
    """One tensor for two buffers, where two are alike; so many tokens that no call was accepted with as many before."""
    pool = bench.pool()
    slots = [*bench.slots(TOKENS), *[-1] * 499]
    args = bench.append_args(pool, bench.sources(len(slots), pool), bench.tensor(slots))
    names = list(pool.actual)
    for first, second in pairwise(names):
        one, other = pool.actual[first], pool.actual[second]
        if (one.shape, one.dtype) == (other.shape, other.dtype):
            same = args | {second: one}
            refuse(bench, pool, second, lambda same=same: bench.module.append(*same.values(), **bench.layer_args(None)))


def _shared_out(bench: Bench) -> None:
    """One tensor for two outputs, where two are alike; again of so many tokens as no call was accepted with."""
    pool = bench.pool()
    slots = [*bench.slots(TOKENS), *[-1] * 498]
    args, options = _gather_args(bench, pool, bench.tensor(slots))
    views, _ = bench.outputs(len(slots), pool, "dense")
    for first, second in pairwise(views):
        one, other = views[first], views[second]
        if (one.shape, one.dtype) == (other.shape, other.dtype):
            same = bench.pack(views | {second: one})
            refuse(bench, pool, second, lambda same=same: bench.module.gather(*args.values(), **options, out=same))


def _bad_layer(bench: Bench, which: str) -> dict[str, int]:
    return {"layer": bench.sizes.layers if which == "past" else -1}


def _layer(bench: Bench, which: str) -> None:
    """Refused in a first call and in one whose tensors were accepted before."""
    pool = bench.pool()
    slots = bench.slots(TOKENS)
    args = bench.append_args(pool, bench.sources(len(slots), pool), bench.tensor(slots))
    refuse(bench, pool, "layer", lambda: bench.module.append(*args.values(), **_bad_layer(bench, which)))
    accepted = args | {"slot_mapping": torch.full_like(args["slot_mapping"], -1)}
    bench.module.append(*accepted.values(), **bench.layer_args(None))
    refuse(bench, pool, "layer", lambda: bench.module.append(*args.values(), **_bad_layer(bench, which)))


def _gather_layer(bench: Bench, which: str) -> None:
    pool = bench.pool()
    args, options = _gather_args(bench, pool, bench.tensor(bench.slots(TOKENS)))
    options |= _bad_layer(bench, which)
    refuse(bench, pool, "layer", lambda: bench.module.gather(*args.values(), **options))


def _mapping_cases() -> Iterator[Case]:
    """Refusals of ``slot_mapping`` and ``fill_slots``: what comes and what the message must name."""

    def case(what: str, name: str | None, change: Callable[[dict[str, Any]], None]) -> Case:
        def body(bench: Bench) -> None:
            tables = Tables(bench)
            args = {"block_table": tables.table, "positions": bench.tensor([0] * tables.requests)}
            change(args)
            table, positions = args.pop("block_table"), args.pop("positions", None)
            options = args | bench.rank_args(0) | bench.block_size_args()
            refuse(bench, bench.pool(), name, lambda: bench.module.slot_mapping(table, positions, **options))

        return Case(f"slot_mapping/refuses_{what}", "slot_mapping", body)

    def replace(name: str, change: Change) -> Callable[[dict[str, Any]], None]:
        return lambda args: args.__setitem__(name, change(args[name]))

    yield case("table_floats", "block_table", replace("block_table", lambda x: x.float()))
    yield case("table_rank", "block_table", replace("block_table", lambda x: x[0]))
    yield case("positions_floats", "positions", replace("positions", lambda x: x.float()))
    yield case("positions_rank", "positions", replace("positions", lambda x: x.unsqueeze(1)))
    yield case("positions_no_tensor", "positions", replace("positions", lambda x: x.tolist()))
    yield case("neither", None, lambda args: args.update(positions=None))
    yield case("both", None, lambda args: args.update(context_lens=args["positions"]))

    def lens_without_count(args: dict[str, Any]) -> None:
        lens = args.pop("positions")
        args.update(context_lens=lens, query_start_loc=torch.cat([lens, lens[:1]]))

    yield case("lens_without_count", "num_tokens", lens_without_count)


def _longer(tensor: Tensor, dim: int, by: int) -> Tensor:
    """The tensor with its first ``by`` slices once more at the end; not every type can be concatenated."""
    plain = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return torch.cat([plain, plain.narrow(dim, 0, by)], dim=dim).view(tensor.dtype)
