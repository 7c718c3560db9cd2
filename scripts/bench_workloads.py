"""The workloads that every engine is measured on: prompts of token ids, and how many ids to make.

Fixed seeds and formulas, so that two engines, or two commits, get the same numbers to chew. No
tokenizer is needed and nothing of nanorunner is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

LARGEST_ID = 10_000  # within every vocabulary that is measured; a toy's own limit is lower


class Workload(NamedTuple):
    """Prompts and, for each, how many ids to generate; all are sent at once."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_input_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(len(prompt) for prompt in self.prompts)


def ragged(num_requests: int, shortest: int, longest: int, seed: int, largest_id: int) -> Workload:
    """Return requests whose prompts and outputs are each shortest to longest tokens long."""
    random = Random(seed)
    prompts = [
        _prompt(random, random.randint(shortest, longest), largest_id) for _ in range(num_requests)
    ]
    return Workload(prompts, [random.randint(shortest, longest) for _ in range(num_requests)])


def uniform(
    num_requests: int, input_len: int, output_len: int, seed: int, largest_id: int
) -> Workload:
    """Return requests of one length."""
    random = Random(seed)
    prompts = [_prompt(random, input_len, largest_id) for _ in range(num_requests)]
    return Workload(prompts, [output_len] * num_requests)


def _prompt(random: Random, length: int, largest_id: int) -> list[int]:
    return [random.randint(0, largest_id) for _ in range(length)]


def _uniform(num_requests: int, input_len: int, output_len: int) -> Callable[[int], Workload]:
    return lambda largest_id: uniform(num_requests, input_len, output_len, 1, largest_id)


# name -> function of the largest token id
WORKLOADS: dict[str, Callable[[int], Workload]] = {
    "nano": lambda largest_id: ragged(256, 100, 1024, 0, largest_id),  # nano-vllm's own bench
    "b1": _uniform(1, 128, 512),
    "b8": _uniform(8, 512, 512),
    "b64": _uniform(64, 512, 512),
    "b256": _uniform(256, 512, 512),
    "prefill": _uniform(64, 2048, 1),
    "long": _uniform(8, 8192, 512),
    "smoke": _uniform(2, 8, 4),  # for tests: does the script run at all
}


def make_workload(name: str, vocab_size: int) -> Workload:
    """Return a workload by name; ValueError for an unknown one."""
    if name not in WORKLOADS:
        raise ValueError(f"load {name!r}: use some of {', '.join(WORKLOADS)}")
    return WORKLOADS[name](min(LARGEST_ID, vocab_size - 1))
