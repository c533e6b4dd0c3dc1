"""Whether digits tile an axis, and what is left of it where they do not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvgen.axes import Axis, Digit


@dataclass(frozen=True, slots=True)
class Coverage:
    """``missing`` are the digits no one has, slowest first; ``clash`` two that overlap or belong to different splits.

    With a clash nothing is said about what is missing.
    """

    missing: tuple[Digit, ...] = ()
    clash: tuple[Digit, Digit] | None = None


def coverage(axis: Axis, digits: Iterable[Digit]) -> Coverage:
    """Compare the digits of one axis with the axis: the mixed-radix chain must be complete and without overlap.

    Of an axis in steps the quotient is covered. Digits of size one say nothing and count nothing, but that an axis of
    extent one must occur.
    """
    given = list(digits)
    if not given:
        return Coverage(missing=(Digit(axis.name, axis.step, axis.count),))
    if axis.extent is None:  # never split
        return Coverage(clash=(given[0], given[1])) if len(given) > 1 else Coverage()
    missing = []
    reach, below = axis.step, given[0]
    for digit in sorted((d for d in given if d.size != 1), key=lambda d: (d.div, d.size)):
        gap, rest = divmod(digit.div, reach)
        if rest or gap == 0:
            return Coverage(clash=(below, digit))
        if gap > 1:
            missing.append(Digit(axis.name, reach, gap))
        reach, below = digit.div * digit.size, digit
    if reach < axis.reach:
        missing.append(Digit(axis.name, reach, axis.reach // reach))
    return Coverage(missing=tuple(reversed(missing)))
