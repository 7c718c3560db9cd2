"""Compile the fused decode as a GPU that overlaps kernels launches it; a JSON line each.

PYTHONPATH=.:tests/cpu python tests/cpu/compile_fused_decode.py
"""

from __future__ import annotations

import json
import os
import re

import torch
from compile_kernels import H200_PROCESSORS, compile_instead
from fused_decode_cases import fused_case

from nanorunner.kernels.decode_attention import DecodePlan
from nanorunner.kernels.fused_decode import fused_decode_triton, plan_fused

# Heads, dtype, requests and whether it may read early: the default plans of each.
DEFAULTS = [
    ((16, 8, 128), torch.bfloat16, 8, True),
    ((32, 8, 128), torch.bfloat16, 8, True),
    ((16, 8, 128), torch.bfloat16, 32, False),
    ((16, 8, 128), torch.bfloat16, 64, False),
    ((32, 8, 128), torch.bfloat16, 64, False),
    ((9, 3, 64), torch.float16, 8, True),
    ((32, 32, 80), torch.bfloat16, 2, True),
    ((12, 12, 96), torch.bfloat16, 2, True),
    ((16, 4, 256), torch.bfloat16, 8, True),
    ((9, 3, 64), torch.float32, 8, True),
]
# What scripts/sweep_early.py also measures.
OTHERS = [
    ((num_heads, 8, 128), torch.bfloat16, 8, DecodePlan(8, 32, *rest))
    for num_heads in (16, 32)
    for rest in ((4, 2, 0, 64, 2), (2, 3, 0, 64, 1), (2, 2, 0, 0, 1))
]
# Heads that live at the edge. Before there were early fetches, those of 256 spilled 40 bytes.
MAX_SPILLED_BYTES = {256: 16, 96: 8}


def compile_case(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    num_reqs: int,
    plan: DecodePlan,
    reads_early: bool,
) -> None:
    """Print what must be true of it, then compile what a decode launches."""
    is_held = reads_early and plan.num_splits > 1
    wanted = {
        "fetches": 2 if plan.early_tokens else 0,
        # a length and a block, for the fetch alone; both kinds are read again
        "words_before": None if is_held else 2 if plan.early_tokens else 0,
        "reads_length_again": not is_held,
        "max_spilled": MAX_SPILLED_BYTES.get(heads[2], 0),
    }
    print(json.dumps(wanted))
    case = fused_case([9] * min(num_reqs, 2), heads, dtype)
    fused_decode_triton(**case.arguments, plan=plan, reads_early=reads_early)


def describe(ptx: str) -> dict[str, object]:
    """Return what a kernel does on either side of its wait for the one in front."""
    before, wait, after = ptx.partition("griddepcontrol.wait")
    assert wait, "a kernel that never waits"
    return {
        "fetches": before.count("cp.async.bulk.prefetch.L2.global"),
        "late_fetches": after.count("cp.async.bulk.prefetch.L2.global"),
        # Alone loads past the first cache are safe: a line there may be older than the kernels in
        # front. Angles and gains are constants.
        "words_before": len(re.findall(r"\bld\.global", before)),
        "uncached_words_before": len(re.findall(r"\bld\.global\.cg", before)),
        "reads_length_again": bool(re.search(r"\bld\.global\.cg\.b32", after)),
    }


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ, "the interpreter compiles nothing"
    compile_instead(90, use_pdl=True, describe=describe)
    for heads, dtype, num_reqs, reads_early in DEFAULTS:
        plan = plan_fused(num_reqs, *heads, dtype.itemsize, H200_PROCESSORS)
        compile_case(heads, dtype, num_reqs, plan, reads_early)
    for heads, dtype, num_reqs, plan in OTHERS:
        compile_case(heads, dtype, num_reqs, plan, True)
