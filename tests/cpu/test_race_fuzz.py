"""A short run of the race fuzzer: nothing is found, and a fault that is planted is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.limit(200)


def fuzz(*flags: str) -> tuple[int, dict[str, Any]]:
    """Run the script on the CPU; return its exit code and its last line, which is JSON."""
    command = [sys.executable, "scripts/race_fuzz.py", "--device", "cpu", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # also where nothing is installed
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=190
    )
    assert result.stdout, result.stderr
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return result.returncode, report


def test_asynchronous_steps_repeated_one_at_a_time_give_the_same_bits() -> None:
    code, report = fuzz("--steps", "300", "--seed", "2")
    assert (code, report["problem"], report["first_differences"]) == (0, "", [])
    assert report["same_memory_at_the_end"]
    assert report["steps_run"] >= 300
    assert all(report["events"].values()), report["events"]


def test_two_ranks_too() -> None:
    code, report = fuzz("--steps", "60", "--tp", "2")
    assert (code, report["problem"], report["first_differences"]) == (0, "", [])
    assert report["same_memory_at_the_end"]


def test_a_token_that_was_lost_on_its_way_is_found() -> None:
    code, report = fuzz("--steps", "60", "--plant", "token")
    assert code == 1
    assert report["different_steps"] > 0
    assert report["first_differences"][0].startswith("step 4")
    assert not report["same_memory_at_the_end"]
