"""The matrix kernel of few rows keeps its weights in registers, as its docstring says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.limit(120)
def test_no_matrix_goes_through_shared_memory_and_nothing_spills(tmp_path: Path) -> None:
    # A process of its own: in this one, Triton may already be set to interpret.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(FOLDER.parents[1]), str(FOLDER)]),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(FOLDER / "compile_few_rows.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 8
    for wanted, kernel in zip(lines[::2], lines[1::2], strict=True):
        assert kernel["name"] == "dot_kernel"
        assert kernel["spilled"] == 0, kernel
        assert kernel["shared"] <= wanted["meeting"], "a weight or x takes the long way"
