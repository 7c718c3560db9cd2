"""What the ranks say to each other's tensors: all-reduce, gather, and how to stop mid-sentence.

The process group is made directly, not by init_process_group: rank 0 is the user's own process,
which may have a default group of its own or hold two engines at once, and a group that failed must
leave nothing global behind. NCCL on GPUs, gloo over the loopback on CPUs: same calls, same order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

# Our watcher decides when a peer is dead and aborts. torch's own handling would end the process,
# and rank 0's process belongs to the user.
NCCL_QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "NCCL_NVLS_ENABLE": "0",  # no NVLink multicast: a crash in it can take the whole fabric down
}


class Group:
    """The ranks of one engine. Owner: this rank's runner. At tp 1 every call is the identity."""

    def __init__(
        self,
        store: Store | None,
        rank: int,
        tp: int,
        device: torch.device,
        timeout_s: float,
        *,
        sums_in_rank_order: bool = False,
    ) -> None:
        self.rank = rank
        self.tp = tp
        self.device = device
        # The libraries add in an order that follows from a tensor's size, so from the batch.
        self._sums_in_rank_order = sums_in_rank_order and tp > 1
        self._group: Any = None  # a ProcessGroupGloo or ProcessGroupNCCL
        if tp == 1:
            return
        if store is None:
            raise ValueError(f"tp {tp} needs a store for the ranks to meet at")
        timeout = timedelta(seconds=timeout_s)
        if device.type == "cuda":
            self._group = _nccl_group(store, rank, tp, device, timeout)
        else:
            self._group = _gloo_group(store, rank, tp, timeout)
        # the first collective connects the ranks: better here than inside a measured step
        self.all_reduce(torch.zeros(1, device=device))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the ranks, in place, and return it."""
        if self._sums_in_rank_order:
            return x.copy_(_sum_in_order(self.all_gather(x[None], dim=0)))
        return self._reduce(x, dist.ReduceOp.SUM)

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum of x over the ranks, in place."""
        return self._reduce(x, dist.ReduceOp.MAX)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return every rank's x (equal shapes), in rank order, one behind the other along dim."""
        if self._group is None:
            return x
        parts = [torch.empty_like(x) for _ in range(self.tp)]
        work = self._group.allgather([parts], [x.contiguous()])
        work.wait()
        return torch.cat(parts, dim=dim)

    def _reduce(self, x: torch.Tensor, operation: Any) -> torch.Tensor:
        if self._group is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = operation
            options.asyncOp = False  # on the caller's stream, so it can be captured in a graph
            work = self._group.allreduce([x], options)
            if work is not None and not x.is_cuda:
                work.wait()
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Return every rank's x (equal shapes) in rank order on rank 0, None elsewhere."""
        if self._group is None:
            return [x]
        parts = [torch.empty_like(x) for _ in range(self.tp)] if self.rank == 0 else None
        options = dist.GatherOptions()
        options.rootRank = 0
        work = self._group.gather([parts] if parts is not None else [], [x], options)
        work.wait()
        return parts

    def abort(self) -> None:
        """Make a collective that waits for a dead peer return; called from the watcher's thread.

        NCCL kernels spin on the device until told; gloo notices by itself when a peer's socket
        closes, so killing the peers is enough there.
        """
        if self._group is not None and self.device.type == "cuda":
            self._group.abort()

    def close(self) -> None:
        """Leave the group; a second call does nothing. Legal only after the last collective."""
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            group.abort()  # shutdown() would wait for peers, which may already have left


def _sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """Return parts[0] + parts[1] + ... in float32, one after the other."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total


def _gloo_group(store: Store, rank: int, tp: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # by address, not by host name: many laptops cannot resolve their own
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    options._threads = 1
    return dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, tp, options)


def _nccl_group(store: Store, rank: int, tp: int, device: torch.device, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _environment(NCCL_QUIET):
        group = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, tp, options)
        group.eager_connect_single_device(device)
    return group


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables that NCCL reads once, and put the user's own back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
