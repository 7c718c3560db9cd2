"""The library's front door: LLM.generate, chat and embed, in the names that vLLM's users know.

    prompts -> token ids -> Engine.check_request -> Answer, all of them before the first is queued
    Answer -> Engine.add_checked ... Engine.step -> Answer -> RequestOutput

Everything a person can get wrong is refused before the first prompt is queued, so a bad prompt in
a list of a thousand costs no computed token. Not for use by several threads at once.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm

from nanorunner.answer import Answer, Completion
from nanorunner.bad_words import with_bad_word_ids
from nanorunner.build import build_engine
from nanorunner.config import Config, make_config
from nanorunner.field_types import check_types
from nanorunner.outputs import EmbeddingRequestOutput, RequestOutput
from nanorunner.prompts import Prompt, named_in_errors, read_messages, read_params, read_prompts
from nanorunner.resolve import Resolved, resolve
from nanorunner.sampling_params import SamplingParams
from nanorunner.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger("nanorunner")


class LLM:
    """A model on tp processes that answers lists of prompts; close it, or use `with`.

    LLM() is the embedded SmolLM2-135M-Instruct. Settings are the fields of Config, with vLLM's
    names allowed (tensor_parallel_size). Raises ValueError for a setting that cannot work, before
    any process starts.
    """

    def __init__(self, model: str | os.PathLike[str] = "", **settings: Any) -> None:
        self._open(make_config({"model": os.fspath(model), **settings}))

    @classmethod
    def from_config(cls, config: Config) -> LLM:
        """Return the engine of a Config that is already there; errors as in LLM()."""
        llm = cls.__new__(cls)
        llm._open(config)
        return llm

    def _open(self, config: Config) -> None:
        self.resolved: Resolved = resolve(config)
        for note in self.resolved.notes:
            logger.info("%s", note)
        # before the engine: a tokenizer that does not load should not cost a start
        self.tokenizer = _load_tokenizer(self.resolved)
        eos_ids = frozenset() if self.tokenizer is None else self.tokenizer.eos_ids
        self.engine = build_engine(self.resolved, eos_ids)
        self._completions: dict[int, Completion] = {}  # every request that is queued, by id
        # also at the interpreter's exit, for a program that never closes
        self._closer = weakref.finalize(self, self.engine.close)

    def generate(
        self,
        prompts: str | Sequence[Any] | Mapping[str, Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return one output for each prompt, in the prompts' order.

        Text is completed as it stands, without the chat template. Raises ValueError with nothing
        queued when any prompt or its params cannot be served.
        """
        parts = read_prompts(prompts)
        return self._complete(self._prepare(parts, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return the model's answers to one conversation, or to a list of them.

        A conversation is [{"role": "user", "content": "..."}, ...]. Raises ValueError as
        generate() does, and when the model has no chat template.
        """
        several = bool(messages) and isinstance(messages[0], Sequence)
        conversations = messages if several else [messages]
        parts = [
            Prompt(None, self.chat_ids(conversation, f"messages[{index}]" if several else ""))
            for index, conversation in enumerate(conversations)
        ]
        return self._complete(self._prepare(parts, sampling_params), use_tqdm)

    def embed(
        self,
        prompts: str | Sequence[Any] | Mapping[str, Any],
        *,
        pooling: str = "last",
        normalize: bool = False,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return one embedding [hidden] float32 for each prompt, in the prompts' order.

        pooling: "last", the last token's final hidden state, or "mean", the mean over the prompt's.
        normalize: to length 1. Needs runner v2. Raises ValueError as generate() does.
        """
        self._check_open()
        answers = []
        for index, prompt in enumerate(parts := read_prompts(prompts)):
            with named_in_errors(index, len(parts)):
                ids = self._prompt_ids(prompt)
                checked = self.engine.check_embedding(ids, pooling)
            answers.append(Answer(prompt.text, ids, checked, self.tokenizer))
        self._run_all(answers, use_tqdm, "Embedding")
        return [answer.embedding(normalize) for answer in answers]

    def chat_ids(self, messages: Any, where: str = "") -> list[int]:
        """Return a conversation's token ids, ready for the model's answer."""
        conversation = read_messages(messages, where or "messages")
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer; this engine works on token ids alone")
        return self.tokenizer.chat_ids(conversation)

    @property
    def has_chat_template(self) -> bool:
        """Whether chat() works with this model."""
        return self.tokenizer is not None and self.tokenizer.has_chat_template

    def prepare(self, prompt: Prompt, params: SamplingParams) -> Answer:
        """Return a prompt as an Answer that can be queued; ValueError when it cannot be served."""
        check_types(params)
        return self._prepare_one(prompt, params)

    def _prepare_one(self, prompt: Prompt, params: SamplingParams) -> Answer:
        """prepare(), for params whose types were found right."""
        ids = self._prompt_ids(prompt)
        if self.tokenizer is None and params.stop:
            raise ValueError(
                f"stop {params.stop[0]!r}: stop strings need a tokenizer, and this engine has "
                f"none; use stop_token_ids"
            )
        params = with_bad_word_ids(params, self.tokenizer)
        checked = self.engine.check_request(ids, params)
        return Answer(prompt.text, ids, checked, self.tokenizer)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if prompt.token_ids is not None:
            return prompt.token_ids
        assert prompt.text is not None, "a prompt is text or ids"
        if self.tokenizer is None:
            raise ValueError(
                "a text prompt needs a tokenizer, and this engine has none; "
                'give {"prompt_token_ids": [...]}, or --prompt-ids'
            )
        return self.tokenizer.encode(prompt.text)

    def run(self, answers: Sequence[Answer], *, streaming: bool = True) -> Iterator[Answer]:
        """Queue the answers and yield each whenever it has news; finished ones for the last time.

        streaming: False says that nobody reads an answer before its end. Its ids then come all at
        once, its text is made once, and a step in which nothing ends looks at no answer.

        When the caller stops early (an exception, Ctrl-C, a closed iterator), those unfinished
        are aborted and the engine stays usable. Other requests are served along the way.
        """
        inbox: deque[Answer] = deque()  # filled by whoever steps the engine, another run too
        try:
            for answer in answers:
                self._queue(answer, inbox, streaming)
            num_unfinished = len(answers)
            while num_unfinished:
                while not inbox:
                    self._step()
                answer = inbox.popleft()
                answer.take_news()
                if answer.finish_reason is not None:
                    num_unfinished -= 1
                yield answer
        finally:
            self._abort(answers)

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Yield one prompt's completion piece by piece as it comes."""
        part, params = read_prompts(prompt), read_params(sampling_params, 1)
        if len(part) != 1:
            raise ValueError(f"stream: {len(part)} prompts given; it takes one")
        if params[0].n != 1:
            raise ValueError(f"n {params[0].n}: a stream is one completion; use n 1, or generate()")
        for answer in self.run([self.prepare(part[0], params[0])]):
            text = answer.take_text()
            if text:
                yield text

    def close(self) -> None:
        """Stop every rank and free what they hold; a second call does nothing."""
        self._closer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._closer.alive:
            raise RuntimeError("this LLM is closed; make a new one")

    def _prepare(self, prompts: list[Prompt], sampling_params: Any) -> list[Answer]:
        self._check_open()
        params = read_params(sampling_params, len(prompts))
        answers: list[Answer] = []
        for index, (prompt, its_params) in enumerate(zip(prompts, params, strict=True)):
            with named_in_errors(index, len(prompts)):
                if index == 0 or its_params is not params[index - 1]:  # often one for all
                    check_types(its_params)
                answers.append(self._prepare_one(prompt, its_params))
        return answers

    def _queue(self, answer: Answer, inbox: deque[Answer], streaming: bool) -> None:
        quiet = answer.begin(inbox, streaming=streaming)
        ids = self.engine.add_checked(answer.checked, quiet=quiet)
        for completion, request_id in zip(answer.completions, ids, strict=True):
            completion.request_id = request_id
            self._completions[request_id] = completion

    def _complete(self, answers: list[Answer], use_tqdm: bool) -> list[RequestOutput]:
        self._run_all(answers, use_tqdm, "Generating")
        return [answer.output() for answer in answers]

    def _run_all(self, answers: list[Answer], use_tqdm: bool, title: str) -> None:
        """Run the answers to their end, with a bar on a terminal."""
        num_tokens, start = 0, time.perf_counter()
        # disable=None: no bar where stderr is not a terminal
        disable = None if use_tqdm else True
        with (
            tqdm(total=len(answers), desc=title, unit="prompt", disable=disable) as bar,
            self.engine.stepping(),
        ):
            for answer in self.run(answers, streaming=False):
                if answer.finish_reason is not None:
                    num_tokens += answer.num_tokens
                    seconds = max(time.perf_counter() - start, 1e-9)
                    bar.set_postfix_str(f"{num_tokens / seconds:.1f} tokens/s", refresh=False)
                    bar.update()

    def _step(self) -> None:
        """Run one step and hand each update to its completion, whoever waits for it."""
        try:
            updates = self.engine.step()
        except KeyboardInterrupt:
            # the engine has aborted all requests, those of streams that wait for their turn too
            for completion in self._completions.values():
                completion.add([], "abort")
            self._completions.clear()
            raise
        for request_id, new_ids, finish_reason, extras in updates:
            completion = self._completions[request_id]
            num_kept = completion.add(new_ids, finish_reason, extras)
            if num_kept is not None and finish_reason is None:
                self.engine.finish(request_id, num_kept, "stop")
            if completion.finish_reason is not None:
                del self._completions[request_id]

    def _abort(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            for completion in answer.completions:
                if self._completions.pop(completion.request_id, None) is not None:
                    self.engine.abort(completion.request_id)


def _load_tokenizer(resolved: Resolved) -> Tokenizer | None:
    if resolved.config.skip_tokenizer_init:
        return None
    if resolved.source.has_tokenizer:
        return load_tokenizer(resolved.source.folder)
    if resolved.source.load_format == "dummy":
        logger.info("no tokenizer: token ids in, token ids out")
        return None
    raise ValueError(
        f"model {resolved.source.name}: no tokenizer.json in {resolved.source.folder}; add it, or "
        f"use skip_tokenizer_init for token ids in and out"
    )
