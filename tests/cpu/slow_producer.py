"""A kernel that overlaps with the next one and is late: whoever does not wait reads too early."""

from __future__ import annotations

import torch

from nanorunner.kernels.pdl import can_overlap, gdc_launch_dependents, gdc_wait, launch_options
from nanorunner.kernels.triton_support import jit, tl

TURNS = 2000  # some microseconds


@jit()
def _slow_copy(
    source: tl.tensor,
    target: tl.tensor,
    turns: tl.tensor,
    TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Copy a tile after some microseconds, having let the next kernel start at once."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    value = tl.load(source + place).to(tl.float32)
    waste = value
    for _ in range(turns):
        waste = tl.sin(waste)
    # Never true, and the compiler cannot know.
    tl.store(target + place, tl.where(waste > 2.0, waste, value))


def slow_copy(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Fill target with source, late; both hold a multiple of 512 elements."""
    assert source.stride() == target.stride(), "memory is copied as it lies"
    assert source.is_contiguous(), "without gaps"
    options = launch_options(can_overlap(source.device))
    _slow_copy[(source.numel() // 512,)](source, target, TURNS, TILE=512, num_warps=1, **options)
    return target
