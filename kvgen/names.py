"""Names a layout may give: they become modules, functions and arguments of generated Python."""

from __future__ import annotations

import builtins
import keyword
import re
import sys
from collections.abc import Callable, Iterable

FUNCTIONS = (
    *("append", "append_positions", "append_fused", "gather", "gather_paged", "gather_codes"),
    *("gather_codes_paged", "slot_mapping", "fill_slots", "allocate"),
    *("copy_blocks", "zero_blocks", "gather_page_table", "register_ops", "concat_mla_key"),
)

AXES = ("block", "slot", "token", "head", "dim", "bit", "kv", "layer", "request", "position")

TWICE = "is given twice"

KEYS = ("holds", "order", "fields", "align", "regions", "pad", "fill")

_ARGUMENTS = """
block_size block_table block_table_row blocks context_lens cos cos_sin count cu_seq_lens device dtype fused head_dim
layer num_blocks num_heads num_layers num_requests num_tokens out padding pairs pin_memory positions qkv query
query_start_loc rank
req_pool_indices req_to_page request_ids requests rotated seq_lens sin slots start_pos starts total_tokens zero_skipped
"""

_VARIABLES = """
absent address_in amax arguments at band band_dim batch_size before bits block_table_stride blocks_stride bounds built
called chosen column columns compiled config contextlib counts ctypes cuda current_device describe dim_byte dim_group
dim_lane dim_run dim_vector dim_word dims distance driver dtypes entering entry exact exchange fake find first
first_block first_dim first_item first_slot function functools given grid group highest hooks hosts i in_range index
inside inverse j k_nope k_nope_stride_head k_nope_stride_token k_rope k_rope_stride_token keep kept kernel kind kinds
known latest launch least leaving length lift look_up lowest mask math metadata moved name ndim near nearest new
nope_dim nope_side num_columns num_entries num_out num_out_columns num_pages num_rows num_runs num_slots number numbers
offset offsets ops optional others out_row out_stride_column out_stride_head out_stride_row out_stride_token outer page
pairs_stride_pair pairs_stride_side part plan plane present program programs query_heads ratio re reach
req_to_page_stride_column req_to_page_stride_row requests_stride rope_side row row_head run run_number run_slot same
scale schema second self shape shapes size slot_number source squares start starter starts step steps stored
stored_scale stretch stride stride_unit strides struct sure t target tensor tensors tile tile_row tl tokens torch
triton types unit valid
whole width within word words words_ptrs written zero
"""

_TENSORS = ("cos", "cos_sin", "positions", "qkv", "query", "sin")
"""Arguments that no layout names and that more names are made of."""

_STAGES = """
angle_row angle_row_height angle_row_time angle_row_width num_positions position_height position_time position_width
"""

_TRANSFERS = "first_head head_tile head_tiles in_order item num_items tile"

_USED = frozenset(_ARGUMENTS.split() + _VARIABLES.split() + _STAGES.split() + _TRANSFERS.split())
"""What generated functions and kernels call things that no layout names."""

_IDENTIFIER = re.compile("[A-Za-z][A-Za-z0-9_]*")
_LONGEST = 64
_STAGED = (
    "partner|(partner_)?(weight|wide)|inverse|divisor|pair|first|other|turn|position|frequency|angle"
    "|(cos|sin)(_height|_width)?"
)
_READ = "ptr|words|amax|length|mask|bit[0-9]|page.*|dim(_byte|_group|_lane|_run|_vector|_word)?|stride.*"
_DERIVED = re.compile(f"(_out)?(_({_READ}|{_STAGED}))?")


def objection(name: str) -> str | None:
    """Why a name cannot be one of generated Python's, or None."""
    if not _IDENTIFIER.fullmatch(name):
        return "is no identifier: letters, digits and `_`, a letter first"
    if len(name) > _LONGEST:
        return f"is longer than {_LONGEST} characters"
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        return "is a keyword of Python"
    if hasattr(builtins, name):
        return "is a name of Python's own"
    if name in ("null", "true", "false"):
        return "is a word of YAML"
    if name in ("torch", "triton"):
        return "is the name of a module that generated modules import"
    return None


def module_objection(name: str) -> str | None:
    """Why a layout or a transfer cannot have a name, or None: beside its module others import Python's own."""
    if name in sys.stdlib_module_names:
        return "is the name of a module of Python's own"
    return objection(name)


def name_hint(name: str, kind: str, objection: Callable[[str], str | None]) -> str | None:
    """What a stream, a buffer or the like could be called whose name cannot be used; None if nothing near is free."""
    words = re.sub("[^A-Za-z0-9_]+", "_", name).strip("_")[:_LONGEST]
    near = (words, f"{words}_{kind}", f"{kind}_{words}") if words else ()
    return next((f"`{other}` can be used" for other in near if other != name and not objection(other)), None)


def param_objection(name: str) -> str | None:
    """Why a param cannot have a name, or None."""
    return "is the name of an axis" if name in AXES else objection(name)


def argument_objection(name: str, others: Iterable[str] = ()) -> str | None:
    """Why a stream, a buffer or a table cannot have a name beside others: they are arguments of generated functions."""
    if name in AXES and name != "kv":  # the one that no kernel has a variable of
        return "is the name of an axis"
    if name in KEYS:
        return "is a key of places"
    if name in FUNCTIONS:
        return "is the name of a generated function"
    if name in _USED or (len(name) > 1 and name.isupper()) or name.endswith(("_ptr", "_ptrs")):
        return "is used in generated modules for something else"
    if any(name.startswith(tensor) and _DERIVED.fullmatch(name[len(tensor) :]) for tensor in _TENSORS):
        return "is used in generated modules for something else"
    for other in others:
        if name == other:
            return TWICE
        if name.casefold() == other.casefold():
            return f"differs from `{other}` in case only"
        if name in (f"append_{other}", f"fused_{other}", f"append_fused_{other}") or (
            name.startswith(other) and _DERIVED.fullmatch(name[len(other) :])
        ):
            return f"is used in generated modules for something of `{other}`"
    return objection(name)
