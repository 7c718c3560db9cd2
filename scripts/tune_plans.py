"""The plans of few rows that scripts/tune.py measures, for a shape and a row count."""

from __future__ import annotations

from itertools import product

from nanorunner.kernels.few_rows_plans import CUBLAS, DOT, GATED, PLAIN, ROWS, FewRowsPlan
from nanorunner.kernels.triton_support import next_power_of_two

LIBRARY = FewRowsPlan(CUBLAS, is_fused=False)
PROCESSORS = 132  # an H200's: which plans are tried depends on it, not which one wins
MAX_DOTS = 9
MAX_SPLIT_DOTS = 2
MAX_STEPS = 24  # they are unrolled


def candidates(op: str, rows: int, num_out: int, num_in: int) -> list[FewRowsPlan]:
    """Return the plans worth a measurement, the likeliest first."""
    halves = 2 if op == GATED else 1
    whole = next_power_of_two(num_in)
    plans = [LIBRARY]
    if rows <= 4:
        in_tiles = [whole] if whole <= 4096 else [4096, 2048]
        if rows == 1 and num_in >= 2048:
            in_tiles.append(1024)
        for in_tile in in_tiles:
            for elements in (8192, 16384, 4096) if rows == 1 else (8192, 16384):
                for per_thread in (64, 32) if rows == 1 else (64,):
                    out_tile = max(elements // halves // in_tile, 1)
                    warps = max(out_tile * in_tile * halves // per_thread // 32, 1)
                    if warps <= 16:
                        plans.append(FewRowsPlan(ROWS, out_tile, in_tile, 1, warps))
    shapes = dot_shapes(op, rows, num_out // halves, num_in)
    if rows == 1:
        shapes = shapes[:4]
    for shape in shapes:
        # Every program norms all of x again: not where that is more than a program's weights.
        if op == PLAIN or rows * num_in <= 32768:
            plans.append(FewRowsPlan(DOT, *shape))
        if op != PLAIN and rows > 1 and shape[2] == 1:
            plans.append(FewRowsPlan(DOT, *shape, is_fused=False))
    return list(dict.fromkeys(plans))


def dot_shapes(op: str, rows: int, num_out: int, num_in: int) -> list[tuple[int, int, int, int]]:
    """Return (out_tile, in_tile, num_splits, num_warps) of dots that fit the registers.

    num_out counts one half's rows. Whole columns and a program for every processor come first.
    """
    halves = 2 if op == GATED else 1
    found = []
    for num_warps, out_tile, splits in product((8, 4, 16), (16, 32, 8, 64), (1, 2, 4)):
        programs = -(-num_out // out_tile) * splits
        # Of 8 rows of weight the program's x makes the instruction's 16 lines, of more they do.
        row_tile = 8 if rows <= 8 and out_tile >= 16 else 16
        # A share has but a share of a gate; the shares meet in another launch.
        is_split_in_vain = splits > 1 and (op != PLAIN or programs > 2 * PROCESSORS)
        if is_split_in_vain or not 60 <= programs <= 2048 or out_tile * row_tile * halves > 1024:
            continue
        columns = -(-num_in // splits)
        fitting = []
        for depth in (8, 4, 2, 1):
            in_tile = 32 * num_warps * depth
            steps = -(-columns // in_tile)
            words = out_tile * depth // 2 * halves  # registers of a step's weights, a thread
            # Of 16 warps a thread has 128 registers in all, and two steps lie in them.
            most = 64 if steps == 1 else 32 if num_warps < 16 else 16
            if 16 <= words <= most and steps <= MAX_STEPS and steps * in_tile < 1.4 * columns:
                fitting.append((out_tile, in_tile, splits, num_warps))
        found += [
            (splits, programs < 0.9 * PROCESSORS, i, shape) for i, shape in enumerate(fitting)
        ]
    found.sort(key=lambda item: item[:3])  # stable: the order of the loops within
    unsplit = [shape for splits, *_, shape in found if splits == 1]
    split = [shape for splits, *_, shape in found if splits > 1]
    return unsplit[:MAX_DOTS] + split[:MAX_SPLIT_DOTS]
