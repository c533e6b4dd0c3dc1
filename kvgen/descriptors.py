"""The runs of bytes that move tokens from one layout to another: what an RDMA or copy engine is given.

The unit is a chunk of as many tokens as the least common multiple of both block sizes, so whole blocks on both sides.
Axes are cut where either side cuts them; what repeats without a gap on both sides is one run. Strides are the smallest
ones of either layout; where a caller's are larger, runs end at that dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvgen.amount import Amount
from kvgen.axes import Digit
from kvgen.layout import Layout
from kvgen.spots import Spot, Term, all_spots
from kvgen.transfer import same_encoding


@dataclass(frozen=True, slots=True)
class Step:
    """What one index of a loop adds on one side: ``stride`` bytes each time, or ``offsets`` where it is not even.

    ``blocks`` says which block of the chunk every index is in; empty where the loop stays in one. ``text`` is what is
    added to an address, within a block.
    """

    stride: Amount | None
    offsets: tuple[Amount, ...] = ()
    blocks: tuple[int, ...] = ()
    text: str = ""


MOST_STEPS = 1 << 16
"""Entries of an uneven loop, at the most."""


@dataclass(frozen=True, slots=True)
class Loop:
    """An index that runs are repeated over, ``part // div`` of it; ``count`` is None where the launch knows it.

    ``part`` is the axis, or its remainder where a slower loop counts the rest: ``token``, ``token%16``.
    """

    part: str
    div: int
    count: int | None
    source: Step
    destination: Step

    @property
    def index(self) -> str:
        return self.part if self.div == 1 else f"{self.part}//{self.div}"


@dataclass(frozen=True, slots=True)
class End:
    """Where runs of a move begin on one side, loops aside: a tensor, an offset in bytes, and that as text."""

    tensor: str
    offset: Amount
    text: str
    block: Amount  # bytes from block to block
    block_text: str  # where a token's block begins
    layer: Amount  # bytes from layer to layer, where the caller chooses one and the other side has none


@dataclass(frozen=True, slots=True)
class Move:
    """Runs of ``nbytes``, one for each combination of ``loops``, slowest first; ``fields`` are the leaves in it."""

    fields: tuple[str, ...]
    nbytes: int
    source: End
    destination: End
    loops: tuple[Loop, ...]

    @property
    def count(self) -> Amount:
        """Runs of a chunk."""
        total = Amount.of(1)
        for loop in self.loops:
            total *= Amount.of("num_layers" if loop.count is None else loop.count)
        return total

    @property
    def addresses(self) -> tuple[str, str]:
        """Where a run starts on either side, in bytes: names are the tensor, its strides, blocks and loops."""
        return _address(self, self.source, "source"), _address(self, self.destination, "destination")


def _address(move: Move, end: End, side: str) -> str:
    texts = [end.tensor, end.block_text, *filter(None, [end.text])]
    for loop in move.loops:
        step: Step = getattr(loop, side)
        texts += [step.text] if step.text else []
    return " + ".join(texts)


@dataclass(frozen=True, slots=True)
class Heads:
    """``count`` heads from ``source`` on of one rank become those from ``destination`` on of another."""

    source_rank: int = 0
    destination_rank: int = 0
    source: int = 0
    destination: int = 0
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Everything that one chunk takes between two ranks; ``problems`` are what bytes alone cannot do."""

    tokens: int
    source_blocks: int
    destination_blocks: int
    heads: Heads
    moves: tuple[Move, ...]
    fills: tuple[tuple[int, Move], ...]  # bytes, and the runs of the destination that are written with them
    problems: tuple[str, ...]


