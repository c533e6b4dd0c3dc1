"""Names in generated code, shared by kernels and launchers."""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.axes import Axis
from kvgen.layout import Layout
from kvgen.lower import SLOT_NUMBER

TRITON_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "uint8": "u8"}


def one_dim(layout: Layout) -> bool:
    """Whether all streams have the same extent of ``dim``, in groups of the same size; a transfer never says so."""
    return not layout.prefix and len({(stream.axes[-1], stream.group) for stream in layout.streams}) == 1


def extent_name(layout: Layout, stream: str, axis: str) -> str:
    """``NUM_HEADS``, ``HEAD_DIM``, or ``VALUE_DIM`` where the streams differ; ``NUM_QUERY_HEADS`` of the query."""
    if axis == "head":
        own = "NUM_QUERY_HEADS" if layout.query and stream == layout.query.name else "NUM_HEADS"
        return f"{layout.prefix.upper()}{own}"
    if one_dim(layout):
        return "HEAD_DIM"
    return f"{stream.upper()}_HEAD_DIM" if layout.prefix else f"{stream.upper()}_DIM"


def extent_text(layout: Layout, stream: str, axis: Axis) -> str:
    """An extent in a launcher: a constant of the module, or the argument's name of one that the launch decides.

    Modules have no constants for what lies in the pool along ``dim``: there it is a number.
    """
    if layout.of_leaves and axis.name == "dim" and axis.extent is not None:
        return str(axis.extent)
    name = extent_name(layout, stream, axis.name)
    return name.lower() if axis.extent is None else name


def index_name(layout: Layout, stream: str, axis: str) -> str:
    """``head``, ``dim``, or ``value_dim`` where the streams differ."""
    return axis if axis == "head" or one_dim(layout) else f"{stream}_dim"


def block_size_name(layout: Layout) -> str:
    """The constant, or the argument in lower case, that holds the tokens of a block."""
    name = layout.prefix.upper() + ("MAX_SEQ_LEN" if layout.contiguous else "BLOCK_SIZE")
    return name.lower() if layout.block_size is None else name


def num_blocks_name(layout: Layout) -> str:
    return layout.prefix + ("num_requests" if layout.contiguous else "num_blocks")


def num_layers_name(layout: Layout) -> str:
    """The constant, or the variable in lower case, that holds how many layers there are; nothing without the axis."""
    if layout.layers is None:
        return ""
    name = f"{layout.prefix.upper()}NUM_LAYERS"
    return name.lower() if layout.layers.extent is None else name


def extents_of(layout: Layout, stream: str) -> dict[str, int | None]:
    """Axis to extent, for naming and printing digits."""
    own = next((leaf.axes for leaf in layout.leaves if leaf.name == stream), None) or layout.stream(stream).axes
    sizes: dict[str, int | None] = {axis.name: axis.extent for axis in own}
    sizes |= {"slot": layout.block_size, "block": None, SLOT_NUMBER: None, "token": None, "kv": 2}
    if layout.layers:
        sizes["layer"] = layout.layers.extent
    return sizes


def tuple_text(items: Sequence[str]) -> str:
    """A tuple display of expressions."""
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def dense(layout: Layout, name: str) -> str:
    """The shape of a dense tensor, as docstrings print it."""
    stream = layout.stream(name)
    shape = ", ".join(extent_text(layout, name, axis) for axis in stream.axes)
    kind = f" {stream.dtypes[0]}" if layout.of_leaves and len(stream.dtypes) == 1 else ""
    return f"[T, {shape}]{kind}"


def docstring_line(text: str) -> str:
    """A user's printable text as a line of a docstring, which then says exactly that, spaces at its end too."""
    spelled = text.replace("\\", "\\\\").replace('"""', r"\"\"\"")
    return f"{spelled[:-1]}\\x20" if spelled.endswith(" ") else spelled
