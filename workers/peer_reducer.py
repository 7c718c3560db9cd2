"""Which all-reduces go through peer memory, and in which form: by size, the same on every rank.

    up to one_shot bytes    one hop; with the norm behind it in the same kernel where there is one
    up to two_shot bytes    two hops with less traffic
    above                   not ours: NCCL

A form is chosen by shapes and dtypes alone, for all ranks must choose alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.distributed_c10d import Store

from nanorunner.kernels import peer_all_reduce as kernels
from nanorunner.kernels.peer_ring import WORD_BYTES, PeerRing
from nanorunner.workers.peer_memory import PeerMemory, PeerMemoryUnavailable

KIB = 1 << 10


class Sizes(NamedTuple):
    """The largest tensor of each form, in bytes."""

    one_shot: int
    two_shot: int


# By number of ranks; a number between takes the next one's. A packet doubles its data, so one shot
# costs a hop and 2 (N - 1) S bytes sent, two shots cost two hops and 4 S (N - 1) / N: at 2 us a hop
# and 400 GB/s they meet at 270 KiB for 4 ranks and 76 KiB for 8, and never for 2. That of 2 ranks
# is measured (scripts/bench_all_reduce.py), those of 4 and 8 are computed.
SIZES = {
    2: Sizes(1024 * KIB, 1024 * KIB),
    4: Sizes(256 * KIB, 1024 * KIB),
    8: Sizes(64 * KIB, 1024 * KIB),
}
MAX_RANKS = max(SIZES)


class PeerReducer:
    """All-reduces of one rank over peer memory; try_... says whether it was one of its own.

    Every rank must make the same calls in the same order, all on one stream.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        device: torch.device,
        give_up_after_s: float,
    ) -> None:
        """Map the others' memory, all ranks at the same time; raises PeerMemoryUnavailable."""
        if ranks > MAX_RANKS:
            raise PeerMemoryUnavailable(f"{ranks} ranks: peer memory serves up to {MAX_RANKS}")
        self.memory = PeerMemory(store, rank, ranks, device, give_up_after_s)
        table = sizes_for(ranks)
        self.sizes = Sizes(
            one_shot=min(table.one_shot, kernels.one_shot_bytes(self.ring)),
            two_shot=min(table.two_shot, kernels.two_shot_bytes(self.ring)),
        )
        self._compiled: set[torch.dtype] = set()

    @property
    def ring(self) -> PeerRing:
        """What the kernels take."""
        return self.memory.ring

    def try_sum(self, x: torch.Tensor) -> bool:
        """Sum x over the ranks, in place, if it is small enough; return whether it was."""
        num_bytes = x.numel() * x.element_size()
        if num_bytes > max(self.sizes) or not kernels.is_plain(x):
            return False
        self.check()
        if x.dtype not in self._compiled:
            self._compile(x.dtype)
        if num_bytes <= self.sizes.one_shot:
            kernels.all_reduce_one_shot(x, self.ring)
        else:
            kernels.all_reduce_two_shot(x, self.ring)
        return True

    def try_max(self, keys: torch.Tensor) -> bool:
        """Replace int64 keys by their maxima over the ranks, if they are few; return whether so."""
        if not kernels.fits_max(keys, self.ring):
            return False
        self.check()
        kernels.all_reduce_max(keys, self.ring)
        return True

    def try_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        """Add the sum of x to residual in place, return its norm; None, untouched, if too large."""
        num_bytes = x.numel() * x.element_size()
        fits = kernels.fits_add_rms_norm(x, residual, weight, self.ring)
        if not fits or num_bytes > self.sizes.one_shot:
            return None
        self.check()
        return kernels.all_reduce_add_rms_norm(x, residual, weight, eps, self.ring)

    def check(self) -> None:
        """Raise RuntimeError when a kernel of this rank has given up waiting for the others."""
        if self.memory.has_given_up:
            raise RuntimeError(
                f"rank {self.ring.rank}: an all-reduce has waited in vain for another rank's data; "
                f"what was computed since is nonsense"
            )

    def abort(self) -> None:
        """Make waiting kernels return, with nonsense; called from any thread."""
        self.memory.abort()

    def close(self) -> None:
        """Give the memory back; legal after the last call."""
        self.memory.close()

    def _compile(self, dtype: torch.dtype) -> None:
        """Run every kernel that a tensor of this dtype may need, before its first call.

        A compile in the middle of serving would be a stall of a second. All ranks come here with
        the same call, so they all run the same kernels.
        """
        self._compiled.add(dtype)
        one_shot, two_shot = self.sizes
        for num_bytes in (WORD_BYTES, one_shot):
            kernels.all_reduce_one_shot(self._zeros(num_bytes, dtype), self.ring)
        if two_shot > one_shot:
            for num_bytes in (one_shot + WORD_BYTES, two_shot):
                kernels.all_reduce_two_shot(self._zeros(num_bytes, dtype), self.ring)

    def _zeros(self, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        device = self.ring.table.device
        return torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=device)


def sizes_for(ranks: int) -> Sizes:
    """Return the sizes for so many ranks, 2 to MAX_RANKS."""
    return SIZES[min(known for known in SIZES if known >= ranks)]
