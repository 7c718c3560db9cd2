"""Is a measured projection right? The bound of scripts/tune.py's check, apart from any GPU.

The truth is computed in float64 from the same 16-bit inputs. A kernel may differ by what 16-bit
rounding explains and no more: STEPS steps of the value (its own rounding, and SiLU's and the
product's where the library writes them down), and FLOOR times a result's usual size, for sums that
cancel although each of their terms was rounded. A dropped tile is many times past it, which
tests/cpu/test_tune_check.py shows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

STEPS = 2.0
FLOOR = 0.03


def projection_truth(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    *,
    is_gated: bool = False,
) -> torch.Tensor:
    """Return x [rows, in] @ weight.T in float64, normed before with a gain, gated after if asked.

    The sum with the residual is rounded to x's dtype, as the model defines it.
    """
    total = x if residual is None else residual + x
    value = total.double()
    if gain is not None:
        value = value * (value.square().mean(dim=1, keepdim=True) + eps).rsqrt() * gain.double()
    product = value @ weight.double().T
    if is_gated:
        gate, up = product.chunk(2, dim=1)
        product = F.silu(gate) * up
    return product


def excess(actual: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the largest error as a share of what is allowed: right up to 1; NaN counts as inf."""
    # A step lies between half of eps and eps times the value.
    step = truth.abs() * torch.finfo(actual.dtype).eps
    allowed = STEPS * step + FLOOR * truth.square().mean().sqrt()
    share = (actual.double() - truth).abs() / allowed
    return float(share.nan_to_num(nan=torch.inf).max())
