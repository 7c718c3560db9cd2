"""A CUDA graph of all-reduces that makes its own data, skews its ranks and counts its errors.

Every replay has other data, small whole numbers, so that each rank knows the exact sums by itself,
and a packet of another call or replay does not pass. Before a call a rank may spin, by a hash of
(replay, rank, call), for up to SPIN_NS: the ranks overtake each other all the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from triton.language.extra.cuda import globaltimer

from nanorunner.kernels.peer_all_reduce import (
    all_reduce_add_rms_norm,
    all_reduce_max,
    all_reduce_one_shot,
    all_reduce_two_shot,
)
from nanorunner.kernels.peer_ring import PeerRing
from nanorunner.kernels.triton_support import jit, tl

SPIN_NS = 20_000
BLOCK = 1024
SAME_ON_ALL = 50  # the "rank" whose pattern every rank's residual has
EPS = 1e-6


@jit()
def pattern(
    index: tl.tensor, step: tl.tensor, rank: tl.tensor, call: tl.tensor, IS_KEY: tl.constexpr
) -> tl.tensor:
    """Return the int64 data of a rank: numbers from -20 to 20, or keys of all sizes.

    So 8 ranks' sum and a residual end at 180: bfloat16 holds whole numbers up to 256 exactly.
    """
    mixed = index * 7 + step * 31 + rank * 17 + call * 5
    value = mixed * 0x1E3779B97F4A7C15 if IS_KEY else mixed % 41 - 20
    return value


@jit(counts=("count", "rank", "spinner", "call"))
def fill_kernel(
    x: tl.tensor,
    step: tl.tensor,
    count: tl.tensor,
    rank: tl.tensor,
    spinner: tl.tensor,
    call: tl.tensor,
    SPIN: tl.constexpr,
    IS_KEY: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Write a rank's data, in one of four cases after a spin."""
    now = tl.load(step)
    skew = (spinner * 7919 + call * 104729).to(tl.int64)
    noise = now * 6364136223846793005 + skew * 1442695040888963407
    noise = (noise >> 33) & 0x7FFFFFFF
    wait = tl.where(noise % 4 == 0, (noise >> 2) % SPIN, 0)
    start = globaltimer()
    elapsed = globaltimer() - start
    while elapsed < wait:
        elapsed = globaltimer() - start
    index = (tl.program_id(0) * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    value = pattern(index, now, rank, call, IS_KEY)
    number = value if IS_KEY else value.to(tl.float32).to(x.dtype.element_ty)
    tl.store(x + index, number, mask=index < count)


@jit(counts=("count", "call"))
def check_kernel(
    x: tl.tensor,
    step: tl.tensor,
    errors: tl.tensor,
    count: tl.tensor,
    call: tl.tensor,
    RANKS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_KEY: tl.constexpr,
    SAME: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Count what is not the sum, or the maximum, of all ranks' data."""
    now = tl.load(step)
    index = (tl.program_id(0) * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    expected = pattern(index, now, 0, call, IS_KEY)
    for rank in tl.static_range(1, RANKS):
        value = pattern(index, now, rank, call, IS_KEY)
        expected = tl.maximum(expected, value) if IS_KEY else expected + value
    if HAS_RESIDUAL:
        expected += pattern(index, now, SAME, call, IS_KEY)
    inside = index < count
    number = tl.load(x + index, mask=inside, other=0)
    value = number if IS_KEY else number.to(tl.float32).to(tl.int64)
    wrong = tl.sum((inside & (value != expected)).to(tl.int64), axis=0)
    tl.atomic_add(errors + call, wrong)


class Call(NamedTuple):
    """One all-reduce of the graph."""

    name: str
    x: torch.Tensor
    residual: torch.Tensor | None
    run: Callable[[], object]


class Soak:
    """The graph, its step counter [1], and its errors by call; everything on this rank's GPU."""

    def __init__(self, rank: int, ring: PeerRing) -> None:
        """Run the graph's body once, then capture it; all ranks must do so together."""
        self.rank, self.ring = rank, ring
        self.device = ring.table.device
        self.step = torch.zeros(1, dtype=torch.int64, device=self.device)
        # The same list twice: each call between its own kernels, then all calls back to back.
        self.calls = [*self._make_calls(), *self._make_calls()]
        self.errors = torch.zeros(len(self.calls), dtype=torch.int64, device=self.device)
        self._body()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self._body()

    def named_errors(self) -> dict[str, int]:
        """Return the calls that had errors, and how many elements were wrong."""
        counts = self.errors.tolist()
        return {f"{i} {self.calls[i].name}": count for i, count in enumerate(counts) if count}

    def _make_calls(self) -> list[Call]:
        calls = []
        for count in (4, 4096, 131072):
            x = self._zeros(count)
            calls.append(Call(f"one {count}", x, None, partial(all_reduce_one_shot, x, self.ring)))
        for count in (4, 32768):
            x = self._zeros(count)
            calls.append(Call(f"two {count}", x, None, partial(all_reduce_two_shot, x, self.ring)))
        for rows in (1, 16):
            x, residual, weight = (
                self._zeros(rows, 4096),
                self._zeros(rows, 4096),
                self._zeros(4096),
            )
            run = partial(all_reduce_add_rms_norm, x, residual, weight, EPS, self.ring)
            calls.append(Call(f"norm {rows}", x, residual, run))
        keys = torch.zeros(64, dtype=torch.int64, device=self.device)
        calls.append(Call("max 64", keys, None, partial(all_reduce_max, keys, self.ring)))
        return calls

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=self.device)

    def _body(self) -> None:
        self.step += 1
        half = len(self.calls) // 2
        for number in range(half):
            self._fill(number)
            self.calls[number].run()
            self._check(number)
        for number in range(half, 2 * half):
            self._fill(number)
        for number in range(half, 2 * half):
            self.calls[number].run()
        for number in range(half, 2 * half):
            self._check(number)

    def _fill(self, number: int) -> None:
        call = self.calls[number]
        targets = [(call.x, self.rank)]
        if call.residual is not None:
            targets.append((call.residual, SAME_ON_ALL))
        for x, rank in targets:
            fill_kernel[(-(-x.numel() // BLOCK),)](
                x,
                self.step,
                x.numel(),
                rank,
                self.rank,
                number,
                SPIN=SPIN_NS,
                IS_KEY=x.dtype == torch.int64,
                SIZE=BLOCK,
            )

    def _check(self, number: int) -> None:
        call = self.calls[number]
        x = call.x if call.residual is None else call.residual
        check_kernel[(-(-x.numel() // BLOCK),)](
            x,
            self.step,
            self.errors,
            x.numel(),
            number,
            RANKS=self.ring.ranks,
            HAS_RESIDUAL=call.residual is not None,
            IS_KEY=x.dtype == torch.int64,
            SAME=SAME_ON_ALL,
            SIZE=BLOCK,
        )
