"""What generate() hands back: the fields and names that vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CompletionOutput:
    """One finished completion."""

    index: int
    text: str  # "" without a tokenizer
    token_ids: list[int]  # an end-of-sequence id that ended it included
    finish_reason: str  # stop | length | abort
    stop_reason: str | None = None  # the stop string that ended it


@dataclass(frozen=True)
class RequestOutput:
    """One prompt with its completion."""

    request_id: int
    prompt: str | None  # None when the prompt came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True

    @property
    def text(self) -> str:
        """The completion's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The completion's token ids."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the completion ended: stop, length or abort."""
        return self.outputs[0].finish_reason
