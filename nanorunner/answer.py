"""One prompt between its request and its output: ids as they come, and the text they make.

engine.step() -> RequestUpdate -> Completion.add -> new text      (n of them for a prompt)
                                        |
                                        +-> Answer in the inbox of the run that waits for it
Answer.output(), once all have finished
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nanorunner.detokenizer import Detokenizer
from nanorunner.intake import Checked
from nanorunner.logprobs import LogprobReader
from nanorunner.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
)
from nanorunner.tokenizer import Tokenizer
from nanorunner.workers.messages import Float32, RequestExtras, TokenLogprobs


class Completion:
    """One of a prompt's completions as far as it has come. Owner: its Answer."""

    def __init__(self, answer: Answer) -> None:
        self.request_id = -1  # set when it is queued, as text is
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.logprobs: list[TokenLogprobs] = []  # one for each id, if asked for
        self.prompt_logprobs: TokenLogprobs | None = None
        self.embedding: Float32 | None = None
        self.text: Detokenizer | None = None
        self._answer = answer
        self._unread: list[str] = []  # text that no reader of the stream has taken yet

    def add(
        self,
        new_ids: Sequence[int],
        finish_reason: str | None,
        extras: RequestExtras | None = None,
    ) -> int | None:
        """Take the newest ids; return how many ids to keep when a stop string ended the text."""
        self._answer.announce()
        self.token_ids.extend(new_ids)
        if extras is not None:
            self._add_extras(extras)
        num_kept = None
        if self.text is not None:
            self._unread.append(self.text.update(new_ids, finish_reason))
            if self.text.stop_string is not None:
                finish_reason, num_kept = "stop", self.text.num_tokens
                del self.token_ids[num_kept:]
                del self.logprobs[num_kept:]
        if finish_reason is not None:
            self.finish_reason = finish_reason
            self._answer.count_finished()
        return num_kept

    def take_text(self) -> str:
        """Return the text that has come since the last call."""
        text = "".join(self._unread)
        self._unread.clear()
        return text

    def _add_extras(self, extras: RequestExtras) -> None:
        if extras.logprobs is not None:
            places = range(len(extras.logprobs.ranks))
            self.logprobs += [_one(extras.logprobs, place) for place in places]
        if extras.prompt_logprobs is not None:
            self.prompt_logprobs = extras.prompt_logprobs
        if extras.embedding is not None:
            self.embedding = extras.embedding


class Answer:
    """What one prompt has brought so far. Owner: the LLM that queued it.

    prompt_ids: as users get them back; checked: the same ids as the engine takes them.
    """

    def __init__(
        self,
        prompt: str | None,
        prompt_ids: list[int],
        checked: Checked,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.checked = checked
        self.params = params = checked.params
        # None until the last completion has finished; then the first one's, or an error
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._num_unfinished = params.n
        self._has_text = tokenizer is not None and params.detokenize and not checked.pooling
        self._inbox: deque[Answer] = deque()  # of whoever reads the news; it is in there once
        self._has_news = False
        self.completions = [Completion(self) for _ in range(params.n)]

    def begin(self, inbox: deque[Answer], *, streaming: bool) -> bool:
        """Make ready for the first update; return whether the last one alone is enough.

        Each update puts this answer into the inbox, unless it is there. streaming: ids and text are
        read as they come, not only at the end.
        """
        self._inbox = inbox
        if self._has_text:
            for completion in self.completions:
                completion.text = self._detokenizer(streaming)
        # A stop string is found in the text, so that must grow with each id.
        return not streaming and not (self._has_text and self.params.stop)

    def announce(self) -> None:
        """Tell the reader that there is something new."""
        if not self._has_news:
            self._has_news = True
            self._inbox.append(self)

    def take_news(self) -> None:
        """Note that the reader has taken this answer out of its inbox."""
        self._has_news = False

    @property
    def token_ids(self) -> list[int]:
        """The first completion's ids."""
        return self.completions[0].token_ids

    @property
    def num_tokens(self) -> int:
        """The ids of all completions together."""
        return sum(len(completion.token_ids) for completion in self.completions)

    def take_text(self) -> str:
        """Return the first completion's text that has come since the last call."""
        return self.completions[0].take_text()

    def count_finished(self) -> None:
        """Note that one more completion has finished."""
        self._num_unfinished -= 1
        if self._num_unfinished == 0:
            reasons = [str(completion.finish_reason) for completion in self.completions]
            errors = [reason for reason in reasons if reason.startswith("error")]
            self.finish_reason = (errors or reasons)[0]

    def output(self) -> RequestOutput:
        """Return the finished answer in the form that users get."""
        assert self.finish_reason is not None, "an answer is read after it has finished"
        first = self.completions[0]
        reader = LogprobReader(self._tokenizer)
        output = RequestOutput(
            first.request_id,
            self.prompt,
            self.prompt_ids,
            [self._output(index, reader) for index in range(len(self.completions))],
        )
        if self.params.prompt_logprobs is None or first.prompt_logprobs is None:
            return output
        return replace(output, prompt_logprobs=[None, *reader.read([first.prompt_logprobs])])

    def embedding(self, normalize: bool) -> EmbeddingRequestOutput:
        """Return the finished embedding in the form that users get; normalize: to length 1."""
        first = self.completions[0]
        if first.embedding is None:
            raise RuntimeError(f"no embedding of request {first.request_id}: {first.finish_reason}")
        embedding = first.embedding
        if normalize:
            # a vector of zeros has no direction; it stays
            embedding = embedding / max(float(np.linalg.norm(embedding)), 1e-12)
        return EmbeddingRequestOutput(
            first.request_id, self.prompt, self.prompt_ids, EmbeddingOutput(embedding)
        )

    def _output(self, index: int, reader: LogprobReader) -> CompletionOutput:
        completion = self.completions[index]
        text = completion.text
        output = CompletionOutput(
            index=index,
            text="" if text is None else text.text,
            token_ids=completion.token_ids,
            finish_reason=str(completion.finish_reason),
            stop_reason=None if text is None else text.stop_string,
        )
        if self.params.logprobs is None:
            return output
        logprobs = reader.read(completion.logprobs)
        own = (found[i].logprob for found, i in zip(logprobs, completion.token_ids, strict=True))
        return replace(output, logprobs=logprobs, cumulative_logprob=sum(own))

    def _detokenizer(self, streaming: bool) -> Detokenizer:
        assert self._tokenizer is not None, "text without a tokenizer is refused"
        stop, min_tokens = self.params.stop, self.params.min_tokens
        return Detokenizer(self._tokenizer, stop, min_tokens, streaming=streaming)


def _one(logprobs: TokenLogprobs, place: int) -> TokenLogprobs:
    """Return those of one token."""
    one = slice(place, place + 1)
    return TokenLogprobs(logprobs.token_ids[one], logprobs.logprobs[one], logprobs.ranks[one])
