"""Speculative decoding as users ask for it: the methods, the defaults, and what is refused.

    Config -> check_speculation (here)      what no model and no machine could serve
           -> resolve_speculation.py        the draft model beside the target
           -> messages.Speculation          in every rank's RunnerConfig

How it works, and why the ids stay those of plain decoding, stands in docs/architecture.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanorunner.config import Config

OFF, NGRAM, DRAFT = "off", "ngram", "draft"
METHODS = (OFF, NGRAM, DRAFT)
# Proposers that others have; each reads the target's hidden states, and its head is one more
# checkpoint format. workers/proposer.py is where one would go.
NOT_THERE = {
    "eagle": "an EAGLE head",
    "eagle3": "an EAGLE-3 head",
    "mtp": "a multi-token-prediction head",
    "medusa": "Medusa heads",
}
MAX_TOKENS = 15  # drafts: with the newest token 16 places, what the kernels for few rows serve
DEFAULT_TOKENS = {NGRAM: 7, DRAFT: 4}
DEFAULT_NGRAM = (2, 4)  # shortest and longest suffix
MAX_NGRAM = 16  # the kernel's loop over a suffix is unrolled: one of 128 compiles for a minute


def check_speculation(config: Config) -> None:
    """Refuse, by ValueError, what no model and no machine could serve."""
    method = config.speculative
    if method in NOT_THERE:
        raise ValueError(
            f"speculative {method}: {NOT_THERE[method]} cannot be loaded; use {NGRAM} or {DRAFT}"
        )
    if method not in METHODS:
        raise ValueError(f"speculative {method!r}: use {' or '.join(METHODS)}")
    asked = {
        "draft_model": DRAFT,
        "ngram_min": NGRAM,
        "ngram_max": NGRAM,
    }
    for name, needed in asked.items():
        if getattr(config, name) is not None and method != needed:
            raise ValueError(
                f"{name} {getattr(config, name)}: only with --speculative {needed}, not {method}"
            )
    if method == OFF:
        if config.num_speculative_tokens is not None:
            raise ValueError(
                f"num_speculative_tokens {config.num_speculative_tokens}: nothing is speculated; "
                f"add --speculative {NGRAM} or {DRAFT}"
            )
        return
    if config.runner == "v1":
        raise ValueError(f"speculative {method}: runner v1 has no speculation; use --runner v2")
    if method == DRAFT and config.draft_model is None:
        raise ValueError(f"speculative {DRAFT}: name the small model with --draft-model")
    if not 1 <= num_tokens(config) <= MAX_TOKENS:
        raise ValueError(f"num_speculative_tokens {num_tokens(config)}: use 1 to {MAX_TOKENS}")
    shortest, longest = ngram_lengths(config)
    if not 1 <= shortest <= longest <= MAX_NGRAM:
        raise ValueError(
            f"ngram_min {shortest}, ngram_max {longest}: use 1 <= ngram_min <= ngram_max <= "
            f"{MAX_NGRAM}"
        )
    places = config.max_num_seqs * (1 + num_tokens(config))
    if config.max_num_batched_tokens < places:
        raise ValueError(
            f"max_num_batched_tokens {config.max_num_batched_tokens}: a step of max_num_seqs "
            f"({config.max_num_seqs}) requests with {num_tokens(config)} drafts each has {places} "
            f"tokens; use at least that, or lower max_num_seqs or num_speculative_tokens"
        )


def num_tokens(config: Config) -> int:
    """Return the drafts of a request in a step, 0 without speculation."""
    if config.speculative == OFF:
        return 0
    if config.num_speculative_tokens is not None:
        return config.num_speculative_tokens
    return DEFAULT_TOKENS[config.speculative]


def ngram_lengths(config: Config) -> tuple[int, int]:
    """Return the shortest and the longest suffix that is looked up."""
    shortest, longest = config.ngram_min, config.ngram_max
    if shortest is None:
        shortest = DEFAULT_NGRAM[0] if longest is None else min(DEFAULT_NGRAM[0], longest)
    return shortest, max(DEFAULT_NGRAM[1], shortest) if longest is None else longest
