"""Cases of encoded streams: values at every edge, other scales, other output types, and scales that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvgen import reference
from kvgen.encodings import append_refusal
from kvgen.harness.bench import Bench, Case
from kvgen.harness.cases_refuse import refuse
from kvgen.harness.pools import Pool
from kvgen.harness.values import STATIC, edge_rows, scale_arguments, static_scales
from kvgen.layout import Layout, Scale, leaves_of
from kvgen.quant.scales import dynamic_scale

OUTPUTS = ("float32", "bfloat16", "float16")
TOKENS = 5

EDGE_SCALES = (0, 2, 4)
"""Which static scales are tried on every edge: any, powers of two, and those whose inverse is far off."""

Args = dict[str, Any]


def encoded_cases(layout: Layout) -> Iterator[Case]:
    """Every case of a layout; none where nothing is encoded."""
    encoded = [s for s in layout.streams if s.encoding]
    if not encoded:
        return
    scales = list({scale.name: scale for s in encoded for scale in scale_arguments(s)}.values())
    apart = any(append_refusal(layout, s.name) for s in encoded)  # there is no call that writes all
    for stream in encoded if apart else [None]:
        function = f"append_{stream.name}" if stream else "append"
        for source in range(max(len(s.dtypes) for s in encoded)):
            for turn in EDGE_SCALES if scales else (0,):
                name = f"{function}/edges{source or ''}{f'_scales{turn}' if turn else ''}"
                yield Case(name, function, partial(_edges, source=source, turn=turn, only=stream and stream.name))
    for turn in range(1, len(STATIC) if scales else 1):
        yield Case(f"append/scales{turn}", "append", lambda bench, turn=turn: _scales(bench, turn))
    if scales:
        yield Case("append/scales_zero", "append", _scales_zero)
    for output in OUTPUTS:
        kind = getattr(torch, output)
        if all(output in s.dtypes for s in _plain_in_bytes(layout)):
            yield Case(f"gather/as_{output}", "gather", lambda bench, kind=kind: _gather(bench, kind, None))
            yield Case(f"gather/out_{output}", "gather", lambda bench, kind=kind: _gather(bench, kind, "strided"))
    for scale in scales:
        for what, change in _changes():
            yield from _refusals(scale.argument, what, change)
    for stream in layout.streams:
        argument = f"{stream.name}_scale"
        if argument not in [s.argument for s in scales]:
            yield from _refusals(argument, "superfluous", lambda args, name: args | {name: torch.ones(1)})


def _plain_in_bytes(layout: Layout) -> list:
    """Streams that are not encoded and lie in buffers of bytes: a caller's type says what they are."""
    holders = {leaf: b for b in layout.buffers for leaf in leaves_of(b.place)}
    return [s for s in layout.streams if s.encoding is None and holders[s.name].dtypes != s.dtypes]


def _edges(bench: Bench, source: int, turn: int, only: str | None) -> None:
    """A row for every edge, in as many calls as the pool's slots need; of one stream where ``only`` that is written."""
    pool = bench.pool("compact", source)
    bench.scales = static_scales(bench.layout, bench.sizes, bench.device, turn)
    rows = {}
    for name in bench.streams:
        stream, shape = bench.layout.stream(name), bench.sizes.stream_shape(bench.layout, name)
        if name in bench.encoded:
            static = (
                STATIC[(bench.streams.index(name) + turn) % len(STATIC)] if f"{name}_scale" in bench.scales else 1.0
            )
            rows[name] = edge_rows(stream, shape, pool.dtypes[name], static).to(bench.device)
    count = max(map(len, rows.values()))
    for name in bench.streams:
        if name in rows:
            rows[name] = rows[name][torch.arange(count, device=bench.device) % len(rows[name])]
        else:
            rows[name] = bench.random((count, *bench.sizes.stream_shape(bench.layout, name)), pool.dtypes[name])
    live = bench.slots(bench.sizes.slots)
    for start in range(0, count, len(live)):
        some = {name: values[start : start + len(live)] for name, values in rows.items()}
        slots = bench.tensor(live[: len(next(iter(some.values())))])
        bench.append(pool, some, slots, stream=only)
        if hasattr(bench.module, "gather"):
            bench.gather(pool, slots)


def _scales(bench: Bench, turn: int) -> None:
    """The same call with other scales: nothing is kept of those given before."""
    pool = bench.pool()
    for start in (turn, 0, turn):
        bench.scales = static_scales(bench.layout, bench.sizes, bench.device, start)
        slots = bench.slots(TOKENS)
        bench.append(pool, bench.sources(len(slots), pool), bench.tensor(slots))
    if hasattr(bench.module, "gather"):
        bench.gather(pool, bench.tensor(slots))


