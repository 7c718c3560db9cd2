"""The Triton kernels of kernels/few_rows.py, which says what they compute.

    rows_kernel   program = OUT_TILE rows of the weight, whole, times one vector after another
    dot_kernel    program = (OUT_TILE rows of the weight, share of the columns), up to 16 vectors,
                  in kernels/few_rows_dot.py
    sum_kernel    adds the shares up, in their order
    norm_kernel   add + norm of one row, for the plans that keep it apart

A program that norms reads all of x again; it is small and lies in L2. The norm's scale is one
number a row, so it multiplies the finished sum: one pass over x makes both the sum of squares and
the product. Weights are fetched before the wait of kernels/pdl.py, and leave the cache first.
"""

from __future__ import annotations

from nanorunner.kernels.pdl import gdc_launch_dependents, gdc_wait
from nanorunner.kernels.triton_support import jit, tl


@jit()
def total_of(
    x: tl.tensor,  # pointers, the places in them, and which of them this program keeps
    residual: tl.tensor,
    total: tl.tensor,
    mask: tl.tensor,
    kept: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
) -> tl.tensor:
    """Return x, or residual + x rounded to the model dtype and stored by the one writer."""
    value = tl.load(x, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        wide = tl.load(residual, mask=mask, other=0.0).to(tl.float32) + value.to(tl.float32)
        value = wide.to(value.dtype)
        tl.store(total, value, mask=mask & kept)
    return value


@jit()
def _weights_of(place: tl.tensor, mask: tl.tensor, IS_EVEN: tl.constexpr) -> tl.tensor:
    """Load a tile of the weight, which no one needs again in this step."""
    if IS_EVEN:
        return tl.load(place, eviction_policy="evict_first")
    else:
        return tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first")


@jit()
def rows_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    gain: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    num_out: tl.tensor,
    eps: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_IN: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    IS_LATE: tl.constexpr,  # starts the next kernel only when all before this one have ended
    USE_PDL: tl.constexpr,
) -> None:
    """OUT_TILE rows of the weight (and of its second half when gated) times each row of x."""
    if USE_PDL and not IS_LATE:
        gdc_launch_dependents()
    out_column = tl.program_id(0) * OUT_TILE + tl.arange(0, OUT_TILE)
    column = tl.arange(0, IN_TILE)
    in_range = out_column < num_out
    # Each program computes the total; the first one alone keeps it.
    num_kept = tl.where(tl.program_id(0) == 0, NUM_IN, 0)
    # int64 before the product: a weight may pass 2^31 elements.
    place = weight + out_column[:, None].to(tl.int64) * NUM_IN + column[None, :]
    up_place = place + tl.cast(num_out, tl.int64) * NUM_IN
    mask = in_range[:, None] & (column < NUM_IN)[None, :]
    first = _weights_of(place, mask, IS_EVEN)
    first_up = first
    if IS_GATED:
        first_up = _weights_of(up_place, mask, IS_EVEN)
    if USE_PDL:
        gdc_wait()
        if IS_LATE:
            gdc_launch_dependents()

    for row in tl.static_range(NUM_ROWS):
        # Elementwise over the chunks and reduced once: nothing between them stops the loads.
        square = tl.zeros((IN_TILE,), tl.float32)
        mixed = tl.zeros((OUT_TILE, IN_TILE), tl.float32)
        mixed_up = tl.zeros((OUT_TILE, IN_TILE), tl.float32)
        for start in tl.static_range(0, NUM_IN, IN_TILE):
            inside = start + column < NUM_IN
            mask = in_range[:, None] & inside[None, :]
            tile = first
            if start > 0:
                tile = _weights_of(place + start, mask, IS_EVEN)
            value = total_of(
                x + row * x_stride + start + column,
                residual + row * residual_stride + start + column,
                total + row * NUM_IN + start + column,
                inside,
                start + column < num_kept,
                HAS_RESIDUAL,
            ).to(tl.float32)
            if HAS_NORM:
                square += value * value
                grown = tl.load(gain + start + column, mask=inside, other=0.0)
                value = value * grown.to(tl.float32)
            mixed += tile.to(tl.float32) * value[None, :]
            if IS_GATED:
                tile = first_up
                if start > 0:
                    tile = _weights_of(up_place + start, mask, IS_EVEN)
                mixed_up += tile.to(tl.float32) * value[None, :]

        result = tl.sum(mixed, axis=1)
        scale = 1.0
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(square, axis=0) / NUM_IN + eps)
            result = result * scale
        if HAS_BIAS:
            result += tl.load(bias + out_column, mask=in_range, other=0.0).to(tl.float32)
        if IS_GATED:
            up = tl.sum(mixed_up, axis=1) * scale
            if HAS_BIAS:
                up += tl.load(bias + num_out + out_column, mask=in_range, other=0.0).to(tl.float32)
            result = result * tl.sigmoid(result) * up
        tl.store(out + row * num_out + out_column, result, mask=in_range)


@jit()
def sum_kernel(
    parts: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_out: tl.tensor,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """TILE columns of one row of parts [SPLITS, rows, out], added up in order."""
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()  # late: a decode attention may come next
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < num_out
    result = tl.zeros((TILE,), tl.float32)
    for split in tl.static_range(SPLITS):
        part = parts + (split * tl.num_programs(0) + row) * num_out + column
        result += tl.load(part, mask=inside, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * num_out + column, result, mask=inside)


@jit()
def norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    gain: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    num_in: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    COLUMNS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """The norm of one row of total = residual + x."""
    if USE_PDL:
        gdc_launch_dependents()
    column = tl.arange(0, COLUMNS)
    inside = column < num_in
    grown = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    value = total_of(
        x + row * x_stride + column, residual + row * residual_stride + column,
        total + row * num_in + column, inside, inside, HAS_RESIDUAL,
    )  # fmt: skip
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / num_in + eps)
    tl.store(out + row * num_in + column, wide * scale * grown, mask=inside)
