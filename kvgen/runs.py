"""Runs of bytes: what a page, or a part of one, falls into where its strides are known. Integers alone, no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable

WIDEST = 16  # bytes of the widest access
TILE_WORDS = 512  # words of 8 bytes or less that a program moves: 2 warps of four 16-byte accesses
SHORTEST = 64  # bytes of a row of a tile at the least, where the run has as many


def joined(nbytes: int, dims: Iterable[tuple[int, int]]) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of the longest run, and the dims ``(size, stride in bytes)`` that runs repeat over, fastest first.

    What repeats without a gap is taken into the run, whatever its order; other neighbours are joined too.
    """
    outer: list[tuple[int, int]] = []
    for stride, size in sorted((stride, size) for size, stride in dims if size != 1):
        if not outer and stride == nbytes:
            nbytes *= size
        elif outer and math.prod(outer[-1]) == stride:
            outer[-1] = outer[-1][0] * size, outer[-1][1]
        else:
            outer.append((size, stride))
    return nbytes, outer


def word(*counts: int) -> int:
    """The widest access in bytes, 16 at most, that all of these addresses, strides and lengths are multiples of."""
    return math.gcd(WIDEST, *counts)


def tile(run: int, width: int) -> tuple[int, int]:
    """Rows and columns of a tile over runs of ``run`` pieces of ``width`` bytes: few lanes idle, few rows short."""
    pieces = columns = TILE_WORDS // (1 + width // 16)
    while (columns * width > SHORTEST or columns >= 2 * run) and -(-run // columns) * columns * 8 > run * 9:
        columns //= 2
    return pieces // columns, columns
