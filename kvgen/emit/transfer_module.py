"""The context of a transfer's module: its functions, their checks, and what they call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvgen import sizes
from kvgen.emit.args import Arg, counted_strides
from kvgen.emit.launch import BufferCheck, ScaleCheck, Size, scale_check, shape_parts, sizes_of, unread_kinds
from kvgen.emit.names import (
    block_size_name,
    docstring_line,
    extent_name,
    num_blocks_name,
    num_layers_name,
    tuple_text,
)
from kvgen.emit.ops import Ops, build_transfer_ops
from kvgen.emit.transfer import build_transfer_kernel
from kvgen.emit.transfer_docs import function_doc, module_doc
from kvgen.emit.transfer_sections import TransferKernel
from kvgen.functions import chosen
from kvgen.layout import Buffer, Layout, leaves_of
from kvgen.lower_transfer import lower_transfer
from kvgen.plan import Plan
from kvgen.transfer import Transfer, leaves_of_stream


@dataclass(frozen=True, slots=True)
class SideChecks:
    """What a function requires of one side's tensors. ``tables`` are lists of tensors, one a layer."""

    prefix: str
    slots: str
    tables: tuple[str, ...]
    sizes: tuple[Size, ...]
    buffers: tuple[BufferCheck, ...]
    scales: tuple[ScaleCheck, ...]
    layer: bool
    num_layers: str
    heads: str
    num_slots: str
    block_size: str
    unit: int
    counted: bool  # whether strides are counted in such units
    strided: str


@dataclass(frozen=True, slots=True)
class TransferFunction:
    """One public function of a transfer's module."""

    name: str
    summary: str
    doc: tuple[str, ...]
    parameters: tuple[str, ...]
    slots: str
    sides: tuple[SideChecks, ...]
    kernel: TransferKernel
    same: tuple[tuple[str, str], ...]  # buffers of the two sides that hold the same values: their types must agree
    dtypes: str  # of values that lie in bytes and are worked on
    first_dtype: str
    heads: bool
    head_counts: str
    whole_heads: str  # what all heads share and is written with them, so that all must be moved
    most_heads: str
    layers: tuple[str, ...]  # how many layers there are, by each thing that tells
    tables: tuple[str, ...]
    given: str  # the tensors that a launch takes
    others: str  # what else launches are told apart by
    handed: str  # the tensors as the kernel takes them
    numbers: str
    aligned: str
    covered: str
    times: str
    tokens: str
    head_tile: str  # where a capped grid has another
    stages: str
    step: str
    options: str
    uses: dict[str, bool]


@dataclass(frozen=True, slots=True)
class TransferModule:
    """A generated module, ready to print."""

    title: str
    doc: tuple[str, ...]
    exports: str
    constants: tuple[tuple[str, str], ...]
    description: str
    functions: tuple[TransferFunction, ...]
    kernels: tuple[TransferKernel, ...]
    kept: tuple[str, ...]  # the functions whose launches are kept
    ops: Ops


def build_transfer_module(transfer: Transfer) -> TransferModule:
    """Everything the module template prints for a transfer."""
    kernels = tuple(build_transfer_kernel(transfer, plan) for plan in lower_transfer(transfer))
    functions = tuple(_function(transfer, kernel) for kernel in kernels)
    names = ["TRANSFER", *chosen(transfer)]
    names += ["PointerTable"] if "pointer_table" in names else []
    return TransferModule(
        title=docstring_line(f"{transfer.name}: {transfer.summary}") if transfer.summary else transfer.name,
        doc=tuple(module_doc(transfer)),
        exports=repr(names),
        constants=tuple(_constants(transfer)),
        description=repr(describe(transfer)),
        functions=functions,
        kernels=kernels,
        kept=tuple(function.name for function in functions),
        ops=build_transfer_ops(transfer, functions),
    )


def describe(transfer: Transfer) -> dict[str, Any]:
    """The transfer as plain data, for programs that use the module."""
    return {
        "name": transfer.name,
        "summary": transfer.summary,
        "source": transfer.source.name,
        "destination": transfer.destination.name,
        "layers": transfer.layers,
        "streams": {s.name: "moved" if transfer.raw(s.name) else "requantised" for s in transfer.source.streams},
        "buffers": {
            buffer.name: {"order": sizes.order(layout, buffer.place), "holds": list(leaves_of(buffer.place))}
            for layout in transfer.sides
            for buffer in layout.buffers
        },
    }


def _constants(transfer: Transfer) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    for layout in transfer.sides:
        if layout.block_size is not None:
            found[block_size_name(layout)] = str(layout.block_size)
        if layout.layers and layout.layers.extent is not None:
            found[num_layers_name(layout)] = str(layout.layers.extent)
        if layout.regions and layout.regions.extent is not None and transfer.layers == "all":
            found[_regions_name(layout)] = str(layout.regions.extent)
        for stream in layout.streams:
            for axis in stream.axes:
                if axis.extent is not None:
                    found[extent_name(layout, stream.name, axis.name)] = str(axis.extent)
    found["PROGRAMS"] = str(transfer.programs)
    return list(found.items())


