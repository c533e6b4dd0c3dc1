"""Launches that are kept hand CUDA what Triton hands it, serve what was checked, and give way where they should."""

import contextlib
import ctypes
import functools
import gc
import json
import os
import struct
import subprocess
import sys
import threading
import weakref
from types import ModuleType, SimpleNamespace

import pytest
import torch
import triton

from kvgen import harness
from kvgen.emit import specs
from kvgen.harness import transfers
from tests.generated import TRANSFERS, module_of, rendered, shipped, transfer

NUMBERS = (5, 1 << 40, 7, -3)
KINDS = ("i32", "i64", "constexpr", "i64")


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return module_of(shipped("paged_nhd"))


class Read(ctypes.Structure):
    """A tensor as DLPack has it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("device_type", "device", "ndim")),
        *(("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *((name, ctypes.c_void_p) for name in ("shape", "strides", "byte_offset")),
    )


LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
DEVICE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64))
READ = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Read))


def exchange_of_torch() -> int:
    """Where the functions are by which PyTorch lets others read its tensors."""
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return address(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")


class Driver:
    """In the place of CUDA: what is launched is read from the addresses that the real one gets.

    Tensors are read by PyTorch's function, unless there is another to ``read`` them; streams are numbers from 78 on.
    """

    def __init__(self, built: ModuleType) -> None:
        self.calls: list[tuple] = []
        self.count, self.answer, self.current = 0, 0, -1
        self.functions = LAUNCH(self.launch), DEVICE(self.device), STREAM(self.stream)  # which must outlive every call
        launch, device, stream = (ctypes.cast(function, ctypes.c_void_p).value for function in self.functions)
        self.exchange = (ctypes.c_void_p * 7).from_buffer_copy((ctypes.c_void_p * 7).from_address(exchange_of_torch()))
        self.exchange[6] = stream
        address = ctypes.addressof(self.exchange)
        describe = functools.partial(built.describe, address)
        calls = {"describe": describe, "called": (launch, device, address)}
        self.starter = SimpleNamespace(launching=built.launching, starting=built.starting, **calls)

    def read(self, reader: object) -> None:
        """From now on tensors are read by this function."""
        self.reader = READ(reader)
        self.exchange[5] = ctypes.cast(self.reader, ctypes.c_void_p).value

    def device(self, found: object) -> int:
        found[0] = self.current
        return 0

    def stream(self, kind: int, device: int, found: object) -> int:
        assert kind == 2  # CUDA's
        found[0] = 78 + device
        return 0

    def launch(self, config: int, function: int, parameters: int, extra: None) -> int:
        sizes = (ctypes.c_uint32 * 7).from_address(config)[:]
        stream, attributes, count = (ctypes.c_uint64 * 7).from_address(config)[4:]
        addresses = (ctypes.c_void_p * self.count).from_address(parameters)
        values = tuple(ctypes.c_int64.from_address(address).value for address in addresses)
        self.calls.append((tuple(sizes), stream, attributes, count & 0xFFFFFFFF, function, values))
        return self.answer


@pytest.fixture(scope="module")
def built(module) -> ModuleType:
    """The functions in C of generated modules; the only thing here that needs a compiler."""
    return triton.runtime.build.compile_module_from_src(src=module._start_in_c, name="_start")


@pytest.fixture
def driver(module, built, monkeypatch) -> Driver:
    """A driver whose device is that of tensors on the CPU and whose stream is 77."""
    stub = Driver(built)
    monkeypatch.setattr(module, "_starter", lambda: stub.starter)
    return stub


class CudaLauncher:
    """What Triton's launcher for NVIDIA GPUs is called."""


def compiled(tensors: int = 3, kinds: tuple[str, ...] = KINDS, ptx: str = "", **metadata: int) -> SimpleNamespace:
    """A compiled kernel of so many pointers and of numbers; its code says so, and has two more for scratch memory."""
    pointers = {f"x{i}": "*bf16" for i in range(tensors)}
    bits = ["64"] * tensors + [kind[1:] for kind in kinds if kind != "constexpr"] + ["64", "64"]
    plain = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "num_warps": 4, "shared": 512}
    plain |= {"global_scratch_size": 0, "profile_scratch_size": 0}
    return SimpleNamespace(
        run=CudaLauncher(),
        function=1234,
        metadata=SimpleNamespace(**(plain | metadata)),
        src=SimpleNamespace(signature=pointers | {f"n{i}": kind for i, kind in enumerate(kinds)}),
        asm={"ptx": ptx or f".entry x({', '.join(f'.param .u{size} x' for size in bits)}) {{ .param .u8 y }}"},
    )


