"""Mistakes planted in generated text, and what the harness must say of each.

A mutant is an edit of one function of a generated module. It counts only if the module still builds, runs without an
exception and leaves other bytes behind than the right module does on the inputs of one case of the harness; that case
must then fail, and say which byte, slot number or page differs first.

What is needed to add some, of a layout or of anything else that the harness has cases for:

    @pytest.mark.parametrize(("mutant", "name"), pairs(MUTANTS))
    def test_is_noticed(mutant, name):
        check_layout(mutant, LAYOUTS, name)

and, of what is no layout, ``check`` with the text and what runs the case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgen import harness, runtime
from kvgen.emit.render import render_all
from kvgen.harness import Report
from kvgen.layout import Layout
from kvgen.resolve import load_text


@dataclass(frozen=True)
class Mutant:
    """``pattern`` → ``replacement``, everywhere in one function of the text; ``case`` must notice.

    ``kind`` is the mistake in words: the same mistake may need several edits, one for each way of writing it.

    Stray writes stay within a block of the pool, where the harness has bytes to compare: bounds are moved by a slot or
    two and not taken away, since what lies past those bytes belongs to the process.
    """

    kind: str
    layouts: tuple[str, ...]
    function: str
    pattern: str
    replacement: str | Callable[[re.Match[str]], str]
    case: str

    def apply(self, text: str) -> str:
        start = text.index(f"def {self.function}(")
        end = re.compile(r"^(?:def |@)", re.M).search(text, start + 4)
        stop = end.start() if end else len(text)
        body, count = re.subn(self.pattern, self.replacement, text[start:stop])
        assert count, f"{self.kind}: nothing in {self.function} is like {self.pattern!r}; the text has changed"
        return text[:start] + body + text[stop:]


def pairs(mutants: Iterable[Mutant]) -> list[Any]:
    """Parameters of a test: every mutant with each of its layouts."""
    return [pytest.param(m, name, id=f"{m.kind}-{name}") for m in mutants for name in m.layouts]


def check(mutant: Mutant, name: str, text: str, run: Callable[[Any], Report]) -> None:
    """Assert that a mutant counts, and is noticed. ``run(module)`` runs the mutant's one case."""
    wrong = Recorder(runtime.import_module(name, mutant.apply(text)))
    (noticed,) = run(wrong).results
    seen = _seen_of_right(name, text, mutant.case, run, len(wrong.seen))
    changed = any(not torch.equal(a, b) for a, b in zip(seen, wrong.seen, strict=False))
    assert "raised" not in noticed.message, f"a crash and no mutant: {noticed}"
    assert changed, "nothing is changed on these inputs: a harmless edit, or the wrong case"
    assert noticed.outcome == "failed", "a byte differs, and the harness has not noticed"
    assert noticed.difference is not None or re.search(r"expected (slot )?-?\d+", noticed.message), noticed


_SEEN: dict[tuple[str, str], list[torch.Tensor]] = {}


def _seen_of_right(name: str, text: str, case: str, run: Callable[[Any], Report], count: int) -> list[torch.Tensor]:
    """What the right module leaves behind on the inputs of a case, which many mutants share: ``count`` tensors of it.

    The mutant stopped at its first difference; the rest of the case is of no use.
    """
    if (text, case) not in _SEEN or len(_SEEN[text, case]) < count:
        right = Recorder(runtime.import_module(name, text), count)
        (result,) = run(right).results
        stopped = result.message.startswith(f"raised {Enough.__name__}")
        assert result.outcome == "passed" or stopped, f"the module without the mistake: {result}"
        _SEEN[text, case] = right.seen
    return _SEEN[text, case]


def check_layout(mutant: Mutant, layouts: dict[str, Layout], name: str) -> None:
    """``check`` for the module of a layout."""
    run = partial(harness.run, layouts[name], only=mutant.case)
    check(mutant, name, text_of(layouts, name), run)


def text_of(layouts: dict[str, Layout], name: str) -> str:
    """The generated text of one of several layouts, which are all generated at once."""
    return _texts(tuple(layouts.values()))[f"{name}.py"]


@cache
def _texts(layouts: tuple[Layout, ...]) -> dict[str, str]:
    return render_all(list(layouts))


