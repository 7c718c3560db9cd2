"""The machine and the versions that a result depends on, found without torch.

A sweep asks before it starts anything: a row of another GPU or another torch is not this one's.
provenance.py says the same of a measurement, and more, once torch is there.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DRIVER_FOLDER = Path("/proc/driver/nvidia")
VERSIONS = ("torch", "triton")
# Two results that differ in one of these are two points, not repeats of one.
ENVIRONMENT_NAMES = ("gpu", "cpu", *VERSIONS)

Environment = dict[str, str]


def environment() -> Environment:
    """Return this machine's ENVIRONMENT_NAMES, "" for what is not there."""
    return {
        "gpu": ", ".join(sorted(set(gpu_names()))),
        "cpu": cpu_name(),
        **{name: package_version(name) or "" for name in VERSIONS},
    }


def environment_of(machine: Mapping[str, Any], device: str) -> Environment:
    """Return the ENVIRONMENT_NAMES of a result's machine, "" for what it does not say.

    device: the GPU's name, "" for a measurement on the CPU, where a GPU beside it decides nothing.
    """
    versions = {**machine, **machine.get("versions", {})}
    found = {"gpu": device, "cpu": machine.get("cpu"), **{n: versions.get(n) for n in VERSIONS}}
    return {name: str(value or "") for name, value in found.items()}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return what differs in words: "torch 2.8.0 -> 2.9.0, gpu none -> NVIDIA H200"."""
    return ", ".join(
        f"{name} {before.get(name) or 'none'} -> {value or 'none'}"
        for name, value in now.items()
        if before.get(name, "") != value
    )


def gpu_names(folder: Path = DRIVER_FOLDER) -> list[str]:
    """Return the model of each NVIDIA GPU that the driver knows, in the order of its folders."""
    found = []
    for path in sorted(folder.glob("gpus/*/information")):
        if model := re.search(r"^Model:\s*(.+)$", _text(path), re.MULTILINE):
            found.append(model[1].strip())
    return found


def driver_version(folder: Path = DRIVER_FOLDER) -> str | None:
    """Return the NVIDIA driver's version, None where there is none."""
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", _text(folder / "version"))
    return found[1] if found else None


def cpu_name() -> str:
    """Return the CPU's model as the kernel names it."""
    text = _text(Path("/proc/cpuinfo"))
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor()


def package_version(name: str) -> str | None:
    """Return an installed package's version, None when it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _text(path: Path) -> str:
    """Return a file of the kernel's, "" where it is not there or not ours to read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
