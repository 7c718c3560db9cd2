"""RMSNorm, alone or with the residual addition before it: one row a program.

A decoder layer calls add_rms_norm twice: the residual stream grows in place, and its norm feeds the
next projection.

    residual[n, hidden] += x[n, hidden]        rounded to the model dtype, as the reference does
    out[n, hidden] = residual / sqrt(mean(residual^2) + eps) * weight       float32 inside
"""

from __future__ import annotations

from functools import cache

import torch

from nanorunner.kernels.pdl import can_overlap, gdc_launch_dependents, gdc_wait, launch_options
from nanorunner.kernels.triton_support import jit, next_power_of_two, tl


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm of x [n, hidden], scaled by weight [hidden], as a new tensor."""
    return rms_norm_triton(x, weight, eps) if x.is_cuda else rms_norm_reference(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add x to residual in place, both [n, hidden], and return the norm of the sum.

    On a CPU the norm of another dtype than float32 takes x's place: to() would be slower.
    """
    if x.is_cuda:
        return add_rms_norm_triton(x, residual, weight, eps)
    norm = _norm(residual.add_(x), weight, eps)
    return norm if norm.dtype == x.dtype else x.copy_(norm)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm in plain PyTorch, on any device. A float32 weight saves the other dtypes a pass.

    PyTorch's own rms_norm is nine calls on a CPU, and each costs more than its arithmetic.
    """
    # Rounding once, at the end, is what the Triton kernel does too.
    return _norm(x, weight, eps).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """add_rms_norm in plain PyTorch, on any device; x stays as it is."""
    return rms_norm_reference(residual.add_(x), weight, eps)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm in float32."""
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(_constant(eps, x.device), length, length, value=1 / x.shape[-1]).rsqrt_()
    normed = torch.mul(wide, scale) if wide is x else wide.mul_(scale)
    return normed.mul_(weight)


@cache
def _constant(value: float, device: torch.device) -> torch.Tensor:
    """Return a float32 tensor that nobody writes; it lives as long as the process."""
    return torch.tensor(value, dtype=torch.float32, device=device)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm as one Triton launch; the rows of x may be strided, its last dim may not."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, eps)
    return out


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """add_rms_norm as one Triton launch; rows may be strided, the last dim may not."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, out, eps)
    return out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    """Run one program a row; residual None means the plain norm."""
    num_rows, hidden = x.shape
    assert x.stride(1) == 1, "rms_norm needs rows whose elements lie side by side"
    if num_rows == 0:
        return
    columns = next_power_of_two(hidden)
    _rms_norm_kernel[(num_rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        x.stride(0) if residual is None else residual.stride(0),
        hidden,
        eps,
        HAS_RESIDUAL=residual is not None,
        COLUMNS=columns,
        # 8 elements a thread are one 16-byte access in bfloat16.
        num_warps=min(max(columns // 256, 1), 16),
        **launch_options(can_overlap(x.device)),
    )


@jit()
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    hidden: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    COLUMNS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Norm one row; with HAS_RESIDUAL, of residual + x, which is stored back first."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < hidden
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        place = residual + row * residual_stride + columns
        total = tl.load(place, mask=inside, other=0.0).to(tl.float32) + value.to(tl.float32)
        # Norm the rounded sum: it is the value that the next layer will read back.
        value = total.to(value.dtype)
        tl.store(place, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + columns, wide * scale * gain, mask=inside)
