"""The matrix kernel of kernels/few_rows.py: a weight that passes through registers alone.

A program holds OUT_TILE rows of the weight, its warps share their columns, and the warps' products
meet at the end. A matrix instruction wants its operands spread over the lanes of a warp: lane
4 g + t holds row g and row g + 8, and of 16 columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9. A sum knows no
order, so here lane 4 g + t loads 8 columns that lie side by side, 16 bytes at once, and calls them
what the instruction expects; x is renamed alike. So nothing goes through shared memory, no barrier
stops the loads, and the first step's weights are in flight before the wait of kernels/pdl.py.

    load    tile[q, c]: q = ((h * DEPTH + d) * WARPS + warp) * 8 + g, c = 8 t + 2 i + j
    rename  weight[warp, row 8 h + g, column 32 d + 8 i + 2 t + j]

tests/cpu/test_few_rows_compile.py holds the compiler to it: instructions of 16 bytes, no matrix
through shared memory.
"""

from __future__ import annotations

from nanorunner.kernels.few_rows_kernels import total_of
from nanorunner.kernels.pdl import gdc_launch_dependents, gdc_wait
from nanorunner.kernels.triton_support import jit, tl

CHUNK = 32  # columns of a row that the 4 lanes of a row load at once


@jit()
def _chunk_of(q: tl.tensor, DEPTH: tl.constexpr, WARPS: tl.constexpr) -> tl.tensor:
    """Return the first column of tile row q, within a step; a warp's columns lie together."""
    return (q // 8 % WARPS * DEPTH + q // (8 * WARPS) % DEPTH) * 32


@jit()
def _line_of(q: tl.tensor, DEPTH: tl.constexpr, WARPS: tl.constexpr) -> tl.tensor:
    """Return the row of the weight, or of x, that tile row q belongs to."""
    return q // (8 * WARPS * DEPTH) * 8 + q % 8


@jit()
def _operand(
    tile: tl.tensor,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tensor:
    """Return tile as [WARPS, LINES, DEPTH * 32]: other names, the same registers."""
    parts = tl.reshape(tile, (LINES // 8, DEPTH, WARPS, 8, 4, 4, 2))
    parts = tl.permute(parts, (2, 0, 3, 1, 5, 4, 6))
    return tl.reshape(parts, (WARPS, LINES, DEPTH * 32))


@jit()
def _is_inside(
    chunk: tl.tensor, start: tl.tensor, end: tl.tensor, IS_RAGGED: tl.constexpr
) -> tl.tensor:
    """Return which columns of a step lie before end; whole chunks unless the width is ragged."""
    column = (chunk + start)[:, None]
    if IS_RAGGED:
        column += tl.arange(0, 32)[None, :]
    return column < end


@jit()
def _weights_of(
    place: tl.tensor,
    in_range: tl.tensor,
    chunk: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    IS_EVEN: tl.constexpr,
    IS_RAGGED: tl.constexpr,
) -> tl.tensor:
    """Load a step of the weight, which no one needs again in this layer."""
    if IS_EVEN:
        return tl.load(place + start, eviction_policy="evict_first")
    else:
        mask = in_range[:, None] & _is_inside(chunk, start, end, IS_RAGGED)
        return tl.load(place + start, mask=mask, other=0.0, eviction_policy="evict_first")


@jit()
def _value_of(
    x: tl.tensor,  # pointers
    residual: tl.tensor,
    total: tl.tensor,
    gain: tl.tensor,
    is_row: tl.tensor,
    is_kept: tl.tensor,
    is_inside: tl.tensor,
    square: tl.tensor,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROW_TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    WARPS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return a step of x, or of total * gain with its squares added to square [.., WARPS * 8]."""
    inside = is_row
    if not IS_EVEN:
        inside = is_row & is_inside
    value = total_of(x, residual, total, inside, is_kept, HAS_RESIDUAL)
    if HAS_NORM:
        wide = value.to(tl.float32)
        parts = tl.reshape(wide * wide, (ROW_TILE // 8, DEPTH, WARPS * 8, 32))
        square += tl.sum(tl.sum(parts, axis=1), axis=2)
        grown = tl.load(gain, mask=inside, other=0.0)
        value = (wide * grown.to(tl.float32)).to(value.dtype)
    return value, square


@jit()
def _product(
    tile: tl.tensor,
    value: tl.tensor,
    mixed: tl.tensor,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tensor:
    """Add a step to mixed; of the two operands the one with 16 lines comes first."""
    weight = _operand(tile, OUT_TILE, DEPTH, WARPS)
    x = _operand(value, ROW_TILE, DEPTH, WARPS)
    if OUT_TILE < 16:
        return tl.dot(x, tl.permute(weight, (0, 2, 1)), mixed, input_precision="ieee")
    else:
        return tl.dot(weight, tl.permute(x, (0, 2, 1)), mixed, input_precision="ieee")


@jit()
def _meet(mixed: tl.tensor, OUT_TILE: tl.constexpr) -> tl.tensor:
    """Return the warps' products added up, [OUT_TILE, rows]."""
    product = tl.sum(mixed, axis=0)
    if OUT_TILE < 16:
        product = tl.trans(product)
    return product


@jit(counts=("num_rows",))
def dot_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    gain: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,  # [rows, out] model dtype, or [SPLITS, rows, out] float32
    total: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    eps: tl.tensor,
    NUM_IN: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,  # no row and no column of the weight is masked
    IS_RAGGED: tl.constexpr,  # NUM_IN is no multiple of 32
    NUM_STEPS: tl.constexpr,  # of IN_TILE columns, a program
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    DEPTH: tl.constexpr,  # chunks of a row that a warp loads in a step
    WARPS: tl.constexpr,
    IS_LATE: tl.constexpr,  # starts the next kernel only when all before this one have ended
    USE_PDL: tl.constexpr,
) -> None:
    """A tile [OUT_TILE, rows] of the product, over one share of the columns."""
    if USE_PDL and not IS_LATE:
        gdc_launch_dependents()
    IN_TILE: tl.constexpr = DEPTH * WARPS * 32
    begin = tl.program_id(1) * (NUM_STEPS * IN_TILE)
    end = tl.minimum(begin + NUM_STEPS * IN_TILE, NUM_IN)
    lane_column = tl.arange(0, 32)[None, :]
    q = tl.arange(0, OUT_TILE * DEPTH * WARPS)
    chunk = _chunk_of(q, DEPTH, WARPS)
    line = tl.program_id(0) * OUT_TILE + _line_of(q, DEPTH, WARPS)
    in_range = line < num_out
    # int64 before the product: a weight may pass 2^31 elements.
    place = weight + (line.to(tl.int64) * NUM_IN + chunk)[:, None] + lane_column
    up_place = place + tl.cast(num_out, tl.int64) * NUM_IN
    tile = _weights_of(place, in_range, chunk, begin, end, IS_EVEN, IS_RAGGED)
    up_tile = tile
    if IS_GATED:
        up_tile = _weights_of(up_place, in_range, chunk, begin, end, IS_EVEN, IS_RAGGED)

    q_row = tl.arange(0, ROW_TILE * DEPTH * WARPS)
    row_chunk = _chunk_of(q_row, DEPTH, WARPS)
    row_line = _line_of(q_row, DEPTH, WARPS)
    is_row = (row_line < num_rows)[:, None]
    # Each program computes the total; the first one alone keeps it.
    is_kept = (row_line < tl.where(tl.program_id(0) == 0, num_rows, 0))[:, None]
    x_place = x + (row_line * x_stride + row_chunk)[:, None] + lane_column
    residual_place = residual + (row_line * residual_stride + row_chunk)[:, None] + lane_column
    total_place = total + (row_line * NUM_IN + row_chunk)[:, None] + lane_column
    gain_place = gain + row_chunk[:, None] + lane_column

    square = tl.zeros((ROW_TILE // 8, WARPS * 8), tl.float32)
    if OUT_TILE < 16:
        mixed = tl.zeros((WARPS, ROW_TILE, OUT_TILE), tl.float32)
    else:
        mixed = tl.zeros((WARPS, OUT_TILE, ROW_TILE), tl.float32)
    mixed_up = mixed
    for step in tl.static_range(NUM_STEPS):
        start = begin + step * IN_TILE
        now, up_now = tile, up_tile
        # The next step's weights are on their way while this one's are multiplied.
        if step + 1 < NUM_STEPS:
            ahead = start + IN_TILE
            tile = _weights_of(place, in_range, chunk, ahead, end, IS_EVEN, IS_RAGGED)
            if IS_GATED:
                up_tile = _weights_of(up_place, in_range, chunk, ahead, end, IS_EVEN, IS_RAGGED)
        if step == 0:
            if USE_PDL:
                gdc_wait()
                if IS_LATE:
                    gdc_launch_dependents()
        elif step + 1 < NUM_STEPS:
            # Keeps it so: to save registers the assembler would load each weight at its use, and
            # x, which comes after the barrier, is what keeps this step's products after it.
            tl.debug_barrier()
        value, square = _value_of(
            x_place + start, residual_place + start, total_place + start, gain_place + start,
            is_row, is_kept, _is_inside(row_chunk, start, end, IS_RAGGED), square,
            HAS_NORM, HAS_RESIDUAL, IS_EVEN, ROW_TILE, DEPTH, WARPS,
        )  # fmt: skip
        mixed = _product(now, value, mixed, ROW_TILE, OUT_TILE, DEPTH, WARPS)
        if IS_GATED:
            mixed_up = _product(up_now, value, mixed_up, ROW_TILE, OUT_TILE, DEPTH, WARPS)

    row = tl.arange(0, ROW_TILE)
    out_column = tl.program_id(0) * OUT_TILE + tl.arange(0, OUT_TILE)
    is_column = out_column < num_out
    product = _meet(mixed, OUT_TILE)
    scale = tl.full((1, ROW_TILE), 1.0, tl.float32)
    if HAS_NORM:
        squares = tl.sum(tl.reshape(square, (ROW_TILE // 8, WARPS, 8)), axis=1)
        scale = tl.rsqrt(tl.reshape(squares, (ROW_TILE,)) / NUM_IN + eps)[None, :]
        product = product * scale
    if HAS_BIAS:
        product += tl.load(bias + out_column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        up = _meet(mixed_up, OUT_TILE) * scale
        if HAS_BIAS:
            up_bias = tl.load(bias + num_out + out_column, mask=is_column, other=0.0)
            up += up_bias.to(tl.float32)[:, None]
        product = product * tl.sigmoid(product) * up
    out_row = tl.program_id(1) * num_rows + row
    out_place = out + out_row[None, :].to(tl.int64) * num_out + out_column[:, None]
    tl.store(out_place, product, mask=(row < num_rows)[None, :] & is_column[:, None])
