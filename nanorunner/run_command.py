"""`nanorunner run`: from flags to completions, by prompt, by pipe or in a chat shell.

Every way in becomes a list of jsonl.Row; every row ends as a result or as an error of its own, and
one bad row never takes the others with it.
"""

from __future__ import annotations

import sys
import traceback
from argparse import Namespace
from typing import TYPE_CHECKING

from nanorunner.compatibility import check_params
from nanorunner.config import Config, make_config
from nanorunner.errors import RankDied
from nanorunner.exit_codes import OK, RANK_DIED, REFUSED, REQUEST_FAILED
from nanorunner.flags import engine_settings, sampling_params
from nanorunner.jsonl import Row, error_row, read_rows, result_row
from nanorunner.prompts import Prompt
from nanorunner.sampling_params import SamplingParams
from nanorunner.tap import prints_frames
from nanorunner.workers.rank_agreement import RankCheckFailed

if TYPE_CHECKING:
    from nanorunner.answer import Answer
    from nanorunner.llm import LLM


def run(arguments: Namespace) -> int:
    """Answer what the flags ask for and return the exit code."""
    try:
        config = make_config(engine_settings(arguments))
        params = sampling_params(arguments)
        check_params(config.runner, params)
        rows = _rows(arguments, params)
        _check_shown(arguments, rows, params)
    except ValueError as error:
        return _report(error, REFUSED)
    if rows is not None and all(row.error for row in rows):
        return _answer_no_row(rows)
    try:
        llm = _start(config)
    except (ValueError, OSError, ImportError) as error:
        return _report(error, REFUSED)
    except (RankDied, RankCheckFailed) as error:
        return _report(error, RANK_DIED)
    with llm:
        try:
            code = _serve(llm, rows, params, arguments)
            if config.step_times:
                _print_step_times(llm)
            return code
        except (RankDied, RankCheckFailed) as error:
            return _report(error, RANK_DIED)
        except BrokenPipeError:
            raise
        except Exception:
            # a step failed on rank 0 itself, which is a rank too; only a traceback can say where
            traceback.print_exc()
            return RANK_DIED


def _report(error: Exception, code: int) -> int:
    print(f"nanorunner: {error}", file=sys.stderr)
    return code


def _serve(llm: LLM, rows: list[Row] | None, params: SamplingParams, arguments: Namespace) -> int:
    if rows is not None:
        return _answer(llm, rows, arguments)
    from nanorunner.chat import chat

    return chat(llm, params, arguments.system, arguments.raw)


def _print_step_times(llm: LLM) -> None:
    from nanorunner.step_times import step_lines, step_times, whole_steps

    spans = llm.engine.spans()[0]
    if not whole_steps(spans).size:
        print("nanorunner: no step ran, so none has a time", file=sys.stderr)
    else:
        print("\n".join(step_lines(step_times(spans))), file=sys.stderr)


def _start(config: Config) -> LLM:
    """Return the running engine. Imports torch, which takes seconds: after all cheap checks."""
    from nanorunner.llm import LLM

    return LLM.from_config(config)


def _rows(arguments: Namespace, params: SamplingParams) -> list[Row] | None:
    """Return what to complete; None for a chat with whoever sits at the terminal."""
    if "" in (arguments.prompt or ()):
        raise ValueError("--prompt: an empty prompt; write some text")
    texts, ids = arguments.prompt or [], arguments.prompt_ids or []
    if texts or ids:
        rows = [Row(index=index, prompt=text, params=params) for index, text in enumerate(texts)]
        for its_ids in ids:
            rows.append(Row(index=len(rows), prompt_token_ids=its_ids, params=params))
        return rows
    if sys.stdin is None:
        raise ValueError("standard input is closed; give a prompt: --prompt 'Hello'")
    if sys.stdin.isatty():
        return None
    return read_rows(sys.stdin.buffer, params)


def _check_shown(arguments: Namespace, rows: list[Row] | None, params: SamplingParams) -> None:
    """Refuse flags whose result nobody would see."""
    has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
    is_plain = bool(arguments.prompt or arguments.prompt_ids) and not arguments.json
    if has_logprobs and (is_plain or rows is None):
        raise ValueError(
            "--logprobs, --prompt-logprobs: plain text has no place for them; add --json"
        )
    if params.n > 1 and rows is None:
        raise ValueError(f"--n {params.n}: a chat has one answer; leave it out, or use --prompt")


