"""Projections of 2 to 256 rows: every kind of plan returns what plain PyTorch returns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import TOLERANCE, normal, poison

from nanorunner.kernels.few_rows import (
    add_norm_gate_up_silu_reference,
    add_norm_linear_reference,
)
from nanorunner.kernels.few_rows_plans import FOLDER, GATED, NORM, PLAIN, FewRowsPlan, table_entry
from nanorunner.kernels.few_rows_triton import Norm, choose_plan, project_triton
from nanorunner.kernels.medium_rows import (
    gate_up_silu,
    gate_up_silu_reference,
    linear_add_norm,
    linear_add_norm_reference,
    linear_medium,
)
from nanorunner.kernels.medium_rows_plans import (
    ADDED,
    LIBRARY,
    MAX_MEDIUM_ROWS,
    TILES,
    MediumRowsPlan,
    choose,
    load_table,
    most_medium_rows,
    most_rows,
    ops_at,
    plan_medium_rows,
    tiles_of,
)
from nanorunner.kernels.medium_rows_triton import EARLY_BYTES, early_columns

pytestmark = pytest.mark.beside

EPS = 1e-5
# Rows that fill no tile but for 64 and 128; 37 and 100 fill none either.
CASES = {
    "steps": (17, 37, 100, MediumRowsPlan(TILES, 32, 32, 32)),
    "swapped": (33, 37, 100, MediumRowsPlan(TILES, 64, 64, 32, is_swapped=True)),
    "held": (64, 37, 100, MediumRowsPlan(TILES, 64, 64, 128)),
    "held, swapped": (100, 37, 100, MediumRowsPlan(TILES, 128, 64, 128, is_swapped=True)),
    "two tiles of rows": (100, 37, 100, MediumRowsPlan(TILES, 64, 64, 128)),
    "shares of steps": (100, 37, 100, MediumRowsPlan(TILES, 128, 64, 16, 3)),
    "shares held, swapped": (64, 37, 100, MediumRowsPlan(TILES, 64, 64, 32, 4, is_swapped=True)),
    "more shares than steps": (33, 37, 100, MediumRowsPlan(TILES, 64, 64, 64, 8)),
    "even tiles": (128, 64, 128, MediumRowsPlan(TILES, 128, 64, 64)),
    "one unit, one column": (17, 1, 1, MediumRowsPlan(TILES, 32, 32, 16)),
    "four tiles of rows": (200, 37, 100, MediumRowsPlan(TILES, 64, 64, 64, 2)),
    "256 rows, swapped": (256, 64, 128, MediumRowsPlan(TILES, 128, 64, 64, is_swapped=True)),
    "side tile": (33, 37, 100, MediumRowsPlan(TILES, 32, 48, 32)),
    "side tile, swapped": (64, 83, 100, MediumRowsPlan(TILES, 64, 96, 32, is_swapped=True)),
    "side tile held": (64, 101, 100, MediumRowsPlan(TILES, 64, 48, 128)),
    "side tile held, swapped": (17, 37, 100, MediumRowsPlan(TILES, 32, 96, 128, is_swapped=True)),
    "side tile, shares of steps": (100, 53, 100, MediumRowsPlan(TILES, 64, 48, 16, 3)),
    "side tile, shares, swapped": (40, 53, 100, MediumRowsPlan(TILES, 64, 48, 32, 4, 8, 1, True)),
    "side tile, even": (64, 96, 128, MediumRowsPlan(TILES, 64, 96, 64)),
    "side tile, even, held": (64, 96, 128, MediumRowsPlan(TILES, 64, 48, 64, 2)),
    "side tile of 64": (200, 193, 40, MediumRowsPlan(TILES, 128, 192, 32)),
    "no line for the side tile": (20, 5, 40, MediumRowsPlan(TILES, 32, 96, 32, 2)),
}
with_case = pytest.mark.parametrize(
    ("rows", "num_out", "num_in", "plan"), CASES.values(), ids=CASES.keys()
)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert not actual.isnan().any()
    # Sums of num_in products in another order.
    tolerance = 4 * TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def inputs(
    rows: int, num_out: int, num_in: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x [rows, in], its rows strided, a weight that keeps its scale, and a bias."""
    x = normal(rows, num_in + 3, dtype=dtype)[:, :num_in]
    weight = (normal(num_out, num_in) * num_in**-0.5).to(dtype)
    return x, weight, normal(num_out + 1, dtype=dtype)[1:]


