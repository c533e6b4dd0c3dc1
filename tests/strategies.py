"""Layouts drawn at random, as YAML text, with a note of what is in each."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from kvgen.quant import MODES
from tests.encodings import ZEROS, code_options, per_words, scale_options

FACTORS = (2, 3, 4, 5, 6, 7)


@dataclass(frozen=True)
class Shape:
    """What a draw is made of; every shape gives layouts that no other can."""

    streams: int
    buffers: int
    layers: bool
    encoded: bool = False

    def __str__(self) -> str:
        return f"{self.streams}s{self.buffers}b{'L' if self.layers else ''}{'E' if self.encoded else ''}"


SHAPES = [Shape(s, b, layers) for s, b in ((1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)) for layers in (False, True)]
ENCODED = [Shape(s, b, layers, True) for s, b in ((1, 1), (1, 2), (2, 1), (2, 2)) for layers in (False, True)]
"""Shapes of layouts whose streams are mostly encoded; scales and zeros lie in any of their buffers."""


@dataclass(frozen=True)
class Drawn:
    """A layout's text and what is in it: feature → how often (or how deep)."""

    text: str
    features: dict[str, int]


@dataclass(frozen=True)
class Piece:
    """One digit of an axis, as a term spells it. ``size`` 0 is unknown before launch."""

    axis: str
    term: str
    size: int
    extent: int


@dataclass
class Item:
    """What a place holds: one leaf, or two that share it over ``kv``; and the digits not yet placed."""

    holds: tuple[str, ...]
    pieces: list[Piece]


@dataclass
class _Drawing:
    draw: Any
    words: dict[str, str]
    open: frozenset[str]
    """Axes whose extent the launch alone knows: each has a dimension of its own."""
    token_pieces: int = 1
    """Digits of block and slot together: a record under all of them is one token's."""
    features: dict[str, int] = field(default_factory=dict)

    def note(self, feature: str, count: int = 1) -> None:
        self.features[feature] = self.features.get(feature, 0) + count

    def chance(self, percent: int) -> bool:
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def shuffled(self, values: Sequence[Any]) -> list[Any]:
        return list(self.draw(st.permutations(values)))

    def pick(self, values: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(values))

    def factors(self, most: int, least: int = 1) -> list[int]:
        """One to four factors whose product stays within ``most``."""
        chosen: list[int] = []
        for _ in range(self.draw(st.integers(least, 4))):
            fitting = [f for f in FACTORS if f * math.prod(chosen) <= most]
            if fitting:
                chosen.append(self.pick(fitting))
        return chosen or [1]

    def pieces(self, axis: str, factors: list[int], split: bool) -> list[Piece]:
        """The digits of an axis: as many as there are factors, or one."""
        word, extent = self.words.get(axis, axis), math.prod(factors)
        if axis in self.open:
            self.note(f"dynamic {axis}")
            return [Piece(axis, word, 0, 0)]
        if not split or len(factors) == 1:
            return [Piece(axis, word, extent, extent)]
        self.note(f"{axis} splits", len(factors) - 1)
        found, div = [], extent
        for i, size in enumerate(factors):
            div //= size
            term = word + (f"//{div}" if div > 1 else "") + (f"%{size}" if i else "")
            found.append(Piece(axis, term, size, extent))
        return found

    def order(self, pieces: list[Piece]) -> str:
        """The pieces in any order, some sharing a dimension, with dimensions of size one between."""
        groups: list[list[str]] = []
        joinable = False
        for piece in self.shuffled(pieces):
            if joinable and piece.size and self.chance(15):
                groups[-1].append(piece.term)
            else:
                groups.append([piece.term])
                joinable = piece.axis not in self.open
        if self.chance(10):
            groups.insert(self.draw(st.integers(0, len(groups))), ["1"])
            self.note("dimension of size one")
        if any(len(g) > 1 for g in groups):
            self.note("parentheses")
        return " ".join(g[0] if len(g) == 1 else f"({' '.join(g)})" for g in groups)

    def place(self, items: list[Item], depth: int, slots_above: int) -> dict[str, Any] | str:
        """A place for the items: a leaf, or a record over some of the digits they have in common."""
        root = depth == 0
        if len(items) == 1 and self.chance(60 if root else 75):
            return self.leaf(items[0], root)
        common = [p for p in items[0].pieces if all(p in item.pieces for item in items)]
        must = [p for p in common if not p.size]
        free = [p for p in common if p.size]
        chosen = must + [p for p in free if self.chance(70)]
        for item in items:
            item.pieces = [p for p in item.pieces if p not in chosen]
        place: dict[str, Any] = {}
        if chosen or root:
            place["order"] = self.order(chosen)
        slots_above += sum(p.axis in ("slot", "block") for p in chosen)
        place["fields"] = self.fields(items, depth, slots_above)
        self.note("records")
        self.features["record depth"] = max(self.features.get("record depth", 0), depth + 1)
        if self.chance(25):
            place["align"] = self.pick((2, 4, 8, 12, 16, 24))
            self.note("record align")
        if any(p.axis == "kv" for p in chosen):
            self.note("kv above a record")
        if any(p.axis == "layer" for p in chosen):
            self.note("layer above a record")
        return place

    def fields(self, items: list[Item], depth: int, slots_above: int) -> list[Any]:
        fields: list[Any] = []
        pending = self.shuffled(items)
        while pending:
            if self.chance(35):
                fields.append(self.pad(slots_above))
            take = self.draw(st.integers(1, len(pending))) if depth < 2 else 1
            if depth >= 2 or (len(pending) == take and len(items) == take and take > 1):
                take = 1
            group, pending = pending[:take], pending[take:]
            fields.append(self.place(group, depth + 1, slots_above) if depth < 2 else self.leaf(group[0], False))
        if self.chance(35):
            fields.append(self.pad(slots_above))
        return fields

    def pad(self, slots_above: int) -> dict[str, int]:
        """Padding; with a fill only where the record is one token's."""
        pad = {"pad": self.pick((1, 2, 3, 4, 6, 8, 10, 16))}
        self.note("pad")
        if slots_above == self.token_pieces and self.chance(50):
            pad["fill"] = self.pick((0, 1, 0x5A, 0xFF))
            self.note("pad with fill")
        return pad

    def leaf(self, item: Item, root: bool) -> dict[str, Any] | str:
        pair = len(item.holds) == 2
        if pair:
            self.note("kv pair")
        if any(p.axis == "layer" for p in item.pieces):
            self.note("layer at a leaf")
        name = list(item.holds) if pair else item.holds[0]
        whole = [p for p in item.pieces if p.size > 1 and p.axis != "layer"]
        if not root and not pair and len(item.pieces) == len(whole) == 1 and self.chance(60):
            self.note("leaf without order")
            return item.holds[0]
        if not root and not item.pieces:  # a scale that has all it varies over above it
            return {"holds": name}
        order = self.order(item.pieces)
        place: dict[str, Any] = {"holds": name, "order": order}
        if not root and not pair and self.chance(40):
            self.note("short leaf")
            place = {item.holds[0]: order}
        if not root and self.chance(25):
            place["align"] = self.pick((2, 4, 8, 16))
            self.note("leaf align")
        return place


