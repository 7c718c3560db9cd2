"""The projections: x @ weight.T + bias, with weights repacked once for the CPU.

On a GPU this is cuBLAS, by the kernel that a table has for a shape and its rows, in 16 bits and
without a bias (kernels/product_plans.py), else by the one that it picks itself. On a CPU, plain
row-major weights cost a decode step of a few rows twice the time, because the library lays them out
anew on every call. So the decoder packs each weight once, after loading, into oneDNN's blocked
layout. SmolLM2's 121 projections on one core, in ms (Xeon with AMX, torch 2.13):

    rows                    1     2     4     8    64   256
    float32   plain        42    46    80   110   137   356
              packed       50    55    56    58   121   355
    bfloat16  plain        48    49    50    48    51    90
              packed       30    31    31    31    35    60
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from nanorunner.kernels.cublas_lt import multiply, takes
from nanorunner.kernels.product_plans import plan_product

# The row count that oneDNN is told to expect; other counts measured the same, only 1 is worse.
PACKED_FOR_ROWS = 8


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether pack() serves this device and dtype; if not, linear() takes plain weights."""
    if device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def has_fast_bfloat16() -> bool:
    """Return whether this CPU has instructions that multiply bfloat16, and linear() uses them."""
    is_native = torch.cpu._is_avx512_bf16_supported()  # AMX machines have these too
    return is_native and can_pack(torch.device("cpu"), torch.bfloat16)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return weight [out, in] in oneDNN's layout: an opaque tensor, for linear() alone.

    to_dense() gives the plain weight back. The caller drops the original to save its memory.
    """
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
    return packed


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x [rows, in] @ weight.T + bias as [rows, out]; an fp32 sum rounded to x's dtype.

    weight is [out, in], plain or from pack(); x is contiguous when it is packed. out: where to
    write.
    """
    if weight.is_mkldnn:
        product = _packed_product()(x, weight, bias, "none", [], "")
        return product if out is None else out.copy_(product)
    if weight.is_cuda and bias is None:
        algorithm = plan_product(len(x), weight)
        if algorithm is not None and takes(x, weight):
            return multiply(x, weight, algorithm, out)
    if out is None:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.T, out=out)
    return torch.addmm(bias, x, weight.T, out=out)


@cache
def _packed_product() -> Callable[..., torch.Tensor]:
    """Return oneDNN's operator; to find it anew on each call would be 1 % of a decode step."""
    operator: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default
    return operator
