"""What a transfer costs compute beside it, which ``kvgen bench`` does not say: the slowdown of matrix products.

    python benchmarks/transfer.py [TRANSFER ...] [--tokens 32768] [--programs 8 32]

Products of 4096 × 4096 bf16 matrices run on one stream, alone, and while the transfer is replayed on another again and
again, with its own grid and with capped ones. How fast a transfer is says ``kvgen bench TRANSFER``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

from kvgen import runtime
from kvgen.bench.functions import FUNCTIONS, scene_of
from kvgen.bench.timing import CudaClock
from kvgen.documents import load
from kvgen.emit import render_layout

ROOT = Path(__file__).resolve().parent.parent
TRANSFERS = ("nhd_to_hnd", "nhd_to_fp8", "nhd_to_host_layer_first", "host_layer_first_to_nhd")
SETS, MATRIX, ROUNDS, REPEATS = 4, 4096, 20, 5


def calls_of(name: str, tokens: int, programs: int | None) -> list[Callable[[], object]]:
    """Calls of ``transfer_blocks`` on several lists of blocks; ``programs`` None is what the transfer says."""
    document = load(ROOT / "layouts" / "transfers" / f"{name}.yaml")
    module = runtime.import_module(name, render_layout(document))
    (function,) = (function for function in FUNCTIONS if function.name == "transfer_blocks")
    found = []
    for task in scene_of(document, module, "cuda", tokens, 0).tasks(tokens, SETS):
        positional, options = function.arguments(task)
        options |= {} if programs is None else {"programs": programs}
        found.append(lambda given=positional, named=options: module.transfer_blocks(*given, **named))
    return found


def slowdown(calls: Sequence[Callable[[], object]], product: Callable[[], object]) -> float:
    """How many times as long products take while the calls run beside them."""
    alone = CudaClock().device_time(calls) * len(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    beside, own = torch.cuda.Stream(), torch.cuda.Stream()

    def products() -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(own):
            start.record()
            for _ in range(ROUNDS):
                product()
            stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3

    products()
    torch.cuda.synchronize()
    quiet = median(products() for _ in range(REPEATS))
    busy = []
    for _ in range(REPEATS):
        with torch.cuda.stream(beside):
            for _ in range(min(max(2, int(4 * quiet / alone)), 4000)):
                graph.replay()
        busy.append(products())
        torch.cuda.synchronize()
    return median(busy) / quiet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("transfers", nargs="*", default=TRANSFERS)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--programs", nargs="+", type=int, default=[8, 32])
    args = parser.parse_args()
    left, right = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    for name in args.transfers:
        for programs in (None, *args.programs):
            factor = slowdown(calls_of(name, args.tokens, programs), lambda: torch.mm(left, right, out=out))
            print(f"{name:26} {f'{programs} programs' if programs else 'as it is':12} ×{factor:.2f}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
