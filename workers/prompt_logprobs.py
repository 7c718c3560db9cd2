"""Log-probabilities of a prompt's own tokens: position p's logits say how likely token p + 1 was.

    a step's hidden states of one prompt -> chunks of rows -> lm_head -> gathered -> logprobs

A prompt of 4,000 tokens over a vocabulary of 150,000 would make gigabytes of logits at once; a
chunk makes 64 MiB. A prompt may come in several steps; what is known waits on the device until the
prompt ends. The first token has no log-probability, and the last hidden state of the prompt, which
speaks of the first output token, is dropped: prompt_len - 1 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from nanorunner.kernels.logprobs import Logprobs, chunk_rows, logprobs
from nanorunner.workers.sampler_v2 import SamplerGroup


class PromptSpan(NamedTuple):
    """The tokens of one prompt in this step.

    None for a request that came back with output: its prompt has been reported.
    """

    request_id: int
    row: int  # of the state table
    begin: int  # its first token in the step's hidden states
    num_tokens: int
    position: int  # of that token in the sequence; 0 and up, each position once
    prompt_len: int
    num_top: int  # best tokens to report with each prompt token


class PromptLogprobs:
    """Collects for one rank; every rank must call in the same order.

    compute_logits: hidden [m, hidden] -> this rank's logits [m, local_vocab]. token_ids
    [R, max_model_len] int32: the state table.
    """

    def __init__(
        self,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        token_ids: torch.Tensor,
        local_vocab: int,
        group: SamplerGroup,
    ) -> None:
        self._compute_logits = compute_logits
        self._token_ids = token_ids
        self._vocab = local_vocab * group.tp
        self._group = group
        # request id -> what earlier steps found. Owner: this object. Place: the device. Lifetime:
        # until the prompt ends or drop(). Written once, by the step that made it.
        self._parts: dict[int, list[Logprobs]] = {}

    def collect(
        self, hidden: torch.Tensor, spans: Sequence[PromptSpan]
    ) -> list[tuple[int, Logprobs]]:
        """Take in a step's hidden states [T, hidden]; return (request id, all rows) of what ended.

        Row i of a result [prompt_len - 1 rows] is about prompt token i + 1.
        """
        ended = []
        for span in spans:
            parts = self._parts.setdefault(span.request_id, [])
            parts.extend(self._of_span(hidden, span))
            if span.position + span.num_tokens >= span.prompt_len:
                joined = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
                ended.append((span.request_id, Logprobs(*joined)))
                self.drop(span.request_id)
        return ended

    def drop(self, request_id: int) -> None:
        """Forget a request that was finished, aborted or preempted; unknown ones are none."""
        self._parts.pop(request_id, None)

    def _of_span(self, hidden: torch.Tensor, span: PromptSpan) -> list[Logprobs]:
        num_tokens = min(span.num_tokens, span.prompt_len - span.position)
        step = chunk_rows(self._vocab, hidden.element_size())
        parts = []
        for start in range(0, num_tokens, step):
            stop = min(start + step, num_tokens)
            logits = self._compute_logits(hidden[span.begin + start : span.begin + stop])
            logits = self._group.all_gather(logits, dim=-1)
            first = span.position + start + 1
            last = min(span.position + stop, span.prompt_len - 1)
            targets = self._token_ids[span.row, first : last + 1].long()
            parts.append(logprobs(logits[: len(targets)], targets, span.num_top))
        return parts
