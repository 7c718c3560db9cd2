"""What a frame asks of the ranks, in words and as plain data; for the tap alone.

    tap.py: (method, args) -> Words.of() -> "decode 44 requests, one token each, the same batch"
                           -> arguments() -> {"step_id": 12, "removed": [5]} -> argument_lines()

A step says only what changed, so Words remembers what the frames before have said: who was in the
batch, and how far each prompt has come. All of it is read from the frames, as a
rank reads them; nobody else is asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanorunner.workers.messages import BLOCK_SIZE, NewRequest, StepInput

MOST_NAMED = 3  # requests, each in words of its own; more are counted
MOST_BLOCKS = 8  # block ids of a request in a line
MOST_ITEMS = 16  # of a list in a line of arguments
REPR_CHARS = 60  # of an argument that nobody has words for
WORDS = {
    "load_model": "load this rank's share of the weights",
    "profile": "run the widest step and say how many KV blocks fit",
    "capture": "compile kernels; on a GPU, capture the graphs",
    "counters": "say what this rank has counted",
    "spans": "say where this rank's time went",
    "checksums": "say the checksums of this rank's weights",
    "close": "free everything and leave; the last call",
}


@dataclass
class Prompt:
    """How far a request's prompt has come; kept until it is all read."""

    num_known: int  # tokens: the prompt's, and after a preemption those generated before
    next_token: int  # the first one that no step has read yet
    has_been_here: bool
    is_pooled: bool
    blocks: list[int]  # those it came with; said with its first chunk, then []


class Words:
    """Says what each call asks; feed it every call of an engine, in order."""

    def __init__(self) -> None:
        self._prompts: dict[int, Prompt] = {}
        self._decodes: list[str] = []  # of the last step that named its batch

    def of(self, method: str, args: tuple[Any, ...]) -> str:
        """Return one call in words."""
        if method == "step":
            return self._step(StepInput.from_wire(args[0]))
        if method == "allocate_kv":
            return f"{args[0]} KV blocks of {BLOCK_SIZE} tokens on every rank"
        if method in WORDS:
            return WORDS[method]
        return f"{method}({', '.join(_short_repr(value) for value in args)})"

    def _step(self, step: StepInput) -> str:
        removed = _ints(step.removed)
        for request_id in removed:
            self._prompts.pop(request_id, None)
        for new in step.new:
            self._prompts[new.request_id] = _prompt(new)
        parts = [*_leaving(removed), *self._batch(step.batch), *_growth(step.new_blocks)]
        return "; ".join(parts) or "nothing to run"

    def _batch(self, packed: bytes | None) -> list[str]:
        """Return who runs in a step; the prompts are moved on."""
        if packed is None:  # the last one had decodes alone
            return [f"{words}, the same batch" for words in self._decodes]
        pairs = np.frombuffer(packed, np.int32).reshape(-1, 2).tolist()
        counts = [count for request_id, count in pairs if request_id not in self._prompts]
        chunks = [pair for pair in pairs if pair[0] in self._prompts]
        parts = [f"decode {_requests(len(counts))}, {_each(counts)}"] if counts else []
        self._decodes = parts
        told = [self._chunk(request_id, count) for request_id, count in chunks]
        if len(told) <= MOST_NAMED:
            return parts + told
        num_tokens = sum(count for _, count in chunks)
        return [*parts, f"prefill {_requests(len(told))}, {num_tokens} tokens together"]

    def _chunk(self, request_id: int, count: int) -> str:
        """Return which tokens of a prompt a step reads, and move the prompt on."""
        prompt = self._prompts[request_id]
        first, end = prompt.next_token, prompt.next_token + count
        verb = "embed" if prompt.is_pooled else "prefill"
        words = f"{verb} request {request_id}: {_span(first, end - 1)}"
        if end < prompt.num_known:
            words += f" of {prompt.num_known}"
        if prompt.blocks:
            words += f", {_blocks(prompt.blocks)}"
            if first > 0:
                words += f", {first} tokens from the prefix cache"
            if prompt.has_been_here:
                words += ", back after a preemption"
        prompt.next_token, prompt.blocks = end, []
        if end >= prompt.num_known:  # from the next step on it decodes
            del self._prompts[request_id]
        return words


