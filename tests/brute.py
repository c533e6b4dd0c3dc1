"""Addresses by brute force: the terms of a layout's YAML evaluated as Python on whole numbers.

``slot//32%4`` is handed to ``eval`` as it stands; a parenthesis is read in mixed radix, the size of a term being one
more than its largest value; offsets of records are added up from the YAML. Nothing of kvgen is used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import yaml

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}
CODES = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2", "fp8_e4m3fnuz": "e4m3fnuz", "fp8_e5m2fnuz": "e5m2fnuz", "int8": "int8"}
CODES |= {"mxfp8": "e4m3", "int4": "int4", "int4_asymmetric": "uint4", "nvfp4": "e2m1", "mxfp4": "e2m1"}
CODES |= {"turbo2": "turbo2", "turbo3": "turbo3", "turbo4": "turbo4"}
SCALES = {"mxfp8": "e8m0", "mxfp4": "e8m0", "nvfp4": "e4m3", "int4": "float16", "int4_asymmetric": "float16"}
SCALES |= {"turbo2": "e4m3", "turbo3": "e4m3", "turbo4": "e4m3"}
GROUPS = {"nvfp4": 16, "turbo2": 16, "turbo3": 16, "turbo4": 16}
PACKS = {"int4": (2, 1), "uint4": (2, 1), "e2m1": (2, 1), "turbo2": (4, 1), "turbo3": (8, 3), "turbo4": (2, 1)}
"""How many codes share how many bytes. Where these are several, a layout writes ``fields``."""
ALIASES = {"request": "block", "position": "slot"}
AXES = ("layer", "block", "slot", "kv", "head", "bit", "dim")
BITS = {"int4": 4, "uint4": 4, "e2m1": 4, "turbo2": 2, "turbo3": 3, "turbo4": 4}
"""How many bits a code has that an order may name."""


@dataclass
class Found:
    """Byte addresses ``[layer, block, slot, kv, head, bit, dim]`` of values or padding, extents 1 where nothing varies.

    Where an order names the bits of codes, each of them is a value.
    """

    address: np.ndarray
    itemsize: int
    fill: int | None = None
    part: np.ndarray | None = None  # which code of its bytes a value is, counted from the low bits
    bits: int = 0  # of such a code


@dataclass
class Buffer:
    """A buffer: its shape in elements of ``unit`` bytes, and how to find everything in it."""

    shape: tuple[int, ...]
    unit: int
    values: dict[str, Found] = field(default_factory=dict)
    pads: list[Found] = field(default_factory=list)


def _rest(axis: np.ndarray, *terms: np.ndarray) -> np.ndarray:
    seen: dict[tuple[int, ...], list[int]] = {}
    values = []
    for entry, *key in zip(axis.reshape(-1).tolist(), *(t.reshape(-1).tolist() for t in terms), strict=True):
        alike = seen.setdefault(tuple(key), [])
        if entry not in alike:
            alike.append(entry)
        values.append(alike.index(entry))
    return np.array(values).reshape(axis.shape)


class Brute:
    """A layout's text and the extents it leaves open (``block``, and dynamic ones)."""

    def __init__(self, text: str, blocks: int, dynamic: dict[str, int]) -> None:
        self.doc = yaml.safe_load(text)
        axes = self.doc.get("axes", {})
        self.params = self.doc.get("params", {})
        self.extents = {a: dynamic[a] if axes[a] == "dynamic" else axes[a] for a in axes}
        size = self.doc["block_size"]
        self.extents |= {"block": blocks, "slot": dynamic["slot"] if size == "dynamic" else size, "kv": 2}
        self.extents.setdefault("layer", dynamic["layer"])

    def stream(self, name: str) -> dict[str, Any]:
        given = (self.doc.get("streams") or {"key": None, "value": None}).get(name.split(".")[0]) or {}
        return self.stream(given) if isinstance(given, str) else given

    def itemsize(self, name: str) -> int:
        return ITEMSIZE.get(self.dtypes(name)[0], 1)

    def dtypes(self, name: str) -> list[str]:
        quant = self.stream(name).get("quant")
        if name.endswith(".scale"):
            return [quant.get("scale", {}).get("dtype", SCALES.get(quant["mode"], "float32"))]
        if name.endswith(".zero"):
            zero = quant.get("zero", {})
            return [zero.get("dtype", "uint8" if zero.get("kind") == "point" else "float16")]
        if quant or "store" in self.stream(name):
            return [CODES[quant["mode"]] if quant else self.stream(name)["store"]]
        given = self.stream(name).get("dtype", ["bfloat16", "float16"])
        return [given] if isinstance(given, str) else list(given)

    def apart(self, name: str) -> bool:
        """Whether the bits of a stream's codes are told apart."""

        def orders(place: Any) -> list[str]:
            """Orders of the places that the stream lies in, itself included; nothing where it does not."""
            place = self._normal(place)
            inner = [found for item in place.get("fields", []) if "pad" not in item for found in orders(item)]
            return [str(place.get("order", "")), *inner] if inner or name in place.get("holds", []) else []

        return any(re.search(r"\bbit\b", order) for place in self.doc["buffers"].values() for order in orders(place))

    def pack(self, name: str) -> tuple[int, int]:
        """How many codes share how many bytes: one, or several, or eight bits of codes where they are apart."""
        return (8, 1) if self.apart(name) else PACKS.get(self.dtypes(name)[0], (1, self.itemsize(name)))

    def per(self, name: str) -> dict[str, str]:
        """What a scale varies over: each axis and the term that tells its groups apart."""
        quant = self.stream(name)["quant"]
        per = quant.get("scale", {}).get("per", f"token head dim//{GROUPS.get(quant['mode'], 32)}")
        terms = [t for text in ([per] if isinstance(per, str) else per) for t in text.split()]
        terms = [
            t
            for term in terms
            for t in (("block", term.replace("token", "slot")) if term.startswith("token") else (term,))
        ]
        return {ALIASES.get(a, a): t for t in terms for a in [re.match(r"\w+", t).group()]}

    def axes(self, name: str) -> dict[str, int]:
        """Extents of block, slot and the stream's own axes; of a scale those that it varies over."""
        if "." in name:
            whole = self.axes(name.split(".")[0])
            return {axis: extent for axis, extent in whole.items() if axis in self.per(name)}
        own = self.stream(name)
        extents = {a: self.extents[a] for a in ("block", "slot")}
        if own.get("head") != "none" and "head" in self.extents:
            extents["head"] = self.extents["head"]
        extents |= {"bit": BITS[self.dtypes(name)[0]]} if self.apart(name) else {}
        return extents | {"dim": own["dim"] if isinstance(own.get("dim"), int) else self.extents["dim"]}

    def buffer(self, name: str, strides: tuple[int, ...] | None = None, start: int = 0) -> Buffer:
        """Addresses in a tensor whose element 0 lies at byte ``start``, with strides in elements.

        Without strides every dimension gets stride 0: what is wanted is the shape.
        """
        place = self._normal(self.doc["buffers"][name])
        leaves = list(self._leaves(place))
        itemsize, pieces = self.itemsize(leaves[0]), list(self._sizes(place, []))
        same = all(self.dtypes(x) == self.dtypes(leaves[0]) for x in leaves)
        unit = itemsize if same and all(p % itemsize == 0 for p in pieces) else 1
        terms = self._terms(place, [])
        shape = [self._size(group, leaves[0]) for group in terms]
        record = "fields" in place
        if record:
            shape.append(self._record_size(place, [t for g in terms for t in g]) // unit)
        result = Buffer(tuple(shape), unit)
        strides = strides or (0,) * len(shape)
        outer = [(group, stride * unit) for group, stride in zip(terms, strides, strict=False)]
        self._collect(place, outer, start, [t for g in terms for t in g], result)
        return result

    def _normal(self, place: Any) -> dict[str, Any]:
        """Shorthands written out."""
        if isinstance(place, str):
            return {"holds": [place]}
        if not {"holds", "fields", "order", "pad"} & set(place):
            (leaf,) = set(place) - {"align"}
            place = {"holds": leaf, "order": place[leaf]} | {k: v for k, v in place.items() if k == "align"}
        if isinstance(place.get("holds"), str):
            place = place | {"holds": [place["holds"]]}
        return place

    def _leaves(self, place: dict[str, Any]):
        yield from place.get("holds", [])
        for item in map(self._normal, place.get("fields", [])):
            if "pad" not in item:
                yield from self._leaves(item)

    def _terms(self, place: dict[str, Any], above: list[str]) -> list[list[str]]:
        """Groups of terms of a place's order, the fastest one of codes that share bytes counted in bytes."""
        groups, packed = [list(group) for group in self._written(place, above)], self._shared(place, above)
        for group in reversed(groups if packed else []):
            if packed[0] in group:
                group[group.index(packed[0])] = f"({packed[0]})//{packed[1]}"
                break
        return groups

    def _shared(self, place: dict[str, Any], above: list[str]) -> tuple[str, int] | None:
        """The fastest term that tells anything apart, and how many of its codes share bytes; None of whole bytes."""
        leaf = place.get("holds", [""])[0]
        per = self.pack(leaf)[0] if leaf else 1
        if per == 1:
            return None
        terms = [term for group in self._written(place, above) for term in group]
        return next(term for term in reversed(terms) if int(self._values(term, leaf).max())), per

    def _written(self, place: dict[str, Any], above: list[str]) -> list[list[str]]:
        """Groups of terms of a place's order; what is left of the axes where none is written."""
        order = place.get("order")
        if order is None and "holds" in place:
            axes = list(self.axes(place["holds"][0])) + ["kv"] * (len(place["holds"]) == 2)
            mentioned = [re.match(r"\w+", t).group() for t in above]
            mentioned = [ALIASES.get(a, a) for a in mentioned] + ["block", "slot"] * ("token" in mentioned)
            leaf = place["holds"][0]
            groups = self.per(leaf) if "." in leaf else {}
            whole = [groups.get(a, a) for a in axes if a not in mentioned]
            left = {a: self._left(a, above, groups.get(a, a)) for a in axes if a in mentioned}
            rest = [term for term in left.values() if int(self._values(term, leaf).max()) > 0]
            return [[t] for t in (*whole, *rest)]
        text = " ".join(order) if isinstance(order, list) else order or ""
        groups = re.findall(r"\([^)]*\)|\S+", text)
        return [[t for t in g.strip("()").split() if t != "1"] for g in groups]

    def _left(self, axis: str, above: list[str], group: str) -> str:
        """A term for what the terms above leave of an axis: its entries counted among those they do not tell apart."""
        words = [axis, *(word for word, meant in ALIASES.items() if meant == axis)]
        written = [axis if t == "token" and axis in ("block", "slot") else t for t in above]
        terms = [t for t in written if re.match(r"\w+", t).group() in words]
        return f"rest({group}, {', '.join(terms)})"

    def _values(self, term: str, leaf: str) -> np.ndarray:
        """A term's value at every index of the leaf's axes, and of kv and layer."""
        extents = self.axes(leaf) | {"kv": 2, "layer": self.extents["layer"]}
        names: dict[str, Any] = dict(self.params)
        for i, axis in enumerate(AXES):
            shape = [1] * len(AXES)
            shape[i] = extents.get(axis, 1)
            names[axis] = np.arange(shape[i], dtype=np.int64).reshape(shape)
        names |= {"request": names["block"], "position": names["slot"]}
        names["token"] = names["block"] * extents.get("slot", 1) + names["slot"]
        return eval(term, {"__builtins__": {}, "rest": _rest}, names)

    def _size(self, group: list[str], leaf: str) -> int:
        size = 1
        for term in group:
            size *= int(self._values(term, leaf).max()) + 1
        return size

    def _group(self, group: list[str], leaf: str) -> np.ndarray:
        value = np.zeros([1] * len(AXES), dtype=np.int64)
        for term in group:
            digit = self._values(term, leaf)
            value = value * (int(digit.max()) + 1) + digit
        return value

    def _pitch(self, place: dict[str, Any], above: list[str]) -> int:
        if "holds" in place:
            return self.pack(place["holds"][0])[1]
        align = place.get("align", 1)
        return -(-self._record_size(place, above) // align) * align

    def _record_size(self, place: dict[str, Any], above: list[str]) -> int:
        return list(self._fields(place, above))[-1][1]

    def _fields(self, place: dict[str, Any], above: list[str]):
        """``(offset, end, item)`` of each field."""
        end = 0
        for item in map(self._normal, place["fields"]):
            if "pad" in item:
                offset, size = end, item["pad"]
            else:
                align = item.get("align", 1)
                offset = -(-end // align) * align
                terms = self._terms(item, above)
                size = self._pitch(item, above + [t for g in terms for t in g])
                for group in terms:
                    size *= self._size(group, next(self._leaves(item)))
            end = offset + size
            yield offset, end, item

    def _sizes(self, place: dict[str, Any], above: list[str]):
        above = above + [t for g in self._terms(place, above) for t in g]
        yield self._pitch(place, above)
        if "fields" in place:
            for offset, end, item in self._fields(place, above):
                yield offset
                if "pad" in item:
                    yield end - offset
                else:
                    yield from self._sizes(item, above)

    def _collect(self, place, steps: list[tuple[list[str], int]], base: int, above: list[str], result: Buffer) -> None:
        """Everything under a place; ``steps`` are the groups above and at it with their strides in bytes."""
        if "holds" in place:
            for side, leaf in enumerate(place["holds"]):
                address, part = self._address(steps, base, leaf), None
                if len(place["holds"]) == 2:
                    address = address[:, :, :, side : side + 1]
                for shared in (re.fullmatch(r"\((.*)\)//(\d+)", t) for group, _ in steps for t in group):
                    if shared:
                        part = self._values(shared[1], leaf) % int(shared[2])
                codes, whole = self.pack(leaf)
                result.values[leaf] = Found(address, self.itemsize(leaf), part=part, bits=8 * whole // codes)
            return
        leaf = next(self._leaves(place))
        for offset, end, item in self._fields(place, above):
            if "pad" in item:
                address = self._address(steps, base + offset, leaf)[..., None] + np.arange(end - offset)
                result.pads.append(Found(address, 1, item.get("fill")))
                continue
            groups = self._terms(item, above)
            inner_above = above + [t for g in groups for t in g]
            stride = self._pitch(item, inner_above)
            inner: list[tuple[list[str], int]] = []
            for group in reversed(groups):
                inner.insert(0, (group, stride))
                stride *= self._size(group, next(self._leaves(item)))
            self._collect(item, steps + inner, base + offset, inner_above, result)

    def _address(self, steps: list[tuple[list[str], int]], base: int, leaf: str) -> np.ndarray:
        address = np.full([1] * len(AXES), base, dtype=np.int64)
        for group, stride in steps:
            address = address + self._group(group, leaf) * stride
        return address
