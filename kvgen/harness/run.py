"""Run a layout's cases on a module and compare it with the reference, byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from kvgen.encodings import append_refusal
from kvgen.harness.bench import Bench, Case
from kvgen.harness.cases_append import append_cases
from kvgen.harness.cases_codes import code_cases
from kvgen.harness.cases_concat import concat_cases
from kvgen.harness.cases_encoded import encoded_cases
from kvgen.harness.cases_fused import fused_cases
from kvgen.harness.cases_gather import gather_cases
from kvgen.harness.cases_graph import graph_cases
from kvgen.harness.cases_pages import page_cases
from kvgen.harness.cases_refuse import refusal_cases
from kvgen.harness.cases_slots import slot_cases
from kvgen.harness.compare import Mismatch, Unsupported
from kvgen.harness.interpreter import mended
from kvgen.harness.pools import HUGE_ELEMENTS, PoolFactory
from kvgen.harness.report import Report, Result, named, possible
from kvgen.harness.transfers import run_transfer
from kvgen.layout import Layout
from kvgen.transfer import Transfer


def cases(layout: Layout, device: str = "cpu", variants: int = 1) -> list[Case]:
    """All cases of a layout, in the order they run. ``variants``: choices of element types.

    There are none for functions that its module does not have: those that would write a stream which cannot be
    appended, and those that the layout does not ask for.
    """
    found = [
        *append_cases(layout, variants),
        *gather_cases(layout, variants),
        *encoded_cases(layout),
        *concat_cases(layout),
        *code_cases(layout),
        *fused_cases(layout, device, variants),
        *slot_cases(layout),
        *page_cases(layout, device),
        *refusal_cases(layout),
    ]
    if device.startswith("cuda"):
        found += graph_cases(layout)
    refused = [s.name for s in layout.streams if append_refusal(layout, s.name)]
    absent = {"append", "append_positions", *(f"append_{name}" for name in refused)} if refused else set()
    found = [case for case in found if case.function not in absent]
    return possible(found, layout.functions)


def run(
    layout: Layout | Transfer,
    module: Any,
    *,
    device: str = "cpu",
    seed: int = 0,
    only: str | Iterable[str] | None = None,
    functions: Collection[str] | None = None,
    call: str = "",
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Report:
    """Run every case, or those named by ``only``: whole names, or the function they begin with (``append``).

    ``module`` is anything with the functions of a generated module; one it lacks is reported as missing. Nothing is
    raised for what the module does wrong. UnknownCase if ``only`` names what is none.

    ``functions``: those that are there to be tested, of a module that somebody else wrote. What they refuse is then
    theirs to decide. ``call`` is the command line that runs the cases, and repeats one with options that
    are added; ``kvgen test NAME`` where nothing is said. ``track`` goes through the cases, each in its turn, and may
    tell how far it is.
    """
    call = call or f"kvgen test {layout.name}"
    if isinstance(layout, Transfer):
        return run_transfer(layout, module, device, seed, only, functions, call, track)
    pools = PoolFactory(layout, device, seed)
    found = cases(layout, device, pools.variants())
    if functions is not None:
        found = [c for c in found if c.function in functions and not c.refuses]
    found = named(found, only)
    with mended(device):
        results = tuple(_run(case, layout, module, pools, seed, call) for case in track(found))
    return Report(layout.name, device, seed, results)


def _run(case: Case, layout: Layout, module: Any, pools: PoolFactory, seed: int, call: str) -> Result:
    if not hasattr(module, case.function):
        return Result(case.name, case.function, "missing")
    lacking = [name for name in case.needs if not hasattr(module, name)]
    reason = f"there is no function {lacking[0]}" if lacking else _cannot(case, layout, pools)
    if reason:
        return Result(case.name, case.function, "skipped", reason)
    device = "" if pools.device == "cpu" else f" --device {pools.device}"
    repeat = f"{call}{device} --seed {seed} --case {case.name}"
    try:
        case.body(Bench(layout, module, pools, seed, case.name))
    except Mismatch as mismatch:
        return Result(case.name, case.function, "failed", str(mismatch), mismatch.difference, repeat)
    except Unsupported as unsupported:
        return Result(case.name, case.function, "skipped", str(unsupported))
    except (Exception, SystemExit) as error:
        # A module under test may raise anything at all; the run goes on and says so.
        message = f"raised {type(error).__name__}: {str(error).strip() or 'without a message'}"
        return Result(case.name, case.function, "failed", message, None, repeat)
    return Result(case.name, case.function, "passed")


def _cannot(case: Case, layout: Layout, pools: PoolFactory) -> str:
    """Why this machine cannot run a case, empty if it can. On a CPU huge pools take no memory."""
    if "huge" not in case.name or not pools.device.startswith("cuda"):
        return ""
    needed = sum(2 * 3 * HUGE_ELEMENTS * b.unit for b in layout.buffers)
    free = torch.cuda.mem_get_info()[0]
    return f"needs {needed >> 30} GiB of device memory, {free >> 30} are free" if free < needed else ""
