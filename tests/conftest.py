"""Triton interprets on the CPU here, unless tests that need a GPU were asked for."""

from __future__ import annotations

import os
from collections import Counter

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    whole = "every combination of encodings instead of some (test_product.py; half an hour of a core, in even shares)"
    parser.addoption("--all-encodings", action="store_true", help=whole)


def pytest_configure(config: pytest.Config) -> None:
    # Triton looks at this when kernels are defined, so it has to be decided before any module is imported.
    if config.getoption("markexpr") != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"
        # Beside other workers PyTorch's threads wait for each other more than they work; it counts them at its import.
        if hasattr(config, "workerinput"):
            os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = _no_gpu(config)
    if reason:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _memory_is_given_back(request: pytest.FixtureRequest):
    """Some tests take 16 GiB of a GPU for a while: PyTorch would keep them from the other processes of the run."""
    yield
    if request.node.get_closest_marker("gpu"):
        import torch

        torch.cuda.empty_cache()


def _no_gpu(config: pytest.Config) -> str:
    if config.getoption("markexpr") != "gpu":
        return "kernels are interpreted in this run; `pytest -m gpu` compiles them"
    import torch

    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


def pytest_terminal_summary(terminalreporter) -> None:
    """What the layouts drawn at random were made of, over all workers."""
    drawn: list[dict[str, int]] = []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            drawn += [v for k, v in getattr(report, "user_properties", []) if k == "layouts"]
    layouts = [features for group in drawn for features in group]
    if not layouts:
        return
    with_feature = Counter(feature for features in layouts for feature in features)
    terminalreporter.section(f"{len(layouts)} distinct layouts drawn")
    for feature, count in sorted(with_feature.items()):
        most = max(features.get(feature, 0) for features in layouts)
        terminalreporter.write_line(f"{feature:<28} in {count:>3} layouts, up to {most} each")
