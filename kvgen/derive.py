"""A layout's document with some of its keys replaced by those of another one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvgen.diagnostics import Span
from kvgen.source import Mapping, Node, Scalar, Sequence, Source

MERGED = ("axes", "params")
"""Keys whose own entries are replaced one by one."""


@dataclass(slots=True)
class Derived(Source):
    """A document made of several: its nodes stand in ``parts``, told apart by offsets that run on through all."""

    parts: tuple[Source, ...] = ()

    def span(self, start: int, end: int) -> Span:
        for part in self.parts:
            length = extent(part)
            if start < length:
                return part.span(start, end)
            start, end = start - length, end - length
        raise AssertionError("an offset past all parts")


def extent(source: Source) -> int:
    """How many offsets a document takes."""
    if isinstance(source, Derived):
        return sum(map(extent, source.parts))
    return len(source.text) + 1


def derive(base: Source, other: Source, replaced: Mapping, streams: Source | None) -> Derived:
    """``base`` with the keys that ``replaced``, a node of ``other``, gives.

    ``streams`` is where the value ``from`` of its key ``streams`` points: the streams of that document, heads and head
    size included, take the place of the base's own.
    """
    parts = [base, other, *([streams] if streams else [])]
    offsets = [sum(map(extent, parts[:i])) for i in range(len(parts))]
    # What the base's own module has, another one need not.
    entries = {key.text: (key, value) for key, value in base.root.entries if key.text != "functions"}
    if streams:
        given = {key.text: (key, value) for key, value in shifted(streams.root, offsets[2]).entries}
        entries.pop("streams", None)
        entries |= {"streams": given["streams"]} if "streams" in given else {}
        if "axes" in given:
            sizes = [entry for entry in given["axes"][1].entries if entry[0].text in ("head", "dim")]
            _merge(entries, "axes", (given["axes"][0], replace(given["axes"][1], entries=tuple(sizes))))
    for key, value in shifted(replaced, offsets[1]).entries:
        if key.text == "layout" or (key.text == "streams" and streams):
            continue
        if key.text in MERGED and isinstance(value, Mapping):
            _merge(entries, key.text, (key, value))
        else:
            entries[key.text] = (key, value)
    result = Derived(base.path, "", parts=tuple(parts))
    result.root = replace(base.root, entries=tuple(entries.values()))
    return result


def _merge(entries: dict[str, tuple[Scalar, Node]], name: str, given: tuple[Scalar, Node]) -> None:
    """Replace entries of one key by those given, where both are mappings."""
    old = entries.get(name)
    if old is None or not isinstance(old[1], Mapping):
        entries[name] = given
        return
    both = {key.text: (key, value) for key, value in (*old[1].entries, *given[1].entries)}
    entries[name] = (old[0], replace(old[1], entries=tuple(both.values())))


def shifted(node: Node, by: int) -> Node:
    """The node as it stands ``by`` offsets later."""
    moved = {"start": node.start + by, "end": node.end + by}
    if isinstance(node, Scalar):
        return replace(node, **moved, inner=None if node.inner is None else node.inner + by)
    if isinstance(node, Sequence):
        return replace(node, **moved, items=tuple(shifted(item, by) for item in node.items))
    return replace(node, **moved, entries=tuple((shifted(k, by), shifted(v, by)) for k, v in node.entries))
