"""Every Triton kernel compiles for a Hopper GPU, without one, and keeps to its registers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compiling_process import run_compiling

pytestmark = pytest.mark.beside

FOLDER = Path(__file__).parent
SHARED_LIMIT_BYTES = 227 * 1024  # what one thread block may have on Hopper
# Of a draw, for each id and warp: Philox takes 36 and the noise 20. It is bound by them.
MAX_DRAW_INSTRUCTIONS = 90
WARPS, LANES = 4, 32  # of a program, of a warp
KERNELS = {
    "_rms_norm_kernel",
    "_silu_mul_kernel",
    "_qk_norm_rope_kv_write_kernel",
    "_decode_kernel",
    "fused_decode_kernel",
    "_combine_kernel",
    "_prefill_kernel",
    "hopper_prefill_kernel",
    "_best_of_tile",
    "_best_of_row",
    "_head_kernel",
    "_best_tile_kernel",
    "one_shot_kernel",
    "two_shot_kernel",
    "add_rms_norm_kernel",
    "max_kernel",
}


@pytest.mark.slow
@pytest.mark.limit(600)
def test_every_kernel_compiles_for_hopper_without_spilling(tmp_path: Path) -> None:
    printed = run_compiling("compile_kernels.py", "90", cache=tmp_path, timeout_s=580)
    lines = [json.loads(line) for line in printed.splitlines()]
    assert {line["name"] for line in lines} == KERNELS
    for line in lines:
        assert line["shared"] <= SHARED_LIMIT_BYTES, line
        if line["name"] == "hopper_prefill_kernel":
            # What lives from item to item may spill; of what a turn needs, one register does.
            assert len(line["spilled_in_loops"]) == 4, line
            assert sum(line["spilled_in_loops"]) <= 1, line
        else:
            assert line["spilled"] == 0, line
    rotations = [line for line in lines if line["name"] == "_qk_norm_rope_kv_write_kernel"]
    all_decodes = [line for line in lines if line["name"] == "_decode_kernel"]
    decodes = [line for line in all_decodes if line["stores_before"] == 0]
    assert rotations
    assert decodes
    # Behind a step's prompts they wait when all is done; so what stands there must be late.
    assert len(all_decodes) == 2 * len(decodes), "each plan in both its ways"
    assert {line["waits"] for line in all_decodes} == {1}
    for line in lines:
        if line["name"] in ("_prefill_kernel", "hopper_prefill_kernel"):
            early = line["loads_before"] + line["stores_before"]
            assert (line["waits"], line["is_late"], early) == (1, True, 0), line
    for line in rotations + decodes:  # the rule of kernels/pdl.py
        assert (line["waits"], line["stores_before"]) == (1, 0), line
    # Attention reads a length and a table before its wait, and nothing else; so what stands in
    # front of it, the rotation, must be late. What is read before a wait passes by the first cache.
    for line in all_decodes:
        assert line["loads_before"] == line["fresh_loads_before"], line
        assert (line["loads_before"] == 2) == (line in decodes), line
    for line in lines:
        if line["name"] in ("_rms_norm_kernel", "_silu_mul_kernel"):
            assert (line["waits"], line["loads_before"], line["stores_before"]) == (1, 0, 0), line
    assert all(line["is_late"] for line in rotations), "attention behind it reads too early"
    draws = [line for line in lines if line["name"] == "_best_of_tile"]
    assert {line["tile"] for line in draws} == {1024, 2048}, "gumbel_argmax's and sample_keys'"
    for line in draws:
        per_id = line["instructions"] / (line["tile"] / (WARPS * LANES))
        print(f"{per_id:.0f} instructions an id, tiles of {line['tile']}")
        assert 40 < per_id <= MAX_DRAW_INSTRUCTIONS, line
