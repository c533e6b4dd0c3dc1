"""One correction of a quotient is enough for codes: proved over all pairs of float32 numbers, by those that come near.

A quotient in kernels is ``q + r * y`` rounded once, where y is the rounded 1 / d, q the rounded x * y, and x - d * q,
which is r, exact. It is x / d but for a part in 2**47. Codes depend on which side of numbers of few bits the rounded
quotient lies. For it to come out on the wrong one x / d must be that near to the middle between such a number and its
neighbour in float32, and there are few such pairs.
"""

from collections.abc import Iterator

BITS = 12
"""Of the numbers that codes or scales are told apart by: float16 has 11 itself, and one more half way."""

NEAR = 10
"""How far x * 2**k is from d times a middle, as whole numbers: of 50 bits, so that 2**-47 of it is 8 at the most."""


def rounded(number: int, shift: int) -> tuple[int, int]:
    """number / 2**shift to the nearest of 24 bits, ties to even: a mantissa and an exponent, the same for the same."""
    sign, number = (-1 if number < 0 else 1), abs(number)
    extra = number.bit_length() - 24
    if extra > 0:
        mantissa, rest, half = number >> extra, number & (1 << extra) - 1, 1 << extra - 1
        number, shift = mantissa + (rest > half or (rest == half and mantissa & 1)), shift - extra
    zeros = (number & -number).bit_length() - 1 if number else shift
    return sign * (number >> zeros), zeros - shift


def ratio(x: int, d: int) -> tuple[int, int]:
    """x / d, rounded once."""
    whole, rest = divmod(x << 80, d)
    return rounded(2 * whole + (rest > 0), 81)


def corrected(x: int, d: int) -> tuple[int, int]:
    """x / d of mantissas, as kernels work it out."""

    def at(number: tuple[int, int], point: int) -> int:
        return number[0] << number[1] + point

    y = ratio(1, d)
    q = rounded(x * at(y, 200), 200)
    r = rounded((x << 200) - d * at(q, 200), 200)
    return rounded((at(q, 200) << 200) + at(r, 200) * at(y, 200), 400)


def near_misses(bits: int) -> Iterator[tuple[int, int]]:
    """Mantissas x and d of 24 bits with x / d near a middle beside a number of so many bits."""
    for odd in range(1, 1 << bits, 2):
        number = odd << 24 - odd.bit_length()
        for middle in (2 * number + 1, 2 * number - 1 if odd > 1 else 4 * number - 1):
            half = (middle + 1) // 2  # of 1, modulo the middle
            for k in range(22, 28):
                step = pow(half, k, middle)
                for distance in (*range(-NEAR, 0), *range(1, NEAR + 1)):
                    x = distance * step % middle
                    d, rest = divmod((x << k) - distance, middle)
                    if not rest and x >> 23 == 1 and d >> 23 == 1:
                        yield x, d


def test_one_correction_is_enough() -> None:
    pairs = list(near_misses(BITS))
    assert len(pairs) > 20000
    assert [pair for pair in pairs if corrected(*pair) != ratio(*pair)] == []


def test_none_is_not() -> None:
    """The pairs tell: a product with the reciprocal alone is on the wrong side of some."""
    pairs = list(near_misses(5))
    wrong = [(x, d) for x, d in pairs if rounded(x * ratio(1, d)[0] << 300 + ratio(1, d)[1], 300) != ratio(x, d)]
    assert len(wrong) > 100