def arguments(method: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return a call's arguments by name, as data that JSON can hold; what is empty is left out."""
    if method == "step":
        return _step_arguments(StepInput.from_wire(args[0]))
    if method == "allocate_kv":
        return {"num_blocks": args[0]}
    return {"arguments": [_short_repr(value) for value in args]} if args else {}


def argument_lines(named: dict[str, Any]) -> list[str]:
    """Return arguments() as a person reads it, long lists cut."""
    lines = []
    for name, value in named.items():
        if name == "new":
            for new in value:
                rest = ", ".join(
                    f"{key} {_short(found)}" for key, found in new.items() if key != "request"
                )
                lines.append(f"new request {new['request']}: {rest}")
        elif name == "new_blocks":
            grown = (f"request {owner} gets {_short(blocks)}" for owner, blocks in value)
            lines.append("new_blocks: " + ", ".join(grown))
        elif name == "batch":
            told = "the same as in the last step" if value is None else _pairs(value)
            lines.append(f"batch (request x tokens): {told}")
        else:
            lines.append(f"{name}: {_short(value)}")
    return lines


def _step_arguments(step: StepInput) -> dict[str, Any]:
    named: dict[str, Any] = {
        "step_id": step.step_id,
        "removed": _ints(step.removed),
        "new": [_new_arguments(new) for new in step.new],
        "new_blocks": [[owner, _ints(blocks)] for owner, blocks in step.new_blocks],
        "sampled_ids": _ints(step.sampled_ids),
    }
    named = {name: value for name, value in named.items() if value != []}
    batch = None if step.batch is None else np.frombuffer(step.batch, np.int32).reshape(-1, 2)
    return named | {"batch": None if batch is None else batch.tolist()}


def _new_arguments(new: NewRequest) -> dict[str, Any]:
    defaults = new.sampling._field_defaults
    sampling = {
        name: value for name, value in new.sampling._asdict().items() if value != defaults[name]
    }
    return {
        "request": new.request_id,
        "token_ids": _ints(new.token_ids),
        "prompt_len": new.prompt_len,
        "num_computed": new.num_computed,
        "block_ids": _ints(new.block_ids),
        **({"sampling": sampling} if sampling else {}),
        **({"pooling": new.pooling} if new.pooling else {}),
        **({"token_limit": new.token_limit} if new.token_limit else {}),
    }


def _prompt(new: NewRequest) -> Prompt:
    num_known = len(_ints(new.token_ids))
    return Prompt(
        num_known=num_known,
        next_token=new.num_computed,
        has_been_here=num_known > new.prompt_len,
        is_pooled=bool(new.pooling),
        blocks=_ints(new.block_ids),
    )


def _leaving(removed: Sequence[int]) -> list[str]:
    """Return who leaves: ended, aborted or preempted; the ranks are not told which."""
    if len(removed) > 1:
        return [f"{len(removed)} requests leave"]
    return [f"request {request_id} leaves" for request_id in removed]


def _growth(new_blocks: Sequence[tuple[int, bytes]]) -> list[str]:
    """Return who gets more KV blocks."""
    if len(new_blocks) > MOST_NAMED:
        count = sum(len(_ints(blocks)) for _, blocks in new_blocks)
        return [f"{_requests(len(new_blocks))} get {count} blocks"]
    return [f"request {owner} gets {_blocks(_ints(blocks))}" for owner, blocks in new_blocks]


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _requests(count: int) -> str:
    return _number(count, "request")


def _each(counts: Sequence[int]) -> str:
    """Return how many tokens each decoding request has in a step: as many as the others."""
    drafts = counts[0] - 1
    words = "one token" if drafts == 0 else f"one token and {_number(drafts, 'draft')}"
    return words if len(counts) == 1 else f"{words} each"


def _span(first: int, last: int) -> str:
    return f"token {first}" if first == last else f"tokens {first}..{last}"


def _blocks(blocks: Sequence[int]) -> str:
    shown = " ".join(map(str, blocks[:MOST_BLOCKS]))
    more = len(blocks) - MOST_BLOCKS
    return f"block{'s' * (len(blocks) > 1)} {shown}" + (f" and {more} more" if more > 0 else "")


def _pairs(pairs: Sequence[Sequence[int]]) -> str:
    return _cut(f"{request_id} x {count}" for request_id, count in pairs)


def _short(value: Any) -> str:
    """Return an argument in one line."""
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return _cut(map(str, value), between=" ")
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(found)}" for name, found in value.items())
    return value if isinstance(value, str) else json.dumps(value)


def _cut(items: Iterable[str], between: str = ", ") -> str:
    """Return the first items, with their number if there are more."""
    found = list(items)
    if len(found) <= MOST_ITEMS:
        return between.join(found)
    return f"{between.join(found[:MOST_ITEMS])} ... ({len(found)} in all)"


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= REPR_CHARS else f"{text[:REPR_CHARS]}..."


def _ints(packed: bytes) -> list[int]:
    """Return packed int32 as numbers."""
    found: list[int] = np.frombuffer(packed, np.int32).tolist()
    return found
