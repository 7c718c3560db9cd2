"""What race_fuzz.py needs to fuzz speculation: settings, requests that drafts suit, and chance.

    settings_of(method, ...)    the engine's settings
    FEW_IDS                     sampling under which ngram's drafts come true: few ids to choose of
    RandomDrafting              stands in for DraftController: chance says which steps draft

A draft model with the target's own shapes has the target's random weights too. So its drafts are
right where temperature and seed alone decide, and mostly wrong where the sampler edits the logits.
"""

from __future__ import annotations

from random import Random
from typing import Any

from nanorunner.draft_control import DraftController
from nanorunner.scheduler_stats import SchedulerStats
from nanorunner.speculative import DRAFT, NGRAM, OFF

NUM_DRAFTS = 3
CHANGE_SHARE = 0.15  # of all steps: runs of equal steps are long enough for an unchanged batch
FEW_IDS: list[dict[str, Any]] = [
    {"temperature": 0.5, "allowed_token_ids": (5, 6)},
    {"temperature": 0.0, "allowed_token_ids": (7,), "logprobs": 1},
    {"temperature": 0.8, "allowed_token_ids": (5, 6, 7), "repetition_penalty": 1.2, "seed": 3},
]
DRAFTING_EVENTS = ("verify_steps", "drafts_accepted", "drafts_rejected", "changes_of_query_len")


def settings_of(method: str, draft_model: str | None, target: str) -> dict[str, Any]:
    """Return the engine's settings for a method; draft_model None: the target's shapes again."""
    if method == OFF:
        return {}
    common = {"speculative": method, "num_speculative_tokens": NUM_DRAFTS}
    if method == NGRAM:
        return common | {"ngram_min": 1}
    assert method == DRAFT, "the methods are off, ngram and draft"
    return common | {"draft_model": draft_model or target}


class RandomDrafting(DraftController):
    """Says which steps draft by chance alone, for some steps in a row."""

    def __init__(self, num_speculative_tokens: int, seed: int) -> None:
        super().__init__(num_speculative_tokens)
        self.num_changes = 0
        self._lengths = (1, 1 + num_speculative_tokens)
        self._is_drafting = True
        self._random = Random(seed)

    def query_len(self, num_decodes: int) -> int:
        """As DraftController."""
        if self._random.random() < CHANGE_SHARE:
            self._is_drafting = not self._is_drafting
            self.num_changes += 1
        return self._lengths[self._is_drafting]

    def step_read(self, step_id: int, num_decodes: int, query_len: int, num_new_ids: int) -> None:
        """Time decides nothing here."""


def events_of(stats: SchedulerStats, controller: RandomDrafting) -> dict[str, int]:
    """Return how often each of DRAFTING_EVENTS occurred."""
    return {
        "verify_steps": stats.verify_steps,
        "drafts_accepted": stats.drafts_accepted,
        "drafts_rejected": stats.drafts_meant - stats.drafts_accepted,
        "changes_of_query_len": controller.num_changes,
    }
