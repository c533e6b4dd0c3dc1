"""What measures time. ``CudaClock`` is the one there is; tests have others.

Times are in microseconds, of one call. Nothing but ``CudaClock`` needs a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

Call = Callable[[], Any]

GRAPH_CALLS = 64
"""Calls in a captured graph at the least: starting a graph takes as long as several short kernels."""

REPLAYS = 21
SETTLE = 0.05
"""Seconds of replays before the first that counts, so that clocks settle."""

HOST_CALLS = 100
"""Calls of one measurement of host time at the most, few enough that the device's queue never fills."""

HOST_ROUND = 0.02
"""Seconds that such a measurement may take if more than one call is to be made."""

HOST_ROUNDS = 7
COPY_BYTES = 1 << 32


class Clock(Protocol):
    def device_time(self, calls: Sequence[Call]) -> float:
        """The time a call takes on the device, launched from a graph that goes through all of ``calls``."""

    def host_time(self, calls: Sequence[Call]) -> float:
        """The time a call keeps its caller waiting, the calls made one after the other without waiting between."""

    def copy_rate(self) -> float:
        """Bytes per second, read and written, of a copy within the device's memory."""


class CudaClock:
    """Medians, by events around replays of CUDA graphs, on the current device and stream."""

    def __init__(self) -> None:
        import torch

        self.cuda, self.torch = torch.cuda, torch

    def device_time(self, calls: Sequence[Call]) -> float:
        for call in calls:  # compiles what is to be compiled: nothing may be inside a capture
            call()
        self.cuda.synchronize()
        repeats = -(-GRAPH_CALLS // len(calls))
        graph = self.cuda.CUDAGraph()
        with self.cuda.graph(graph):
            for _ in range(repeats):
                for call in calls:
                    call()
        begin = time.perf_counter()
        while time.perf_counter() - begin < SETTLE:
            graph.replay()
            self.cuda.synchronize()
        return median(self._event_time(graph.replay) for _ in range(REPLAYS)) / (repeats * len(calls))

    def host_time(self, calls: Sequence[Call]) -> float:
        for call in calls:
            call()
        self.cuda.synchronize()
        count = max(1, min(HOST_CALLS, int(HOST_ROUND * 1e6 / max(self._host_round(calls[:1]), 1.0))))
        return median(self._host_round([calls[i % len(calls)] for i in range(count)]) for _ in range(HOST_ROUNDS))

    def _host_round(self, calls: Sequence[Call]) -> float:
        begin = time.perf_counter()
        for call in calls:
            call()
        microseconds = (time.perf_counter() - begin) * 1e6
        self.cuda.synchronize()
        return microseconds / len(calls)

    def copy_rate(self) -> float:
        size = min(COPY_BYTES, self.cuda.mem_get_info()[0] // 4)
        source = self.torch.empty(size, dtype=self.torch.uint8, device="cuda")
        target = self.torch.empty_like(source)
        microseconds = median(self._event_time(lambda: target.copy_(source)) for _ in range(REPLAYS))
        return 2 * size / (microseconds * 1e-6)

    def _event_time(self, call: Call) -> float:
        start, stop = (self.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        self.cuda.synchronize()
        return start.elapsed_time(stop) * 1e3
