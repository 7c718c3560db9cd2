"""What this machine has: GPUs, cores, memory, kernels' libraries. Read once, before any process.

resolve.py chooses by these facts and doctor.py prints them. Nothing here changes the machine; the
only trace is a CUDA context on GPU 0, which rank 0 needs anyway.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import psutil
import torch


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU as torch sees it (CUDA_VISIBLE_DEVICES respected)."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int | None  # None: not asked, since the answer costs a context on that GPU


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts that decide which settings can work here."""

    gpus: tuple[Gpu, ...]
    cuda_problem: str  # why there is no GPU; "" when there is one
    cores: int
    free_memory_bytes: int
    has_triton: bool
    has_flash_attn: bool


def probe() -> Machine:
    """Return this machine's facts."""
    gpus, problem = _probe_gpus()
    return Machine(
        gpus=gpus,
        cuda_problem=problem,
        cores=usable_cores(),
        free_memory_bytes=psutil.virtual_memory().available,
        has_triton=importlib.util.find_spec("triton") is not None,
        has_flash_attn=any(
            importlib.util.find_spec(name) is not None
            for name in ("flash_attn", "flash_attn_interface")
        ),
    )


def usable_cores() -> int:
    """Return how many cores this process may use: a container's share, where it says so."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _probe_gpus() -> tuple[tuple[Gpu, ...], str]:
    if torch.version.cuda is None:
        return (), f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return (), "no NVIDIA GPU was found"
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free = torch.cuda.mem_get_info(index)[0] if index == 0 else None
        capability = (properties.major, properties.minor)
        gpus.append(Gpu(properties.name, capability, properties.total_memory, free))
    return tuple(gpus), ""
