"""Counts that depend on what only the launch knows: ``16384 * num_blocks + 4``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

Powers = tuple[tuple[str, int], ...]
"""What a term is a product of: unknowns, sorted, each with its power, which is below 0 if it divides."""


@dataclass(frozen=True, slots=True)
class Amount:
    """A sum of products of named unknowns; ``terms`` is sorted and without zeros, so equal amounts are equal values."""

    terms: tuple[tuple[Powers, Fraction], ...] = ()

    @staticmethod
    def of(value: int | Fraction | str | Amount) -> Amount:
        if isinstance(value, Amount):
            return value
        return Amount._power(value, 1) if isinstance(value, str) else _amount({(): Fraction(value)})

    @staticmethod
    def _power(unknown: str, power: int) -> Amount:
        return _amount({((unknown, power),): Fraction(1)})

    def __add__(self, other: int | Amount) -> Amount:
        total = dict(self.terms)
        for powers, factor in Amount.of(other).terms:
            total[powers] = total.get(powers, Fraction(0)) + factor
        return _amount(total)

    def __mul__(self, other: int | Fraction | str | Amount) -> Amount:
        factors, total = Amount.of(other).terms, {}
        for left, a in self.terms:
            for right, b in factors:
                powers = dict(left)
                for name, power in right:
                    powers[name] = powers.get(name, 0) + power
                key = tuple(sorted((name, power) for name, power in powers.items() if power))
                total[key] = total.get(key, Fraction(0)) + a * b
        return _amount(total)

    def per(self, other: int | str) -> Amount:
        """This amount divided by a number or by an unknown."""
        return self * (Amount._power(other, -1) if isinstance(other, str) else Fraction(1, other))

    def at(self, values: Mapping[str, int]) -> Amount:
        """This amount with some of its unknowns known."""
        total = Amount()
        for powers, factor in self.terms:
            term = Amount.of(factor)
            for name, power in powers:
                term *= Fraction(values[name]) ** power if name in values else Amount._power(name, power)
            total += term
        return total

    @property
    def value(self) -> Fraction | int | None:
        """The number, or None if something is unknown."""
        if any(powers for powers, _ in self.terms):
            return None
        number = self.terms[0][1] if self.terms else Fraction(0)
        return int(number) if number.denominator == 1 else number

    @property
    def plain(self) -> int | str:
        """What JSON holds: the number if it is whole and known, else the text."""
        return self.value if isinstance(self.value, int) else str(self)

    def __str__(self) -> str:
        return " + ".join(_term_text(*term) for term in reversed(self.terms)).replace("+ -", "- ") or "0"


def _amount(total: Mapping[Powers, Fraction]) -> Amount:
    return Amount(tuple(sorted((powers, factor) for powers, factor in total.items() if factor)))


def _term_text(powers: Powers, factor: Fraction) -> str:
    number = str(factor.numerator) if factor.denominator == 1 else f"{float(factor):.2f}"
    names = [name if power > 0 else f"1/{name}" for name, power in powers for _ in range(abs(power))]
    return " * ".join(names if names and factor == 1 else (number, *names))
