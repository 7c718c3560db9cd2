"""The tiles of 2 to 256 rows that scripts/tune.py measures, and what each should take.

predicted_us is bytes over speeds: what crosses from L2 to the processors, what comes from memory,
what the busiest processor reads. It ranks the tiles, so that a shape costs few measurements; which
one wins is measured.

Up to 16 rows almost every tile is predicted to take what its weight takes, so more is tried of what
the prediction does not know: how long a piece of a row of the weight a program reads at once, how
many of them are on their way, and programs that fill the processors' last turn.
"""

from __future__ import annotations

from itertools import product

from nanorunner.kernels.few_rows_plans import GATED, MAX_ROWS, PLAIN
from nanorunner.kernels.medium_rows_plans import ADDED, LIBRARY, TILES, MediumRowsPlan
from nanorunner.kernels.triton_support import next_power_of_two

PROCESSORS = 132  # an H200's: which plans are tried depends on it, not which one wins
# Bytes a microsecond. Memory: a read-only stream. L2: from benchmarks/h200/tune-few-rows.json, 16
# rows, where bytes = programs * columns * (rows of weight + rows of x) * 2 and 1.2 us go to start
# and end: 5.4 to 6.1e6. One processor: a guess, half of what its port could take.
MEMORY, L2, PROCESSOR = 4.48e6, 5.9e6, 6e4
LAUNCH_US = 1.2
SHARED_BYTES = 220 << 10
PIPELINE_BYTES = 100 << 10  # two programs of a processor, the next kernel's one of them
LEAST_SHARE = 128
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
OUT_TILES = (32, 64, 128, 256)
NUM_GEOMETRIES = 5  # of them, the first two in more variants, the first three swapped too
FEW_ROW_TILE = 16
# Above so many rows x is what crosses from L2, and fewer tiles can win: half as many are tried.
MANY_ROWS = 128
MAX_MANY_PLANS = 12
MAX_WORDS = 160  # of a thread's 255 registers, for what is on its way
MAX_PRODUCT_WORDS = 128


