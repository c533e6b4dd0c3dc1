"""Block tables for the cases: rows of a wider table, with holes, and the tokens they place."""

from __future__ import annotations

from kvgen.harness.bench import Bench
from kvgen.layout import Layout

RANKS = 8
"""Ranks that have cases of their own; of more, the first two, the middle one and the last."""


def ranks(layout: Layout) -> list[tuple[int, str]]:
    """The ranks to run cases for, each with what the cases' names end in; one without a name where nothing is dealt."""
    if layout.slots.shard is None:
        return [(0, "")]
    world = layout.slots.shard.world
    some = range(world) if world <= RANKS else (0, 1, world // 2, world - 1)
    return [(rank, f"_rank{rank}") for rank in some]


class Tables:
    """A block table ``[R, columns]`` int32 whose live entries are distinct blocks of the pool.

    It is a slice of a wider table whose other columns hold live blocks too: reading past a row would find them.
    The last request has a hole (-1) where there are blocks enough for the others. Of the rows of a contiguous cache,
    the last among them, some have no request.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        shard = bench.layout.slots.shard
        self.world, self.interleave = (shard.world, shard.interleave) if shard else (1, 1)
        blocks = bench.shuffle(bench.sizes.blocks)
        self.columns = 1 if bench.layout.contiguous else 2
        self.requests = max(2, -(-len(blocks) // self.columns))
        cells = [*blocks, *[-1] * (self.requests * self.columns)][: self.requests * self.columns]
        if bench.layout.contiguous:
            self.requests = max(2, len(blocks) - 1)
            cells = [max(blocks), *(block for block in blocks if block != max(blocks))][: self.requests]
            cells[-1] = -1
        self.rows = [cells[r * self.columns : (r + 1) * self.columns] for r in range(self.requests)]
        wide = bench.tensor([b for row in self.rows for b in [*row, blocks[0], blocks[-1], 0]], "int32")
        self.table = wide.view(self.requests, self.columns + 3)[:, : self.columns]
        self.virtual = bench.sizes.block_size * self.world
        self.length = self.columns * self.virtual

    def owned(self, rank: int) -> list[int]:
        """Positions inside the table that lie on a rank."""
        turns = range(self.bench.sizes.block_size // self.interleave)
        return [
            column * self.virtual + (turn * self.world + rank) * self.interleave + i
            for column in range(self.columns)
            for turn in turns
            for i in range(self.interleave)
        ]

    def places(self, count: int, rank: int = 0) -> list[tuple[int, int]]:
        """Distinct ``(request, position)``, shuffled, half at page edges; some lie in holes or on other ranks."""
        mine = self.owned(rank)
        n = self.virtual
        edges = [(r, p) for r in range(self.requests) for p in (0, n - 1, n % self.length, self.length - 1)]
        picks = [
            (self.bench.shuffle(self.requests)[0], mine[self.bench.shuffle(len(mine))[0]]) for _ in range(2 * count)
        ]
        chosen = [edges[i] for i in self.bench.shuffle(len(edges))][: count // 2]
        chosen = list(dict.fromkeys([*chosen, *picks]))[:count]
        return [chosen[i] for i in self.bench.shuffle(len(chosen))]

    def dead_places(self) -> list[tuple[int, int]]:
        """Positions past the table or negative, and requests outside it."""
        end = self.length
        return [(0, end), (1, 2**31 - 1), (0, -1), (-1, 0), (self.requests, 0), (2**31 - 1, 1)]

    def last_position(self, request: int, rank: int = 0) -> int:
        """A position near the end of a request: the last one of this rank, or one past the table for request 1."""
        return self.length if request == 1 else self.owned(rank)[-1]
