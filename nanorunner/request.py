"""One request on rank 0: what the user asked for, and what comes back of it step by step.

A request's token ids live in one place at a time: in `Request.token_ids` while it waits, in its
row of the running table while it runs. Its length is always the length of that one place.

    waiting --admitted--> running --stop, length, abort, error--> gone
       ^                     |
       +----- preempted -----+   (blocks given back, all its tokens computed again later)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nanorunner.sampling_params import SamplingParams
from nanorunner.workers.full_sampling import FullSampling
from nanorunner.workers.messages import Int32, RequestExtras

NO_ROW = -1


class RequestUpdate(NamedTuple):
    """What one engine step brought for one request; a quiet one has none before its last."""

    request_id: int
    new_ids: list[int]  # since its last update; a stopping id is included, the text layer hides it
    finish_reason: str | None  # None goes on; "stop", "length", "abort" or "error: ..."
    extras: RequestExtras | None = None  # log-probabilities, an embedding


@dataclass(slots=True, eq=False)
class Request:
    """A request that has not ended; owned by the scheduler, never sent to a rank."""

    request_id: int
    token_ids: Int32  # all known ids while it waits; empty while it has a row
    prompt_len: int  # ids that the user gave
    limit: int  # most ids, prompt and output together
    min_len: int  # ids are not searched for stops before this length
    ignore_eos: bool
    stop_token_ids: frozenset[int]
    sampling: FullSampling
    pooling: str = ""  # "last" or "mean": it ends with its prompt, of which it is an embedding
    is_quiet: bool = False  # it has one update, its last, with all its ids
    row: int = NO_ROW
    blocks: list[int] = field(default_factory=list)  # KV blocks of positions 0 and up
    digests: list[bytes] = field(default_factory=list)  # of its full blocks, made once each

    @property
    def brings_extras(self) -> bool:
        """Whether its steps may bring it more than an id."""
        sampling = self.sampling
        return bool(self.pooling) or sampling.logprobs >= 0 or sampling.prompt_logprobs >= 0

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether every position must be computed, cached or not; asked while it waits.

        One that comes back with output has had its prompt's log-probabilities.
        """
        is_new = len(self.token_ids) == self.prompt_len
        return self.pooling == "mean" or (is_new and self.sampling.prompt_logprobs >= 0)


def make_request(
    request_id: int,
    prompt_ids: Int32,
    params: SamplingParams,
    sampling: FullSampling,
    max_model_len: int,
) -> Request:
    """Return a waiting Request; sampling is what params.for_sampler() made."""
    prompt_len = len(prompt_ids)
    return Request(
        request_id=request_id,
        token_ids=prompt_ids,
        prompt_len=prompt_len,
        limit=min(prompt_len + params.max_tokens, max_model_len),
        min_len=prompt_len + params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=frozenset(params.stop_token_ids),
        sampling=sampling,
    )


def make_pooling_request(request_id: int, prompt_ids: Int32, pooling: str) -> Request:
    """Return a waiting Request for an embedding of the prompt."""
    return Request(
        request_id=request_id,
        token_ids=prompt_ids,
        prompt_len=len(prompt_ids),
        limit=len(prompt_ids),
        min_len=0,
        ignore_eos=True,
        stop_token_ids=frozenset(),
        sampling=FullSampling(),
        pooling=pooling,
    )


def check_prompt(prompt_ids: object, vocab_size: int) -> Int32:
    """Return the prompt as int32 ids [prompt_len]; ValueError says which id is wrong and why."""
    ids = _as_array(prompt_ids)
    if ids.size == 0:
        raise ValueError("prompt: it has no token ids; give at least one")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"prompt: token ids must be a flat list of integers, not {ids.dtype} of "
            f"shape {list(ids.shape)}"
        )
    # As unsigned numbers, so that one comparison finds negative ids as well.
    if np.maximum.reduce(ids.astype(np.uint64)) >= vocab_size:
        at = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        raise ValueError(
            f"prompt: token id {ids[at]} at position {at} is not in the vocabulary; "
            f"use 0 to {vocab_size - 1}"
        )
    return ids.astype(np.int32)  # always a copy: a user's own array may change


def _as_array(prompt_ids: object) -> npt.NDArray[Any]:
    """Return np.asarray(prompt_ids), of a list of ints in less than half the time."""
    if type(prompt_ids) is list and prompt_ids and type(prompt_ids[0]) is int:
        try:
            # 700 ids: 8 us instead of 19
            return np.frombuffer(struct.pack(f"{len(prompt_ids)}i", *prompt_ids), np.int32)
        except struct.error:  # not all fit: whoever asks says why
            return np.asarray(prompt_ids)
    return np.asarray(prompt_ids)
