"""What a compiler needs of generated kernels, so that they can be compiled without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvgen.emit.args import Arg
from kvgen.emit.kernel import Kernel, build_kernel, slot_of_extra
from kvgen.emit.names import TRITON_TYPES
from kvgen.emit.pages import PAGE_TABLE_TYPES, PageFunction, build_page_functions, build_page_table, compact_numbers
from kvgen.emit.transfer import build_transfer_kernel
from kvgen.emit.transfer_sections import TransferKernel
from kvgen.functions import chosen, chosen_plans
from kvgen.layout import Layout
from kvgen.lower_pages import page_plans
from kvgen.lower_transfer import lower_transfer
from kvgen.transfer import Transfer

BY_TARGET = "by target"
"""The value of a constexpr that depends on the target: whether it casts to 8-bit floats as the integer recipe does."""

DYNAMIC_TILE = 8
"""The side that a tile of an extent known at launch is compiled with."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel of a generated module in one form of its call, on tensors with the smallest strides.

    ``name`` is the module's, ``form`` says what is unlike the plain call (empty for that one). ``signature`` maps
    run-time arguments to Triton types, ``constexprs`` the others to their values; ``divisible`` names arguments that
    are multiples of 16; ``registers`` bounds those of a thread on targets that cast natively (0: nothing does).
    """

    name: str
    form: str
    signature: dict[str, str]
    constexprs: dict[str, object]
    divisible: tuple[str, ...]
    num_warps: int
    registers: int = 0

    @property
    def label(self) -> str:
        return f"{self.name}: {self.form}" if self.form else self.name


def kernels(layout: Layout | Transfer) -> list[KernelSpec]:
    """Every kernel of a module, in every form that is compiled differently."""
    if isinstance(layout, Transfer):
        plans = [plan for plan in lower_transfer(layout) if plan.name in chosen(layout)]
        return [spec for plan in plans for spec in _transfer_forms(build_transfer_kernel(layout, plan))]
    found = [spec for of, plan in chosen_plans(layout) for spec in _forms(build_kernel(of, plan))]
    others = [*_pages(layout), *(_concat() if layout.mla else ()), *_addressing(layout)]
    launched = {f"_{name}_kernel" for name in chosen(layout)}
    return [*found, *(spec for spec in others if spec.name in launched)]


def _pages(layout: Layout) -> Iterator[KernelSpec]:
    for function, plan in zip(build_page_functions(layout), page_plans(layout), strict=True):
        numbers = [number for stretch in plan.stretches for number in compact_numbers(layout, stretch)]
        yield _page_spec(layout, function, numbers)
    table = PAGE_TABLE_TYPES | dict.fromkeys(build_page_table(layout).names, "i32")
    yield KernelSpec("_gather_page_table_kernel", "", table, {}, _pointers(table), 4)


def _page_spec(layout: Layout, function: PageFunction, numbers: list[int]) -> KernelSpec:
    """Integers that are 1 are constants to Triton, where it is not told otherwise."""
    signature = {f"{b.name}_ptr": f"*{TRITON_TYPES.get(b.dtypes[0], 'u8')}" for b in layout.buffers}
    signature |= {f"{function.blocks}_ptr": "*i64"}
    signature |= {name: "i32" for name in function.arguments if name not in signature}
    given = dict(zip((name for part in function.parts for name in part.numbers), numbers, strict=True))
    fixed = {name for part in function.parts for name in part.constants}
    fixed |= {size for part in function.parts for size, _ in part.inner if given[size] == 1}
    signature |= {name: "constexpr" if name in fixed else "i32" for name in given}
    constexprs = {name: value for name, value in given.items() if name in fixed}
    return KernelSpec(function.kernel, "", signature, constexprs, _pointers(signature), function.num_warps)


def _pointers(signature: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name, kind in signature.items() if kind.startswith("*"))


def _forms(kernel: Kernel) -> Iterator[KernelSpec]:
    sched, counted = kernel.schedule, any(arg.role == "tokens" for arg in kernel.args)
    tokens, num_warps = sched.tokens, sched.num_warps
    yield _spec(kernel, "", tokens, num_warps)
    if counted:
        yield _spec(kernel, "few tokens", sched.few_tokens, sched.few_warps)
    if sched.few_warps != num_warps and (sched.some > sched.few or not counted):
        yield _spec(kernel, "few warps", tokens, sched.few_warps)
    if sched.many_query_heads != sched.query_heads:
        yield _spec(kernel, "few query heads", tokens, sched.few_warps)
    for arg in kernel.args:
        if arg.role == "flag":
            yield _spec(kernel, arg.value, tokens, num_warps, {arg.value: True})
        if arg.role == "optional":
            yield _spec(kernel, arg.value, tokens, num_warps, {"optional": arg.type})


def _transfer_forms(kernel: TransferKernel) -> Iterator[KernelSpec]:
    """With as many programs as there is work for, and capped."""
    plain, capped = kernel.schedule.plain, kernel.schedule.capped
    yield _spec(kernel, "", plain.tokens, plain.num_warps, {"head_tile": plain.heads})
    for arg in kernel.args:
        if arg.role == "flag":
            yield _spec(kernel, "few tokens", plain.tokens, plain.num_warps, {"head_tile": plain.heads, "flag": True})
    given = {"stages": capped.stages, "head_tile": capped.heads}
    yield _spec(kernel, "capped", capped.tokens, capped.num_warps, given)


def _spec(
    kernel: Kernel | TransferKernel, form: str, tokens: int, num_warps: int, chosen: Mapping[str, object] | None = None
) -> KernelSpec:
    plain = {
        "tile": DYNAMIC_TILE,
        "tokens": tokens,
        "flag": False,
        "native": BY_TARGET,
        "heads": DYNAMIC_TILE,
        "aligned": True,
        "dtype": "tl.bfloat16",
        "stages": 0,
        "many": not form.startswith("few"),
    }
    values = plain | {"optional": None} | (chosen or {})
    signature: dict[str, str] = {}
    constexprs: dict[str, object] = {}
    divisible = []
    for arg in kernel.args:
        given = arg.role == "optional" and values["optional"] is not None
        if (arg.role in values or arg.compiled is not None) and not given:
            signature[arg.name] = "constexpr"
            compiled = arg.few if arg.few and form.startswith("few") else arg.compiled
            constexprs[arg.name] = compiled or values.get(arg.value, values.get(arg.role))
            continue
        signature[arg.name] = arg.type
        if given or _divisible(arg):
            divisible.append(arg.name)
    registers = 0
    if isinstance(kernel, Kernel):
        registers = kernel.schedule.few_registers if form.startswith("few") else kernel.schedule.registers
    elif form == "capped":
        registers = kernel.schedule.capped.registers
    return KernelSpec(kernel.name, form, signature, constexprs, tuple(divisible), num_warps, registers)


def _divisible(arg: Arg) -> bool:
    return arg.role == "pointer" or (arg.role == "stride" and arg.divisible)


def _concat() -> Iterator[KernelSpec]:
    """Keys of 128 and 64 dims, as they come and as codes."""
    strides = (
        "k_nope_stride_token",
        "k_nope_stride_head",
        "k_rope_stride_token",
        "out_stride_token",
        "out_stride_head",
    )
    sizes = {"NOPE_DIM": 128, "ROPE_DIM": 64, "NOPE_SIDE": 128, "ROPE_SIDE": 64, "HEADS": 16, "NATIVE": BY_TARGET}
    for form, out in {"": "*bf16", "float8_e4m3fn": "*u8"}.items():
        pointers = {"k_nope_ptr": "*bf16", "k_rope_ptr": "*bf16", "out_ptr": out}
        signature = pointers | dict.fromkeys(strides, "i32") | {"num_heads": "i32"} | dict.fromkeys(sizes, "constexpr")
        yield KernelSpec("_concat_mla_key_kernel", form, signature, sizes, (*pointers, *strides), 4)


def _addressing(layout: Layout) -> Iterator[KernelSpec]:
    extra = {name: "i32" for name in slot_of_extra(layout).split(", ") if name}
    out = {"out_ptr": f"*i{layout.slots.dtype.removeprefix('int')}"}
    table = {"block_table_ptr": "*i32", "block_table_stride": "i32", "num_columns": "i32", "num_rows": "i32"}
    counts = dict.fromkeys(("num_out", "num_tokens", "num_requests"), "i32")
    pointers = ("positions_ptr", "context_lens_ptr", "query_start_loc_ptr", "request_ids_ptr")
    forms = {
        "": ("positions_ptr",),
        "query_start_loc": ("positions_ptr", "query_start_loc_ptr"),
        "request_ids": ("positions_ptr", "request_ids_ptr"),
        "context_lens": ("context_lens_ptr",),
        "context_lens, query_start_loc": ("context_lens_ptr", "query_start_loc_ptr"),
    }
    for form, given in forms.items():
        given_types = {name: "*i64" if name in given else "constexpr" for name in pointers}
        signature = out | table | given_types | counts | extra
        absent = dict.fromkeys((name for name in pointers if name not in given), None)
        yield KernelSpec("_slot_mapping_kernel", form, signature, absent, _pointers(signature), 4)
    row = {"block_table_row_ptr": "*i32", "num_columns": "i32", "start_pos": "i32", "count": "i32", "num_out": "i32"}
    yield KernelSpec("_fill_slots_kernel", "", out | row | extra, {}, ("out_ptr", "block_table_row_ptr"), 4)
