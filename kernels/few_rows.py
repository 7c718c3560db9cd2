"""The projections of a decode step of 1 to 16 rows, with their neighbours folded in.

At few rows a projection is a read of its weight, and the time between two kernels weighs as much
as the kernels. So a layer's projections take the elementwise work around them along:

    add_norm_linear         residual + x, RMSNorm, @ qkv.T
    linear_few              @ o.T, @ down.T
    add_norm_gate_up_silu   residual + x, RMSNorm, @ gate_up.T, SiLU(gate) * up

kernels/few_rows_triton.py launches the kernels, kernels/few_rows_plans.py has the choice among
them; from 2 rows on the table of kernels/medium_rows_plans.py comes first, which has the tiles of
more rows where they win. Sums are float32, rounded once to the model dtype. Results do not depend
on timing: no atomics.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.few_rows_plans import MAX_ROWS
from nanorunner.kernels.few_rows_triton import AnyPlan, Norm, project_triton
from nanorunner.kernels.linear import linear
from nanorunner.kernels.rms_norm import rms_norm_reference
from nanorunner.kernels.silu_mul import silu_mul_reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def serves(rows: int, weight: torch.Tensor) -> bool:
    """Return whether the kernels here take this many rows of this weight [out, in] on a GPU."""
    return (
        1 <= rows <= MAX_ROWS
        and weight.is_cuda
        and weight.dtype in DTYPES
        and weight.dim() == 2
        and weight.is_contiguous()
    )


def add_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    plan: AnyPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(total) @ weight.T + bias [rows, out], total [rows, in]).

    total is residual + x, both [rows, in], in new memory: other programs still read the old one.
    Without a residual (the first layer) total is x itself. norm_weight [in], weight [out, in],
    bias [out]. `plan` replaces the table's choice, for measurements.
    """
    if x.is_cuda:
        norm = Norm(residual, norm_weight, eps)
        return project_triton(x, weight, bias, plan, norm=norm)
    return add_norm_linear_reference(x, residual, norm_weight, eps, weight, bias)


def add_norm_gate_up_silu(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    gate_up: torch.Tensor,
    bias: torch.Tensor | None = None,
    plan: AnyPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (silu(gate) * up [rows, intermediate], total [rows, in]); total as add_norm_linear's.

    gate_up [2 * intermediate, in]: its first half makes the gate. bias [2 * intermediate].
    """
    if x.is_cuda:
        norm = Norm(residual, norm_weight, eps)
        return project_triton(x, gate_up, bias, plan, norm=norm, is_gated=True)
    return add_norm_gate_up_silu_reference(x, residual, norm_weight, eps, gate_up, bias)


def linear_few(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    plan: AnyPlan | None = None,
) -> torch.Tensor:
    """Return x [rows, in] @ weight.T + bias as [rows, out]."""
    if x.is_cuda:
        return project_triton(x, weight, bias, plan)[0]
    return linear(x, weight, bias)


def add_norm_linear_reference(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """add_norm_linear in plain PyTorch, on any device."""
    total = x if residual is None else residual + x
    return linear(rms_norm_reference(total, norm_weight, eps), weight, bias), total


def add_norm_gate_up_silu_reference(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    gate_up: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """add_norm_gate_up_silu in plain PyTorch, on any device."""
    out, total = add_norm_linear_reference(x, residual, norm_weight, eps, gate_up, bias)
    return silu_mul_reference(out), total
