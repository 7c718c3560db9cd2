"""Runner v1's memory: each rank's own list of sequences, changed only by StepInput.

Every rank applies the same StepInputs in the same order, so every rank holds equal sequences and
prepares equal inputs. The ids that rank 0 sampled reach the other ranks in the next StepInput.
"""

from __future__ import annotations

import numpy as np

from nanorunner.workers.messages import NewRequest, StepInput


class Sequence:
    """One prompt and its completion, as a v1 rank knows it."""

    def __init__(self, new: NewRequest) -> None:
        self.request_id = new.request_id
        self.token_ids: list[int] = np.frombuffer(new.token_ids, np.int32).tolist()
        self.num_cached_tokens = new.num_computed  # whose K and V the cache already holds
        self.block_table: list[int] = np.frombuffer(new.block_ids, np.int32).tolist()
        self.sampling = new.sampling
        self.num_scheduled_tokens = 0  # in the current step

    def __len__(self) -> int:
        """Known tokens: the prompt and every id sampled so far."""
        return len(self.token_ids)

    @property
    def samples(self) -> bool:
        """Whether this step reaches the last known token, so that the next one can be drawn."""
        return self.num_cached_tokens + self.num_scheduled_tokens == len(self)


class Sequences:
    """All sequences of a v1 rank, and the batch of the current step."""

    def __init__(self) -> None:
        self._by_id: dict[int, Sequence] = {}
        self._batch: list[Sequence] = []
        self._sampled: list[Sequence] = []  # last step's, in the order of the coming sampled_ids

    def apply(self, step: StepInput) -> list[Sequence]:
        """Bring the sequences up to date and return this step's batch, in its order."""
        for request_id in np.frombuffer(step.removed, np.int32).tolist():
            del self._by_id[request_id]
        for new in step.new:
            self._by_id[new.request_id] = Sequence(new)
        for request_id, block_ids in step.new_blocks:
            blocks: list[int] = np.frombuffer(block_ids, np.int32).tolist()
            self._by_id[request_id].block_table.extend(blocks)
        # a sequence removed since then still gets its id here, where nobody will read it
        ids: list[int] = np.frombuffer(step.sampled_ids, np.int32).tolist()
        for sequence, token_id in zip(self._sampled, ids, strict=True):
            sequence.token_ids.append(token_id)
        if step.batch is None:
            for sequence in self._batch:
                sequence.num_scheduled_tokens = 1
        else:
            pairs = np.frombuffer(step.batch, np.int32).reshape(-1, 2).tolist()
            self._batch = [self._by_id[request_id] for request_id, _ in pairs]
            for sequence, (_, count) in zip(self._batch, pairs, strict=True):
                sequence.num_scheduled_tokens = count
        self._sampled = [sequence for sequence in self._batch if sequence.samples]
        return self._batch

    def finish_step(self) -> list[Sequence]:
        """Count the step's tokens as cached and return the sequences that sampled."""
        for sequence in self._batch:
            sequence.num_cached_tokens += sequence.num_scheduled_tokens
        return self._sampled
