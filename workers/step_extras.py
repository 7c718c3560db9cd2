"""What a step brings beside its ids, on its way from the device to the requests that asked.

    DeviceExtras, some tensors -> one copy each on the copy stream -> arrays -> RequestExtras

Most steps have none: nothing is made, copied or looked through for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nanorunner.kernels.logprobs import Logprobs
from nanorunner.workers.messages import Int32, RequestExtras, TokenLogprobs
from nanorunner.workers.sampler_v2 import LogprobGroup

Array = npt.NDArray[Any]


class DeviceExtras(NamedTuple):
    """The tensors of one step; the step's handle keeps them until their copies are complete."""

    groups: list[LogprobGroup]  # of the sampled ids
    prompts: list[tuple[int, Logprobs]]  # of prompts that ended, by request id
    embeddings: list[tuple[int, torch.Tensor]]  # of prompts that ended, by request id

    def tensors(self) -> list[torch.Tensor]:
        """Return all of them in the order in which read() takes their values."""
        found: list[torch.Tensor] = []
        for group in self.groups:
            found.extend(group.logprobs)
        for _, logprobs in self.prompts:
            found.extend(logprobs)
        found.extend(embedding for _, embedding in self.embeddings)
        return found

    def read(
        self, arrays: list[Array], request_ids: Int32, token_ids: Int32
    ) -> dict[int, RequestExtras]:
        """Return each request's share of the values of tensors().

        request_ids [num_sampled]: whose the step's ids are, in the order in which groups count.
        token_ids [num_sampled]: the ids; a negative one was not accepted and brings nothing.
        """
        values = iter(arrays)
        found: dict[int, RequestExtras] = {}
        for group in self.groups:
            all_rows = _take(values)
            for request_id, indices in _accepted(group, request_ids, token_ids).items():
                width = int(group.num_top[indices[0]]) + 1
                own = TokenLogprobs(
                    all_rows.token_ids[indices, :width],
                    all_rows.logprobs[indices, :width],
                    all_rows.ranks[indices],
                )
                found[request_id] = RequestExtras(logprobs=own)
        for request_id, _ in self.prompts:
            so_far = found.get(request_id, RequestExtras())
            found[request_id] = so_far._replace(prompt_logprobs=_take(values))
        for request_id, _ in self.embeddings:
            found[request_id] = RequestExtras(embedding=next(values))
        return found


def _accepted(group: LogprobGroup, request_ids: Int32, token_ids: Int32) -> dict[int, list[int]]:
    """Return the rows of a group that belong to each request's accepted ids, in their order."""
    rows: dict[int, list[int]] = {}
    for index, place in enumerate(group.places.tolist()):
        if token_ids[place] >= 0:
            rows.setdefault(int(request_ids[place]), []).append(index)
    return rows


def _take(values: Iterator[Array]) -> TokenLogprobs:
    """Return the next three arrays: those of one Logprobs."""
    return TokenLogprobs(next(values), next(values), next(values).astype(np.int32))
