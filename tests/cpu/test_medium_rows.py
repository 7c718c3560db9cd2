"""Projections of 17 to 128 rows: every kind of plan returns what plain PyTorch returns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import TOLERANCE, normal, poison

from nanorunner.kernels.few_rows_plans import GATED, PLAIN, table_entry
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
    TILES,
    MediumRowsPlan,
    choose,
    load_table,
    most_medium_rows,
    most_rows,
    plan_medium_rows,
)
from nanorunner.kernels.medium_rows_triton import EARLY_BYTES, early_columns

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


@pytest.mark.parametrize("plan", [CASES["steps"][3], CASES["shares held, swapped"][3]])
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


def test_shares_are_added_in_their_order() -> None:
    large = float(2**24)  # the float32 number that 1 does not change
    weight = torch.zeros(16, 48)
    weight[:, 0], weight[:, 16], weight[:, 32] = large, 1.0, -large
    plan = MediumRowsPlan(TILES, 32, 32, 16, 3)
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
        ("{op: norm, out: 4, in: 4, rows: 24, kind: tiles}", "norm"),
        ("{op: plain, out: 4, in: 4, rows: 24, kind: dot}", "dot"),
    ],
)
def test_a_bad_table_entry_is_named(tmp_path: Path, entry: str, words: str) -> None:
    path = tmp_path / "gpu.yaml"
    path.write_text(f"- {entry}\n")
    with pytest.raises(ValueError, match=words):
        load_table(path)


def test_what_goes_to_the_cache_early_is_bounded_and_whole_lines() -> None:
    for num_lines, share in ((1024, 256), (4096, 1024), (24576, 4096), (10**6, 4096)):
        columns = early_columns(num_lines, share, 2)
        assert columns == share or columns % 64 == 0
        assert columns == share or columns * num_lines * 2 <= max(EARLY_BYTES, 128 * num_lines)
