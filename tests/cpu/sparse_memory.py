"""A tensor larger than the machine's memory, for tests of 64-bit offsets."""

from __future__ import annotations

import mmap

import torch

MAP_NORESERVE = 0x4000  # Linux; the mmap module names it from Python 3.13 on


def sparse_int32(*shape: int) -> torch.Tensor:
    """Return zeros whose pages take memory only once they are written."""
    num_bytes = 4 * torch.Size(shape).numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.int32).view(shape)
