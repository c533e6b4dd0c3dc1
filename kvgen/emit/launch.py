"""What the launcher templates are handed: signatures, checks and launches of a module's public functions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvgen.axes import Digit, product
from kvgen.emit.args import argument_scales, chosen, counted_strides, rotated, stage_args
from kvgen.emit.docs import function_doc
from kvgen.emit.kernel import Kernel
from kvgen.emit.names import (
    block_size_name,
    extent_name,
    extent_text,
    extents_of,
    num_blocks_name,
    num_layers_name,
    tuple_text,
)
from kvgen.layout import Buffer, Dim, Layout, Record, Scale, Stream, leaves_of
from kvgen.lower_fuse import PACKED, packed_width
from kvgen.plan import Copy, Norm, Plan
from kvgen.schedule import Schedule, kv_parts

OTHERS = ("total_tokens", "zero_skipped", "rotated", "rank")
"""Parameters that are no tensors and that launches are told apart by."""

DECODED_DTYPES = "(torch.float32, torch.bfloat16, torch.float16)"


@dataclass(frozen=True, slots=True)
class BufferCheck:
    """What a buffer must be; ``align`` is in bytes and only asked of byte records."""

    name: str
    shape: str
    dtypes: str
    align: int


@dataclass(frozen=True, slots=True)
class StreamCheck:
    """What a dense tensor must be. ``variable`` is reassigned where the tensor may come with a head axis of one."""

    variable: str
    shape: str
    dtypes: str
    assign: str
    exact: str


@dataclass(frozen=True, slots=True)
class ScaleCheck:
    """What a scale that is handed in must be."""

    name: str
    shape: str
    dtype: str


@dataclass(frozen=True, slots=True)
class StageCheck:
    """What a weight, a table or positions must be: the function that says, and what it takes after name and tensor."""

    function: str
    name: str
    expected: str


@dataclass(frozen=True, slots=True)
class Size:
    """A size read from a tensor: ``name = _size("key_cache", key_cache, 4, 0)``, times or divided by a constant.

    ``least`` ends the call where the size may not be 0.
    """

    name: str
    tensor: str
    ndim: int
    dim: int
    least: str
    scale: str


@dataclass(frozen=True, slots=True)
class Out:
    """A tensor that gather makes where none is given."""

    name: str
    shape: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Function:
    """One public function that launches a copying kernel."""

    name: str
    summary: str
    doc: tuple[str, ...]
    parameters: tuple[str, ...]
    first_buffer: str
    sizes: tuple[Size, ...]
    buffers: tuple[BufferCheck, ...]
    separate: str  # what is written and must share no memory: names and tensors
    streams: tuple[StreamCheck, ...]
    scales: tuple[ScaleCheck, ...]
    stages: tuple[StageCheck, ...]
    written: tuple[str, ...]  # dense tensors besides gather's that are written
    outs: tuple[Out, ...]
    out_sizes: tuple[Size, ...]  # of dimensions that these have, and the tensors that tell them or their types
    out_tensors: tuple[tuple[str, int], ...]
    count: int
    first_out: str
    out_ndim: int
    slots: str
    kernel: Kernel
    anything: str  # whether there is anything to do
    grid: str
    given: str  # the tensors that every launch takes
    optional: tuple[str, ...]  # those that may be None
    others: str  # what else launches are told apart by, besides what tensors are
    handed: str  # the tensors as the kernel takes them, and the index of a layer
    layered: str
    kept_layers: str
    result: str
    numbers: str
    options: str
    strided: tuple[str, ...]
    tokens: str
    num_slots: str
    remap: str
    num_layers: str
    world: int
    uses: dict[str, bool]


def build_function(layout: Layout, kernel: Kernel) -> Function:
    """The launcher of one kernel."""
    plan, sched = kernel.plan, kernel.schedule
    # What gather is handed is the whole pool, though of a stream in several places it reads one.
    used = {name for copy in plan.copies for name in plan.tensors_of(copy)}
    held = [buffer for buffer in layout.buffers if plan.kind == "gather" or buffer.name in used]
    streams = tuple(dict.fromkeys(_stream_check(layout, plan, copy) for copy in plan.copies))
    if plan.staged:
        streams = fused_streams(layout, plan, streams)
    summary, doc = function_doc(layout, plan)
    exact = bool(plan.staged) or any(layout.stream(copy.stream).encoding for copy in plan.copies)
    parameters = tuple(_parameters(layout, plan, held))
    names = [name.partition("=")[0] for name in parameters]
    optional = tuple(arg.value for arg in kernel.args if arg.role == "optional")
    given = [arg.name.removesuffix("_ptr") for arg in kernel.args if arg.role == "pointer"]
    indexed = any(arg.role == "index" for arg in kernel.args)  # of one layer there is no index to hand over
    others = [name for name in OTHERS if name in names] + ["layer"] * ("layer" in names and not indexed)
    others += [f"{name} is None" for name in optional]
    others += unread_kinds([buffer.name for buffer in held if buffer.name not in given])
    sizes = tuple(sizes_of(layout, held))
    outs = _outs(layout, plan, streams)
    written = [each.name for each in (outs or held)]
    out_sizes, out_tensors = _told(outs, sizes, held)
    table = [arg.value for arg in kernel.args if arg.name == "num_positions"]  # one without rows has no angles
    return Function(
        name=plan.name,
        summary=summary,
        doc=doc,
        parameters=parameters,
        first_buffer=held[0].name,
        sizes=sizes,
        buffers=tuple(buffer_check(layout, b, _align(plan, b)) for b in held),
        separate=", ".join(f'"{name}", {name}' for name in written),
        streams=streams,
        scales=tuple(scale_check(layout, scale) for scale in argument_scales(layout, plan)),
        stages=stage_checks(layout, plan),
        written=(plan.query.destination.tensor,) if plan.query else (),
        outs=outs,
        out_sizes=out_sizes,
        out_tensors=out_tensors,
        count=len(plan.streams),
        first_out=outs[0].name if outs else "",
        out_ndim=len(layout.stream(plan.copies[0].stream).axes) + 1,
        slots="slot_mapping" if plan.kind == "append" else "slots",
        kernel=kernel,
        grid=_grid(layout, kernel),
        given=", ".join(given),
        optional=optional,
        others="".join(f", {other}" for other in others),
        handed=", ".join(arg.value for arg in kernel.args if arg.role in ("pointer", "optional", "index")),
        layered=", layer=layer" if indexed else "",
        kept_layers=f", num_layers={num_layers_name(layout)}" if indexed else "",
        result=f" {', '.join(out.name for out in outs)}" if outs else "",
        numbers=tuple_text([arg.value for arg in kernel.args if arg.role not in ("pointer", "optional", "index")]),
        tokens=f"{sched.few_tokens} if num_tokens <= {sched.few} else {sched.tokens}",
        options=_options(kernel.schedule, exact),
        strided=counted_strides(kernel.args, "stride_unit"),
        anything=" and ".join(f"{count} > 0" for count in ("num_tokens", *table)),
        num_slots=f"{num_blocks_name(layout)} * {block_size_name(layout)}",
        remap=layout.slots.remap or "",
        num_layers=num_layers_name(layout),
        world=layout.slots.shard.world if layout.slots.shard else 1,
        uses=kernel.uses
        | {
            "several": len(plan.streams) > 1,
            "separate": len(written) > 1,
            "heads_by_count": kernel.query is not None and bool(kernel.query.heads),
            "layer": "layer" in names,
            "rank": layout.slots.shard is not None and plan.placement != "slots",
        },
    )


def _outs(layout: Layout, plan: Plan, streams: tuple[StreamCheck, ...]) -> tuple[Out, ...]:
    """What gather makes where it is given none."""
    if plan.kind != "gather":
        return ()
    return tuple(_out(layout, plan, check, copy.stream) for check, copy in zip(streams, plan.copies, strict=False))


def _told(
    outs: tuple[Out, ...], sizes: tuple[Size, ...], held: list[Buffer]
) -> tuple[tuple[Size, ...], tuple[tuple[str, int], ...]]:
    """The sizes that these have, and the buffers that tell sizes, types and device, with their dimensions."""
    words = set(re.findall(r"\w+", " ".join(out.shape + out.dtype for out in outs)))
    found = tuple(size for size in sizes if size.name in words)
    words |= {held[0].name, *(size.tensor for size in found)}
    return found, tuple((buffer.name, buffer.ndim) for buffer in held if outs and buffer.name in words)


def unread_kinds(tensors: list[str]) -> list[str]:
    """What launches are told apart by of tensors that are checked, and sizes read from them, but not handed over."""
    return [f"_kind({tensor})" for tensor in tensors]


def buffer_check(layout: Layout, buffer: Buffer, align: int = 1) -> BufferCheck:
    return BufferCheck(buffer.name, tuple_text(shape_parts(layout, buffer)), _dtypes(layout, buffer), align)


def scale_check(layout: Layout, scale: Scale) -> ScaleCheck:
    stream = scale.name.partition(".")[0]
    shape = []
    for axis in scale.axes:
        name = num_layers_name(layout) if axis.name == "layer" else extent_name(layout, stream, axis.name)
        shape.append(str(axis.count) if axis.step > 1 else name.lower() if axis.extent is None else name)
    return ScaleCheck(scale.argument, tuple_text(shape or ["1"]), f"torch.{scale.dtype}")


def _out(layout: Layout, plan: Plan, check: StreamCheck, stream: str) -> Out:
    buffer = layout.buffer(plan.cache_view(next(c for c in plan.copies if c.stream == stream)).tensor)
    dtypes = layout.stream(stream).dtypes
    dtype = f"{buffer.name}.dtype" if buffer.dtypes == dtypes else f"torch.{dtypes[0]}"
    if layout.stream(stream).encoding:
        dtype = f"dtype or torch.{dtypes[0]}"
    elif stream in chosen(layout, plan):
        dtype = f"dtype if dtype in {dtypes_name(layout, layout.stream(stream))} else {dtype}"
    return Out(check.variable, f"(num_tokens, {check.shape.strip('(),')})", dtype)


def dtypes_name(layout: Layout, stream: Stream) -> str:
    """``DTYPES``, or ``KEY_DTYPES`` where the streams differ; of what lies in the pool the types themselves."""
    if layout.of_leaves:
        bytes_too = ["torch.uint8"] if stream.dtypes[0].startswith("float8") else []
        return tuple_text([*(f"torch.{dtype}" for dtype in stream.dtypes), *bytes_too])
    if len({s.dtypes for s in layout.streams}) == 1:
        return "DTYPES"
    return f"{stream.name.upper()}_DTYPES"


def _dtypes(layout: Layout, buffer: Buffer) -> str:
    leaf = layout.leaf(leaves_of(buffer.place)[0])
    if buffer.dtypes == leaf.dtypes == layout.stream(leaf.stream).dtypes and leaf.name == leaf.stream:
        return dtypes_name(layout, layout.stream(leaf.stream))
    return tuple_text([f"torch.{dtype}" for dtype in buffer.dtypes])


def _align(plan: Plan, buffer: Buffer) -> int:
    """Bytes that addresses must be a multiple of, where a byte tensor is read and written in wider pieces."""
    views = [view for copy in plan.copies for view in copy.views]
    return max([v.access for v in views if v.tensor == buffer.name and v.unit < v.access], default=1)


def sizes_of(layout: Layout, buffers: list[Buffer]) -> list[Size]:
    """How the number of blocks and every dynamic extent are read from the buffers."""
    best: Size | None = None
    finest = 0
    dynamic: dict[str, Size] = {}
    for buffer in buffers:
        for i, dim in enumerate(buffer.place.dims):
            top = dim.digits[0] if dim.digits else Digit("", 1, 1)
            if len(dim.digits) == 1 and top.size is None and top.div == 1 and top.axis != "block":
                name = _extent_variable(layout, buffer, top.axis)
                dynamic.setdefault(name, Size(name, buffer.name, buffer.ndim, i, ", 1", ""))
            if top.axis == "block" and top.size is None and top.div > finest:
                finest = top.div
                best = Size(num_blocks_name(layout), buffer.name, buffer.ndim, i, "", _block_scale(layout, dim))
    assert best is not None, "every buffer holds blocks"
    return [*dynamic.values(), best]


def _extent_variable(layout: Layout, buffer: Buffer, axis: str) -> str:
    if axis == "slot":
        return block_size_name(layout)
    if axis == "layer":
        return num_layers_name(layout)
    return extent_name(layout, layout.leaf(leaves_of(buffer.place)[0]).stream, axis).lower()


def _block_scale(layout: Layout, dim: Dim) -> str:
    """What turns the size of a dimension whose topmost digit is of ``block`` into the number of blocks."""
    times = f" * {dim.digits[0].div}" if dim.digits[0].div > 1 else ""
    inner = product(d.size for d in dim.digits[1:])
    over = block_size_name(layout) if inner is None else str(inner)
    return f"{times} // {over}" if inner != 1 else times


def shape_parts(layout: Layout, buffer: Buffer) -> list[str]:
    """The tensor's shape as Python expressions."""
    parts = [_dim_size_text(layout, buffer, dim) for dim in buffer.place.dims]
    if isinstance(buffer.place.content, Record):
        parts.append(str(buffer.place.content.size // buffer.unit))
    return parts


def _dim_size_text(layout: Layout, buffer: Buffer, dim: Dim) -> str:
    factors, constant = [], 1
    for digit in dim.digits:
        if digit.size is None:
            factors.append(rest_text(layout, buffer, digit))
        else:
            whole = whole_name(layout, buffer, digit)
            factors += [whole] if whole else []
            constant *= 1 if whole else digit.size
    if constant != 1 or not factors:
        factors.append(str(constant))
    return " * ".join(factors)


def whole_name(layout: Layout, buffer: Buffer, digit: Digit) -> str | None:
    """The constant's name where a digit is a whole axis."""
    leaf = layout.leaf(leaves_of(buffer.place)[0])
    if layout.of_leaves and digit.axis == "dim":
        return None
    if digit.div != 1 or digit.axis in ("kv", "bit") or digit.size != extents_of(layout, leaf.name).get(digit.axis):
        return None
    if digit.axis == "slot":
        return block_size_name(layout)
    return num_layers_name(layout) if digit.axis == "layer" else extent_name(layout, leaf.stream, digit.axis)


def rest_text(layout: Layout, buffer: Buffer, digit: Digit) -> str:
    name = num_blocks_name(layout) if digit.axis == "block" else _extent_variable(layout, buffer, digit.axis)
    return name if digit.div == 1 else f"({name} // {digit.div})"


def _stream_check(layout: Layout, plan: Plan, copy: Copy) -> StreamCheck:
    name, stream = copy.stream, layout.stream(copy.stream)
    buffer = layout.buffer(plan.cache_view(copy).tensor)
    shape = []
    for axis in stream.axes:
        shape.append(extent_text(layout, name, axis))
    if stream.encoding:
        dtypes = dtypes_name(layout, stream) if plan.kind == "append" else DECODED_DTYPES
    else:
        dtypes = f"({buffer.name}.dtype,)" if buffer.dtypes == stream.dtypes else dtypes_name(layout, stream)
    variable = plan.dense_view(copy).tensor
    headless = all(axis.name != "head" for axis in stream.axes)
    return StreamCheck(
        variable=variable,
        shape=tuple_text(shape),
        dtypes=dtypes,
        assign=f"{variable} = " if headless else "",
        exact=", exact=True" if plan.kind == "gather" else "",
    )


def fused_streams(layout: Layout, plan: Plan, checks: tuple[StreamCheck, ...]) -> tuple[StreamCheck, ...]:
    """The same for a fused append: what is packed is one tensor, and there may be a query and its output."""
    if layout.fuse.packed:
        kinds = dict.fromkeys(check.dtypes for check in checks)
        checks = tuple(StreamCheck(PACKED, f"({packed_width(layout)},)", kind, "", "") for kind in kinds)
    if plan.query is None:
        return checks
    query = layout.query
    shape = tuple_text([extent_name(layout, query.name, axis.name) for axis in query.axes])
    source, out = plan.query.source.tensor, plan.query.destination.tensor
    found = () if layout.fuse.packed else (StreamCheck(source, shape, dtypes_name(layout, query), "", ""),)
    return (*found, *checks, StreamCheck(out, shape, f"({source}.dtype,)", "", ""))


def stage_checks(layout: Layout, plan: Plan) -> tuple[StageCheck, ...]:
    """What the stages of a plan take besides values."""
    found: dict[str, StageCheck] = {}
    if rotary := plan.rotary:
        rows = "3" if rotary.mrope else "1"
        found["positions"] = StageCheck("_check_positions", "positions", f"num_tokens, {rows}")
    for copy in plan.staged:
        kinds = f"(torch.float32, {copy.source.tensor}.dtype)"
        for stage in copy.stages:
            if isinstance(stage, Norm):
                if stage.weight:
                    name, dim = stage.weight.tensor, extent_name(layout, copy.stream, "dim")
                    found[name] = StageCheck("_check_weight", name, f"{dim}, {kinds}")
                continue
            width = stage.rope.pairs if stage.rope.cos_sin == "split" else stage.rope.rotary_dim
            for view in (stage.cos, stage.sin):
                if view is not None:
                    shape = f'(_size("{stage.cos.tensor}", {stage.cos.tensor}, 2, 0), {width})'
                    found.setdefault(view.tensor, StageCheck("_check_angles", view.tensor, f"{shape}, {kinds}"))
    return tuple(found.values())


def _parameters(layout: Layout, plan: Plan, held: list[Buffer]) -> list[str]:
    slots = layout.slots
    names = list(dict.fromkeys(copy.source.tensor for copy in plan.copies)) if plan.kind == "append" else []
    if plan.query:
        names = [*dict.fromkeys([plan.query.source.tensor, *names]), plan.query.destination.tensor]
    names += [buffer.name for buffer in held]
    names += {
        "slots": ["slot_mapping" if plan.kind == "append" else "slots"],
        "positions": ["block_table", "positions"],
        "requests": ["block_table", "seq_lens", "cu_seq_lens"],
    }[plan.placement]
    names += [slots.remap] if slots.remap else []
    names += ["positions"] if plan.rotary else []
    names += [arg.value for arg in stage_args(plan.staged)]
    names += [scale.argument for scale in argument_scales(layout, plan)]
    names += ["request_ids=None"] if plan.placement == "positions" else []
    keywords = ["starts=None", "total_tokens=None"] if plan.placement == "requests" else []
    keywords += ["layer"] if layout.layers else []
    keywords += ["rank"] if slots.shard and plan.placement != "slots" else []
    if plan.kind == "gather":
        keywords += ["dtype=None"] if chosen(layout, plan) else []
        keywords += ["rotated=False"] if rotated(layout, plan) else []
        keywords += ["out=None", "zero_skipped=False"]
    return [*names, "*", *keywords] if keywords else names


def _options(sched: Schedule, exact: bool) -> str:
    """``exact``: products and sums are kept apart, and so few tokens are worked on that more warps pay."""
    warps = f"num_warps={sched.num_warps}"
    if sched.few_warps != sched.num_warps:
        warps = f"num_warps={sched.few_warps} if num_tokens <= {sched.some} else {sched.num_warps}"
    few, many = sched.few_registers, sched.registers
    most = str(many) if few == many else f"{few} if num_tokens <= {sched.some} else {many}"
    registers = f", **_registers(device, {most})" if few or many else ""
    return warps + (", enable_fp_fusion=False" if exact else "") + registers


def _grid(layout: Layout, kernel: Kernel) -> str:
    sched = kernel.schedule
    tile = "tokens" if sched.by_count else str(sched.tokens)
    tokens = "num_tokens" if sched.tokens == 1 else f"triton.cdiv(num_tokens, {tile})"
    parts = kv_parts(layout, kernel.plan, sched)
    if kernel.query:
        count = kernel.query.parts
        return f"({tokens}, {parts + count})" if isinstance(count, int) else f"({tokens}, {parts} + {count})"
    return f"({tokens}{'' if parts == 1 else f' * {parts}'},)"
