"""What generate() and embed() hand back: the fields and names that vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass

from nanorunner.logprobs import Logprob
from nanorunner.workers.messages import Float32


@dataclass(frozen=True)
class CompletionOutput:
    """One finished completion."""

    index: int
    text: str  # "" without a tokenizer
    token_ids: list[int]  # an end-of-sequence id that ended it included
    finish_reason: str  # stop | length | abort
    stop_reason: str | None = None  # the stop string that ended it
    # Of each id: id -> Logprob, the id itself first, then the likeliest. None: not asked for.
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None  # the sum over the ids themselves


@dataclass(frozen=True)
class RequestOutput:
    """One prompt with its n completions."""

    request_id: int
    prompt: str | None  # None when the prompt came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    # Of each prompt id, as in CompletionOutput; None for the first, which nothing precedes.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first completion's token ids."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first completion ended: stop, length or abort."""
        return self.outputs[0].finish_reason


@dataclass(frozen=True)
class EmbeddingOutput:
    """One prompt's embedding."""

    embedding: Float32  # [hidden]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """One prompt with its embedding."""

    request_id: int
    prompt: str | None  # None when the prompt came as token ids
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
