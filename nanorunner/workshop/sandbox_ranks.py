"""Ranks as threads of one process: enough to try a collective, with a limit on every wait.

run_ranks(tp, function)   function(rank) on tp threads -> each one's result, or the first error
SandboxGroup              all_reduce, as workers/distributed.py's Group has it
SandboxRing               packets from rank to rank, as a peer-memory ring carries them
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from nanorunner.kernels.peer_all_reduce import sum_in_rank_order
from nanorunner.kernels.rms_norm import add_rms_norm

PATIENCE_S = 10.0  # what takes longer waits for something that never comes


def run_ranks(tp: int, function: Callable[[int], Any]) -> list[Any]:
    """Return function(rank) of every rank; raise what the first rank that failed has raised."""
    results: list[Any] = [None] * tp
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except (Exception, SystemExit) as error:  # raised below, in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * PATIENCE_S)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"a rank did not end within {4 * PATIENCE_S:g} s")
    return results


class Meeting:
    """What the SandboxGroups of tp ranks share."""

    def __init__(self, tp: int) -> None:
        self.parts: list[torch.Tensor | None] = [None] * tp
        self.barrier = threading.Barrier(tp, timeout=PATIENCE_S)


class SandboxGroup:
    """One rank's end of a group; RuntimeError when the other ranks do not come."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self.tp = len(meeting.parts)
        self.num_all_reduces = 0
        self._meeting = meeting

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the ranks, in place, and return it."""
        self.num_all_reduces += 1
        meeting = self._meeting
        meeting.parts[self.rank] = x.clone()
        self._meet()
        parts = [part for part in meeting.parts if part is not None]
        total = sum_in_rank_order(parts)
        self._meet()  # nobody brings the next part before all have read this one
        return x.copy_(total)

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add the sum of x over the ranks to residual in place, and return the norm of that."""
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def _meet(self) -> None:
        try:
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError(
                f"rank {self.rank} waited {PATIENCE_S:g} s in an all-reduce; do all ranks make it?"
            ) from None


class SandboxRing:
    """One rank's view of the memory that all ranks can write to; rank and ranks as PeerRing's.

    A packet is a tensor. It waits where it was put until it is taken, in order; real packets wait
    in the reader's own memory (kernels/peer_ring.py).
    """

    def __init__(self, boxes: list[list[queue.Queue[torch.Tensor]]], rank: int) -> None:
        self.rank = rank
        self.ranks = len(boxes)
        self.num_posted = 0
        self._boxes = boxes  # [reader][sender]

    def post(self, reader: int, x: torch.Tensor) -> None:
        """Store a copy of x into the memory of rank `reader`."""
        self.num_posted += 1
        self._boxes[reader][self.rank].put(x.clone())

    def take(self, sender: int) -> torch.Tensor:
        """Return the oldest packet of `sender` that lies here; TimeoutError if none comes."""
        try:
            return self._boxes[self.rank][sender].get(timeout=PATIENCE_S)
        except queue.Empty:
            raise TimeoutError(
                f"rank {self.rank} waited {PATIENCE_S:g} s for a packet of rank {sender}"
            ) from None

    def num_waiting(self) -> int:
        """Return how many packets lie in this rank's memory."""
        return sum(box.qsize() for box in self._boxes[self.rank])


def make_groups(tp: int) -> list[SandboxGroup]:
    """Return the ends of one group."""
    meeting = Meeting(tp)
    return [SandboxGroup(meeting, rank) for rank in range(tp)]


def make_rings(ranks: int) -> list[SandboxRing]:
    """Return every rank's view of one ring."""
    boxes: list[list[queue.Queue[torch.Tensor]]] = [
        [queue.Queue() for _ in range(ranks)] for _ in range(ranks)
    ]
    return [SandboxRing(boxes, rank) for rank in range(ranks)]
