"""Functions of a module as PyTorch operators: their schemas, and what their results look like before they are there."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from kvgen.canonical import canonical
from kvgen.emit.launch import Function
from kvgen.layout import Buffer, Layout, leaves_of

ABSENT = ("out=None", "zero_skipped=False")
"""Arguments that operators do not have: results are new tensors."""

TYPES = {
    "layer": "SymInt layer",
    "rank": "SymInt rank",
    "dtype=None": "ScalarType? dtype=None",
    "rotated=False": "bool rotated=False",
    "total_tokens=None": "SymInt total_tokens",
}
"""What is no tensor; lengths must be given, since they lie on the device."""


@dataclass(frozen=True, slots=True)
class Fake:
    """What a function that reads returns, in shapes and types alone. ``names``: what its results are written with."""

    name: str
    parameters: tuple[str, ...]
    names: tuple[tuple[str, str], ...]
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """An operator. ``fake`` is the function that stands in for it."""

    function: str
    schema: str
    fake: str


@dataclass(frozen=True, slots=True)
class Ops:
    """All operators of a module. The namespace has a digest of the layout and the schemas in it."""

    namespace: str
    ops: tuple[Op, ...]
    fakes: tuple[Fake, ...]


def build_ops(layout: Layout, functions: tuple[Function, ...], mapping: tuple[str, ...]) -> Ops:
    """``mapping``: the keywords of slot_mapping that depend on the layout (``block_size``, ``rank``)."""
    ops = [Op(f.name, _schema(layout, f), f"_{f.name}_fake" if f.uses["gather"] else "_nothing") for f in functions]
    optional = ("context_lens", "query_start_loc", "request_ids")
    arguments = ["Tensor block_table", "Tensor? positions=None", "*", *(f"Tensor? {name}=None" for name in optional)]
    arguments += ["SymInt? num_tokens=None", *(f"SymInt {name}" for name in mapping)]
    ops.append(Op("slot_mapping", f"({', '.join(arguments)}) -> Tensor", "_slot_mapping_fake"))
    text = "\n".join([canonical(layout), *(f"{op.function}{op.schema}" for op in ops)])
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Ops(f"kvgen_{layout.name}_{digest}", tuple(ops), tuple(_fake(f) for f in functions if f.uses["gather"]))


def _schema(layout: Layout, function: Function) -> str:
    """Buffers that a function writes, and outputs that it is given, are marked as such, each by a letter of its own."""
    outs = function.outs if function.uses["gather"] else ()
    buffers = set() if outs else {buffer.name for buffer in layout.buffers if _written(layout, buffer)}
    buffers |= set(function.written)
    arguments = []
    for parameter in function.parameters:
        if parameter in ABSENT:
            continue
        kind = "Tensor?" if parameter.endswith("=None") else "Tensor"
        if parameter in buffers:
            kind = f"Tensor(a{len(arguments)}!)"
        arguments.append("*" if parameter == "*" else TYPES.get(parameter, f"{kind} {parameter}"))
    if arguments[-1] == "*":
        arguments.pop()
    results = ", ".join("Tensor" for _ in outs)
    return f"({', '.join(arguments)}) -> {results if len(outs) == 1 else f'({results})'}"


def _written(layout: Layout, buffer: Buffer) -> bool:
    """Whether an append writes a buffer: one of static scales alone is read."""
    leaves = [layout.leaf(name) for name in leaves_of(buffer.place)]
    return any(leaf.name == leaf.stream or layout.stream(leaf.stream).scale.dynamic for leaf in leaves)


def _fake(function: Function) -> Fake:
    used = set(re.findall(r"\w+", " ".join(out.shape for out in function.outs)))
    names = [(s.name, f"{s.tensor}.shape[{s.dim}]{s.scale}") for s in function.sizes if s.name in used]
    if function.uses["by_slots"]:
        names.insert(0, ("num_tokens", f"{function.slots}.shape[0]"))
    else:
        names.insert(0, ("num_tokens", "total_tokens"))
    parameters = [p.replace("total_tokens=None", "total_tokens") for p in function.parameters if p not in ABSENT]
    if parameters[-1] == "*":
        parameters.pop()
    names.append(("new", f"{function.first_buffer}.new_empty"))
    results = tuple(f"new({out.shape}, dtype={out.dtype})" for out in function.outs)
    return Fake(function.name, tuple(parameters), tuple(names), results)
