"""Projections of few rows: every kernel and plan returns what plain PyTorch returns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernel_cases import TOLERANCE, normal, poison

from nanorunner.kernels.few_rows import (
    add_norm_gate_up_silu,
    add_norm_gate_up_silu_reference,
    add_norm_linear,
    add_norm_linear_reference,
    linear_few,
    serves,
)
from nanorunner.kernels.few_rows_plans import (
    CUBLAS,
    DOT,
    GATED,
    NORM,
    PLAIN,
    ROWS,
    FewRowsPlan,
    default_plan,
    load_table,
    table_entry,
)
from nanorunner.kernels.few_rows_triton import Norm, project_triton
from nanorunner.kernels.linear import linear

pytestmark = pytest.mark.beside

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLANS = {
    "whole rows": FewRowsPlan(ROWS, 4, 128),
    "rows in chunks": FewRowsPlan(ROWS, 2, 32),
    "one row a program": FewRowsPlan(ROWS, 1, 128, num_warps=1),
    "dot": FewRowsPlan(DOT, 16, 32, num_warps=1),
    "dot of one step": FewRowsPlan(DOT, 16, 128, num_warps=2),
    "dot of 8 rows a program": FewRowsPlan(DOT, 8, 64, num_warps=2),
    "dot, norm apart": FewRowsPlan(DOT, 32, 32, num_warps=1, is_fused=False),
    "dot in 3 shares": FewRowsPlan(DOT, 16, 32, num_splits=3, num_warps=1),
    "dot in more shares than steps": FewRowsPlan(DOT, 16, 64, num_splits=4, num_warps=1),
    "library": FewRowsPlan(CUBLAS, is_fused=False),
}
# An odd width and height, a width of whole tiles, and one row of weight.
SHAPES = [(37, 100), (32, 96), (20, 1)]
with_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
with_shape = pytest.mark.parametrize(("num_out", "num_in"), SHAPES)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert not actual.isnan().any()
    # Sums of num_in products in another order, and a norm that is rounded elsewhere.
    tolerance = 4 * TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def inputs(rows: int, num_in: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return x, residual [rows, in], rows strided, and gain [in]."""
    x = normal(rows, num_in + 3, dtype=dtype)[:, :num_in]
    residual = normal(rows, num_in + 8, dtype=dtype)[:, :num_in]
    return x, residual, normal(num_in, dtype=dtype)