def tensors(count: int = 4) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(count, 8, dtype=torch.bfloat16) for _ in range(3))


def addresses(given: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in given)


def test_a_kept_launch_hands_over_what_triton_does(module, driver) -> None:
    given, driver.count = tensors(), 8
    launch = module._direct(compiled(), (33, 8), NUMBERS, given, 0)
    assert launch(given, None) is True
    numbers = (5, 1 << 40, -3, 0, 0)  # without what is compiled in, with no scratch memory
    assert driver.calls == [((33, 8, 1, 128, 1, 1, 512), 77, 0, 0, 1234, (*addresses(given), *numbers))]


def test_the_index_of_a_layer_stands_behind_the_tensors(module, driver) -> None:
    given, driver.count = tensors(), 9
    launch = module._direct(compiled(kinds=("i32", *KINDS)), (1,), NUMBERS, given, 3)
    assert launch(given, 2) is True
    assert driver.calls[0][-1] == (*addresses(given), 2, 5, 1 << 40, -3, 0, 0)
    for layer in (3, -1, 1.0, True, None, torch.tensor(1)):
        assert launch(given, layer) is False


def test_a_kept_launch_gives_way(module, driver) -> None:
    given, driver.count = tensors(), 8
    launch = module._direct(compiled(), (33,), NUMBERS, given, 0)
    odd = torch.zeros(64, dtype=torch.bfloat16)[1:33].view(4, 8)
    freed = torch.zeros_like(given[1])
    freed.untyped_storage().resize_(0)
    for other in (odd, torch.zeros(0, 8), freed, given[0].to("meta")):  # at another offset, and without memory
        assert launch((given[0], other, given[2]), None) is False
    driver.current = 1
    assert launch(given, None) is False  # another device is current
    driver.current = -1
    for hook in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        hook.calls.append(print)
        try:
            assert launch(given, None) is False  # a profiler wants to see launches
        finally:
            hook.calls.clear()
    assert driver.calls == []
    driver.answer = 1
    assert launch(given, None) is False  # whoever launches next says why
    driver.answer = 0
    assert launch(given, None) is True
    for other in ("x", None, 4096, given[1].to_sparse()):
        assert launch((given[0], other, given[2]), None) is False  # the checks say what is wrong with it
    assert len(driver.calls) == 2


def test_values_that_are_negated_when_they_are_read_go_the_long_way(module, driver) -> None:
    """Their memory has other values."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        plain = torch.zeros(4, 8, dtype=dtype)
        assert driver.starter.describe((plain,)) == driver.starter.describe((plain.clone(),))
        assert driver.starter.describe((torch._neg_view(plain),)) is None
    negated = torch.zeros(4, 8, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    assert driver.starter.describe((negated,)) is None


class Lies:
    """A tensor of a GPU, or of a host's memory that is pinned."""

    def __init__(self, device: int, pinned: bool = False) -> None:
        self.get_device, self.is_pinned = lambda: device, lambda: pinned


def test_host_memory_must_be_pinned_each_time(module, driver) -> None:
    def read(lies: Lies, found: object) -> int:
        found[0] = Read(data=4096, device_type=2, device=lies.get_device(), ndim=0, code=1, bits=8, lanes=1)
        return 0

    driver.count, driver.current = 8, 2
    driver.read(read)
    launch = module._direct(compiled(), (33,), NUMBERS, (Lies(2), Lies(-1, pinned=True), Lies(2)), 0)
    assert launch((Lies(2), Lies(-1), Lies(2)), None) is False
    assert launch((Lies(2), Lies(-1, pinned=True), Lies(2)), None) is True
    assert [call[1] for call in driver.calls] == [80]  # the stream of that GPU


