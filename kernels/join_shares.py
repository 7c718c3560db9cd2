"""Where the shares of one request meet: the program that is the last to arrive joins them.

decode_attention.py has for each request and KV head one program a share, and no second kernel:

    share_of_split    how many tokens a share has; it follows from the length, on the device
    write_share       one share: out at once
                      more: own part to partial and log_sum, barrier, arrived = counter++
                            arrived == shares - 1: read all parts, write out, counter = 0

The parts are joined in the order of the shares, whoever comes last: results do not depend on
timing. Programs left without tokens neither count nor write.

Why a counter is 0 whenever a launch begins. It counts to a number that follows from the length
alone, and no program reads a length while an earlier kernel may still write it; so exactly one
program sees the last number, and after it nobody adds. A launch that is refused (compilation,
resources) has run no program; one that faults on the device ends the CUDA context, counters and
all. Two launches must not touch them at once: those of a device are all in one stream's order, and
decode_attention, which may start while older kernels run (pdl.py), touches counters and parts only
after its wait, when all of them have ended; or, where it waits last, while one late kernel runs
that touches neither. The lengths it may read before, behind a late kernel that does not write them.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.triton_support import jit, next_power_of_two, tl

LEAST_COUNTERS = 1 << 16  # 256 KiB: 8,192 requests of 8 KV heads

# All 0 between launches. Owner: this module. Place: the device. Lifetime: the process, also of
# those that a larger one has followed: a captured graph keeps the address of the one it met. Last
# writer: the last program to arrive of the last launch that split a request.
_counters: dict[torch.device, list[torch.Tensor]] = {}


def share_counters(device: torch.device, count: int) -> torch.Tensor:
    """Return a device's counters, int32, at least so many, all 0 between launches.

    Raises RuntimeError when they would have to be made while a CUDA graph is captured: the graph
    would own their memory, and would clear them at its replays alone. Nothing has changed then.
    """
    buffers = _counters.setdefault(device, [])
    if not buffers or buffers[-1].numel() < count:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{count} counters of split requests are needed in a graph capture: run a batch of "
                "this size once before it is captured"
            )
        size = next_power_of_two(max(count, LEAST_COUNTERS))
        buffers.append(torch.zeros(size, dtype=torch.int32, device=device))
    return buffers[-1]


@jit()
def share_of_split(
    length: tl.tensor, num_splits: tl.tensor, MIN_SHARE: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """Tokens of each split but the last: an equal share, or the least, in whole tiles."""
    return tl.cdiv(tl.maximum(tl.cdiv(length, num_splits), MIN_SHARE), TILE) * TILE


@jit()
def write_share(
    best: tl.tensor,  # [ROWS] the largest score, in powers of two
    total: tl.tensor,  # [ROWS] the sum of the weights relative to it
    mixed: tl.tensor,  # [ROWS, COLUMNS] the values' sum under these weights
    out: tl.tensor,
    partial: tl.tensor,
    log_sum: tl.tensor,
    counters: tl.tensor,
    request: tl.tensor,  # int64
    kv_head: tl.tensor,
    split: tl.tensor,
    num_splits: tl.tensor,
    length: tl.tensor,
    share: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HEADS: tl.constexpr,  # GROUP's next power of two
    PARTS: tl.constexpr,  # how many parts the joining program reads at a time
) -> None:
    """Write one share's softmax result; the last thing that a program with tokens does.

    out [pairs, GROUP, HEAD_DIM], partial [pairs, num_splits, GROUP, HEAD_DIM] float32, log_sum
    [pairs, num_splits, GROUP] float32, counters [pairs]. The program that writes out may be another
    than this one, but it is one of this launch.
    """
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < GROUP)[:, None] & (column < HEAD_DIM)
    # Only a request of length 0 has a total of 0; it gets zeros.
    result = mixed / tl.maximum(total, 1.0e-30)[:, None]
    if IS_SPLIT and share < length:
        pair = request * NUM_KV_HEADS + kv_head
        part = (pair * num_splits + split) * GROUP
        tl.store(log_sum + part + row, best + tl.log2(total), mask=row < GROUP)
        tl.store(partial + (part + row)[:, None] * HEAD_DIM + column, result, mask=mask)
        # One thread counts for the program, and its release covers what the barrier has gathered.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + pair, 1, sem="acq_rel", scope="gpu")
        num_shares = tl.cdiv(length, share)
        if arrived == num_shares - 1:
            _join(
                out, partial, log_sum, pair, num_splits, num_shares,
                GROUP, HEAD_DIM, COLUMNS, HEADS, PARTS,
            )  # fmt: skip
            tl.store(counters + pair, 0)
    else:
        out_row = request * (NUM_KV_HEADS * GROUP) + (kv_head * GROUP + row)
        tl.store(out + out_row[:, None] * HEAD_DIM + column, result, mask=mask)


@jit()
def _join(
    out: tl.tensor,
    partial: tl.tensor,
    log_sum: tl.tensor,
    pair: tl.tensor,
    num_splits: tl.tensor,
    num_shares: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Write out from all shares' parts, weighted by their softmax sums, PARTS of them at a time."""
    number = tl.arange(0, PARTS)[:, None]
    head = tl.arange(0, HEADS)[None, :]
    column = tl.arange(0, COLUMNS)
    in_head = (column < HEAD_DIM)[None, None, :]
    # 32-bit offsets, added to a 64-bit scalar: half the registers.
    offset = number * GROUP + head
    element = offset[:, :, None] * HEAD_DIM + column[None, None, :]
    best = tl.full((HEADS,), -1.0e30, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    mixed = tl.zeros((HEADS, COLUMNS), tl.float32)
    for first in range(0, num_shares, PARTS):
        part = (pair * num_splits + first) * GROUP
        # What nobody has written may hold NaN.
        wrote = (first + number < num_shares) & (head < GROUP)
        mask = wrote[:, :, None] & in_head
        # Past the first cache: other processors have written these.
        sums = tl.load(log_sum + part + offset, mask=wrote, other=-1.0e30, cache_modifier=".cg")
        values = tl.load(
            partial + part * HEAD_DIM + element, mask=mask, other=0.0, cache_modifier=".cg"
        )
        new_best = tl.maximum(best, tl.max(sums, axis=0))
        shrink = tl.exp2(best - new_best)
        weight = tl.where(wrote, tl.exp2(sums - new_best[None, :]), 0.0)
        total = total * shrink + tl.sum(weight, axis=0)
        mixed = mixed * shrink[:, None] + tl.sum(values * weight[:, :, None], axis=0)
        best = new_best
    result = mixed / tl.maximum(total, 1.0e-30)[:, None]
    row = tl.arange(0, HEADS)[:, None]
    place = out + pair * (GROUP * HEAD_DIM) + row * HEAD_DIM + column[None, :]
    tl.store(place, result, mask=(row < GROUP) & (column < HEAD_DIM)[None, :])
