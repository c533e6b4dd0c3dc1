"""Quotients in kernels have the codes of rounded ones: proved over all pairs of numbers, by those that come near.

A quotient is ``q + r * y`` rounded once, where y is the rounded 1 / d, q the rounded x * y, and x - d * q, which is r,
exact. It is x / d but for a part in 2**47. Where x or d is short, of 11 bits or less, it is ``x * below + x * rest``,
rounded, where ``below`` is the float32 below 1 / d, and ``rest`` what is missing of that, rounded, as is its product:
x / d but for a part in 2**43. Codes depend on which side of numbers of few bits the rounded quotient lies. For it to
come out on the wrong one x / d must be that near to the middle between such a number and its neighbour in float32, and
there are few such pairs.
"""

from collections.abc import Iterator

import torch

BITS = 12
"""Of the numbers that codes or scales are told apart by: float16 has 11 itself, and one more half way."""

NEAR = 10
"""How far x * 2**k is from d times a middle, as whole numbers: of 50 bits, so that 2**-47 of it is 8 at the most."""

NEAR_SHORT = 1 << 7
"""The same for short x: 2**-43 of it."""


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


def multiplied(x: int, d: int, *, above: bool) -> tuple[int, int]:
    """The same in two parts, of a 1 / d that was rounded down, or up where it is ``above``: either may be found."""

    def at(number: tuple[int, int], point: int) -> int:
        return number[0] << number[1] + point

    near = (1 << 47) // d + (above and d & d - 1 > 0)  # counted in 2**-47, it has 24 bits
    below = near - 1
    rest, exponent = rounded(at(rounded((1 << 47) - d * below, 47), 200) * near, 247)
    digits = 24 - rest.bit_length()
    rest, exponent = (rest << digits) + 1, exponent - digits
    part = rounded(x * at((rest, exponent), 300), 300)
    return rounded((x * below << 253) + at(part, 300), 300)


def near_misses(bits: int, near: int = NEAR) -> Iterator[tuple[int, int]]:
    """Mantissas x and d of 24 bits with x / d near a middle beside a number of so many bits."""
    for odd in range(1, 1 << bits, 2):
        number = odd << 24 - odd.bit_length()
        for middle in (2 * number + 1, 2 * number - 1 if odd > 1 else 4 * number - 1):
            half = (middle + 1) // 2  # of 1, modulo the middle
            for k in range(22, 28):
                step = pow(half, k, middle)
                for distance in (*range(-near, 0), *range(1, near + 1)):
                    x = distance * step % middle
                    d, rest = divmod((x << k) - distance, middle)
                    if not rest and x >> 23 == 1 and d >> 23 == 1:
                        yield x, d


def test_one_correction_is_enough() -> None:
    pairs = list(near_misses(BITS))
    assert len(pairs) > 20000
    assert [pair for pair in pairs if corrected(*pair) != ratio(*pair)] == []


def test_two_parts_are_enough_for_short_numbers() -> None:
    pairs = [(x, d) for x, d in near_misses(BITS, NEAR_SHORT) if x % (1 << 13) == 0]
    assert len(pairs) > 30
    for above in (False, True):
        assert [pair for pair in pairs if multiplied(*pair, above=above) != ratio(*pair)] == []


def test_two_parts_are_enough_over_short_numbers() -> None:
    """No quotient by a number of 11 bits comes near a middle; those that are of few bits come out as they are."""
    assert not [pair for pair in near_misses(BITS, NEAR_SHORT) if pair[1] % (1 << 13) == 0]
    exact = [(odd * d, d << 13) for d in range(1 << 10, 1 << 11) for odd in range(1, 256, 18)]
    exact = [(x << 24 - x.bit_length(), d) for x, d in exact]
    for above in (False, True):
        assert [pair for pair in exact if multiplied(*pair, above=above) != ratio(*pair)] == []


def test_none_is_not() -> None:
    """The pairs tell: a product with the reciprocal alone is on the wrong side of some."""
    pairs = list(near_misses(5))
    wrong = [(x, d) for x, d in pairs if rounded(x * ratio(1, d)[0] << 300 + ratio(1, d)[1], 300) != ratio(x, d)]
    assert len(wrong) > 100


def test_a_half_is_no_tie_once_it_is_lengthened() -> None:
    """Ties away from zero: the next number less a 2**24th, rounded to even, over what lies about halves, and others."""
    halves = torch.arange(128, dtype=torch.float32) + 0.5
    bits = (halves.view(torch.int32)[:, None] + torch.arange(-1024, 1025)).flatten()
    x = torch.cat([bits.to(torch.int32).view(torch.float32), torch.arange(4096) / 32, torch.rand(100000) * 128])
    longer = (x.view(torch.int32) + 1).view(torch.float32).double() * (1 - 2**-24)  # exact
    assert torch.equal(torch.round(longer), torch.floor(x.double() + 0.5))
