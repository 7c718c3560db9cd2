"""What the scheduler has done so far, counted; the benchmarks print it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start. Tokens are scheduled positions, not requests."""

    steps: int = 0
    mixed_steps: int = 0  # decodes and prefill tokens in one batch
    prefill_steps: int = 0  # prefill tokens alone
    decode_tokens: int = 0
    prefill_tokens: int = 0  # recomputed ones included
    cached_tokens: int = 0  # known tokens that a prefix hit spared
    admissions: int = 0  # returns after a preemption included
    preemptions: int = 0
    waits_for_prefix: int = 0  # times a request waited one step for a block being written
    waits_for_pool: int = 0  # steps in which one waited for a place in the sampler's pools
    dropped_ids: int = 0  # sampled for a request that had ended when they came
    num_ended: int = 0
    peak_used_blocks: int = 0

    @property
    def scheduled_tokens(self) -> int:
        """Positions computed in all steps together."""
        return self.decode_tokens + self.prefill_tokens

    def count_step(self, num_decodes: int, num_prefill_tokens: int, used_blocks: int) -> None:
        """Add one step."""
        self.steps += 1
        self.decode_tokens += num_decodes
        self.prefill_tokens += num_prefill_tokens
        self.mixed_steps += num_decodes > 0 and num_prefill_tokens > 0
        self.prefill_steps += num_decodes == 0
        self.peak_used_blocks = max(self.peak_used_blocks, used_blocks)
