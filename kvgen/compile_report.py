"""Every kernel of a module, compiled for GPUs that need not be there, and what the compiler made of it.

Recorded for each kernel and target: how many loads and stores of global memory there are by their width in bytes, bytes
of a thread's registers spilled to memory, registers, and shared memory. Widths and spills are the layout's and the
schedule's doing and must not get worse in any version of Triton; exact counts and registers belong to one version.

Nothing here imports torch or Triton: ``compile_worker`` does, in processes of its own.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from kvgen.diagnostics import Diagnostic, KvgenError

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
PROCESSES = 2
FEW = 20
"""Compilations that are not worth a second process, which first has to import torch."""


class KernelSpec(Protocol):
    """What is compiled: a kernel's name in its module, and how its arguments are specialised.

    ``registers`` bounds those of a thread on targets that cast natively (0: nothing does).
    """

    name: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible: tuple[str, ...]
    num_warps: int
    registers: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One compiled kernel. ``loads`` and ``stores`` map a width in bytes to the number of instructions."""

    loads: Mapping[str, int]
    stores: Mapping[str, int]
    spills: int
    registers: int
    shared: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A kernel that a target's compiler refused."""

    error: str


Result = Figures | Failure
Report = dict[str, dict[str, dict[str, Result]]]
"""layout → kernel → target → figures."""


FORM_TARGETS = ("sm_90", "gfx942")
"""Where the forms of a call besides the plain one are compiled: one target of each maker tells what they cost."""


def compile_all(
    texts: Mapping[str, str], kernels: Mapping[str, Sequence[KernelSpec]], targets: Sequence[str]
) -> tuple[str, Report]:
    """Compile ``kernels`` of the modules ``texts`` (both by layout name); Triton's version and the report.

    Kernels whose source and specialisation are the same are compiled once.
    """
    jobs: dict[str, dict[str, Any]] = {}
    owners: dict[str, list[tuple[str, str]]] = {}
    for layout, specs in kernels.items():
        sources = _sources(texts[layout])
        for spec in specs:
            job = {
                "name": spec.name,
                "signature": dict(spec.signature),
                "constexprs": dict(spec.constexprs),
                "divisible": list(spec.divisible),
                "num_warps": spec.num_warps,
                "registers": spec.registers,
                "targets": [target for target in targets if not spec.form or target in FORM_TARGETS],
            }
            key = json.dumps([sources[spec.name], job], sort_keys=True, default=str)
            jobs.setdefault(key, {**job, "module": layout})
            owners.setdefault(key, []).append((layout, spec.label))
    _refuse_unknown(targets)
    version, results = _run(texts, list(jobs.values()), targets)
    report: Report = {layout: {} for layout in kernels}
    for key, by_target in zip(jobs, results, strict=True):
        for layout, name in owners[key]:
            report[layout][name] = by_target
    return version, {layout: dict(sorted(rows.items())) for layout, rows in report.items()}


def _sources(text: str) -> dict[str, str]:
    """For each function of a module, its code with that of everything in the module it refers to; comments aside."""
    definitions: dict[str, ast.stmt] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    definitions[target.id] = node

    @cache
    def parts(name: str) -> tuple[str, dict[str, None]]:
        nodes = ast.walk(definitions[name])
        used = (node.id for node in nodes if isinstance(node, ast.Name) and node.id in definitions)
        return ast.unparse(definitions[name]), dict.fromkeys(used)

    def closure(name: str, seen: dict[str, str]) -> dict[str, str]:
        seen[name], used = parts(name)
        for other in used:
            if other not in seen:
                closure(other, seen)
        return seen

    functions = [name for name, node in definitions.items() if isinstance(node, ast.FunctionDef)]
    return {name: "\n".join(closure(name, {}).values()) for name in functions}


def _refuse_unknown(targets: Sequence[str]) -> None:
    """KvgenError with all targets that the compilers do not know: some crash them, of others they blame the kernel."""
    problems = []
    for target in targets:
        if target in TARGETS:
            continue
        command = [sys.executable, "-m", "kvgen.compile_worker", target]
        found = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
        if found.returncode and "ModuleNotFoundError" not in found.stderr:
            hint = f"they know {', '.join(TARGETS)}, and others"
            problems.append(Diagnostic("KV713", f"the compilers of Triton know no GPU {target}", hint=hint))
    if problems:
        raise KvgenError(*problems)


