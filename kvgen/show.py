"""What ``kvgen show`` says of a layout: shapes, strides, addresses, sizes and a picture of a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvgen import picture, sizes, stages
from kvgen.amount import Amount
from kvgen.axes import Digit
from kvgen.canonical import per
from kvgen.encodings import append_refusal
from kvgen.layout import Buffer, Holds, Layout, Stream
from kvgen.lower import SLOT_NUMBER, coalesce, lower
from kvgen.plan import Step, View
from kvgen.spelling import same_as


@dataclass(frozen=True, slots=True)
class Formula:
    """Where something lies: its address in elements of the tensor, and its first bit where codes share a byte."""

    address: str
    first_bit: str = ""
    bits: int = 0


def formulas(layout: Layout) -> dict[str, dict[str, Formula]]:
    """For each buffer where everything stored in it lies."""
    found: dict[str, dict[str, Formula]] = {buffer.name: {} for buffer in layout.buffers}
    for plan in lower(layout):
        for copy in plan.copies:
            views = {"": plan.cache_view(copy), ".scale": copy.scale, ".zero": copy.zero}
            for suffix, view in views.items():
                if view is not None and view.tensor in found:
                    name = copy.stream + suffix
                    found[view.tensor].setdefault(name, _formula(layout, name, view))
    return found


def pool(layout: Layout, layers: int | None, tokens: int) -> dict[str, Any]:
    """Blocks and bytes of a pool for ``tokens`` tokens; ``layers`` defaults to the layout's own, or one.

    With a dynamic block size there is no rounding up to whole blocks.
    """
    if layers is None:
        known = layout.layers or layout.regions
        layers = (known and known.extent) or 1
    if layout.block_size is None:
        total = sizes.token_bytes(layout) * tokens * layers
        return {"layers": layers, "tokens": tokens, "blocks": None, "bytes": total.plain}
    blocks = -(-tokens // layout.block_size)
    total = Amount()
    for buffer in layout.buffers:
        total += sizes.page_bytes(layout, buffer) * blocks * layers
    return {"layers": layers, "tokens": tokens, "blocks": blocks, "bytes": total.plain}


def describe(layout: Layout, layers: int | None = None, tokens: int | None = None) -> dict[str, Any]:
    """Everything ``show`` knows, for programs: numbers where they are known, else their formula as a string."""
    found = formulas(layout)
    result: dict[str, Any] = {
        "name": layout.name,
        "summary": layout.summary,
        "block_size": layout.block_size,
        "contiguous": layout.contiguous,
        "layers": layout.layers and (layout.layers.extent or "dynamic"),
        "regions": layout.regions and {"layer": layout.regions.extent or "dynamic"},
        "streams": [_stream(layout, stream) for stream in layout.streams],
        "buffers": [_buffer(layout, buffer, found[buffer.name]) for buffer in layout.buffers],
        "bytes_per_token": sizes.token_bytes(layout).plain,
        "fuse": stages.describe(layout) if layout.fuse else None,
    }
    if tokens is not None:
        result["pool"] = pool(layout, layers, tokens)
    return result


def text(layout: Layout, layers: int | None = None, tokens: int | None = None) -> str:
    """The same for people, with a picture of one page of each buffer."""
    facts = describe(layout, layers, tokens)
    lines = [f"{layout.name}: {layout.summary}" if layout.summary else layout.name, ""]
    lines += [stream_line(stream) for stream in facts["streams"]]
    unit = "max_seq_len" if layout.contiguous else "block_size"
    lines.append(f"{unit:<10} {'dynamic' if layout.block_size is None else layout.block_size}")
    per_token = facts["bytes_per_token"]
    lines.append(f"a token    {per_token} bytes a layer")
    if layout.fuse:
        lines += [f"fused      {line}" for line in fused(layout)]
    for buffer, described in zip(layout.buffers, facts["buffers"], strict=True):
        lines += ["", *_buffer_lines(layout, buffer, described)]
    if "pool" in facts:
        lines += ["", _pool_line(layout, facts["pool"])]
    return "\n".join(lines) + "\n"


def stream_line(facts: dict[str, Any]) -> str:
    """What is handed in for a stream and how it is stored, from what ``describe`` says of it."""
    extents = ", ".join(f"{axis} {extent}" for axis, extent in facts["axes"].items())
    stored = f", stored as {facts['stored']}" if facts["stored"] else ""
    return f"{facts['name']:<10} [token, {extents}]  {' or '.join(facts['dtypes'])}{stored}"


def in_layers(facts: dict[str, Any], name: str) -> str:
    """What is added to the sizes of a buffer that has all layers: they are those of one."""
    whole = facts.get("page_bytes_all_layers")
    return "" if whole is None else f" in each layer; {whole} a {name} in all layers"


def fused(layout: Layout) -> list[str]:
    """What a fused append does, a line for each stream: ``key: rms_norm, rope``."""
    lines = []
    for name, steps in layout.fuse.steps:
        words = ["rms_norm" if isinstance(step, stages.RmsNorm) else "rope" for step in steps]
        lines.append(f"{name}: {', '.join(words)}")
    rounding = {"once": "rounded once, when stored", "chain": "rounded after each stage"}[layout.fuse.rounding]
    return [*lines, rounding]


def _stream(layout: Layout, stream: Stream) -> dict[str, Any]:
    axes = {axis.name: axis.extent or "dynamic" for axis in stream.axes}
    return {"name": stream.name, "axes": axes, "dtypes": list(stream.dtypes), "stored": _stored(layout, stream)}


def _stored(layout: Layout, stream: Stream) -> str | None:
    """The encoding of a stream in a few words, None where values are stored as they come."""
    encoding, scale = stream.encoding, stream.scale
    if encoding is None:
        return None
    rotated = " after a Hadamard rotation" if encoding.rotation else ""
    if scale is None:
        return encoding.code + rotated
    kind = "dynamic" if scale.dynamic else "static"
    owner = scale.name.partition(".")[0]
    shared = "" if owner == stream.name else f", that of {owner}"
    refused = ", never appended" if append_refusal(layout, stream.name) else ""
    return f"{encoding.mode} with a {kind} scale per {per(layout, scale) or 'tensor'}{shared}{rotated}{refused}"


def _buffer(layout: Layout, buffer: Buffer, formulas: dict[str, Formula]) -> dict[str, Any]:
    shared = {name: {"bits": f.bits, "first": f.first_bit} for name, f in formulas.items() if f.bits}
    other, layers = same_as(layout, buffer.place), sizes.has_layers(layout, buffer)
    return {
        "name": buffer.name,
        "order": sizes.order(layout, buffer.place),
        **({"same_as": other} if other else {}),
        "shape": [size.plain for size in sizes.shape(layout, buffer)],
        "strides": [stride.plain for stride in sizes.strides(layout, buffer)],
        "element_bytes": buffer.unit,
        "dtypes": list(buffer.dtypes),
        "addresses": {name: formula.address for name, formula in formulas.items()},
        **({"bits": shared} if shared else {}),
        "page_bytes": sizes.page_bytes(layout, buffer).plain,
        **({"page_bytes_all_layers": sizes.all_layers_bytes(layout, buffer).plain} if layers else {}),
        "bytes_per_token": sizes.token_bytes(layout, buffer).plain,
    }


def _buffer_lines(layout: Layout, buffer: Buffer, facts: dict[str, Any]) -> list[str]:
    name = (layout.contiguous and "request") or "block"
    record = "" if isinstance(buffer.place.content, Holds) else " and a record"
    lines = [
        buffer.name,
        f"  order    {facts['order']}{record}",
        *([f"  same as  {facts['same_as']}"] if "same_as" in facts else []),
        f"  shape    [{', '.join(map(str, facts['shape']))}] of {' or '.join(facts['dtypes'])}",
        f"  strides  [{', '.join(map(str, facts['strides']))}] elements at least; the tensor's own are used",
        f"  bytes    {facts['page_bytes']} a {name}, {facts['bytes_per_token']} a token{in_layers(facts, name)}",
    ]
    width = max(map(len, ("strides ", *facts["addresses"])))
    for name, address in facts["addresses"].items():
        bits = facts.get("bits", {}).get(name)
        inside = ""
        if bits:
            whole = f"{bits['bits']} bits from bit {bits['first']} on"
            inside = f", {whole}" if bits["bits"] > 1 else f", bit {bits['first']}"
        lines.append(f"  {name:<{width}} {address}{inside}")
    return [*lines, "", *(f"  {line}".rstrip() for line in picture.page(layout, buffer))]


def _pool_line(layout: Layout, facts: dict[str, Any]) -> str:
    total = facts["bytes"]
    human = f" ({sizes.size_text(total)})" if isinstance(total, int) else ""
    blocks = ""
    if facts["blocks"] is not None:
        blocks = f" = {facts['blocks']} {'requests' if layout.contiguous else 'blocks'}"
    plural = "s" * (facts["layers"] != 1)
    return f"pool: {facts['tokens']} tokens{blocks} in {facts['layers']} layer{plural}: {total} bytes{human}"


def _formula(layout: Layout, stream: str, view: View) -> Formula:
    terms = [view.tensor, *(_step(layout, stream, step) for step in coalesce(layout, view.steps))]
    address = " + ".join([*terms, str(view.offset)] if view.offset else terms)
    if view.pack is None:
        return Formula(address)
    bits = 8 * view.itemsize // view.pack.size
    times = f" * {bits}" if bits > 1 else ""
    return Formula(address, _digit(layout, stream, view.pack) + times, bits)


def _step(layout: Layout, stream: str, step: Step) -> str:
    """``(dim // 8) * stride(2)``, ``head * 128``, or the constant that the second half of a pair adds."""
    factors = [] if step.digit.axis == "kv" else [_digit(layout, stream, step.digit)]
    if step.factor != 1:
        factors.append(str(step.factor))
    if step.dim is not None:
        factors.append(f"stride({step.dim})")
    return " * ".join(factors)


def _digit(layout: Layout, stream: str, digit: Digit) -> str:
    """``head``, ``(dim // 8)``, ``(dim % 8)``, ``(slot // 4 % 2)``."""
    if digit.axis == SLOT_NUMBER:
        name, extent = SLOT_NUMBER, None
    else:
        name, extent = sizes.axis_name(layout, digit.axis), sizes.axis_extent(layout, stream, digit.axis)
    text = name if digit.div == 1 else f"{name} // {digit.div}"
    if digit.size is not None and (extent is None or digit.div * digit.size != extent):
        text += f" % {digit.size}"
    return text if text == name else f"({text})"
