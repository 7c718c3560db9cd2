"""A step in which no request has anything to tell makes no object for a request."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from steady_step_meter import NUM_REQUESTS

pytestmark = pytest.mark.beside

METER = Path(__file__).with_name("steady_step_meter.py")
TIMEOUT_S = 200.0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_steady_step_of_quiet_requests_makes_no_object_for_any_of_them(depth: int) -> None:
    done = subprocess.run(
        [sys.executable, str(METER), str(depth)],
        check=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    counts = json.loads(done.stdout)
    assert counts["true"] < NUM_REQUESTS // 2
    assert counts["false"] > 2 * NUM_REQUESTS, "the meter is broken"
