"""Traces of engines that never ran, with GPUs or without, written by the ranks' own writer.

Invented times, about as long as those of a decode step on a datacentre's GPU. v1 waits for its
output before it plans the next step, so its GPU waits in turn; v2 keeps two steps in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rank_harness import make_config

from nanorunner.workers.messages import Trace
from nanorunner.workers.spans import (
    ACK,
    ALL_REDUCE,
    APPLY,
    CPU,
    DOWNLOAD,
    EXCHANGE,
    FORWARD,
    GPU,
    GRAPH,
    IDLE,
    NO_FRAME,
    NO_STEP,
    PREPARE,
    RECEIVE,
    RUN,
    SAMPLE,
    SCHEDULE,
    SEND,
    STAGE,
    UPDATE,
    WAIT,
    WIRE,
    RankSpans,
)
from nanorunner.workers.trace_file import write_trace

US = 1000
START_NS = 5_000_000_000_000  # a machine that has been up for a while
NUM_START_FRAMES = 4  # load_model, profile, allocate_kv, capture
# CPU laps of a runner's step in us, from its plan to what it enqueued
LAPS = {
    "v1": ((WIRE, 8), (APPLY, 20), (PREPARE, 180), (STAGE, 60), (GRAPH, 90)),
    "v2": ((WIRE, 6), (APPLY, 6), (STAGE, 6), (GRAPH, 70), (DOWNLOAD, 12)),
}
ENGINE = {SCHEDULE: 30, SEND: 25, UPDATE: 70}
GPU_FIRST = {"v1": STAGE, "v2": PREPARE}  # v1 makes its inputs on the CPU
GPU_PARTS_US = (10, 1500, 130)  # that one, forward, sample
BETWEEN_GRAPHS_US = 3  # with the next one already enqueued


class Synthetic:
    """One run, step by step; rows[rank] are (name, kind, begin, end, step, frame)."""

    def __init__(self, runner: str, tp: int, *, has_gpu: bool) -> None:
        self.runner, self.tp, self.has_gpu = runner, tp, has_gpu
        self.rows: list[list[tuple[int, ...]]] = [[] for _ in range(tp)]
        self.facts: list[tuple[int, ...]] = []
        self.time = [START_NS] * tp  # of each rank's CPU
        self.gpu_free = [START_NS] * tp
        self.frame = NO_FRAME
        self.num_requests = 8

    def run(self, num_steps: int, rest_after: Iterable[int] = ()) -> None:
        """Serve; rest_after: steps behind which no request is there for a while."""
        for _ in range(NUM_START_FRAMES):
            self._send(NO_STEP)
            self._receive(NO_STEP, [])
        depth = 1 if self.runner == "v1" else 2
        in_flight: deque[tuple[int, int]] = deque()
        planned = 0
        rests = set(rest_after)
        while planned < num_steps or in_flight:
            may_plan = planned < num_steps and not (planned - 1 in rests and in_flight)
            while may_plan and len(in_flight) < depth:
                in_flight.append((planned, self._step(planned)))
                planned += 1
                may_plan = planned < num_steps and planned - 1 not in rests
            step, done = in_flight.popleft()
            self._lap(0, WAIT, max(5 * US, done + 4 * US - self.time[0]), step, NO_FRAME)
            self._lap(0, UPDATE, ENGINE[UPDATE] * US, step, NO_FRAME)
            if step in rests and not in_flight:
                self._lap(0, IDLE, 3000 * US, NO_STEP, NO_FRAME)
            else:
                self.time[0] += 9 * US  # the caller's

    def _step(self, step: int) -> int:
        """Plan and enqueue one step; return when its output will be there."""
        is_prefill = step == 0
        num_tokens = 300 if is_prefill else self.num_requests
        self.facts.append((step, self.num_requests, num_tokens, 2000, 2000, self.num_requests, 57))
        self._lap(0, SCHEDULE, ENGINE[SCHEDULE] * US, step, NO_FRAME)
        begin = self.time[0]
        if self.tp > 1:
            self.time[0] += 5 * US
            self._send(step)
            self._push(0, WIRE, CPU, begin, self.time[0], step, self.frame)
        enqueued = self._receive(step, list(LAPS[self.runner]))
        if not self.has_gpu:
            return self.time[0]
        begins = [
            max(at, free + BETWEEN_GRAPHS_US * US)
            for at, free in zip(enqueued, self.gpu_free, strict=True)
        ]
        end = max(begins) + sum(GPU_PARTS_US) * US  # the sums keep the ranks together
        for rank, at in enumerate(begins):
            self._gpu_work(rank, step, at, end)
        return end

    def _gpu_work(self, rank: int, step: int, begin: int, end: int) -> None:
        first_us, _, sample_us = GPU_PARTS_US
        forward, head = begin + first_us * US, end - sample_us * US
        self._push(rank, GPU_FIRST[self.runner], GPU, begin, forward, step, self.frame)
        self._push(rank, FORWARD, GPU, forward, head, step, self.frame)
        self._push(rank, SAMPLE, GPU, head, end, step, self.frame)
        if self.tp > 1:
            for part in (3, 8):
                at = forward + (head - forward) * part // 10
                self._push(rank, ALL_REDUCE, GPU, at, at + 60 * US, step, self.frame)
            self._push(rank, EXCHANGE, GPU, end - 20 * US, end - 8 * US, step, self.frame)
        self.gpu_free[rank] = end

    def _send(self, step: int) -> None:
        if self.tp == 1:
            return
        self.frame += 1
        begin = self.time[0]
        self.time[0] += ENGINE[SEND] * US
        self._push(0, SEND, CPU, begin, self.time[0], step, self.frame)
        for rank in range(1, self.tp):
            # a rank is woken while rank 0 is still in send()
            begin = max(self.time[rank], self.time[0] - 6 * US + rank * 9 * US)
            self._push(rank, RECEIVE, CPU, begin, begin + 20 * US, NO_STEP, self.frame)
            at = begin + 9 * US
            self._push(rank, ACK, CPU, at, at, NO_STEP, self.frame)
            self.time[rank] = begin + 20 * US

    def _receive(self, step: int, laps: list[tuple[int, int]]) -> list[int]:
        """Make a call on every rank; return when each has enqueued the GPU's work."""
        enqueued = []
        for rank in range(self.tp):
            begin = self.time[rank]
            at = begin
            for name, us in laps:
                if name == GRAPH and not self.has_gpu:
                    self._cpu_work(rank, step)
                    continue
                self._lap(rank, name, us * US + rank * US, step, self.frame)
                if name == GRAPH:
                    at = self.time[rank] - 8 * US  # the launch is not its lap's very last
            enqueued.append(at)
            if self.tp > 1:
                self._push(rank, RUN, CPU, begin, self.time[rank], step, self.frame)
        if not self.has_gpu and laps:
            self.time = [max(self.time)] * self.tp  # the exchange keeps them together
        return enqueued

    def _cpu_work(self, rank: int, step: int) -> None:
        begin = self.time[rank]
        self._lap(rank, FORWARD, 900 * US, step, self.frame)
        if self.tp > 1:
            at = begin + 200 * US
            self._push(rank, ALL_REDUCE, CPU, at, at + 90 * US, step, self.frame)
        self._lap(rank, SAMPLE, 120 * US, step, self.frame)

    def _lap(self, rank: int, name: int, ns: int, step: int, frame: int) -> None:
        begin = self.time[rank]
        self.time[rank] += ns
        self._push(rank, name, CPU, begin, self.time[rank], step, frame)

    def _push(self, rank: int, *words: int) -> None:
        self.rows[rank].append(words)