@st.composite
def layouts(draw, shape: Shape) -> Drawn:
    """A layout of the given shape: its YAML and its features."""
    contiguous = draw(st.integers(0, 9)) == 9
    words = {"block": "request", "slot": "position"} if contiguous else {}
    like = draw(st.integers(0, 9)) >= 4  # all streams alike, so that pairs are possible
    candidates = ["layer", "slot", *(["head", "dim"] if like else [])]
    unknown = [axis for axis in candidates if draw(st.integers(0, 9)) == 9]
    d = _Drawing(draw, words, frozenset(unknown))
    split = {axis: d.chance(50) for axis in ("slot", "head", "dim", "layer")}
    slot, head = d.factors(30), d.factors(8)
    layer = d.factors(4) if shape.layers else []
    names = d.shuffled(["key", "value", "extra"])[: shape.streams]
    if shape.streams == 2 and d.chance(70):
        names = ["key", "value"]
    types = d.pick((None, None, None, ["bfloat16"], ["float16"], ["float32"], *[["uint8"]] * (not shape.encoded)))
    same_dim = d.factors(42)
    streams: dict[str, dict[str, Any]] = {}
    items: list[Item] = []
    token = d.pieces("slot", slot, split["slot"])
    block = Piece("block", words.get("block", "block"), 0, 0)
    d.token_pieces = len(token) + 1
    layers = d.pieces("layer", layer, split["layer"]) if layer else []
    for name in names:
        dim = same_dim if like else d.factors(42)
        own: dict[str, Any] = {} if like else {"dim": math.prod(dim)}
        pieces = [block, *token, *layers]
        if like or not d.chance(25):
            pieces += d.pieces("head", head, split["head"])
        else:
            own["head"] = "none"
            d.note("headless stream")
        pieces += d.pieces("dim", dim, split["dim"] if like else d.chance(50))
        kind = types if like else d.pick((None, None, ["bfloat16"], ["float16"], ["float32"]))
        if kind:
            own["dtype"] = kind
        streams[name] = own
        items.append(Item((name,), pieces))
    if len({s.get("dim") for s in streams.values()}) > 1:
        d.note("dims differ")
    params = _encode(d, streams, items, like) if shape.encoded else []
    if like and shape.streams >= 2 and shape.streams > shape.buffers and d.chance(60):
        first, second, *rest = items
        items = [_paired(first, second), *rest]
        if shape.encoded:
            half = len(params) // 2
            params = [_paired(one, other) for one, other in zip(params[:half], params[half:], strict=True)]
    items = d.shuffled([*items, *params]) if params else items
    buffers = _buffers(d, items, min(shape.buffers, len(items)))
    slots: dict[str, Any] = {}
    if d.chance(20):
        slots["dtype"] = "int32"
    if d.chance(20):
        slots["skip"] = d.pick((0, 3))
        d.note("skip")
    if d.chance(15):
        slots["remap"] = "slot_table"
        d.note("remap")
    if d.chance(15):
        interleave = d.pick([n for n in (1, 2, 3) if n == 1 or ("slot" not in unknown and math.prod(slot) % n == 0)])
        slots["shard"] = {"world": d.pick((2, 3)), "interleave": interleave}
        d.note("shard")
    d.note(f"{shape.streams} streams in {shape.buffers} buffers")
    for flag, label in ((contiguous, "request and position"), (shape.layers, "layer")):
        if flag:
            d.note(label)
    axes = {"head": math.prod(head), "dim": math.prod(same_dim)} | ({"layer": math.prod(layer)} if layer else {})
    axes |= {axis: "dynamic" for axis in unknown if axis in axes}
    size = "dynamic" if "slot" in unknown else math.prod(slot)
    lines = ["name: drawn", f"axes: {json.dumps(axes)}", f"block_size: {size}"]
    lines += ["streams:", *(f"  {name}: {json.dumps(s)}" for name, s in streams.items())]
    lines += ["buffers:", *(f"  {name}: {json.dumps(place)}" for name, place in buffers.items())]
    if slots:
        lines.append(f"slots: {json.dumps(slots)}")
    return Drawn("\n".join(lines) + "\n", d.features)