def _answer_no_row(rows: list[Row]) -> int:
    """Say why there is nothing to run, without starting an engine for it."""
    if not rows:
        print("nanorunner: stdin is empty; give --prompt, or one request a line", file=sys.stderr)
        return OK
    for row in rows:
        print(error_row(row, row.error))
    return REQUEST_FAILED


def _answer(llm: LLM, rows: list[Row], arguments: Namespace) -> int:
    """Run the rows together; print each in order as soon as it and those before it are done."""
    is_pipe = not (arguments.prompt or arguments.prompt_ids)
    writer = _Writer(
        rows,
        as_json=arguments.json or is_pipe,
        has_text=llm.tokenizer is not None,
        is_tapped=prints_frames(llm.resolved.config),
    )
    answers: dict[int, Answer] = {}
    for row in rows:
        try:
            if row.error:
                raise ValueError(row.error)
            answers[row.index] = prepare(llm, row, arguments.system, arguments.raw)
        except ValueError as error:
            writer.fail(row, str(error))
    index_of = {id(answer): index for index, answer in answers.items()}
    try:
        for answer in llm.run(list(answers.values()), streaming=writer.streams):
            writer.take(rows[index_of[id(answer)]], answer)
    except Exception as error:
        # whatever ended the engine: each unfinished row says so in its place, then it goes up
        for row in rows:
            writer.fail(row, str(error))
        raise
    return REQUEST_FAILED if writer.num_failed else OK


def prepare(llm: LLM, row: Row, system: str | None, raw: bool) -> Answer:
    """Return a row as an Answer; ValueError when it cannot be served.

    Text goes through the model's chat template where it has one, unless `raw`; token ids never do.
    """
    assert row.params is not None, "a row without an error has params"
    if row.prompt_token_ids is not None:
        return llm.prepare(Prompt(None, row.prompt_token_ids), row.params)
    if row.messages is not None:
        return llm.prepare(Prompt(None, llm.chat_ids(row.messages)), row.params)
    if not row.prompt:
        raise ValueError("prompt: it is empty; write some text")
    if raw or not llm.has_chat_template:
        if system is not None:
            raise ValueError("--system: needs a chat template; leave out --raw, or use --prompt")
        return llm.prepare(Prompt(row.prompt, None), row.params)
    messages = [{"role": "user", "content": row.prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    answer = llm.prepare(Prompt(None, llm.chat_ids(messages)), row.params)
    answer.prompt = row.prompt
    return answer


class _Writer:
    """stdout in the rows' order, however they finish; text streams when there is one row.

    Not with a tap, whose lines would fall between the words.
    """

    def __init__(self, rows: list[Row], as_json: bool, has_text: bool, is_tapped: bool) -> None:
        self.num_failed = 0
        self._has_text = has_text
        self._rows = rows
        self._as_json = as_json
        is_single = len(rows) == 1 and (rows[0].params is None or rows[0].params.n == 1)
        self.streams = is_single and not as_json and has_text and not is_tapped
        self._done: dict[int, str] = {}  # finished, by index, until those before are printed
        self._next = 0  # the first index that is not printed yet
        self._over: set[int] = set()

    def take(self, row: Row, answer: Answer) -> None:
        """Take an answer's news; print what is complete."""
        if self.streams:
            print(answer.take_text(), end="", flush=True)
        if answer.finish_reason is None:
            return
        if answer.finish_reason.startswith("error"):
            self.fail(row, answer.finish_reason)
            return
        output = answer.output()
        if self._as_json:
            self._finish(row, result_row(row, output))
        elif self._has_text:
            texts = [completion.text for completion in output.outputs]
            self._finish(row, "" if self.streams else "\n".join(texts))
        else:
            lists = [",".join(map(str, completion.token_ids)) for completion in output.outputs]
            self._finish(row, "\n".join(lists))

    def fail(self, row: Row, error: str) -> None:
        """Record that a row failed, unless it is over already."""
        if row.index in self._over:
            return
        self.num_failed += 1
        if self._as_json:
            self._finish(row, error_row(row, error))
        else:
            print(f"nanorunner: prompt {row.index}: {error}", file=sys.stderr)
            self._finish(row, None)

    def _finish(self, row: Row, line: str | None) -> None:
        self._over.add(row.index)
        self._done[row.index] = "" if line is None else line + "\n"
        while self._next in self._done:
            print(self._done.pop(self._next), end="", flush=True)
            self._next += 1
