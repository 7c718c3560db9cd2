"""Where a number comes from: the machine and the versions; code_version.py says which code."""

from __future__ import annotations

import platform
import re
from typing import Any

import psutil
import torch

from nanorunner.bench.environment import cpu_name, driver_version, package_version
from nanorunner.machine import usable_cores

PACKAGES = ("nanorunner", "torch", "triton", "flash-attn", "numpy")


def describe_machine() -> dict[str, Any]:
    """Return what a reader must know to repeat a measurement; nothing that names one host."""
    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "platform": f"{platform.system()} {_kernel_version()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {
            **{name: package_version(name) for name in PACKAGES},
            "nccl": _nccl_version(),
        },
    }


def _nccl_version() -> str | None:
    """Return the version of the NCCL that torch brings, None for a torch without one."""
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return None
    nccl: Any = torch.cuda.nccl  # its functions have no types
    return ".".join(map(str, nccl.version()))


def _kernel_version() -> str:
    """Return the kernel's number alone; what follows it names one host's own build."""
    found = re.match(r"[\d.]+", platform.release())
    return found[0].rstrip(".") if found else platform.release()