def _scales_zero(bench: Bench) -> None:
    """Scales that are 0, or whose inverse is infinite: codes of 0, and no NaN where there are values above none."""
    pool = bench.pool()
    bench.scales = {name: _zeroed(bench, name, scale) for name, scale in bench.scales.items()}
    slots = bench.slots(TOKENS)
    sources = bench.sources(len(slots), pool)
    for name in bench.encoded:
        sources[name][0] = 0
    bench.append(pool, sources, bench.tensor(slots))
    if hasattr(bench.module, "gather"):
        bench.gather(pool, bench.tensor(slots))


def _zeroed(bench: Bench, name: str, tensor: Tensor) -> Tensor:
    found = [scale for stream in bench.layout.streams for scale in scale_arguments(stream)]
    if next(scale for scale in found if scale.argument == name).given == "inverse":
        return torch.full_like(tensor, float("inf"))
    return torch.zeros_like(tensor)


def _gather(bench: Bench, kind: torch.dtype, out: str | None) -> None:
    """Every code there is; scales that are none, of any bit pattern, and such as are stored."""
    pool = bench.pool()
    live = bench.tensor(bench.slots(11))
    for stream in bench.layout.streams:
        if stream.encoding and stream.encoding.mode != "cast":
            _put(bench, pool, stream.name, live, lambda n: torch.arange(n) + 256)
            if stream.scale and stream.scale.stored:
                _put(bench, pool, stream.scale.name, live[::2], lambda n, s=stream.scale: _plain_scales(s, n))
    pool.written = True
    bench.gather(pool, torch.cat([live, bench.tensor([-1])]), dtype=kind, out=out)


def _plain_scales(scale: Scale, nbytes: int) -> Tensor:
    """Bytes of scales from 2^-10 to 2^9."""
    count = nbytes // (1 if scale.dtype.startswith("float8") else getattr(torch, scale.dtype).itemsize)
    made = dynamic_scale(replace(scale, code_range=1.0, floor_on=None), 1.3 * 2.0 ** (torch.arange(count) % 20 - 10))
    return made.stored.view(torch.uint8)


def _put(bench: Bench, pool: Pool, leaf: str, numbers: Tensor, bytes_of: Callable[[int], Tensor]) -> None:
    """Fill a leaf of some slots, in the module's buffers and in the reference's.

    Slots may share a scale, and which of them fills it then is the device's choice: the reference gets what came of it.
    """
    mine, theirs = (
        reference.leaf_views(bench.layout, tensors)[leaf].select("layer", bench.layer or 0)
        for tensors in (pool.actual, pool.expected)
    )
    index = mine.at(numbers, bench.sizes.block_size)
    part = mine.tensor[index]
    mine.tensor[index] = bytes_of(part.numel()).to(torch.uint8).to(bench.device).view(part.shape)
    theirs.tensor[index] = mine.tensor[index]


def _changes() -> Iterator[tuple[str, Callable[[Args, str], Args]]]:
    def replaced(change: Callable[[Tensor], Any]) -> Callable[[Args, str], Args]:
        return lambda args, name: args | {name: change(args[name])}

    yield "missing", lambda args, name: {k: v for k, v in args.items() if k != name}
    yield "none", replaced(lambda x: None)
    yield "number", replaced(lambda x: 0.5)
    yield "dtype", replaced(lambda x: x.double())
    yield "half", replaced(lambda x: x.half() if x.dtype != torch.float16 else x.float())
    yield "rank", replaced(lambda x: x.unsqueeze(0))
    yield "scalar", replaced(lambda x: x.flatten()[0])
    yield "longer", replaced(lambda x: torch.cat([x, x]))
    yield "empty", replaced(lambda x: x[:0])
    yield "device", replaced(lambda x: x.to("meta"))


def _refusals(argument: str, what: str, change: Callable[[Args, str], Args]) -> Iterator[Case]:
    named = None if what == "device" else argument

    def call(bench: Bench, pool: Pool, function: str, args: Args, options: Args) -> None:
        changed = change(args, argument)
        keywords = {k: v for k, v in changed.items() if k.endswith("_scale")}
        values = [v for k, v in changed.items() if k not in keywords]
        refuse(bench, pool, named, lambda: getattr(bench.module, function)(*values, **keywords, **options))

    def append(bench: Bench) -> None:
        pool, slots = bench.pool(), bench.slots(TOKENS)
        args = bench.append_args(pool, bench.sources(len(slots), pool), bench.tensor(slots))
        call(bench, pool, "append", args, bench.layer_args(None))

    def gather(bench: Bench) -> None:
        pool, slots = bench.pool(), bench.tensor(bench.slots(TOKENS))
        args = {b.name: pool.actual[b.name] for b in bench.layout.buffers} | {"slots": slots} | bench.remap_args(None)
        call(bench, pool, "gather", args | bench.scale_args(), bench.layer_args(None) | bench.dtype_args(pool))

    yield Case(f"append/refuses_{argument}_{what}", "append", append)
    yield Case(f"gather/refuses_{argument}_{what}", "gather", gather)
