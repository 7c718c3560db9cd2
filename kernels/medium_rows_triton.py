"""Launches medium_rows_kernels.py and medium_rows_join.py as plans of medium_rows_plans.py say."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nanorunner.kernels.few_rows_plans import GATED, NORM
from nanorunner.kernels.medium_rows_join import join_kernel, join_norm_kernel
from nanorunner.kernels.medium_rows_kernels import tiles_kernel
from nanorunner.kernels.medium_rows_plans import TILES, MediumRowsPlan, tiles_of
from nanorunner.kernels.pdl import can_overlap, launch_options
from nanorunner.kernels.triton_support import next_power_of_two

JOIN_COLUMNS = 256
# What all programs of a launch together fetch before their wait: a quarter of an H200's L2, 4 us of
# its memory's time.
EARLY_BYTES = 16 << 20
COPY_BYTES = 16  # what the copy engine moves at least, and how it wants its addresses aligned


class Product(NamedTuple):
    """What tiles_kernel has written, whole or in parts that a join adds up."""

    parts: torch.Tensor  # [rows, units] in the model dtype, or [splits, rows, out] float32
    num_splits: int


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, op: str, plan: MediumRowsPlan
) -> Product:
    """Launch tiles_kernel; where the plan has splits, neither bias nor gate is in the product yet.

    x [rows, in], its rows may be strided; weight [out, in] contiguous; bias [out]. x is normed
    already where op is NORM; behind it comes decode attention, which reads KV early: so it is late.
    """
    rows, num_in = x.shape
    num_out = weight.shape[0]
    is_gated = op == GATED
    halves = 2 if is_gated else 1
    num_units = num_out // halves
    assert plan.kind == TILES, "a plan of tiles"
    assert x.stride(1) == 1, "medium_rows needs rows whose elements lie side by side"
    assert weight.is_contiguous(), "medium_rows needs a contiguous weight"
    out_tile, side_tile = tiles_of(plan.out_tile)
    assert out_tile <= 32 * plan.num_warps * halves, "a lane fetches one line of the weight"
    is_fetched = side_tile == 0 or side_tile >= plan.num_warps * halves
    assert is_fetched, "each warp fetches one line of the weight or more"
    num_steps = -(-num_in // (plan.num_splits * plan.in_tile))
    share = num_steps * plan.in_tile
    num_splits = -(-num_in // share)  # none without columns
    is_split = num_splits > 1
    item_bytes = weight.element_size()
    is_aligned = num_in * item_bytes % COPY_BYTES == 0 and weight.data_ptr() % COPY_BYTES == 0
    options: dict[str, Any] = {"device": x.device, "dtype": torch.float32 if is_split else x.dtype}
    shape = (num_splits, rows, num_out) if is_split else (rows, num_units)
    out = torch.empty(shape, **options)
    grid = (-(-num_units * halves // plan.out_tile), num_splits, -(-rows // plan.row_tile))
    tiles_kernel[grid](
        x,
        weight,
        weight if bias is None else bias,  # never read without a bias
        out,
        x.stride(0),
        rows,
        num_units,
        num_in,
        share,
        early_columns(num_out * num_splits, share, item_bytes),
        HAS_BIAS=bias is not None and not is_split,
        IS_GATED=is_gated,
        IS_SPLIT=is_split,
        IS_EVEN=num_out % plan.out_tile == 0 and num_in % share == 0,
        IS_SWAPPED=plan.is_swapped,
        IS_HELD=num_steps == 1,
        IS_EARLY=plan.is_early and is_aligned,
        IS_LATE=op == NORM and not is_split,
        ROW_TILE=plan.row_tile,
        OUT_TILE=out_tile,
        SIDE_TILE=side_tile,
        IN_TILE=plan.in_tile,
        WARPS=plan.num_warps,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **launch_options(can_overlap(x.device)),
    )
    return Product(out, num_splits)


def early_columns(num_lines: int, share: int, item_bytes: int) -> int:
    """Return how many columns of each share EARLY_BYTES allow, in whole lines of the cache.

    num_lines: of all shares, which start to fetch at the same time.
    """
    line = 128 // item_bytes
    columns = EARLY_BYTES // (num_lines * item_bytes)
    return min(share, max(columns // line, 1) * line)


def join(product: Product, bias: torch.Tensor | None, op: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the product of x and weight [rows, out], gated if op says so, out of its parts.

    Late, as multiply() is of one part, where op is NORM.
    """
    if product.num_splits == 1:
        return product.parts
    parts = product.parts
    _, rows, num_out = parts.shape
    num_units = num_out // 2 if op == GATED else num_out
    out = torch.empty((rows, num_units), dtype=dtype, device=parts.device)
    join_kernel[(rows, -(-num_units // JOIN_COLUMNS))](
        parts,
        parts if bias is None else bias,
        out,
        num_units,
        HAS_BIAS=bias is not None,
        IS_GATED=op == GATED,
        IS_LATE=op == NORM,
        SPLITS=product.num_splits,
        TILE=JOIN_COLUMNS,
        num_warps=2,
        **launch_options(can_overlap(parts.device)),
    )
    return out


def join_add_norm(
    product: Product,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Add the product of x and weight [rows, out] to residual in place, and return the norm of it.

    A product of one part has its bias already.
    """
    rows, num_out = residual.shape
    assert residual.stride(1) == 1, "medium_rows needs rows whose elements lie side by side"
    parts = product.parts
    has_bias = bias is not None and product.num_splits > 1
    out = torch.empty((rows, num_out), dtype=residual.dtype, device=residual.device)
    columns = next_power_of_two(num_out)
    join_norm_kernel[(rows,)](
        parts,
        bias if has_bias else parts,
        residual,
        gain,
        out,
        residual.stride(0),
        num_out,
        eps,
        HAS_BIAS=has_bias,
        SPLITS=product.num_splits,
        COLUMNS=columns,
        num_warps=min(max(columns // 128, 1), 16),
        **launch_options(can_overlap(parts.device)),
    )
    return out
