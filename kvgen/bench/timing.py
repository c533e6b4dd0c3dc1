"""What measures time. ``CudaClock`` is the one there is; tests have others.

Times are in microseconds, of one call. Nothing but ``CudaClock`` needs a GPU.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

Call = Callable[[], Any]

GRAPH = 600.0
"""Microseconds that a captured graph takes at the least: starting one takes as long as several short kernels."""

GRAPH_PASSES = 16
"""How often a graph goes through all calls at the most."""

SETTLE = 0.01
"""Seconds of replays before the first that counts, so that clocks settle."""

REPLAYS, REPLAYING = (7, 41), 0.02
"""Replays that count, at the least and at the most, and the seconds that those between take."""

HOST_CALLS, HOST_ROUNDS = 40, 15
"""Calls of one measurement of host time at the most, few enough that the device's queue never fills; and how many."""

HOSTING = 0.04
"""Seconds that all these measurements take, the device's work included, where that is more than one call each."""

WARMING = 4
"""Of so many calls one more is made before those that count, and one of fewer: the first after a pause take longer."""

COPY_BYTES = 1 << 32


class Clock(Protocol):
    def device_time(self, calls: Sequence[Call]) -> float:
        """The time a call takes on the device, launched from a graph that goes through all of ``calls``."""

    def host_time(self, calls: Sequence[Call]) -> tuple[float, float]:
        """The time a call keeps its caller waiting, the calls made one after the other without waiting between; and
        that of torch's ``slots.add_(0)`` at the same time."""

    def copy_rate(self) -> float:
        """Bytes per second, read and written, of a copy within the device's memory."""


class CudaClock:
    """Medians, by events around replays of CUDA graphs, on the current device and stream."""

    def __init__(self) -> None:
        import torch

        self.cuda, self.torch = torch.cuda, torch
        self.slots = torch.zeros(32, dtype=torch.int64, device="cuda")

    def device_time(self, calls: Sequence[Call]) -> float:
        for call in calls:  # compiles what is to be compiled: nothing may be inside a capture
            call()
        self.cuda.synchronize()
        graph, passes = self._captured(calls), 1
        graph.replay()
        once = self._event_time(graph.replay)
        if once < GRAPH:
            passes = min(GRAPH_PASSES, math.ceil(GRAPH / once))
            graph = self._captured([*calls] * passes)
        begin = time.perf_counter()
        while time.perf_counter() - begin < SETTLE:
            graph.replay()
            self.cuda.synchronize()
        least, most = REPLAYS
        replays = max(least, min(most, int(REPLAYING * 1e6 / (once * passes))))
        return median(self._event_time(graph.replay) for _ in range(replays)) / (passes * len(calls))

    def _captured(self, calls: Sequence[Call]) -> Any:
        graph = self.cuda.CUDAGraph()
        with self.cuda.graph(graph):
            for call in calls:
                call()
        return graph

    def host_time(self, calls: Sequence[Call]) -> tuple[float, float]:
        """Medians of rounds in which both take turns: what else the machine does is beside both."""
        calls[0]()
        self.cuda.synchronize()
        begin = time.perf_counter()
        calls[0]()
        self.cuda.synchronize()
        whole = (time.perf_counter() - begin) * 1e6
        count = max(1, min(HOST_CALLS, int(HOSTING * 1e6 / HOST_ROUNDS / max(whole, 1.0))))
        chosen = [calls[i % len(calls)] for i in range(count)]
        slots, collecting = self.slots, gc.isenabled()
        adds = [lambda: slots.add_(0)] * count
        gc.disable()  # as timeit does
        try:
            rounds = [(self._host_round(chosen), self._host_round(adds)) for _ in range(HOST_ROUNDS)]
        finally:
            if collecting:
                gc.enable()
        ours, beside = zip(*rounds, strict=True)
        return median(ours), median(beside)

    def _host_round(self, calls: Sequence[Call]) -> float:
        """Microseconds of a call until it returns."""
        for call in calls[: -(-len(calls) // WARMING)]:
            call()
        begin = time.perf_counter()
        for call in calls:
            call()
        returned = time.perf_counter()
        self.cuda.synchronize()
        return (returned - begin) * 1e6 / len(calls)

    def copy_rate(self) -> float:
        size = min(COPY_BYTES, self.cuda.mem_get_info()[0] // 4)
        source = self.torch.empty(size, dtype=self.torch.uint8, device="cuda")
        target = self.torch.empty_like(source)
        microseconds = median(self._event_time(lambda: target.copy_(source)) for _ in range(REPLAYS[1]))
        return 2 * size / (microseconds * 1e-6)

    def _event_time(self, call: Call) -> float:
        start, stop = (self.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        self.cuda.synchronize()
        return start.elapsed_time(stop) * 1e3