def shards(heads: int | None, source_ranks: int, destination_ranks: int) -> list[Heads]:
    """Which heads go from which rank to which. Ranks that hold the same heads send in turn.

    ``heads`` are those of the model, None for streams without. A rank has heads / ranks of them, or one that several
    ranks share. ValueError where they cannot be dealt evenly.
    """
    if heads is None:
        return [Heads(rank % source_ranks, rank) for rank in range(destination_ranks)]
    ours, theirs = heads_of_rank(heads, source_ranks), heads_of_rank(heads, destination_ranks)
    found, alike = [], max(1, source_ranks // heads)
    for rank in range(destination_ranks):
        first = rank * heads // destination_ranks
        for start in range(first - first % ours, first + theirs, ours):
            low, high = max(start, first), min(start + ours, first + theirs)
            sender = start * source_ranks // heads + rank % alike
            found.append(Heads(sender, rank, low - start, low - first, high - low))
    return found


def heads_of_rank(heads: int, ranks: int) -> int:
    if heads % ranks and ranks % heads:
        raise ValueError(f"{heads} heads cannot be dealt to {ranks} ranks evenly")
    return max(1, heads // ranks)


def chunk(source: Layout, destination: Layout, heads: Heads = Heads()) -> Chunk:
    """The moves of one chunk between two ranks. Both layouts say what one rank holds, and have constant sizes.

    ValueError where a loop would list more than ``MOST_STEPS`` steps.
    """
    tokens = math.lcm(source.block_size, destination.block_size)
    problems = list(_refusals(source, destination))
    moves: list[Move] = []
    fills: list[tuple[int, Move]] = []
    seen: list[str] = []
    for spot in all_spots(destination) if not problems else ():
        origin = _origin(source, spot, seen.count(spot.leaf))
        seen.append(spot.leaf)
        if origin is None:
            fills.append((spot.fill, _move(destination, destination, spot, spot, tokens, Heads())))
        elif why := _apart(source, destination, origin, spot, heads):
            problems.append(why)
        else:
            moves.append(_move(source, destination, origin, spot, tokens, heads))
    blocks = tokens // source.block_size, tokens // destination.block_size
    found = tuple(_together(moves))
    return Chunk(tokens, *blocks, heads, found, tuple(fills), tuple(dict.fromkeys(problems)))


def _origin(source: Layout, spot: Spot, place: int) -> Spot | None:
    """Where the source has what belongs to a spot: the leaf in as many places as it has, or padding filled alike."""
    if spot.fill is None:
        found = [other for other in all_spots(source) if other.leaf == spot.leaf]
        return found[min(place, len(found) - 1)]
    return next((other for other in all_spots(source) if _padded_alike(other, spot)), None)


def _padded_alike(ours: Spot, theirs: Spot) -> bool:
    axes = [sorted((t.digit.axis, t.digit.div, t.digit.size or 0) for t in spot.terms) for spot in (ours, theirs)]
    return (ours.fill, ours.nbytes, axes[0]) == (theirs.fill, theirs.nbytes, axes[1])


def _refusals(source: Layout, destination: Layout) -> Iterator[str]:
    for stream in source.streams:
        theirs = destination.stream(stream.name)
        if not same_encoding(stream, theirs):
            yield f"{stream.name} is encoded differently: it must be decoded and encoded anew"


def _apart(source: Layout, destination: Layout, origin: Spot, spot: Spot, heads: Heads) -> str | None:
    """Why a leaf's bytes are not those of the other side, however they are cut."""
    if spot.fill is not None:
        return None
    leaf = source.leaf(spot.leaf)
    names = [axis.name for axis in leaf.axes]
    if (origin.pack, origin.nbytes) != (spot.pack, spot.nbytes):
        return f"codes of {spot.leaf} share bytes in another order: a kernel must repack them"
    shared = [axis.step for axis in leaf.axes if axis.name == "slot"]
    sizes = (source.block_size, destination.block_size)
    if (not shared and sizes[0] != sizes[1]) or (shared and any(size % shared[0] for size in sizes)):
        return f"tokens share {spot.leaf}, and blocks of {sizes[0]} and {sizes[1]} tokens do not share it alike"
    layered = [end for layout, end in ((source, origin), (destination, spot)) if layout.layers]
    if len(layered) == 1 and len(layered[0].along("layer")) > 1:
        return f"layers of {spot.leaf} are split, and no one step leads to the next: a kernel must move them"
    whole = all(heads.count in (None, _heads(layout, leaf.stream)) for layout in (source, destination))
    if "head" not in names and not whole and leaf.name != leaf.stream:
        return f"all heads of a rank share {spot.leaf}, and ranks do not have the same heads"
    return None


def _heads(layout: Layout, stream: str) -> int | None:
    return next((axis.extent for axis in layout.stream(stream).axes if axis.name == "head"), None)


def _move(source: Layout, destination: Layout, origin: Spot, spot: Spot, tokens: int, heads: Heads) -> Move:
    """The runs of one leaf, joined as far as strides allow."""
    ends = (_Side(source, origin, tokens, heads.source), _Side(destination, spot, tokens, heads.destination))
    extents = _extents(source, spot) | {"token": tokens}
    if heads.count is not None and "head" in extents:
        extents["head"] = heads.count
    if source.layers and destination.layers:
        extents["layer"] = source.layers.extent or destination.layers.extent
    loops = []
    for axis in ("layer", "token", "head", "bit", "dim"):
        if axis in extents:
            loops += _loops(axis, extents[axis], spot.pack, ends)
    first, second = (side.end(chosen="layer" not in extents) for side in ends)
    return _joined(Move((spot.leaf or "padding",), spot.nbytes, first, second, tuple(loops)))


def _extents(layout: Layout, spot: Spot) -> dict[str, int | None]:
    """Of the axes of a leaf, or of those that padding repeats over; layers and tokens aside."""
    if spot.leaf:
        return {axis.name: axis.reach for axis in layout.leaf(spot.leaf).axes if axis.name not in ("block", "slot")}
    digits = [term.digit for term in spot.terms if term.digit.axis in ("head", "dim")]
    return {digit.axis: max(d.div * d.size for d in digits if d.axis == digit.axis) for digit in digits}


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a move: a spot whose block and slot are read as digits of the token in the chunk."""

    layout: Layout
    spot: Spot
    tokens: int
    head: int

    def along(self, axis: str) -> list[Term]:
        if axis != "token":
            return list(self.spot.along(axis))
        size = self.layout.block_size
        slots = [replace(term, digit=replace(term.digit, axis="token")) for term in self.spot.along("slot")]
        (block,) = self.spot.along("block")
        return [*slots, replace(block, digit=Digit("token", size, self.tokens // size))]

    def cuts(self, axis: str) -> set[int]:
        """Where this side cuts an axis, and where that falls in a shard that begins inside a digit of heads."""
        digits = [term.digit for term in self.along(axis)]
        found = {d.div for d in digits} | {d.div * d.size for d in digits if d.size is not None}
        return found | ({math.gcd(cut, self.head) for cut in found} if axis == "head" and self.head else set())

    def meets(self, axis: str, cut: int) -> bool:
        """Whether every digit is a part of ``cut``, or ``cut`` an even part of it: what indices add is then a sum."""
        base = self.head if axis == "head" else 0
        digits = [term.digit for term in self.along(axis)]
        own = {d.div for d in digits} | {d.div * d.size for d in digits if d.size is not None}
        return all(cut % each == 0 or math.gcd(each, base) % cut == 0 for each in own)

    def step(self, axis: str, part: str, div: int, count: int | None) -> Step:
        """What an index adds that counts ``div`` of ``part`` at a time."""
        index = part if div == 1 else f"{part}//{div}"
        if count is None:
            (term,) = self.along(axis)
            return Step(term.stride, text=f"{index} * {term.text}")
        terms, base, size = self.along(axis), self.head if axis == "head" else 0, self.layout.block_size
        several = axis == "token" and div * count > size
        if not several and (alone := _alone(terms, base, div, count)):
            times = div // alone.digit.div
            return Step(alone.stride * times, text=f"{index} * {_times(times, alone.text)}")
        if count > MOST_STEPS:
            raise ValueError(f"{axis} has {count} steps that are not even, and a plan lists {MOST_STEPS} at the most")
        if axis == "token":
            terms = [term for term in terms if term.digit.div < size]
        start = self._value(terms, base)
        offsets = tuple(
            self._value(terms, base + (i * div % size if several else i * div)) + start * -1 for i in range(count)
        )
        text = _irregular(terms, f"({part} + {base})" if base else part, div, start)
        if several:
            return Step(None, offsets, tuple(i * div // size for i in range(count)), text if div < size else "")
        even = all(offset == offsets[1] * i for i, offset in enumerate(offsets))
        return Step(offsets[1], text=text) if even else Step(None, offsets, text=text)

    def _value(self, terms: Sequence[Term], index: int) -> Amount:
        return sum((term.stride * term.digit.of(index) for term in terms), Amount())

    def end(self, chosen: bool) -> End:
        """Where runs begin; ``chosen``: in a layer that is an index of its own."""
        (block,) = self.spot.along("block")
        offset, texts = self.spot.offset, [self.spot.base] if self.spot.base else []
        layer = Amount()
        for term in self.spot.along("layer") if chosen else ():
            layer = term.stride
            texts.append(f"layer * {term.text}")
        for term in self.spot.along("head"):
            if self.head and term.digit.of(self.head):
                offset += term.stride * term.digit.of(self.head)
                texts.append(_times(term.digit.of(self.head), term.text))
        size = self.layout.block_size
        index = "0" if size == self.tokens else "token" if size == 1 else f"token//{size}"
        block_text = f"blocks[{index}] * {block.text}"
        return End(self.spot.buffer, offset, " + ".join(texts), block.stride, block_text, layer)


def _alone(terms: Sequence[Term], base: int, div: int, count: int) -> Term | None:
    """The one term that changes, evenly, while an index counts ``div`` at a time from ``base`` on; None without one."""
    last = base + div * (count - 1)

    def changes(low: int) -> bool:
        return base // low != last // low

    reach = [(term, term.digit.div, term.digit.div * (term.digit.size or 0)) for term in terms]
    moved = [(term, low, high) for term, low, high in reach if changes(low) and not (high and div % high == 0)]
    if len(moved) != 1 or div % moved[0][1] or (moved[0][2] and changes(moved[0][2])):
        return None
    return moved[0][0]


def _times(count: int, text: str) -> str:
    """A stride taken so many times."""
    factor, _, rest = text.partition(" * ")
    if factor.isdigit():
        return _times(count * int(factor), rest) if rest else str(count * int(factor))
    return text if count == 1 else f"{count} * {text}"


def _whole(amount: Amount) -> int:
    assert isinstance(amount.value, int), amount
    return amount.value


def _irregular(terms: Sequence[Term], name: str, div: int, start: Amount) -> str:
    index = name if div == 1 else f"{name}//{div}*{div}"
    text = " + ".join(f"({index}{_digit(term.digit)}) * {term.text}" for term in terms)
    return text if start == Amount() else f"{text} - ({start})"


def _digit(digit: Digit) -> str:
    return (f"//{digit.div}" if digit.div != 1 else "") + (f"%{digit.size}" if digit.size is not None else "")


def _loops(axis: str, extent: int | None, pack: Digit | None, ends: tuple[_Side, _Side]) -> list[Loop]:
    """An axis cut where either side cuts it, slowest first. Of cuts that do not meet their gcd may."""
    if extent is None:
        return [Loop(axis, 1, None, *(side.step(axis, axis, 1, None) for side in ends))]
    if not any(side.along(axis) for side in ends):
        return []
    cuts = {cut for side in ends for cut in side.cuts(axis)} | {extent}
    for cut in tuple(cuts):
        cuts |= {math.gcd(cut, other) for other in cuts}
    meeting = {cut for cut in cuts if extent % cut == 0 and all(side.meets(axis, cut) for side in ends)}
    cuts = sorted(meeting | {extent})
    found = []
    for low, high in pairwise(cuts):
        packed = pack is not None and axis == pack.axis and (low, high // low) == (pack.div, pack.size)
        if not packed and high != low:
            part, count = axis if high == extent else f"{axis}%{high}", high // low
            found.insert(0, Loop(part, low, count, *(side.step(axis, part, low, count) for side in ends)))
    return found


def _joined(move: Move) -> Move:
    """The move with loops that go on without a gap on both sides taken into its runs."""
    for loop in reversed(move.loops):
        run = Amount.of(move.nbytes)
        if loop.count is not None and loop.source.stride == loop.destination.stride == run:
            left = tuple(other for other in move.loops if other is not loop)
            return _joined(replace(move, nbytes=move.nbytes * loop.count, loops=left))
    return move


def _together(moves: Sequence[Move]) -> list[Move]:
    """Moves of fields that lie behind each other on both sides as one."""
    found: list[Move] = []
    for move in moves:
        last = found[-1] if found else None
        if last is not None and last.loops == move.loops and _behind(last, move):
            found[-1] = replace(last, fields=last.fields + move.fields, nbytes=last.nbytes + move.nbytes)
        else:
            found.append(move)
    joined = [_joined(move) for move in found]
    return joined if joined == list(moves) else _together(joined)


def _behind(first: Move, second: Move) -> bool:
    pairs = ((first.source, second.source), (first.destination, second.destination))
    return all(a.tensor == b.tensor and a.block == b.block and a.offset + first.nbytes == b.offset for a, b in pairs)


def descriptors(
    move: Move,
    source_sizes: Mapping[str, int],
    destination_sizes: Mapping[str, int],
    source_blocks: Sequence[int],
    destination_blocks: Sequence[int],
    layer: int = 0,
) -> Iterator[tuple[int, int, int]]:
    """``(source offset, destination offset, bytes)`` of every run of a chunk, from the first byte of either tensor.

    Sizes are what only the launch knows, ``num_blocks`` and ``num_layers``, of either side; blocks are those of the
    chunk. ``layer`` is the one that is moved, where only one side has several.
    """
    sides = (
        (move.source, source_sizes, source_blocks, "source"),
        (move.destination, destination_sizes, destination_blocks, "destination"),
    )
    lists = [list(_offsets(move, *side, layer)) for side in sides]
    for source, destination in zip(*lists, strict=True):
        yield source, destination, move.nbytes


def _offsets(
    move: Move, end: End, sizes: Mapping[str, int], blocks: Sequence[int], side: str, layer: int
) -> Iterator[int]:
    def known(amount: Amount) -> int:
        return _whole(amount.at(sizes))

    found = [(0, known(end.offset) + layer * known(end.layer))]
    for loop in move.loops:
        step: Step = getattr(loop, side)
        count = sizes["num_layers"] if loop.count is None else loop.count
        each = (
            [known(step.stride) * i for i in range(count)]
            if step.stride is not None
            else [known(o) for o in step.offsets]
        )
        places = step.blocks or (0,) * count
        found = [(b + block, at + offset) for b, at in found for block, offset in zip(places, each, strict=True)]
    for block, offset in found:
        yield blocks[block] * known(end.block) + offset
