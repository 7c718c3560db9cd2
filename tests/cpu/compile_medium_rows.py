"""Compile the kernels of medium rows for Hopper, as compile_kernels.py does; a JSON line each.

PYTHONPATH=.:tests/cpu python tests/cpu/compile_medium_rows.py
"""

from __future__ import annotations

import json
import os
import re

import torch
from compile_kernels import compile_instead

from nanorunner.kernels.few_rows_plans import GATED, MAX_ROWS, NORM, PLAIN
from nanorunner.kernels.few_rows_triton import Norm, project_triton
from nanorunner.kernels.medium_rows import gate_up_silu, linear_add_norm, linear_medium
from nanorunner.kernels.medium_rows_plans import ADDED, TILES, MediumRowsPlan, tiles_of

# op, rows, out, in and the plan: each of the kernels and of their ways, at real sizes.
CASES = [
    (PLAIN, 64, 4096, 1024, MediumRowsPlan(TILES, 64, 32, 128, 1, 4, 4)),
    (PLAIN, 24, 4096, 1024, MediumRowsPlan(TILES, 32, 64, 128, 1, 4, 4, is_swapped=True)),
    (PLAIN, 64, 3072, 4096, MediumRowsPlan(TILES, 64, 128, 64, 4, 4, 4)),
    (ADDED, 64, 1024, 2048, MediumRowsPlan(TILES, 64, 64, 256, 8, 4, 1)),
    (ADDED, 128, 1024, 3072, MediumRowsPlan(TILES, 128, 64, 512, 6, 8, 1)),
    (ADDED, 48, 4096, 4096, MediumRowsPlan(TILES, 64, 128, 128, 4, 8, 4)),
    (GATED, 64, 6144, 1024, MediumRowsPlan(TILES, 64, 64, 128, 1, 4, 3)),
    (GATED, 128, 24576, 4096, MediumRowsPlan(TILES, 128, 256, 64, 1, 8, 2, is_swapped=True)),
    (GATED, 32, 3072, 1024, MediumRowsPlan(TILES, 32, 64, 512, 2, 8, 1)),
    (ADDED, 256, 1024, 3072, MediumRowsPlan(TILES, 128, 64, 64, 4, 4, 4)),
    (GATED, 192, 6144, 1024, MediumRowsPlan(TILES, 64, 128, 64, 1, 8, 6)),
    (GATED, 16, 24576, 4096, MediumRowsPlan(TILES, 16, 64, 128, 1, 4, 5, is_swapped=True)),
    (GATED, 8, 12288, 4096, MediumRowsPlan(TILES, 16, 128, 256, 1, 4, 2, is_swapped=True)),
    (NORM, 16, 6144, 4096, MediumRowsPlan(TILES, 16, 64, 256, 2, 4, 4, is_swapped=True)),
    (NORM, 2, 3072, 4096, MediumRowsPlan(TILES, 16, 64, 128, 1, 4, 8, is_swapped=True)),
    (PLAIN, 16, 4096, 4096, MediumRowsPlan(TILES, 16, 64, 1024, 4, 8, 1, is_swapped=True)),
    (NORM, 16, 6144, 4096, MediumRowsPlan(TILES, 16, 32, 256, 1, 4, 4)),
    # with a side tile
    (GATED, 64, 24576, 4096, MediumRowsPlan(TILES, 64, 192, 64, 1, 4, 6)),
    (GATED, 64, 24576, 4096, MediumRowsPlan(TILES, 64, 192, 64, 1, 8, 6)),
    (GATED, 64, 24576, 4096, MediumRowsPlan(TILES, 64, 192, 64, 1, 4, 6, is_swapped=True)),
    (PLAIN, 64, 6144, 4096, MediumRowsPlan(TILES, 64, 192, 128, 2, 4, 3)),
    (GATED, 64, 12288, 4096, MediumRowsPlan(TILES, 64, 96, 128, 1, 4, 4)),
    (ADDED, 128, 4096, 4096, MediumRowsPlan(TILES, 128, 192, 64, 4, 8, 5)),
    (PLAIN, 64, 6144, 4096, MediumRowsPlan(TILES, 64, 48, 128, 1, 4, 8)),
    (ADDED, 64, 1024, 2048, MediumRowsPlan(TILES, 64, 96, 256, 8, 8, 1)),
]


def compile_case(op: str, rows: int, num_out: int, num_in: int, plan: MediumRowsPlan) -> None:
    """Print what must be true of it, then compile what a projection launches."""
    num_tiles = sum(tile > 0 for tile in tiles_of(plan.out_tile))
    is_held = plan.in_tile * plan.num_splits >= num_in
    threads = 32 * plan.num_warps
    wanted = {
        # 16 bytes each, of the weight alone
        "loads_before": plan.out_tile * plan.in_tile // 8 // threads if is_held else 0,
        "fetches": 0 if is_held or not plan.is_early else num_tiles * (2 if op == GATED else 1),
        "has_wgmma": plan.row_tile >= 64 or plan.is_swapped,
        "has_copies": not is_held,
        # of the steps all are copies, ahead of the products; held is x
        "loads_after": plan.row_tile * plan.in_tile // 8 // threads if is_held else 0,
        # decode attention comes next and reads KV early; of parts, the join lets it start
        "is_late": op == NORM and plan.num_splits == 1,
    }
    print(json.dumps(wanted))
    x = torch.empty(rows, num_in, dtype=torch.bfloat16)
    weight, residual = x.new_empty(num_out, num_in), x.new_empty(rows, num_out)
    if rows <= MAX_ROWS:
        norm = None if op == PLAIN else Norm(None, x[0], 1e-6)
        project_triton(x, weight, None, plan, norm=norm, is_gated=op == GATED)
    elif op == GATED:
        gate_up_silu(x, weight, None, plan)
    elif op == ADDED:
        linear_add_norm(x, weight, None, residual, residual[0], 1e-6, plan)
    else:
        linear_medium(x, weight, None, plan)


def describe(ptx: str) -> dict[str, object]:
    """Return what a kernel does before it waits for the one in front, and with what it computes."""
    before, _, after = ptx.partition("griddepcontrol.wait")
    return {
        "loads_before": len(re.findall(r"\bld\.global|cp\.async\.c", before)),
        "fetches": before.count("cp.async.bulk.prefetch.L2.global"),
        "has_wgmma": "wgmma.mma_async" in after,
        "has_copies": "cp.async.c" in after,
        "loads_after": len(re.findall(r"\bld\.global", after)),
        "is_late": "griddepcontrol.launch_dependents" not in before,
    }


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ, "the interpreter compiles nothing"
    compile_instead(90, use_pdl=True, describe=describe)
    for case in CASES:
        compile_case(*case)
