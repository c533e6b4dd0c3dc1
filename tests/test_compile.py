"""Kernels compiled without a GPU: reading assembly, the committed table, and every generated kernel against it."""

import ast
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kvgen import assembly, compile_report
from kvgen.compile_report import TARGETS, Failure, Figures
from kvgen.diagnostics import KvgenError
from tests.command import searching

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).parent / "compile_table.json"

MODULE = """
import triton
import triton.language as tl

SCALE = 2

@triton.jit
def _twice(x):
    # a comment
    return x * SCALE

@triton.jit
def _copy_kernel(source_ptr, destination_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(destination_ptr + offsets, tl.load(source_ptr + offsets))

@triton.jit
def _broken_kernel(source_ptr, destination_ptr, BLOCK: tl.constexpr):
    tl.store(destination_ptr + tl.arange(0, 3), 0)
"""


@dataclass(frozen=True)
class Spec:
    name: str = "_copy_kernel"
    signature: dict = field(default_factory=lambda: {"source_ptr": "*bf16", "destination_ptr": "*bf16"})
    constexprs: dict = field(default_factory=lambda: {"BLOCK": 1024})
    divisible: tuple = ("source_ptr", "destination_ptr")
    num_warps: int = 4
    registers: int = 0
    form: str = ""

    @property
    def label(self) -> str:
        return self.name


def test_widths_in_ptx():
    text = """
        ld.param.b64 %rd1, [copy_param_0];
        @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        @!%p2 ld.global.L1::evict_last.v2.b64 { %rd5, %rd6 }, [ %rd1 + 16 ];
        ld.global.b64 { %rd3 }, [ %rd2 + 0 ];
        ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r9];
        cp.async.cg.shared.global [ %r9 + 0 ], [ %rd1 + 0 ], 0x10, %r5;
        st.global.v2.b32 [ %rd2 + 0 ], { %r1, %r2 };
        st.volatile.global.u8 [ %rd2 + 0 ], %rs1;
        @%p1 st.global.b16 [ %rd2 + 0 ], { %rs1 };
        st.shared.b16 [%r9], %rs1;
    """
    assert assembly.ptx_accesses(text) == ({"16": 3, "8": 1}, {"8": 1, "2": 1, "1": 1})


def test_widths_in_gcn():
    text = """
        s_load_dwordx4 s[0:3], s[4:5], 0x0
        global_load_dwordx4 v[0:3], v[2:3], off
        global_load_ushort v6, v[2:3], off
        global_load_short_d16_hi v6, v[2:3], off
        buffer_load_dwordx2 v[0:1], v2, s[4:7], 0 offen
        flat_load_dword v0, v[2:3]
        global_load_b128 v[0:3], v[2:3], off
        ds_read_b128 v[0:3], v4
        global_store_byte v[0:1], v6, off
        global_store_dwordx3 v[0:1], v[2:4], off
    """
    assert assembly.gcn_accesses(text) == ({"16": 2, "8": 1, "4": 1, "2": 2}, {"12": 1, "1": 1})


def test_resources():
    dump = "Function copy:\n  REG:24 STACK:8 SHARED:0 LOCAL:16 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0\n"
    assert assembly.cubin_resources(dump) == (24, 24)
    assert assembly.uses_stack("  STL.64 [R1], R4 ;\n")
    assert not assembly.uses_stack("  STG.E [R2.64], R4 ;\n")
    metadata = "    .private_segment_fixed_size: 12\n    .vgpr_count:     40\n    .vgpr_spill_count: 5\n"
    assert assembly.gcn_resources(metadata) == (40, 20)
    with pytest.raises(ValueError, match="no resources"):
        assembly.cubin_resources("nothing")


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_a_kernel_compiles_for_both_makers(monkeypatch, interpret):
    """Whatever the environment says of the interpreter, and once for two layouts that share the kernel."""
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", interpret)
    _, report = compile_report.compile_all(
        {"a": MODULE, "b": MODULE}, {"a": [Spec()], "b": [Spec()]}, ["sm_90", "gfx942"]
    )
    assert report["a"] == report["b"]
    nvidia, amd = report["a"]["_copy_kernel"].values()
    assert (nvidia.loads, nvidia.stores, nvidia.spills) == ({"16": 1}, {"16": 1}, 0)
    assert (amd.loads, amd.stores, amd.spills) == ({"8": 1}, {"8": 1}, 0)  # 256 threads share 1024 values
    assert nvidia.registers > 0
    assert amd.registers > 0
    assert compile_report.problems(report) == []