def _paired(first: Item, second: Item) -> Item:
    return Item(first.holds + second.holds, [*first.pieces, Piece("kv", "kv", 2, 2)])


def _encode(d: _Drawing, streams: dict[str, dict[str, Any]], items: list[Item], like: bool) -> list[Item]:
    """Encode the streams, all alike or each in its way (some not at all); the items of their scales and zeros."""
    params: list[Item] = []
    drawn: tuple[dict[str, Any], list[Piece]] | None = None
    for item in items:
        (name,) = item.holds
        if not like and d.chance(20):
            continue
        if drawn is None or not like:
            drawn = _encoding(d, item.pieces)
        own, pieces = drawn
        streams[name] |= own
        if pieces:
            kinds = ["scale", *["zero"] * ("zero" in own["quant"])]
            params += [Item((f"{name}.{kind}",), list(pieces)) for kind in kinds]
    return params


def _encoding(d: _Drawing, pieces: list[Piece]) -> tuple[dict[str, Any], list[Piece]]:
    """What a stream says of its encoding, and the digits of its scale; none of one that is an argument."""
    dims = math.prod(p.size for p in pieces if p.axis == "dim")
    mode = MODES[
        d.pick([m.name for m in MODES.values() if not m.by_norm and (m.bits == 8 or (dims and dims % 2 == 0))])
    ]
    zero = d.pick(tuple(ZEROS)) if mode.asymmetric else ""
    token = d.pick(("token", "token", "token", "group", "block", *["none"] * (not mode.asymmetric)))
    dynamic = mode.asymmetric or d.chance({"token": 75, "group": 30, "block": 30, "none": 0}[token])
    words, found = per_words(d.pick, mode, pieces, token)
    layers = [p for p in pieces if p.axis == "layer"]
    if token == "none" and layers and d.chance(30):
        words.append("layer")
    options = {"dynamic": dynamic, "stored": token != "none", "by_head": "head" in words}
    scale = {"per": d.shuffled(words)} | scale_options(d.pick, mode, **options)
    own: dict[str, Any] = {"quant": code_options(d.pick, mode, zero) | {"scale": scale}}
    if dims and dims & (dims - 1) == 0 and d.chance(30):
        own["rotate"] = "hadamard"
        d.note("rotation")
    d.note(f"encoded: {mode.name}")
    d.note(f"scale per {token}{' and head' * ('head' in words)}{' and dim' * any('dim' in w for w in words)}")
    return own, [*found, *layers] if token != "none" else []


def _buffers(d: _Drawing, items: list[Item], count: int) -> dict[str, Any]:
    """The items dealt to buffers, none of them left empty."""
    groups: list[list[Item]] = [[] for _ in range(count)]
    for i, item in enumerate(items):
        groups[i if i < count else d.draw(st.integers(0, count - 1))].append(item)
    return {f"cache_{i}": d.place(group, 0, 0) for i, group in enumerate(groups)}
