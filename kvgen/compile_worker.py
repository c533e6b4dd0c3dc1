"""A process that compiles kernels: ``python -m kvgen.compile_worker WORK.json DONE.json``.

With a target in the place of the files it compiles next to nothing for that GPU, and fails if it is not known.

It is a process of its own because Triton decides at import whether it compiles or interprets, and because the commands
that need no GPU stay free of torch.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvgen.assembly import cubin_resources, gcn_accesses, gcn_resources, ptx_accesses, uses_stack


@triton.jit
def _probe(pointer):
    tl.store(pointer, tl.sum(tl.load(pointer + tl.arange(0, 128)), 0))


def probe(target: str) -> None:
    """Compile a kernel with a sum across threads, which differs most from one GPU to the next."""
    triton.compile(ASTSource(fn=_probe, signature={"pointer": "*fp32"}), target=gpu_target(target))


def main(request: str, answer: str) -> None:
    work = json.loads(Path(request).read_text(encoding="utf-8"))
    modules: dict[str, ModuleType] = {}
    results = []
    gc.freeze()  # else what was imported is looked through again and again
    for job in work["jobs"]:
        name = job["module"]
        if name not in modules:
            modules[name] = _load(Path(work["folder"]) / f"{name}.py")
        results.append({target: _attempt(modules[name], job, target) for target in job["targets"]})
    done = {"triton": triton.__version__, "results": results}
    Path(answer).write_text(json.dumps(done), encoding="utf-8")


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _attempt(module: ModuleType, job: dict[str, Any], target: str) -> dict[str, Any]:
    try:
        return _compile(getattr(module, job["name"]), job, target)
    except (
        Exception
    ) as error:  # whatever a compiler may raise is a finding about this kernel, not the end of the report
        text = str(error).strip()
        return {"error": f"{type(error).__name__}: {text.splitlines()[-1] if text else 'no message'}"}


def _compile(function: Any, job: dict[str, Any], target: str) -> dict[str, Any]:
    native = target.startswith("sm_") and int(target.removeprefix("sm_")) >= 90
    constexprs = {name: native if value == "by target" else value for name, value in job["constexprs"].items()}
    constexprs = {name: tl.bfloat16 if value == "tl.bfloat16" else value for name, value in constexprs.items()}
    if not target.startswith("sm_") and "STAGES" in constexprs:  # as launchers have it
        constexprs["STAGES"] = min(constexprs["STAGES"], 1)
    signature = {name: job["signature"].get(name, "constexpr") for name in function.arg_names}
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in job["divisible"]}
    source = ASTSource(fn=function, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": job["num_warps"], "enable_fp_fusion": False}
    if job["registers"] and native:
        options["maxnreg"] = job["registers"]
    compiled = triton.compile(source, target=gpu_target(target), options=options)
    if target.startswith("sm_"):
        loads, stores = ptx_accesses(compiled.asm["ptx"])
        registers, spills = cubin_resources(_cuobjdump(compiled.asm["cubin"], "--dump-resource-usage"))
        if spills and not uses_stack(_cuobjdump(compiled.asm["cubin"], "-sass")):
            spills = 0
    else:
        loads, stores = gcn_accesses(compiled.asm["amdgcn"])
        registers, spills = gcn_resources(compiled.asm["amdgcn"])
    if not stores:
        raise ValueError("no store to global memory was found in the assembly")
    return {
        "loads": loads,
        "stores": stores,
        "spills": spills,
        "registers": registers,
        "shared": compiled.metadata.shared,
    }


def gpu_target(name: str) -> GPUTarget:
    """``sm_90`` or ``gfx942`` as Triton names it; AMD's data-centre GPUs (gfx9) run 64 threads in a wave, others 32."""
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)


def _cuobjdump(cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    (probe if len(sys.argv) == 2 else main)(*sys.argv[1:])
