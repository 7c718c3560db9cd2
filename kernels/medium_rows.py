"""The projections of a decode step of 17 to 256 rows, with what follows them folded in.

    linear_medium      @ qkv.T;  @ o.T, @ down.T where an all-reduce comes next
    linear_add_norm    @ o.T, @ down.T, residual + x, RMSNorm
    gate_up_silu       @ gate_up.T, SiLU(gate) * up

From 17 rows on a projection is a matrix product for the tensor cores, but one of so few rows that
it takes as long as its weight takes to come: cuBLAS needs about as long for 8 rows as for 128, and
where it splits the columns, for the narrow o and down, it adds a second launch. Here the second
launch is the one that adds the residual and norms, and programs fetch their weights before the
kernel in front has ended. kernels/medium_rows_kernels.py has what they must move.

A GPU, a shape and a row count take part when the table of kernels/medium_rows_plans.py has tiles
for them, measured; else these are the library's product and the kernels of every other step. The
same tiles serve 2 to 16 rows where they win: kernels/few_rows.py asks that table first. Sums
are float32 and rounded once to the model dtype, shares are added in their order: results do not
depend on timing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanorunner.kernels.few_rows_plans import GATED, PLAIN
from nanorunner.kernels.linear import linear
from nanorunner.kernels.medium_rows_plans import ADDED, TILES, MediumRowsPlan, plan_medium_rows
from nanorunner.kernels.medium_rows_triton import join, join_add_norm, multiply
from nanorunner.kernels.rms_norm import add_rms_norm, rms_norm_reference
from nanorunner.kernels.silu_mul import silu_mul, silu_mul_reference


def linear_medium(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    plan: MediumRowsPlan | None = None,
) -> torch.Tensor:
    """Return x [rows, in] @ weight.T + bias as [rows, out].

    `plan` replaces the table's choice, for measurements and tests.
    """
    plan = plan or plan_medium_rows(PLAIN, len(x), weight)
    if plan.kind == TILES:
        return join(multiply(x, weight, bias, PLAIN, plan), bias, PLAIN, x.dtype)
    return linear(x, weight, bias)


def linear_add_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    plan: MediumRowsPlan | None = None,
) -> torch.Tensor:
    """Add x @ weight.T + bias to residual in place; return that sum's RMSNorm times gain [out].

    x [rows, in], weight [out, in], residual and what comes back [rows, out].
    """
    plan = plan or plan_medium_rows(ADDED, len(x), weight)
    if plan.kind == TILES:
        product = multiply(x, weight, bias, ADDED, plan)
        return join_add_norm(product, bias, residual, gain, eps)
    return add_rms_norm(linear(x, weight, bias), residual, gain, eps)


def gate_up_silu(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    bias: torch.Tensor | None = None,
    plan: MediumRowsPlan | None = None,
) -> torch.Tensor:
    """Return silu(gate) * up [rows, intermediate] of x [rows, in] @ gate_up.T + bias.

    gate_up [2 * intermediate, in]: its first half makes the gate. bias [2 * intermediate].
    """
    plan = plan or plan_medium_rows(GATED, len(x), gate_up)
    if plan.kind == TILES:
        return join(multiply(x, gate_up, bias, GATED, plan), bias, GATED, x.dtype)
    return silu_mul(linear(x, gate_up, bias))


def linear_add_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """linear_add_norm in plain PyTorch, on any device."""
    residual.add_(F.linear(x, weight, bias))
    return rms_norm_reference(residual, gain, eps)


def gate_up_silu_reference(
    x: torch.Tensor, gate_up: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """gate_up_silu in plain PyTorch, on any device."""
    return silu_mul_reference(F.linear(x, gate_up, bias))
