"""The Triton kernels of kernels/medium_rows.py, which says what they compute.

    tiles_kernel      program = (tile of the weight's rows, share of the columns, tile of x's rows)
    join_kernel       adds the shares up in their order, with SiLU * up where the weight is gate_up
    join_norm_kernel  one row: shares, residual and RMSNorm, which is a launch of its own anyway

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

A gated tile has 8 rows of the gate, then the same 8 rows of up, and so on: a thread's part of the
product then holds both of each pair, and the gate needs no exchange.
"""

from __future__ import annotations

from nanorunner.kernels.pdl import gdc_launch_dependents, gdc_wait
from nanorunner.kernels.triton_support import jit, tl


@jit()
def _lines_of_tile(
    first_unit: tl.tensor, num_units: tl.tensor, IS_GATED: tl.constexpr, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the unit [TILE] and the row of the weight [TILE] of each line of a tile."""
    place_in_tile = tl.arange(0, TILE)
    if IS_GATED:
        unit = first_unit + place_in_tile // 16 * 8 + place_in_tile % 8
        line = unit + place_in_tile // 8 % 2 * num_units
        return unit, line
    else:
        unit = first_unit + place_in_tile
        return unit, unit


@jit()
def _fetch_lines(
    weight: tl.tensor,
    lines: tl.tensor,
    num_lines: tl.tensor,
    column: tl.tensor,
    num_in: tl.tensor,
    num_bytes: tl.tensor,
    WARPS: tl.constexpr,
    LINES: tl.constexpr,
) -> None:
    """Start to copy num_bytes of each of this program's lines of the weight to L2: a hint.

    No value enters the program, so it may come before the wait. Places and bytes are multiples of
    COPY_BYTES (medium_rows_triton.py). The instruction takes one address at a time, so every warp
    starts its share of the lines.
    """
    thread = tl.arange(0, 32 * WARPS)
    lane = thread % 32
    line = lines + thread // 32 * (LINES // WARPS) + lane
    is_mine = (lane < LINES // WARPS) & (line < num_lines)
    tl.inline_asm_elementwise(
        """{
        .reg .pred mine;
        setp.ne.s32 mine, $3, 0;
        @mine cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r",
        [weight + line.to(tl.int64) * num_in + column, num_bytes, is_mine.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit()
def _fetch_tile(
    weight: tl.tensor,
    first_unit: tl.tensor,
    num_units: tl.tensor,
    column: tl.tensor,
    num_in: tl.tensor,
    num_bytes: tl.tensor,
    WARPS: tl.constexpr,
    HALVES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Start to copy num_bytes of each of a tile's lines to L2, as _fetch_lines does."""
    for half in tl.static_range(HALVES):
        _fetch_lines(
            weight, first_unit + half * num_units, (half + 1) * num_units, column, num_in,
            num_bytes, WARPS, TILE // HALVES,
        )  # fmt: skip


@jit()
def _load_lines(
    place: tl.tensor, is_unit: tl.tensor, is_column: tl.tensor, IS_EVEN: tl.constexpr
) -> tl.tensor:
    """Return a tile of the weight [lines, columns], zero where there is none."""
    if IS_EVEN:
        return tl.load(place)
    else:
        return tl.load(place, mask=is_unit[:, None] & is_column[None, :], other=0.0)


@jit()
def _load_rows(
    place: tl.tensor, is_row: tl.tensor, is_column: tl.tensor, IS_EVEN: tl.constexpr
) -> tl.tensor:
    """Return a tile of x [rows, columns], zero where there is none."""
    if IS_EVEN:
        return tl.load(place, mask=is_row[:, None], other=0.0)
    else:
        return tl.load(place, mask=is_row[:, None] & is_column[None, :], other=0.0)


@jit()
def _zero_product(
    IS_SWAPPED: tl.constexpr, ROW_TILE: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """Return a product to which nothing was added yet."""
    if IS_SWAPPED:
        return tl.zeros((TILE, ROW_TILE), tl.float32)
    else:
        return tl.zeros((ROW_TILE, TILE), tl.float32)


@jit()
def _multiply(
    tile: tl.tensor, value: tl.tensor, product: tl.tensor, IS_SWAPPED: tl.constexpr
) -> tl.tensor:
    """Add weight tile [out, in] times value [rows, in] to the product, which lies as IS_SWAPPED."""
    if IS_SWAPPED:
        return tl.dot(tile, tl.trans(value), product, input_precision="ieee")
    else:
        return tl.dot(value, tl.trans(tile), product, input_precision="ieee")


@jit()
def _gate(
    product: tl.tensor, ROW_TILE: tl.constexpr, OUT_TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return gate and up [rows, out / 2] of a product [rows, out] of a gated tile."""
    pairs = tl.reshape(product, (ROW_TILE, OUT_TILE // 16, 2, 8))
    gate, up = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    return tl.reshape(gate, (ROW_TILE, OUT_TILE // 2)), tl.reshape(up, (ROW_TILE, OUT_TILE // 2))


@jit()
def _store_product(
    product: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    row: tl.tensor,
    is_row: tl.tensor,
    num_rows: tl.tensor,
    line: tl.tensor,
    is_unit: tl.tensor,
    first_unit: tl.tensor,
    num_units: tl.tensor,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    ROW_TILE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write a tile's product to its part, or with bias and gate to the output."""
    halves: tl.constexpr = 2 if IS_GATED else 1
    if IS_SWAPPED:
        product = tl.trans(product)
    if IS_SPLIT:
        part = out + (tl.program_id(1) * num_rows).to(tl.int64) * (halves * num_units)
        part_place = part + (row * (halves * num_units))[:, None] + line[None, :]
        tl.store(part_place, product, mask=is_row[:, None] & is_unit[None, :])
    else:
        if HAS_BIAS:
            product += tl.load(bias + line, mask=is_unit, other=0.0).to(tl.float32)[None, :]
        column_out = first_unit + tl.arange(0, TILE // halves)
        if IS_GATED:
            gate, up = _gate(product, ROW_TILE, TILE)
            product = gate * tl.sigmoid(gate) * up
        out_place = out + (row * num_units)[:, None] + column_out[None, :]
        tl.store(out_place, product, mask=is_row[:, None] & (column_out < num_units)[None, :])


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
    unit, line = _lines_of_tile(first_unit, num_units, IS_GATED, OUT_TILE)
    is_unit = unit < num_units
    row = tl.program_id(2) * ROW_TILE + tl.arange(0, ROW_TILE)
    is_row = row < num_rows
    # int64 before the product: a weight may pass 2^31 elements.
    weight_place = weight + (line.to(tl.int64) * num_in)[:, None] + (begin + column)[None, :]
    x_place = x + (row * x_stride)[:, None] + (begin + column)[None, :]
    if SIDE_TILE > 0:
        side_first = first_unit + OUT_TILE // halves
        side_unit, side_line = _lines_of_tile(side_first, num_units, IS_GATED, SIDE_TILE)
        is_side_unit = side_unit < num_units
        side_place = weight + (side_line.to(tl.int64) * num_in)[:, None] + (begin + column)[None, :]
    if IS_HELD:
        is_column = begin + column < end
        tile = _load_lines(weight_place, is_unit, is_column, IS_EVEN)
        if SIDE_TILE > 0:
            side_tile = _load_lines(side_place, is_side_unit, is_column, IS_EVEN)
    elif IS_EARLY and USE_PDL:
        num_bytes = tl.minimum(early, end - begin) * (
            weight.dtype.element_ty.primitive_bitwidth // 8
        )
        _fetch_tile(
            weight, first_unit, num_units, begin, num_in, num_bytes, WARPS, halves, OUT_TILE
        )
        if SIDE_TILE > 0:
            _fetch_tile(
                weight, side_first, num_units, begin, num_in, num_bytes, WARPS, halves, SIDE_TILE
            )
    if USE_PDL:
        gdc_wait()
        if IS_LATE:
            gdc_launch_dependents()

    product = _zero_product(IS_SWAPPED, ROW_TILE, OUT_TILE)
    if SIDE_TILE > 0:
        side_product = _zero_product(IS_SWAPPED, ROW_TILE, SIDE_TILE)
    if IS_HELD:
        value = _load_rows(x_place, is_row, begin + column < end, IS_EVEN)
        product = _multiply(tile, value, product, IS_SWAPPED)
        if SIDE_TILE > 0:
            side_product = _multiply(side_tile, value, side_product, IS_SWAPPED)
    else:
        for start in range(0, end - begin, IN_TILE):
            is_column = begin + start + column < end
            tile = _load_lines(weight_place + start, is_unit, is_column, IS_EVEN)
            value = _load_rows(x_place + start, is_row, is_column, IS_EVEN)
            product = _multiply(tile, value, product, IS_SWAPPED)
            if SIDE_TILE > 0:
                side_tile = _load_lines(side_place + start, is_side_unit, is_column, IS_EVEN)
                side_product = _multiply(side_tile, value, side_product, IS_SWAPPED)

    _store_product(
        product, bias, out, row, is_row, num_rows, line, is_unit, first_unit, num_units,
        HAS_BIAS, IS_GATED, IS_SPLIT, IS_SWAPPED, ROW_TILE, OUT_TILE,
    )  # fmt: skip
    if SIDE_TILE > 0:
        _store_product(
            side_product, bias, out, row, is_row, num_rows, side_line, is_side_unit, side_first,
            num_units, HAS_BIAS, IS_GATED, IS_SPLIT, IS_SWAPPED, ROW_TILE, SIDE_TILE,
        )  # fmt: skip


@jit()
def _sum_of_parts(
    place: tl.tensor,
    inside: tl.tensor,
    distance: tl.tensor,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return TILE columns of SPLITS parts, `distance` elements apart, added up in order."""
    result = tl.zeros((TILE,), tl.float32)
    for split in tl.static_range(SPLITS):
        result += tl.load(place + split * distance, mask=inside, other=0.0).to(tl.float32)
    return result


@jit()
def join_kernel(
    parts: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_units: tl.tensor,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_LATE: tl.constexpr,  # as tiles_kernel's
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """TILE columns of one row of parts [SPLITS, rows, units, twice as many when gated]."""
    if USE_PDL and not IS_LATE:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < num_units
    width = num_units * 2 if IS_GATED else num_units
    distance = tl.num_programs(0) * width
    place = parts + row * width + column
    if USE_PDL:
        gdc_wait()
        if IS_LATE:
            gdc_launch_dependents()
    result = _sum_of_parts(place, inside, distance, SPLITS, TILE)
    if HAS_BIAS:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if IS_GATED:
        up = _sum_of_parts(place + num_units, inside, distance, SPLITS, TILE)
        if HAS_BIAS:
            up += tl.load(bias + num_units + column, mask=inside, other=0.0).to(tl.float32)
        result = result * tl.sigmoid(result) * up
    tl.store(out + row * num_units + column, result, mask=inside)


@jit()
def join_norm_kernel(
    parts: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    gain: tl.tensor,
    out: tl.tensor,
    residual_stride: tl.tensor,
    num_out: tl.tensor,
    eps: tl.tensor,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One row: parts [SPLITS, rows, out] are added to the residual, out is its RMSNorm."""
    if USE_PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < num_out
    grown = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
    distance = tl.num_programs(0) * num_out
    result = _sum_of_parts(parts + row * num_out + column, inside, distance, SPLITS, COLUMNS)
    if HAS_BIAS:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    # Rounded where add_rms_norm finds it rounded: the projection, and its sum with the residual.
    place = residual + row * residual_stride + column
    before = tl.load(place, mask=inside, other=0.0)
    total = (before.to(tl.float32) + result.to(before.dtype).to(tl.float32)).to(before.dtype)
    tl.store(place, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / num_out + eps)
    tl.store(out + row * num_out + column, wide * scale * grown, mask=inside)
