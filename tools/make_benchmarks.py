"""Write the tables of the documentation from the results of ``kvgen bench --json``.

``python tools/make_benchmarks.py RESULTS.json … [--page docs/benchmarks.md …] [--plot FILE] [--layouts NAME …]``

A page says where its tables stand, and what is in them; what is between such a pair of lines is replaced:

    <!-- bench: machine -->                  device, versions, date, rate of a copy
    <!-- bench: targets -->                  which targets are met, and who misses them
    <!-- bench: survey append -->            a function of all layouts by families, each beside its best rival
    <!-- bench: append paged_nhd mla -->     a function of these layouts (all if none are named), and all rivals
    <!-- bench: fused -->                    fused appends beside plain ones and chains
    <!-- bench: transfers -->                transfers of whole blocks beside copies
    <!-- bench: host -->                     what eager calls cost their caller
    <!-- end of bench -->
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from kvgen.bench import markdown, table
from kvgen.bench.plot import plot
from kvgen.bench.results import Run, from_json, merged
from kvgen.bench.targets import sentences
from kvgen.diagnostics import KvgenError, render_text
from kvgen.layout import Layout
from kvgen.resolve import load

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
SECTION = re.compile(
    r"(?P<begin>^<!-- bench: (?P<what>[^\n]*?) -->\n)(?P<text>.*?)(?P<end>^<!-- end of bench -->$)", re.M | re.S
)


def filled(page: str, run: Run) -> str:
    """The text of a page with every table written anew."""
    return SECTION.sub(lambda match: f"{match['begin']}\n{_section(match['what'].split(), run)}\n{match['end']}", page)


def _section(what: list[str], run: Run) -> str:
    kind, *names = what
    if kind == "machine":
        return table.heading(run) + ".\n"
    if kind == "targets":
        return "\n".join(f"* {sentence}" for sentence in sentences(run)) + "\n"
    if kind == "survey":
        return markdown.survey(run, names[0], families(run))
    plain = {"host": markdown.host_markdown, "fused": markdown.fused, "transfers": markdown.transfers}
    return plain[kind](run) if kind in plain else markdown.markdown(run, kind, names)


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
    parser.add_argument("--plot", type=Path, help="draw the appends there")
    parser.add_argument("--layouts", nargs="+", default=(), help="those that are drawn")
    given = parser.parse_args(arguments)
    try:
        run = merged([from_json(path.read_text(encoding="utf-8"), path.as_posix()) for path in given.results])
        for page in given.page:
            old = page.read_text(encoding="utf-8")
            page.write_text(filled(old, run), encoding="utf-8", newline="\n")
        if given.plot:
            plot(run, given.plot, ["append"], given.layouts)
    except KvgenError as error:
        print(render_text(error.diagnostics), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
