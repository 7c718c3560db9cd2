"""Small all-reduces over memory that the GPUs of one host map from each other.

    one shot    every rank sends x to all and adds up all: one hop, (ranks - 1) x as much traffic
    two shot    rank r adds up part r and sends the sum to all: two hops, less traffic
    add + norm  one shot, and add_rms_norm of the sum in the same kernel
    maximum     one shot, of int64 keys

Sums are those of sum_in_rank_order: float32, rank 0 first, rounded once. So all ranks get the same
bits, for any form, size and batch. peer_ring.py tells how packets travel and why none is lost. All
of it can be captured in CUDA graphs; every rank must make the same calls in the same order, on one
stream. After a rank gave up (peer_ring.py) results are nonsense, and the host has to look.

`steps` leaves out steps of the kernels, for tests that play all ranks in one process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from nanorunner.kernels.pdl import can_overlap, launch_options
from nanorunner.kernels.peer_all_reduce_triton import (
    add_rms_norm_kernel,
    max_kernel,
    one_shot_kernel,
    two_shot_kernel,
)
from nanorunner.kernels.peer_ring import WORD_BYTES, PeerRing
from nanorunner.kernels.triton_support import next_power_of_two

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SEND, SUM, GATHER = "send", "sum", "gather"
ALL_STEPS = frozenset({SEND, SUM, GATHER})
# Words a program, one for each of its threads: so a warp stores 512 bytes in a row. The small tile
# spreads a tensor over many programs, for one sends but so fast; the large one keeps a big tensor
# within the programs that surely run at once. No more, as each is a kernel, compiled at start.
SMALL_TILE, LARGE_TILE = 256, 1024
MAX_WARPS = 32
MIN_ROW_WORDS = 32  # a warp; all_reduce_add_rms_norm leaves narrower models to others


def sum_in_rank_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return parts[0] + parts[1] + ... in float32, one after the other, in the parts' dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def one_shot_bytes(ring: PeerRing) -> int:
    """Return the largest tensor that the one-shot forms take."""
    return min(ring.capacity // ring.ranks, ring.max_programs * LARGE_TILE) * WORD_BYTES


def two_shot_bytes(ring: PeerRing) -> int:
    """Return the largest tensor that the two-shot form takes."""
    part_words = min(ring.capacity // 2 // ring.ranks, ring.max_programs * LARGE_TILE)
    return part_words * ring.ranks * WORD_BYTES


def is_plain(x: torch.Tensor) -> bool:
    """Return whether the sums take x, but for its size: words that lie side by side."""
    num_bytes = x.numel() * x.element_size()
    is_whole = num_bytes > 0 and num_bytes % WORD_BYTES == 0 and x.data_ptr() % WORD_BYTES == 0
    return x.dtype in DTYPES and x.is_contiguous() and is_whole


def fits_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, ring: PeerRing
) -> bool:
    """Return whether all_reduce_add_rms_norm takes these."""
    is_alike = x.dtype == residual.dtype == weight.dtype and x.shape == residual.shape
    rows, hidden = x.shape
    row_bytes = hidden * x.element_size()
    is_whole = row_bytes % WORD_BYTES == 0 and row_bytes >= MIN_ROW_WORDS * WORD_BYTES
    is_small = rows <= ring.max_programs and rows * row_bytes <= one_shot_bytes(ring)
    return is_alike and is_whole and is_small and all(map(is_plain, (x, residual, weight)))


def fits_max(keys: torch.Tensor, ring: PeerRing) -> bool:
    """Return whether all_reduce_max takes keys."""
    limit = min(ring.capacity // ring.ranks, ring.max_programs * SMALL_TILE)
    return keys.dtype == torch.int64 and keys.is_contiguous() and 1 <= keys.numel() <= limit


def all_reduce_one_shot(
    x: torch.Tensor, ring: PeerRing, *, steps: frozenset[str] = ALL_STEPS
) -> torch.Tensor:
    """Sum x over the ranks, in place, and return it; x is plain and at most one_shot_bytes."""
    num_words = _num_words(x)
    assert is_plain(x) and num_words * WORD_BYTES <= one_shot_bytes(ring), "not for one shot"  # noqa: PT018
    tile = _tile(num_words, ring)
    one_shot_kernel[(-(-num_words // tile),)](
        x,
        ring.table,
        num_words,
        SENDS=SEND in steps,
        SUMS=SUM in steps,
        **_settings(tile, ring),
    )
    return x


def all_reduce_two_shot(
    x: torch.Tensor, ring: PeerRing, *, steps: frozenset[str] = ALL_STEPS
) -> torch.Tensor:
    """Sum x over the ranks, in place, and return it; x is plain and at most two_shot_bytes."""
    num_words = _num_words(x)
    assert is_plain(x) and num_words * WORD_BYTES <= two_shot_bytes(ring), "not for two shots"  # noqa: PT018
    part_words = -(-num_words // ring.ranks)
    tile = _tile(part_words, ring)
    two_shot_kernel[(-(-part_words // tile),)](
        x,
        ring.table,
        num_words,
        part_words,
        SENDS=SEND in steps,
        SUMS=SUM in steps,
        GATHERS=GATHER in steps,
        **_settings(tile, ring),
    )
    return x


def all_reduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ring: PeerRing,
    *,
    steps: frozenset[str] = ALL_STEPS,
) -> torch.Tensor:
    """Add the sum of x over the ranks to residual in place; return the norm of that, a new tensor.

    x and residual are [n, hidden], weight is [hidden]; fits_add_rms_norm says which. x is not
    changed. residual is bit for bit what an all-reduce and add_rms_norm leave; the norm adds its
    squares up in another order than theirs.
    """
    assert fits_add_rms_norm(x, residual, weight, ring), "not for the fused form"
    rows, hidden = x.shape
    out = torch.empty_like(x)
    add_rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        ring.table,
        eps,
        HIDDEN=hidden,
        SENDS=SEND in steps,
        SUMS=SUM in steps,
        **_settings(next_power_of_two(_num_words(x) // rows), ring),
    )
    return out


def all_reduce_max(
    keys: torch.Tensor, ring: PeerRing, *, steps: frozenset[str] = ALL_STEPS
) -> torch.Tensor:
    """Replace int64 keys by their maxima over the ranks, in place; fits_max(keys) must hold."""
    assert fits_max(keys, ring), "not for the maximum"
    max_kernel[(-(-keys.numel() // SMALL_TILE),)](
        keys,
        ring.table,
        keys.numel(),
        SENDS=SEND in steps,
        SUMS=SUM in steps,
        **_settings(SMALL_TILE, ring),
    )
    return keys


def _num_words(x: torch.Tensor) -> int:
    return x.numel() * x.element_size() // WORD_BYTES


def _tile(num_words: int, ring: PeerRing) -> int:
    return SMALL_TILE if num_words <= SMALL_TILE * ring.max_programs else LARGE_TILE


def _settings(block: int, ring: PeerRing) -> dict[str, Any]:
    """Return the keyword arguments that every launch has."""
    return {
        "RANK": ring.rank,
        "RANKS": ring.ranks,
        "CAPACITY": ring.capacity,
        "CHECK_EVERY": ring.check_every,
        "IS_DEVICE": os.environ.get("TRITON_INTERPRET") != "1",  # which knows no assembly
        "BLOCK": block,
        "num_warps": min(max(block // 32, 1), MAX_WARPS),
        **launch_options(can_overlap(ring.table.device)),
    }
