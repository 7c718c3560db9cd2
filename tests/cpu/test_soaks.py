"""A short run of each soak: the real engine killed in every phase, and several engines at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

pytestmark = [pytest.mark.slow, pytest.mark.limit(900)]  # half a minute each on two quiet cores


def test_every_phase_and_every_victim_of_a_kill() -> None:
    # what the errors say counts here; the usual bar, 5 s, is for a machine with nothing else to do
    report = _run("soak_kill.py", "--trials", "6", "--limit", "60")
    assert report["good"] == report["trials_run"] == 6


def test_engines_started_together_share_nothing_and_answer_alike() -> None:
    assert _run("soak_engines.py", "--engines", "2")["good"]


def _run(script: str, *flags: str) -> dict[str, Any]:
    """Run a script; return its last line, which is JSON."""
    result = subprocess.run(
        [sys.executable, str(SCRIPTS / script), *flags], capture_output=True, text=True, timeout=880
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return report
