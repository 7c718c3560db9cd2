"""What a user may ask of one request's sampling and of its end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from nanorunner.field_types import check_types


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample and when to stop. Raises ValueError that names value, limit and way out."""

    temperature: float = 1.0  # 0 is greedy: the largest logit, lowest id on ties
    top_k: int = 0  # keep the k likeliest ids; 0 or -1 is off
    top_p: float = 1.0  # then keep the smallest set whose probability reaches p; 1 is off
    max_tokens: int = 64  # most ids to generate
    min_tokens: int = 0  # stop strings and stop ids are ignored before this many
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    stop_token_ids: tuple[int, ...] = ()  # end a request like the model's own EOS ids
    seed: int | None = None  # None: drawn from the engine's seed
    detokenize: bool = True  # False: ids alone, and no stop strings

    def __post_init__(self) -> None:
        """Refuse what no sampler can do."""
        for name in ("stop", "stop_token_ids"):
            value: Any = getattr(self, name)
            if value is None or isinstance(value, list):  # as vLLM's users write it
                object.__setattr__(self, name, tuple(value or ()))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        check_types(self)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature {self.temperature}: use 0 (greedy) or a positive number")
        if self.top_k < -1:
            raise ValueError(f"top_k {self.top_k}: use 1 or more, or 0 to switch it off")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: use a number above 0 and at most 1")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens {self.max_tokens}: use 1 or more")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens}: use 0 to max_tokens ({self.max_tokens})"
            )
        if any(not s for s in self.stop):
            raise ValueError("stop: an empty string would end every text at once; leave it out")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True; use stop_token_ids")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed {self.seed}: use a 64-bit integer")
