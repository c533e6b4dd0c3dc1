"""``kvgen test``: does the generated code do what the layout says, byte for byte?"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvgen.against import Target, parse, stand_in
from kvgen.cli.common import (
    FormatOption,
    OutputFormat,
    PathsArgument,
    find_layouts,
    known_layouts,
    load_all,
    only_layouts,
    progress,
    reporting,
)
from kvgen.diagnostics import Diagnostic, KvgenError
from kvgen.documents import Document
from kvgen.suggest import did_you_mean, known_here

if TYPE_CHECKING:
    from kvgen.harness import Report


LARGEST_SEED = 2**32 - 1  # what is made of it must be one of torch's

SHOWN = 3
"""Failures of a layout that are printed for people; programs get them all."""


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


def test(
    paths: PathsArgument = None,
    device: Annotated[Device | None, typer.Option(help="Where to run; by default a GPU if there is one.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="What every random number follows from.")] = 0,
    case: Annotated[
        list[str] | None, typer.Option(help="Run this case, or the cases of this function; may be repeated.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[FUNCTION=]MODULE:NAME",
            help="Run the cases on a function of your own instead: mine:write stands in for append, gather=mine:read "
            "for gather. Where its arguments are others, say how it is called: 'mine:write(key, value, cache=kv_cache, "
            "slots=slot_mapping)'. May be repeated.",
        ),
    ] = None,
    output_format: FormatOption = OutputFormat.TEXT,
) -> None:
    """Run the harness on freshly generated modules: every byte is compared with the PyTorch reference.

    Needs torch and triton. Without a GPU the kernels run in Triton's interpreter.
    """
    with reporting(output_format) as found:
        targets = [parse(target) for target in against or []]
        loaded = load_all(find_layouts(paths))
        calls = {layout.name: f"kvgen test {shlex.quote(_argument(path, layout.name))}" for path, layout in loaded}
        layouts = [layout for _, layout in loaded]
        if targets:
            layouts = only_layouts(layouts, "--against is for functions of layouts")
        for result in _run(layouts, calls, device, seed, case, targets):
            if output_format is OutputFormat.TEXT:
                typer.echo(_summary(result))
                found += _findings(result, at_most=SHOWN)
            else:
                found += _findings(result)


def _argument(path: Path, name: str) -> str:
    """What a command calls a layout: its name where that is enough to find it, else its file."""
    return name if [each for each, said in known_layouts().items() if said == name] == [path] else path.as_posix()


def _run(
    layouts: list[Document],
    calls: dict[str, str],
    device: str | None,
    seed: int,
    names: list[str] | None,
    targets: list[Target],
) -> Iterator[Report]:
    """Reports of all layouts. A case that only some of them have (``remap``) runs on those; one has to have it."""
    from kvgen import runtime
    from kvgen.emit.render import render_all

    where = runtime.choose_device(device)
    texts = render_all(layouts)

    from kvgen import harness

    nowhere, known = set(names or ()), dict[str, None]()
    for layout in layouts:
        module = runtime.import_module(layout.name, texts[f"{layout.name}.py"])
        call = calls[layout.name] + "".join(f" --against {shlex.quote(target.text)}" for target in targets)
        own: dict[str, Any] = {"device": where, "seed": seed, "call": call, "track": _tracked(layout.name)}
        if targets:
            module = stand_in(targets, module)
            own["functions"] = [target.function for target in targets]
        try:
            yield harness.run(layout, module, only=names or None, **own)
            nowhere.clear()
        except harness.UnknownCase as error:
            nowhere &= error.names
            known |= dict.fromkeys(error.known)
            if here := set(names or ()) - error.names:
                yield harness.run(layout, module, only=here, **own)
    if nowhere:
        hint = _known_cases(min(nowhere), list(known))
        raise KvgenError(Diagnostic("KV710", str(harness.UnknownCase(nowhere)), hint=hint))


def _tracked(name: str) -> Callable[[Sequence[Any]], Iterator[Any]]:
    """What goes through the cases of a layout and shows on a terminal which one runs."""

    def track(cases: Sequence[Any]) -> Iterator[Any]:
        with progress(len(cases)) as tell:
            for case in cases:
                tell(f"{name}: {case.name}", False)
                yield case
                tell(f"{name}: {case.name}", True)

    return track


def _known_cases(name: str, known: list[str]) -> str:
    """The cases of the function that a name begins with, or else what functions have cases."""
    function, slash, _ = name.partition("/")
    if slash and function in known:
        return known_here(case for case in known if case.startswith(f"{function}/"))
    return did_you_mean(name, known) or known_here(case for case in known if "/" not in case)


def _summary(result: Report) -> str:
    counts = [(outcome, result.count(outcome)) for outcome in ("passed", "failed", "missing", "skipped")]
    numbers = ", ".join(f"{count} {outcome}" for outcome, count in counts if count)
    return f"{result.layout:<24} {result.device}, seed {result.seed}: {numbers or 'no cases'}"


def _findings(result: Report, at_most: int | None = None) -> list[Diagnostic]:
    """One diagnostic for each failed case and each missing function, or for a few of them and how many more.

    Those that name a byte come first: they say more than that a call has raised something.
    """
    found = [
        Diagnostic("KV731", f"{result.layout} {failure.case}: {failure.message}", hint=f"again: {failure.repeat}")
        for failure in sorted(result.failures, key=lambda failure: failure.difference is None)
    ]
    found += [Diagnostic("KV731", f"{result.layout}: there is no function {name}") for name in result.missing]
    if at_most is not None and len(found) > at_most:
        found[at_most:] = [Diagnostic("KV731", f"{result.layout}: {len(found) - at_most} more")]
    return found