def test_alignment_shows_in_the_widths():
    _, report = compile_report.compile_all({"a": MODULE}, {"a": [Spec(divisible=())]}, ["sm_90"])
    assert report["a"]["_copy_kernel"]["sm_90"].stores == {"2": 8}


def test_a_kernel_that_does_not_compile_is_a_finding():
    _, report = compile_report.compile_all({"a": MODULE}, {"a": [Spec("_broken_kernel")]}, ["sm_90"])
    (problem,) = compile_report.problems(report)
    assert problem.code == "KV721"
    assert problem.message.startswith("a _broken_kernel sm_90: ")


@pytest.mark.parametrize("targets", [["sm_999"], ["gfx9ff", "sm_90", "sm_999"]])
def test_a_gpu_that_nobody_knows(targets):
    with pytest.raises(KvgenError) as caught:
        compile_report.compile_all({"a": MODULE}, {"a": [Spec()]}, targets)
    assert [(d.code, d.message) for d in caught.value.diagnostics] == [
        ("KV713", f"the compilers of Triton know no GPU {target}") for target in targets if target != "sm_90"
    ]


def test_other_gpus_that_are_known():
    _, report = compile_report.compile_all({"a": MODULE}, {"a": [Spec()]}, ["sm_121"])
    assert report["a"]["_copy_kernel"]["sm_121"].stores == {"16": 1}


def test_what_few_tokens_change_is_compiled_too():
    from kvgen.emit import kernels
    from kvgen.resolve import load

    def forms(name, kernel="_append_kernel"):
        return [
            (s.form, s.constexprs.get("TOKENS"), s.num_warps)
            for s in kernels(load(ROOT / "layouts" / f"{name}.yaml"))
            if s.name == kernel
        ]

    assert forms("paged_nhd") == [("", None, 2)]
    assert forms("paged_x_vector") == [("", 16, 2), ("few tokens", 1, 1)]
    assert forms("nhd_fp8_token_head") == [("", None, 2), ("few warps", None, 4)]
    assert forms("mla_fp8_record") == [("", 4, 2), ("few tokens", 1, 2)]
    assert [form for form, _, _ in forms("paged_x_vector_fp8")] == ["", "few tokens"]


