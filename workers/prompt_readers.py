"""Requests that want more of their prompt than the first output token: who they are, what they get.

    prompt log-probabilities   of each prompt token, from all hidden states (prompt_logprobs.py)
    pooling "last", "mean"     an embedding: the last hidden state, or the mean of all; no sampling

A prompt may come in several steps. What is known waits on the device until the prompt ends; then
its reader is gone, so that a batch of decodes finds nobody here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nanorunner.kernels.logprobs import Logprobs
from nanorunner.workers.messages import Int64, NewRequest
from nanorunner.workers.prompt_logprobs import PromptLogprobs, PromptSpan


class Reader(NamedTuple):
    """One request whose prompt is read."""

    request_id: int
    prompt_len: int
    num_top: int  # likeliest tokens to report with each prompt token; -1: no log-probabilities
    pooling: str  # one of messages.POOLINGS, or "" for none


class PromptResults(NamedTuple):
    """What the prompts that ended in a step bring, on the device."""

    logprobs: list[tuple[int, Logprobs]]  # (request id, prompt_len - 1 rows)
    embeddings: list[tuple[int, torch.Tensor]]  # (request id, [hidden] float32)


class PromptReaders:
    """The readers of one rank; every rank must call in the same order.

    is_pooled [R]: rows of the state table that are pooled and sample nothing; has_reader [R]: rows
    whose prompt is still to be read to its end. Both on the CPU.
    """

    def __init__(self, num_rows: int, prompt_logprobs: PromptLogprobs) -> None:
        self.is_pooled: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.has_reader: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self._prompt_logprobs = prompt_logprobs
        self._readers: dict[int, Reader] = {}  # by row
        # request id -> sum [hidden] float32 of its hidden states so far. Owner: this object. Place:
        # the device. Lifetime: until the prompt ends or remove(). Last writer: collect().
        self._sums: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._readers)

    def add(self, row: int, new: NewRequest) -> None:
        """Note what the request in `row` wants; one that came back with output has had it."""
        is_resumed = len(new.token_ids) // 4 > new.prompt_len
        num_top = -1 if is_resumed else new.sampling.prompt_logprobs
        if num_top < 0 and not new.pooling:
            return
        self._readers[row] = Reader(new.request_id, new.prompt_len, num_top, new.pooling)
        self.is_pooled[row] = bool(new.pooling)
        self.has_reader[row] = True

    def remove(self, row: int, request_id: int) -> None:
        """Forget a request that has ended or was preempted; most of them are no readers."""
        self.is_pooled[row] = self.has_reader[row] = False
        if self._readers.pop(row, None) is not None:
            self._prompt_logprobs.drop(request_id)
            self._sums.pop(request_id, None)

    def collect(
        self, hidden: torch.Tensor, rows: Int64, counts: Int64, computed: Int64
    ) -> PromptResults:
        """Take in a step's hidden states [T, hidden]; return what is complete.

        rows [n], counts [n]: the batch and its tokens. computed [R]: positions computed before.
        """
        spans: list[PromptSpan] = []
        embeddings: list[tuple[int, torch.Tensor]] = []
        begin = 0
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            reader = self._readers.get(row)
            if reader is not None:
                position = int(computed[row])
                if reader.num_top >= 0:
                    spans.append(_span(reader, row, begin, count, position))
                is_end = position + count >= reader.prompt_len
                if reader.pooling:
                    self._pool(reader, hidden[begin : begin + count], is_end, embeddings)
                if is_end:
                    del self._readers[row]
                    self.has_reader[row] = False
            begin += count
        return PromptResults(self._prompt_logprobs.collect(hidden, spans), embeddings)

    def _pool(
        self,
        reader: Reader,
        hidden: torch.Tensor,
        is_end: bool,
        embeddings: list[tuple[int, torch.Tensor]],
    ) -> None:
        """Take in one prompt's hidden states [count, hidden]; append its embedding at its end."""
        request_id = reader.request_id
        if reader.pooling == "last":
            if is_end:
                # a copy, not a view that would keep the step's hidden states in memory
                embeddings.append((request_id, hidden[-1].to(torch.float32, copy=True)))
            return
        total = hidden.sum(0, dtype=torch.float32)
        if request_id in self._sums:
            total += self._sums.pop(request_id)
        if is_end:
            embeddings.append((request_id, total / reader.prompt_len))
        else:
            self._sums[request_id] = total


def _span(reader: Reader, row: int, begin: int, count: int, position: int) -> PromptSpan:
    return PromptSpan(
        request_id=reader.request_id,
        row=row,
        begin=begin,
        num_tokens=count,
        position=position,
        prompt_len=reader.prompt_len,
        num_top=reader.num_top,
    )
