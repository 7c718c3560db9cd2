"""SiLU(gate) * up, the gate of a Llama MLP, on the output of one fused projection.

gate_up [n, 2 * intermediate] = [gate | up]   ->   out [n, intermediate]      float32 inside
"""

from __future__ import annotations

import torch

from nanorunner.kernels.pdl import can_overlap, gdc_launch_dependents, gdc_wait, launch_options
from nanorunner.kernels.triton_support import jit, next_power_of_two, tl

MAX_COLUMNS = 1024  # of one program: 8 elements for each thread of 4 warps


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half of gate_up [n, 2 * intermediate]."""
    return silu_mul_triton(gate_up) if gate_up.is_cuda else silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """silu_mul in plain PyTorch, on any device; each of its two steps rounds to gate_up's dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """silu_mul as one Triton launch; the rows may be strided, the last dim may not."""
    num_rows, width = gate_up.shape
    intermediate = width // 2
    assert gate_up.stride(1) == 1, "silu_mul needs rows whose elements lie side by side"
    out = torch.empty((num_rows, intermediate), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows == 0:
        return out
    columns = min(next_power_of_two(intermediate), MAX_COLUMNS)
    grid = (num_rows, -(-intermediate // columns))
    _silu_mul_kernel[grid](
        gate_up,
        out,
        gate_up.stride(0),
        intermediate,
        COLUMNS=columns,
        num_warps=max(columns // 256, 1),
        **launch_options(can_overlap(gate_up.device)),
    )
    return out


@jit()
def _silu_mul_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    intermediate: tl.tensor,
    COLUMNS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One tile of COLUMNS columns of one row."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < intermediate
    place = gate_up + row * row_stride + columns
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + intermediate, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * intermediate + columns, gate * tl.sigmoid(gate) * up, mask=inside)
