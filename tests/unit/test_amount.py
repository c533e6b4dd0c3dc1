"""Counts with unknowns in them."""

from fractions import Fraction

from kvgen.amount import Amount


def test_what_an_unknown_divides() -> None:
    """A term that does not contain it keeps it below, until it is known."""
    amount = Amount.of("slot") * 2048 + 8
    each = amount.per("slot")
    assert str(each) == "8 * 1/slot + 2048"
    assert each.at({"slot": 16}).value == 2048 + Fraction(1, 2)
    assert each.at({"block": 16}) == each