def test_arguments_are_compiled_for_what_launches_make_of_them():
    """Types, divisors, and what is constant: strides of 1, of a scale for each head, of bits, of whole vectors."""
    names = ("paged_nhd", "nhd_fp8_head", "paged_x_vector", "nhd_int4_planes", "cross_layer_nhd", "nhd_fused_mrope")
    found = subprocess.run(
        [sys.executable, "-m", "tests.launched", *names],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | searching(ROOT),
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == [f"{name}: {6 if 'fused' in name else 5} launches" for name in names]


def test_slot_minor_values_are_moved_in_whole_vectors():
    from kvgen.documents import load_text
    from kvgen.emit import kernels, render_layout

    texts, specs = {}, {}
    for name, sides in {"there": ("paged_nhd", "paged_x_vector"), "back": ("paged_x_vector", "paged_nhd")}.items():
        text = "name: {}\ntransfer:\n  from: {}\n  to: {}\n".format(name, *sides)
        what = load_text(text, str(ROOT / "layouts" / "transfers" / f"{name}.yaml"))
        texts[name] = render_layout(what)
        specs[name] = [spec for spec in kernels(what) if spec.label == "_transfer_blocks_kernel"]
    _, report = compile_report.compile_all(texts, specs, ["sm_90"])
    there, back = (report[name]["_transfer_blocks_kernel"]["sm_90"] for name in texts)
    values = 2 * 16 * 128 // 8 // 128  # vectors of a thread: 2 heads, 16 tokens, 128 threads
    assert there.stores == {"16": 2 * values, "2": 8 * values}  # keys and values, and values of a part of a tile
    assert back.loads == {"16": 2 * values, "8": 2}  # and numbers of blocks; of a part of a tile all is read


def test_equal_kernels_are_told_by_code_not_by_comments():
    plain, commented = (
        compile_report._sources(MODULE),
        compile_report._sources(MODULE.replace("# a comment", "# another")),
    )
    assert plain == commented
    assert "SCALE = 2" in plain["_twice"]
    changed = compile_report._sources(MODULE.replace("SCALE = 2", "SCALE = 3"))
    assert changed["_twice"] != plain["_twice"]
    assert changed["_copy_kernel"] == plain["_copy_kernel"]


GOOD = Figures({"16": 2, "8": 1}, {"16": 2}, 0, 24, 0)


def report(figures, kernel="_append_kernel", layout="a", target="sm_90"):
    return {layout: {kernel: {target: figures}}}


def messages(actual, table=None, version="1", whole=True):
    found = compile_report.differences(actual, version, table or report(GOOD), "1", whole=whole)
    assert {d.code for d in found} <= {"KV723"}
    return [d.message for d in found]


def test_the_same_figures_are_no_difference():
    assert messages(report(GOOD)) == []


def test_with_the_tables_triton_every_figure_counts():
    where = "a _append_kernel sm_90"
    assert messages(report(replace(GOOD, registers=26))) == [f"{where}: registers 26, the table says 24"]
    assert messages(report(replace(GOOD, shared=512))) == [f"{where}: shared 512, the table says 0"]
    assert messages(report(replace(GOOD, stores={"8": 4}))) == [f"{where}: stores 8 B x4, the table says 16 B x2"]
    assert messages(report(replace(GOOD, loads={"16": 3, "8": 1}))) == [
        f"{where}: loads 16 B x3, 8 B x1, the table says 16 B x2, 8 B x1"
    ]


def test_with_another_triton_only_the_range_of_widths_counts():
    """Of loads only the widest: what is read for all lanes at once is counted by some versions, and not by others."""
    assert messages(report(replace(GOOD, registers=26, shared=512, loads={"16": 3, "8": 2})), version="2") == []
    assert messages(report(replace(GOOD, stores={"16": 1, "8": 2})), version="2") == [
        "a _append_kernel sm_90: stores of 8 to 16 bytes, the table says of 16 to 16 bytes"
    ]
    narrow = report(replace(GOOD, loads={"8": 3, "4": 2}))
    assert messages(narrow, version="2") == [
        "a _append_kernel sm_90: loads of up to 8 bytes, the table says of up to 16 bytes"
    ]
    assert messages(report(replace(GOOD, loads={"16": 3, "1": 2})), version="2") == []


def test_kernels_missing_on_either_side():
    assert messages(report(GOOD, kernel="_new_kernel")) == [
        "a _new_kernel sm_90 is not in the table",
        "a _append_kernel is in the table, but there is no such kernel",
    ]
    assert messages(report(GOOD, kernel="_new_kernel"), whole=False) == ["a _new_kernel sm_90 is not in the table"]


def test_spills_are_a_finding_whatever_the_table_says():
    (problem,) = compile_report.problems(report(replace(GOOD, spills=8)))
    assert (problem.code, problem.message) == ("KV722", "a _append_kernel sm_90: 8 bytes of registers are spilled")


def test_table_reads_back(tmp_path):
    table = {**report(GOOD), **report(replace(GOOD, spills=4), layout="b")}
    path = tmp_path / "table.json"
    path.write_text(compile_report.table_text("3.9.0", table))
    assert compile_report.read_table(path) == ("3.9.0", table)
    (line,) = [line for line in path.read_text().splitlines() if '"spills": 4' in line]
    assert line.strip().startswith('"sm_90": {"loads": {"16": 2, "8": 1}')


@pytest.mark.parametrize("text", [None, "", "[]", '{"triton": "1", "kernels": {"a": {"k": {"sm_90": {"loads": 1}}}}}'])
def test_bad_table(tmp_path, text):
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(KvgenError) as caught:
        compile_report.read_table(path)
    assert [d.code for d in caught.value.diagnostics] == ["KV723"]


@pytest.fixture(scope="module")
def generated():
    """Text and kernels of every layout and transfer in the repository, by name."""
    from kvgen.documents import load
    from kvgen.emit import kernels, render_all

    layouts = [load(path) for path in sorted((ROOT / "layouts").rglob("*.yaml"))]
    texts = {file.removesuffix(".py"): text for file, text in render_all(layouts).items()}
    return texts, {layout.name: kernels(layout) for layout in layouts}


def test_every_kernel_of_a_module_is_compiled(generated):
    texts, specs = generated
    for name, text in texts.items():
        functions = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
        kernels = {function for function in functions if function.endswith("_kernel")}
        assert {spec.name for spec in specs[name]} == kernels, name


def test_every_kernel_is_as_the_table_says(generated):
    """All kernels for all targets: they compile, spill nothing, and their accesses are as wide as recorded."""
    version, report = compile_report.compile_all(*generated, TARGETS)
    table_version, table = compile_report.read_table(TABLE)
    found = compile_report.problems(report)
    found += compile_report.differences(report, version, table, table_version, whole=True)
    assert [d.message for d in found] == []
    assert not any(isinstance(result, Failure) for _, result in compile_report._flat(report))