def _function(transfer: Transfer, kernel: TransferKernel) -> TransferFunction:
    plan, sched = kernel.plan, kernel.schedule
    summary, doc = function_doc(transfer, plan)
    source, destination = (_side(transfer, kernel, layout, i) for i, layout in enumerate(transfer.sides))
    # A size of both sides is read from the first, and the second is held against it.
    shared = {size.name for size in source.sizes}
    sides = (source, replace(destination, sizes=tuple(s for s in destination.sizes if s.name not in shared)))
    encoded = any(not copy.leaf for copy in plan.copies)
    dtypes = _value_types(transfer, kernel)
    parameters = tuple(_parameters(transfer, kernel, sides))
    keywords = [name.partition("=")[0] for name in parameters[parameters.index("*") + 1 :]]
    tables = tuple(table for side in sides for table in side.tables)
    pointers = [arg for arg in kernel.args if arg.role == "pointer"]
    given = [_given(arg, tables) for arg in pointers]
    buffers = [buffer.name for side in sides for buffer in side.buffers]
    unread = [f"{name}_table.tensors[0]" if name in tables else name for name in buffers]
    unread = [tensor for tensor in unread if tensor not in given]
    return TransferFunction(
        name=plan.name,
        summary=summary,
        doc=doc,
        parameters=parameters,
        slots=sides[0].slots,
        sides=sides,
        kernel=kernel,
        same=tuple(_same(plan)),
        dtypes=tuple_text(dtypes) if dtypes else "",
        first_dtype=dtypes[0] if dtypes else "",
        heads=transfer.sharded,
        head_counts=", ".join(_head_name(layout) for layout in transfer.sides),
        whole_heads=_shared_by_heads(transfer),
        most_heads=_head_name(transfer.source),
        layers=tuple(_layer_counts(transfer, sides)),
        tables=tables,
        given=", ".join(given),
        others=tuple_text([*keywords, *(f"{table}_table.kind" for table in tables), *unread_kinds(unread)]),
        handed=", ".join(arg.value for arg in pointers),
        numbers=tuple_text([arg.value for arg in kernel.args if arg.role != "pointer"]),
        aligned=" and ".join(f"{table}_table.aligned" for side in kernel.sides for table in side.tables),
        covered=", ".join(f"{side.prefix}count * {side.block_size}" for side in sides),
        times=(" * num_layers" if transfer.layers == "all" else "")
        + (f" * {_head_tiles(kernel)}" if sched.heads else ""),
        tokens=_unless_capped(sched.plain.tokens, sched.capped.tokens),
        head_tile=_unless_capped(sched.heads, sched.capped.heads) if sched.heads != sched.capped.heads else "",
        stages=_stages(sched.capped.stages),
        step=str(sched.together or "tokens"),
        options=_options(kernel, encoded),
        uses=kernel.uses,
    )


def _given(arg: Arg, tables: tuple[str, ...]) -> str:
    """A tensor that is handed over, as it was handed in: the first of a table, and not yet taken for bytes."""
    name = arg.value.removesuffix(".view(torch.uint8)")
    return f"{name}_table.tensors[0]" if name in tables else name


def _head_tiles(kernel: TransferKernel) -> str:
    """How many tiles all heads make up, as the launcher counts them."""
    return "heads" if kernel.head_tile == "1" else f"triton.cdiv(heads, {kernel.head_tile.lower()})"


def _unless_capped(plain: int, capped: int) -> str:
    return str(plain) if plain == capped else f"{plain} if programs is None else {capped}"


def _stages(capped: int) -> str:
    staged = "1" if capped == 1 else f"{capped} if _stages_pay(device) else 1"
    return f"0 if programs is None else {staged}"


def _options(kernel: TransferKernel, encoded: bool) -> str:
    sched = kernel.schedule
    warps = f"num_warps={_unless_capped(sched.plain.num_warps, sched.capped.num_warps)}"
    registers = f", **_registers(device, {bound} if stages > 1 else 0)" if (bound := sched.capped.registers) else ""
    return warps + (", enable_fp_fusion=False" if encoded else "") + registers


def _side(transfer: Transfer, kernel: TransferKernel, layout: Layout, index: int) -> SideChecks:
    scales = _argument_scales(layout, kernel.plan)
    return SideChecks(
        prefix=layout.prefix,
        slots="slots" if kernel.uses["by_slots"] else "blocks",
        tables=_listed(transfer, layout),
        sizes=tuple(sizes_of(layout, list(layout.buffers))),
        buffers=tuple(_buffer(layout, buffer, kernel.plan) for buffer in layout.buffers),
        scales=tuple(scale_check(layout, scale) for scale in scales),
        layer=transfer.layers == "one" and layout.layers is not None,  # of one layer too, whose index is checked
        num_layers=num_layers_name(layout),
        heads=_head_name(layout),
        num_slots=f"{num_blocks_name(layout)} * {block_size_name(layout)}",
        block_size=block_size_name(layout),
        unit=kernel.stride_units[index],
        counted=kernel.stride_units[index] > 1,
        strided=", ".join(counted_strides(kernel.args, f"{layout.prefix}stride_unit")),
    )


