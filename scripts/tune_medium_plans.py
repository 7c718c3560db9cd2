"""The tiles of 2 to 256 rows that scripts/tune.py measures, and what each should take.

predicted_us is bytes over speeds: what crosses from L2 to the processors, what comes from memory,
what the busiest processor reads. It ranks the tiles, so that a shape costs few measurements; which
one wins is measured.

A large tile has a processor to itself, so programs come in turns of as many as there are
processors, and a last turn of a few takes as long as one of them alone: gate_up of Qwen3-8B
[24576, 4096] at 64 rows took 57 us as 192 tiles of 128, 26 of them the second turn. So pairs of
tiles, whose out_tile is one and a half powers of two, are tried where they fill their turn.

Up to 16 rows almost every tile is predicted to take what its weight takes, so more is tried of what
the prediction does not know: how long a piece of a row of the weight a program reads at once, how
many of them are on their way, and programs that fill the processors' last turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product, zip_longest

from nanorunner.kernels.few_rows_plans import GATED, MAX_ROWS, PLAIN
from nanorunner.kernels.medium_rows_plans import ADDED, LIBRARY, TILES, MediumRowsPlan, tiles_of
from nanorunner.kernels.triton_support import next_power_of_two

PROCESSORS = 132  # an H200's: which plans are tried depends on it, not which one wins
# Bytes a microsecond. Memory: a read-only stream. L2: from benchmarks/h200/tune-few-rows.json, 16
# rows, where bytes = programs * columns * (rows of weight + rows of x) * 2 and 1.2 us go to start
# and end: 5.4 to 6.1e6. One processor: a tile of 128 with 64 rows of x, 1.57 MB, takes 26 us alone.
MEMORY, L2, PROCESSOR = 4.48e6, 5.9e6, 6e4
LAUNCH_US = 1.2
SHARED_BYTES = 220 << 10
PIPELINE_BYTES = 100 << 10  # two programs of a processor, the next kernel's one of them
LEAST_SHARE = 128
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
OUT_TILES = (32, 48, 64, 96, 128, 192, 256)
# Of single tiles, the first two in more variants, the first three swapped too.
NUM_GEOMETRIES = 5
MAX_SPLITS_OF_TILE = 2  # of those five: how the columns are shared matters less than the tile
NUM_PAIRS = 3  # geometries of pairs
LEAST_PAIR_PLANS = 2  # however many plans the single tiles have
FULL_TURN = 0.9  # which part of the processors is almost all
LIKELY = 1.05  # how much longer than the shortest is about as short
PAIR_TILES = (192, 96, 48)
MAX_FEW_PAIRS = 4  # plans of pairs at few rows
FIRST_TILES = (64, 128, 192)  # where the weight may be the instruction's first operand
FEW_ROW_TILE = 16
# Above so many rows x is what crosses from L2, and fewer tiles can win: fewer are tried.
MANY_ROWS = 128
MAX_PLANS, MAX_MANY_PLANS, MAX_FEW_PLANS = 25, 16, 17
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

    def us_at_once(count: int, most_on_one: int) -> float:
        """Return microseconds of `count` programs, of which a processor has most_on_one."""
        memory = 2 * num_out * num_in * count / programs / MEMORY
        traffic = count * (read + 2 * parts / programs)
        return max(memory, traffic / L2, most_on_one * (read + parts / programs) / PROCESSOR)

    if is_alone(plan):
        turns, rest = divmod(programs, PROCESSORS)
        us = turns * us_at_once(PROCESSORS, 1) + (us_at_once(rest, 1) if rest else 0.0)
    else:
        us = us_at_once(programs, -(-programs // PROCESSORS))
    us += LAUNCH_US
    has_norm_before = rows <= MAX_ROWS and op != PLAIN
    num_launches = 1 + has_norm_before + (op == ADDED or splits > 1)
    return us + (num_launches - 1) * LAUNCH_US


def is_alone(plan: MediumRowsPlan) -> bool:
    """Return whether a processor has no room for two programs of three steps of 128 columns."""
    return 2 * 3 * 2 * 128 * (plan.row_tile + plan.out_tile) > SHARED_BYTES


def candidates(op: str, rows: int, num_out: int, num_in: int) -> list[MediumRowsPlan]:
    """Return the plans worth a measurement: the library, then single tiles, then pairs."""
    if rows <= MAX_ROWS:
        return [LIBRARY, *few_row_plans(op, rows, num_out, num_in)]
    is_many = rows > MANY_ROWS
    singles, pairs = geometries(op, rows, num_out, num_in)
    is_idle = any(turn_filled(plan, rows, num_out) < FULL_TURN for plan in singles[:1])
    # Which pipeline: a question for where no single tile keeps the processors busy.
    depth = 3 if is_idle and not is_many else 1
    deep = [long_pipelines(plan, num_in)[:depth] for plan in pairs]
    of_pairs = in_turn(deep)
    if pairs and has_lines(pairs[0]):
        of_pairs += variants(pairs[0]._replace(is_swapped=True), num_in, is_best=False)
    plans: list[MediumRowsPlan] = []
    for i, plan in enumerate(singles):
        plans += variants(plan, num_in, is_best=i < (1 if is_many else 2))
        if i < 3 and has_lines(plan):
            plans += variants(plan._replace(is_swapped=True), num_in, is_best=False)
    plans = list(dict.fromkeys(plans))
    most = MAX_MANY_PLANS if is_many else MAX_PLANS
    of_pairs = of_pairs[: max(most - len(plans), LEAST_PAIR_PLANS)]
    return [LIBRARY, *plans[: most - len(of_pairs)], *of_pairs]


def has_lines(plan: MediumRowsPlan) -> bool:
    """Return whether each tile of the weight fills the instruction's 64 lines, and may be first."""
    return all(tile == 0 or tile >= 64 for tile in tiles_of(plan.out_tile))


