"""All-reduces of CPU tensors through memory that the ranks share; gloo takes what is too large.

    memory [               words                 | parity 0: slot of rank 0, 1, ... | parity 1 ]
             two for each rank, 64 bytes apart:    SLOT_BYTES each
             number of its newest call; 1 when it has left

    call n of every rank:   copy x into its slot of parity n % 2, store n in its own word,
                            wait until every word is at least n, add the slots up in rank order

One writer a word and a slot. A slot is written again two calls later; its writer has then seen
every word at n + 1 or more, and a rank stores n + 1 only when it has read all slots of call n. The
order "first the data, then the word" is what x86-64 gives to all stores; other processors do not,
so there gloo does everything.

On two cores an all-reduce of one row takes gloo half a millisecond or more, for each rank wakes two
threads of gloo's; here a rank looks at the words itself.
"""

from __future__ import annotations

import mmap
import os
import platform
import time

import torch
from torch.distributed.distributed_c10d import Store

from nanorunner.kernels.peer_all_reduce import sum_in_rank_order
from nanorunner.workers.event import IS_X86

SLOT_BYTES = 1 << 20
WORD_STRIDE = 8  # words: one cache line for each rank's, or their stores would disturb each other
PAGE_BYTES = 4096
SPINS = 200  # looks, about 20 us, before others get the core
SPIN_S = 0.002  # then the waits in between grow
MAX_SLEEP_S = 0.001
KEY = "shared sums"


class SharedSumsUnavailable(RuntimeError):
    """The ranks cannot share memory here."""


