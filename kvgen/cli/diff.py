"""``kvgen diff``: what two layouts differ in."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.cli.common import one_layout

if TYPE_CHECKING:
    from kvgen.compare import Comparison


def diff(
    first: Annotated[str, typer.Argument(help="A layout's file, or the name of a shipped layout.")],
    second: Annotated[str, typer.Argument(help="The other one.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say what two layouts differ in: streams, sizes, order, encodings, scales, padding, slots.

    Exits 0 where a pool of one is a pool of the other (names, spelling and schedules aside), 1 where it is not.
    """
    from kvgen.compare import compare

    ours, theirs = (one_layout(name, "name two layouts") for name in (first, second))
    found = compare(ours, theirs)
    names = (ours.name, theirs.name)
    typer.echo(_json(names, found) if as_json else _text(names, found))
    if not found.alike:
        raise typer.Exit(1)


def _json(names: tuple[str, str], found: Comparison) -> str:
    facts = {"first": names[0], "second": names[1], "same_bytes": found.same_bytes, "same_slots": found.same_slots}
    return json.dumps(facts | {"differences": [asdict(item) for item in found.differences]}, indent=2)


def _text(names: tuple[str, str], found: Comparison) -> str:
    lines = [_verdict(names, found)]
    if found.differences:
        width = max(len(item.subject) for item in found.differences)
        aspect = max(len(item.aspect) for item in found.differences)
        lines.append("")
    for item in found.differences:
        lines.append(f"  {item.subject:<{width}}  {item.aspect:<{aspect}}  {item.first} → {item.second}")
    return "\n".join(lines)


def _verdict(names: tuple[str, str], found: Comparison) -> str:
    both = " and ".join(names)
    if not found.differences:
        return f"{both} are the same"
    if found.alike:
        return f"{both} are the same bytes, spelled differently"
    if found.same_bytes:
        return f"{both} are the same bytes; their slots are not found alike"
    return f"{both} differ"
