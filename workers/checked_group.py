"""A rank's group as model and sampler see it with --check-ranks: each call ends a place.

An engine without the flag has no such object: it calls its Group (distributed.py) itself.
"""

from __future__ import annotations

import torch

from nanorunner.workers.check_ranks import RankCheck
from nanorunner.workers.distributed import Group


class CheckedGroup:
    """The calls of Group that a step makes, each reported to the check when it is over."""

    def __init__(self, group: Group, check: RankCheck) -> None:
        self.rank = group.rank
        self.tp = group.tp
        self._group = group
        self._check = check

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Group.all_reduce."""
        x = self._group.all_reduce(x)
        self._check.reduced(("the hidden state", x))
        return x

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Group.all_reduce_add_rms_norm."""
        normed = self._group.all_reduce_add_rms_norm(x, residual, weight, eps)
        self._check.reduced(("the residual", residual), ("its norm", normed))
        return normed

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """Group.all_reduce_max."""
        x = self._group.all_reduce_max(x)
        self._check.exchanged(x)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Group.all_gather."""
        whole = self._group.all_gather(x, dim)
        self._check.gathered(whole)
        return whole

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Group.gather."""
        parts = self._group.gather(x)
        self._check.gathered(None)
        return parts
