"""What scripts/tune.py measures at 17 to 128 rows: plans that run, and a check that can fail."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from kernel_cases import normal

from nanorunner.kernels.few_rows_plans import GATED, PLAIN
from nanorunner.kernels.medium_rows_plans import ADDED, LIBRARY, TILES, MediumRowsPlan

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))  # as for a script that runs there

from scripts.tune_check import excess  # noqa: E402
from scripts.tune_medium import ROWS, Problem, compiled_for, ops_of  # noqa: E402
from scripts.tune_medium_plans import candidates, predicted_us  # noqa: E402
from scripts.tune_models import MODELS, all_shapes  # noqa: E402

SHARED_LIMIT_BYTES = 227 * 1024  # what one thread block may have on Hopper
MAX_CANDIDATES = 26  # about 50 ms each on a GPU: 24 (shape, rows) of a model in half a minute
SHAPES = list(all_shapes(MODELS, (1, 2), ROWS, ops_of))


@pytest.mark.parametrize("rows", ROWS)
def test_every_candidate_fits_a_program_and_the_shape(rows: int) -> None:
    for (op, num_out, num_in), _ in (case for case in SHAPES if case[1] == rows):
        plans = candidates(op, rows, num_out, num_in)
        assert plans[0] == LIBRARY
        assert 8 < len(plans) <= MAX_CANDIDATES
        assert len(set(plans)) == len(plans)
        for plan in plans[1:]:
            share = num_in // plan.num_splits
            assert share * plan.num_splits == num_in
            assert share % plan.in_tile == 0, "no step is masked"
            assert share == plan.in_tile or plan.num_stages > 1
            in_flight = plan.num_stages * (plan.row_tile + plan.out_tile) * plan.in_tile * 2
            assert in_flight <= SHARED_LIMIT_BYTES
            assert plan.out_tile <= 32 * plan.num_warps
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