def weights(num_out: int, num_in: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight that keeps the scale of its input, and a bias."""
    scaled = normal(num_out, num_in) * num_in**-0.5
    return scaled.to(dtype), normal(num_out + 1, dtype=dtype)[1:]


@with_plan
@with_shape
@pytest.mark.parametrize(("rows", "has_bias"), [(1, False), (3, True)])
def test_a_projection_equals_pytorchs(
    plan: FewRowsPlan, num_out: int, num_in: int, rows: int, has_bias: bool
) -> None:
    x, _, _ = inputs(rows, num_in, torch.float32)
    weight, bias = weights(num_out, num_in, torch.float32)
    poison((rows, num_out), torch.float32)
    out, total = project_triton(x, weight, bias if has_bias else None, plan)
    assert total is x
    assert_same(out, linear(x, weight, bias if has_bias else None))


@with_plan
@with_shape
@pytest.mark.parametrize("has_residual", [False, True])
def test_a_normed_projection_equals_its_reference(
    plan: FewRowsPlan, num_out: int, num_in: int, has_residual: bool
) -> None:
    x, residual, gain = inputs(5, num_in, torch.float32)
    before = residual.clone()
    weight, bias = weights(num_out, num_in, torch.float32)
    norm = Norm(residual if has_residual else None, gain, EPS)
    poison((5, num_in), torch.float32)
    actual = project_triton(x, weight, bias, plan, norm=norm)
    expected = add_norm_linear_reference(x, norm.residual, gain, EPS, weight, bias)
    assert_same(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    assert torch.equal(residual, before), "other programs still read it"


@with_plan
@with_shape
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_projection_equals_its_reference(
    plan: FewRowsPlan, num_out: int, num_in: int, has_bias: bool
) -> None:
    x, residual, gain = inputs(2, num_in, torch.float32)
    gate_up, both = weights(2 * num_out, num_in, torch.float32)
    bias = both if has_bias else None
    actual = project_triton(x, gate_up, bias, plan, norm=Norm(residual, gain, EPS), is_gated=True)
    expected = add_norm_gate_up_silu_reference(x, residual, gain, EPS, gate_up, bias)
    assert_same(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("plan", [PLANS["whole rows"], PLANS["dot"], PLANS["dot in 3 shares"]])
def test_each_dtype_sums_in_float32(plan: FewRowsPlan, rows: int, dtype: torch.dtype) -> None:
    if plan.kind == DOT and dtype == torch.bfloat16:
        return  # the interpreter multiplies the bits of bfloat16 matrices; tests/gpu checks them
    x, residual, gain = inputs(rows, 100, dtype)
    weight, bias = weights(34, 100, dtype)
    actual = project_triton(x, weight, bias, plan, norm=Norm(residual, gain, EPS))
    expected = add_norm_linear_reference(x, residual, gain, EPS, weight, bias)
    assert_same(actual[0], expected[0])
    assert_same(actual[1], expected[1])
    assert_same(project_triton(x, weight, bias, plan)[0], linear(x, weight, bias))


def test_a_row_of_large_numbers_does_not_overflow_float16() -> None:
    x, _, gain = inputs(2, 64, torch.float16)
    x, gain = x * 10_000, gain.abs() + 20
    weight, _ = weights(16, 64, torch.float16)
    out, _ = project_triton(x, weight, None, PLANS["dot"], norm=Norm(None, gain, EPS))
    expected, _ = add_norm_linear_reference(x, None, gain, EPS, weight)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=0.2)


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("op", [NORM, GATED, PLAIN])
def test_the_default_plan_fits_every_shape(op: str, rows: int) -> None:
    for num_out, num_in in ((2, 1), (6, 7), (4096, 1024), (24576, 4096), (1024, 12288)):
        for item_bytes in (2, 4):
            plan = default_plan(op, rows, num_out, num_in, item_bytes, 132)
            assert plan.out_tile * plan.in_tile * 4 <= 2**17
            if plan.kind == DOT:
                assert plan.in_tile % (32 * plan.num_warps) == 0
                halves = 2 if op == GATED else 1
                # 64 registers a thread of weights, two steps of them if there are two
                steps = 2 if num_in > plan.in_tile else 1
                words = halves * steps * plan.out_tile * plan.in_tile // 2
                assert words <= 64 * 32 * plan.num_warps


def test_on_a_cpu_the_public_functions_are_the_references() -> None:
    x, residual, gain = inputs(2, 32, torch.float32)
    weight, bias = weights(8, 32, torch.float32)
    assert not serves(2, weight)
    assert torch.equal(linear_few(x, weight, bias), linear(x, weight, bias))
    for public, reference in (
        (add_norm_linear, add_norm_linear_reference),
        (add_norm_gate_up_silu, add_norm_gate_up_silu_reference),
    ):
        arguments = (x, residual, gain, EPS, weight, bias)
        for actual, expected in zip(public(*arguments), reference(*arguments), strict=True):
            assert torch.equal(actual, expected)


def test_a_table_reads_back_what_was_written(tmp_path: Path) -> None:
    keys = [(NORM, 4096, 1024, 1), (PLAIN, 1024, 3072, 16)]
    plans = [FewRowsPlan(ROWS, 8, 1024, 1, 8), FewRowsPlan(CUBLAS, is_fused=False)]
    path = tmp_path / "gpu.yaml"
    path.write_text(
        "".join(table_entry(*pair, 1.5) + "\n" for pair in zip(keys, plans, strict=True))
    )
    assert load_table(path) == dict(zip(keys, plans, strict=True))
    assert load_table(tmp_path / "none.yaml") == {}


def test_a_bad_table_entry_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gpu.yaml"
    path.write_text("- {op: norm, out: 4, in: 4, rows: 1, knd: rows}\n")
    with pytest.raises(ValueError, match="knd"):
        load_table(path)