def few_row_plans(op: str, rows: int, num_out: int, num_in: int) -> list[MediumRowsPlan]:
    """Return the tiles of 2 to 16 rows, the likeliest first."""
    plans, of_pairs = [], []
    singles = few_row_geometries(op, rows, num_out, num_in)
    if singles and not is_filling(singles[0], rows, num_out):
        of_pairs = few_row_pairs(op, rows, num_out, num_in)
    for i, plan in enumerate(singles[:3]):
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
    plans = list(dict.fromkeys(plans))
    return [*plans[: MAX_FEW_PLANS - len(of_pairs)], *of_pairs]


def few_row_pairs(op: str, rows: int, num_out: int, num_in: int) -> list[MediumRowsPlan]:
    """Return pairs of tiles that fill one turn: for where single tiles do not, or need more turns.

    192 rows of the weight are the instruction's first operand; of fewer, one tile of the pair would
    not fill it, so x comes first.
    """
    pairs = few_row_geometries(op, rows, num_out, num_in, PAIR_TILES)
    deep = []
    for plan in [plan for plan in pairs if is_filling(plan, rows, num_out)][:NUM_PAIRS]:
        share, line_bytes = num_in // plan.num_splits, 2 * (plan.row_tile + plan.out_tile)
        stages = {n: min(SHARED_BYTES // (line_bytes * n), share // n, 8) for n in (128, 256, 64)}
        deep.append(
            [
                plan._replace(in_tile=in_tile, num_stages=num_stages)
                for in_tile, num_stages in stages.items()
                if num_stages > 1 and share % in_tile == 0
            ]
        )
    return in_turn(deep)[:MAX_FEW_PAIRS]


def in_turn(plans: Iterable[Sequence[MediumRowsPlan]]) -> list[MediumRowsPlan]:
    """Return the first plan of each geometry, then the second of each, and so on."""
    return [plan for nth in zip_longest(*plans) for plan in nth if plan is not None]


def few_row_geometries(
    op: str, rows: int, num_out: int, num_in: int, tiles: Sequence[int] = (64, 128, 32)
) -> list[MediumRowsPlan]:
    """Return out_tile and splits by predicted time, then by how idle the last turn is.

    32 rows of the weight are too few for the instruction that takes it first: x comes first there.
    """
    most_splits = 2 if op == GATED else 8
    found = []
    for out_tile, splits in product(tiles, SPLITS):
        share, programs = num_in // splits, -(-num_out // out_tile) * splits
        is_whole = num_in % (splits * 64) == 0 and share >= 2 * LEAST_SHARE
        if is_whole and splits <= most_splits and 96 <= programs <= 8 * PROCESSORS:
            found.append(
                MediumRowsPlan(
                    TILES, FEW_ROW_TILE, out_tile, 64, splits, is_swapped=out_tile in FIRST_TILES
                )
            )

    def rank(plan: MediumRowsPlan) -> tuple[float, float]:
        programs = -(-num_out // plan.out_tile) * plan.num_splits
        turns = -(-programs // PROCESSORS)
        us = predicted_us(op, rows, num_out, num_in, plan)
        return round(us, 1), turns * PROCESSORS / programs

    return sorted(found, key=rank)


def geometries(
    op: str, rows: int, num_out: int, num_in: int
) -> tuple[list[MediumRowsPlan], list[MediumRowsPlan]]:
    """Return single tiles and pairs, with splits, by predicted time; what a step is comes later.

    Pairs are those that fill their turn. Of many rows, where a wide tile saves reads of x, else
    one that is predicted to be about the best.
    """
    row_tile = min(max(next_power_of_two(rows), 32), 128)
    row_tiles = (row_tile,) if row_tile == 64 else (row_tile, 64)
    most_splits = 2 if op == GATED else max(SPLITS)  # a gate's parts are twice as wide as it
    found = []
    for tile, out_tile, splits in product(row_tiles, OUT_TILES, SPLITS):
        programs = -(-num_out // out_tile) * splits * -(-rows // tile)
        is_whole = num_in % (splits * 64) == 0 and num_in // splits >= LEAST_SHARE
        if is_whole and splits <= most_splits and 48 <= programs <= 8 * PROCESSORS:
            found.append(MediumRowsPlan(TILES, tile, out_tile, 64, splits))

    def predicted(plan: MediumRowsPlan) -> float:
        return predicted_us(op, rows, num_out, num_in, plan)

    found.sort(key=predicted)
    singles = few_splits([plan for plan in found if not is_pair(plan)])[:NUM_GEOMETRIES]
    pairs = [plan for plan in found if is_pair(plan)]
    filling = [plan for plan in pairs if is_filling(plan, rows, num_out)]
    if rows > MANY_ROWS and not filling:
        filling = [plan for plan in pairs if predicted(plan) <= LIKELY * predicted(found[0])][:1]
    return singles, filling[:NUM_PAIRS]


def is_pair(plan: MediumRowsPlan) -> bool:
    """Return whether a program has two tiles of the weight."""
    return tiles_of(plan.out_tile)[1] > 0


def is_filling(plan: MediumRowsPlan, rows: int, num_out: int) -> bool:
    """Return whether almost no processor is idle: in one turn, or the second of many rows."""
    most_turns = 2 if rows > MANY_ROWS else 1
    programs = num_programs(plan, rows, num_out)
    is_full = turn_filled(plan, rows, num_out) >= FULL_TURN
    return is_full and programs <= most_turns * PROCESSORS


def turn_filled(plan: MediumRowsPlan, rows: int, num_out: int) -> float:
    """Return which part of the processors has a program, over all turns."""
    programs = num_programs(plan, rows, num_out)
    return programs / (-(-programs // PROCESSORS) * PROCESSORS)


def num_programs(plan: MediumRowsPlan, rows: int, num_out: int) -> int:
    """Return how many programs a plan of whole shares launches."""
    return -(-num_out // plan.out_tile) * plan.num_splits * -(-rows // plan.row_tile)


def few_splits(plans: list[MediumRowsPlan]) -> list[MediumRowsPlan]:
    """Return the first MAX_SPLITS_OF_TILE of each tile, in their order."""
    seen: Counter[tuple[int, int]] = Counter()
    found = []
    for plan in plans:
        seen[plan.row_tile, plan.out_tile] += 1
        if seen[plan.row_tile, plan.out_tile] <= MAX_SPLITS_OF_TILE:
            found.append(plan)
    return found


def long_pipelines(plan: MediumRowsPlan, num_in: int) -> list[MediumRowsPlan]:
    """Return a geometry's plans where a program has a processor to itself."""
    share, line_bytes = num_in // plan.num_splits, 2 * (plan.row_tile + plan.out_tile)
    found = []
    for in_tile, num_warps in ((64, 4), (64, 8), (128, 4)):
        steps = share // in_tile
        num_stages = min(SHARED_BYTES // (line_bytes * in_tile), steps, 8)
        # With Triton 3.6: below 64 rows the operands pass through registers.
        is_spilling = plan.row_tile < 64 and plan.out_tile * in_tile > 1 << 14
        is_deep = steps > 1 and num_stages >= min(3, steps) and share % in_tile == 0
        if is_deep and not is_spilling:
            num_warps = num_warps if fits(plan, num_warps) else 8
            found.append(plan._replace(in_tile=in_tile, num_warps=num_warps, num_stages=num_stages))
    return list(dict.fromkeys(found))


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
    return words <= MAX_PRODUCT_WORDS and tiles_of(plan.out_tile)[0] <= 32 * num_warps
