"""Launches the kernels of kernels/few_rows_kernels.py, as a plan of few_rows_plans.py says.

Where tiles were measured to be better, the kernels of medium_rows_kernels.py: choose_plan().
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanorunner.kernels.few_rows_dot import CHUNK, dot_kernel
from nanorunner.kernels.few_rows_kernels import norm_kernel, rows_kernel, sum_kernel
from nanorunner.kernels.few_rows_plans import (
    CUBLAS,
    DOT,
    GATED,
    MAX_ROWS,
    NORM,
    PLAIN,
    ROWS,
    FewRowsPlan,
    plan_few_rows,
)
from nanorunner.kernels.medium_rows_plans import TILES, MediumRowsPlan, plan_medium_rows
from nanorunner.kernels.medium_rows_triton import join, multiply
from nanorunner.kernels.pdl import can_overlap, launch_options
from nanorunner.kernels.silu_mul import silu_mul
from nanorunner.kernels.triton_support import next_power_of_two

AnyPlan = FewRowsPlan | MediumRowsPlan


class Norm(NamedTuple):
    """The add + RMSNorm before a projection."""

    residual: torch.Tensor | None  # [rows, in]
    weight: torch.Tensor  # [in]
    eps: float


def project_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: AnyPlan | None = None,
    *,
    norm: Norm | None = None,
    is_gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x @ weight.T + bias, total), x normed before and the product gated after if asked.

    x [1 to 16 rows, in], its rows may be strided; weight [out, in] contiguous. total [rows, in] is
    x plus the norm's residual, x itself without one.
    """
    rows, num_in = x.shape
    assert 1 <= rows <= MAX_ROWS, "few_rows takes 1 to 16 rows"
    assert x.stride(1) == 1, "few_rows needs rows whose elements lie side by side"
    assert weight.is_contiguous(), "few_rows needs a contiguous weight"
    is_compiled_float = x.is_cuda and x.dtype == torch.float32
    op = GATED if is_gated else PLAIN if norm is None else NORM
    plan = plan or choose_plan(op, rows, weight)
    assert plan.kind != DOT or not is_compiled_float, "a dot of float32 does not fit a GPU program"
    total = x
    # Before its scale a row may pass float16's range, and a dot takes its operands in float16.
    is_wide = plan.kind == DOT and x.dtype == torch.float16
    is_apart = isinstance(plan, MediumRowsPlan) or plan.kind == CUBLAS or not plan.is_fused
    if norm is not None and (is_apart or is_wide):
        x, total = _add_norm(x, norm)
        norm = None
    if isinstance(plan, MediumRowsPlan):
        return join(multiply(x, weight, bias, op, plan), bias, op, x.dtype), total
    if plan.kind == CUBLAS:
        out = F.linear(x, weight, bias)
        return (silu_mul(out) if is_gated else out), total
    if norm is not None and norm.residual is not None:
        total = torch.empty((rows, num_in), dtype=x.dtype, device=x.device)
    num_out = weight.shape[0] // 2 if is_gated else weight.shape[0]
    out = torch.empty((rows, num_out), dtype=x.dtype, device=x.device)
    launch = _launch_rows if plan.kind == ROWS else _launch_dot
    launch(x, weight, bias, norm, is_gated, plan, out, total, is_late=op == NORM)
    return out, total


def choose_plan(op: str, rows: int, weight: torch.Tensor) -> AnyPlan:
    """Return tiles where their table has them for this shape and rows, else few rows' own plan."""
    tiles = plan_medium_rows(op, rows, weight)
    return tiles if tiles.kind == TILES else plan_few_rows(op, rows, weight)


def compiled_for(op: str, rows: int, weight: torch.Tensor) -> tuple[AnyPlan, int]:
    """Return what enters the compiled kernels of a projection of so many rows, of 1 to 16."""
    plan = choose_plan(op, rows, weight)
    return plan, compiled_rows(plan, rows)


def compiled_rows(plan: AnyPlan, rows: int) -> int:
    """Return what of a row count enters a plan's compiled kernel."""
    return rows if plan.kind == ROWS else _row_tile(rows, plan.out_tile)


