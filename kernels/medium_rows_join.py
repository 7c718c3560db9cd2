"""What follows medium_rows_kernels.py where programs share the columns: their parts are added up.

join_kernel       in the parts' order, with SiLU * up where the weight is gate_up
join_norm_kernel  one row: parts, residual and RMSNorm, which is a launch of its own anyway
"""

from __future__ import annotations

from nanorunner.kernels.pdl import gdc_launch_dependents, gdc_wait
from nanorunner.kernels.triton_support import jit, tl


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
