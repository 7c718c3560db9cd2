"""x @ weight.T + bias whose every row is the same, bit for bit, whatever rows stand beside it.

cuBLAS picks its tiles, and how it cuts up the sum over `in`, by the number of rows: a request's
logits then depend on who shares its batch. Here one tile serves a weight for every row count, and
the sum runs over `in` from its start to its end, BLOCK_IN at a time, in one accumulator.

On a CPU each row is a product of its own. Both are slower than kernels/linear.py, which is what
serves unless --batch-invariant asks for this.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanorunner.kernels.linear import linear
from nanorunner.kernels.triton_support import jit, tl

ROWS = 64  # of a tile; the smallest that Hopper's widest matrix instruction takes
WANTED_PROGRAMS = 128  # about as many as a large GPU has processors


class Tile(NamedTuple):
    """One program's share; it depends on the weight alone, never on the number of rows."""

    block_out: int
    block_in: int
    num_warps: int
    num_stages: int


def tile_of(num_out: int, item_bytes: int) -> Tile:
    """Return the tile of a weight [num_out, in]: a narrow one where it has few outputs."""
    block_out = 128
    while block_out > 16 and num_out // block_out < WANTED_PROGRAMS:
        block_out //= 2
    if item_bytes == 4:
        # Full float32 products run without tensor cores: small tiles, or registers spill.
        return Tile(min(block_out, 32), 32, 4, 2)
    return Tile(block_out, 128 if block_out <= 32 else 64, 4, 3)


def linear_batch_invariant(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x [rows, in] @ weight.T + bias as [rows, out]: kernels/linear.py, row by row alike.

    weight is [out, in], plain, or on a CPU also from linear.pack(). out: where to write.
    """
    if x.is_cuda:
        return linear_batch_invariant_triton(x, weight, bias, out)
    result = linear_batch_invariant_reference(x, weight, bias)
    return result if out is None else out.copy_(result)


def linear_batch_invariant_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """linear_batch_invariant as a loop over the rows; on the CPU."""
    # A copy starts at an aligned address: CPU libraries may sum in another order where it is not.
    rows = [linear(row[None].clone(), weight, bias) for row in x]
    return torch.cat(rows) if rows else x.new_empty((0, weight.shape[0]))


def linear_batch_invariant_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """linear_batch_invariant as one launch of (row tile, output tile) programs."""
    num_rows, num_in = x.shape
    num_out = weight.shape[0]
    assert x.is_contiguous(), "x must be contiguous"
    assert weight.is_contiguous(), "the weight must be contiguous"
    if out is None:
        out = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device)
    assert out.is_contiguous(), "the output must be contiguous"
    if num_rows == 0:
        return out
    tile = tile_of(num_out, x.element_size())
    _linear_kernel[(-(-num_rows // ROWS), -(-num_out // tile.block_out))](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_rows,
        NUM_OUT=num_out,
        NUM_IN=num_in,
        HAS_BIAS=bias is not None,
        ROWS=ROWS,
        BLOCK_OUT=tile.block_out,
        BLOCK_IN=tile.block_in,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


@jit(counts=("num_rows",))
def _linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
) -> None:
    """Program (row tile, output tile); row tiles run fastest, so they share a weight tile in L2."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inner = tl.arange(0, BLOCK_IN)
    has_row = (row < num_rows)[:, None]
    has_column = (column < NUM_OUT)[:, None]
    x_place = x + (row * NUM_IN)[:, None] + inner[None, :]
    weight_place = weight + (column * NUM_IN)[:, None] + inner[None, :]
    total = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
    for start in range(0, NUM_IN, BLOCK_IN):
        inside = (start + inner < NUM_IN)[None, :]
        some_x = tl.load(x_place + start, mask=has_row & inside, other=0.0)
        some_weight = tl.load(weight_place + start, mask=has_column & inside, other=0.0)
        total = tl.dot(some_x, tl.trans(some_weight), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < NUM_OUT, other=0.0).to(tl.float32)[None, :]
    place = out + (row * NUM_OUT)[:, None] + column[None, :]
    tl.store(place, total, mask=has_row & (column < NUM_OUT)[None, :])
