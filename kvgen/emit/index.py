"""The only place where index arithmetic becomes text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvgen.axes import Digit
from kvgen.layout import Dim, Layout
from kvgen.lower import coalesce
from kvgen.plan import Step, View


@dataclass(frozen=True, slots=True)
class Variable:
    """An axis inside a kernel: its name, and its place among the axes of a tile.

    None is one value a program; a pair is an axis cut in groups, which takes two axes of the tile.
    """

    name: str
    position: int | tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """A pointer expression in two parts: terms in tensor elements, then terms in values after a cast of the pointer.

    ``values`` is empty, and no cast is needed, where the tensor's elements are the values themselves.
    """

    elements: tuple[str, ...]
    values: tuple[str, ...]


def dim_name(dim: Dim, extents: Mapping[str, int | None]) -> str:
    """A name for a tensor dimension: ``block``, ``dim_div8``, ``slot_div4_mod2``; the slot number is ``token``."""
    parts = [digit.term(extents.get(digit.axis)) for digit in dim.digits]
    if parts == ["block", "slot"]:
        return "token"
    return "_".join(part.replace("//", "_div").replace("%", "_mod") for part in parts) or "one"


def subscript(position: int | tuple[int, int] | None, rank: int) -> str:
    """The broadcasting suffix of a vector at ``position`` of a tile of ``rank`` axes: ``[:, None]``."""
    places = position if isinstance(position, tuple) else (position,)
    if position is None or rank == len(places):
        return ""
    return "[" + ", ".join(":" if i in places else "None" for i in range(rank)) + "]"


def digit_text(digit: Digit, name: str, extent: int | None) -> str:
    """``dim // 8``, ``slot // 32 % 4``: a digit of the variable ``name``."""
    text = name if digit.div == 1 else f"{name} // {digit.div}"
    topmost = digit.size is None or (extent is not None and digit.div * digit.size == extent)
    return text if topmost else f"{text} % {digit.size}"


def address(
    layout: Layout,
    view: View,
    variables: Mapping[str, Variable],
    extents: Mapping[str, int | None],
    strides: Mapping[int, str],
    rank: int,
) -> Address:
    """The terms that lead from the tensor's first element to the values of ``view``.

    ``variables`` maps axes to kernel variables, ``extents`` axes to their sizes, ``strides`` tensor dimensions to the
    names of their strides; ``rank`` is that of the tile.
    """
    in_values = view.unit != view.itemsize and view.access == view.itemsize
    elements, values = [], []
    for step in coalesce(layout, view.steps):
        scale = view.itemsize if in_values and step.dim is None else 1
        term = _term(step, variables, extents, strides, rank, scale)
        (values if scale > 1 else elements).append(term)
    if view.offset:
        scale = view.itemsize if in_values else 1
        (values if scale > 1 else elements).append(str(view.offset // scale))
    return Address(tuple(elements), tuple(values))


def _term(
    step: Step,
    variables: Mapping[str, Variable],
    extents: Mapping[str, int | None],
    strides: Mapping[int, str],
    rank: int,
    scale: int,
) -> str:
    factors = [str(step.factor // scale)] if step.factor != scale else []
    if step.dim is not None:
        factors.insert(0, strides[step.dim])
    if step.digit.axis == "kv":  # only the second of a pair has a step, and its index is 1
        name, *rest = " * ".join(factors).split(" * ")
        return " * ".join([f"tl.cast({name}, tl.int64)", *rest]) if rest else name
    variable = variables[step.digit.axis]
    text = digit_text(step.digit, variable.name, extents.get(step.digit.axis))
    suffix = subscript(variable.position, rank)
    if " " in text and (suffix or factors):
        text = f"({text})"
    return " * ".join([text + suffix, *factors])