def poison_outputs(rows: int, num_out: int, plan: MediumRowsPlan, dtype: torch.dtype) -> None:
    """Leave NaN where the output, and where the parts, will likely be."""
    poison((rows, num_out), dtype)
    poison((plan.num_splits, rows, num_out), torch.float32)


# Of 2 to 16 rows; the second tile has more rows of the weight than there are.
FEW_CASES = {
    "steps": (16, 37, 100, MediumRowsPlan(TILES, 16, 64, 32, is_swapped=True)),
    "large tiles": (3, 37, 100, MediumRowsPlan(TILES, 16, 128, 64, is_swapped=True)),
    "held": (8, 64, 128, MediumRowsPlan(TILES, 16, 64, 128, is_swapped=True)),
    "shares": (16, 64, 128, MediumRowsPlan(TILES, 16, 64, 32, 2, is_swapped=True)),
    "shares held": (2, 37, 100, MediumRowsPlan(TILES, 16, 64, 64, 2, is_swapped=True)),
    "x first": (5, 37, 100, MediumRowsPlan(TILES, 16, 32, 32)),
    "side tile": (5, 67, 100, MediumRowsPlan(TILES, 16, 96, 32, is_swapped=True)),
    "side tile, shares held": (16, 67, 128, MediumRowsPlan(TILES, 16, 48, 64, 2)),
}


@pytest.mark.parametrize(("rows", "num_out", "num_in", "plan"), FEW_CASES.values(), ids=FEW_CASES)
@pytest.mark.parametrize("op", [NORM, GATED, PLAIN])
def test_the_places_of_few_rows_equal_their_references(
    op: str, rows: int, num_out: int, num_in: int, plan: MediumRowsPlan
) -> None:
    x, weight, bias = inputs(rows, 2 * num_out if op == GATED else num_out, num_in)
    residual, gain = normal(rows, num_in + 5)[:, :num_in], normal(num_in)
    before = residual.clone()
    poison_outputs(rows, len(weight), plan, x.dtype)
    norm = None if op == PLAIN else Norm(residual, gain, EPS)
    actual, total = project_triton(x, weight, bias, plan, norm=norm, is_gated=op == GATED)
    if op == PLAIN:
        expected, expected_total = F.linear(x, weight, bias), x
    else:
        reference = add_norm_gate_up_silu_reference if op == GATED else add_norm_linear_reference
        expected, expected_total = reference(x, residual, gain, EPS, weight, bias)
    assert_same(actual, expected)
    assert torch.equal(total, expected_total)
    assert torch.equal(residual, before), "other programs still read it"


@with_case
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_projection_equals_pytorchs(
    rows: int, num_out: int, num_in: int, plan: MediumRowsPlan, has_bias: bool
) -> None:
    x, weight, bias = inputs(rows, num_out, num_in)
    poison_outputs(rows, num_out, plan, x.dtype)
    out = linear_medium(x, weight, bias if has_bias else None, plan)
    assert_same(out, F.linear(x, weight, bias if has_bias else None))


@with_case
def test_a_gated_projection_equals_its_reference(
    rows: int, num_out: int, num_in: int, plan: MediumRowsPlan
) -> None:
    x, gate_up, bias = inputs(rows, 2 * num_out, num_in)
    poison_outputs(rows, 2 * num_out, plan, x.dtype)
    out = gate_up_silu(x, gate_up, bias, plan)
    assert_same(out, gate_up_silu_reference(x, gate_up, bias))


@with_case
def test_a_sum_with_the_residual_and_its_norm_equal_their_reference(
    rows: int, num_out: int, num_in: int, plan: MediumRowsPlan
) -> None:
    x, weight, bias = inputs(rows, num_out, num_in)
    gain = normal(num_out + 2)[2:]
    residual = normal(rows, num_out + 5)[:, :num_out]  # rows strided
    expected_residual = residual.clone()
    poison_outputs(rows, num_out, plan, x.dtype)
    out = linear_add_norm(x, weight, bias, residual, gain, EPS, plan)
    expected = linear_add_norm_reference(x, weight, bias, expected_residual, gain, EPS)
    assert_same(out, expected)
    assert_same(residual, expected_residual)


