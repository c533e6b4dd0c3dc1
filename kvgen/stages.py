"""What happens to values between the projection and the cache: ``fuse`` of a layout, checked.

A stage computes in float32. RMS norm: y = x · 1/sqrt(mean(x²) + eps) · w over ``dim``. RoPE: the values of a pair (a,
b) become (a · cos − b · sin, b · cos + a · sin).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from kvgen.layout import Layout


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """RMS norm over ``dim``; ``weight`` is w as it comes, 1 + w, or none at all."""

    eps: float
    weight: Literal["plain", "plus_one", "none"] = "plain"


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of ``rotary_dim`` values from index ``start`` on; the others are copied.

    NeoX pairs index i with i + rotary_dim / 2, interleaved 2i with 2i + 1, both counted from ``start``. Angles come
    from a table, cos and sin ``joined`` in a row or ``split``, or are computed from ``theta``: position · theta^(−2i /
    rotary_dim).
    """

    style: Literal["neox", "interleaved"]
    rotary_dim: int
    start: int
    cos_sin: Literal["joined", "split", "theta"] = "joined"
    theta: float | None = None

    @property
    def pairs(self) -> int:
        return self.rotary_dim // 2


Step: TypeAlias = RmsNorm | Rope


@dataclass(frozen=True, slots=True)
class Mrope:
    """Three positions a token (time, height, width), and which of them turns pair i.

    ``sections``: consecutive runs of pairs. ``interleaved``: pair i takes height where i % 3 = 1 and width where i % 3
    = 2, each below 3 · its section, else time. ``modulo``: i % 3.
    """

    sections: tuple[int, int, int]
    assign: Literal["sections", "interleaved", "modulo"]


@dataclass(frozen=True, slots=True)
class Fuse:
    """The fused append of a layout.

    ``steps`` are those of each stream that has some, in the order of the layout; the query's are among them as
    ``query``. ``query_like`` is the stream whose stages the query goes through too. ``packed``: streams and query come
    as one tensor, ``[T, query heads · dim + heads · dim of each stream]``. ``rounding``: float32 from load to store
    (``once``), or rounded to the type of the source after each step, as separate kernels do (``chain``). ``norm_sum``
    is the type in which squares are summed and their root is taken.
    """

    packed: bool
    steps: tuple[tuple[str, tuple[Step, ...]], ...]
    query_like: str | None = None
    mrope: Mrope | None = None
    rounding: Literal["once", "chain"] = "once"
    norm_sum: Literal["float64", "float32"] = "float64"

    def of(self, stream: str) -> tuple[Step, ...]:
        return next((steps for name, steps in self.steps if name == stream), ())

    @property
    def rope(self) -> Rope | None:
        """Any rotary embedding, see ``rope_of``."""
        return rope_of([step for _, steps in self.steps for step in steps])


def rope_of(steps: Sequence[Step]) -> Rope | None:
    """Any rotary embedding, one with a table if there is one: all agree in what concerns their table."""
    found = [step for step in steps if isinstance(step, Rope)]
    return next((rope for rope in found if rope.theta is None), found[0] if found else None)


def weighted(steps: tuple[Step, ...]) -> bool:
    """Whether a weight is handed in."""
    return any(isinstance(step, RmsNorm) and step.weight != "none" for step in steps)


def describe(layout: Layout) -> dict[str, Any]:
    """``fuse`` as plain data, spelled as a layout file does, without what is said by default."""
    fuse, query = layout.fuse, layout.query
    found: dict[str, Any] = {"input": "packed_qkv"} if fuse.packed else {}
    for name, steps in fuse.steps:
        if query is None or name != query.name:
            found[name] = [_describe(step, layout.stream(name).axes[-1].extent) for step in steps]
    if query is not None:
        own = [_describe(step, query.axes[-1].extent) for step in fuse.of(query.name)]
        stages = {"stages": fuse.query_like or own} if own else {}
        found["query"] = {"heads": query.axes[0].extent} | stages
    if fuse.mrope is not None:
        assign = {} if fuse.mrope.assign == "sections" else {"assign": fuse.mrope.assign}
        found["positions"] = {"mrope": list(fuse.mrope.sections)} | assign
    found |= {} if fuse.rounding == "once" else {"rounding": fuse.rounding}
    return found | ({} if fuse.norm_sum == "float64" else {"norm": {"sum": fuse.norm_sum}})


def _describe(step: Step, dim: int) -> dict[str, Any]:
    if isinstance(step, RmsNorm):
        return {"rms_norm": {"eps": step.eps} | ({} if step.weight == "plain" else {"weight": step.weight})}
    parts: dict[str, Any] = {} if step.style == "neox" else {"style": step.style}
    parts |= {} if step.rotary_dim == dim else {"rotary_dim": step.rotary_dim}
    parts |= {"rotary": "last"} if step.start else {}
    parts |= {} if step.cos_sin == "joined" else {"cos_sin": step.cos_sin}
    return {"rope": parts | ({"cos_sin": {"theta": step.theta}} if step.theta is not None else {})}
