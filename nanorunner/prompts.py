"""The forms in which a prompt may be given, brought to one.

"text"    ["text", "text"]    [1, 2, 3]    [[1, 2], [3]]
{"prompt": "text"}    {"prompt_token_ids": [1, 2, 3]}    and lists of these
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from nanorunner.sampling_params import SamplingParams

FORMS = 'use a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}'


class Prompt(NamedTuple):
    """One prompt: text, or token ids; exactly one of the two is there."""

    text: str | None
    token_ids: list[int] | None


def read_prompts(prompts: Any) -> list[Prompt]:
    """Return the prompts of any accepted form, in order; raise ValueError naming the bad one."""
    if isinstance(prompts, str | Mapping) or _is_token_ids(prompts):
        return [read_prompt(prompts)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise ValueError(f"prompts: is {type(prompts).__name__}, {FORMS}, or a list of these")
    return [read_prompt(prompt, f"prompts[{index}]: ") for index, prompt in enumerate(prompts)]


def read_prompt(prompt: Any, where: str = "") -> Prompt:
    """Return one prompt; `where` opens the error's text."""
    if isinstance(prompt, str):
        return Prompt(prompt, None)
    if isinstance(prompt, Mapping):
        if set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
            return Prompt(prompt["prompt"], None)
        if set(prompt) == {"prompt_token_ids"}:
            return Prompt(None, _token_ids(prompt["prompt_token_ids"], where))
        raise ValueError(f"{where}{dict(prompt)!r:.80} is not a prompt: {FORMS}")
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        return Prompt(None, _token_ids(prompt, where))
    raise ValueError(f"{where}is {type(prompt).__name__}, {FORMS}")


@contextmanager
def named_in_errors(index: int, num_prompts: int) -> Iterator[None]:
    """Say in a ValueError of the block which of several prompts it is about."""
    try:
        yield
    except ValueError as error:
        where = f"prompts[{index}]: " if num_prompts > 1 else ""
        raise ValueError(f"{where}{error}") from None


def read_params(params: Any, num_prompts: int) -> list[SamplingParams]:
    """Return one SamplingParams a prompt, from one for all or a list of the same length."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise ValueError(
            f"sampling_params: is {type(params).__name__}, use a SamplingParams, or a list with "
            f"one for each prompt"
        )
    if len(params) != num_prompts:
        raise ValueError(
            f"sampling_params: {len(params)} given for {num_prompts} prompts; give one for each "
            f"prompt, or a single one for all"
        )
    return list(params)


def _is_token_ids(prompts: Any) -> bool:
    """Tell [1, 2, 3], one prompt, from [[1, 2], [3]], two."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes) or not prompts:
        return False
    return hasattr(prompts[0], "__index__")


def _token_ids(ids: Any, where: str) -> list[int]:
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise ValueError(f"{where}token ids are {type(ids).__name__}, use a list of whole numbers")
    # Nearly always so: 700 ids in 14 us instead of 81.
    if operator.countOf(map(type, ids), int) == len(ids):
        return list(ids)
    for place, token_id in enumerate(ids):
        if not hasattr(token_id, "__index__") or isinstance(token_id, bool):
            raise ValueError(f"{where}token id {token_id!r} at {place}: use a whole number")
    return [operator.index(token_id) for token_id in ids]


def read_messages(messages: Any, where: str = "messages") -> list[dict[str, str]]:
    """Return one conversation, checked: each turn has a role and a text."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise ValueError(f'{where}: use a list such as [{{"role": "user", "content": "Hello"}}]')
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError(
                f"{where}[{index}]: {message!r:.80} needs a role and a content, both strings"
            )
    return [dict(message) for message in messages]
