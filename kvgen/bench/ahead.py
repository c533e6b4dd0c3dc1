"""Kernels compiled before they are timed, several at once, in processes of their own.

Triton keeps what it compiles on disk, by source and by what is known of the arguments. Here the functions are called on
tensors without memory, and nothing is launched: what the calls that are timed look for is there by then. Whatever goes
wrong is left to them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvgen.documents import Document

PROCESSES = 16
NOWHERE = "meta"
"""The device of tensors without memory."""

Target = tuple[str, int | str, int]
"""Backend, architecture and threads of a warp, as Triton has them."""


@dataclass(frozen=True, slots=True)
class Job:
    """A module's text, and its functions by how many tokens they are called with."""

    document: Document
    text: str
    functions: Mapping[int, tuple[str, ...] | None]
    pool_tokens: int
    programs: tuple[int, ...] = ()


@contextlib.contextmanager
def compiling(jobs: Sequence[Job], device: str) -> Iterator[None]:
    """Compile beside what is done in this context, which ends when all is compiled. Nothing to do off a GPU."""
    processes = min(PROCESSES, len(jobs), (os.cpu_count() or 1) - 1)
    if device != "cuda" or processes < 2:
        yield
        return
    import triton

    target = triton.runtime.driver.active.get_current_target()
    given = (target.backend, target.arch, target.warp_size)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_compile_all, jobs, processes, given)
        yield


def _compile_all(jobs: Sequence[Job], processes: int, target: Target) -> None:
    # Processes start from one that has imported everything once, and never saw the GPU.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvgen.bench.rivals", "triton"])
    with ProcessPoolExecutor(processes, context, _prepare, (target,)) as pool:
        for job in jobs:
            pool.submit(compile_job, job)


class _NoDriver:
    """What Triton asks of a GPU before it compiles for it."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*self.target)


def _prepare(target: Target) -> None:
    """Make this process compile for a GPU that it does not use: launches end where they would begin."""
    import torch
    import triton

    torch.set_num_threads(1)
    triton.runtime.driver.set_active(_NoDriver(target))
    run = triton.JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **options: Any) -> None:
        run(self, *args, warmup=True, **options)

    triton.JITFunction.run = compile_only


def compile_job(job: Job) -> None:
    """Compile what the calls of a job would launch."""
    import triton

    from kvgen import runtime
    from kvgen.bench.functions import functions_of, scene_of
    from kvgen.bench.rivals import capped

    module = runtime.import_module(job.document.name, job.text)
    target = triton.runtime.driver.active.get_current_target()
    stand_ins = {
        "_on": lambda device: contextlib.nullcontext(),
        "_native": lambda device: target.backend == "cuda" and target.arch >= 90,
    }
    for name in stand_ins.keys() & vars(module).keys():
        setattr(module, name, stand_ins[name])
    scene = scene_of(job.document, module, NOWHERE, max(job.functions), job.pool_tokens)
    for tokens, names in job.functions.items():
        task = scene.tasks(tokens, 1)[0]
        for function in functions_of(job.document, module, names):
            with contextlib.suppress(Exception):
                function.call(module, task.of(function.name))()
            for programs in job.programs:
                with contextlib.suppress(Exception):
                    capped(module, programs).adapter(task.of(function.name))()
