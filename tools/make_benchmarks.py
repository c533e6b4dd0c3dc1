"""Write the tables of the documentation from the results of ``kvgen bench --json``.

``python tools/make_benchmarks.py RESULTS.json [--page docs/benchmarks.md …] [--plot FILE] [--layouts NAME …]``

A page says where its tables stand, and what is in them; what is between such a pair of lines is replaced:

    <!-- bench: append paged_nhd mla -->     times of a function, for these layouts (all if none are named)
    <!-- bench: host -->                     what eager calls cost their caller
    <!-- bench: machine -->                  device, versions, date, rate of a copy
    <!-- end of bench -->
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from kvgen.bench import table
from kvgen.bench.plot import plot
from kvgen.bench.results import Run, from_json
from kvgen.diagnostics import KvgenError, render_text

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
SECTION = re.compile(
    r"(?P<begin>^<!-- bench: (?P<what>[^\n]*?) -->\n)(?P<text>.*?)(?P<end>^<!-- end of bench -->$)", re.M | re.S
)


def filled(page: str, run: Run) -> str:
    """The text of a page with every table written anew."""
    return SECTION.sub(lambda match: f"{match['begin']}\n{_section(match['what'].split(), run)}\n{match['end']}", page)


def _section(what: list[str], run: Run) -> str:
    kind, *layouts = what
    if kind == "machine":
        return table.heading(run) + ".\n"
    if kind == "host":
        return table.host_markdown(run)
    return table.markdown(run, kind, layouts)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--page", type=Path, nargs="+", default=PAGES)
    parser.add_argument("--plot", type=Path, help="draw the appends there")
    parser.add_argument("--layouts", nargs="+", default=(), help="those that are drawn")
    given = parser.parse_args(arguments)
    try:
        run = from_json(given.results.read_text(encoding="utf-8"), given.results.as_posix())
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
