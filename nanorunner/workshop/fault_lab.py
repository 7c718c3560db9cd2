"""Where a fault is played: it starts ranks, listens to the log, and finds what is left afterwards.

with Lab(report, is_full) as lab:   a mark in the environment, names in /dev/shm noted
    ranks = lab.start(tp)           the wire alone, or the toy model when is_full
    ... the fault ...
-> every rank ended, then: which marked process and which name is still there
"""

from __future__ import annotations

import logging
import os
import uuid
from multiprocessing import resource_tracker
from types import TracebackType
from typing import Any

from nanorunner.launch import Ranks
from nanorunner.presets import load_preset
from nanorunner.workers.architectures import parse
from nanorunner.workers.messages import RunnerConfig
from nanorunner.workshop.fault_report import FaultReport
from nanorunner.workshop.fault_runner import LAB_METHODS, LAB_METHODS_WITH_REPLY
from nanorunner.workshop.leftovers import marked_pids, rank_pid, shared_names, wait_until
from nanorunner.workshop.open_engine import OpenEngine, start_engine

MARK = "NANORUNNER_FAULT_LAB"  # in the environment of everything that the lab starts
LAB_RUNNER = "nanorunner.workshop.fault_runner:make_runner"
SETTLE_S = 20.0  # how long killed processes may take to vanish; mostly a few milliseconds
TIMEOUT_S = 200.0  # of every start and step: far beyond what a fault may take
TOY = "tiny-llama"
NUM_KV_HEADS = 4  # not its own 1, so that each of two ranks has two that can be swapped


class Lab:
    """One fault's surroundings."""

    def __init__(self, report: FaultReport, *, is_full: bool = False) -> None:
        self.report = report
        self.is_full = is_full
        self.log: list[str] = []  # what the engine has logged
        self.mark = uuid.uuid4().hex
        self._ranks: list[Ranks] = []
        self.opened: list[OpenEngine] = []
        self._handler = _Listener(self.log)

    def __enter__(self) -> Lab:
        self._names = shared_names()
        resource_tracker.ensure_running()  # before the mark: it outlives the lab, and rightly so
        self._mark_before = os.environ.get(MARK)
        os.environ[MARK] = self.mark
        logger = logging.getLogger("nanorunner")
        self._level, self._handlers = logger.level, list(logger.handlers)
        self._propagates = logger.propagate
        logger.handlers[:] = [self._handler]
        logger.propagate = False
        logger.setLevel(logging.WARNING)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            for ranks in self._ranks:
                ranks.close()
            for opened in self.opened:
                opened.engine.close()
        finally:
            logger = logging.getLogger("nanorunner")
            logger.handlers[:], logger.propagate = self._handlers, self._propagates
            logger.setLevel(self._level)
            if self._mark_before is None:
                del os.environ[MARK]
            else:
                os.environ[MARK] = self._mark_before
        if error is None:
            self.report.left(self._leftovers())

    def start(self, tp: int) -> Ranks:
        """Return tp ranks: of the wire alone, or with the toy model when the lab is full."""
        if self.is_full:
            return self.start_model(tp).ranks
        ranks = Ranks(
            lab_config(tp),
            LAB_RUNNER,
            with_group=False,
            methods=LAB_METHODS,
            methods_with_reply=LAB_METHODS_WITH_REPLY,
        )
        self._ranks.append(ranks)
        self.report.did(f"started {tp} ranks on the real wire, with a runner that has no model")
        return ranks

    def start_model(self, tp: int) -> OpenEngine:
        """Return an engine with the toy model on tp ranks: the lab's own, if it has one."""
        for opened in self.opened:
            if opened.ranks.config.tp == tp:
                return opened
        opened = start_engine(
            lab_config(tp),
            runner=LAB_RUNNER,
            methods=LAB_METHODS,
            methods_with_reply=LAB_METHODS_WITH_REPLY,
        )
        self.opened.append(opened)
        self.report.did(f"started the toy model on {tp} rank(s)")
        return opened

    def pids(self) -> set[int]:
        """Return the processes that the lab has started and that live."""
        return marked_pids(MARK, self.mark) - {os.getpid()}

    def pid_of_rank(self, rank: int) -> int:
        """Return the process of a rank that the lab has started; TimeoutError if there is none."""
        wait_until(lambda: rank_pid(self.pids(), rank), SETTLE_S, f"the process of rank {rank}")
        return rank_pid(self.pids(), rank)

    def logged(self, words: str) -> str:
        """Return the first log line with these words, "" when there is none."""
        return next((line for line in self.log if words in line), "")

    def _leftovers(self) -> list[str]:
        """Wait for what is on its way out; return what stays."""

        def left() -> list[str]:
            names = sorted(shared_names() - self._names)
            return [f"process {pid}" for pid in sorted(self.pids())] + names

        try:
            wait_until(lambda: not left(), SETTLE_S, "processes and names to vanish")
        except TimeoutError:
            return left()
        return []


class _Listener(logging.Handler):
    """Keeps what the engine logs."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        self._lines.append(record.getMessage())


def lab_config(tp: int, **changes: Any) -> RunnerConfig:
    """Return the toy's configuration on a CPU; nothing is looked up, so no torch is needed."""
    settings: dict[str, Any] = {
        "model": parse({**load_preset(TOY), "num_key_value_heads": NUM_KV_HEADS}),
        "checkpoint": "",
        "load_format": "dummy",
        "runner": "v2",
        "async_depth": 2,
        "tp": tp,
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch",
        "enforce_eager": True,
        "max_num_seqs": 4,
        "max_num_reqs": 8,
        "max_num_batched_tokens": 128,
        "max_model_len": 128,
        "gpu_memory_utilization": 0.9,
        "kv_cache_bytes": None,
        "num_blocks": 8,
        "seed": 0,
        "step_timeout_s": TIMEOUT_S,
        "start_timeout_s": TIMEOUT_S,
    }
    return RunnerConfig(**(settings | changes))
