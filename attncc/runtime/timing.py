"""Milliseconds of calls on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

FLUSHED = 1 << 28  # bytes written to empty the GPU's cache before a run; no L2 is larger

Call = Callable[[], Any]


class Timer(Protocol):
    """Milliseconds of calls on a device."""

    def time(self, call: Call) -> float: ...

    def in_turns(self, calls: Sequence[Call]) -> Sequence[float]: ...


class Events:
    """Times by the GPU's own events; medians. `cold`: its cache is emptied before each run.

    A run that is shorter than the host takes to launch it is captured several times in a graph, and that is timed.
    """

    WARM_UP, LEAST, MOST = 2, 5, 50  # runs
    SHORT, TOGETHER = 0.3, 10  # milliseconds; runs in a graph

    def __init__(self, cold: bool, span: float = 30.0, rounds: int = 7) -> None:
        """`span`: milliseconds that a measurement takes, `rounds`: measurements of each where several take turns."""
        self.span, self.rounds = span, rounds
        self.flush = torch.empty(FLUSHED, dtype=torch.int8, device="cuda") if cold else None

    def time(self, call: Call) -> float:
        return self._measure(*self._prepared(call))

    def in_turns(self, calls: Sequence[Call]) -> Sequence[float]:
        ready = [self._prepared(call) for call in calls]
        rounds = [[self._measure(*one) for one in ready] for _ in range(self.rounds)]
        return [statistics.median(times) for times in zip(*rounds, strict=True)]

    def _prepared(self, call: Call) -> tuple[Call, int, int]:
        """What to run, how many runs of `call` that is, and how often."""
        for _ in range(self.WARM_UP):
            call()
        once = max(self._median(call, 3), 1e-3)
        together = 1
        if once < self.SHORT and self.flush is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(self.TOGETHER):
                    call()
            call, together = graph.replay, self.TOGETHER
            once = max(self._median(call, 3), 1e-3)
        return call, together, min(self.MOST, max(self.LEAST, int(self.span / once)))

    def _measure(self, call: Call, together: int, runs: int) -> float:
        return self._median(call, runs) / together

    def _median(self, call: Call, runs: int) -> float:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        for start, end in pairs:
            if self.flush is not None:
                self.flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs)