@pytest.mark.parametrize(
    "plan", [CASES[name][3] for name in ("steps", "shares held, swapped", "side tile, even")]
)
def test_float16_is_summed_in_float32_and_rounded_once(plan: MediumRowsPlan) -> None:
    x, weight, bias = inputs(33, 64, 96, torch.float16)
    out = linear_medium(x, weight, bias, plan)
    exact = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(out.double(), exact, rtol=2**-10, atol=2**-14)
    residual, gain = normal(33, 64, dtype=torch.float16), normal(64, dtype=torch.float16)
    expected_residual = residual.clone()
    normed = linear_add_norm(x, weight, bias, residual, gain, EPS, plan)
    expected = linear_add_norm_reference(x, weight, bias, expected_residual, gain, EPS)
    assert_same(residual, expected_residual)
    assert_same(normed, expected)


@pytest.mark.parametrize("out_tile", [32, 48])
def test_shares_are_added_in_their_order(out_tile: int) -> None:
    large = float(2**24)  # the float32 number that 1 does not change
    weight = torch.zeros(out_tile, 48)
    weight[:, 0], weight[:, 16], weight[:, 32] = large, 1.0, -large
    plan = MediumRowsPlan(TILES, 32, out_tile, 16, 3)
    assert not linear_medium(torch.ones(17, 48), weight, None, plan).any()
    weight = weight.roll(-16, 1)  # now 1, -large, large
    assert (linear_medium(torch.ones(17, 48), weight, None, plan) == 1).all()


