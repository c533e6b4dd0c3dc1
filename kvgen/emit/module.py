"""The context of a whole module: everything the templates print, in their order."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen import runs
from kvgen.emit.describe import describe
from kvgen.emit.docs import module_doc
from kvgen.emit.kernel import Kernel, build_kernel, slot_of_extra
from kvgen.emit.launch import Function, build_function, dtypes_name, shape_parts
from kvgen.emit.names import (
    block_size_name,
    docstring_line,
    extent_name,
    num_blocks_name,
    num_layers_name,
    tuple_text,
)
from kvgen.emit.ops import Ops, build_ops
from kvgen.emit.pages import PageFunction, PageTable, build_page_functions, build_page_table
from kvgen.functions import chosen, chosen_plans
from kvgen.layout import Buffer, Layout, Record, leaves_of

NOT_KEPT = ("allocate", "fill_slots", "register_ops")
"""Functions that launch nothing, or with other numbers each time."""


@dataclass(frozen=True, slots=True)
class Addressing:
    """What slot_mapping and fill_slots depend on."""

    block_size: str
    size: int | None
    static_block_size: bool
    dynamic: bool
    shard: bool
    world: int
    interleave: int
    dtype: str
    formula: str
    extra: str
    extra_names: tuple[str, ...]
    rank_text: str
    other_rank: str
    other_rank_tokens: str


@dataclass(frozen=True, slots=True)
class Allocation:
    """One buffer that allocate makes; ``slice`` cuts the padding between records off the view."""

    name: str
    shape: str
    dtype: str
    slice: str


@dataclass(frozen=True, slots=True)
class Module:
    """A generated module, ready to print."""

    title: str
    doc: tuple[str, ...]
    exports: str
    constants: tuple[tuple[str, str], ...]
    description: str
    functions: tuple[Function, ...]
    kernels: tuple[Kernel, ...]
    pages: tuple[PageFunction, ...]
    page_table: PageTable
    kept: tuple[str, ...]  # the functions whose launches are kept
    tile_words: int
    shortest: int
    addressing: Addressing
    ops: Ops
    allocate_parameters: tuple[str, ...]
    allocate_sizes: tuple[tuple[str, int], ...]  # with the least that each may be
    allocate_dtypes: str
    allocate_result: str
    allocations: tuple[Allocation, ...]
    allocation_names: tuple[str, ...]
    several: bool
    headless: bool


def build_module(layout: Layout) -> Module:
    """Everything the module template prints for ``layout``."""
    plans = chosen_plans(layout)
    kernels = tuple(build_kernel(of, plan) for of, plan in plans)
    functions = tuple(build_function(of, kernel) for (of, _), kernel in zip(plans, kernels, strict=True))
    streams = [stream for of in dict.fromkeys([layout, *(of for of, _ in plans)]) for stream in of.streams]
    pages = build_page_functions(layout)
    addressing = _addressing(layout)
    several = len(layout.buffers) > 1
    return Module(
        title=docstring_line(f"{layout.name}: {layout.summary}") if layout.summary else layout.name,
        doc=tuple(module_doc(layout)),
        exports=repr(["LAYOUT", *chosen(layout)]),
        constants=tuple(_constants(layout)),
        description=repr(describe(layout)),
        functions=functions,
        kernels=kernels,
        pages=pages,
        page_table=build_page_table(layout),
        kept=tuple(name for name in chosen(layout) if name not in NOT_KEPT),
        tile_words=runs.TILE_WORDS,
        shortest=runs.SHORTEST,
        addressing=addressing,
        ops=build_ops(layout, functions, pages, addressing.extra_names),
        allocate_parameters=tuple(_allocate_parameters(layout)),
        allocate_sizes=tuple(
            (name, 0 if name == num_blocks_name(layout) else 1)
            for name in _allocate_parameters(layout)
            if name != "*" and "=" not in name
        ),
        allocate_dtypes=_allocate_dtypes(layout),
        allocate_result=f": {', '.join(b.name for b in layout.buffers)}" if several else "",
        allocations=tuple(_allocation(layout, buffer) for buffer in layout.buffers),
        allocation_names=tuple(buffer.name for buffer in layout.buffers),
        several=any(function.uses["several"] for function in functions),
        headless=any(all(a.name != "head" for a in s.axes) for s in streams),
    )


def _constants(layout: Layout) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    if layout.block_size is not None:
        found[block_size_name(layout)] = str(layout.block_size)
    if layout.layers and layout.layers.extent is not None:
        found["NUM_LAYERS"] = str(layout.layers.extent)
    streams = (*layout.streams, *([layout.query] if layout.query else []))
    for stream in streams:
        for axis in stream.axes:
            if axis.extent is not None:
                found[extent_name(layout, stream.name, axis.name)] = str(axis.extent)
    for stream in streams:
        found[dtypes_name(layout, stream)] = tuple_text([f"torch.{d}" for d in stream.dtypes])
    return list(found.items())


def _addressing(layout: Layout) -> Addressing:
    size, shard, extra = block_size_name(layout), layout.slots.shard, slot_of_extra(layout)
    return Addressing(
        block_size=size,
        size=layout.block_size,
        static_block_size=layout.block_size is not None,
        dynamic=layout.block_size is None,
        shard=shard is not None,
        world=shard.world if shard else 1,
        interleave=shard.interleave if shard else 1,
        dtype=layout.slots.dtype,
        formula=f"At position p of request r: block_table[r, p // {size}] * {size} + p % {size}"
        if shard is None
        else f"Positions and block tables count virtual blocks of {size} * {shard.world} tokens; slots are this rank's",
        extra=extra,
        extra_names=tuple(name for name in extra.split(", ") if name),
        rank_text=', "rank"' if shard else "",
        other_rank=", or another rank's" if shard else "",
        other_rank_tokens=", for tokens of other ranks" if shard else "",
    )


def _allocate_parameters(layout: Layout) -> list[str]:
    keywords = ["num_layers"] if num_layers_name(layout) == "num_layers" else []
    keywords += [block_size_name(layout)] if layout.block_size is None else []
    for stream in layout.streams:
        for axis in stream.axes:
            if axis.extent is None:
                keywords.append(extent_name(layout, stream.name, axis.name).lower())
    open_dtypes = [b.dtypes[0] for b in layout.buffers if _open_dtype(layout, b)]
    keywords += [f"dtype=torch.{open_dtypes[0]}"] if open_dtypes else []
    return [num_blocks_name(layout), "*", *dict.fromkeys(keywords), "device=None", "pin_memory=False"]


def _allocate_dtypes(layout: Layout) -> str:
    """The types that allocate may be asked for, where it may be."""
    open_buffers = [buffer for buffer in layout.buffers if _open_dtype(layout, buffer)]
    if not open_buffers:
        return ""
    leaf = layout.leaf(leaves_of(open_buffers[0].place)[0])
    return dtypes_name(layout, layout.stream(leaf.stream))


def _open_dtype(layout: Layout, buffer: Buffer) -> bool:
    """Whether a buffer takes the type of what is put in: several are accepted, and it is not codes."""
    leaf = layout.leaf(leaves_of(buffer.place)[0])
    return len(buffer.dtypes) > 1 and buffer.dtypes == layout.stream(leaf.stream).dtypes


def _allocation(layout: Layout, buffer: Buffer) -> Allocation:
    shape, cut = shape_parts(layout, buffer), ""
    content = buffer.place.content
    if isinstance(content, Record) and buffer.place.pitch != content.size:
        width = content.size // buffer.unit
        shape[-1] = str(buffer.place.pitch // buffer.unit)
        cut = f"[..., :{width}]"
    dtype = "dtype" if _open_dtype(layout, buffer) else f"torch.{buffer.dtypes[0]}"
    return Allocation(buffer.name, tuple_text(shape), dtype, cut)
