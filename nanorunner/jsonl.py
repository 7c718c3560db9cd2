"""Requests from a pipe: one line in, one line out, in the same order.

    in   {"prompt": "Hello", "max_tokens": 8}    {"messages": [...]}    {"prompt_token_ids": [...]}
         or a line of plain text
         and any key of SamplingParams
    out  {"index": 0, "text": "...", "token_ids": [...], "finish_reason": "stop", ...}
         with n: the first completion so, and all of them in "outputs"
         with logprobs: "logprobs": [{"17": {"logprob": -0.5, "rank": 1, ...}, ...}, ...]
         {"index": 1, "error": "what is wrong and what to do"}

A line that cannot be served becomes a row with an error; the others go on.
"""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from nanorunner.did_you_mean import did_you_mean
from nanorunner.field_types import check_type, check_types
from nanorunner.logprobs import Logprob
from nanorunner.outputs import CompletionOutput, RequestOutput
from nanorunner.sampling_params import SamplingParams

PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
LEAST_LOGPROB = -9999.0  # what JSON gets for minus infinity, which it cannot write
SAMPLING_KEYS = {field.name: str(field.type) for field in fields(SamplingParams)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of input: what to complete, or why it cannot be read."""

    index: int  # counts the lines that are not blank, from 0
    id: Any = None  # the user's own, handed back as it came
    prompt: Any = None  # text
    messages: Any = None
    prompt_token_ids: Any = None
    params: SamplingParams | None = None
    error: str = ""


def read_rows(lines: Iterable[bytes], defaults: SamplingParams) -> list[Row]:
    """Return a Row for every line that is not blank; params start from `defaults`."""
    rows: list[Row] = []
    for place, line in enumerate(lines):
        if place == 0:
            line = line.removeprefix(codecs.BOM_UTF8)  # editors on Windows write one
        if line.strip():
            rows.append(_read_row(len(rows), line, defaults))
    return rows


def result_row(row: Row, output: RequestOutput) -> str:
    """Return the JSON line of a finished request."""
    values = _completion(output.outputs[0])
    values["num_prompt_tokens"] = len(output.prompt_token_ids)
    if output.prompt_logprobs is not None:
        values["prompt_logprobs"] = [_logprobs(place) for place in output.prompt_logprobs]
    if len(output.outputs) > 1:
        values["outputs"] = [
            {"index": completion.index, **_completion(completion)} for completion in output.outputs
        ]
    return _dump(row, **values)


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    values: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        values["logprobs"] = [_logprobs(place) for place in completion.logprobs]
    return values


def _logprobs(place: dict[int, Logprob] | None) -> dict[int, dict[str, Any]] | None:
    if place is None:
        return None
    return {
        token_id: {**asdict(found), "logprob": max(found.logprob, LEAST_LOGPROB)}
        for token_id, found in place.items()
    }


def error_row(row: Row, error: str) -> str:
    """Return the JSON line of a request that failed."""
    return _dump(row, error=error)


def _dump(row: Row, **values: Any) -> str:
    own = {} if row.id is None else {"id": row.id}
    whole = {"index": row.index, **own, **values}
    line = json.dumps(whole, ensure_ascii=False)
    try:
        line.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # a terminal's few letters, or half a character in the caller's id
        return json.dumps(whole)
    return line


def _read_row(index: int, line: bytes, defaults: SamplingParams) -> Row:
    entry: Any = None
    try:
        entry = _parse(line)
        return _row(index, entry, defaults)
    except (ValueError, TypeError) as error:
        own = entry.get("id") if isinstance(entry, dict) else None
        return Row(index=index, id=own, error=str(error))


def _parse(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}; write the line in UTF-8") from None
    if not text:
        raise ValueError("only spaces; write a prompt")
    if text[0] not in '{"[':
        return {"prompt": text}
    try:
        entry = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("not a request: its lists or objects lie too deep in each other") from None
    if isinstance(entry, str):
        return {"prompt": entry}
    if not isinstance(entry, dict):
        raise ValueError('a JSON list is not a request; write {"prompt": "..."}')
    return entry


def _row(index: int, entry: dict[str, Any], defaults: SamplingParams) -> Row:
    known = {*PROMPT_KEYS, *SAMPLING_KEYS, "id"}
    for key in entry:
        if key not in known:
            raise ValueError(f"unknown key {key!r}; {did_you_mean(key, known)}")
    given = [key for key in PROMPT_KEYS if key in entry]
    if len(given) != 1:
        raise ValueError(f"{' and '.join(given) or 'no prompt'}: give one of {PROMPT_KEYS}")
    kind = given[0]
    if kind == "prompt" and not isinstance(entry[kind], str):
        raise ValueError(f"prompt: is {type(entry[kind]).__name__}, use a string")
    settings = {key: entry[key] for key in SAMPLING_KEYS if key in entry}
    for key, value in settings.items():  # before SamplingParams compares them with numbers
        if not SAMPLING_KEYS[key].startswith(("tuple", "dict")):
            check_type(key, value, SAMPLING_KEYS[key])
    params = replace(defaults, **settings)
    check_types(params)
    own: dict[str, Any] = {kind: entry[kind]}
    return Row(index=index, id=entry.get("id"), params=params, **own)
