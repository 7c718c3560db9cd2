"""Runs a script of this folder in a process in which Triton compiles, into a cache of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def run_compiling(script: str, *words: str, cache: Path, timeout_s: float) -> str:
    """Return what the script printed; fails when it ends badly or takes too long.

    A process of its own: in this one, Triton may already be set to interpret.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(FOLDER.parents[1]), str(FOLDER)]),
        "TRITON_CACHE_DIR": str(cache),
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(FOLDER / script), *words]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
