"""The arguments of copying kernels, and how the launcher hands them over."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvgen import sizes
from kvgen.axes import product
from kvgen.emit.names import TRITON_TYPES
from kvgen.lanes import VECTOR
from kvgen.layout import Buffer, Layout, Scale
from kvgen.lower import coalesce
from kvgen.lower_fuse import PACKED, packed_width
from kvgen.plan import Copy, Norm, Plan, Rotary, View

Role = Literal[
    "pointer", "optional", "stride", "extent", "index", "count", "tile", "tokens", "flag", "unit", "native",
    "heads", "head_tile", "aligned", "dtype", "stages", "run", "many",
]  # fmt: skip
CONSTANT = (
    "tile", "tokens", "flag", "unit", "native", "heads", "head_tile", "aligned", "dtype", "stages", "run", "many",
)  # fmt: skip
"""The roles of arguments that are compiled in."""


@dataclass(frozen=True, slots=True)
class Arg:
    """A kernel argument: its name, its Triton type at a launch, and the launcher's expression for it.

    Integers that fit have 32 bits to Triton. Strides and extents are specialised: 1 is a constant, and 16 a divisor
    that is known, as it is of pointers. Counts and the index of a layer are not. An ``optional`` pointer may be None;
    those of CONSTANT are constexpr.
    """

    name: str
    type: str
    value: str
    role: Role
    divisible: bool = False  # whether a stride is a multiple of 16 in tensors that are not padded
    compiled: int | None = None  # what a constant is in tensors that are not padded, where its role does not tell
    few: int | None = None  # and where there are few tokens

    @property
    def declaration(self) -> str:
        return f"{self.name}: tl.constexpr" if self.role in CONSTANT else self.name


def data_args(layout: Layout, plan: Plan) -> list[Arg]:
    """Pointers of the streams' tensors and of the buffers, in the order of the layout."""
    cache = {name for copy in plan.copies for name in plan.tensors_of(copy)}
    args = []
    for name, stream in {plan.dense_view(copy).tensor: copy.stream for copy in plan.copies}.items():
        dtype = layout.stream(stream).dtypes[0]
        args.append(pointer(name, dtype))
    for buffer in layout.buffers:
        if buffer.name in cache:
            args.append(pointer(buffer.name, buffer.dtypes[0]))
    args += stage_args(plan.copies)
    for scale in argument_scales(layout, plan):
        args.append(pointer(scale.argument, scale.dtype))
    return args


def pointer(name: str, dtype: str) -> Arg:
    """A pointer to a tensor. What takes a byte is handed over as bytes: not every backend knows every type of them."""
    if dtype in TRITON_TYPES:
        return Arg(f"{name}_ptr", f"*{TRITON_TYPES[dtype]}", name, "pointer")
    return Arg(f"{name}_ptr", "*u8", f"{name}.view(torch.uint8)", "pointer")


def argument_scales(layout: Layout, plan: Plan) -> list[Scale]:
    """The static scales that a function is handed, in the order of its streams; one that these share is one."""
    scales = [layout.stream(name).scale for name in plan.streams]
    scales = [part for scale in scales if scale is not None for part in (scale, scale.scale) if part is not None]
    return list({scale.name: scale for scale in scales if not scale.stored}.values())


def chosen(layout: Layout, plan: Plan) -> tuple[str, ...]:
    """The streams that are gathered in a type of the caller's choice, since bytes do not tell."""
    found = []
    for copy in plan.copies:
        stream, buffer = layout.stream(copy.stream), layout.buffer(copy.source.tensor)
        if stream.encoding is not None or (buffer.dtypes != stream.dtypes and len(stream.dtypes) > 1):
            found.append(stream.name)
    return tuple(found)


def rotated(layout: Layout, plan: Plan) -> tuple[str, ...]:
    """The streams of a plan that are stored rotated."""
    streams = [layout.stream(name) for name in plan.streams]
    return tuple(stream.name for stream in streams if stream.encoding and stream.encoding.rotation)


def stage_args(copies: Iterable[Copy]) -> list[Arg]:
    """Pointers of the weights that stages take, then of their tables, each once."""
    stages = [stage for copy in copies for stage in copy.stages]
    weights = [(stage.weight, "*bf16") for stage in stages if isinstance(stage, Norm)]
    tables = [(view, "*fp32") for stage in stages if isinstance(stage, Rotary) for view in (stage.cos, stage.sin)]
    found = {view.tensor: kind for view, kind in weights + tables if view is not None}
    return [Arg(f"{name}_ptr", kind, name, "pointer") for name, kind in found.items()]