def predicted_us(op: str, rows: int, num_out: int, num_in: int, plan: MediumRowsPlan) -> float:
    """Return microseconds of a projection, the norm after it as an ADDED one has it included."""
    share = -(-num_in // (plan.num_splits * plan.in_tile)) * plan.in_tile
    splits = -(-num_in // share)
    programs = -(-num_out // plan.out_tile) * splits * -(-rows // plan.row_tile)
    parts = 4 * splits * rows * num_out if splits > 1 else 2 * rows * num_out
    columns = min(share, num_in)
    read = 2 * columns * (plan.out_tile + min(rows, plan.row_tile))
    busiest = -(-programs // PROCESSORS) * (read + parts / programs)
    traffic = programs * read + 2 * parts
    us = max(2 * num_out * num_in / MEMORY, traffic / L2, busiest / PROCESSOR) + LAUNCH_US
    has_norm_before = rows <= MAX_ROWS and op != PLAIN
    num_launches = 1 + has_norm_before + (op == ADDED or splits > 1)
    return us + (num_launches - 1) * LAUNCH_US


def candidates(op: str, rows: int, num_out: int, num_in: int) -> list[MediumRowsPlan]:
    """Return the plans worth a measurement: the library, then tiles, the likeliest first."""
    if rows <= MAX_ROWS:
        return [LIBRARY, *few_row_plans(op, rows, num_out, num_in)]
    is_many = rows > MANY_ROWS
    plans: list[MediumRowsPlan] = []
    for i, plan in enumerate(geometries(op, rows, num_out, num_in)[:NUM_GEOMETRIES]):
        plans += variants(plan, num_in, is_best=i < (1 if is_many else 2))
        # The instruction's lines are 64: fewer rows of the weight would leave some empty.
        if i < 3 and plan.out_tile >= 64 and plan.row_tile <= 128:
            plans += variants(plan._replace(is_swapped=True), num_in, is_best=False)
    plans = list(dict.fromkeys(plans))
    return [LIBRARY, *(plans[:MAX_MANY_PLANS] if is_many else plans)]


def few_row_plans(op: str, rows: int, num_out: int, num_in: int) -> list[MediumRowsPlan]:
    """Return the tiles of 2 to 16 rows, the likeliest first."""
    plans = []
    for i, plan in enumerate(few_row_geometries(op, rows, num_out, num_in)[:3]):
        share = num_in // plan.num_splits
        held = plan._replace(in_tile=share, num_warps=8, num_stages=1, is_early=False)
        line_bytes = 2 * (plan.row_tile + plan.out_tile)
        # Where x comes first, both operands pass through registers.
        passing = plan.out_tile + (0 if plan.is_swapped else plan.row_tile)
        fits_registers = passing * share // 2 <= MAX_WORDS * 32 * held.num_warps
        fits_shared = line_bytes * share <= SHARED_BYTES
        if next_power_of_two(share) == share and fits_registers and fits_shared:
            plans.append(held)
        # Columns a step, and what is on its way: for one program a processor, two or three.
        shapes = [(256, SHARED_BYTES), (128, PIPELINE_BYTES), (256, PIPELINE_BYTES)]
        shapes += [(128, SHARED_BYTES // 3), (512, SHARED_BYTES), (64, PIPELINE_BYTES)]
        for in_tile, most_bytes in shapes[: 6 - 2 * i]:
            steps = share // in_tile
            num_stages = min(most_bytes // (line_bytes * in_tile), steps, 8)
            is_spilling = not plan.is_swapped and in_tile > 256  # with Triton 3.9
            if num_stages > 1 and share % in_tile == 0 and not is_spilling:
                plans.append(plan._replace(in_tile=in_tile, num_stages=num_stages))
        if i == 0 and plans[-1].is_early:
            plans.append(plans[-1]._replace(is_early=False))
    return list(dict.fromkeys(plans))


def few_row_geometries(op: str, rows: int, num_out: int, num_in: int) -> list[MediumRowsPlan]:
    """Return out_tile and splits by predicted time, then by how idle the last turn is.

    32 rows of the weight are too few for the instruction that takes it first: x comes first there.
    """
    most_splits = 2 if op == GATED else 8
    found = []
    for out_tile, splits in product((64, 128, 32), SPLITS):
        share, programs = num_in // splits, -(-num_out // out_tile) * splits
        is_whole = num_in % (splits * 64) == 0 and share >= 2 * LEAST_SHARE
        if is_whole and splits <= most_splits and 96 <= programs <= 8 * PROCESSORS:
            found.append(
                MediumRowsPlan(TILES, FEW_ROW_TILE, out_tile, 64, splits, is_swapped=out_tile >= 64)
            )

    def rank(plan: MediumRowsPlan) -> tuple[float, float]:
        programs = -(-num_out // plan.out_tile) * plan.num_splits
        turns = -(-programs // PROCESSORS)
        us = predicted_us(op, rows, num_out, num_in, plan)
        return round(us, 1), turns * PROCESSORS / programs

    return sorted(found, key=rank)


def geometries(op: str, rows: int, num_out: int, num_in: int) -> list[MediumRowsPlan]:
    """Return tiles and splits by predicted time; what a step is comes later."""
    row_tile = min(max(next_power_of_two(rows), 32), 128)
    row_tiles = (row_tile,) if row_tile == 64 else (row_tile, 64)
    most_splits = 2 if op == GATED else max(SPLITS)  # a gate's parts are twice as wide as it
    found = []
    for tile, out_tile, splits in product(row_tiles, OUT_TILES, SPLITS):
        programs = -(-num_out // out_tile) * splits * -(-rows // tile)
        is_whole = num_in % (splits * 64) == 0 and num_in // splits >= LEAST_SHARE
        if is_whole and splits <= most_splits and 48 <= programs <= 8 * PROCESSORS:
            found.append(MediumRowsPlan(TILES, tile, out_tile, 64, splits))
    return sorted(found, key=lambda plan: predicted_us(op, rows, num_out, num_in, plan))


def variants(plan: MediumRowsPlan, num_in: int, *, is_best: bool) -> list[MediumRowsPlan]:
    """Return a geometry's plans: the whole share held, then pipelines of steps."""
    share = num_in // plan.num_splits
    lines = plan.row_tile + plan.out_tile
    found = []
    if next_power_of_two(share) == share and 2 * lines * share <= SHARED_BYTES:
        # Below 64 lines the product is the older instruction's, and its operands stay in registers.
        is_kept = plan.row_tile < 64 and not plan.is_swapped
        passing = lines if is_kept else max(plan.row_tile, plan.out_tile)
        for num_warps in (4, 8):
            words = passing * share // 2 // (32 * num_warps)
            if words <= MAX_WORDS and fits(plan, num_warps):
                held = plan._replace(in_tile=share, num_warps=num_warps, num_stages=1)
                found.append(held._replace(is_early=False))
                break
    shapes = [(128, PIPELINE_BYTES, 4)]
    if is_best:
        shapes += [(64, PIPELINE_BYTES, 4), (128, SHARED_BYTES, 4), (128, PIPELINE_BYTES, 8)]
    for in_tile, most_bytes, num_warps in shapes:
        steps = share // in_tile
        num_stages = min(most_bytes // (2 * lines * in_tile), steps, 8)
        if num_stages < min(3, steps):  # a large tile: smaller steps, and a processor to itself
            in_tile, steps = 64, share // 64
            num_stages = min(SHARED_BYTES // (2 * lines * in_tile), steps, 8)
        if steps > 1 and num_stages > 1 and share % in_tile == 0:
            num_warps = num_warps if fits(plan, num_warps) else 8
            found.append(plan._replace(in_tile=in_tile, num_warps=num_warps, num_stages=num_stages))
    if is_best and found and found[-1].is_early:
        found.append(found[-1]._replace(is_early=False))
    return found


def fits(plan: MediumRowsPlan, num_warps: int) -> bool:
    """Return whether the product leaves half of the registers, and each line has its lane."""
    words = plan.row_tile * plan.out_tile // (32 * num_warps)
    return words <= MAX_PRODUCT_WORDS and plan.out_tile <= 32 * num_warps
