"""How much of the ranks' sampler pools is taken: rank 0's books, kept by the scheduler.

The pools have fixed sizes (workers/full_sampling.py). A request holds its share from the step that
starts it to the step that tells the ranks to drop it; a rank drops before it starts others, so what
one gives back the next may take in the same step.
"""

from __future__ import annotations

from nanorunner.request import Request
from nanorunner.workers.full_sampling import MAX_LOGPROB_ENTRIES, NUM_PENALTY_SLOTS


class SamplerPools:
    """What the requests with a row hold together; query_len: places of a decode at most."""

    def __init__(self, query_len: int = 1) -> None:
        self._query_len = query_len
        self.penalty_slots = 0
        self.logprob_entries = 0

    def has_room(self, request: Request) -> bool:
        """Whether the request can start."""
        slots, entries = self._shares(request)
        if self.penalty_slots + slots > NUM_PENALTY_SLOTS:
            return False
        return self.logprob_entries + entries <= MAX_LOGPROB_ENTRIES

    def take(self, request: Request) -> None:
        """Count a request that starts."""
        slots, entries = self._shares(request)
        self.penalty_slots += slots
        self.logprob_entries += entries

    def give_back(self, request: Request) -> None:
        """Count a request that has ended or was preempted."""
        slots, entries = self._shares(request)
        self.penalty_slots -= slots
        self.logprob_entries -= entries

    def _shares(self, request: Request) -> tuple[int, int]:
        sampling = request.sampling
        entries = sampling.num_logprob_entries(request.prompt_len, self._query_len)
        return int(sampling.needs_penalty_slot), entries
