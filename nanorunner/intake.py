"""From what a user asks to requests that can be queued: every check, the seeds, the ids.

    prompt, SamplingParams -> check           -> Checked -> requests -> n Requests
    prompt, pooling        -> check_embedding -> Checked -> requests -> the Request of an embedding

Nothing is queued here, and a refusal leaves no trace: it takes no id and draws no number. The
engine calls it before the scheduler.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from nanorunner.compatibility import check_feature, check_params
from nanorunner.request import Request, check_prompt, make_pooling_request, make_request
from nanorunner.sampling_params import SamplingParams, signed_64_bits
from nanorunner.scheduler import Scheduler
from nanorunner.workers.full_sampling import (
    MAX_LOGPROB_ENTRIES,
    FullSampling,
    check_full_sampling,
)
from nanorunner.workers.messages import POOLINGS, Int32

ONE_OUTPUT = SamplingParams()  # of an embedding, which no sampler sees
LAST_REQUEST_ID = 2**31 - 1  # ids cross the wire as int32, then start again at 0


class Checked(NamedTuple):
    """What its maker's engine can serve, so that nobody looks at it twice."""

    maker: Intake  # whose checks it has passed; no other one takes it
    prompt_ids: Int32  # [prompt_len] nobody else's, and never changed
    params: SamplingParams
    pooling: str = ""  # one of POOLINGS asks for an embedding; then params is ONE_OUTPUT


class Intake:
    """Makes the requests of one engine. seed: what requests without a seed draw theirs from."""

    def __init__(self, scheduler: Scheduler, vocab_size: int, seed: int, runner: str) -> None:
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._runner = runner
        self._random = Random(seed)
        self.next_id = 0

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> Checked:
        """Return what requests() takes; ValueError for what this engine cannot serve."""
        prompt = check_prompt(prompt_ids, self._vocab_size)
        self._scheduler.check_prompt_fits(len(prompt))
        check_params(self._runner, params)
        for token_id in params.stop_token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(
                    f"stop_token_ids: {token_id} is not in the vocabulary; "
                    f"use 0 to {self._vocab_size - 1}"
                )
        for word in params.bad_words:
            if isinstance(word, str):
                raise ValueError(f"bad_words {word!r}: the engine has no tokenizer; give its ids")
        sampling = self._for_sampler(params)
        _check_logprobs_fit(len(prompt), sampling, self._scheduler.drafts.max_query_len)
        return Checked(self, prompt, params)

    def requests(self, checked: Checked) -> list[Request]:
        """Return params.n requests for one prompt, or the one of an embedding.

        Each draws by a seed of its own; the first alone brings the prompt's log-probabilities.
        Raises ValueError when another engine has checked it, and as check() does when
        params.logit_bias, a dict, has changed since.
        """
        maker, prompt, params, pooling = checked
        if maker is not self:
            raise ValueError("this request was checked by another engine; check it with this one")
        if pooling:
            return [make_pooling_request(self._new_id(), prompt, pooling)]
        sampling = self._for_sampler(params)  # may refuse, so before a number is drawn
        # Drawn for every prompt, so that one with its own seed does not shift the others'.
        seed = self._random.getrandbits(64)
        if params.seed is not None:
            seed = params.seed
        requests = []
        for child in range(params.n):
            sampling = sampling._replace(seed=signed_64_bits(child_seed(seed, child)))
            if child > 0:
                sampling = sampling._replace(prompt_logprobs=-1)
            max_model_len = self._scheduler.max_model_len
            requests.append(make_request(self._new_id(), prompt, params, sampling, max_model_len))
        return requests

    def check_embedding(self, prompt_ids: Sequence[int], pooling: str) -> Checked:
        """Return what requests() takes; ValueError for an embedding that cannot be had."""
        check_feature(self._runner, "embed")
        if pooling not in POOLINGS:
            raise ValueError(f"pooling {pooling!r}: use {' or '.join(POOLINGS)}")
        prompt = check_prompt(prompt_ids, self._vocab_size)
        self._scheduler.check_prompt_fits(len(prompt), least_output=0)
        return Checked(self, prompt, ONE_OUTPUT, pooling)

    def _for_sampler(self, params: SamplingParams) -> FullSampling:
        sampling = params.for_sampler(0, self._scheduler.eos_token_ids, self._vocab_size)
        check_full_sampling(sampling, self._vocab_size)
        return sampling

    def _new_id(self) -> int:
        """Return an id that no live request has."""
        request_id = self.next_id
        while self._scheduler.has_request(request_id):
            request_id = (request_id + 1) % (LAST_REQUEST_ID + 1)
        self.next_id = (request_id + 1) % (LAST_REQUEST_ID + 1)
        return request_id


def child_seed(seed: int, child: int) -> int:
    """Return the seed of a prompt's completion number `child`; the first one's is `seed` itself.

    So n = 4 begins with what n = 1 gives, and no completion repeats another's draws.
    """
    if child == 0:
        return seed
    message = f"{seed % 2**64} {child}".encode()
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")


def _check_logprobs_fit(prompt_len: int, sampling: FullSampling, query_len: int) -> None:
    """Refuse log-probabilities that the ranks have no room for."""
    entries = sampling.num_logprob_entries(prompt_len, query_len)
    if entries > MAX_LOGPROB_ENTRIES:
        places = f" in {query_len} places (speculative decoding)" if query_len > 1 else ""
        raise ValueError(
            f"prompt_logprobs {sampling.prompt_logprobs} for {prompt_len} prompt tokens and "
            f"logprobs {sampling.logprobs}{places}: {entries} log-probabilities in one step, but "
            f"the limit is {MAX_LOGPROB_ENTRIES}; use smaller numbers or a shorter prompt"
        )
