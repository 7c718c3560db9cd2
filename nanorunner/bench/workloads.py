"""What is asked of the engine: prompts of token ids, and how many ids to make for each.

    named       b1, b8, b64, b256, nano, prefill, long: the loads that every engine is measured on,
                by fixed seeds and formulas, so that two engines, or two commits, chew the same
    sharegpt    lengths like ShareGPT's conversations, from two log-normal distributions
    fixed       one length in, one length out
    a file      prompt_file.py

Ids are random; no tokenizer is needed. Outputs run to their full length, whatever the model says.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np

LARGEST_ID = 10_000  # within every vocabulary that is measured; a toy's own limit is lower

# The means are ShareGPT's as vLLM's serving benchmark counts it: 1,000 conversations of
# ShareGPT_V3_unfiltered_cleaned_split under Llama 3's tokenizer are 215,196 ids in and about
# 198,000 out, after its filter, which is the limits below. The spreads (sigma of the logarithm)
# are ours: nobody publishes them. For the conversations themselves give --prompts a file.
SHAREGPT_MEDIAN_IN, SHAREGPT_SIGMA_IN = 151.0, 1.4  # before the filter
SHAREGPT_MEDIAN_OUT, SHAREGPT_SIGMA_OUT = 126.0, 1.0
SHAREGPT_SHORTEST, SHAREGPT_LONGEST_IN, SHAREGPT_LONGEST = 4, 1024, 2048
SHAREGPT_SOURCE = (
    "log-normal lengths with the means of ShareGPT_V3 in vLLM's benchmark (215 in, 198 out), "
    "4 to 1024 in, at most 2048 together; sigma 1.4 and 1.0 are ours"
)


class Workload(NamedTuple):
    """Prompts and, for each, how many ids to generate."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_input_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def longest(self) -> int:
        """Most tokens of one request, prompt and output together."""
        return max(len(prompt) + n for prompt, n in zip(*self, strict=True))

    def shifted(self, by: int, largest_id: int) -> Workload:
        """Return the same lengths and the same common beginnings with other ids.

        So a repeat is not served from the prefix cache that the last one has filled.
        """
        count = largest_id + 1
        return Workload([[(i + by) % count for i in p] for p in self.prompts], self.output_lens)


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


def of_lengths(lengths: Sequence[tuple[int, int]], seed: int, largest_id: int) -> Workload:
    """Return one request for each (prompt length, output length)."""
    random = Random(f"prompts {seed}")
    prompts = [_prompt(random, input_len, largest_id) for input_len, _ in lengths]
    return Workload(prompts, [output_len for _, output_len in lengths])


def sharegpt_lengths(num_requests: int, seed: int, scale: float = 1.0) -> list[tuple[int, int]]:
    """Return (prompt length, output length) like ShareGPT's; a pair outside the limits is redrawn.

    scale multiplies every length, for small models and slow machines; none becomes less than 1.
    """
    random = Random(f"sharegpt {seed}")
    lengths: list[tuple[int, int]] = []
    while len(lengths) < num_requests:
        length_in = round(random.lognormvariate(math.log(SHAREGPT_MEDIAN_IN), SHAREGPT_SIGMA_IN))
        length_out = round(random.lognormvariate(math.log(SHAREGPT_MEDIAN_OUT), SHAREGPT_SIGMA_OUT))
        if (
            SHAREGPT_SHORTEST <= length_in <= SHAREGPT_LONGEST_IN
            and length_out >= SHAREGPT_SHORTEST
            and length_in + length_out <= SHAREGPT_LONGEST
        ):
            lengths.append((max(1, round(length_in * scale)), max(1, round(length_out * scale))))
    return lengths


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
    "smoke": _uniform(2, 8, 4),  # for tests: does it run at all
}


def make_workload(name: str, vocab_size: int) -> Workload:
    """Return a named workload; ValueError for an unknown one."""
    if name not in WORKLOADS:
        raise ValueError(f"load {name!r}: use some of {', '.join(WORKLOADS)}")
    return WORKLOADS[name](largest_id(vocab_size))


def largest_id(vocab_size: int) -> int:
    """Return the largest id that prompts are drawn from."""
    return min(LARGEST_ID, vocab_size - 1)


def describe(workload: Workload) -> dict[str, Any]:
    """Return what a result says of it: counts, lengths, and a digest of every id and length."""
    digest = hashlib.blake2b(digest_size=8)
    for prompt, output_len in zip(*workload, strict=True):
        digest.update(np.array([len(prompt), output_len, *prompt], np.int64).tobytes())
    return {
        "requests": len(workload.prompts),
        "input_tokens": workload.num_input_tokens,
        "output_tokens": sum(workload.output_lens),
        "input_len": _spread([len(prompt) for prompt in workload.prompts]),
        "output_len": _spread(workload.output_lens),
        "digest": digest.hexdigest(),
    }


def _spread(lengths: Sequence[int]) -> dict[str, float]:
    return {
        "min": min(lengths),
        "mean": round(sum(lengths) / len(lengths), 1),
        "p50": float(np.percentile(lengths, 50)),
        "p95": float(np.percentile(lengths, 95)),
        "max": max(lengths),
    }
