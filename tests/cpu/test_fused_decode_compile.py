"""The fused decode fetches before its wait, believes nothing of it, and keeps to its registers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compiling_process import run_compiling

pytestmark = pytest.mark.beside

SHARED_LIMIT_BYTES = 227 * 1024  # what one thread block may have on Hopper
CASES = 16


@pytest.mark.slow
def test_early_fetches_come_before_the_wait_and_what_they_read_is_read_again(
    tmp_path: Path,
) -> None:
    printed = run_compiling("compile_fused_decode.py", cache=tmp_path, timeout_s=280)
    lines = [json.loads(line) for line in printed.splitlines()]
    kernels = [line for line in lines if "name" in line]
    fused = [kernel for kernel in kernels if kernel["name"] == "fused_decode_kernel"]
    wanted = [line for line in lines if "name" not in line]
    assert len(fused) == len(wanted) == CASES
    for kernel, properties in zip(fused, wanted, strict=True):
        assert kernel["shared"] <= SHARED_LIMIT_BYTES, kernel
        assert kernel["spilled"] <= properties["max_spilled"], kernel
        assert kernel["fetches"] == properties["fetches"], kernel
        assert kernel["late_fetches"] == 0, kernel
        assert kernel["reads_length_again"] == properties["reads_length_again"], kernel
        if properties["words_before"] is not None:
            assert kernel["words_before"] == properties["words_before"], kernel
            assert kernel["uncached_words_before"] == properties["words_before"], kernel
    assert {kernel["name"] for kernel in kernels} == {"fused_decode_kernel", "_combine_kernel"}
