"""What scripts/tune.py measures at 2 to 256 rows: plans that run, and a check that can fail."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from kernel_cases import normal

from nanorunner.kernels.few_rows_plans import GATED, MAX_ROWS, NORM, PLAIN, FewRowsPlan
from nanorunner.kernels.few_rows_triton import Norm
from nanorunner.kernels.medium_rows_plans import (
    ADDED,
    FEW_ROWS,
    LIBRARY,
    TILES,
    MediumRowsPlan,
    ops_at,
    tiles_of,
)

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))  # as for a script that runs there

from scripts import tune_few  # noqa: E402
from scripts.tune import check_rows  # noqa: E402
from scripts.tune_check import excess  # noqa: E402
from scripts.tune_layers import ops_of  # noqa: E402
from scripts.tune_medium import ROWS, Problem, compiled_for, plan_text  # noqa: E402
from scripts.tune_medium_plans import candidates, predicted_us  # noqa: E402
from scripts.tune_models import MODELS, all_shapes  # noqa: E402

pytestmark = pytest.mark.beside

SHARED_LIMIT_BYTES = 227 * 1024  # what one thread block may have on Hopper
NEW_ROWS = (*FEW_ROWS, 192, 256)
# About 50 ms each on a GPU: 24 (shape, rows) of a model in half a minute.
MAX_CANDIDATES = dict.fromkeys(ROWS, 26) | dict.fromkeys(NEW_ROWS, 18)
SHAPES = list(all_shapes(MODELS, (1, 2), MAX_CANDIDATES, ops_of))


@pytest.mark.parametrize("rows", MAX_CANDIDATES)
def test_every_candidate_fits_a_program_and_the_shape(rows: int) -> None:
    for (op, num_out, num_in), _ in (case for case in SHAPES if case[1] == rows):
        plans = candidates(op, rows, num_out, num_in)
        assert plans[0] == LIBRARY
        assert op in ops_at(rows)
        least = 4 if rows <= MAX_ROWS else 8  # 0.6b's o on two ranks has few columns to share
        assert least < len(plans) <= MAX_CANDIDATES[rows]
        assert len(set(plans)) == len(plans)
        for plan in plans[1:]:
            share = num_in // plan.num_splits
            assert share * plan.num_splits == num_in
            assert share % plan.in_tile == 0, "no step is masked"
            assert share == plan.in_tile or plan.num_stages > 1
            in_flight = plan.num_stages * (plan.row_tile + plan.out_tile) * plan.in_tile * 2
            assert in_flight <= SHARED_LIMIT_BYTES
            tiles = [tile for tile in tiles_of(plan.out_tile) if tile]
            assert max(tiles) <= 32 * plan.num_warps
            assert plan.row_tile * plan.out_tile <= 128 * 32 * plan.num_warps, "half the registers"
            assert plan.row_tile == 16 if rows <= MAX_ROWS else plan.row_tile in (32, 64, 128)
            assert min(tiles) >= 64 or not plan.is_swapped, "lines that the instruction has"
            assert predicted_us(op, rows, num_out, num_in, plan) > 2 * num_out * num_in / 4.48e6


def test_both_ways_to_be_early_are_measured_and_neither() -> None:
    for op, num_out, num_in in ((PLAIN, 4096, 1024), (ADDED, 1024, 2048), (GATED, 6144, 1024)):
        plans = candidates(op, 64, num_out, num_in)[1:]
        held = [plan for plan in plans if plan.in_tile * plan.num_splits == num_in]
        assert held
        assert any(plan.is_early for plan in plans)
        assert any(not plan.is_early for plan in plans if plan not in held)
        assert any(plan.is_swapped for plan in plans)


def test_a_narrow_weight_is_split_and_one_wave_is_preferred() -> None:
    best = candidates(ADDED, 64, 1024, 2048)[1]
    assert best.num_splits > 1
    programs = -(-1024 // best.out_tile) * best.num_splits * -(-64 // best.row_tile)
    assert 100 < programs <= 132


@pytest.mark.parametrize(
    ("op", "rows", "num_out", "wanted"),
    [
        # gate_up and qkv of 8B, and gate_up on two ranks
        (GATED, 64, 24576, ["64x192x64w4s6e", "64x192x64w8s6e", "64x192x128w4s3e"]),
        (PLAIN, 64, 6144, ["64x48x128w4s7e", "64x96x128/2w4s5e", "64x192x64/4w4s6e"]),
        (GATED, 64, 12288, ["64x96x64w4s8e", "64x96x64w8s8e", "64x96x128w4s5e"]),
        (GATED, 128, 12288, ["128x96x64w4s7e", "128x96x64w8s7e", "128x96x128w4s3e"]),
        (GATED, 128, 24576, ["128x192x64w8s5e", "128x256x64w8s4e", "128x128x64w4s6e"]),
        (GATED, 256, 24576, ["128x192x64w8s5e", "128x256x64w8s4e", "128x128x64w4s6e"]),
        (PLAIN, 256, 6144, ["128x192x64/2w8s5e", "128x256x64/2w8s4e", "128x128x64w4s6e"]),
    ],
)
def test_pairs_of_tiles_that_fill_their_turn_are_tried(
    op: str, rows: int, num_out: int, wanted: list[str]
) -> None:
    found = candidates(op, rows, num_out, 4096)
    assert set(wanted) <= {plan_text(plan) for plan in found}


def test_a_last_turn_of_a_few_takes_as_long_as_one_of_them_alone() -> None:
    def us(out_tile: int, num_out: int) -> float:
        plan = MediumRowsPlan(TILES, 64, out_tile)
        return predicted_us(GATED, 64, num_out, 4096, plan)

    # 132 tiles are one turn; the next one costs what one reads at a processor's speed, 26 us.
    assert us(128, 133 * 128) - us(128, 132 * 128) == pytest.approx(26, abs=1)
    assert us(128, 134 * 128) == pytest.approx(us(128, 133 * 128), rel=0.01)
    assert us(192, 24576) < 0.8 * us(128, 24576)  # 128 programs, and 192


def test_few_rows_try_the_weight_first_in_pieces_of_several_lengths() -> None:
    for rows in FEW_ROWS:
        plans = candidates(GATED, rows, 24576, 4096)[1:]
        assert plans[0].is_swapped
        assert plans[0].out_tile == 64
        assert {64, 128, 256, 512} <= {plan.in_tile for plan in plans if plan.is_swapped}
        assert any(not plan.is_early for plan in plans)


def test_few_rows_try_pairs_where_single_tiles_do_not_fill_one_turn() -> None:
    tried = {
        case: {plan_text(plan) for plan in candidates(case[0], 8, *case[1:])}
        for case in (
            (GATED, 24576, 4096), (GATED, 12288, 4096), (NORM, 6144, 4096), (PLAIN, 4096, 12288),
        )
    }  # fmt: skip
    assert "16x192x128w4s4te" in tried[GATED, 24576, 4096]  # 128 programs; 384 of 64
    assert "16x96x128w4s7e" in tried[GATED, 12288, 4096]
    assert {"16x48x128w4s8e", "16x192x128/4w4s4te"} <= tried[NORM, 6144, 4096]
    # down: 128 programs of 32 rows, or of 64 that share the columns, fill one
    assert not any("x192x" in text or "x96x" in text for text in tried[PLAIN, 4096, 12288])


def test_four_row_counts_of_a_model_take_half_a_minute() -> None:
    for name in MODELS:
        kernels, num_plans = set(), 0
        for (op, num_out, num_in), rows in all_shapes([name], [1], (8, 16, 192, 256), ops_of):
            for plan in candidates(op, rows, num_out, num_in):
                kernels.add(compiled_for(op, plan, num_out, num_in, rows))
                num_plans += 1
        # a second a kernel on 14 processes, and 60 ms a plan on the GPU
        assert len(kernels) / 14 + 0.06 * num_plans < 25, name


def test_what_a_kernel_is_compiled_for_knows_the_norm_beside_it() -> None:
    plan = MediumRowsPlan(TILES, 16, 64, 128, is_swapped=True)
    assert compiled_for(NORM, plan, 64, 512, 8) == compiled_for(NORM, plan, 128, 512, 16)
    assert compiled_for(NORM, plan, 64, 512, 8) != compiled_for(NORM, plan, 64, 1024, 8)
    assert compiled_for(NORM, LIBRARY, 64, 512, 8) != compiled_for(NORM, LIBRARY, 64, 512, 16)


def test_row_counts_without_entries_are_refused() -> None:
    check_rows([2, 8, 16, 17, 192, 256], is_medium=True)
    check_rows([1, 3, 16], is_medium=False)
    for rows, is_medium in ((1, True), (12, True), (257, True), (17, False)):
        with pytest.raises(ValueError, match=f"rows {rows}: choose from"):
            check_rows([8, rows], is_medium=is_medium)


def test_few_kernels_are_compiled_for_many_shapes() -> None:
    for name in ("0.6b", "8b"):
        for tp in (1, 2):
            kernels: Counter[object] = Counter()
            for (op, num_out, num_in), rows in all_shapes([name], [tp], ROWS, ops_of):
                for plan in candidates(op, rows, num_out, num_in):
                    kernels[compiled_for(op, plan, num_out, num_in, rows)] += 1
            assert len(kernels) < 260, "half a second each, on a dozen cores"
            assert kernels.total() > 1.5 * len(kernels)


@pytest.mark.parametrize("op", [PLAIN, GATED, ADDED])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_the_check_passes_what_is_right_and_finds_a_lost_share(op: str, num_splits: int) -> None:
    rows, num_out, num_in = 40, 64, 256
    # bfloat16 is the GPU's; the interpreter multiplies its bits.
    weight = (normal(num_out, num_in) * num_in**-0.5).half()
    x, begin = normal(rows, num_in).half(), normal(rows, num_out).half()
    gain = normal(num_out).abs().half()
    case = Problem(op, x, begin, begin.clone(), gain, [weight])
    plan = MediumRowsPlan(TILES, 64, 64, 64, num_splits)
    for _ in range(2):  # the residual begins anew
        assert excess(case.first(plan), case.truth()) <= 1.0
    lost = weight.clone()
    lost[:, 192:] = 0
    wrong = Problem(op, x, begin, begin.clone(), gain, [lost])
    assert excess(wrong.first(plan), case.truth()) > 5.0
    never = case.first(LIBRARY)
    never[3, 5] = torch.nan
    assert excess(never, case.truth()) > 1.0


@pytest.mark.parametrize("op", [NORM, PLAIN, GATED])
def test_without_tiles_a_problem_of_few_rows_is_what_their_own_table_says(op: str) -> None:
    weight = (normal(64, 256) * 256**-0.5).half()
    x, residual = normal(4, 256).half(), normal(4, 256).half()
    norm = None if op == PLAIN else Norm(residual, normal(256).abs().half(), 1e-6)
    case = tune_few.Problem(op, x, norm, [weight])
    assert isinstance(tune_few.baseline(op, 4, weight, LIBRARY), FewRowsPlan)
    for plan in (LIBRARY, MediumRowsPlan(TILES, 16, 64, 64, is_swapped=True)):
        assert excess(case.first(plan), case.truth()) <= 1.0
