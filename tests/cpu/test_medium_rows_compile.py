"""The kernels of medium rows read nothing but weights before their wait, and spill nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compiling_process import run_compiling

pytestmark = pytest.mark.beside

SHARED_LIMIT_BYTES = 227 * 1024  # what one thread block may have on Hopper
CASES = 25


@pytest.mark.slow
def test_weights_alone_are_read_before_the_wait_and_nothing_spills(tmp_path: Path) -> None:
    printed = run_compiling("compile_medium_rows.py", cache=tmp_path, timeout_s=280)
    lines = [json.loads(line) for line in printed.splitlines()]
    kernels = [line for line in lines if "name" in line]
    wanted = [line for line in lines if "name" not in line]
    tiles = [kernel for kernel in kernels if kernel["name"] == "tiles_kernel"]
    assert len(tiles) == len(wanted) == CASES
    for kernel, properties in zip(tiles, wanted, strict=True):
        assert kernel | properties == kernel
    assert {kernel["name"] for kernel in kernels} == {
        "tiles_kernel",
        "join_kernel",
        "join_norm_kernel",
        "norm_kernel",  # few rows'
    }
    assert {kernel["is_late"] for kernel in kernels if kernel["name"] == "join_kernel"} == {
        True,
        False,
    }
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_LIMIT_BYTES, kernel
        assert kernel["spilled"] == 0, kernel