def test_without_a_table_they_are_what_every_other_step_does() -> None:
    x, weight, bias = inputs(40, 8, 32)
    assert plan_medium_rows(PLAIN, 40, weight) == LIBRARY
    assert most_medium_rows([(PLAIN, weight)]) == 0
    assert torch.equal(linear_medium(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(gate_up_silu(x, weight, bias), gate_up_silu_reference(x, weight, bias))
    residual, gain = normal(40, 8), normal(8)
    expected_residual = residual.clone()
    expected = linear_add_norm_reference(x, weight, bias, expected_residual, gain, EPS)
    assert torch.equal(linear_add_norm(x, weight, bias, residual, gain, EPS), expected)
    assert torch.equal(residual, expected_residual)


def test_a_row_count_between_two_entries_takes_the_larger_ones_plan() -> None:
    small, large = MediumRowsPlan(TILES, 32), MediumRowsPlan(TILES, 128)
    table = {
        (PLAIN, 64, 32, 32): small,
        (PLAIN, 64, 32, 64): LIBRARY,
        (PLAIN, 64, 32, 96): large,
        (GATED, 64, 32, 128): small,
        (PLAIN, 64, 16, 128): small,
    }
    chosen = {rows: choose(table, (PLAIN, 64, 32, rows)) for rows in (17, 32, 33, 64, 65, 96)}
    assert chosen == {17: small, 32: small, 33: LIBRARY, 64: LIBRARY, 65: large, 96: large}
    assert choose(table, (PLAIN, 64, 32, 97)) == LIBRARY, "another shape's or op's entry"
    assert choose(table, (ADDED, 64, 32, 24)) == LIBRARY
    assert most_rows(table, PLAIN, 64, 32) == 96
    assert most_rows(table, ADDED, 64, 32) == 0
    assert most_rows({(PLAIN, 64, 32, 64): LIBRARY}, PLAIN, 64, 32) == 0


def test_few_rows_take_the_entry_of_the_next_power_of_two_and_no_larger_one() -> None:
    small, large = MediumRowsPlan(TILES, 16, is_swapped=True), MediumRowsPlan(TILES, 32)
    table = {(NORM, 64, 32, 8): small, (PLAIN, 64, 32, 16): LIBRARY, (PLAIN, 64, 32, 24): large}
    chosen = {rows: choose(table, (NORM, 64, 32, rows)) for rows in (1, 4, 5, 8, 9, 16)}
    assert chosen == {1: LIBRARY, 4: LIBRARY, 5: small, 8: small, 9: LIBRARY, 16: LIBRARY}
    assert choose(table, (PLAIN, 64, 32, 12)) == LIBRARY
    assert choose(table, (PLAIN, 64, 32, 4)) == LIBRARY, "24 rows' tiles were not measured at 4"
    assert choose(table, (PLAIN, 64, 32, 17)) == large
    assert most_rows(table, NORM, 64, 32) == 0, "no road of more rows begins there"
    assert most_rows(table, PLAIN, 64, 32) == 24


def test_without_tiles_few_rows_take_the_plan_of_their_own_table() -> None:
    weight = normal(64, 32)
    plan = choose_plan(NORM, 8, weight)
    assert isinstance(plan, FewRowsPlan)


def test_every_row_count_that_is_served_has_its_ops() -> None:
    assert [rows for rows in range(18) if ops_at(rows)] == [2, 4, 8, 16, 17]
    assert ops_at(MAX_MEDIUM_ROWS) == ops_at(17)
    assert not ops_at(MAX_MEDIUM_ROWS + 1)


def test_the_measured_tables_are_valid() -> None:
    for path in FOLDER.glob("*-medium.yaml"):
        table = load_table(path)
        assert table
        for key, plan in table.items():
            assert choose(table, key) == plan
            most = (64 if key[0] == GATED else 32) * plan.num_warps  # as multiply() demands
            assert tiles_of(plan.out_tile)[0] <= most


def test_a_table_reads_back_what_was_written(tmp_path: Path) -> None:
    table = {
        (ADDED, 1024, 2048, 64): MediumRowsPlan(TILES, 64, 64, 256, 8, 4, 1, True, False),
        (PLAIN, 4096, 1024, 24): LIBRARY,
    }
    path = tmp_path / "gpu.yaml"
    path.write_text("".join(table_entry(*entry, 1.5) + "\n" for entry in table.items()))
    assert load_table(path) == table


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{op: plain, out: 4, in: 4, rows: 24, kind: tiles, row_tyle: 64}", "row_tyle"),
        ("{op: norm, out: 4, in: 4, rows: 24, kind: tiles}", "norm at 24"),
        ("{op: added, out: 4, in: 4, rows: 16, kind: tiles}", "added at 16"),
        ("{op: plain, out: 4, in: 4, rows: 12, kind: tiles}", "plain at 12"),
        ("{op: plain, out: 4, in: 4, rows: 257, kind: tiles}", "plain at 257"),
        ("{op: plain, out: 4, in: 4, rows: 24, kind: dot}", "dot"),
        ("{op: plain, out: 4, in: 4, rows: 24, kind: tiles, out_tile: 80}", "out_tile 80"),
    ],
)
def test_a_bad_table_entry_is_named(tmp_path: Path, entry: str, words: str) -> None:
    path = tmp_path / "gpu.yaml"
    path.write_text(f"- {entry}\n")
    with pytest.raises(ValueError, match=words):
        load_table(path)


def test_a_program_has_a_power_of_two_of_lines_or_one_and_a_half_of_one() -> None:
    pairs = {n: tiles_of(n) for n in (16, 32, 48, 64, 96, 128, 192, 256)}
    assert [n for n, (main, side) in pairs.items() if main + side == n] == list(pairs)
    assert [side for _, side in pairs.values()] == [0, 0, 16, 0, 32, 0, 64, 0]
    # 24: a side tile of 8 is no operand of a product; 80 and 112: the second tile is not the half.
    for wrong in (-48, 0, 8, 24, 36, 47, 80, 112, 144, 224):
        with pytest.raises(ValueError, match=f"out_tile {wrong}: "):
            tiles_of(wrong)


def test_what_goes_to_the_cache_early_is_bounded_and_whole_lines() -> None:
    for num_lines, share in ((1024, 256), (4096, 1024), (24576, 4096), (10**6, 4096)):
        columns = early_columns(num_lines, share, 2)
        assert columns == share or columns % 64 == 0
        assert columns == share or columns * num_lines * 2 <= max(EARLY_BYTES, 128 * num_lines)
