"""What lies side by side in a cache, and so the tile axis that neighbouring lanes walk."""

from __future__ import annotations

from kvgen.lower import SLOT_NUMBER
from kvgen.plan import Plan, View

SECTOR = 32  # bytes; shorter runs of a token leave part of each memory transaction unused
LINE = 128  # bytes; runs of several tokens that share one are best written at a time
LINES = 2  # that such runs fill together: their tokens are a program's
VECTOR = 16  # bytes of the widest access


def lane(view: View) -> str:
    """The tile axis that neighbouring lanes walk: ``dim`` where its runs fill a sector, else what varies next.

    Along the last axis of a tile codes that share bytes are put together: it is ``dim`` then.
    """
    values = None if view.pack else dims_beside(view)
    if values is None:
        return "dim"
    run = values * view.itemsize
    rest = [step.digit.axis for step in view.steps if step.digit.axis != "dim"]
    after = "token" if rest[-1] in ("slot", SLOT_NUMBER) else rest[-1]
    dims_left = any(s.digit.axis == "dim" and s.digit.div >= values for s in view.steps)
    if run >= SECTOR or not dims_left:
        return "dim"
    return after if after == "token" or (after == "head" and run < VECTOR) else "dim"


def dims_beside(view: View) -> int | None:
    """How many values of a row lie side by side; None where only the launch knows."""
    values = 1
    for step in reversed(view.steps):
        digit = step.digit
        if digit.axis != "dim" or step.dim is not None or step.factor * view.unit != values * view.itemsize:
            break
        if digit.size is None:
            return None
        values *= digit.size
    return values


def runs_in_lines(plan: Plan) -> int:
    """How many tokens have their runs of a row side by side in ``LINES`` of memory, a power of two; 1 where runs are
    not short, or no slots are right above them.

    Runs are short that fill no more than a sector: those of several tokens that are read or written at once are one.
    """
    views = [plan.cache_view(copy) for copy in plan.copies]
    run = max((dims_beside(view) or LINE) * view.itemsize for view in views)
    above = {next((s.digit.axis for s in reversed(view.steps) if s.digit.axis != "dim"), "") for view in views}
    short = run <= SECTOR and above <= {"slot", SLOT_NUMBER}
    return 1 << (LINES * LINE // run).bit_length() - 1 if short else 1
