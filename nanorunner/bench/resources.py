"""What a pass costs the machine: CPU cores and GPU time while it runs, and the most memory.

The GPU is sampled by a thread of its own through NVML, where Python's package for it is installed
(`pip install nvidia-ml-py`); the driver's figure covers the last sixth of a second to a second, so
a pass of less than a few seconds is judged by few samples, and their number is said.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from types import TracebackType
from typing import NamedTuple

import psutil
import torch

SAMPLE_EVERY_S = 0.2
STOP_WAIT_S = 10.0
GIB = 1 << 30


class PassResources(NamedTuple):
    """The values of RESOURCE_METRICS that could be had, and how many samples each has."""

    values: dict[str, float]
    samples: dict[str, int]
    gaps: dict[str, str]  # what could not be had -> why, as counters["not_counted"] says it


class ResourceMeter:
    """`with ResourceMeter(num_gpus) as meter:` round a pass; meter.read() after it."""

    def __init__(self, num_gpus: int) -> None:
        self._gpus = _GpuSampler(num_gpus) if num_gpus and has_nvml() else None
        self._cpu_s = self._seconds = 0.0

    def __enter__(self) -> ResourceMeter:
        if self._gpus is not None:
            self._gpus.start()
        self._begin_cpu_s, self._begin_s = _cpu_seconds(), time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._cpu_s = _cpu_seconds() - self._begin_cpu_s
        self._seconds = time.perf_counter() - self._begin_s
        if self._gpus is not None:
            self._gpus.stop()

    def read(self) -> PassResources:
        """Return what was measured, and by name what could not be."""
        values = {"cpu_cores": self._cpu_s / self._seconds}
        samples = {"cpu_cores": 1}
        if self._gpus is not None:
            busy, used, problem = self._gpus.read()
            if problem:  # a part of the pass would pass for the whole
                return PassResources(values, samples, {"GPU use": problem})
            if busy:
                values["gpu_busy_percent"] = sum(busy) / len(busy)
                values["gpu_memory_used_gib"] = max(used) / GIB
                samples |= {"gpu_busy_percent": len(busy), "gpu_memory_used_gib": len(used)}
        return PassResources(values, samples, {})


def has_nvml() -> bool:
    """Return whether the driver's figures can be read."""
    return importlib.util.find_spec("pynvml") is not None


def host_peak_gib() -> float:
    """Return the most memory that each of our processes has had resident, added up.

    Since each process began; a page that two of them share counts twice.
    """
    own = psutil.Process()
    pids = [own.pid, *(process.pid for process in own.children(recursive=True))]
    return sum(map(_peak_bytes, pids)) / GIB


class _GpuSampler(threading.Thread):
    """Reads use and memory of the first num_gpus GPUs until it is stopped."""

    def __init__(self, num_gpus: int) -> None:
        super().__init__(name="gpu sampler", daemon=True)
        self._num_gpus = num_gpus
        self._busy: list[float] = []
        self._used: list[float] = []
        self._over = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            while not self._over.wait(SAMPLE_EVERY_S):
                for index in range(self._num_gpus):
                    self._busy.append(torch.cuda.utilization(index))
                    self._used.append(torch.cuda.device_memory_used(index))
        except Exception as error:  # a thread has nobody to raise it to; read() says it
            self._error = error

    def stop(self) -> None:
        self._over.set()
        self.join(STOP_WAIT_S)

    def read(self) -> tuple[list[float], list[float], str]:
        """Return use in percent, memory in bytes, and what went wrong, "" for nothing."""
        if self._error is not None:
            return [], [], f"NVML could not be read: {self._error}"
        if self.is_alive():
            return [], [], f"NVML gave no answer within {STOP_WAIT_S:g} s"
        return self._busy, self._used, ""


def _cpu_seconds() -> float:
    """Return the CPU time of this process and all below it; theirs comes in ticks of 10 ms."""
    total = time.process_time()
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:  # a compiler that has just ended
            continue
        total += times.user + times.system
    return total


def _peak_bytes(pid: int) -> int:
    """Return VmHWM of a process, 0 when it has ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:
        return 0
    return 0
