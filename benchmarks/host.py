"""Times what a call of a generated ``append`` costs its caller, on a machine without a GPU.

    python benchmarks/host.py [LAYOUT ...] [--tokens 32] [--rounds 1000] [--json FILE]

Everything runs as it does on a GPU but for the last step: tensors lie on the CPU, kernels are compiled for sm_90, and
in the place of CUDA's library stands one whose launch does nothing. Rounds of all rows take turns, and medians are
printed:

* NAME: one call after the other with tensors of one kind, as in a decode step over layers;
* NAME, two kinds of tensors taking turns: each is looked up;
* NAME, all checks: those and Triton's own launch, as in a first call, less its launcher in C;
* ``slots.add_(0)`` on the CPU: what the cheapest operation of torch costs here.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import json
import shutil
import subprocess
import tempfile
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
LAYOUTS = ("paged_nhd", "cross_layer_nhd", "nhd_fp8_tensor", "nhd_nvfp4", "mla")
CALLS, WARM = 40, 20
"""Calls of a round, few enough that most rounds are not interrupted on a busy machine, and those before them."""

DEVICE = -1  # the index of a tensor on the CPU

CUDA = """

int cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra) { return 0; }
int cuCtxGetDevice(int *device) { *device = -1; return 0; }
int stream(int type, int device, void **stream) { *stream = 0; return 0; }
"""

CAPSULE = b"dlpack_exchange_api"


class CudaLauncher(nvidia.CudaLauncher):
    """Triton's, but for what it starts. It has the same name, by which generated modules know it."""

    def __init__(self, src: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        pass


def pretend() -> None:
    """Make this machine one with a GPU of sm_90, whose only device has the index of the CPU, for Triton and modules."""
    folder = Path(tempfile.mkdtemp())
    (folder / "cuda.c").write_text(CUDA)
    library = folder / "libcuda.so.1"
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-O2",
        f"-Wl,-soname,{library.name}",
        str(folder / "cuda.c"),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True)
    cuda = ctypes.CDLL(str(library))  # which whoever asks for that name is given from now on
    shutil.rmtree(folder)
    exchange_with(ctypes.cast(cuda.stream, ctypes.c_void_p).value)
    utils = SimpleNamespace(
        load_binary=lambda *args: (1, 2, 32, 0, 1024),
        unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 1 << 18},
    )
    active = SimpleNamespace(
        get_current_device=functools.partial(int, DEVICE),
        get_current_stream=abs,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=CudaLauncher,
        utils=utils,
    )
    triton.runtime.driver.set_active(active)


def exchange_with(stream: int) -> None:
    """Tensors are read as PyTorch lets them be read through DLPack, and streams by the function at this address."""
    get, new = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    words = (ctypes.c_void_p * 7).from_address(get(torch.Tensor.__dlpack_c_exchange_api__, CAPSULE))
    exchange_with.words = (ctypes.c_void_p * 7)(*words[:6], stream)  # as long as this module lives
    torch.Tensor.__dlpack_c_exchange_api__ = new(ctypes.addressof(exchange_with.words), CAPSULE, None)


def calls_of(name: str, tokens: int) -> dict[str, Callable[[], Any]]:
    """What is timed of a layout, ready to be called."""
    layout = load(ROOT / "layouts" / f"{name}.yaml")
    module, forgetful = (runtime.import_module(name, render_layout(layout)) for _ in range(2))
    stay = contextlib.nullcontext()
    module._on = forgetful._on = lambda device: stay
    forgetful._append_kept = SimpleNamespace(start=lambda *args, **given: False, keep=lambda *args, **given: None)
    scene = Scene(layout, "cpu", 2 * tokens)
    scene.scales = {name: scale.clone() for name, scale in scene.scales.items()}  # where allocators put tensors
    (append,) = (function for function in FUNCTIONS if function.name == "append")
    one, other = (append.arguments(scene.tasks(count, 1)[0]) for count in (tokens, 2 * tokens))
    first, second = one[0], other[0]
    options = one[1]

    def kept() -> None:
        module.append(*first, **options)

    def alternating() -> None:
        module.append(*first, **options)
        module.append(*second, **options)

    def checked() -> None:
        forgetful.append(*first, **options)

    for call in (alternating, checked, kept):
        call()
    assert module._append_kept.known, f"no launch of {name} is kept here"
    return {name: kept, f"{name}, two kinds of tensors taking turns": alternating, f"{name}, all checks": checked}


def measure(rows: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Microseconds of a call of each, the median of all rounds. Two kinds in turns are two calls."""
    times: dict[str, list[float]] = {name: [] for name in rows}
    gc.disable()  # as timeit does
    for _ in range(rounds):
        for name, call in rows.items():
            for _ in range(WARM):
                call()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - begin) * 1e6 / CALLS)
    return {name: median(found) / (2 if name.endswith("taking turns") else 1) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="write the results there, for tools/make_benchmarks.py")
    args = parser.parse_args()
    pretend()
    rows: dict[str, Callable[[], Any]] = {}
    for name in args.layouts:
        rows |= calls_of(name, args.tokens)
    slots = torch.zeros(args.tokens, dtype=torch.int64)
    rows["`slots.add_(0)` on the CPU"] = lambda: slots.add_(0)
    found = measure(rows, args.rounds)
    print(f"torch {torch.__version__}, triton {triton.__version__}, {args.tokens} tokens, µs without CUDA's launch")
    for name, time_of in found.items():
        print(f"{time_of:8.2f}  {name}")
    if args.json:
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        args.json.write_text(json.dumps(versions | {"tokens": args.tokens, "times": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
