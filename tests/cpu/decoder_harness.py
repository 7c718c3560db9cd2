"""Run a decoder at any tp in one process: a thread a rank, an all-reduce that sums at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from rank_harness import make_config

from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.rms_norm import add_rms_norm
from nanorunner.workers.messages import RunnerConfig
from nanorunner.workers.model_config import ModelConfig
from nanorunner.workers.models.decoder import Decoder
from nanorunner.workers.weights import load_weights

BLOCK_SIZE = 256
TIMEOUT_S = 60.0

T = TypeVar("T")


class ThreadGroup:
    """One rank's end of an all-reduce between threads; sums in rank order."""

    def __init__(self, rank: int, slots: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self._slots, self._barrier = rank, slots, barrier

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, written to every rank's own x."""
        self._slots[self.rank] = x
        self._barrier.wait(TIMEOUT_S)
        total = self._slots[0].clone()
        for other in self._slots[1:]:
            total += other
        self._barrier.wait(TIMEOUT_S)  # nobody overwrites an x that another still reads
        return x.copy_(total)

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add the sum over the ranks to residual in place, and return its norm."""
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)


def runner_config(model: ModelConfig, tp: int, **changes: Any) -> RunnerConfig:
    """Return a RunnerConfig for the CPU; the fields that a decoder does not read are arbitrary."""
    fields: dict[str, Any] = {
        "model": model,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1024,
        "max_model_len": 1024,
        "step_timeout_s": TIMEOUT_S,
        "start_timeout_s": TIMEOUT_S,
    }
    return make_config(tp, **{**fields, **changes})


class Ranks:
    """tp decoders over one paged KV cache each, all of whose unwritten slots hold NaN."""

    def __init__(self, config: RunnerConfig, num_blocks: int = 8) -> None:
        tp, model = config.tp, config.model
        self.model = model
        slots = [torch.empty(0)] * tp
        self._barrier = threading.Barrier(tp)
        self.decoders = [
            Decoder(
                model,
                tp=tp,
                rank=rank,
                dtype=getattr(torch, config.dtype),
                device=torch.device("cpu"),
                group=ThreadGroup(rank, slots, self._barrier),
                max_model_len=config.max_model_len,
                batch_invariant=config.batch_invariant,
            )
            for rank in range(tp)
        ]
        for decoder in self.decoders:
            load_weights(decoder, config)
        self.kv = [
            torch.full(
                (2, model.num_layers, num_blocks, BLOCK_SIZE, d.local_kv_heads, model.head_dim),
                float("nan"),
                dtype=d.dtype,
            )
            for d in self.decoders
        ]

    @torch.inference_mode()
    def step(
        self, token_ids: list[list[int]], num_computed: list[int], block_tables: list[list[int]]
    ) -> torch.Tensor:
        """Compute each request's tokens at positions num_computed and up; return logits.

        The logits are [tokens of all requests, vocab_size], put together from the ranks.
        """
        lens = [len(ids) for ids in token_ids]
        positions = [
            p for n, start in zip(lens, num_computed, strict=True) for p in range(start, start + n)
        ]
        tables = [t for n, t in zip(lens, block_tables, strict=True) for _ in range(n)]
        slots = [
            t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for t, p in zip(tables, positions, strict=True)
        ]
        seq_lens = [n + start for n, start in zip(lens, num_computed, strict=True)]
        width = max(len(table) for table in block_tables)
        batch = AttentionBatch(
            query_start_loc=torch.tensor([0, *lens]).cumsum(0).to(torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=torch.tensor(
                [table + [0] * (width - len(table)) for table in block_tables], dtype=torch.int32
            ),
            slot_mapping=torch.tensor(slots),
            max_query_len=max(lens),
            max_seq_len=max(seq_lens),
        )
        ids = torch.tensor([i for request in token_ids for i in request])

        def one_rank(rank: int) -> torch.Tensor:
            decoder, kv = self.decoders[rank], self.kv[rank]
            hidden = decoder.forward(ids, torch.tensor(positions), batch, list(kv[0]), list(kv[1]))
            return decoder.compute_logits(hidden)

        logits = torch.cat(self._on_every_rank(one_rank), dim=-1)
        assert torch.isneginf(logits[:, self.model.vocab_size :]).all()
        return logits[:, : self.model.vocab_size]

    def _on_every_rank(self, function: Callable[[int], T]) -> list[T]:
        """Run function(rank) in a thread a rank; a failure in one breaks the others' barrier."""

        def guarded(rank: int) -> T:
            try:
                with torch.inference_mode():
                    return function(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.decoders)) as pool:
            return list(pool.map(guarded, range(len(self.decoders)), timeout=TIMEOUT_S))
