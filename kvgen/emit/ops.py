"""Functions of a module as PyTorch operators: their schemas, and what their results look like before they are there."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgen.canonical import canonical
from kvgen.emit.launch import Function
from kvgen.emit.pages import PageFunction
from kvgen.functions import chosen
from kvgen.layout import Buffer, Layout, leaves_of
from kvgen.transfer import Transfer

if TYPE_CHECKING:
    from kvgen.emit.transfer_module import TransferFunction

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


NUMBERS = ("src_layer", "dst_layer", "src_head", "dst_head", "heads", "num_tokens")
"""Integers that functions of a transfer take."""


@dataclass(frozen=True, slots=True)
class Fake:
    """What a function that reads returns, in shapes and types alone. ``names``: what its results are written with."""

    name: str
    parameters: tuple[str, ...]
    names: tuple[tuple[str, str], ...]
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """An operator: its name and schema, the function that it calls, and the one that stands in for it."""

    schema: str
    function: str
    fake: str


@dataclass(frozen=True, slots=True)
class Ops:
    """All operators of a module. The namespace has a digest of what they do and of their schemas in it.

    ``unlike``: in what they differ from the functions. ``traced``: functions that return more than their operators, and
    what compiled code has in their place.
    """

    namespace: str
    unlike: str
    ops: tuple[Op, ...]
    fakes: tuple[Fake, ...]
    traced: tuple[tuple[str, str], ...]


def build_ops(
    layout: Layout, functions: tuple[Function, ...], pages: tuple[PageFunction, ...], mapping: tuple[str, ...]
) -> Ops:
    """``mapping``: the keywords of slot_mapping and fill_slots that depend on the layout (``block_size``, ``rank``)."""
    ops = [Op(_schema(layout, f), f.name, f"_{f.name}_fake" if f.uses["gather"] else "_nothing") for f in functions]
    ops += [Op(_page_schema(layout, f), f.name, "_nothing") for f in pages]
    ops += _table_ops(layout, mapping)
    names = chosen(layout)
    ops = [op for op in ops if op.schema.partition("(")[0] in names]
    text = "\n".join([canonical(layout), *(op.schema for op in ops)])
    fakes = tuple(_fake(f) for f in functions if f.uses["gather"])
    unlike = "but for out and zero_skipped where results are new tensors"
    traced = (("gather_page_table", "_gather_page_table_traced"),) if "gather_page_table" in names else ()
    return Ops(_namespace(layout.name, text), unlike, tuple(ops), fakes, traced)


def build_transfer_ops(transfer: Transfer, functions: tuple[TransferFunction, ...]) -> Ops:
    """Pointer tables are no tensors: operators take lists of these."""
    names = chosen(transfer)
    ops = [Op(_transfer_schema(transfer, f), f.name, "_nothing") for f in functions if f.name in names]
    facts = (transfer.layers, transfer.requantise, *(canonical(layout) for layout in transfer.sides))
    text = "\n".join([*map(str, facts), *(op.schema for op in ops)])
    tables = any(side.tables for f in functions for side in f.sides)
    unlike = "with lists of tensors for pointer tables" if tables else "and returns nothing"
    return Ops(_namespace(transfer.name, text), unlike, tuple(ops), (), ())


def _namespace(name: str, text: str) -> str:
    return f"kvgen_{name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _transfer_schema(transfer: Transfer, function: TransferFunction) -> str:
    tables = {name for side in function.sides for name in side.tables}
    written = {buffer.name for buffer in transfer.destination.buffers}
    words = {"programs=PROGRAMS": f"int? programs={transfer.programs}", "dtype=None": TYPES["dtype=None"], "*": "*"}
    arguments = []
    for parameter in function.parameters:
        name, default = parameter.partition("=")[::2]
        kind = f"Tensor(a{len(arguments)}!)" if name in written else "Tensor"
        kind += "[]" if name in tables else ""
        if name in NUMBERS:
            kind = "SymInt?" if default == "None" else "SymInt"
        arguments.append(words.get(parameter, f"{kind} {parameter}"))
    return f"{function.name}({', '.join(arguments)}) -> ()"


def _table_ops(layout: Layout, mapping: tuple[str, ...]) -> Iterator[Op]:
    """Of the functions that take no buffers."""
    extra = [f"SymInt {name}" for name in mapping]
    optional = [f"Tensor? {name}=None" for name in ("context_lens", "query_start_loc", "request_ids")]
    arguments = ["Tensor block_table, Tensor? positions=None, *", *optional, "SymInt? num_tokens=None", *extra]
    yield Op(f"slot_mapping({', '.join(arguments)}) -> Tensor", "slot_mapping", "_slot_mapping_fake")
    arguments = ["Tensor block_table_row, SymInt start_pos, SymInt count", *(["*", *extra] if extra else [])]
    yield Op(f"fill_slots({', '.join(arguments)}) -> Tensor", "fill_slots", "_fill_slots_fake")
    arguments = ["Tensor req_to_page, Tensor req_pool_indices, Tensor seq_lens, Tensor(a!) out, SymInt padding=-1"]
    arguments += ["*, SymInt block_size"] if layout.block_size is None else []
    yield Op(f"gather_page_table({', '.join(arguments)}) -> ()", "_write_page_table", "_nothing")
    yield Op("concat_mla_key(Tensor k_nope, Tensor k_rope) -> Tensor", "concat_mla_key", "_concat_mla_key_fake")


def _page_schema(layout: Layout, function: PageFunction) -> str:
    buffers = {buffer.name for buffer in layout.buffers}
    arguments = [f"Tensor(a{i}!) {p}" if p in buffers else f"Tensor {p}" for i, p in enumerate(function.parameters)]
    return f"{function.name}({', '.join(arguments)}) -> ()"


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
    return f"{function.name}({', '.join(arguments)}) -> {results if len(outs) == 1 else f'({results})'}"


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
