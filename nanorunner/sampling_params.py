"""What a user may ask of one request's sampling and of its end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanorunner.field_types import check_types
from nanorunner.workers.full_sampling import FullSampling, check_full_sampling

ANY_VOCABULARY = 2**31 - 1  # ids are checked again when the model's own is known


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample and when to stop. Raises ValueError that names value, limit and way out.

    compatibility.py says which runner has what.
    """

    n: int = 1  # completions of each prompt
    temperature: float = 1.0  # 0 is greedy: the largest logit, lowest id on ties
    top_k: int = 0  # keep the k likeliest ids; 0 or -1 is off
    top_p: float = 1.0  # then keep the smallest set whose probability reaches p; 1 is off
    min_p: float = 0.0  # drop ids less likely than this share of the likeliest; 0 is off
    repetition_penalty: float = 1.0  # on ids of prompt and output; above 1 discourages, 1 is off
    presence_penalty: float = 0.0  # taken once from the logit of each id in the output
    frequency_penalty: float = 0.0  # taken as often as the output has the id
    # id -> -100 to 100, added to its logit
    logit_bias: dict[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None  # no others are sampled; None allows all
    # Text (with a tokenizer) or ids that the output never holds.
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    logprobs: int | None = None  # report each id's, and of so many likeliest; -1: all, None: off
    prompt_logprobs: int | None = None  # the same of the prompt's ids
    max_tokens: int = 64  # most ids to generate
    min_tokens: int = 0  # no stop id (v1: none that counts) and no stop string before this many
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    stop_token_ids: tuple[int, ...] = ()  # end a request like the model's own EOS ids
    seed: int | None = None  # None: drawn from the engine's seed
    detokenize: bool = True  # False: ids alone, and no stop strings

    def __post_init__(self) -> None:
        """Refuse what no sampler can do."""
        self._bring_to_form()
        check_types(self)
        self._check_draw()
        if self.n < 1:
            raise ValueError(f"n {self.n}: use 1 or more")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n {self.n}: with temperature 0 all would be the same; use n 1 or a temperature"
            )
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

    def for_sampler(
        self, seed: int, stop_ids: Iterable[int] = (), vocab_size: int = ANY_VOCABULARY
    ) -> FullSampling:
        """Return these settings as the ranks' sampler takes them; bad words that are text drop out.

        seed: 64 bits. stop_ids: the model's EOS ids, ids beyond the vocabulary among them.
        """
        ends = set(self.stop_token_ids)
        if not self.ignore_eos:
            ends |= {token_id for token_id in stop_ids if 0 <= token_id < vocab_size}
        return FullSampling(
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=signed_64_bits(seed),
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            allowed_token_ids=self.allowed_token_ids or (),
            bad_words=tuple(word for word in self.bad_words if not isinstance(word, str)),
            min_tokens=self.min_tokens,
            # without min_tokens the ranks need not know them
            stop_ids=tuple(sorted(ends)) if self.min_tokens > 0 else (),
            logprobs=_num_logprobs(self.logprobs, vocab_size),
            prompt_logprobs=_num_logprobs(self.prompt_logprobs, vocab_size),
        )

    def _bring_to_form(self) -> None:
        """Take lists, None and JSON's string keys where vLLM's users write them."""
        for name in ("stop", "stop_token_ids", "bad_words"):
            value: Any = getattr(self, name)
            if value is None or isinstance(value, list):
                object.__setattr__(self, name, tuple(value or ()))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.allowed_token_ids, list):
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        words: Any = self.bad_words
        if isinstance(words, tuple):
            words = tuple(tuple(word) if isinstance(word, list) else word for word in words)
        object.__setattr__(self, "bad_words", (words,) if isinstance(words, str) else words)
        biases: Any = self.logit_bias
        if biases is None or isinstance(biases, Mapping):
            biases = {_token_id(key): value for key, value in (biases or {}).items()}
            object.__setattr__(self, "logit_bias", biases)

    def _check_draw(self) -> None:
        """Refuse settings of the draw itself."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature {self.temperature}: use 0 (greedy) or a positive number")
        if self.top_k < -1:
            raise ValueError(f"top_k {self.top_k}: use 1 or more, or 0 to switch it off")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: use a number above 0 and at most 1")
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids: an empty list allows nothing; leave it out")
        if any(not word for word in self.bad_words):
            raise ValueError("bad_words: an empty word bans nothing; leave it out")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count < -1:
                raise ValueError(f"{name} {count}: use 0 or more, or -1 for the whole vocabulary")
        check_full_sampling(self.for_sampler(seed=0), ANY_VOCABULARY)


def _num_logprobs(asked: int | None, vocab_size: int) -> int:
    """Return the sampler's number: there -1 is off, and "all" is the vocabulary's size."""
    if asked is None:
        return -1
    return vocab_size if asked == -1 else asked


def _token_id(key: Any) -> Any:
    """Return a key of logit_bias as an id where it is one in digits, as JSON writes it."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def signed_64_bits(seed: int) -> int:
    """Return the seed's low 64 bits as the signed number that fits an int64 tensor."""
    return (seed + 2**63) % 2**64 - 2**63