def position_args(plan: Plan) -> list[Arg]:
    """What the angles of a token are found with; a position past the table belongs to no angle."""
    rotary = plan.rotary
    if rotary is None:
        return []
    args = [Arg("positions_ptr", "*i64", "positions", "pointer")]
    if rotary.mrope:
        args.append(Arg("positions_stride", "i32", "positions.stride(0) if positions.dim() == 2 else 0", "count"))
    tables = [stage.cos for copy in plan.staged for stage in copy.stages if isinstance(stage, Rotary)]
    if found := [table.tensor for table in tables if table]:
        args.append(Arg("num_positions", "i32", f"{found[0]}.shape[0]", "count"))
    return args


def placement_args(layout: Layout, plan: Plan) -> list[Arg]:
    """What a token's slot number is found with."""
    remap = layout.slots.remap
    mapped = []
    if remap:
        mapped = [
            Arg(f"{remap}_ptr", "*i64", remap, "pointer"),
            Arg(f"{remap}_length", "i32", f"{remap}.shape[0]", "count"),
        ]
    if plan.placement == "slots":
        name = "slot_mapping" if plan.kind == "append" else "slots"
        return [Arg(f"{name}_ptr", "*i64", name, "pointer"), *mapped]
    table = [
        Arg("block_table_ptr", "*i32", "block_table", "pointer"),
        Arg("block_table_stride", "i32", "block_table.stride(0)", "count"),
        Arg("num_columns", "i32", "block_table.shape[1]", "count"),
    ]
    rank = [Arg("rank", "i32", "rank", "count")] if layout.slots.shard else []
    if plan.placement == "positions":
        return [
            *table,
            Arg("num_rows", "i32", "block_table.shape[0]", "count"),
            Arg("positions_ptr", "*i64", "positions", "pointer"),
            Arg("request_ids_ptr", "*i64", "request_ids", "optional"),
            *rank,
            *mapped,
        ]
    return [
        *table,
        Arg("seq_lens_ptr", "*i32", "seq_lens", "pointer"),
        Arg("cu_seq_lens_ptr", "*i32", "cu_seq_lens", "pointer"),
        Arg("starts_ptr", "*i32", "starts", "optional"),
        Arg("num_requests", "i32", "batch_size", "count"),
        *rank,
        *mapped,
    ]


def stride_unit(layout: Layout, plan: Plan) -> int:
    """Elements that strides are counted in where these divide them, if 16 do not divide all: a power of two.

    The compiler itself looks at divisibility by 16 only; strides handed over in such units stay known as multiples.
    What 16 divides is counted too where that loses nothing: addresses take fewer instructions then.
    """
    short = [
        factor
        for copy in (*plan.copies, *([plan.query] if plan.query else []))
        for view in (copy.source, copy.destination)
        for step in coalesce(layout, view.steps)
        if step.dim is not None
        for factor in stride_factors(layout, view, copy.stream, step.dim)
        if factor % 16
    ]
    return max((math.gcd(widest_unit(plan), factor) for factor in short), default=1)


def widest_unit(plan: Plan) -> int:
    """Elements of the widest access to the cache."""
    return VECTOR // min(plan.cache_view(copy).unit for copy in plan.copies)


def counted_strides(args: Iterable[Arg], unit: str) -> tuple[str, ...]:
    """The launcher's expressions of the strides that a kernel takes in units of that name."""
    counted = f" // {unit}"
    return tuple(arg.value.removesuffix(counted) for arg in args if arg.value.endswith(counted))


def smallest_stride(layout: Layout, buffer: Buffer | None, dim: int) -> int | None:
    """A stride of a buffer that is not padded, where it is known; of other tensors it is not."""
    return None if buffer is None else sizes.strides(layout, buffer)[dim].value


def stride_factors(layout: Layout, view: View, stream: str, dim: int) -> list[int]:
    """The constant factors of a stride, term by term, in tensors that are not padded."""
    buffer = next((b for b in layout.buffers if b.name == view.tensor), None)
    if view.tensor == PACKED:
        return [packed_width(layout)]
    if buffer is None:
        return [product(axis.extent for axis in layout.stream(stream).axes[dim:]) or 1]
    stride = sizes.strides(layout, buffer)[dim]
    return [int(factor) if factor.denominator == 1 else 1 for _, factor in stride.terms]
