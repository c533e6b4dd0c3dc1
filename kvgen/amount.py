"""Counts that depend on what only the launch knows: ``16384 * num_blocks + 4``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Amount:
    """A sum of products of named unknowns; ``terms`` is sorted and without zeros, so equal amounts are equal values."""

    terms: tuple[tuple[tuple[str, ...], Fraction], ...] = ()

    @staticmethod
    def of(value: int | Fraction | str | Amount) -> Amount:
        if isinstance(value, Amount):
            return value
        return _amount({(value,): Fraction(1)} if isinstance(value, str) else {(): Fraction(value)})

    def __add__(self, other: int | Amount) -> Amount:
        total = dict(self.terms)
        for names, factor in Amount.of(other).terms:
            total[names] = total.get(names, Fraction(0)) + factor
        return _amount(total)

    def __mul__(self, other: int | Fraction | str | Amount) -> Amount:
        factors, total = Amount.of(other).terms, {}
        for left, a in self.terms:
            for right, b in factors:
                names = tuple(sorted(left + right))
                total[names] = total.get(names, Fraction(0)) + a * b
        return _amount(total)

    def per(self, other: int | str) -> Amount:
        """This amount divided by a number or by an unknown, which is ``1/unknown`` in terms that do not contain it."""
        if not isinstance(other, str):
            return self * Fraction(1, other)
        total = {}
        for names, factor in self.terms:
            rest = list(names)
            if other in rest:
                rest.remove(other)
            else:
                rest.append(f"1/{other}")
            total[tuple(sorted(rest))] = factor
        return _amount(total)

    def at(self, values: Mapping[str, int]) -> Amount:
        """This amount with some of its unknowns known."""
        total = Amount()
        for names, factor in self.terms:
            term = Amount.of(factor)
            for name in names:
                known = values.get(name.removeprefix("1/"))
                term *= name if known is None else Fraction(1, known) if name.startswith("1/") else known
            total += term
        return total

    @property
    def value(self) -> Fraction | int | None:
        """The number, or None if something is unknown."""
        if any(names for names, _ in self.terms):
            return None
        number = self.terms[0][1] if self.terms else Fraction(0)
        return int(number) if number.denominator == 1 else number

    @property
    def plain(self) -> int | str:
        """What JSON holds: the number if it is whole and known, else the text."""
        return self.value if isinstance(self.value, int) else str(self)

    def __str__(self) -> str:
        return " + ".join(_term_text(*term) for term in reversed(self.terms)).replace("+ -", "- ") or "0"


def _amount(total: Mapping[tuple[str, ...], Fraction]) -> Amount:
    return Amount(tuple(sorted((names, factor) for names, factor in total.items() if factor)))


def _term_text(names: tuple[str, ...], factor: Fraction) -> str:
    number = str(factor.numerator) if factor.denominator == 1 else f"{float(factor):.2f}"
    if not names:
        return number
    return " * ".join(names if factor == 1 else (number, *names))
