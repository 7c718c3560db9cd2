"""What the scheduler has done so far, counted; the benchmarks print it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nanorunner.sampled_ids import NOT_MEANT
from nanorunner.workers.messages import Int32, Int64


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start. Tokens are scheduled positions, not requests."""

    steps: int = 0
    mixed_steps: int = 0  # decodes and prefill tokens in one batch
    prefill_steps: int = 0  # prefill tokens alone
    decode_tokens: int = 0  # positions of drafts included
    prefill_tokens: int = 0  # recomputed ones included
    cached_tokens: int = 0  # known tokens that a prefix hit spared
    admissions: int = 0  # returns after a preemption included
    preemptions: int = 0
    waits_for_prefix: int = 0  # times a request waited one step for a block being written
    waits_for_pool: int = 0  # steps in which one waited for a place in the sampler's pools
    dropped_ids: int = 0  # sampled for a request that had ended when they came
    num_ended: int = 0
    peak_used_blocks: int = 0
    verify_steps: int = 0  # scheduled with drafts
    verified_rows: int = 0  # requests in those steps, one that had ended by then left out
    drafts_meant: int = 0  # proposed for them; a row may have fewer than a step has room for
    drafts_accepted: int = 0  # ids that a step brought beside the one that it would have anyway

    @property
    def scheduled_tokens(self) -> int:
        """Positions computed in all steps together."""
        return self.decode_tokens + self.prefill_tokens

    @property
    def mean_accepted_length(self) -> float:
        """Ids that a request gets from a verify step: 1 and the drafts that came true."""
        return 1 + self.drafts_accepted / max(self.verified_rows, 1)

    def count_step(
        self, num_decodes: int, query_len: int, num_prefill_tokens: int, used_blocks: int
    ) -> None:
        """Add one step that is about to leave; query_len: tokens of each decode."""
        self.steps += 1
        self.verify_steps += query_len > 1
        self.decode_tokens += num_decodes * query_len
        self.prefill_tokens += num_prefill_tokens
        self.mixed_steps += num_decodes > 0 and num_prefill_tokens > 0
        self.prefill_steps += num_decodes == 0
        self.peak_used_blocks = max(self.peak_used_blocks, used_blocks)


class DraftStats:
    """What came of the drafts in each place behind a request's newest token, [K] each."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.meant: Int64 = np.zeros(num_speculative_tokens, dtype=np.int64)
        self.accepted: Int64 = np.zeros(num_speculative_tokens, dtype=np.int64)
        self._places = np.arange(1, 1 + num_speculative_tokens)

    @property
    def acceptance(self) -> npt.NDArray[np.float64]:
        """The accepted share of the drafts proposed in each place, those before it accepted or not.

        So it falls from place to place; 0 where none was proposed.
        """
        return self.accepted / np.maximum(self.meant, 1)

    def count(self, ids: Int32, room: Int64, stats: SchedulerStats) -> None:
        """Add a verify step's groups [n, q], here and to the totals.

        room [n]: ids that each request could still get; what lies behind was never a draft for it.
        """
        drafts = ids[:, 1:]
        is_meant = drafts != NOT_MEANT
        is_meant &= self._places < room[:, np.newaxis]
        # reduce: numpy's count_nonzero along an axis takes several times as long
        meant = np.add.reduce(is_meant, axis=0, dtype=np.int64)
        accepted = np.add.reduce(drafts >= 0, axis=0, dtype=np.int64)
        self.meant += meant
        self.accepted += accepted
        stats.verified_rows += len(ids)
        stats.drafts_meant += int(meant.sum())
        stats.drafts_accepted += int(accepted.sum())
