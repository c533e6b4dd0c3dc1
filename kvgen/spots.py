"""Where values lie in bytes, on tensors with the smallest strides: what two layouts are compared by.

A spot is one place of one leaf: an offset and a stride in bytes for every digit of its axes. What only the launch knows
stays a name in these amounts. Neither tensor dimensions nor how an order was spelled can be told from a spot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvgen import sizes
from kvgen.amount import Amount
from kvgen.axes import Digit
from kvgen.layout import Buffer, Holds, Layout, Pad
from kvgen.lower import sites
from kvgen.plan import Step


@dataclass(frozen=True, slots=True)
class Term:
    """What a digit adds to an address: its value times ``stride`` bytes.

    ``text`` is that stride as the layout has it: ``stride(1)``, ``2 * stride(0)``, or the constant.
    """

    digit: Digit
    stride: Amount
    text: str


@dataclass(frozen=True, slots=True)
class Spot:
    """One place of a leaf in a buffer; of filled padding ``leaf`` is empty and ``fill`` the byte it is written with.

    ``nbytes`` are those of a value, or of codes that share bytes as the digit ``pack`` says. ``base`` is the offset as
    the layout has it, where it is not constant.
    """

    leaf: str
    buffer: str
    offset: Amount
    base: str
    nbytes: int
    terms: tuple[Term, ...]
    pack: Digit | None = None
    fill: int | None = None

    def along(self, axis: str) -> tuple[Term, ...]:
        return tuple(term for term in self.terms if term.digit.axis == axis)


def spots(layout: Layout, buffer: Buffer) -> tuple[Spot, ...]:
    """Every place of every leaf of a buffer, and padding that is filled, in storage order."""
    strides = sizes.place_strides(layout, buffer.place)
    found = []
    for site in sites(layout, buffer):
        content = site.content
        if isinstance(content, Pad) and content.fill is None:
            continue
        pair = [step for step in site.steps if step.digit.axis == "kv"]
        terms = tuple(_term(step, strides) for step in site.steps if step.digit.axis != "kv")
        held = isinstance(content, Holds)
        # Padding that lies once for each of a pair is two spots.
        leaves = content.leaves if held else ("",) * (2 if pair else 1)
        for index, leaf in enumerate(leaves):
            second = [_term(step, strides) for step in pair if index]
            offset = sum((term.stride for term in second), Amount.of(site.offset))
            texts = [term.text for term in second] + ([str(site.offset)] if site.offset else [])
            nbytes = content.itemsize if held else content.size
            spot = Spot(leaf, buffer.name, offset, " + ".join(texts), nbytes, terms)
            found.append(replace(spot, pack=content.pack) if held else replace(spot, fill=content.fill))
    return tuple(found)


def all_spots(layout: Layout) -> tuple[Spot, ...]:
    return tuple(spot for buffer in layout.buffers for spot in spots(layout, buffer))


def _term(step: Step, strides: list[Amount]) -> Term:
    if step.dim is None:
        return Term(step.digit, Amount.of(step.factor), str(step.factor))
    times = f"{step.factor} * " if step.factor != 1 else ""
    return Term(step.digit, strides[step.dim] * step.factor, f"{times}stride({step.dim})")


def same_bytes(first: Layout, second: Layout) -> bool:
    """Whether every value lies at the same byte of some buffer of either, whatever buffers are called.

    Streams, encodings and block sizes must agree too. Buffers are taken with their smallest strides.
    """
    if (first.block_size, first.layers, first.streams) != (second.block_size, second.layers, second.streams):
        return False
    return sorted(map(repr, _maps(first))) == sorted(map(repr, _maps(second)))


def _maps(layout: Layout) -> list[list]:
    """For each buffer what lies at which byte, in one spelling."""
    found = []
    for buffer in layout.buffers:
        keys = [
            (spot.leaf, str(spot.offset), spot.nbytes, spot.pack, spot.fill, _joined(spot.terms))
            for spot in spots(layout, buffer)
        ]
        found.append(sorted(map(repr, keys)))
    return found


def _joined(terms: tuple[Term, ...]) -> list[tuple[str, int, int | None, str]]:
    """The terms by axis and radix, neighbours that go on from each other as one."""
    result: list[Term] = []
    for term in sorted(terms, key=lambda term: (term.digit.axis, term.digit.div)):
        last = result[-1] if result else None
        if last and _follows(last, term):
            size = None if term.digit.size is None else last.digit.size * term.digit.size
            result[-1] = replace(last, digit=replace(last.digit, size=size))
        else:
            result.append(term)
    return [(term.digit.axis, term.digit.div, term.digit.size, str(term.stride)) for term in result]


def _follows(low: Term, high: Term) -> bool:
    a, b = low.digit, high.digit
    return a.axis == b.axis and a.size is not None and b.div == a.div * a.size and high.stride == low.stride * a.size
