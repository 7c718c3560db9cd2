"""A rank's group as model and sampler see it in an engine that records spans: its calls are timed.

An engine that records none has no such object: it calls its Group (distributed.py) itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from nanorunner.workers.distributed import Group
from nanorunner.workers.spans import ALL_REDUCE, EXCHANGE, SpanRecorder

Result = TypeVar("Result")


class TracedGroup:
    """The calls of Group that a step makes, each a span inside a lap of the recorder."""

    def __init__(self, group: Group, recorder: SpanRecorder) -> None:
        self.rank = group.rank
        self.tp = group.tp
        self._group = group
        self._recorder = recorder

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Group.all_reduce."""
        return self._timed(ALL_REDUCE, lambda: self._group.all_reduce(x))

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Group.all_reduce_add_rms_norm; the norm is a part of the span."""
        return self._timed(
            ALL_REDUCE, lambda: self._group.all_reduce_add_rms_norm(x, residual, weight, eps)
        )

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """Group.all_reduce_max."""
        return self._timed(EXCHANGE, lambda: self._group.all_reduce_max(x))

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Group.all_gather."""
        return self._timed(EXCHANGE, lambda: self._group.all_gather(x, dim))

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Group.gather."""
        return self._timed(EXCHANGE, lambda: self._group.gather(x))

    def _timed(self, name: int, call: Callable[[], Result]) -> Result:
        begun = self._recorder.begin_inner(name)
        result = call()
        if begun is not None:
            self._recorder.end_inner(name, begun)
        return result
