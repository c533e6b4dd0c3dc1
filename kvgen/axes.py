"""Axes and their digits: the mixed-radix arithmetic every address is made of.

An axis (``block``, ``slot``, ``head``, ``dim``, ``kv``, ``layer``) is a chain of digits. Digit
``(axis // div) % size`` is one of them; the digits of one axis tile it when, sorted by ``div``, each
``div`` is the product of the sizes below it and the topmost reaches the axis's extent.

An extent or a size of ``None`` is not known before launch: it belongs to a dynamic axis, or to
``block``, whose extent is the pool's and never the layout's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """A named logical axis. ``extent`` is None when only the launch knows it.

    ``step`` above 1 is an axis that is only told apart in groups of so many, ``dim//128``: its digits tile the
    quotient, the lowest has ``div == step``, and the last group may be short.
    """

    name: str
    extent: int | None
    step: int = 1

    @property
    def count(self) -> int | None:
        """How many are told apart, a short last group included."""
        return None if self.extent is None else -(-self.extent // self.step)

    @property
    def reach(self) -> int | None:
        """The extent, rounded up to whole groups: what the digits reach."""
        return None if self.extent is None else -(-self.extent // self.step) * self.step


@dataclass(frozen=True, slots=True)
class Digit:
    """``(axis // div) % size``; a ``size`` of None is all that is left of an axis of unknown extent."""

    axis: str
    div: int
    size: int | None

    def of(self, index: int) -> int:
        """The value of this digit when the axis stands at ``index``."""
        quotient = index // self.div
        return quotient if self.size is None else quotient % self.size

    def term(self, extent: int | None) -> str:
        """The spelling of this digit in an order: ``dim``, ``dim//8``, ``dim%8``, ``slot//32%4``."""
        text = self.axis
        if self.div != 1:
            text += f"//{self.div}"
        topmost = self.size is None or (extent is not None and self.div * self.size == extent)
        return text if topmost else f"{text}%{self.size}"


def product(sizes: Iterable[int | None]) -> int | None:
    """The product of sizes, None as soon as one of them is unknown."""
    result = 1
    for size in sizes:
        if size is None:
            return None
        result *= size
    return result


def padded_side(extent: int | None) -> int | None:
    """The side of a tile that has an axis whole: a power of two. None where only the launch knows."""
    return None if extent is None else 1 << (extent - 1).bit_length()
