"""Every ordered pair of shipped layouts with the same streams, as a transfer of small pools.

    python -m tests.pairs [START [STEP]]

runs the harness on all of them (or on every STEP-th, from START on), and prints what fails.
"""

from __future__ import annotations

import re
import sys
from itertools import permutations

from kvgen.documents import load_text
from kvgen.transfer import Transfer
from tests.generated import ROOT, SHIPPED, shipped, shipped_text

CASES = ("transfer/T7", "transfer/one_side_padded", "transfer_blocks/many")
"""What a pair is tried on: single tokens, tensors of which one is padded oddly, and whole pools by blocks."""


def compatible() -> list[tuple[str, str]]:
    """Names of layouts whose streams are called alike and have the same axes."""
    streams = {name: {s.name: [a.name for a in s.axes] for s in shipped(name).streams} for name in SHIPPED}
    dims = {name: {s.name: s.axes[-1].extent for s in shipped(name).streams} for name in SHIPPED}
    pairs = permutations(SHIPPED, 2)
    return [(a, b) for a, b in pairs if streams[a] == streams[b] and dims[a] == dims[b]]


def small(name: str) -> str:
    """A side with few heads and short pages, where the layout's own words allow them."""
    layout = shipped(name)
    size = layout.block_size or 16
    split = re.search(r"\bslot(//|%)", shipped_text(name))  # into parts that have a size of their own
    keys = [] if split else [f"block_size: {4 if size <= 64 else 6}"]
    keys += ["axes: {head: 2}"] if layout.streams[0].axes[0].name == "head" else []
    return f"{{layout: {name}, {', '.join(keys)}}}"


def text(source: str, destination: str) -> str:
    layers = "all" if (shipped(source).layers is None) != (shipped(destination).layers is None) else "one"
    sides = f"  from: {small(source)}\n  to: {small(destination)}\n"
    return f"name: pair\ntransfer:\n{sides}layers: {layers}\nconvert: requantise\n"


def pair(source: str, destination: str) -> Transfer:
    return load_text(text(source, destination), str(ROOT / "layouts" / "transfers" / "pair.yaml"))


def report(source: str, destination: str):
    """What the harness says of a pair."""
    from kvgen import harness, runtime
    from kvgen.emit.render import render_raw

    what = pair(source, destination)
    module = runtime.import_module(what.name, render_raw(what))  # formatting takes longer than the rest
    only = [case for case in CASES if hasattr(module, case.split("/")[0])]
    return harness.run(what, module, only=only)


def main(arguments: list[str]) -> int:
    start, step = (int(arguments[i]) if len(arguments) > i else i for i in (0, 1))
    failed = 0
    found = compatible()[start :: step or 1]
    for index, (source, destination) in enumerate(found):
        try:
            result = report(source, destination)
            problem = "" if result.ok else str(result)
        except Exception as error:  # a pair that cannot be built is what this looks for
            problem = f"{type(error).__name__}: {error}"
        if problem:
            failed += 1
            print(f"{source} -> {destination}: {problem}", flush=True)
        if index % 50 == 49:
            print(f"{index + 1} of {len(found)}, {failed} failed", flush=True)
    print(f"{len(found)} pairs, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    import os

    os.environ["TRITON_INTERPRET"] = "1"
    sys.exit(main(sys.argv[1:]))
