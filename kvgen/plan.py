"""The plan: what one generated function does, as typed copies from one view to another.

Append and gather are the same plan read in opposite directions: a dense activation on one side, the paged cache
on the other; a transfer has a cache on both. Nothing here knows how the work is divided among programs; that is the
schedule's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvgen.axes import Digit
from kvgen.stages import Mrope, Rope

Placement = Literal["slots", "positions", "requests", "blocks"]
"""How a token finds its slot: a slot number per token; request and position per token; ragged requests in a row; the
next slot of a list of blocks.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """What one digit adds to an address: ``digit * factor``, times the stride of tensor dimension ``dim`` if any.

    ``factor`` counts tensor elements where ``dim`` is None.
    """

    digit: Digit
    dim: int | None
    factor: int


@dataclass(frozen=True, slots=True)
class View:
    """Logical axes to the elements of a tensor.

    ``steps`` are in storage order, slowest first, without digits of size one. ``offset`` and constant steps count
    tensor elements of ``unit`` bytes; a value takes ``itemsize`` bytes, reached in pieces of ``access`` bytes. Codes
    that share these bytes are told apart by the digit ``pack``.
    """

    tensor: str
    itemsize: int
    unit: int
    access: int
    offset: int
    steps: tuple[Step, ...]
    pack: Digit | None = None

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(step.digit.axis for step in self.steps)


@dataclass(frozen=True, slots=True)
class Params:
    """Where that lies which codes mean something by: in the cache, or in an argument."""

    scale: View | None = None
    zero: View | None = None
    outer: View | None = None  # the scale of the scale


@dataclass(frozen=True, slots=True)
class Norm:
    """x · 1/sqrt(mean(x²) + eps), times ``weight`` or one plus it; reduces over ``dim``.

    Squares are summed, and the root is taken, in ``sum``; all else is float32. ``rounds``: to the source's type
    afterwards.
    """

    eps: float
    weight: View | None
    plus_one: bool
    sum: Literal["float64", "float32"]
    rounds: bool
    over: tuple[str, ...] = ("dim",)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Pairs of values turned by the angles of their token's position; float32, reduces over nothing.

    ``cos`` and ``sin`` vary over ``position`` and ``pair``; None where they are computed. ``mrope``: three positions a
    token.
    """

    rope: Rope
    cos: View | None
    sin: View | None
    mrope: Mrope | None
    rounds: bool
    over: tuple[str, ...] = ()


Stage: TypeAlias = Norm | Rotary
"""What happens to values between the two sides of a copy, before they are encoded."""


@dataclass(frozen=True, slots=True)
class Copy:
    """The values of one stream, moved from ``source`` to ``destination``; one of the two is the cache.

    Where the stream has an encoding, the cache holds codes; ``scale`` is where their scale lies: in the cache, or in an
    argument. In a transfer both are caches: ``scale``, ``zero`` and ``outer`` belong to the source, ``onto`` to the
    destination. ``leaf``: the bytes of that one, a stream's values or its scale, are moved as they are. ``stages`` of a
    fused append happen in their order, on the way to the cache.
    """

    stream: str
    source: View
    destination: View
    scale: View | None = None
    zero: View | None = None
    outer: View | None = None  # the scale of the scale
    onto: Params = Params()
    leaf: str = ""
    stages: tuple[Stage, ...] = ()

    @property
    def views(self) -> tuple[View, ...]:
        views = (self.source, self.destination, self.scale, self.zero, self.outer)
        return tuple(view for view in views if view is not None)


@dataclass(frozen=True, slots=True)
class Fill:
    """``size`` bytes at ``view`` that get ``value`` with every token written.

    ``stream`` lies in the same record: what the padding repeats over are axes of it.
    """

    stream: str
    view: View
    size: int
    value: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One generated function: its copies, and how its tokens are placed.

    ``query`` is what goes through the stages of a fused append without being stored, from one dense tensor to another.
    """

    name: str
    kind: Literal["append", "gather", "transfer"]
    placement: Placement
    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...] = ()
    query: Copy | None = None

    @property
    def staged(self) -> tuple[Copy, ...]:
        """The copies that have stages, the query's last."""
        copies = (*self.copies, *([self.query] if self.query else []))
        return tuple(copy for copy in copies if copy.stages)

    @property
    def rotary(self) -> Rotary | None:
        """Any of its rotary embeddings, one with a table if there is one: all share positions and table."""
        found = [stage for copy in self.staged for stage in copy.stages if isinstance(stage, Rotary)]
        return next((stage for stage in found if stage.cos), found[0] if found else None)

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams it moves, each once, though it may be stored in several places."""
        return tuple(dict.fromkeys(copy.stream for copy in self.copies))

    def tensors_of(self, copy: Copy) -> tuple[str, ...]:
        """The tensors that hold a stream and its scale on the cache's side, an argument's included."""
        return tuple(view.tensor for view in copy.views if view is not self.dense_view(copy))

    def cache_view(self, copy: Copy) -> View:
        return copy.destination if self.kind == "append" else copy.source

    def dense_view(self, copy: Copy) -> View:
        return copy.source if self.kind == "append" else copy.destination


@dataclass(frozen=True, slots=True)
class Stretch:
    """``nbytes`` bytes of a page that lie together, once for each value of the digits of ``steps`` besides ``block``.

    Where they lie in ``tensor``: ``offset`` bytes from its first element, and the steps. Constant ones count bytes;
    others count elements, of ``unit`` bytes, times a stride of the tensor.
    """

    tensor: str
    unit: int
    offset: int
    nbytes: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class PagePlan:
    """A generated function on whole blocks, in all layers: every byte that belongs to one is copied, or zeroed."""

    name: str
    kind: Literal["copy", "zero"]
    stretches: tuple[Stretch, ...]