def _listed(transfer: Transfer, layout: Layout) -> tuple[str, ...]:
    """Buffers that are handed over as lists, those that are not read among them."""
    one = transfer.layers == "one" or layout.layers is not None
    return () if one else tuple(buffer.name for buffer in layout.buffers)


def _buffer(layout: Layout, buffer: Buffer, plan: Plan) -> BufferCheck:
    dtypes = tuple_text([f"torch.{dtype}" for dtype in buffer.dtypes])
    views = [view for copy in plan.copies for view in (*copy.views, copy.onto.scale, copy.onto.zero) if view]
    align = max([v.access for v in views if v.tensor == buffer.name and v.unit < v.access], default=1)
    return BufferCheck(buffer.name, tuple_text(shape_parts(layout, buffer)), dtypes, align)


def _head_name(layout: Layout) -> str:
    for stream in layout.streams:
        for axis in stream.axes:
            if axis.name == "head":
                name = extent_name(layout, stream.name, "head")
                return name.lower() if axis.extent is None else name
    return ""


def _argument_scales(layout: Layout, plan: Plan):
    scales = [layout.stream(copy.stream).scale for copy in plan.copies if not copy.leaf]
    parts = [part for scale in scales if scale for part in (scale, scale.scale) if part]
    return list({part.name: part for part in parts if not part.stored}.values())


def _regions_name(layout: Layout) -> str:
    """The constant that holds how many allocations there are, one a layer."""
    return f"{layout.prefix.upper()}NUM_LAYERS"


def _same(plan: Plan):
    """Pairs of buffers whose elements are the values that are moved: one type on both sides."""
    pairs = {}
    for copy in plan.copies:
        typed = all(view.unit == view.itemsize > 1 for view in (copy.source, copy.destination))
        if copy.leaf and typed:
            pairs[copy.source.tensor, copy.destination.tensor] = None
    return list(pairs)


def _value_types(transfer: Transfer, kernel: TransferKernel) -> list[str]:
    """The types that values in bytes may be taken for, where it matters."""
    if not any(arg.role == "dtype" for arg in kernel.args):
        return []
    kinds = [
        layout.stream(copy.stream).dtypes
        for copy in kernel.plan.copies
        if not copy.leaf
        for layout, view in zip(transfer.sides, (copy.source, copy.destination), strict=True)
        if layout.stream(copy.stream).encoding is None and view.unit != view.itemsize
    ]
    return [f"torch.{dtype}" for dtype in kinds[0] if all(dtype in other for other in kinds)]


def _shared_by_heads(transfer: Transfer) -> str:
    """What is written and does not vary over heads, of streams that do."""
    for stream in transfer.destination.streams:
        if stream.axes[0].name != "head":
            continue
        dynamic = stream.scale is not None and stream.scale.dynamic
        for leaf in leaves_of_stream(transfer.destination, stream.name):
            if (transfer.raw(stream.name) or dynamic) and "head" not in [axis.name for axis in leaf.axes]:
                return leaf.name
    return ""


def _layer_counts(transfer: Transfer, sides: tuple[SideChecks, ...]) -> list[str]:
    if transfer.layers == "one":
        return []
    counts = []
    for side, layout in zip(sides, transfer.sides, strict=True):
        counts += [f"len({table}_table.tensors)" for table in side.tables]
        counts += [side.num_layers] if side.num_layers else []
        counts += [_regions_name(layout)] if layout.regions and layout.regions.extent is not None else []
    return list(dict.fromkeys(counts))


def _parameters(transfer: Transfer, kernel: TransferKernel, sides: tuple[SideChecks, ...]) -> list[str]:
    names = [buffer.name for side in sides for buffer in side.buffers]
    names += [f"{side.prefix}{side.slots}" for side in sides]
    names += [scale.name for side in sides for scale in side.scales]
    keywords = [f"{side.prefix}layer" for side in sides if side.layer]
    if transfer.sharded:
        extents = {
            axis.extent for layout in transfer.sides for s in layout.streams for axis in s.axes if axis.name == "head"
        }
        keywords += (
            ["src_head", "dst_head", "heads"] if len(extents) > 1 else ["src_head=0", "dst_head=0", "heads=None"]
        )
    keywords += ["num_tokens=None"] if kernel.uses["by_blocks"] else []
    keywords += ["dtype=None"] if any(arg.role == "dtype" for arg in kernel.args) else []
    return [*names, "*", *keywords, "programs=PROGRAMS"]
