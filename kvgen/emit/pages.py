"""What the templates of page functions are handed: whole blocks copied or zeroed, all buffers in one launch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvgen import runs, sizes
from kvgen.emit.args import pointer
from kvgen.emit.launch import BufferCheck, Size, buffer_check, rest_text, sizes_of, whole_name
from kvgen.emit.names import block_size_name, num_blocks_name
from kvgen.layout import Buffer, Layout
from kvgen.lower import SLOT_NUMBER
from kvgen.lower_pages import page_plans
from kvgen.plan import PagePlan, Step, Stretch

NUM_WARPS = 2
DYNAMIC_EXTENT = 8
"""What kernels are compiled for where an extent is known at launch."""


NUMBERS = ("programs", "block", "run", "rows")
"""What a kernel is told of a part first: its programs, the step from block to block, the length and number of runs."""

PAGE_TABLE_TYPES = {
    "out_ptr": "*i32",
    "req_to_page_ptr": "*i32",
    "req_pool_indices_ptr": "*i64",
    "seq_lens_ptr": "*i32",
    "out_stride_row": "i32",
    "out_stride_column": "i32",
    "req_to_page_stride_row": "i32",
    "req_to_page_stride_column": "i32",
    "num_requests": "i32",
    "num_rows": "i32",
    "num_columns": "i32",
    "num_out_columns": "i32",
    "padding": "i32",
}
"""The arguments of the kernel of ``gather_page_table``, and what they are compiled for."""


@dataclass(frozen=True, slots=True)
class Part:
    """One stretch of a page in a kernel and its launcher.

    ``numbers`` are kernel arguments, in the order of ``_page``'s result; ``inner`` are the sizes and steps that runs
    repeat over but the slowest, fastest first, and ``last`` is the step of that; ``describe`` is the call of ``_page``.
    """

    name: str
    comment: str
    tensor: str
    offset: int
    describe: str
    numbers: tuple[str, ...]
    inner: tuple[tuple[str, str], ...]
    last: str
    width: str
    rows: str
    columns: str
    follows: str  # the part before it, empty for the first

    @property
    def constants(self) -> tuple[str, ...]:
        return self.width, self.rows, self.columns

    @property
    def declarations(self) -> tuple[str, ...]:
        return tuple(f"{name}: tl.constexpr" if name in self.constants else name for name in self.numbers)


@dataclass(frozen=True, slots=True)
class PageFunction:
    """A function on whole pages: its launcher and its kernel."""

    name: str
    summary: str
    doc: tuple[str, ...]
    parameters: tuple[str, ...]
    given: str  # the tensors, all of its parameters
    handed: str  # the same as the kernel takes them
    sizes: tuple[Size, ...]
    buffers: tuple[BufferCheck, ...]
    first_buffer: str
    blocks: str  # the tensor that names blocks
    num_blocks: str
    parts: tuple[Part, ...]
    arguments: tuple[str, ...]  # of the kernel, pointers and counts before the parts'
    kernel: str
    kernel_summary: str
    unspecialized: str
    programs: str
    numbers: str  # what the kernel takes behind its pointers, as the launcher writes it
    num_warps: int
    uses: dict[str, bool]


@dataclass(frozen=True, slots=True)
class PageTable:
    """What ``gather_page_table`` depends on: the tokens of a page, and the keyword of a dynamic block size."""

    tokens: str
    extra: str
    names: tuple[str, ...]
    others: str  # the same names, behind what else launches are told apart by
    words: str  # what a page is called
    constants: tuple[tuple[str, int], ...]
    arguments: tuple[str, ...]
    unspecialized: str


def build_page_functions(layout: Layout) -> tuple[PageFunction, ...]:
    """The launchers and kernels of ``copy_blocks`` and ``zero_blocks``."""
    return tuple(_function(layout, plan) for plan in page_plans(layout))


def build_page_table(layout: Layout) -> PageTable:
    size, shard = block_size_name(layout), layout.slots.shard
    dynamic = layout.block_size is None
    return PageTable(
        tokens=f"({size} * {shard.world})" if shard else size,
        extra=f", *, {size}" if dynamic else "",
        names=(size,) if dynamic else (),
        others=f", {size}" if dynamic else "",
        words="row of the cache" if layout.contiguous else "page",
        constants=() if dynamic else ((size, layout.block_size),),
        arguments=(*PAGE_TABLE_TYPES, *((size,) if dynamic else ())),
        unspecialized=", ".join(f'"{name}"' for name, kind in PAGE_TABLE_TYPES.items() if kind[0] != "*"),
    )


def _function(layout: Layout, plan: PagePlan) -> PageFunction:
    copies = plan.kind == "copy"
    word = "request" if layout.contiguous else "block"
    blocks = "pairs" if copies else f"{word}s"
    held = [buffer.name for buffer in layout.buffers]
    parts = build_parts(layout, plan)
    constant = {name for part in parts for name in (*part.constants, *(size for size, _ in part.inner))}
    unspecialized = [name for part in parts for name in part.numbers if name not in constant]
    summary, doc = _doc(layout, plan, word)
    return PageFunction(
        name=plan.name,
        summary=summary,
        doc=doc,
        parameters=(*held, blocks),
        given=", ".join((*held, blocks)),
        handed=", ".join((*(pointer(b.name, b.dtypes[0]).value for b in layout.buffers), blocks)),
        sizes=tuple(sizes_of(layout, list(layout.buffers))),
        buffers=tuple(buffer_check(layout, buffer) for buffer in layout.buffers),
        first_buffer=held[0],
        blocks=blocks,
        num_blocks=num_blocks_name(layout),
        parts=parts,
        arguments=(*(f"{name}_ptr" for name in (*held, blocks)), *_counts(blocks)),
        kernel=f"_{plan.name}_kernel",
        kernel_summary=f"One program {'copies' if copies else 'zeroes'} a tile of one {word}.",
        unspecialized=", ".join(f'"{name}"' for name in (*_counts(blocks), *unspecialized)),
        programs=" + ".join(f"{part.name}[0]" for part in parts),
        numbers=", ".join([*_strides(blocks), num_blocks_name(layout), "programs", *(f"*{p.name}" for p in parts)]),
        num_warps=NUM_WARPS,
        uses={"copies": copies},
    )


def _strides(blocks: str) -> tuple[str, ...]:
    return ("pairs.stride(0)", "pairs.stride(1)") if blocks == "pairs" else (f"{blocks}.stride(0)",)


def _counts(blocks: str) -> tuple[str, ...]:
    strides = ("pairs_stride_pair", "pairs_stride_side") if blocks == "pairs" else (f"{blocks}_stride",)
    return (*strides, "num_pages", "programs")


def _doc(layout: Layout, plan: PagePlan, word: str) -> tuple[str, tuple[str, ...]]:
    layers = " in all layers" if layout.layers else ""
    everything = f"Everything of a {word}{layers}: codes, scales and zeros of all buffers, and padding that is filled."
    if not any(stream.encoding for stream in layout.streams):
        everything = f"Everything of a {word}{layers}, in all buffers; bytes that no value has stay."
    number = num_blocks_name(layout)
    if plan.kind == "copy":
        return f"Copy whole {word}s within the pool, in one launch.", (
            f"pairs [n, 2], int32 or int64: the {word} to copy and the one to overwrite.",
            everything,
            f"A pair with a number below 0 or from {number} on is skipped. What is overwritten must be named once, and",
            "may not be copied in the same call.",
            "TypeError and ValueError name the tensor that does not fit, before anything is launched.",
        )
    return f"Zero whole {word}s, in one launch.", (
        f"{word}s [n], int32 or int64. A number below 0 or from {number} on is skipped.",
        everything,
        "TypeError and ValueError name the tensor that does not fit, before anything is launched.",
    )


def build_parts(layout: Layout, plan: PagePlan) -> tuple[Part, ...]:
    tensors = [stretch.tensor for stretch in plan.stretches]
    parts: list[Part] = []
    for index, stretch in enumerate(plan.stretches):
        several = tensors.count(stretch.tensor) > 1
        number = str(tensors[:index].count(stretch.tensor)) if several else ""
        before = parts[-1].name if parts else ""
        whole = not stretch.offset and not several
        span = "" if whole else f", bytes {stretch.offset} to {stretch.offset + stretch.nbytes} of a record"
        parts.append(_part(layout, stretch, f"{stretch.tensor}_page{number}", stretch.tensor + span, before))
    return tuple(parts)


def _part(layout: Layout, stretch: Stretch, name: str, comment: str, before: str) -> Part:
    buffer = layout.buffer(stretch.tensor)
    block, dims = _block_and_dims(layout, buffer, stretch)
    depth = max(1, len(dims))
    inner = tuple((f"{name}_size_{i}", f"{name}_step_{i}") for i in range(depth - 1))
    last = f"{name}_step_{depth - 1}"
    width, rows, columns = (f"{name.upper()}_{what}" for what in ("WIDTH", "ROWS", "COLUMNS"))
    steps = [text for pair in inner for text in pair]
    return Part(
        name=name,
        comment=comment,
        tensor=stretch.tensor,
        offset=stretch.offset,
        describe=", ".join([stretch.tensor, str(stretch.offset), str(stretch.nbytes), block, *dims]),
        numbers=(
            f"{name}_programs",
            f"{name}_block",
            f"{name}_run",
            f"{name}_rows",
            *steps,
            last,
            width,
            rows,
            columns,
        ),
        inner=inner,
        last=last,
        width=width,
        rows=rows,
        columns=columns,
        follows=before,
    )


def _block_and_dims(layout: Layout, buffer: Buffer, stretch: Stretch) -> tuple[str, list[str]]:
    """The bytes from block to block, and ``(size, stride)`` of everything else that the stretch repeats over."""
    block, dims = "", []
    for step in stretch.steps:
        stride = _stride(buffer, step, stretch.unit)
        if step.digit.axis == SLOT_NUMBER:  # block and a dynamic number of slots
            block = f"{stride} * {block_size_name(layout)}"
            dims.append(f"({block_size_name(layout)}, {stride})")
        elif step.digit.axis == "block":
            block = stride
        else:
            dims.append(f"({_extent(layout, buffer, step)}, {stride})")
    return block, dims


def _stride(buffer: Buffer, step: Step, unit: int) -> str:
    if step.dim is None:
        return str(step.factor)
    times = f" * {step.factor * unit}" if step.factor * unit != 1 else ""
    return f"{buffer.name}.stride({step.dim}){times}"


def _extent(layout: Layout, buffer: Buffer, step: Step) -> str:
    if step.digit.size is None:
        return rest_text(layout, buffer, step.digit)
    return whole_name(layout, buffer, step.digit) or str(step.digit.size)


def compact_numbers(layout: Layout, stretch: Stretch) -> list[int]:
    """What ``_page`` gives for tensors with the smallest strides; extents that the launch knows are DYNAMIC_EXTENT."""
    names = {sizes.unknown(layout, axis): DYNAMIC_EXTENT for axis in sizes.UNKNOWN}
    strides = [stride.at(names).value for stride in sizes.place_strides(layout, layout.buffer(stretch.tensor).place)]
    block, dims = 0, []
    for step in stretch.steps:
        stride = step.factor * (1 if step.dim is None else strides[step.dim])
        if step.digit.axis == SLOT_NUMBER:
            block = stride * DYNAMIC_EXTENT
            dims.append((DYNAMIC_EXTENT, stride))
        elif step.digit.axis == "block":
            block = stride
        else:
            dims.append((DYNAMIC_EXTENT if step.digit.size is None else step.digit.size, stride))
    nbytes, outer = runs.joined(stretch.nbytes, dims)
    width = runs.word(stretch.offset, nbytes, block, *(stride for _, stride in outer))
    run, rows = nbytes // width, math.prod(size for size, _ in outer)
    tile_rows, columns = runs.tile(run, width)
    programs = -(-rows // tile_rows) * -(-run // columns)
    outer += [(1, 0)] * (max(1, len(dims)) - len(outer))
    flat = [number for size, stride in outer for number in (size, stride // width)]
    return [programs, block // width, run, rows, *flat[:-2], flat[-1], width, tile_rows, columns]
