"""What speculation adds compiles for a Hopper GPU, without one, and keeps to its registers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from compiling_process import run_compiling

pytestmark = pytest.mark.beside

NUM_COMPILED = {
    "decode_inputs_kernel": 2,
    "mixed_inputs_kernel": 2,
    "_write_kernel": 2,
    "_ngram_kernel": 2,
    "accept_kernel": 2,
    "_penalise": 2,
}


@pytest.mark.slow
def test_every_kernel_of_speculation_compiles_without_spilling(tmp_path: Path) -> None:
    printed = run_compiling("compile_speculation.py", cache=tmp_path, timeout_s=280)
    lines = [json.loads(line) for line in printed.splitlines()]
    assert Counter(line["name"] for line in lines) == NUM_COMPILED
    for line in lines:
        assert line["spilled"] == 0, line
