"""Write the tables of the documentation from the results of ``kvgen bench --json``.

``python tools/make_benchmarks.py RESULTS.json … [--page PAGE …] [--host FILE …] [--plot FILE] [--layouts NAME …]``

A page says where its tables stand, and what is in them; what is between such a pair of lines is replaced:

    <!-- bench: machine -->                  device, versions, date, rate of a copy, and what is not in the run
    <!-- bench: targets -->                  how many meet each target, and who is furthest from it
    <!-- bench: survey append -->            a function of all layouts by families, each beside its best rival
    <!-- bench: append paged_nhd mla -->     a function of these layouts (all if none are named), and all rivals
    <!-- bench: fused -->                    fused appends beside plain ones and chains
    <!-- bench: transfers -->                transfers of whole blocks beside copies
    <!-- bench: host -->                     what eager calls cost their caller
    <!-- bench: stubbed -->                  what `benchmarks/host.py --json` found, if --host names its files
    <!-- end of bench -->
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvgen.bench import markdown, table, targets
from kvgen.bench.plot import plot
from kvgen.bench.results import Run, from_json, merged
from kvgen.diagnostics import KvgenError, render_text
from kvgen.layout import Layout
from kvgen.resolve import load

Stubbed = Mapping[str, Any]
"""What ``benchmarks/host.py --json`` writes: versions, tokens, and times by row."""

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
SECTION = re.compile(
    r"(?P<begin>^<!-- bench: (?P<what>[^\n]*?) -->\n)(?P<text>.*?)(?P<end>^<!-- end of bench -->$)", re.M | re.S
)


def filled(page: str, run: Run, stubbed: Sequence[Stubbed] = ()) -> str:
    """The text of a page with every table written anew; that of stubbed launches only if there are some."""

    def section(match: re.Match[str]) -> str:
        kind, *names = match["what"].split()
        if kind == "stubbed" and not stubbed:
            return match[0]
        text = without_launches(stubbed) if kind == "stubbed" else _section(kind, names, run)
        return f"{match['begin']}\n{text}\n{match['end']}"

    return SECTION.sub(section, page)


def _section(kind: str, names: list[str], run: Run) -> str:
    if kind == "machine":
        return "\n".join([f"{table.heading(run)}.", *_missing(run)]) + "\n"
    if kind == "survey":
        return markdown.survey(run, names[0], families(run))
    plain = {
        "targets": targets.summary,
        "host": markdown.host_markdown,
        "fused": markdown.fused,
        "transfers": markdown.transfers,
    }
    return plain[kind](run) if kind in plain else markdown.markdown(run, kind, names)


def _missing(run: Run) -> Iterator[str]:
    """What ships and has no rows, and what was not timed because it failed."""
    known = {row.layout for row in run.rows}
    shipped = [path.stem for folder in ("layouts", "layouts/transfers") for path in (ROOT / folder).glob("*.yaml")]
    if left := sorted(set(shipped) - known):
        yield f"Not in it: {', '.join(left)}."
    for row in run.rows:
        for timing in row.timings:
            if timing.note.startswith(("differs", "raised")):
                yield f"{row.layout}, {row.function} of {row.tokens}: {timing.name} {timing.note}."


def without_launches(found: Sequence[Stubbed]) -> str:
    """What calls cost without CUDA's launch, a column for each run of ``benchmarks/host.py`` of the same layouts."""
    titles = [f"triton {run['triton']}, torch {run['torch']}" for run in found]
    lines = [f"| append of {found[0]['tokens']} tokens, µs | {' | '.join(titles)} |", "|---" * (1 + len(found)) + "|"]
    for name in found[0]["times"]:
        cells = [f"{run['times'][name]:.2f}" for run in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def families(run: Run) -> dict[str, list[str]]:
    """The layouts of a run that ship, by what they hold: as they come, in fp8, and so on."""
    found: dict[str, list[str]] = {title: [] for title in FAMILIES}
    for name in dict.fromkeys(row.layout for row in run.rows):
        path = ROOT / "layouts" / f"{name}.yaml"
        if path.is_file():
            found[_family(load(path))].append(name)
    return found


FAMILIES = (
    "keys and values as they come",
    "fp8",
    "int8 and int4",
    "4-bit floats and shared exponents",
    "codebooks",
    "MLA and indexers",
)


def _family(layout: Layout) -> str:
    if len(layout.streams) == 1 or any(stream.name == "latent" for stream in layout.streams):
        return FAMILIES[-1]
    modes = [stream.encoding.mode for stream in layout.streams if stream.encoding]
    if not modes:
        return FAMILIES[0]
    return FAMILIES[{"fp8": 1, "int": 2, "nvf": 3, "mxf": 3, "tur": 4}[modes[-1][:3]]]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="of one machine; rows of the first stand before others")
    parser.add_argument("--page", type=Path, nargs="+", default=PAGES)
    parser.add_argument("--host", type=Path, nargs="+", default=(), help="results of benchmarks/host.py --json")
    parser.add_argument("--plot", type=Path, help="draw the appends there")
    parser.add_argument("--layouts", nargs="+", default=(), help="those that are drawn")
    given = parser.parse_args(arguments)
    try:
        run = merged([from_json(path.read_text(encoding="utf-8"), path.as_posix()) for path in given.results])
        stubbed = [json.loads(path.read_text(encoding="utf-8")) for path in given.host]
        for page in given.page:
            old = page.read_text(encoding="utf-8")
            page.write_text(filled(old, run, stubbed), encoding="utf-8", newline="\n")
        if given.plot:
            plot(run, given.plot, ["append"], given.layouts)
    except KvgenError as error:
        print(render_text(error.diagnostics), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
