"""The ranks of a v2 sampler as threads of one process, over the CPU references.

Each rank has its own sampling state and its shard of the vocabulary; the group is a real exchange
between the threads, which waits for all of them, with a time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import torch

from nanorunner.workers.full_sampling import FullSampling
from nanorunner.workers.sampler_v2 import LogprobGroup, SamplerV2
from nanorunner.workers.sampling_state import SamplingState
from nanorunner.workers.staged_tensor import StagedWriter

TIMEOUT_S = 60.0
MAX_MODEL_LEN = 64
CPU = torch.device("cpu")


class ThreadGroup:
    """One rank's end of an exchange between threads."""

    def __init__(self, rank: int, board: list[torch.Tensor | None], barrier: Barrier) -> None:
        self.rank, self.tp = rank, len(board)
        self.num_calls = {"max": 0, "gather": 0}
        self._board, self._barrier = board, barrier

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls["max"] += 1
        return torch.stack(self._exchange(x)).amax(dim=0)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.num_calls["gather"] += 1
        return torch.cat(self._exchange(x), dim=dim)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._board[self.rank] = x.clone()
        self._barrier.wait(TIMEOUT_S)
        parts = [part for part in self._board if part is not None]
        self._barrier.wait(TIMEOUT_S)
        return parts


class Rank:
    """One rank: its state, its sampler and its copy of the state table's columns."""

    def __init__(self, group: ThreadGroup, vocab: int, num_rows: int, num_slots: int) -> None:
        self.group = group
        self.local_vocab = -(-vocab // group.tp)
        self.offset = group.rank * self.local_vocab
        self.writer = StagedWriter(CPU, depth=2, debug=True)
        self.token_ids = torch.zeros(num_rows, MAX_MODEL_LEN, dtype=torch.int32)
        self.prompt_len = torch.zeros(num_rows, dtype=torch.int32)
        self.prefill_len = torch.zeros(num_rows, dtype=torch.int32)
        self.state = SamplingState(
            self.writer, num_rows, self.local_vocab, self.offset, torch.from_numpy, CPU, num_slots
        )
        columns = self.token_ids, self.prompt_len, self.prefill_len
        self.sampler = SamplerV2(self.state, *columns, group)

    def shard(self, logits: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of logits [n, vocab], padded with -inf as the model does."""
        padding = self.local_vocab * self.group.tp - logits.shape[1]
        whole = torch.nn.functional.pad(logits, (0, padding), value=float("-inf"))
        return whole[:, self.offset : self.offset + self.local_vocab].contiguous()


class Ranks:
    """All ranks, driven together; rows and lengths are kept here as the scheduler would."""

    def __init__(self, tp: int, vocab: int, num_rows: int = 16, num_slots: int = 4) -> None:
        board: list[torch.Tensor | None] = [None] * tp
        barrier = Barrier(tp)
        groups = [ThreadGroup(rank, board, barrier) for rank in range(tp)]
        self.ranks = [Rank(group, vocab, num_rows, num_slots) for group in groups]
        self.length = [0] * num_rows  # tokens known of each row

    def each(self, act: Callable[[Rank], torch.Tensor]) -> torch.Tensor:
        """Run act on every rank at once and return what all of them returned."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            results = list(pool.map(act, self.ranks, timeout=TIMEOUT_S))
        for result in results[1:]:
            assert torch.equal(result, results[0]), "the ranks' ids have parted"
        return results[0]

    def add(
        self,
        row: int,
        sampling: FullSampling,
        prompt: Sequence[int] = (0,),
        output: Sequence[int] = (),
    ) -> None:
        tokens = [*prompt, *output]
        self.length[row] = len(tokens)
        for rank in self.ranks:
            rank.token_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            rank.prompt_len[row], rank.prefill_len[row] = len(prompt), len(tokens)
            rank.state.add(row, sampling, len(prompt), len(tokens))
            rank.writer.apply()
            rank.state.fill_slots(rank.token_ids, rank.prompt_len, rank.prefill_len)

    def remove(self, row: int) -> None:
        for rank in self.ranks:
            rank.state.remove(row)

    def sample(
        self, logits: torch.Tensor, rows: Sequence[int], at: Sequence[int] | None = None
    ) -> list[int]:
        """Sample one token for each of rows from logits [n, vocab]; nothing advances.

        at: positions of the input tokens, where they are not those of the rows' last tokens.
        """
        index = np.array(rows, np.int64)
        positions = np.array(at if at is not None else [self.length[row] - 1 for row in rows])

        def act(rank: Rank) -> torch.Tensor:
            return rank.sampler.sample(
                rank.shard(logits),
                torch.from_numpy(index.astype(np.int32)),
                torch.from_numpy(positions),
                index,
                rank.state.needs(index, positions),
            )

        ids: list[int] = self.each(act).tolist()
        return ids

    def step(self, logits: torch.Tensor, rows: Sequence[int]) -> list[int]:
        """Sample one token for each of rows, count it, and advance the rows by it."""
        ids = self.sample(logits, rows)
        index = np.array(rows, np.int64)
        positions = torch.tensor([self.length[row] - 1 for row in rows])
        for rank in self.ranks:
            needs = rank.state.needs(index)
            mapping = torch.from_numpy(index.astype(np.int32))
            rank.sampler.count_sampled(torch.tensor(ids), mapping, positions, needs)
            for row, token in zip(rows, ids, strict=True):
                rank.token_ids[row, self.length[row]] = token
        for row in rows:
            self.length[row] += 1
        return ids

    def logprobs(
        self, logits: torch.Tensor, ids: Sequence[int], rows: Sequence[int]
    ) -> list[LogprobGroup]:
        """Return rank 0's log-probability groups; every rank takes part."""
        found: dict[int, list[LogprobGroup]] = {}

        def act(rank: Rank) -> torch.Tensor:
            groups = rank.sampler.logprobs(
                rank.shard(logits), torch.tensor(ids), np.array(rows, np.int64)
            )
            found[rank.group.rank] = groups
            parts = [group.logprobs.logprobs.flatten() for group in groups]
            return torch.cat(parts) if parts else torch.zeros(0)

        self.each(act)
        return found[0]
