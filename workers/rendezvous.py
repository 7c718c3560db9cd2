"""Where the ranks of one engine meet to form their process group, and how they share the cores."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nanorunner.workers.distributed import GIVE_UP_AFTER_S, Group
from nanorunner.workers.messages import RunnerConfig

HOST = "127.0.0.1"
# The watcher ends a collective whose peer is dead or late, and its clock leaves out the time when
# the job was stopped by Ctrl-Z. The group's own clock does not, so it must never strike first.
COLLECTIVE_TIMEOUT_S = 7 * 24 * 3600.0


def open_store(timeout_s: float) -> TCPStore:
    """Return the server that the ranks meet at, on a port that the system picked.

    Owner: rank 0. Rank 0 too joins as a client: so dropping the server ends every wait at it.
    """
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=_seconds(timeout_s))


def join_group(config: RunnerConfig, rank: int, port: int) -> Group:
    """Return this rank's Group; waits for the other ranks, at most config.start_timeout_s.

    Raises RuntimeError when the store has gone or the others have not come. At tp 1 there is nobody
    to meet and the port is not used.
    """
    device = torch.device("cpu")
    if config.device == "cuda":
        device = torch.device("cuda", config.gpu_of(rank))
        torch.cuda.set_device(device)  # before the group: it must not have to guess
    store = None
    if config.tp > 1:
        store = TCPStore(HOST, port, is_master=False, timeout=_seconds(config.start_timeout_s))
        # Wait here, where the end of the store frees us, until all have come: NCCL would wait in
        # its own bootstrap for a rank that died on its way, and nothing frees it from there.
        store.set(f"here/{rank}", "")
        store.wait([f"here/{other}" for other in range(config.tp)])
    return Group(
        store,
        rank,
        config.tp,
        device,
        COLLECTIVE_TIMEOUT_S,
        sums_in_rank_order=config.batch_invariant,
        all_reduce=config.all_reduce,
        # The watcher speaks first: its clock leaves out the time when the job was stopped.
        give_up_after_s=max(GIVE_UP_AFTER_S, 2 * config.step_timeout_s),
        shares_gpu=config.share_gpu,
    )


def share_cores(tp: int) -> int:
    """Give this rank its share of the cores; return how many threads torch had before.

    A user's OMP_NUM_THREADS is obeyed, and tp 1 keeps what torch chose.
    """
    before = torch.get_num_threads()
    if tp > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // tp))
    return before


def _seconds(timeout_s: float) -> timedelta:
    return timedelta(seconds=timeout_s)
