"""Running generated modules: on a GPU, or on the CPU through Triton's interpreter."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from types import ModuleType

from kvgen.diagnostics import Diagnostic, KvgenError

INSTALL_HINT = "install torch and triton: they are in the extra `run`"


def choose_device(wanted: str | None = None, hint: str = "--device cpu runs the interpreter") -> str:
    """``cuda`` or ``cpu``: the one asked for, else a GPU if there is one. ``hint`` is for who has none.

    Triton decides at import whether it compiles or interprets, so this comes before a generated module is imported.
    """
    try:
        import torch
    except ImportError as error:
        raise KvgenError(Diagnostic("KV712", f"generated modules cannot run: {error}", hint=INSTALL_HINT)) from None
    device = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise KvgenError(Diagnostic("KV713", "torch finds no CUDA device", hint=hint))
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    return device


def import_module(name: str, text: str) -> ModuleType:
    """Import the text of a generated module, from a file that lasts until exit: Triton reads kernels from it."""
    folder = Path(tempfile.mkdtemp(prefix="kvgen-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton"):
            raise
        raise KvgenError(Diagnostic("KV712", f"generated modules cannot run: {error}", hint=INSTALL_HINT)) from None
    return module