class SharedSums:
    """All-reduces of one rank; try_... says whether it was one of its own, the same on every rank.

    Memory: anonymous, made by rank 0, mapped by all; it has no name, so nothing can be left behind.
    Owner: the ranks together. Lifetime: until the last one unmaps it. Last writers: see above.
    """

    def __init__(self, store: Store, rank: int, tp: int, give_up_after_s: float) -> None:
        """Map the memory, all ranks at the same time; raises SharedSumsUnavailable on all of them.

        give_up_after_s: how long a call waits for another rank.
        """
        self._rank, self._give_up_after_s = rank, give_up_after_s
        self._is_aborted = False
        self._number = 0
        self._others = [WORD_STRIDE * other for other in range(tp) if other != rank]
        words_bytes = -(-8 * WORD_STRIDE * tp // PAGE_BYTES) * PAGE_BYTES
        memory = _share(store, rank, tp, words_bytes + 2 * tp * SLOT_BYTES)
        self._words = memoryview(memory).cast("Q")
        whole = torch.frombuffer(memory, dtype=torch.uint8)[words_bytes:]
        self._slots = whole.view(2, tp, SLOT_BYTES)
        # by dtype and number of elements: each parity's slots as such tensors
        self._views: dict[tuple[torch.dtype, int], list[list[torch.Tensor]]] = {}

    def try_sum(self, x: torch.Tensor) -> bool:
        """Sum x over the ranks, in place, if it is small enough; return whether it was."""
        if not _fits(x):
            return False
        parts = self._exchange(x)
        flat = x.view(-1)
        if len(parts) == 2 and x.dtype == torch.float32:
            torch.add(parts[0], parts[1], out=flat)
        else:
            flat.copy_(sum_in_rank_order(parts))
        return True

    def try_max(self, x: torch.Tensor) -> bool:
        """Replace x by its maximum over the ranks, if it is small enough; return whether so."""
        if not _fits(x):
            return False
        parts = self._exchange(x)
        flat = x.view(-1)
        torch.maximum(parts[0], parts[1], out=flat)
        for part in parts[2:]:
            torch.maximum(flat, part, out=flat)
        return True

    def try_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        """Return None: there is no such step in one here."""
        return None

    def check(self) -> None:
        """Do nothing: a call that waits in vain raises by itself."""

    def abort(self) -> None:
        """Make a waiting call raise; called from any thread."""
        self._is_aborted = True

    def close(self) -> None:
        """Leave, so that who still waits for this rank raises, and let the memory go."""
        self._is_aborted = True
        if self._words:
            self._words[WORD_STRIDE * self._rank + 1] = 1
        self._views = {}
        self._slots = torch.empty(0)
        self._words = memoryview(b"")

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's x, flat, in rank order; good until this rank's next call."""
        self._number += 1
        parts = self._parts(x.dtype, x.numel())[self._number % 2]
        parts[self._rank].copy_(x.view(-1))
        self._words[WORD_STRIDE * self._rank] = self._number
        self._wait()
        return parts

    def _parts(self, dtype: torch.dtype, count: int) -> list[list[torch.Tensor]]:
        found = self._views.get((dtype, count))
        if found is None:
            slots = self._slots[:, :, : count * dtype.itemsize]
            found = [[slot.view(dtype) for slot in parity] for parity in slots]
            self._views[dtype, count] = found
        return found

    def _wait(self) -> None:
        """Wait until every other rank has come to this call.

        Raises RuntimeError when the watcher has called abort() or the other rank has left,
        TimeoutError after give_up_after_s.
        """
        words, number, begin, spins = self._words, self._number, 0.0, 0
        for other in self._others:
            while words[other] < number:
                spins += 1
                if spins % SPINS:
                    continue
                if self._is_aborted:
                    raise RuntimeError(f"rank {self._rank}: the all-reduce was stopped")
                # the number once more: a rank may leave right after its last call
                if words[other + 1] and words[other] < number:
                    raise RuntimeError(
                        f"rank {self._rank}: rank {other // WORD_STRIDE} has left the all-reduce"
                    )
                now = time.monotonic()
                begin = begin or now
                if now - begin > self._give_up_after_s:
                    raise TimeoutError(
                        f"rank {self._rank}: an all-reduce has waited {self._give_up_after_s:g} s "
                        f"for rank {other // WORD_STRIDE}"
                    )
                _give_way(now - begin)


def _give_way(waited_s: float) -> None:
    """Let other threads and processes run; longer the longer this wait has been."""
    if waited_s < SPIN_S:
        os.sched_yield()
        time.sleep(0)  # frees the interpreter's lock, which sched_yield() keeps
    else:
        time.sleep(min(waited_s / 100, MAX_SLEEP_S))


def _fits(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.numel() * x.element_size() <= SLOT_BYTES


def _share(store: Store, rank: int, tp: int, num_bytes: int) -> mmap.mmap:
    """Return the memory, mapped on every rank; raise SharedSumsUnavailable on all or on none."""
    memory, problem, descriptor = None, _platform_problem(), -1
    try:
        if rank == 0 and not problem:
            try:
                descriptor = os.memfd_create("nanorunner-sums")
                os.ftruncate(descriptor, num_bytes)
                memory = mmap.mmap(descriptor, num_bytes)
            except OSError as error:
                problem = f"no anonymous memory: {error}"
        if rank == 0:
            store.set(KEY, f"/proc/{os.getpid()}/fd/{descriptor}")
        path = store.get(KEY).decode()
        if rank != 0 and not problem:
            try:
                with open(path, "r+b") as file:
                    memory = mmap.mmap(file.fileno(), num_bytes)
            except (OSError, ValueError) as error:
                problem = f"rank 0's memory cannot be mapped: {error}"
        store.set(f"{KEY}/{rank}", problem)
        problems = [store.get(f"{KEY}/{other}").decode() for other in range(tp)]
    finally:
        if descriptor >= 0:
            os.close(descriptor)  # all have mapped it, or none will
    for other, text in enumerate(problems):
        if text:
            raise SharedSumsUnavailable(f"rank {other}: {text}")
    assert memory is not None, "no rank has a problem"
    return memory


def _platform_problem() -> str:
    if IS_X86:
        return ""
    return f"a {platform.machine()} processor may show a word before the data it stands for"
