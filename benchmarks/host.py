"""Times what a call of a generated ``append`` costs its caller in Python, on a machine without a GPU.

    python benchmarks/host.py [LAYOUT ...] [--tokens 32] [--rounds 200]

Everything runs as it does on a GPU but for the last step: tensors lie on the CPU, kernels are compiled for sm_90, and
in the place of the compiled launcher, which starts them, stands a function in C that does nothing. Rounds of all rows
take turns, and medians are printed:

* kept: one call after the other with tensors of one kind, as in a decode step over layers;
* alternating: two kinds of tensors take turns, each of which is looked up;
* checked: all checks, and Triton's own launch, as in a first call;
* ``slots.add_(0)``: what the cheapest operation of torch costs here, on the CPU's own tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from kvgen import runtime
from kvgen.bench.functions import FUNCTIONS
from kvgen.bench.task import Scene
from kvgen.emit import render_layout
from kvgen.resolve import load

ROOT = Path(__file__).resolve().parent.parent
LAYOUTS = ("paged_nhd", "cross_layer_nhd", "nhd_fp8_tensor", "mla")
CALLS = 200
DEVICE = -1  # the index of a tensor on the CPU

nothing = functools.partial(sys.audit, "launch")
"""Takes any arguments and returns None, and is written in C as the launcher is."""


class CudaLauncher(nvidia.CudaLauncher):
    """Triton's, but for what it starts. It has the same name, by which generated modules know it."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.global_scratch_size = self.profile_scratch_size = 0
        self.global_scratch_align = self.profile_scratch_align = 1
        self.num_ctas, self.gsan_enabled = 1, False
        self.launch_cooperative_grid = self.launch_pdl = False
        self.arg_annotations, self.kernel_signature = [], b""
        if "arg_annotations" not in nvidia.CudaLauncher.__init__.__code__.co_names:  # before Triton 3.7
            del self.arg_annotations, self.kernel_signature
        self.launch = nothing


def pretend() -> None:
    """Make Triton take this machine for one with a GPU of sm_90, whose only device has the index of the CPU."""
    utils = SimpleNamespace(
        load_binary=lambda *args: (1, 2, 32, 0, 1024),
        unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 1 << 18},
        launch=nothing,
    )
    device = functools.partial(int, DEVICE)
    torch._C._cuda_getDevice = device
    active = SimpleNamespace(
        get_current_device=device,
        get_current_stream=abs,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=CudaLauncher,
        utils=utils,
    )
    triton.runtime.driver.set_active(active)


def calls_of(name: str, tokens: int) -> dict[str, Callable[[], Any]]:
    """What is timed of a layout, ready to be called."""
    layout = load(ROOT / "layouts" / f"{name}.yaml")
    module = runtime.import_module(name, render_layout(layout))
    stay = contextlib.nullcontext()
    module._on = lambda device: stay
    scene = Scene(layout, "cpu", 2 * tokens)
    scene.scales = {name: scale.clone() for name, scale in scene.scales.items()}  # where allocators put tensors
    (append,) = (function for function in FUNCTIONS if function.name == "append")
    one, other = (append.arguments(scene.tasks(count, 1)[0]) for count in (tokens, 2 * tokens))

    def kept() -> None:
        module.append(*one[0], **one[1])

    def alternating() -> None:
        module.append(*one[0], **one[1])
        module.append(*other[0], **other[1])

    def checked() -> None:
        module._append_checked(*one[0], **one[1])

    for call in (alternating, checked, kept):
        call()
    return {"kept": kept, "alternating": alternating, "checked": checked}


def measure(rows: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Microseconds of a call of each, the median of all rounds."""
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, call in rows.items():
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - begin) * 1e6 / CALLS)
    return {name: median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    pretend()
    slots = torch.zeros(args.tokens, dtype=torch.int64)
    rows = {"add": lambda: slots.add_(0)}
    for name in args.layouts:
        rows |= {f"{name} {what}": call for what, call in calls_of(name, args.tokens).items()}
    found = measure(rows, args.rounds)
    print(f"torch {torch.__version__}, triton {triton.__version__}, µs without the launcher\n")
    print("| append | kept | alternating | checked |\n|---|---|---|---|")
    for name in args.layouts:
        kept, both, checked = (found[f"{name} {what}"] for what in ("kept", "alternating", "checked"))
        print(f"| {name} | {kept:.2f} | {both / 2:.2f} | {checked:.1f} |")
    print(f"| `slots.add_(0)` | {found['add']:.2f} | | |")


if __name__ == "__main__":
    main()
