"""Orders: ``block head dim//x (slot layer) 1`` to dimensions and terms, and terms to digits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvgen.axes import Digit
from kvgen.suggest import suggestion


@dataclass(frozen=True, slots=True)
class Operation:
    """``//n`` or ``%n``; ``operand`` is a number or the name of a param. Offsets count characters of the order."""

    symbol: str
    operand: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Term:
    """An axis and what is taken of it, from left to right."""

    axis: str
    operations: tuple[Operation, ...]
    start: int
    end: int

    def __str__(self) -> str:
        return "".join([self.axis, *(op.symbol + op.operand for op in self.operations)])


@dataclass(frozen=True, slots=True)
class Group:
    """One dimension: a term, the terms of a parenthesis, or none for ``1``."""

    terms: tuple[Term, ...]
    start: int
    end: int


class OrderError(Exception):
    """A mistake at characters ``start`` to ``end`` of an order. ``code`` is one of the catalogue's."""

    def __init__(self, code: str, message: str, start: int, end: int, hint: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.start, self.end, self.hint = code, message, start, end, hint


_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z_][A-Za-z_0-9]*)|(?P<number>[0-9]+)|(?P<symbol>//|%|\(|\))|(?P<other>\S))")

_INSTEAD = {
    "/": "the quotient is written `//`",
    ",": "terms are separated by spaces",
    "*": "terms that share a dimension stand in parentheses: `(block slot)`",
}


def parse_order(text: str) -> tuple[Group, ...]:
    """The dimensions of an order, slowest first; raises OrderError at the first mistake of spelling."""
    return _Parser(text).order()


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens = [(m.lastgroup, m[m.lastgroup], m.start(m.lastgroup), m.end()) for m in _TOKEN.finditer(text)]
        self.end = len(text)
        self.position = 0

    def peek(self) -> tuple[str | None, str, int, int]:
        if self.position < len(self.tokens):
            return self.tokens[self.position]
        return None, "", self.end, self.end

    def take(self) -> tuple[str | None, str, int, int]:
        token = self.peek()
        self.position += 1
        return token

    def order(self) -> tuple[Group, ...]:
        groups = []
        while self.peek()[0] is not None:
            _, text, start, _ = self.peek()
            if text == "(":
                self.take()
                groups.append(self.parenthesis(start))
            else:
                terms = self.term()
                groups.append(Group(terms, start, self.tokens[self.position - 1][3]))
        return tuple(groups)

    def parenthesis(self, start: int) -> Group:
        terms: list[Term] = []
        first = self.position
        while True:
            kind, text, at, end = self.peek()
            if kind is None:
                raise OrderError("KV301", "`(` is not closed", start, start + 1)
            if text == "(":
                raise OrderError("KV301", "parentheses do not nest", at, end)
            if text == ")":
                self.take()
                if self.position == first + 1:
                    raise OrderError("KV301", "empty parentheses", start, end, "a dimension of size one is written `1`")
                return Group(tuple(terms), start, end)
            terms += self.term()

    def term(self) -> tuple[Term, ...]:
        """One term, or none for ``1``."""
        kind, text, start, end = self.take()
        if kind == "number":
            if text != "1":
                hint = "a dimension of size one is written `1`; other sizes come from axes"
                raise OrderError("KV301", f"`{text}` is no term", start, end, hint)
            return ()
        if kind != "name":
            raise OrderError("KV301", f"`{text}` is no term", start, end, _INSTEAD.get(text))
        operations = []
        while (symbol := self.peek())[1] in ("//", "%"):
            self.take()
            operand = self.take()
            if operand[0] not in ("name", "number"):
                at = (symbol[2], symbol[3]) if operand[0] is None else (operand[2], operand[3])
                raise OrderError("KV301", f"a number or a param must follow `{symbol[1]}`", *at)
            operations.append(Operation(symbol[1], operand[1], operand[2], operand[3]))
            end = operand[3]
        return (Term(text, tuple(operations), start, end),)


def digits(term: Term, axis: str, extents: Mapping[str, int | None], params: Mapping[str, int]) -> tuple[Digit, ...]:
    """The digits of a term of ``axis``, slowest first: one, or two for ``token``, which is block and slot together.

    ``extents`` gives the extent of every axis, of ``token`` that of slot. Raises OrderError for a split that does
    not divide, of an axis of unknown extent, or by an unknown param.
    """
    div, size = 1, extents[axis]
    whole = True  # no remainder was taken, so that a token still knows its block
    for operation in term.operations:
        operand = divisor(operation, params)
        if size is None:
            why = "how many there are is the pool's" if axis == "block" else "its extent is dynamic"
            raise OrderError("KV308", f"`{term.axis}` cannot be split: {why}", term.start, term.end)
        if size % operand:
            message = f"{operand} does not divide {size}, what `{_left(term, operation)}` counts"
            raise OrderError("KV303", message, operation.start, operation.end)
        if operation.symbol == "//":
            div, size = div * operand, size // operand
        else:
            size, whole = operand, False
    if axis != "token":
        return (Digit(axis, div, size),)
    return (Digit("block", 1, None), Digit("slot", div, size)) if whole else (Digit("slot", div, size),)


def divisor(operation: Operation, params: Mapping[str, int]) -> int:
    """The number an axis is split by; raises OrderError for an unknown param, and for what is no such number."""
    text = operation.operand
    if not text.isdigit():
        if text not in params:
            hint = suggestion(text, params) if params else "params are named under `params`"
            raise OrderError("KV311", f"unknown param `{text}`", operation.start, operation.end, hint)
        return params[text]
    if text[0] == "0" or len(text) > 10:
        raise OrderError("KV301", f"`{text}` cannot split an axis", operation.start, operation.end)
    return int(text)


def _left(term: Term, operation: Operation) -> Term:
    """A term up to an operation."""
    return replace(term, operations=term.operations[: term.operations.index(operation)])
