"""How the tests start ranks with the dummy runner, and find what is left of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import dummy_runner
import psutil

from nanorunner.launch import Ranks
from nanorunner.workers.messages import RunnerConfig
from nanorunner.workers.model_config import ModelConfig
from nanorunner.workshop import leftovers

TAG = "NANORUNNER_TEST_TAG"  # in the environment of rank 0, and so of every rank it starts
TIMEOUT_S = 100.0  # of each call and start, unless a test says otherwise
# A dead rank is named in half a second, and the fault lab checks the promise of 5. The tests ask
# that no timeout has ended the wait instead: a busy machine may stop each process for seconds.
DETECTION_S = 20.0


def make_config(tp: int, **changes: Any) -> RunnerConfig:
    """Return a configuration of which the wire reads only tp and the timeouts."""
    model = ModelConfig.__new__(ModelConfig)  # no field of it is read
    settings: dict[str, Any] = {
        "model": model,
        "checkpoint": "",
        "load_format": "dummy",
        "runner": "v1",
        "async_depth": 1,
        "tp": tp,
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch",
        "enforce_eager": True,
        "max_num_seqs": 1,
        "max_num_reqs": 8,
        "max_num_batched_tokens": 1,
        "max_model_len": 1,
        "gpu_memory_utilization": 0.9,
        "kv_cache_bytes": None,
        "num_blocks": None,
        "seed": 0,
        "step_timeout_s": TIMEOUT_S,
        "start_timeout_s": TIMEOUT_S,
    }
    return RunnerConfig(**(settings | changes))


def start_ranks(tp: int, **changes: Any) -> Ranks:
    """Start tp ranks with the dummy runner and no process group."""
    return Ranks(
        make_config(tp, **changes),
        "dummy_runner:make_runner",
        with_group=False,
        methods=dummy_runner.METHODS,
        methods_with_reply=dummy_runner.WITH_REPLY,
    )


@contextlib.contextmanager
def ranks_of(tp: int, **changes: Any) -> Iterator[Ranks]:
    """Start ranks for the time of the block."""
    ranks = start_ranks(tp, **changes)
    try:
        yield ranks
    finally:
        ranks.close()


def tagged_pids(tag: str) -> set[int]:
    """Return the live processes whose environment has the tag."""
    pids = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if is_alive and process.environ().get(TAG) == tag:
                pids.add(process.pid)
    return pids


def rank_pids(tag: str) -> set[int]:
    """Return the live ranks above 0 of a program with the tag; its other processes are left out."""
    pids = set()
    for pid in tagged_pids(tag):
        with contextlib.suppress(psutil.Error):
            if "nanorunner rank" in " ".join(psutil.Process(pid).cmdline()):
                pids.add(pid)
    return pids


def state(pid: int) -> str:
    """Return the process's state letter, "" when it has gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_until(is_true: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> float:
    """Wait until is_true(), with the limits of tests; return after how many seconds it was."""
    return leftovers.wait_until(is_true, timeout_s, "what a test waits for")


def with_tag(tag: str, **variables: str) -> dict[str, str]:
    """Return this process's environment with the tag, and with our modules importable."""
    path = os.pathsep.join([os.path.dirname(__file__), os.path.dirname(__file__) + "/../.."])
    return {**os.environ, "PYTHONPATH": path, TAG: tag, **variables}
