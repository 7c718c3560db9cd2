"""One request between its prompt and its output: ids as they come, and the text they make.

engine.step() -> RequestUpdate(new_ids, finish_reason) -> Answer.add -> new text
Answer.output, once finished
"""

from __future__ import annotations

from collections.abc import Sequence

from nanorunner.detokenizer import Detokenizer
from nanorunner.outputs import CompletionOutput, RequestOutput
from nanorunner.sampling_params import SamplingParams
from nanorunner.tokenizer import Tokenizer


class Answer:
    """What one request has produced so far. Owner: the LLM that queued it."""

    def __init__(
        self,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.params = params
        self.request_id = -1  # set when it is queued
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.has_news = False  # set by each update, cleared by whoever reads it
        self._text = (
            None
            if tokenizer is None or not params.detokenize
            else Detokenizer(tokenizer, stop=params.stop, min_tokens=params.min_tokens)
        )
        self._unread: list[str] = []  # text that no reader of the stream has taken yet

    def add(self, new_ids: Sequence[int], finish_reason: str | None) -> int | None:
        """Take the newest ids; return how many ids to keep when a stop string ended the text."""
        self.has_news = True
        self.token_ids.extend(new_ids)
        self.finish_reason = finish_reason
        if self._text is None:
            return None
        self._unread.append(self._text.update(new_ids, finish_reason))
        if self._text.stop_string is None:
            return None
        self.finish_reason = "stop"
        del self.token_ids[self._text.num_tokens :]
        return self._text.num_tokens

    def take_text(self) -> str:
        """Return the text that has come since the last call."""
        text = "".join(self._unread)
        self._unread.clear()
        return text

    def output(self) -> RequestOutput:
        """Return the finished answer in the form that users get."""
        assert self.finish_reason is not None, "an answer is read after it has finished"
        completion = CompletionOutput(
            index=0,
            text="" if self._text is None else self._text.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            stop_reason=None if self._text is None else self._text.stop_string,
        )
        return RequestOutput(self.request_id, self.prompt, self.prompt_ids, [completion])