def _row_tile(rows: int, out_tile: int) -> int:
    """Return the rows of a dot's tile."""
    return 8 if rows <= 8 and out_tile >= 16 else 16


def _add_norm(x: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (normed total, total), total being x plus the residual in new memory."""
    rows, num_in = x.shape
    out = torch.empty((rows, num_in), dtype=x.dtype, device=x.device)
    total = x if norm.residual is None else torch.empty_like(out)
    residual = x if norm.residual is None else norm.residual
    columns = next_power_of_two(num_in)
    norm_kernel[(rows,)](
        x,
        residual,
        norm.weight,
        out,
        total,
        x.stride(0),
        residual.stride(0),
        num_in,
        norm.eps,
        HAS_RESIDUAL=norm.residual is not None,
        COLUMNS=columns,
        num_warps=min(max(columns // 256, 1), 16),
        **launch_options(can_overlap(x.device)),
    )
    return out, total


def _launch_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    is_gated: bool,
    plan: FewRowsPlan,
    out: torch.Tensor,
    total: torch.Tensor,
    is_late: bool,
) -> None:
    """Launch rows_kernel; total may be x itself, which is then not written."""
    rows, num_in = x.shape
    num_out = out.shape[1]
    residual = norm.residual if norm is not None else None
    rows_kernel[(-(-num_out // plan.out_tile),)](
        x,
        x if residual is None else residual,
        x if norm is None else norm.weight,  # never read without a norm
        weight,
        weight if bias is None else bias,
        out,
        total,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        num_out,
        0.0 if norm is None else norm.eps,
        NUM_ROWS=rows,
        NUM_IN=num_in,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        IS_GATED=is_gated,
        IS_EVEN=num_out % plan.out_tile == 0 and num_in % plan.in_tile == 0,
        OUT_TILE=plan.out_tile,
        IN_TILE=plan.in_tile,
        num_warps=plan.num_warps,
        IS_LATE=is_late,
        **launch_options(can_overlap(x.device)),
    )


def _launch_dot(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    is_gated: bool,
    plan: FewRowsPlan,
    out: torch.Tensor,
    total: torch.Tensor,
    is_late: bool,
) -> None:
    """Launch dot_kernel, and sum_kernel after it when the columns are shared out."""
    rows, num_in = x.shape
    num_out = out.shape[1]
    # A share of the columns has but a share of a norm's squares, and of a gate.
    num_splits = plan.num_splits if norm is None and not is_gated else 1
    residual = norm.residual if norm is not None else None
    product = out
    if num_splits > 1:
        product = torch.empty((num_splits, rows, num_out), dtype=torch.float32, device=x.device)
    options = launch_options(can_overlap(x.device))
    whole = num_splits * plan.in_tile
    dot_kernel[(-(-num_out // plan.out_tile), num_splits)](
        x,
        x if residual is None else residual,
        x if norm is None else norm.weight,
        weight,
        weight if bias is None else bias,
        product,
        total,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        rows,
        num_out,
        0.0 if norm is None else norm.eps,
        NUM_IN=num_in,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None and num_splits == 1,
        IS_GATED=is_gated,
        IS_EVEN=num_out % plan.out_tile == 0 and num_in % whole == 0,
        IS_RAGGED=num_in % CHUNK != 0,
        NUM_STEPS=-(-num_in // whole),
        ROW_TILE=_row_tile(rows, plan.out_tile),
        OUT_TILE=plan.out_tile,
        DEPTH=plan.in_tile // (CHUNK * plan.num_warps),
        WARPS=plan.num_warps,
        num_warps=plan.num_warps,
        num_stages=1,  # the kernel looks ahead itself
        IS_LATE=is_late and num_splits == 1,
        **options,
    )
    if num_splits > 1:
        sum_kernel[(rows, -(-num_out // 256))](
            product,
            weight if bias is None else bias,
            out,
            num_out,
            HAS_BIAS=bias is not None,
            SPLITS=num_splits,
            TILE=256,
            num_warps=2,
            **options,
        )