def _environment() -> dict[str, str]:
    """That of a worker: where this is set the interpreter replaces the compiler, and a user may have it for tests."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def _run(
    texts: Mapping[str, str], jobs: Sequence[dict[str, Any]], targets: Sequence[str]
) -> tuple[str, list[dict[str, Result]]]:
    """Deal the jobs to the workers and put their answers back in order."""
    results: list[dict[str, Result]] = [{} for _ in jobs]
    version = ""
    with tempfile.TemporaryDirectory() as folder:
        for layout, text in texts.items():
            (Path(folder) / f"{layout}.py").write_text(text, encoding="utf-8")
        processes = PROCESSES if len(jobs) * len(targets) > FEW else 1
        shares = [list(range(start, len(jobs), processes)) for start in range(processes)]
        workers = []
        for number, share in enumerate(shares):
            work = {"folder": folder, "targets": list(targets), "jobs": [jobs[i] for i in share]}
            request, answer = Path(folder) / f"{number}.work.json", Path(folder) / f"{number}.done.json"
            request.write_text(json.dumps(work), encoding="utf-8")
            command = [sys.executable, "-m", "kvgen.compile_worker", str(request), str(answer)]
            process = subprocess.Popen(command, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            workers.append((share, answer, process))
        for share, answer, process in workers:
            _, errors = process.communicate()
            if process.returncode:
                raise KvgenError(_worker_failure(process.returncode, errors.decode(errors="replace")))
            done = json.loads(answer.read_text(encoding="utf-8"))
            version = done["triton"]
            for i, by_target in zip(share, done["results"], strict=True):
                results[i] = {target: _result(row) for target, row in by_target.items()}
    return version, results


def _worker_failure(code: int, errors: str) -> Diagnostic:
    last = errors.strip().splitlines()[-1] if errors.strip() else f"exit status {code}"
    return Diagnostic("KV712", f"kernels cannot be compiled here: {last}", hint=RUN_HINT)


RUN_HINT = "install torch and triton: they are in the extra `run`"


def _result(row: Mapping[str, Any]) -> Result:
    return Failure(row["error"]) if "error" in row else Figures(**row)


def table_text(version: str, report: Mapping[str, Mapping[str, Mapping[str, Figures]]]) -> str:
    """The table as JSON, one line for each kernel and target so that a change reads well."""
    lines = ["{", f'  "triton": {json.dumps(version)},', '  "kernels": {']
    for layout, kernels in sorted(report.items()):
        lines.append(f"    {json.dumps(layout)}: {{")
        for kernel, targets in sorted(kernels.items()):
            lines.append(f"      {json.dumps(kernel)}: {{")
            rows = [f"        {json.dumps(target)}: {json.dumps(asdict(row))}" for target, row in targets.items()]
            lines += [",\n".join(rows), "      },"]
        lines[-1] = "      }"
        lines.append("    },")
    lines[-1] = "    }"
    return "\n".join([*lines, "  }", "}", ""])


def read_table(path: Path) -> tuple[str, dict[str, dict[str, dict[str, Figures]]]]:
    """Triton's version and the rows of a committed table."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        rows = {
            layout: {kernel: {t: Figures(**row) for t, row in targets.items()} for kernel, targets in kernels.items()}
            for layout, kernels in table["kernels"].items()
        }
        return table["triton"], rows
    except FileNotFoundError:
        raise KvgenError(Diagnostic("KV723", f"{path.as_posix()} does not exist", hint="--update writes it")) from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise KvgenError(Diagnostic("KV723", f"{path.as_posix()} is no table of kvgen: {error}")) from None


def problems(report: Report) -> list[Diagnostic]:
    """What is wrong whatever the table says: kernels that do not compile, and spills."""
    found = []
    for where, result in _flat(report):
        if isinstance(result, Failure):
            found.append(Diagnostic("KV721", f"{where}: {result.error}"))
        elif result.spills:
            found.append(Diagnostic("KV722", f"{where}: {result.spills} bytes of registers are spilled"))
    return found


def differences(report: Report, version: str, table: Report, table_version: str, *, whole: bool) -> list[Diagnostic]:
    """How ``report`` departs from ``table``, and with ``whole`` also what the table has and the report lacks.

    With the Triton of the table every figure must be the same; with another one the narrowest and widest stores must,
    and the widest loads: versions differ in which slot numbers and scales are read for all lanes at once.
    """
    expected, actual = dict(_flat(table)), dict(_flat(report))
    found = []
    for where, result in actual.items():
        if isinstance(result, Failure):
            continue
        known = expected.get(where)
        if known is None:
            found.append(Diagnostic("KV723", f"{where} is not in the table", hint=UPDATE_HINT))
        elif isinstance(known, Figures):
            found += _compare(where, result, known, exact=version == table_version)
    if whole:
        compiled = {(layout, kernel) for layout, kernels in report.items() for kernel in kernels}
        found += [
            Diagnostic("KV723", f"{layout} {kernel} is in the table, but there is no such kernel", hint=UPDATE_HINT)
            for layout, kernels in table.items()
            for kernel in kernels
            if (layout, kernel) not in compiled
        ]
    return found


UPDATE_HINT = "if that is meant, `kvgen compile --update` records it"


def _compare(where: str, actual: Figures, expected: Figures, *, exact: bool) -> Iterable[Diagnostic]:
    for name in ("loads", "stores", "registers", "shared") if exact else ("loads", "stores"):
        got, want = getattr(actual, name), getattr(expected, name)
        if not exact:
            got, want = (_span(widths, widest=name == "loads") for widths in (got, want))
        if got != want:
            shown = (widths_text(got), widths_text(want)) if name in ("loads", "stores") and exact else (got, want)
            message = f"{where}: {name} {shown[0]}, the table says {shown[1]}"
            yield Diagnostic("KV723", message, hint=UPDATE_HINT)


def _span(widths: Mapping[str, int], *, widest: bool) -> str:
    if not widths:
        return "none"
    numbers = sorted(map(int, widths))
    return f"of {'up' if widest else numbers[0]} to {numbers[-1]} bytes"


def widths_text(widths: Mapping[str, int]) -> str:
    """``16 B x4, 8 B x1``, widest first."""
    ordered = sorted(widths.items(), key=lambda item: -int(item[0]))
    return ", ".join(f"{width} B x{count}" for width, count in ordered) or "none"


def _flat(report: Report) -> Iterable[tuple[str, Result]]:
    for layout, kernels in report.items():
        for kernel, targets in kernels.items():
            for target, result in targets.items():
                yield f"{layout} {kernel} {target}", result
