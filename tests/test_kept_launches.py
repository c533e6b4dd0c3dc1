"""Launches that are kept: they hand Triton's launcher what Triton itself hands it, and give way where they should."""

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
def driver():
    """A driver on whose device 0 stream 77 is current; Triton's own is back afterwards."""
    stub = SimpleNamespace(get_current_stream=lambda device: 77 + device, get_current_device=lambda: 0)
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
    assert launch((16, 32, 64), 2) is True
    runner(33, 8, 1, 77, 1234, (4, 1, 0), None, None, None, 16, 32, 64, 2, 5, 6)
    mine, theirs = runner.launch.calls
    assert mine == theirs
    assert 33 in mine
    assert 77 in mine


def test_a_kept_launch_gives_way(module, driver) -> None:
    runner = launcher()
    launch = module._direct(compiled(runner), 0, (33,), (5,), 3)
    assert launch((16, 24), 2) is False  # an address off 16 bytes
    assert launch((16, 32), 3) is False  # a layer that is not there
    assert launch((16, 32), -1) is False
    driver.get_current_device = lambda: 1
    assert module._direct(compiled(runner), 0, (33,), (5,), 3)((16, 32), 2) is False  # another device is current
    driver.get_current_device = lambda: 0
    hook = triton.knobs.runtime.launch_enter_hook
    hook.calls.append(print)
    try:
        assert launch((16, 32), 2) is False  # a profiler wants to see launches
    finally:
        hook.calls.clear()
    assert runner.launch.calls == []
    assert launch((16, 32), 2) is True


def test_unknown_launchers_are_left_to_triton(module, driver) -> None:
    assert module._direct(None, 0, (1,), (), 0) is None
    assert module._direct(compiled(lambda: None), 0, (1,), (), 0) is None
    runner = launcher()
    runner.profile_scratch_size = 8
    assert module._direct(compiled(runner), 0, (1,), (), 0) is None


def tensors(count: int = 4) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(count, 8, dtype=torch.bfloat16) for _ in range(3))


def test_only_aligned_tensors_are_kept(module, driver) -> None:
    launches: dict = {}
    odd = torch.zeros(64, dtype=torch.bfloat16)[1:33].view(4, 8)
    module._keep(launches, (odd, *tensors()), compiled(launcher()), (1,), ())
    assert launches == {}
    module._keep(launches, tensors(), compiled(launcher()), (1,), ())
    assert list(launches) == [(((4, 8), (8, 1), torch.bfloat16, -1),) * 3]


def test_what_is_kept_is_bounded(module, driver) -> None:
    launches: dict = {}
    for count in range(1, 1030):
        module._keep(launches, tensors(count), compiled(launcher()), (1,), ())
    assert len(launches) == 1029 - 1024


def test_threads_share_kept_launches(module, driver) -> None:
    launches: dict = {}
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for count in range(1, 200):
                given = tensors(1 + (count * seed) % 37)
                module._keep(launches, given, compiled(launcher()), (1,), ())
                launches[tuple((t.shape, t.stride(), t.dtype, t.get_device()) for t in given)]((16,))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 5, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(launches) == 37
