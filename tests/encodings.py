"""Encodings drawn at random: what a scale varies over, where it comes from, and what else may be said of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvgen.quant import Mode
from kvgen.values import SCALE_DTYPES, ZERO_DTYPES

T = TypeVar("T")
Choose = Callable[[Sequence[T]], T]

ZEROS = {
    "minimum": {"kind": "minimum"},
    "point": {"kind": "point"},
    "clamped": {"kind": "point", "clamped": True},
}


def code_options(choose: Choose, mode: Mode, zero: str) -> dict[str, Any]:
    """What `quant` says of its codes, besides the scale; ``zero`` is a word of ZEROS, or empty."""
    found: dict[str, Any] = {"mode": mode.name}
    if mode.clamp and zero in ("", "minimum"):
        found["round"] = choose(("even", "away"))
    if mode.clamp and not mode.asymmetric:
        lowest = -(1 << mode.bits - 1)
        found["clamp"] = [choose((lowest, lowest + 1)), -lowest - 1]
    if zero:
        found["zero"] = ZEROS[zero] | {"dtype": choose(ZERO_DTYPES[ZEROS[zero]["kind"]])}
    return found


def scale_options(choose: Choose, mode: Mode, *, dynamic: bool, stored: bool, by_head: bool) -> dict[str, Any]:
    """What a scale says besides the axes that it varies over: whatever has a meaning there."""
    own = next(word for word, dtype in SCALE_DTYPES.items() if dtype == mode.scale_dtype)
    dtype = own if mode.group else choose(tuple(SCALE_DTYPES))
    found: dict[str, Any] = {"source": "dynamic" if dynamic else "static", "dtype": dtype}
    if mode.by_norm:
        return found
    found["arithmetic"] = choose(("divide", "multiply"))
    if not dynamic:
        return found | ({} if stored else {"given": choose(("scale", "inverse"))})
    found["grid"] = "pow2" if dtype == "e8m0" else choose(("any", "pow2"))
    if found["grid"] == "pow2":
        found["exponent"] = choose(("ceil", "floor"))
    if found["grid"] == "pow2" or dtype != "float32":
        found["encode"] = choose(("stored", "exact"))
    found["range"] = choose((mode.code_range, mode.code_range, mode.code_range / 2))
    found["floor"] = choose(("none", {"scale": 1e-4}, {"amax": 1e-3}))
    found["scale"] = choose(("none", {"per": []}, *[{"per": "head"}] * by_head))
    return found


def per_words(choose: Choose, mode: Mode, pieces: Sequence[Any], token: str) -> tuple[list[str], list[Any]]:
    """What a scale varies over, as `per` says it, and the digits that tell it apart.

    ``pieces`` are the digits of the stream, slowest first along each axis, those of ``slot`` among them; ``token`` is
    ``token``, ``group`` (of tokens), ``block``, or ``none`` of these.
    """
    slot, head, dim = ([p for p in pieces if p.axis == axis] for axis in ("slot", "head", "dim"))
    block = [p for p in pieces if p.axis == "block"]
    word = block[0].term.partition("//")[0]
    token_word = "token"
    words, found = [], []
    if token == "group" and len(slot) > 1:
        kept = choose(range(1, len(slot)))
        words.append(f"{token_word}//{math.prod(p.size for p in slot[kept:])}")
        found += block + slot[:kept]
    elif token in ("token", "group"):
        words.append(token_word)
        found += block + slot
    elif token == "block":
        words.append(word)
        found += block
    if head and choose((True, True, False)):
        words.append("head")
        found += head
    whole = choose(("none", "none", "all", "group", "group"))
    if whole == "group" and len(dim) > 1:
        kept = choose(range(1, len(dim)))
        step = math.prod(p.size for p in dim[kept:])
        if mode.bits == 8 or step & (step - 1) == 0:
            words.append(f"dim//{step}")
            found += dim[:kept]
    elif whole == "all":
        words.append("dim")
        found += dim
    return words, found
