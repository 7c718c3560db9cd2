"""A runner without a model whose steps meet in a real collective."""

from __future__ import annotations

import os
import time

import torch

from nanorunner.workers.device import Download
from nanorunner.workers.distributed import Group
from nanorunner.workers.messages import RunnerConfig

WITH_REPLY = frozenset({"pid", "num_threads", "close"})
METHODS = WITH_REPLY | {"meet", "meet_late", "raise_before_meeting"}


class GlooRunner:
    """Every method but pid and close needs all ranks at once."""

    def __init__(self, rank: int, group: Group) -> None:
        self.rank = rank
        self.group = group

    def meet(self, num_bytes: int) -> float:
        """Return the sum of rank + 1 over the ranks."""
        x = torch.full((num_bytes // 4,), float(self.rank + 1), device=self.group.device)
        values = Download(self.group.all_reduce(x)).result(timeout_s=60.0)
        return float(values[-1])

    def meet_late(self, late_rank: int, seconds: float) -> float:
        if self.rank == late_rank:
            time.sleep(seconds)
        return self.meet(4)

    def raise_before_meeting(self, rank: int) -> float:
        if self.rank == rank:
            raise ArithmeticError("the runner lost count")
        return self.meet(4)

    def pid(self) -> int:
        return os.getpid()

    def num_threads(self) -> int:
        return torch.get_num_threads()

    def close(self) -> None:
        self.group.close()


def make_runner(config: RunnerConfig, rank: int, group: Group) -> GlooRunner:
    """Return the runner, unless this rank is the one that DUMMY_FAIL_AT_LOAD names."""
    if os.environ.get("DUMMY_FAIL_AT_LOAD") == str(rank):
        raise MemoryError("the runner has no memory")
    return GlooRunner(rank, group)