def check_spread(mutants: Iterable[Mutant], at_least: int, fewer: dict[str, str]) -> None:
    """Assert that there are so many kinds, each in three layouts, one with planes and one with slots below dims.

    ``fewer``: kinds that do not exist in all of these, and why.
    """
    where: dict[str, set[str]] = {}
    for mutant in mutants:
        where.setdefault(mutant.kind, set()).update(mutant.layouts)
    assert len(where) >= at_least
    for kind, layouts in where.items():
        assert len(layouts) >= 3, f"{kind}: only in {', '.join(sorted(layouts))}"
        missing = {p for p in ("planar", "minor") if not any(p in layout for layout in layouts)}
        assert bool(missing) == (kind in fewer), f"{kind}: {missing or 'nothing'} is missing"


class Enough(Exception):
    """A recorder has seen what it was to see."""


class Recorder:
    """A module whose calls are passed on, and everything that they return or may have written kept as bytes.

    ``at_most``: tensors after which calls are of no interest.
    """

    def __init__(self, module: Any, at_most: int | None = None) -> None:
        self.module, self.at_most, self.seen = module, at_most, []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.module, name)

        def call(*args: Any, **options: Any) -> Any:
            if self.at_most is not None and len(self.seen) >= self.at_most:
                raise Enough
            result = function(*args, **options)
            self.seen += [_bytes(t) for t in _tensors([args, options, result])]
            return result

        return call


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    """The tensors in a value, whatever tuples, lists and dicts they lie in."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta":
            yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A storage's bytes; of one that takes gigabytes, those of the tensor."""
    if tensor.untyped_storage().nbytes() > 1 << 30:
        return tensor.contiguous().view(torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).clone()


# Small layouts in which the same mistake can be planted wherever K and V lie.

PLACEMENTS = {
    "nhd": """
  key_cache: {holds: key, order: block slot head dim}
  value_cache: {holds: value, order: block slot head dim}
""",
    "planar": """
  cache: {order: block, fields: [{key: head slot dim}, {pad: 8}, {value: slot head dim}, LEAVES]}
""",
    "minor": """
  key_cache: {holds: key, order: block head dim//4 slot dim%4}
  value_cache: {holds: value, order: block head dim slot}
""",
}
"""Buffers of the layouts: slots above heads, all keys of a page before all values, and slots below dims."""


def family(
    name: str,
    key: str = "{}",
    value: str = "key",
    *,
    head: int = 3,
    dim: int = 12,
    leaves: dict[str, str] | None = None,
    narrow: bool = False,
    rest: str = "",
) -> dict[str, Layout]:
    """A layout for each placement, ``name_placement``.

    ``leaves``: scales and zeros that have a place, and their axes below the block. ``narrow``: two codes share a byte.
    """
    found = {}
    for placement, buffers in PLACEMENTS.items():
        if narrow:  # both must be of one token
            buffers = buffers.replace("head dim slot}", "head dim//8 slot dim%8}")
        planes = "".join(f", {{{leaf}: {order}}}" for leaf, order in (leaves or {}).items())
        text = buffers.replace(", LEAVES", planes)
        for leaf, order in (leaves or {}).items() if placement != "planar" else ():
            order = order.replace("slot head", "head slot") if placement == "minor" else order
            text += f"  {leaf.replace('.', '_')}s: {{holds: {leaf}, order: block {order}}}\n"
        full = f"{name}_{placement}"
        axes = f"axes: {{head: {head}, dim: {dim}}}\nblock_size: 5\nstreams: {{key: {key}, value: {value}}}"
        found[full] = load_text(f"name: {full}\n{axes}\nbuffers:{text}{rest}")
    return found


def placed(name: str) -> tuple[str, ...]:
    """The layouts of a family."""
    return tuple(f"{name}_{placement}" for placement in PLACEMENTS)


def table() -> list[str]:
    """All kinds in all tables: the mistake, the function it is planted in, the case that notices, and the layouts."""
    lines = []
    for path in sorted(Path(__file__).parent.glob("test_mutants*.py")):
        for m in import_module(f"tests.{path.stem}").MUTANTS:
            lines.append(f"{m.kind:<52} {m.function:<26} {m.case:<42} {' '.join(m.layouts)}")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
