"""The public functions of a module, of a layout or a transfer: those it can have, and those it is to have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from kvgen.diagnostics import Diagnostic, KvgenError
from kvgen.encodings import append_refusal
from kvgen.layout import Layout
from kvgen.lower import lower
from kvgen.lower_pages import page_plans
from kvgen.lower_transfer import lower_transfer
from kvgen.plan import Plan
from kvgen.stored import stored_plans
from kvgen.suggest import suggestion
from kvgen.transfer import Transfer, token_refusal

Document = TypeVar("Document", Layout, Transfer)


def possible(layout: Layout | Transfer) -> tuple[str, ...]:
    """Every function that the module can have, in the order it names them."""
    if isinstance(layout, Transfer):
        lists = layout.layers == "all" and any(side.layers is None for side in layout.sides)
        moves = (plan.name for plan in lower_transfer(layout))
        return (*(("pointer_table",) if lists else ()), *moves, "register_ops")
    return (
        "allocate",
        *(plan.name for _, plan in _plans(layout)),
        *(plan.name for plan in page_plans(layout)),
        "gather_page_table",
        *(("concat_mla_key",) if layout.mla else ()),
        "fill_slots",
        "slot_mapping",
        "register_ops",
    )


def chosen(layout: Layout | Transfer) -> tuple[str, ...]:
    """The functions that the module has, in the same order: all, or those that are asked for."""
    return tuple(name for name in possible(layout) if not layout.functions or name in layout.functions)


def chosen_plans(layout: Layout) -> tuple[tuple[Layout, Plan], ...]:
    """The plan of every copying function that the module has, and the layout of its streams."""
    return tuple((of, plan) for of, plan in _plans(layout) if not layout.functions or plan.name in layout.functions)


def restricted(documents: Sequence[Document], names: Sequence[str]) -> list[Document]:
    """Layouts and transfers with those of these functions alone that they can have; without such as can have none.

    KvgenError where one of the functions is in none of them.
    """
    found = [{index: about for index, *about in objections(document, names)} for document in documents]
    if lacking := [index for index in range(len(names)) if all(index in objected for objected in found)]:
        whose = documents[0].name if len(documents) == 1 else "all that is named"
        about = [(what, hint) for what, hint in map(found[0].get, lacking)]
        raise KvgenError(*(Diagnostic("KV223", f"{whose}: {what}", hint=hint) for what, hint in about))
    kept = [tuple(name for i, name in enumerate(names) if i not in objected) for objected in found]
    return [replace(document, functions=own) for document, own in zip(documents, kept, strict=True) if own]


def _plans(layout: Layout) -> Iterator[tuple[Layout, Plan]]:
    yield from ((layout, plan) for plan in lower(layout))
    yield from stored_plans(layout)


def objections(layout: Layout | Transfer, names: Sequence[str]) -> Iterator[tuple[int, str, str | None]]:
    """What is wrong with a choice of functions: the place in ``names``, a message, and a hint."""
    known = possible(layout) if names else ()
    for index, name in enumerate(names):
        if name in names[:index]:
            yield index, f"`{name}` is named twice", None
        elif name not in known:
            yield index, f"the module has no function `{name}`", _reason(layout, name) or suggestion(name, known)


def _reason(layout: Layout | Transfer, name: str) -> str | None:
    """Why a function that other modules have is not there."""
    if isinstance(layout, Transfer):
        return token_refusal(layout) if name == "transfer" else None
    if name.startswith("append_fused") and layout.fuse is None:
        return "a fused append needs a section `fuse`"
    if name in ("gather_codes", "gather_codes_paged"):
        return "no stream is encoded: `gather` reads what is stored"
    refused = {s.name: reason for s in layout.streams if (reason := append_refusal(layout, s.name))}
    writes = name in ("append", "append_positions", "append_fused")
    return next((f"{s}: {why}" for s, why in refused.items() if writes or name == f"append_{s}"), None)