def write_synthetic(
    folder: Path,
    runner: str = "v2",
    *,
    tp: int = 2,
    has_gpu: bool = True,
    num_steps: int = 40,
    rest_after: Iterable[int] = (),
    head: Mapping[str, Any] | None = None,
    num_lost: int = 0,
) -> list[RankSpans]:
    """Write a run's rank-N.jsonl into a folder, and return what was in them."""
    synthetic = Synthetic(runner, tp, has_gpu=has_gpu)
    synthetic.run(num_steps, rest_after)
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "time": "2026-01-01T00:00:00+00:00",
        "commit": "0123456789ab",
        "machine": {"gpus": ["a GPU of the tests"] * tp if has_gpu else [], "cpu": "a CPU"},
        "config": {"model": "synthetic", "async_depth": 1 if runner == "v1" else 2},
    }
    trace = Trace(str(folder), {**about, **(head or {})})
    device = "cuda" if has_gpu else "cpu"
    config = make_config(tp, runner=runner, device=device, trace=trace)
    ranks = []
    for rank in range(tp):
        ends = [row[3] for row in synthetic.rows[rank]]
        ranks.append(
            RankSpans(
                rank=rank,
                words=np.array(synthetic.rows[rank], np.int64).tobytes(),
                fact_words=np.array(synthetic.facts if rank == 0 else [], np.int64).tobytes(),
                num_lost=num_lost,
                taken_ns=max(ends),
                anchors=((0, START_NS, 4000), (10**9, START_NS + 10**9, 3000)) if has_gpu else (),
                notes=(),
            )
        )
        write_trace(config, ranks[-1])
    return ranks
