"""Where a number comes from: the machine and the versions; code_version.py says which code."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from nanorunner.machine import usable_cores

PACKAGES = ("nanorunner", "torch", "triton", "flash-attn", "numpy")


def describe_machine() -> dict[str, Any]:
    """Return what a reader must know to repeat a measurement; nothing that names one host."""
    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "platform": f"{platform.system()} {_kernel_version()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: package_version(name) for name in PACKAGES},
    }


def package_version(name: str) -> str | None:
    """Return an installed package's version, None when it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor()


def _kernel_version() -> str:
    """Return the kernel's number alone; what follows it names one host's own build."""
    found = re.match(r"[\d.]+", platform.release())
    return found[0].rstrip(".") if found else platform.release()
