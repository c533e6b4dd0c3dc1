"""Launches that are kept: they hand Triton's launcher what Triton itself hands it, and give way where they should."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
import triton

from kvgen.resolve import load
from tests.generated import ROOT, module_of


@pytest.fixture(scope="module")
def module():
    return module_of(load(ROOT / "layouts" / "paged_nhd.yaml"))


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __call__(self, *args: object) -> None:
        self.calls.append(args)


@pytest.fixture
def driver(monkeypatch):
    """A driver on whose device 0 stream 77 is current; Triton's own is back afterwards."""
    stub = SimpleNamespace(get_current_stream=lambda device: 77 + device, current=0)
    stub.get_current_device = lambda: stub.current
    monkeypatch.setattr(torch._C, "_cuda_getDevice", stub.get_current_device, raising=False)
    before = triton.runtime.driver._active if hasattr(triton.runtime.driver, "_active") else None
    triton.runtime.driver.set_active(stub)
    yield stub
    triton.runtime.driver._active = before


def launcher() -> object:
    """Triton's own launcher of a compiled kernel, its last step recorded."""
    from triton.backends.nvidia.driver import CudaLauncher

    runner = CudaLauncher.__new__(CudaLauncher)
    for name in ("global_scratch", "profile_scratch"):
        setattr(runner, f"{name}_size", 0)
        setattr(runner, f"{name}_align", 1)
    runner.num_ctas, runner.gsan_enabled = 1, False
    runner.launch_cooperative_grid, runner.launch_pdl = False, False
    if "arg_annotations" in CudaLauncher.__init__.__code__.co_names:
        runner.arg_annotations, runner.kernel_signature = ["annotations"], b"signature"
    runner.launch = Recorder()
    return runner


def compiled(runner: object) -> SimpleNamespace:
    return SimpleNamespace(run=runner, function=1234, packed_metadata=(4, 1, 0))


def test_a_kept_launch_hands_over_what_triton_does(module, driver) -> None:
    runner = launcher()
    launch = module._direct(compiled(runner), 0, (33, 8), (5, 6), 3)
    assert launch(16 | 32 | 64, (16, 32, 64, 2)) is True
    runner(33, 8, 1, 77, 1234, (4, 1, 0), None, None, None, 16, 32, 64, 2, 5, 6)
    mine, theirs = runner.launch.calls
    assert mine == theirs
    assert 33 in mine
    assert 77 in mine


def test_a_kept_launch_gives_way(module, driver) -> None:
    runner = launcher()
    launch = module._direct(compiled(runner), 0, (33,), (5,), 3)
    assert launch(16 | 24, (16, 24, 2)) is False  # an address off 16 bytes
    assert launch(48, (16, 32, 3)) is False  # a layer that is not there
    assert launch(48, (16, 32, -1)) is False
    driver.current = 1
    assert launch(48, (16, 32, 2)) is False  # another device is current
    driver.current = 0
    for hook in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        hook.calls.append(print)
        try:
            assert launch(48, (16, 32, 2)) is False  # a profiler wants to see launches
        finally:
            hook.calls.clear()
    assert runner.launch.calls == []
    assert launch(48, (16, 32, 2)) is True


def test_unknown_launchers_are_left_to_triton(module, driver) -> None:
    assert module._direct(None, 0, (1,), (), 0) is None
    assert module._direct(compiled(lambda: None), 0, (1,), (), 0) is None
    runner = launcher()
    runner.profile_scratch_size = 8
    assert module._direct(compiled(runner), 0, (1,), (), 0) is None


def tensors(count: int = 4) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(count, 8, dtype=torch.bfloat16) for _ in range(3))


def keep(module, kept, given: tuple[torch.Tensor, ...]) -> Recorder:
    """Keeps a launch for tensors; what it would start is recorded."""
    runner = launcher()
    kept.keep(given, compiled(runner), (1,), ())
    return runner.launch


def test_only_aligned_tensors_are_kept(module, driver) -> None:
    kept = module._Kept()
    odd = torch.zeros(64, dtype=torch.bfloat16)[1:33].view(4, 8)
    keep(module, kept, (odd, *tensors()))
    assert kept.known == {}
    keep(module, kept, tensors())
    assert list(kept.known) == [(((4, 8), (8, 1), torch.bfloat16, -1, False),) * 3]


def test_what_is_kept_is_bounded(module, driver) -> None:
    kept = module._Kept()
    for count in range(1, 1030):
        keep(module, kept, tensors(count))
    assert len(kept.known) == 1029 - 1024


def kinds() -> list[torch.Tensor]:
    """Tensors of [4, 8] that a launch for the first must not be used for."""
    plain = torch.zeros(4, 8, dtype=torch.bfloat16)
    return [
        plain,
        plain[:3],
        torch.zeros(4, 16, dtype=torch.bfloat16)[:, :8],
        plain.to(torch.float16),
        plain.to("meta"),
        plain[:, None],
        torch._neg_view(plain),  # the same to look at, but for its negative bit
        torch.nn.Parameter(plain),
    ]


def test_the_latest_tensors_are_known_at_once(module, driver) -> None:
    given = tensors()
    kept = module._Kept()
    keep(module, kept, given)
    same, launch = kept.latest
    assert same(*given)
    assert same(*tensors())
    assert kept.find(*tensors()) is launch
    for other in kinds()[1:]:
        assert not same(given[0], other, given[2])
    assert not same(given[0], None, given[2])
    assert not same(given[0], 1.5, given[2])


def test_tensors_of_other_kinds_find_their_own_launch(module, driver) -> None:
    driver.current = -1  # that of tensors on the CPU
    kept = module._Kept()
    several = [(tensor, *tensors()) for tensor in kinds()[:-1] if tensor.device.type == "cpu"]
    recorders = [keep(module, kept, given) for given in several]
    for given, recorder in zip(several, recorders, strict=True):
        launch = kept.find(*given)
        assert launch(16, (16,))
        assert kept.latest[1] is launch
        assert len(recorder.calls) == 1
    assert kept.find(several[0][0][:2], *several[0][1:]) is None
    assert kept.find(None, 3) is None


def test_without_guards_launches_are_looked_up(module, driver, monkeypatch) -> None:
    monkeypatch.setattr(module, "TensorGuards", None)
    kept = module._Kept()
    given = tensors()
    keep(module, kept, given)
    same, launch = kept.latest
    assert not same(*given)
    assert kept.find(*given) is launch


def test_threads_share_kept_launches(module, driver) -> None:
    driver.current = -1
    kept = module._Kept()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for count in range(1, 200):
                given = tensors(1 + (count * seed) % 37)
                keep(module, kept, given)
                assert kept.find(*given)(16, (16,))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 5, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(kept.known) == 37


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
