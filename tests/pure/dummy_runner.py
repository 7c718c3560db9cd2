"""A runner without a model: every rank's answer is known, and it can be made to fail."""

from __future__ import annotations

import os
import random
import time
from typing import Any

from nanorunner.workers.messages import RunnerConfig

WITH_REPLY = frozenset({"echo", "pid", "close", "count", "fail_at", "burn", "load_slowly"})
METHODS = WITH_REPLY | {"step", "sleep", "stay"}


class DummyRunner:
    """Counts its steps and sums their sizes, so that a lost or torn call shows."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.num_steps = 0
        self.num_bytes = 0
        self.longest_pause_s = float(os.environ.get("DUMMY_PAUSE_S", "0"))
        self.random = random.Random(rank)

    def step(self, number: int, data: bytes) -> int:
        if number != self.num_steps:
            raise RuntimeError(f"rank {self.rank}: step {number} after {self.num_steps - 1}")
        if data and (data[0], data[-1]) != (number % 251, number % 251):
            raise RuntimeError(f"rank {self.rank}: step {number} is torn")
        if self.rank > 0 and self.longest_pause_s and self.random.random() < 0.002:
            time.sleep(self.random.random() * self.longest_pause_s)
        self.num_steps += 1
        self.num_bytes += len(data)
        return self.num_steps

    def count(self) -> tuple[int, int]:
        return self.num_steps, self.num_bytes

    def echo(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float, only_rank: int | None = None) -> None:
        if only_rank in (None, self.rank):
            sign("sleep", self.rank)
            time.sleep(seconds)

    def stay(self) -> None:
        """Be in this call on rank 0 while the file that DUMMY_STAY names exists."""
        if self.rank == 0:
            sign("stay", self.rank)
            _wait_while_there(os.environ["DUMMY_STAY"])

    def burn(self, only_rank: int) -> None:
        """Compute for ever on one rank; the others wait for its reply."""
        if self.rank == only_rank:
            sign("burn", self.rank)
        while self.rank == only_rank:
            pass

    def load_slowly(self, seconds: float) -> None:
        """Be busy in Python on rank 0, as while loading weights; the others wait."""
        if self.rank == 0:
            sign("load_slowly", self.rank)
        end = time.monotonic() + seconds
        while self.rank == 0 and time.monotonic() < end:
            time.sleep(0.01)

    def fail_at(self, rank: int) -> None:
        if rank == self.rank:
            raise KeyError(f"the dummy fails on rank {rank}")

    def close(self) -> None:
        pass


def make_runner(config: RunnerConfig, rank: int, group: None) -> DummyRunner:
    """Wait while the file that DUMMY_HOLD names exists (the load phase), then return the runner."""
    sign("load", rank)
    hold = os.environ.get("DUMMY_HOLD", "")
    if rank > 0 and hold:
        _wait_while_there(hold)
    if os.environ.get("DUMMY_FAIL_AT_LOAD") == str(rank):
        raise MemoryError(f"the dummy has no memory at {time.monotonic()}")
    return DummyRunner(rank)


def sign(what: str, rank: int) -> None:
    """Say where a rank is, by a file WHAT-RANK in DUMMY_SIGNS's folder; its process is in there."""
    folder = os.environ.get("DUMMY_SIGNS", "")
    if folder:
        path = os.path.join(folder, f"{what}-{rank}")
        with open(f"{path}.new", "w") as file:
            file.write(str(os.getpid()))
        os.replace(f"{path}.new", path)  # so that whoever sees it can read it


def _wait_while_there(path: str) -> None:
    while os.path.exists(path):
        time.sleep(0.01)