UNKNOWN = {
    "no kernel": None,
    "another launcher": SimpleNamespace(run=print),
    "clusters": compiled(num_ctas=2),
    "all at once": compiled(launch_cooperative_grid=True),
    "dependent launches": compiled(launch_pdl=True),
    "scratch memory": compiled(global_scratch_size=8),
    "a profile": compiled(profile_scratch_size=8),
    "one argument more": compiled(ptx=".entry x(" + ", ".join([".param .u64 x"] * 9) + ")"),
    "a wider argument": compiled(ptx=".entry x(" + ", ".join([".param .u64 x"] * 8) + ")"),
    "another code": compiled(ptx="s_load_dwordx4"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_not_understood_is_left_to_triton(module, driver, what: str) -> None:
    assert module._direct(UNKNOWN[what], (1,), NUMBERS, tensors(), 0) is None
    assert module._direct(compiled(), (1,), NUMBERS, tensors(), 0) is not None


def test_so_are_more_arguments_than_there_is_room_for(module, driver) -> None:
    for count, kept in ((123, True), (124, False)):
        found = module._direct(compiled(kinds=("i64",) * count), (1,), (1,) * count, tensors(), 0)
        assert (found is not None) is kept


def test_without_a_compiler_or_a_driver_all_is_left_to_triton(module, monkeypatch) -> None:
    for missing in ("CDLL", "compile_module_from_src", "exchange"):
        with monkeypatch.context() as patch:
            some = ctypes.pythonapi.Py_IsInitialized
            cuda = SimpleNamespace(cuLaunchKernelEx=some, cuCtxGetDevice=some)
            patch.setattr(ctypes, "CDLL", lambda name, cuda=cuda: cuda)
            patch.setattr(
                triton.runtime.build,
                "compile_module_from_src",
                lambda src, name: SimpleNamespace(launching=print, starting=print, describe=print),
            )
            patch.setattr(module, "_starter", module._starter.__wrapped__)
            assert module._starter().launching is module._starter().starting is print
            assert module._starter().called == (*[ctypes.cast(some, ctypes.c_void_p).value] * 2, exchange_of_torch())
            if missing == "exchange":
                patch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
            else:
                patch.delattr(ctypes if missing == "CDLL" else triton.runtime.build, missing)
            assert module._starter() is None
            assert module._direct(compiled(), (1,), NUMBERS, tensors(), 0) is None


COMPILES = """
import json, sys
import triton
from triton.compiler import ASTSource
from kvgen import compile_worker
from pathlib import Path

module = compile_worker._load(Path(sys.argv[1]))
for job in json.loads(sys.argv[2]):
    function = getattr(module, job["name"])
    signature = {name: job["signature"].get(name, "constexpr") for name in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs=job["constexprs"])
    found = triton.compile(source, target=compile_worker.gpu_target("sm_90"))
    count = sum(kind != "constexpr" for kind in job["signature"].values()) + 2
    print(module._takes(found, [0] * count), module._takes(found, [0] * (count - 1)))
"""


def test_compiled_kernels_take_what_their_signatures_say(tmp_path) -> None:
    """Triton's compiler itself: code has the arguments of the signature and two of scratch memory, and no others."""
    names = ("_append_kernel", "_copy_blocks_kernel")
    jobs = [spec for spec in specs.kernels(shipped("paged_nhd")) if spec.name in names and not spec.form]
    path = tmp_path / "paged_nhd.py"
    path.write_text(rendered("paged_nhd"))
    text = json.dumps([{"name": j.name, "signature": j.signature, "constexprs": j.constexprs} for j in jobs])
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILES, str(path), text]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["True False"] * 2, done.stderr


def keep(module, kept, given: tuple[torch.Tensor, ...], *others: object) -> object:
    """Keeps a launch for tensors, and gives it."""
    kept.keep(compiled(len(given)), (1,), NUMBERS, given, *others)
    return kept.latest.get(others)


def test_every_offset_from_multiples_of_16_has_a_launch_of_its_own(module, driver) -> None:
    """What is compiled, and which widths are right, follows from it: none serves another."""
    driver.count, kept = 8, module._Kept()
    given = [(torch.zeros(64, dtype=torch.bfloat16)[i : i + 32].view(4, 8), *tensors()[1:]) for i in (0, 1, 4, 7)]
    launches = [keep(module, kept, some) for some in given]
    assert [others for others, _ in kept.known] == [()] * 4
    described = [struct.unpack("=iiiBBH5q", kind[:56]) for _, kind in kept.known]
    assert described == [(1, 0, 2, 4, 16, 1, offset, 4, 8, 8, 1) for offset in (0, 2, 8, 14)]
    for some, launch in zip(given, launches, strict=True):
        assert kept.start(some) is True
        assert kept.latest[()] is launch
        assert driver.calls.pop()[-1][:3] == addresses(some)
        assert all(other(some, None) is (other is launch) for other in launches)
        driver.calls.clear()
    assert kept.start((torch.zeros(64, dtype=torch.bfloat16)[2:34].view(4, 8), *tensors()[1:])) is False


def test_what_is_kept_is_bounded(module, driver) -> None:
    kept = module._Kept()
    for count in range(1, 1030):
        keep(module, kept, tensors(count), count)
    assert len(kept.known) == len(kept.latest) == 1029 - 1024


def kinds() -> list[torch.Tensor]:
    """Tensors of [4, 8] that a launch for the first must not be used for."""
    plain = torch.zeros(4, 8, dtype=torch.bfloat16)
    return [
        plain,
        plain[:3],
        torch.zeros(4, 16, dtype=torch.bfloat16)[:, :8],
        plain.to(torch.float16),
        plain[:, None],
        plain.view(2, 2, 8),
        plain.to("meta"),
        torch._neg_view(plain),  # the same to look at, but for its negative bit
    ]


def test_the_latest_launch_takes_its_kind_alone(module, driver) -> None:
    driver.count, given = 8, tensors()
    launch = keep(module, module._Kept(), given)
    for same in (given, tensors(), tuple(map(torch.nn.Parameter, tensors()))):
        assert launch(same, None) is True
        assert driver.calls.pop()[-1][:3] == addresses(same)
    for other in kinds()[1:]:
        assert launch((given[0], other, given[2]), None) is False
    assert launch(given[:2], None) is launch((*given, given[0]), None) is False
    assert driver.calls == []


def test_tensors_of_other_kinds_find_their_own_launch(module, driver) -> None:
    driver.count = 8
    kept = module._Kept()
    several = [(tensor, *tensors()[1:]) for tensor in kinds()[:-2]]
    launches = [keep(module, kept, given) for given in several]
    assert len(set(launches)) == len(several) == 6
    for given, launch in zip(several, launches, strict=True):
        assert kept.start(given)
        assert kept.latest[()] is launch
        assert driver.calls.pop()[-1][:3] == addresses(given)
    assert kept.start((several[0][0][:2], *several[0][1:])) is False
    for other in kinds()[-2:]:
        assert kept.start((other, *tensors()[1:])) is False
    assert kept.start((None, 3, several[0][0])) is False
    assert kept.start((several[0][0].to_sparse(), *several[0][1:])) is False


def test_other_arguments_have_launches_of_their_own(module, driver) -> None:
    driver.count, given, kept = 8, tensors(), module._Kept()
    launches = [keep(module, kept, given, *others) for others in ((), (True,), (False,), (None, 3))]
    assert len(set(launches)) == 4
    assert kept.start(given, False)
    assert kept.latest[False,] is launches[2]
    assert kept.start(given, 4) is False
    assert kept.start(given, []) is False  # nothing that could be a key: the checks refuse it
    assert len(driver.calls) == 1


def test_threads_share_kept_launches(module, driver) -> None:
    """Each finds its own tensors' launch, and none gets another's addresses between them and the launch."""
    driver.count, kept = 8, module._Kept()
    failures: list[BaseException] = []
    expected: list[tuple[int, ...]] = []

    def work(seed: int) -> None:
        try:
            for count in range(1, 200):
                given = tensors(1 + (count * seed) % 37)
                keep(module, kept, given)
                expected.append(addresses(given))
                assert kept.start(given)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 5, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(kept.known) == 37
    assert sorted(call[-1][:3] for call in driver.calls) == sorted(expected)


def test_kept_launches_are_started_by_a_function_in_c(module, driver) -> None:
    """It hands on what it is given, and keeps nothing of it: not even where nothing could be started."""
    driver.count, given, kept = 9, tensors(), module._Kept()
    assert kept.start(given, "other", layer=1) is False  # there is none yet
    kernel, other = compiled(kinds=("i32", *KINDS)), "".join(["ot", "her"])
    kept.keep(kernel, (1,), NUMBERS, given, other, num_layers=3)
    assert type(kept.start) is type(len)
    before = [sys.getrefcount(each) for each in (given, other, kept.latest[other,])]
    for layer, started in ((2, True), (3, False), ("2", False), (None, False)) * 50:
        assert kept.start(given, other, layer=layer) is started
    assert kept.start(given, other) is kept.start(given, other, "more", layer=1) is kept.start(given, layer=1) is False
    assert [call[-1] for call in driver.calls] == [(*addresses(given), 2, 5, 1 << 40, -3, 0, 0)] * 50
    assert [sys.getrefcount(each) for each in (given, other, kept.latest[other,])] == before


def test_what_fails_in_a_launch_is_told(module, driver) -> None:
    driver.count, given, kept = 8, tensors(), module._Kept()
    keep(module, kept, given)
    kept.latest[()] = lambda tensors, layer: tensors[3]
    with pytest.raises(IndexError):
        kept.start(given)


def test_a_kept_launch_keeps_the_kernel(module, driver) -> None:
    """Whose code is unloaded with it."""
    given, kernel = tensors(), compiled()
    launch, part = module._direct(kernel, (1,), NUMBERS, given, 0), weakref.ref(kernel.run)
    del kernel
    gc.collect()
    assert part() is not None
    del launch
    gc.collect()
    assert part() is None


class Interpreted:
    """A kernel of the interpreter that says what it was called with, as Triton's compiled kernels do."""

    def __init__(self, kernel: object) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        def call(*args: object, **options: object) -> SimpleNamespace:
            self.kernel[grid](*args, **options)
            return SimpleNamespace(kernel=self.kernel, args=args, options=options)

        return call


def interpret_kept(module: ModuleType, starter: SimpleNamespace, monkeypatch) -> list[str]:
    """Kept launches are the interpreter's, with the numbers that were kept; gives the names of kernels so started."""
    started: list[str] = []
    monkeypatch.setattr(module, "_starter", lambda: starter)

    def direct(compiled, grid, numbers, tensors, num_layers):
        count, kind = len(tensors), starter.describe(tensors)
        if kind is None:  # nothing is in some of them
            return None

        def launch(given, layer):
            if starter.describe(given) != kind:
                return False
            if num_layers and (type(layer) is not int or not 0 <= layer < num_layers):
                return False
            assert len(given) == count
            rest = iter(given)
            handed = compiled.args[: len(compiled.args) - len(numbers)]
            handed = [next(rest).view(arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in handed]
            if num_layers:
                handed[-1] = layer
            compiled.kernel[grid](*handed, *numbers, **compiled.options)
            started.append(compiled.kernel.fn.__name__)
            return True

        return launch

    monkeypatch.setattr(module, "_direct", direct)
    for name, kernel in list(vars(module).items()):
        if name.endswith("_kernel"):
            monkeypatch.setattr(module, name, Interpreted(kernel))
    return started


KEPT = {
    "paged_nhd": {"append", "append_key", "gather", "zero_blocks", "slot_mapping", "gather_page_table"},
    "cross_layer_nhd": {"append", "append_positions"},  # layers
    "context_parallel_nhd": {"append_positions", "gather_paged"},  # ranks
    "swa_nhd": {"append_positions", "gather_paged"},  # a remap table behind what may be None
    "mla_fp8": {"gather_codes"},  # bytes read as codes
    "nhd_to_host_layer_first": {"transfer"},  # tables of pointers, heads
    "nhd_to_hnd": {"transfer_blocks"},
}


@pytest.mark.parametrize("name", KEPT)
def test_kept_launches_serve_whatever_comes_next(name: str, driver, monkeypatch) -> None:
    """Tensors of all kinds take turns as the harness calls functions, and again: every byte is what it should be."""
    layout = transfer(name) if name in TRANSFERS else shipped(name)
    module = module_of(layout)
    started = interpret_kept(module, driver.starter, monkeypatch)
    found = transfers.transfer_cases(layout) if name in TRANSFERS else harness.cases(layout)
    names = [case.name for case in found if case.function in KEPT[name] and "huge" not in case.name]
    for _ in range(2):
        report = harness.run(layout, module, only=names)
        assert report.ok, str(report)
    assert {name.removeprefix("_").removesuffix("_kernel") for name in started} >= KEPT[name]


def test_buffers_that_are_not_read_are_looked_at_too(driver, monkeypatch) -> None:
    """Of a stream that is stored twice gather reads one buffer, and checks both each time."""
    module = module_of(shipped("mla_assembled"))
    started = interpret_kept(module, driver.starter, monkeypatch)
    key_cache, value_cache = module.allocate(3)
    slots = torch.tensor([5, 7])
    key_cache.copy_(torch.randn(key_cache.shape))
    for _ in range(2):
        found = module.gather(key_cache, value_cache, slots)[0]
        assert torch.equal(found, key_cache.flatten(0, 1)[slots][:, : found.shape[-1]])
    assert started == ["_gather_kernel"]
    for other, error in ((value_cache[:2], ValueError), (value_cache.to_sparse(), TypeError), (None, TypeError)):
        with pytest.raises(error, match="value_cache"):
            module.gather(key_cache, other, slots)


def test_nothing_is_compiled_while_a_graph_is_captured(module, monkeypatch) -> None:
    hooks, entered = triton.knobs.runtime, []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(entered.append(device)))
    monkeypatch.setattr(hooks, "jit_cache_hook", print)
    gpu = torch.device("cuda", 1)
    with module._on(gpu), pytest.raises(RuntimeError, match="call the function once before"):
        hooks.jit_cache_hook(key="key", repr="repr", fn=None)
    assert hooks.jit_cache_hook is print
    assert entered == [gpu]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with module._on(gpu):
        assert hooks.jit_cache_hook is print
