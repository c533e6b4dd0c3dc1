"""Names a layout may give: they become modules, functions and arguments of generated Python."""

from __future__ import annotations

import builtins
import keyword
import re

FUNCTIONS = ("append", "append_positions", "gather", "gather_paged", "slot_mapping", "fill_slots", "allocate")

ARGUMENTS = (
    "block_size",
    "block_table",
    "block_table_row",
    "context_lens",
    "count",
    "cu_seq_lens",
    "device",
    "dtype",
    "head_dim",
    "layer",
    "num_blocks",
    "num_heads",
    "num_layers",
    "num_requests",
    "num_tokens",
    "out",
    "positions",
    "query_start_loc",
    "rank",
    "request_ids",
    "seq_lens",
    "slots",
    "start_pos",
    "starts",
    "total_tokens",
    "zero_skipped",
)

AXES = ("block", "slot", "token", "head", "dim", "kv", "layer", "request", "position")

KEYS = ("holds", "order", "fields", "align", "pad", "fill")

_MODULES = ("torch", "triton", "tl", "LAYOUT")
_IDENTIFIER = re.compile("[A-Za-z][A-Za-z0-9_]*")
_LONGEST = 64


def objection(name: str) -> str | None:
    """Why a name cannot be one of the generated module's, or None."""
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
    if name in _MODULES:
        return "is a name that generated modules use"
    return None


def argument_objection(name: str) -> str | None:
    """Why a stream, a buffer or a table cannot have a name: they are arguments of generated functions."""
    if name in AXES:
        return "is the name of an axis"
    if name in KEYS:
        return "is a key of places"
    if name in FUNCTIONS:
        return "is the name of a generated function"
    if name in ARGUMENTS:
        return "is the name of another argument of generated functions"
    return objection(name)
