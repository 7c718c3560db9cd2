"""The Triton kernel of kernels/medium_rows.py: tiles of a product, over shares of its columns.

    program = (tile of the weight's rows, share of the columns, tile of x's rows)

Its parts are in medium_rows_tile.py; what adds shares up is in medium_rows_join.py.

What such a projection waits for is traffic between L2 and the processors, about 45 KB a
microsecond and processor: every program reads its rows of x beside its weights. With P programs of
a share of C columns it is

    bytes = 2 P C (out_tile + rows) + 8 splits rows out      (parts: 4 bytes, written and read)

so at 64 rows, qkv of Qwen3-0.6B [4096, 1024]: 128 programs of 32 whole rows 25 MB, 64 of 64 17 MB,
where the weight alone has 8; o [1024, 2048]: 64 programs of 16 whole rows 21 MB, 128 of 64 rows and
an eighth of the columns 13 MB. Small shares of few columns are therefore better than few rows of
the weight, until the parts weigh as much.

Before the wait of kernels/pdl.py a program fetches weights alone. A share of one step: the whole
tile, into shared memory. Of more steps: into L2, by the copy engine, as much as EARLY_BYTES allow;
the steps then find it there, and Triton's pipeline copies tiles of weight and x ahead of the
products.

Of 2 to 16 rows (row_tile 16, the weight as the instruction's first operand) x is small beside the
weight: what counts there is that every processor has weights on their way until the end.

A program's rows of the weight are a tile of a power of two, and beside it, where the plan's
out_tile is one and a half of one, a side tile of half as many: in each step both are multiplied by
the same rows of x, into two products. 24576 rows are 192 tiles of 128, one and a half turns of 132
processors, but 128 tiles of 128 + 64, one turn.

    rows of the weight     program 0: OUT_TILE | SIDE_TILE     program 1: OUT_TILE | SIDE_TILE  ...
"""

from __future__ import annotations

from nanorunner.kernels.medium_rows_tile import (
    fetch_tile,
    lines_of_tile,
    load_lines,
    load_rows,
    multiply,
    store_product,
    zero_product,
)
from nanorunner.kernels.pdl import gdc_launch_dependents, gdc_wait
from nanorunner.kernels.triton_support import jit, tl


@jit(counts=("num_rows",))
def tiles_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,  # [rows, units] model dtype, or parts [splits, rows, weight's rows] float32
    x_stride: tl.tensor,
    num_rows: tl.tensor,
    num_units: tl.tensor,  # rows of the weight, of either half when gated
    num_in: tl.tensor,
    share: tl.tensor,  # columns a program, whole steps
    early: tl.tensor,  # columns that go to L2 before the wait
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_EVEN: tl.constexpr,  # no row and no column of the weight is masked
    IS_SWAPPED: tl.constexpr,
    IS_HELD: tl.constexpr,  # the share is one step
    IS_EARLY: tl.constexpr,
    IS_LATE: tl.constexpr,  # starts the next kernel only when all before this one have ended
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    SIDE_TILE: tl.constexpr,  # half of OUT_TILE, or 0: then there is none
    IN_TILE: tl.constexpr,
    WARPS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """A tile of the product, and the one beside it, over one share of the columns."""
    if USE_PDL and not IS_LATE:
        gdc_launch_dependents()
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, num_in)
    column = tl.arange(0, IN_TILE)
    halves: tl.constexpr = 2 if IS_GATED else 1
    first_unit = tl.program_id(0) * ((OUT_TILE + SIDE_TILE) // halves)
    unit, line = lines_of_tile(first_unit, num_units, IS_GATED, OUT_TILE)
    is_unit = unit < num_units
    row = tl.program_id(2) * ROW_TILE + tl.arange(0, ROW_TILE)
    is_row = row < num_rows
    # int64 before the product: a weight may pass 2^31 elements.
    weight_place = weight + (line.to(tl.int64) * num_in)[:, None] + (begin + column)[None, :]
    x_place = x + (row * x_stride)[:, None] + (begin + column)[None, :]
    if SIDE_TILE > 0:
        side_first = first_unit + OUT_TILE // halves
        side_unit, side_line = lines_of_tile(side_first, num_units, IS_GATED, SIDE_TILE)
        is_side_unit = side_unit < num_units
        side_place = weight + (side_line.to(tl.int64) * num_in)[:, None] + (begin + column)[None, :]
    if IS_HELD:
        is_column = begin + column < end
        tile = load_lines(weight_place, is_unit, is_column, IS_EVEN)
        if SIDE_TILE > 0:
            side_tile = load_lines(side_place, is_side_unit, is_column, IS_EVEN)
    elif IS_EARLY and USE_PDL:
        num_bytes = tl.minimum(early, end - begin) * (
            weight.dtype.element_ty.primitive_bitwidth // 8
        )
        fetch_tile(weight, first_unit, num_units, begin, num_in, num_bytes, WARPS, halves, OUT_TILE)
        if SIDE_TILE > 0:
            fetch_tile(
                weight, side_first, num_units, begin, num_in, num_bytes, WARPS, halves, SIDE_TILE
            )
    if USE_PDL:
        gdc_wait()
        if IS_LATE:
            gdc_launch_dependents()

    product = zero_product(IS_SWAPPED, ROW_TILE, OUT_TILE)
    if SIDE_TILE > 0:
        side_product = zero_product(IS_SWAPPED, ROW_TILE, SIDE_TILE)
    if IS_HELD:
        value = load_rows(x_place, is_row, begin + column < end, IS_EVEN)
        product = multiply(tile, value, product, IS_SWAPPED)
        if SIDE_TILE > 0:
            side_product = multiply(side_tile, value, side_product, IS_SWAPPED)
    else:
        for start in range(0, end - begin, IN_TILE):
            is_column = begin + start + column < end
            tile = load_lines(weight_place + start, is_unit, is_column, IS_EVEN)
            value = load_rows(x_place + start, is_row, is_column, IS_EVEN)
            product = multiply(tile, value, product, IS_SWAPPED)
            if SIDE_TILE > 0:
                side_tile = load_lines(side_place + start, is_side_unit, is_column, IS_EVEN)
                side_product = multiply(side_tile, value, side_product, IS_SWAPPED)

    store_product(
        product, bias, out, row, is_row, num_rows, line, is_unit, first_unit, num_units,
        HAS_BIAS, IS_GATED, IS_SPLIT, IS_SWAPPED, ROW_TILE, OUT_TILE,
    )  # fmt: skip
    if SIDE_TILE > 0:
        store_product(
            side_product, bias, out, row, is_row, num_rows, side_line, is_side_unit, side_first,
            num_units, HAS_BIAS, IS_GATED, IS_SPLIT, IS_SWAPPED, ROW_TILE, SIDE_TILE,
        )  # fmt: skip
