"""Cases of ``concat_mla_key``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvgen import reference
from kvgen.harness.bench import Bench, Case
from kvgen.harness.cases_refuse import refuse
from kvgen.harness.compare import Mismatch, adopt_nans, compare_bytes, compare_rows
from kvgen.harness.pools import HUGE_ELEMENTS, virtual_bytes
from kvgen.harness.values import random_values
from kvgen.layout import Layout

SOURCES = ("float32", "bfloat16", "float16")
SIZES = ((1, 1, 1, 1), (5, 3, 16, 8), (3, 5, 20, 6), (2, 7, 128, 64), (4, 2, 3, 24), (2, 3, 2500, 5))
"""Tokens, heads, and sizes of both parts, the last of them with a row that is more than a program's values."""

Args = dict[str, Any]


def concat_cases(layout: Layout) -> Iterator[Case]:
    """Every case, of a layout that has the function."""
    if not layout.mla:
        return
    for output in (*SOURCES, "float8_e4m3fn"):
        yield _case(f"as_{output}", partial(_cast, output=output))
    yield _case("sizes", _sizes)
    yield _case("made", _made)
    yield _case("longer", _longer)
    yield _case("empty", _empty)
    yield _case("huge", _huge)
    for argument, what, change in _changes():
        yield _case(f"refuses_{argument}_{what}", partial(_refused, argument=argument, change=change))


def _case(name: str, body: Callable[[Bench], None]) -> Case:
    return Case(f"concat_mla_key/{name}", "concat_mla_key", body)


def parts(
    bench: Bench, sizes: tuple[int, int, int, int], nope: str, rope: str, extra: int = 0
) -> tuple[Tensor, Tensor]:
    """Both parts, of any bit patterns in one token of eight: slices of the projections that they come from."""
    tokens, heads, nope_dim, rope_dim = sizes
    shape = (tokens + extra, heads, nope_dim + 9)
    whole = random_values(shape, getattr(torch, nope), bench.generator).to(bench.device)
    shared = random_values((tokens + extra, 13 + rope_dim), getattr(torch, rope), bench.generator).to(bench.device)
    return whole[..., :nope_dim], shared[:, 13:]


def _outputs(bench: Bench, shape: tuple[int, ...], output: str) -> tuple[Tensor, Tensor]:
    """A poisoned storage, and a view into its middle whose rows and tokens lie apart."""
    tokens, heads, dim = shape
    kind = getattr(torch, output)
    storage = bench.random((16 + tokens * (heads * (dim + 5) + 3) + 16,), kind)
    return storage, storage.as_strided(shape, (heads * (dim + 5) + 3, dim + 5, 1), 16)


def _compare(bench: Bench, k_nope: Tensor, k_rope: Tensor, output: str, tokens: int) -> None:
    storage, out = _outputs(bench, (tokens, k_nope.shape[1], k_nope.shape[2] + k_rope.shape[-1]), output)
    other = storage.clone()
    wanted = reference.concat_mla_key(k_nope, k_rope, other.as_strided(out.shape, out.stride(), 16))
    result = bench.module.concat_mla_key(k_nope, k_rope, out)
    if result is not out:
        raise Mismatch("expected the tensor that was given as out")
    if output != "float8_e4m3fn":
        adopt_nans(out, wanted)
    compare_rows("key", out, wanted, list(range(tokens)))
    compare_bytes("out", storage, other)


def _cast(bench: Bench, output: str) -> None:
    """From each type, the two parts of the same and of different ones."""
    for turn, nope in enumerate(SOURCES):
        for rope in (nope, SOURCES[turn - 1]):
            _compare(bench, *parts(bench, (9, 3, 20, 6), nope, rope), output, 9)


def _sizes(bench: Bench) -> None:
    """The rope part as ``[T, Dr]`` and as ``[T, 1, Dr]``."""
    for tokens, *rest in SIZES:
        k_nope, k_rope = parts(bench, (tokens, *rest), "bfloat16", "bfloat16")
        _compare(bench, k_nope, k_rope, "bfloat16", tokens)
        _compare(bench, k_nope, k_rope.unsqueeze(1), "float8_e4m3fn", tokens)


def _made(bench: Bench) -> None:
    for kind in SOURCES:
        k_nope, k_rope = parts(bench, (5, 3, 16, 8), kind, "float32")
        result, wanted = bench.module.concat_mla_key(k_nope, k_rope), reference.concat_mla_key(k_nope, k_rope)
        adopt_nans(result, wanted)
        compare_rows("key", result, wanted, list(range(5)))


def _longer(bench: Bench) -> None:
    """Graphs pad what comes in: there are as many tokens as out has."""
    _compare(bench, *parts(bench, (4, 3, 16, 8), "float16", "float16", extra=3), "float16", 4)


def _empty(bench: Bench) -> None:
    """No tokens, and no heads."""
    for sizes in ((0, 3, 16, 8), (4, 0, 16, 8)):
        k_nope, k_rope = parts(bench, sizes, "bfloat16", "bfloat16")
        _compare(bench, k_nope, k_rope, "bfloat16", sizes[0])
        result = bench.module.concat_mla_key(k_nope, k_rope)
        if result.shape != (*sizes[:2], 24):
            raise Mismatch(f"expected shape {(*sizes[:2], 24)}, got {tuple(result.shape)}")


def _huge(bench: Bench) -> None:
    """Tokens more than 2³¹ elements apart, and as much before the first: what wraps shows as a row that is missing."""
    k_nope, k_rope = parts(bench, (2, 3, 16, 8), "bfloat16", "bfloat16")
    step = HUGE_ELEMENTS + 64
    storage = virtual_bytes(2 * step + 72, bench.device).view(torch.float8_e4m3fn)
    out = storage.as_strided((2, 3, 24), (step, 24, 1), step)
    wanted = reference.concat_mla_key(k_nope, k_rope, torch.empty((2, 3, 24), dtype=out.dtype, device=bench.device))
    compare_rows("key", bench.module.concat_mla_key(k_nope, k_rope, out), wanted, [0, 1])


def _changes() -> Iterator[tuple[str, str, Callable[[Tensor], Any]]]:
    for argument in ("k_nope", "k_rope", "out"):
        yield argument, "dtype", lambda x: x.double()
        yield argument, "rank", lambda x: x.unsqueeze(0).unsqueeze(0)
        yield argument, "inner_stride", lambda x: torch.stack([x, x], dim=-1)[..., 0]
        yield argument, "device", lambda x: x.to("meta")
        yield argument, "no_tensor", lambda x: x.tolist()
    for argument in ("k_nope", "k_rope"):
        yield argument, "short", lambda x: x[:-1]
    yield "k_rope", "heads", lambda x: x.unsqueeze(1).expand(-1, 3, -1)
    yield "out", "width", lambda x: x[..., :-1]
    yield "out", "heads", lambda x: x[:, :-1]
    yield "out", "overlapping", lambda x: x[:, :1].expand_as(x)
    yield "out", "e5m2", lambda x: x.to(torch.float8_e5m2)


def _refused(bench: Bench, argument: str, change: Callable[[Tensor], Any]) -> None:
    k_nope, k_rope = parts(bench, (5, 3, 16, 8), "bfloat16", "bfloat16")
    args = {"k_nope": k_nope, "k_rope": k_rope, "out": k_nope.new_zeros(5, 3, 24)}
    args[argument] = change(args[argument])
    named = None if getattr(args[argument], "is_meta", False) else argument
    refuse(bench, bench.pool(), named, lambda: bench.module.concat_mla_key(*args.values()))
