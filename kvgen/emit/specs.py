"""What a compiler needs of a generated kernel, so that it can be compiled without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.emit.kernel import build_kernel
from kvgen.layout import Layout
from kvgen.lower import lower

DYNAMIC_TILE = 8
"""The side that a tile of an extent known at launch is compiled with."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel of a generated module as it is launched on tensors with the smallest strides.

    ``signature`` maps run-time arguments to Triton types, ``constexprs`` the others to their values; ``divisible``
    names arguments that are multiples of 16.
    """

    name: str
    signature: dict[str, str]
    constexprs: dict[str, object]
    divisible: tuple[str, ...]
    num_warps: int


def kernels(layout: Layout) -> list[KernelSpec]:
    """Every kernel of the layout's module that moves values."""
    return [_spec(layout, plan) for plan in lower(layout)]


def _spec(layout: Layout, plan) -> KernelSpec:
    kernel = build_kernel(layout, plan)
    signature, constexprs, divisible = {}, {}, []
    values = {
        "tile": DYNAMIC_TILE,
        "tokens": kernel.schedule.tokens,
        "flag": False,
        "unit": kernel.stride_unit,
        "optional": None,
    }
    for arg in kernel.args:
        if arg.role in ("tile", "tokens", "flag", "unit", "optional"):
            signature[arg.name] = "constexpr"
            constexprs[arg.name] = values[arg.role]
            continue
        signature[arg.name] = arg.type
        if arg.role == "pointer" or (arg.role == "stride" and arg.divisible):
            divisible.append(arg.name)
    return KernelSpec(kernel.name, signature, constexprs, tuple(divisible), kernel.schedule.num_warps)
