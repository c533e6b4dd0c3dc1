"""The product of encodings: mode × source and axes of the scale × where it lies × the order of the codes.

Every point is a layout's text. What the scale says besides (its type, its grid, its floor, how it divides) is drawn for
each point, the same each time, among what has a meaning there.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass

from kvgen.diagnostics import KvgenError
from kvgen.encodings import append_refusal
from kvgen.quant import MODES, Mode
from kvgen.resolve import load_text
from tests.encodings import ZEROS, code_options, scale_options

BLOCK_SIZE = 6
HEADS = 2

CODES = tuple(
    f"{name} {zero}".strip() for name, mode in MODES.items() for zero in (ZEROS if mode.asymmetric else ("",))
)
"""Every mode; those that count from a zero once for each kind of it."""

SOURCES = ("static", "dynamic")

PERS = (
    "[]",
    "head",
    "dim",
    "dim//g",
    "head dim//g",
    "layer",
    "layer head",
    "block",
    "block head",
    "token",
    "token head",
    "token dim//g",
    "token head dim//g",
    "token head dim",
    "token//2 head",
    "token//2 head dim",
)
"""What a scale varies over; ``g`` is the group of the mode, or 16."""

PLACEMENTS = ("argument", "beside", "inline", "planar", "planes")
"""Of the scale: in no buffer; in one of its own; in the row of its codes; at the end of a page; in a page of both
streams, the codes of each and then the scales of each."""

ORDERS = {
    "dim-minor": "block slot head dim",
    "slot-minor": "block head dim slot",
    "half-split": "block slot head dim//g dim%h dim//h%2",
    "vectors": "block head dim//g slot dim%g",
    "bit-planes": "block slot head dim//g bit dim%g",
}
"""Of the codes; ``h`` is half of ``g``."""


@dataclass(frozen=True)
class Point:
    """One combination; ``str`` is its name."""

    codes: str
    source: str
    per: str
    placement: str
    order: str

    def __str__(self) -> str:
        return " | ".join((self.source, self.codes, self.placement, self.per, self.order))

    @property
    def mode(self) -> Mode:
        return MODES[self.codes.split()[0]]

    @property
    def zero(self) -> str:
        return self.codes.partition(" ")[2]

    @property
    def group(self) -> int:
        return self.mode.group or 16

    @property
    def axes(self) -> list[str]:
        """The axes that ``per`` names, ``token`` as the two that it is."""
        words = [] if self.per == "[]" else [word.partition("//")[0] for word in self.per.split()]
        return [axis for word in words for axis in (("block", "slot") if word == "token" else (word,))]

    def text(self) -> str:
        """The layout, as YAML."""
        return _Writer(self).text()


DIMENSIONS = {"source": SOURCES, "codes": CODES, "placement": PLACEMENTS, "per": PERS, "order": tuple(ORDERS)}


def points() -> list[Point]:
    return [Point(**dict(zip(DIMENSIONS, values, strict=True))) for values in itertools.product(*DIMENSIONS.values())]


def outcome(point: Point) -> str:
    """What becomes of a point: the codes that refuse it, ``no append``, or nothing where all its functions are made."""
    try:
        layout = load_text(point.text())
    except KvgenError as error:
        return " ".join(sorted({diagnostic.code for diagnostic in error.diagnostics}))
    return "no append" if any(append_refusal(layout, stream.name) for stream in layout.streams) else ""


def written(outcomes: Mapping[Point, str]) -> str:
    """The table of what is refused: a line for combinations alike, ``*`` for every value of a dimension."""
    keyed = {tuple(getattr(point, name) for name in DIMENSIONS): what for point, what in outcomes.items()}
    lines = [f"{' | '.join(words)}: {what}" for words, what in _merged(keyed, list(DIMENSIONS.values()))]
    return "".join(f"{line}\n" for line in (*_HEAD, *lines))


def read(text: str) -> dict[Point, str]:
    """The points that a table refuses, and how."""
    found: dict[Point, str] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        words, _, what = line.rpartition(": ")
        parts = [
            DIMENSIONS[n] if w == "*" else w.split(", ") for n, w in zip(DIMENSIONS, words.split(" | "), strict=True)
        ]
        for values in itertools.product(*parts):
            point = Point(**dict(zip(DIMENSIONS, values, strict=True)))
            assert point not in found, f"{point} is in two lines"
            found[point] = what
    return found


_HEAD = (
    "# Combinations of encodings that are refused, with their diagnostics, or for which there is no append.",
    "# All others pass the harness. Written by `python -m tests.product > tests/refusals.txt`.",
    f"# {' | '.join(DIMENSIONS)}: what",
)


def _merged(outcomes: Mapping[tuple[str, ...], str], left: list[tuple[str, ...]]) -> list[tuple[tuple[str, ...], str]]:
    """Values of the first dimension that lead to the same are joined, and so on with the next."""
    if not left:
        return [((), what) for what in outcomes.values() if what]
    alike: dict[tuple, list[str]] = {}
    for value in left[0]:
        rest = {key[1:]: what for key, what in outcomes.items() if key[0] == value}
        alike.setdefault(tuple(_merged(rest, left[1:])), []).append(value)
    return [
        (("*" if len(values) == len(left[0]) else ", ".join(values), *words), what)
        for rows, values in alike.items()
        for words, what in rows
    ]


class _Writer:
    """Writes the layout of one point; what is drawn depends on the point alone."""

    def __init__(self, point: Point) -> None:
        self.point, self.random = point, random.Random(str(point))

    def text(self) -> str:
        point = self.point
        layer = ", layer: 2" if "layer" in point.axes else ""
        streams = ["key", "value"] if point.placement == "planes" else ["key"]
        dtype, dim = self.random.choice(("", "", "dtype: float32, ")), self._dim()
        rotate = self.random.choice(("", "rotate: hadamard, ")) if dim & (dim - 1) == 0 else ""
        lines = [
            "name: point",
            f"axes: {{head: {HEADS}, dim: {dim}{layer}}}",
            f"block_size: {BLOCK_SIZE}",
            f"streams:\n  key: {{{dtype}{rotate}quant: {self._quant()}}}",
            *["  value: key"] * (len(streams) - 1),
            "buffers:",
            *getattr(self, f"_{point.placement}")(),
        ]
        return "\n".join(lines) + "\n"

    def _dim(self) -> int:
        """Two groups or three; where nothing divides them, a short last one too, or none at all."""
        point, group = self.point, self.point.group
        if point.order in ("half-split", "vectors", "bit-planes") or point.mode.by_norm:
            return self.random.choice((2, 3)) * group
        return self.random.choice((2 * group, 3 * group, 2 * group + 14, 20))

    def _quant(self) -> str:
        point, choose = self.point, self.random.choice
        stored = bool({"block", "slot"} & set(point.axes))
        dynamic = point.source == "dynamic"
        scale = {"per": point.per.replace("//g", f"//{point.group}") if point.per != "[]" else []}
        scale |= scale_options(choose, point.mode, dynamic=dynamic, stored=stored, by_head="head" in point.axes)
        return json.dumps(code_options(choose, point.mode, point.zero) | {"scale": scale})

    def _order(self) -> list[str]:
        """The terms of the codes, slowest first."""
        group = self.point.group
        text = ORDERS[self.point.order].replace("//g", f"//{group}").replace("%g", f"%{group}")
        terms = text.replace("//h", f"//{group // 2}").replace("%h", f"%{group // 2}").split()
        return (["layer"] if "layer" in self.point.axes else []) + terms

    def _scale_terms(self) -> list[str]:
        """The terms of the scale; the inner ones in one of two directions."""
        words = self.point.per.replace("//g", f"//{self.point.group}").split()
        words = [w for word in words if word != "[]" for w in self._spelled(word)]
        outer, inner = [w for w in words if w in ("layer", "block")], [w for w in words if w not in ("layer", "block")]
        return outer + (inner if self.random.random() < 0.5 else inner[::-1])

    def _spelled(self, word: str) -> tuple[str, ...]:
        return ("block", word.replace("token", "slot")) if word.startswith("token") else (word,)

    def _params(self, stream: str) -> list[str]:
        """The leaves that belong to the codes."""
        return [f"{stream}.scale"] + ([f"{stream}.zero"] if self.point.zero else [])

    def _codes(self) -> str:
        return f"  key_cache: {{holds: key, order: {' '.join(self._order())}}}"

    def _argument(self) -> list[str]:
        return [self._codes()]

    def _beside(self) -> list[str]:
        order, params = " ".join(self._scale_terms()) or "1", self._params("key")
        if self.random.random() < 0.5:
            return [self._codes(), f"  key_params: {{order: {order}, fields: [{', '.join(params)}]}}"]
        names = (param.replace(".", "_") for param in params)
        return [self._codes(), *(f"  {n}s: {{holds: {p}, order: {order}}}" for n, p in zip(names, params, strict=True))]

    def _inline(self) -> list[str]:
        """A record for everything that the scale tells apart of block, slot, head and vector."""
        point = self.point
        over = set(point.axes) & {"layer", "block", "slot", "head"}
        over = over if "block" in over else over | {"block", "slot"}
        if "slot" in over and point.per.startswith("token//"):
            over -= {"slot"}
        terms = self._order()
        whole = {*over, f"dim//{point.group}"} if point.order == "vectors" and "dim//g" in point.per else over
        outer, inner = [t for t in terms if t in whole], [t for t in terms if t not in whole]
        left = [t for t in self._scale_terms() if t not in whole]
        fields = [_place("key", inner), *(_place(param, left) for param in self._params("key"))]
        if self.random.random() < 0.3:
            fields.insert(self.random.randrange(len(fields) + 1), f"{{pad: {self.random.choice((1, 2, 4))}}}")
        align = f", align: {self.random.choice((2, 4, 8))}" if self.random.random() < 0.3 else ""
        return [f"  cache: {{order: {' '.join(outer)}{align}, fields: [{', '.join(fields)}]}}"]

    def _planar(self) -> list[str]:
        return [self._page(["key"])]

    def _planes(self) -> list[str]:
        return [self._page(["key", "value"])]

    def _page(self, streams: list[str]) -> str:
        outer = [t for t in self._order() if t in ("layer", "block")]
        inner = [t for t in self._order() if t not in outer]
        left = [t for t in self._scale_terms() if t not in outer]
        fields = [_place(stream, inner) for stream in streams]
        if self.random.random() < 0.3:
            fields.append(f"{{pad: {self.random.choice((1, 2, 4))}}}")
        fields += [_place(param, left) for stream in streams for param in self._params(stream)]
        return f"  cache: {{order: {' '.join(outer)}, fields: [{', '.join(fields)}]}}"


def _place(leaf: str, terms: list[str]) -> str:
    return f"{{{leaf}: {' '.join(terms)}}}" if terms else leaf


if __name__ == "__main__":
    print(written({point: outcome(point) for point in points()}), end="")
