"""What Triton cannot hold: found when a layout is read, and not at the first launch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvgen.axes import padded_side
from kvgen.functions import chosen_plans
from kvgen.layout import KernelHints, Layout
from kvgen.schedule import schedule

LARGEST = 1 << 20
"""Values of a block of Triton's."""


@dataclass(frozen=True, slots=True)
class TooLarge:
    """A program of ``kind`` would hold ``values`` values of ``what``, because the layout wishes so or has to."""

    kind: str
    what: str
    values: int
    wished: bool
    buffer: str | None = None


def too_large(layout: Layout) -> Iterator[TooLarge]:
    """Every stream and padding with more values than a program can hold. Extents known at launch are left out."""
    seen = set()
    for plan in (plan for of, plan in chosen_plans(layout) if of is layout):
        division = schedule(layout, plan)
        wished = getattr(layout.schedule, plan.kind) != KernelHints()
        for copy, tile in zip(plan.copies, division.tiles, strict=True):
            values = math.prod(side or 1 for side in tile.sides)
            if values > LARGEST and (plan.kind, copy.stream) not in seen:
                seen.add((plan.kind, copy.stream))
                yield TooLarge(plan.kind, f"`{copy.stream}`", values, wished)
        for fill in plan.fills:
            values = division.tokens * padded_side(fill.size)
            if values > LARGEST and (plan.kind, fill.view.tensor) not in seen:
                seen.add((plan.kind, fill.view.tensor))
                yield TooLarge(plan.kind, "padding", values, wished, fill.view.tensor)
