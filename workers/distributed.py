"""What the ranks say to each other's tensors: all-reduce, gather, and how to stop mid-sentence.

The process group is made directly, not by init_process_group: rank 0 is the user's own process,
which may have a default group of its own or hold two engines at once, and a group that failed must
leave nothing global behind. NCCL on GPUs, gloo over the loopback on CPUs: same calls, same order.
Small tensors go another way: on GPUs through peer memory (peer_reducer.py), where those allow it,
on CPUs through memory that the ranks share (shared_sums.py).
Ranks that share a GPU meet in host memory (host_relay.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from nanorunner.kernels.peer_all_reduce import sum_in_rank_order
from nanorunner.kernels.rms_norm import add_rms_norm
from nanorunner.workers.host_relay import HostRelay
from nanorunner.workers.peer_memory import PeerMemoryUnavailable
from nanorunner.workers.peer_reducer import PeerReducer
from nanorunner.workers.shared_sums import SharedSums, SharedSumsUnavailable

AUTO, NCCL, PEER = "auto", "nccl", "peer"  # who sums small tensors on GPUs
GIVE_UP_AFTER_S = 3600.0  # far longer than any step may take, and than a job is stopped for
# Our watcher decides when a peer is dead and aborts. torch's own handling would end the process,
# and rank 0's process belongs to the user.
NCCL_QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "NCCL_NVLS_ENABLE": "0",  # no NVLink multicast: a crash in it can take the whole fabric down
}

logger = logging.getLogger("nanorunner")


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
        all_reduce: str = NCCL,
        give_up_after_s: float = GIVE_UP_AFTER_S,
        shares_gpu: bool = False,
    ) -> None:
        """Meet the other ranks; waits as long as the store does.

        all_reduce: on GPUs, AUTO sends small tensors through peer memory if that works and says in
        the log if not, PEER raises PeerMemoryUnavailable if not. give_up_after_s: how long a kernel
        waits there for another rank's data. shares_gpu: the device is the other ranks' too.
        """
        self.rank = rank
        self.tp = tp
        self.device = device
        # The libraries add in an order that follows from a tensor's size, so from the batch.
        self._sums_in_rank_order = sums_in_rank_order and tp > 1
        self._group: Any = None  # a ProcessGroupGloo, ProcessGroupNCCL or HostRelay
        self.peers: PeerReducer | None = None
        self._quick: PeerReducer | SharedSums | None = None  # the way of small tensors
        if tp == 1:
            return
        if store is None:
            raise ValueError(f"tp {tp} needs a store for the ranks to meet at")
        timeout = timedelta(seconds=timeout_s)
        has_gpu = device.type == "cuda" and not shares_gpu
        if has_gpu:
            self._group = _nccl_group(store, rank, tp, device, timeout)
        elif shares_gpu:
            gloo = _gloo_group(store, rank, tp, timeout)
            self._group = HostRelay(gloo, device, give_up_after_s)
        else:
            self._group = _gloo_group(store, rank, tp, timeout)
            self._quick = self._open_shared_sums(store, give_up_after_s)
        # the first collective connects the ranks: better here than inside a measured step
        self._reduce(torch.zeros(1, device=device), dist.ReduceOp.SUM)
        if has_gpu and all_reduce != NCCL:
            self._quick = self.peers = self._open_peers(store, all_reduce, give_up_after_s)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over the ranks, in place, and return it."""
        if self._quick is not None and self._quick.try_sum(x):
            return x
        if self._sums_in_rank_order:
            return x.copy_(sum_in_rank_order(self.all_gather(x[None], dim=0).unbind()))
        return self._reduce(x, dist.ReduceOp.SUM)

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add the sum of x over the ranks to residual in place, and return the norm of that.

        x and residual are [n, hidden], weight is [hidden]; what is in x afterwards is not said.
        """
        # The fused kernel adds squares up in an order of its own, and serves small batches alone.
        if self._quick is not None and not self._sums_in_rank_order:
            normed = self._quick.try_add_rms_norm(x, residual, weight, eps)
            if normed is not None:
                return normed
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum of x over the ranks, in place."""
        if self._quick is not None and self._quick.try_max(x):
            return x
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

    def check(self) -> None:
        """Raise RuntimeError when a kernel of this rank has given up waiting for another rank.

        For whoever reads results: those of a graph replay come from no call that could raise.
        """
        if self._quick is not None:
            self._quick.check()

    def abort(self) -> None:
        """Make a collective that waits for a dead peer return; called from the watcher's thread.

        Kernels and shared_sums.py wait until told; gloo notices by itself when a peer's socket
        closes, so killing the peers is enough there.
        """
        quick, group = self._quick, self._group  # close() may take them away meanwhile
        if quick is not None:
            quick.abort()
        if group is not None and self.device.type == "cuda":
            group.abort()

    def close(self) -> None:
        """Leave the group; a second call does nothing. Legal only after the last collective."""
        quick, self._quick, self.peers = self._quick, None, None
        if quick is not None:
            quick.close()
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            group.abort()  # shutdown() would wait for peers, which may already have left

    def _open_shared_sums(self, store: Store, give_up_after_s: float) -> SharedSums | None:
        """Return the way through the host's memory, on all ranks or on none."""
        try:
            return SharedSums(store, self.rank, self.tp, give_up_after_s)
        except SharedSumsUnavailable as error:
            if self.rank == 0:
                logger.warning("all-reduce: gloo alone, as there is no shared memory: %s", error)
            return None

    def _open_peers(self, store: Store, wanted: str, give_up_after_s: float) -> PeerReducer | None:
        """Return the way through peer memory, on all ranks or on none."""
        try:
            peers = PeerReducer(store, self.rank, self.tp, self.device, give_up_after_s)
        except PeerMemoryUnavailable as error:
            if wanted == PEER:
                raise
            if self.rank == 0:
                logger.warning("all-reduce: NCCL alone, as there is no peer memory: %s", error)
            return None
        if self.rank == 0:
            logger.info(
                "all-reduce: peer memory, one shot up to %d KiB, two up to %d KiB; NCCL above",
                peers.sizes.one_shot >> 10,
                max(peers.sizes) >> 10,
            )
        return peers


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
