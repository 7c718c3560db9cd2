"""The parts of medium_rows_kernels.py: a tile's places, its loads, its product and where that goes.

    lines_of_tile   which rows of the weight
    fetch_tile      a hint: the first columns of these to L2
    load_lines      a step of the weight's tile; load_rows: of x
    multiply        one onto a product
    store_product   with bias and gate to the output, or to a part

A gated tile has 8 rows of the gate, then the same 8 rows of up, and so on: a thread's part of the
product then holds both of each pair, and the gate needs no exchange.
"""

from __future__ import annotations

from nanorunner.kernels.triton_support import jit, tl


@jit()
def lines_of_tile(
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
def fetch_tile(
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
def load_lines(
    place: tl.tensor, is_unit: tl.tensor, is_column: tl.tensor, IS_EVEN: tl.constexpr
) -> tl.tensor:
    """Return a tile of the weight [lines, columns], zero where there is none."""
    if IS_EVEN:
        return tl.load(place)
    else:
        return tl.load(place, mask=is_unit[:, None] & is_column[None, :], other=0.0)


@jit()
def load_rows(
    place: tl.tensor, is_row: tl.tensor, is_column: tl.tensor, IS_EVEN: tl.constexpr
) -> tl.tensor:
    """Return a tile of x [rows, columns], zero where there is none."""
    if IS_EVEN:
        return tl.load(place, mask=is_row[:, None], other=0.0)
    else:
        return tl.load(place, mask=is_row[:, None] & is_column[None, :], other=0.0)


@jit()
def zero_product(IS_SWAPPED: tl.constexpr, ROW_TILE: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return a product to which nothing was added yet."""
    if IS_SWAPPED:
        return tl.zeros((TILE, ROW_TILE), tl.float32)
    else:
        return tl.zeros((ROW_TILE, TILE), tl.float32)


@jit()
def multiply(
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
def store_product(
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
