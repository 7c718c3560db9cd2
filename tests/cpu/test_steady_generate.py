"""A steady step of LLM.generate costs rank 0's Python the same for two requests and for many."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from steady_generate_meter import FEW, MANY

pytestmark = pytest.mark.beside

METER = Path(__file__).with_name("steady_generate_meter.py")
TIMEOUT_S = 280.0

Counts = dict[int, list[int]]  # number of prompts -> bytecodes of the steady steps


@pytest.fixture(scope="module")
def counts() -> dict[str, Counts]:
    done = subprocess.run(
        [sys.executable, str(METER)], check=True, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return {kind: {int(n): c for n, c in runs.items()} for kind, runs in found.items()}


def test_a_steady_step_of_generate_looks_at_no_request(counts: dict[str, Counts]) -> None:
    generate = counts["generate"]
    assert generate[FEW] == generate[MANY]
    # one more question, whether there is room for those that wait, but none of each of them
    assert max(generate[3 * MANY]) < min(generate[MANY]) + MANY


def test_the_meter_sees_the_loop_of_a_run_that_streams(counts: dict[str, Counts]) -> None:
    assert min(counts["stream"][MANY]) > max(counts["stream"][FEW]) + MANY
