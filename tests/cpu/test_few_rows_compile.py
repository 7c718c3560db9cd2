"""The matrix kernel of few rows keeps its weights in registers, as its docstring says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compiling_process import run_compiling

pytestmark = pytest.mark.beside

FOLDER = Path(__file__).parent


@pytest.mark.slow
def test_no_matrix_goes_through_shared_memory_and_nothing_spills(tmp_path: Path) -> None:
    printed = run_compiling("compile_few_rows.py", cache=tmp_path, timeout_s=280)
    lines = [json.loads(line) for line in printed.splitlines()]
    assert len(lines) == 8
    for wanted, kernel in zip(lines[::2], lines[1::2], strict=True):
        assert kernel["name"] == "dot_kernel"
        assert kernel["spilled"] == 0, kernel
        assert kernel["shared"] <= wanted["meeting"], "a weight or x takes the long way"
