"""Compile the matrix kernel of few rows for Hopper, as compile_kernels.py does; a JSON line each.

PYTHONPATH=.:tests/cpu python tests/cpu/compile_few_rows.py
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from compile_kernels import compile_instead

from nanorunner.kernels.few_rows_plans import DOT, GATED, NORM, PLAIN, FewRowsPlan
from nanorunner.kernels.few_rows_triton import Norm, project_triton

CASES = [
    (NORM, 8, 4096, 1024, FewRowsPlan(DOT, 16, 1024, 1, 8)),
    (PLAIN, 8, 1024, 2048, FewRowsPlan(DOT, 8, 2048, 1, 8)),
    (GATED, 8, 6144, 1024, FewRowsPlan(DOT, 16, 512, 1, 8)),
    (PLAIN, 16, 4096, 4096, FewRowsPlan(DOT, 32, 512, 1, 8)),
]


def compile_case(op: str, rows: int, num_out: int, num_in: int, plan: FewRowsPlan) -> None:
    """Print the shared bytes that the meeting of the warps needs, then compile."""
    halves = 2 if op == GATED else 1
    row_tile = 8 if rows <= 8 and plan.out_tile >= 16 else 16
    print(json.dumps({"meeting": 4 * plan.num_warps * plan.out_tile * row_tile * halves}))
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    x, weight = torch.empty(rows, num_in, **options), torch.empty(num_out, num_in, **options)
    norm = None if op == PLAIN else Norm(torch.empty_like(x), x[0], 1e-6)
    project_triton(x, weight, None, plan, norm=norm, is_gated=op == GATED)


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ, "the interpreter compiles nothing"
    compile_instead(90)
    for case in CASES:
        compile_case(*case)
