"""One rank's runner v2, driven step by step without a scheduler; its KV caches begin full of NaN.

A slot that is read before it was written shows in the ids; one that was not written, in the cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanorunner.config import make_config
from nanorunner.resolve import resolve
from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group
from nanorunner.workers.draft_model import DraftModel
from nanorunner.workers.full_sampling import FullSampling
from nanorunner.workers.messages import BLOCK_SIZE, NewRequest, StepInput
from nanorunner.workers.model_runner import ModelRunner

NUM_BLOCKS = 8
NAN = float("nan")


def packed(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def request(
    request_id: int,
    tokens: list[int],
    blocks: list[int],
    *,
    num_computed: int = 0,
    limit: int = 600,
    temperature: float = 0.0,
) -> NewRequest:
    """Return a request that comes; its seed is its number."""
    sampling = FullSampling(temperature=temperature, seed=request_id)
    ids, places = packed(*tokens), packed(*blocks)
    return NewRequest(
        request_id, ids, len(tokens), num_computed, places, sampling, token_limit=limit
    )


class RunnerSteps:
    """A runner, and what its requests have been given."""

    def __init__(self, folder: Path, draft: Path | None = None, num_drafts: int = 3) -> None:
        settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "runner": "v2"}
        if draft is not None:
            settings |= {"speculative": "draft", "draft_model": str(draft)}
            settings["num_speculative_tokens"] = num_drafts
        sizes = {"num_blocks": NUM_BLOCKS, "max_num_seqs": 4, "max_model_len": 600}
        config = resolve(make_config({"model": str(folder)} | sizes | settings)).runner_config
        device = Device("cpu", 0)
        group = Group(None, 0, 1, device.torch_device, timeout_s=10)
        self.runner = ModelRunner(config, 0, group, device)
        self.runner.load_model()
        self.room = self.runner.profile()
        self.runner.allocate_kv(NUM_BLOCKS)
        self.runner.kv_cache.fill_(NAN)
        if draft is not None:
            self.draft_model.kv_cache.fill_(NAN)
        self.runner.capture()
        self.tables = self.runner.states.tables
        self.query_len = config.max_query_len
        self.ids: dict[int, list[int]] = {}  # by request
        self._step_id = 0

    @property
    def draft_model(self) -> DraftModel:
        """The runner's proposer."""
        proposer = self.runner.proposer
        assert isinstance(proposer, DraftModel)
        return proposer

    def step(
        self,
        batch: dict[int, int],
        new: tuple[NewRequest, ...] = (),
        removed: tuple[int, ...] = (),
        new_blocks: tuple[tuple[int, bytes], ...] = (),
    ) -> dict[int, list[int]]:
        """Run a step of {request: tokens}; return the ids that each gets, rejected ones as < 0."""
        self._step_id += 1
        pairs = packed(*(value for pair in batch.items() for value in pair))
        wire = StepInput(self._step_id, packed(*removed), new, new_blocks, pairs, b"").to_wire()
        handle = self.runner.step(wire)
        assert handle is not None, "rank 0 always gets a handle"
        output = handle.result()
        got: dict[int, list[int]] = {}
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            got.setdefault(int(request_id), []).append(int(token_id))
        for request_id, ids in got.items():
            self.ids.setdefault(request_id, []).extend(i for i in ids if i >= 0)
        return got

    def decode(self, request_ids: tuple[int, ...], num_steps: int) -> list[dict[int, list[int]]]:
        """Run decodes of these requests, drafts and all; return what each step gave."""
        return [self.step(dict.fromkeys(request_ids, self.query_len)) for _ in range(num_steps)]

    def propose(self, bucket: int) -> None:
        """Propose once more for the last step's rows."""
        assert self.runner.speculator is not None
        self.runner.speculator.propose(bucket, is_after_plain=False)

    def row(self, request_id: int) -> int:
        """Return the request's row of the state table."""
        return self.runner.states.rows.row_of(request_id)

    def drafts(self, request_id: int) -> list[int]:
        """Return the drafts that lie in the token table, as many as were meant."""
        row, tables = self.row(request_id), self.tables
        assert tables.num_drafts is not None
        total = int(tables.total_len[row])
        drafts: list[int] = tables.token_ids[row, total:][: int(tables.num_drafts[row])].tolist()
        return drafts

    def spoil_draft(self, request_id: int, index: int) -> None:
        """Put another id in the place of a draft."""
        row = self.row(request_id)
        place = int(self.tables.total_len[row]) + index
        self.tables.token_ids[row, place] = 3 + (self.tables.token_ids[row, place] + 1) % 400

    def kv(self, cache: torch.Tensor, request_id: int, num_tokens: int) -> torch.Tensor:
        """Return the K and V [2, layers, num_tokens, heads, dim] of a request in one of the caches.

        num_tokens from its first one on.
        """
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        blocks = self.tables.block_tables[self.row(request_id), :num_blocks].long()
        return cache[:, :, blocks].flatten(2, 3)[:, :, :num_tokens]

    def check_draft_kv(self, request_id: int) -> None:
        """Fail unless the draft model, the same as the target, has the same KV; for all tokens."""
        num_computed = int(self.tables.num_computed[self.row(request_id)])
        target = self.kv(self.runner.kv_cache, request_id, num_computed)
        draft = self.kv(self.draft_model.kv_cache, request_id, num_computed)
        torch.testing.assert_close(draft, target, rtol=1e-4, atol=1e-4)
        newest = self.kv(self.draft_model.kv_cache, request_id, num_computed + 1)
        assert not bool(newest.isnan().any()), "the newest token was the draft model's input too"
