"""Exercise one-shot: an all-reduce in one hop.

    send   x goes to every rank's memory            sum   what has come is added up, rank 0 first

    nanorunner check one-shot my_one_shot.py

`ring` is one rank's view of memory that all ranks can write to (workshop/sandbox_ranks.py):
ring.rank and ring.ranks, ring.post(reader, x) stores a copy of x in the memory of rank `reader`,
ring.take(sender) waits for the oldest packet of rank `sender` in this rank's own. Every rank must
end with the same bits: add up in float32, in rank order, and round once.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.peer_all_reduce import ALL_STEPS, SEND, SUM
from nanorunner.workshop.sandbox_ranks import SandboxRing


def all_reduce_one_shot(
    x: torch.Tensor, ring: SandboxRing, *, steps: frozenset[str] = ALL_STEPS
) -> torch.Tensor:
    """Sum x over the ranks, in place, and return it.

    steps: SEND, SUM or both; an examiner that plays all ranks in one thread asks for one at a time.
    """
    if SEND in steps:
        raise NotImplementedError("all_reduce_one_shot: who must get x?")
    if SUM in steps:
        raise NotImplementedError("all_reduce_one_shot: in which order is it added up?")
    return x
