"""What a run found, case by case."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from kvgen.harness.compare import Difference

Named = TypeVar("Named", bound="_Case")
Outcome = Literal["passed", "failed", "missing", "skipped"]


class _Case(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def function(self) -> str: ...

    @property
    def needs(self) -> tuple[str, ...]: ...


class UnknownCase(ValueError):
    """Names that no case has, nor a function with cases. ``known`` are names of either that there are."""

    def __init__(self, names: Iterable[str], known: Iterable[str] = ()) -> None:
        self.names = frozenset(names)
        self.known = tuple(dict.fromkeys(known))
        super().__init__(f"no case is named {', '.join(sorted(self.names))}")


def named(cases: list[Named], only: str | Iterable[str] | None) -> list[Named]:
    """The cases of these names or functions, all of them for None. UnknownCase for a name that is neither."""
    if only is None:
        return cases
    wanted = {only} if isinstance(only, str) else set(only)
    known = [name for case in cases for name in (case.function, case.name)]
    if unknown := wanted.difference(known):
        raise UnknownCase(unknown, known)
    return [case for case in cases if not wanted.isdisjoint((case.name, case.function))]


def possible(cases: list[Named], functions: Collection[str]) -> list[Named]:
    """The cases that need no other functions than these; none given, a module has all."""
    return [case for case in cases if not functions or {case.function, *case.needs}.issubset(functions)]


@dataclass(frozen=True, slots=True)
class Result:
    """One case. ``missing``: the module lacks the function; ``skipped``: this machine cannot run it.

    ``message`` says what was found, or why not; ``repeat`` is the command line that runs the case alone.
    """

    case: str
    function: str
    outcome: Outcome
    message: str = ""
    difference: Difference | None = None
    repeat: str = ""

    def __str__(self) -> str:
        text = f"{self.outcome.upper()} {self.case}"
        if self.message:
            text += f"\n  {self.function}: {self.message}"
        return text + (f"\n  again: {self.repeat}" if self.outcome == "failed" else "")


@dataclass(frozen=True, slots=True)
class Report:
    """All cases of one layout on one device. ``ok`` unless one failed or a function is missing."""

    layout: str
    device: str
    seed: int
    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        return all(r.outcome in ("passed", "skipped") for r in self.results)

    @property
    def failures(self) -> tuple[Result, ...]:
        return tuple(r for r in self.results if r.outcome == "failed")

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of functions the module lacks."""
        return tuple(dict.fromkeys(r.function for r in self.results if r.outcome == "missing"))

    def count(self, outcome: Outcome) -> int:
        return sum(r.outcome == outcome for r in self.results)

    def __str__(self) -> str:
        lines = [str(r) for r in self.results if r.outcome in ("failed", "skipped")]
        if self.missing:
            lines.append(f"MISSING {', '.join(self.missing)}")
        counts = ", ".join(f"{n} {o}" for o in ("passed", "failed", "missing", "skipped") if (n := self.count(o)))
        return "\n".join([*lines, f"{self.layout} on {self.device}, seed {self.seed}: {counts or 'no cases'}"])
