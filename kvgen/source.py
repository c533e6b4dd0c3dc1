"""YAML text to a tree of nodes that know where they stand; a stricter reading than YAML 1.1's.

What is plain text to a reader stays text: ``on``, ``yes`` and ``12:30`` are strings, ``true`` and ``false`` the
only booleans, ``1e-6`` is a number, and ``010`` is refused, since it is 8 to some and 10 to others. Anchors,
aliases, merge keys and tags are refused: a layout needs none, and they are how small files become huge.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import yaml

from kvgen.diagnostics import Diagnostic, KvgenError, Span

SIZE_LIMIT = 256 * 1024
"""Bytes. Hundreds of times what the largest layout needs."""

DEPTH_LIMIT = 32

Key: TypeAlias = str | int
Location: TypeAlias = tuple[Key, ...]
"""A way from the root: keys of mappings and indices of sequences."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """``start`` and ``end`` are offsets into the document; ``inner`` is that of ``text`` where it stands verbatim."""

    value: str | int | float | bool | None
    text: str
    start: int
    end: int
    inner: int | None


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Node, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Mapping:
    entries: tuple[tuple[Scalar, Node], ...]
    start: int
    end: int

    def find(self, key: Key) -> tuple[Scalar, Node] | None:
        return next((entry for entry in self.entries if entry[0].text == key), None)


Node: TypeAlias = Scalar | Sequence | Mapping


@dataclass(slots=True)
class Source:
    """A document, its tree, and the mistakes that reading it did not stop at."""

    path: str
    text: str
    root: Node = field(init=False)
    problems: list[Diagnostic] = field(default_factory=list)
    _lines: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._lines = [0, *(match.end() for match in _LINE_BREAK.finditer(self.text))]

    def span(self, start: int, end: int) -> Span:
        """The stretch from ``start`` to ``end``, cut at the end of its first line."""
        line = bisect_right(self._lines, start) - 1
        first = self._lines[line]
        last = self._lines[line + 1] if line + 1 < len(self._lines) else len(self.text)
        content = _LINE_BREAK.sub("", self.text[first:last])
        stop = min(end - first, len(content.rstrip()))
        return Span(self.path, line + 1, start - first + 1, max(stop, start - first) + 1, content)

    def node(self, location: Location) -> tuple[Scalar | None, Node]:
        """The key and the value at a location, or the nearest around it that exists.

        A place written ``{key: slot dim}`` answers for the ``holds`` and ``order`` it is short for.
        """
        key, node = None, self.root
        for step in location:
            if isinstance(node, Mapping):
                entry = node.find(step)
                if entry is None and step in ("holds", "order"):
                    entry = next((e for e in node.entries if e[0].text not in _PLACE_KEYS), None)
                    if entry is not None and step == "holds":
                        return entry[0], entry[0]
                if entry is None:
                    break
                key, node = entry
            elif isinstance(node, Sequence) and isinstance(step, int) and step < len(node.items):
                key, node = None, node.items[step]
            else:
                break
        return key, node

    def at(self, location: Location) -> Span:
        """Where the value at a location stands."""
        _, node = self.node(location)
        return self.span(node.start, node.end)

    def at_key(self, location: Location) -> Span:
        """Where the key of a location stands; its value where it is an item of a sequence."""
        key, node = self.node(location)
        return self.span((key or node).start, (key or node).end)

    def inside(self, location: Location, start: int, end: int) -> Span:
        """Where characters ``start`` to ``end`` of a string value stand; all of it where it is folded or escaped."""
        _, node = self.node(location)
        if isinstance(node, Scalar) and node.inner is not None:
            return self.span(node.inner + start, node.inner + end)
        return self.span(node.start, node.end)

    def __contains__(self, key: str) -> bool:
        """Whether the document has a top-level key."""
        return isinstance(self.root, Mapping) and self.root.find(key) is not None

    def plain(self) -> object:
        """The tree as dicts, lists and scalars. Of a key given twice the first counts."""
        return _plain(self.root)


_SYNTAX_HINTS = {
    "mapping values are not allowed": "text with a colon in it goes in quotes",
    "a flow mapping": "is a `}` missing before this, or a space after a colon?",
    "a flow sequence": "is a `]` missing before this?",
    "quoted scalar": "is a quote missing?",
    "<block end>": "keys of one mapping begin in one column",
}
_LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
_PLACE_KEYS = ("holds", "order", "fields", "align", "regions")
_TAB_INDENT = re.compile("^ *(\t)[ \t]*[^\\s]", re.MULTILINE)


def read(path: Path | str) -> Source:
    """Read and parse a file; raises KvgenError where it cannot be read or is no YAML."""
    try:
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            raise OSError("not a regular file")  # a pipe that nobody writes to would be waited for
        with open(path, "rb") as file:
            data = file.read(SIZE_LIMIT + 1)
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise KvgenError(Diagnostic("KV101", f"cannot read {path}: {reason}")) from None
    return parse(data, str(path))


def parse(text: str | bytes, path: str) -> Source:
    """Parse a document; raises KvgenError where there is no tree to go on with."""
    source = Source(path, _decode(text, path))
    tabs = [
        Diagnostic("KV105", "a tab in the indentation", source.span(match.start(1), match.end(1)), "indent with spaces")
        for match in _TAB_INDENT.finditer(source.text)
    ]
    if tabs:
        raise KvgenError(*tabs[:10])
    try:
        source.root = _Builder(source).document()
    except yaml.reader.ReaderError as error:
        span = source.span(error.position, error.position + 1)
        message = f"the file holds the character U+{ord(source.text[error.position]):04X}: it is no text file"
        raise KvgenError(Diagnostic("KV103", message, span)) from None
    except yaml.MarkedYAMLError as error:
        raise KvgenError(*source.problems, _syntax(source, error)) from None
    if any(problem.code == "KV108" for problem in source.problems):
        raise KvgenError(*source.problems[:10])  # what an alias stood for is not known, nor what is wrong with it
    return source


def _decode(text: str | bytes, path: str) -> str:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(data) > SIZE_LIMIT:
        message = f"the file is larger than {SIZE_LIMIT // 1024} KiB: it is no layout"
        raise KvgenError(Diagnostic("KV102", message, Span(path, 1, 1, 1, "")))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", "replace")
        span = Source(path, before + "\ufffd").span(len(before), len(before) + 1)
        message = f"byte 0x{data[error.start]:02X} is not UTF-8"
        raise KvgenError(Diagnostic("KV103", message, span, "save the file as UTF-8 text")) from None


def _syntax(source: Source, error: yaml.MarkedYAMLError) -> Diagnostic:
    mark = error.problem_mark or error.context_mark
    if error.context_mark and mark.index >= len(source.text.rstrip()):
        mark = error.context_mark  # what is not closed, rather than the end of the file
    start = min(mark.index, len(source.text)) if mark else 0
    span = source.span(start, start + 1)
    if source.text[start : start + 1] == "\t":
        return Diagnostic("KV105", "a tab where YAML takes spaces only", span, "use spaces")
    message = error.problem or "not valid YAML"
    if error.context:
        message = f"{error.context}: {message}"
    return Diagnostic(
        "KV106", message, span, next((hint for text, hint in _SYNTAX_HINTS.items() if text in message), None)
    )


class _Builder:
    """Events to nodes. Depth is bounded here, so that no input exhausts the stack."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.events: Iterator[yaml.Event] = yaml.parse(source.text, Loader=yaml.SafeLoader)

    def document(self) -> Node:
        next(self.events)  # StreamStart
        if isinstance(next(self.events), yaml.StreamEndEvent):
            raise KvgenError(Diagnostic("KV104", "the file is empty", self.source.span(0, 0)))
        root = self.node(next(self.events), 0)
        next(self.events)  # DocumentEnd
        after = next(self.events)
        if isinstance(after, yaml.DocumentStartEvent):
            self.report("KV109", "a second document begins here", after, "one file is one layout")
        if isinstance(root, Scalar) and root.value is None:
            raise KvgenError(Diagnostic("KV104", "the file is empty", self.source.span(0, 0)))
        return root

    def node(self, event: yaml.Event, depth: int) -> Node:
        start, end = event.start_mark.index, event.end_mark.index
        if depth > DEPTH_LIMIT:
            message = f"nested deeper than {DEPTH_LIMIT} levels"
            raise KvgenError(*self.source.problems, Diagnostic("KV110", message, self.source.span(start, start + 1)))
        if isinstance(event, yaml.AliasEvent):
            self.report("KV108", f"alias *{event.anchor}: layouts have none", event, "write the value out")
            return Scalar(None, "", start, end, None)
        if event.anchor is not None:
            self.report("KV108", f"anchor &{event.anchor}: layouts have none", event, "leave it out")
        if event.tag is not None:
            tag = self.source.text[start:].split(maxsplit=1)[0]
            self.report("KV108", f"tag {tag}: layouts have none", event, "leave it out")
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event)
        if isinstance(event, yaml.SequenceStartEvent):
            return self.sequence(start, depth)
        return self.mapping(start, depth)

    def sequence(self, start: int, depth: int) -> Sequence:
        items = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self.node(event, depth + 1))
        return Sequence(tuple(items), start, event.end_mark.index)

    def mapping(self, start: int, depth: int) -> Mapping:
        entries: dict[str, tuple[Scalar, Node]] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self.node(event, depth + 1)
            value = self.node(next(self.events), depth + 1)
            if not isinstance(key, Scalar):
                self.report("KV106", "a key must be a name", event)
            elif key.text == "<<":
                self.report("KV108", "merge key <<: layouts have none", event, "write the keys out")
            elif key.text in entries:
                first = self.source.span(entries[key.text][0].start, 0).line
                self.report("KV107", f"key `{key.text}` is given twice; the first is on line {first}", event)
            else:
                entries[key.text] = (key, value)
        return Mapping(tuple(entries.values()), start, event.end_mark.index)

    def scalar(self, event: yaml.ScalarEvent) -> Scalar:
        start, end = event.start_mark.index, event.end_mark.index
        raw = self.source.text[start:end]
        if event.style is None:
            try:
                value = _resolve(event.value)
            except ValueError as error:
                self.report("KV111", str(error.args[0]), event, error.args[1])
                value = 1  # something every number can be, so that one mistake is reported once
            return Scalar(value, event.value, start, end, start if raw == event.value else None)
        return Scalar(event.value, event.value, start, end, start + 1 if raw[1:-1] == event.value else None)

    def report(self, code: str, message: str, event: yaml.Event, hint: str | None = None) -> None:
        span = self.source.span(event.start_mark.index, max(event.end_mark.index, event.start_mark.index + 1))
        self.source.problems.append(Diagnostic(code, message, span, hint))


_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


def _resolve(text: str) -> str | int | float | bool | None:
    """The value of a plain scalar; raises ValueError(message, hint) for a number that is none or two."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        digits = text.lstrip("+-")
        if len(digits) > 1 and digits[0] == "0":
            raise ValueError(f"`{text}` is octal to some readers of YAML and decimal to others", "drop the leading 0")
        if len(digits) > 18:
            raise ValueError("a number of more than 18 digits", "sizes are counted in elements or bytes")
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def _plain(node: Node) -> object:
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Sequence):
        return [_plain(item) for item in node.items]
    return {key.text: _plain(value) for key, value in node.entries}
