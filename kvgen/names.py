"""Names a layout may give: they become modules, functions and arguments of generated Python."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable

FUNCTIONS = ("append", "append_positions", "gather", "gather_paged", "slot_mapping", "fill_slots", "allocate")

AXES = ("block", "slot", "token", "head", "dim", "kv", "layer", "request", "position")

KEYS = ("holds", "order", "fields", "align", "pad", "fill")

_ARGUMENTS = """
block_size block_table block_table_row context_lens count cu_seq_lens device dtype head_dim layer num_blocks num_heads
num_layers num_requests num_tokens out positions query_start_loc rank request_ids rotated seq_lens slots start_pos
starts total_tokens zero_skipped
"""

_VARIABLES = """
amax arguments
before bits block_table_stride
chosen chosen_squares column compiled contextlib current_device
dim_byte dim_group dim_lane dim_word driver dtypes
entering exact
find first first_block first_slot flags function
given grid
highest hooks
in_range index inside inverse
keep kernel known
latest launch leaving length limit lowest
metadata
name ndim nested num_columns num_out num_rows num_slots numbers
offset outer
ratio reach run_number run_slot runner
same scale search_step self shape shapes size slot_number squares start starts step steps stored stream_of stride
stride_unit strides
t tensor TensorGuards tensors tl tokens torch triton
unit
valid
whole written
zero
"""

_USED = frozenset(_ARGUMENTS.split() + _VARIABLES.split())
"""What generated functions and kernels call things that no layout names."""

_IDENTIFIER = re.compile("[A-Za-z][A-Za-z0-9_]*")
_LONGEST = 64
_DERIVED = re.compile("(_out)?(_(ptr|length|dim(_byte|_group|_lane|_word)?|stride.*))?")


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
    for other in others:
        if name == other:
            return "is given twice"
        if name.casefold() == other.casefold():
            return f"differs from `{other}` in case only"
        if name == f"append_{other}" or (name.startswith(other) and _DERIVED.fullmatch(name[len(other) :])):
            return f"is used in generated modules for something of `{other}`"
    return objection(name)
