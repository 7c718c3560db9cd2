"""A GPU's stream, events and graphs in simulated time, its clock at a rate of its own.

Whoever asks for the time, or whether an event is passed, makes it go on a little.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

ASKING_NS = 50
ENQUEUEING_NS = 100


class SimulatedGpu:
    """One stream. rate: of the GPU's clock to the host's."""

    def __init__(self, rate: float = 1.0) -> None:
        self.host_ns = 5_000_000_000_000  # a machine that has been up for a while
        self.rate = rate
        self._free_ns = 0  # when the stream has nothing left
        self._graph: SimulatedGraph | None = None  # being captured

    def now(self) -> int:
        """Return the host's time."""
        self.host_ns += ASKING_NS
        return self.host_ns

    def work(self, ns: int) -> None:
        """Enqueue work, or capture it."""
        if self._graph is not None:
            self._graph.operations.append(ns)
            return
        self.host_ns += ENQUEUEING_NS
        self._free_ns = max(self._free_ns, self.host_ns) + ns

    def wait(self) -> None:
        """Let the host's time go on until the stream is empty."""
        self.host_ns = max(self.host_ns, self._free_ns)

    def event(self, *, is_for_graph: bool = False) -> SimulatedEvent:
        """Return an event that was never recorded."""
        return SimulatedEvent(self, is_for_graph)

    def record(self, event: SimulatedEvent) -> None:
        """Put an event behind all that is enqueued, or into the graph."""
        if self._graph is not None:
            assert event.is_for_graph, "only an external event can be recorded in a capture"
            self._graph.operations.append(event)
            return
        self.host_ns += ENQUEUEING_NS
        event.passed_ns.append(max(self._free_ns, self.host_ns))

    def begin_capture(self) -> None:
        """Put what follows into a graph."""
        self._graph = SimulatedGraph(self)

    def end_capture(self) -> SimulatedGraph:
        """Return the graph."""
        graph, self._graph = self._graph, None
        assert graph is not None, "begin_capture() comes first"
        return graph


class SimulatedEvent:
    """As torch.cuda.Event(enable_timing=True)."""

    def __init__(self, gpu: SimulatedGpu, is_for_graph: bool) -> None:
        self.gpu = gpu
        self.is_for_graph = is_for_graph
        self.passed_ns: list[int] = []  # by the host's clock, a record or replay each

    def record(self) -> None:
        """Put it behind all that is enqueued."""
        self.gpu.record(self)

    def query(self) -> bool:
        """Return whether it is passed."""
        self.gpu.host_ns += ASKING_NS
        return bool(self.passed_ns) and self.gpu.host_ns >= self.passed_ns[-1]

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds to another event; both as they are now."""
        ns = (end_event.at_ns() - self.at_ns()) * self.gpu.rate
        return float(np.float32(ns / 1e6))

    def at_ns(self) -> int:
        """Return when it was passed last: in a graph the next replay may not have come to it."""
        passed = [ns for ns in self.passed_ns if ns <= self.gpu.host_ns]
        if not passed or (passed != self.passed_ns and not self.is_for_graph):
            raise RuntimeError("the event is not passed")
        return passed[-1]


class SimulatedGraph:
    """Work and events, captured once."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.operations: list[int | SimulatedEvent] = []
        self._gpu = gpu

    def replay(self) -> None:
        """Enqueue all of it."""
        gpu = self._gpu
        gpu.host_ns += ENQUEUEING_NS
        for operation in self.operations:
            if isinstance(operation, SimulatedEvent):
                operation.passed_ns.append(max(gpu._free_ns, gpu.host_ns))
            else:
                gpu._free_ns = max(gpu._free_ns, gpu.host_ns) + operation


class Captured(NamedTuple):
    """As cuda_graphs.CapturedGraph."""

    graph: SimulatedGraph
    marks: Any
