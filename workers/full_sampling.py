"""All that a request may ask of the sampler, the limits of it, and what each wish costs.

Need says which stages of the sampler a row takes part in. A row without any is plain: temperature
or greedy alone, drawn from the vocabulary shards without editing or gathering its logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntFlag
from typing import NamedTuple

MAX_ALLOWED_IDS = 1024
MAX_BIASES = 1024
MAX_STOP_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024  # of all bad words of a request together

# Pools that the ranks allocate, or leave room for, at the start; the scheduler lets no more
# requests run at once than they serve.
NUM_PENALTY_SLOTS = 64
MAX_LOGPROB_ENTRIES = 2 << 20  # of all requests together, 12 bytes each


class Need(IntFlag):
    """The stages of the sampler that a row needs."""

    PENALTIES = 1
    BIAS = 2
    ALLOWED_IDS = 4
    STOP_IDS = 8  # min_tokens: they may not come yet
    BAD_WORDS = 16
    MIN_P = 32
    TOP_K_TOP_P = 64
    LOGPROBS = 128
    PROMPT_LOGPROBS = 256


# Stages that change single logits, and all that change the draw.
EDITS = Need.PENALTIES | Need.BIAS | Need.ALLOWED_IDS | Need.STOP_IDS | Need.BAD_WORDS
DRAW = EDITS | Need.MIN_P | Need.TOP_K_TOP_P


class FullSampling(NamedTuple):
    """What the sampler needs of one request. Ids are of the whole vocabulary."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 and -1 are off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off
    seed: int = 0  # 64 bits as a signed int
    repetition_penalty: float = 1.0  # 1 is off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, bias), an id once
    allowed_token_ids: tuple[int, ...] = ()  # () allows all
    bad_words: tuple[tuple[int, ...], ...] = ()  # as ids
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()  # every id that ends the request, EOS among them
    logprobs: int = -1  # best tokens to report with each output token; -1 is off
    prompt_logprobs: int = -1  # and with each prompt token

    def trimmed(self) -> tuple[object, ...]:
        """Return the fields up to the last one that is not a default: what crosses the wire."""
        values: tuple[object, ...] = tuple(self)
        defaults = tuple(self._field_defaults.values())
        while values and values[-1] == defaults[len(values) - 1]:
            values = values[:-1]
        return values

    @property
    def needs_penalty_slot(self) -> bool:
        """Whether the request takes one of the few slots of the penalty pool."""
        is_off = self.repetition_penalty == 1 and self.presence_penalty == 0
        return not (is_off and self.frequency_penalty == 0)

    def num_logprob_entries(self, prompt_len: int, query_len: int = 1) -> int:
        """Return how many (id, log-probability) pairs one step may bring the request at most.

        query_len: places of a decode, each of which has its own (workers/places.py).
        """
        return query_len * (self.logprobs + 1) + prompt_len * (self.prompt_logprobs + 1)

    def needs(self, greedy_below: float) -> Need:
        """Return the stages that the request's row needs, for as long as it runs.

        A temperature below greedy_below takes the best token, which no filter drops.
        """
        is_drawn = self.temperature >= greedy_below
        needs = {
            Need.PENALTIES: self.needs_penalty_slot,
            Need.BIAS: bool(self.logit_bias),
            Need.ALLOWED_IDS: bool(self.allowed_token_ids),
            Need.STOP_IDS: self.min_tokens > 0 and bool(self.stop_ids),
            Need.BAD_WORDS: bool(self.bad_words),
            Need.MIN_P: is_drawn and self.min_p > 0,
            Need.TOP_K_TOP_P: is_drawn and (self.top_k > 0 or self.top_p < 1),
            Need.LOGPROBS: self.logprobs >= 0,
            Need.PROMPT_LOGPROBS: self.prompt_logprobs >= 0,
        }
        return Need(sum(need for need, is_needed in needs.items() if is_needed))


def check_full_sampling(sampling: FullSampling, vocab_size: int) -> None:
    """Refuse what the sampler cannot do: ValueError that names value, limit and way out.

    temperature, top_k, top_p, seed and max_tokens are SamplingParams' own to check.
    """
    if not 0 <= sampling.min_p <= 1:
        raise ValueError(f"min_p {sampling.min_p}: use 0 (off) to 1")
    repetition = sampling.repetition_penalty
    if not (math.isfinite(repetition) and repetition > 0):
        raise ValueError(f"repetition_penalty {repetition}: use a positive number; 1 is off")
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(sampling, name)
        if not -2 <= penalty <= 2:
            raise ValueError(f"{name} {penalty}: use -2 to 2; 0 is off")
    if sampling.min_tokens < 0:
        raise ValueError(f"min_tokens {sampling.min_tokens}: use 0 or more")
    _check_count("logit_bias", len(sampling.logit_bias), MAX_BIASES, "ids")
    _check_count("allowed_token_ids", len(sampling.allowed_token_ids), MAX_ALLOWED_IDS, "ids")
    _check_count("stop_token_ids and EOS ids", len(sampling.stop_ids), MAX_STOP_IDS, "ids")
    _check_count("bad_words", len(sampling.bad_words), MAX_BAD_WORDS, "words")
    num_tokens = sum(len(word) for word in sampling.bad_words)
    _check_count("bad_words", num_tokens, MAX_BAD_WORD_TOKENS, "tokens in all words together")

    bias_ids = [token_id for token_id, _ in sampling.logit_bias]
    _check_ids("logit_bias", bias_ids, vocab_size)
    if len(set(bias_ids)) < len(bias_ids):
        raise ValueError("logit_bias: an id stands there twice; give each id one bias")
    for token_id, bias in sampling.logit_bias:
        if not -100 <= bias <= 100:
            raise ValueError(f"logit_bias of id {token_id}: {bias}: use -100 to 100")
    _check_ids("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    for word in sampling.bad_words:
        if not word:
            raise ValueError("bad_words: an empty word bans nothing; leave it out")
        _check_ids("bad_words", word, vocab_size)
    _check_something_is_left(sampling, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(sampling, name)
        if not -1 <= count <= vocab_size:
            raise ValueError(f"{name} {count}: use 0 to {vocab_size} (the vocabulary)")


def _check_something_is_left(sampling: FullSampling, vocab_size: int) -> None:
    """Refuse settings that can ban every id at once: the row would draw an id that is banned."""
    banned = {word[0] for word in sampling.bad_words if len(word) == 1}
    if sampling.min_tokens > 0:
        banned |= set(sampling.stop_ids)
    if sampling.allowed_token_ids:
        if set(sampling.allowed_token_ids) <= banned:
            raise ValueError(
                "allowed_token_ids: bad_words and min_tokens (no stop id before that many) ban all"
                f" {len(sampling.allowed_token_ids)} of them; allow one more id"
            )
    elif len(banned) >= vocab_size:
        raise ValueError(f"bad_words and stop ids: they ban all {vocab_size} ids; leave one")


def _check_count(name: str, count: int, limit: int, of_what: str) -> None:
    if count > limit:
        raise ValueError(f"{name}: {count} {of_what}; the limit is {limit}")


def _check_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{name}: id {token_id}: the vocabulary has 0 to {vocab_size - 1}")
