"""A rank that speculates, in plain Python: the oracle of the scheduler's tests with drafts.

It follows the contract word for word: a verify step has q places a decode, all sampled as plain
decoding would sample them, and a draft is accepted when it is the id sampled before it. The "KV" of
a position is the hash of the KV read back from the slot before it and of the token, so a wrong
block, a missing or stale write, a draft that stayed behind changes the ids that come out. Most
faults are caught by name before that. It knows only what StepInputs told it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fake_runner import VOCAB, chain, draw

from nanorunner.workers.messages import (
    Int32,
    NewRequest,
    RequestExtras,
    StepInput,
    StepOutput,
    TokenLogprobs,
)

REJECTED, NOT_MEANT = -1, -2


@dataclass
class DeviceRow:
    """What the state tables hold of one request."""

    new: NewRequest
    tokens: list[int]  # the row of the token table, as wide as it is: tentative ones behind total
    prefill_len: int
    total: int  # known to the device
    computed: int
    blocks: list[int]
    last_sampled: int = -1
    num_drafts: int = 0

    @property
    def is_decoding(self) -> bool:
        return self.computed >= self.prefill_len


@dataclass
class Handle:
    """A step in flight: it was run at once, its output is handed out later."""

    device: SpeculatingDevice
    output: StepOutput
    touched: dict[int, int]  # block -> the request that reads or writes it, or SHARED

    def result(self) -> StepOutput:
        assert self.device.unread[0] is self, "steps are read oldest first"
        self.device.unread.pop(0)
        return self.output


@dataclass
class SpeculatingDevice:
    """Runs steps at once. share: how often a draft is right; some rows propose fewer than K."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_drafts: int  # K
    depth: int
    share: float = 0.7
    seed: int = 0
    rows: dict[int, DeviceRow] = field(default_factory=dict)
    unread: list[Handle] = field(default_factory=list)
    steps: list[StepInput] = field(default_factory=list)
    batches: list[list[tuple[int, int]]] = field(default_factory=list)
    num_computed: int = 0

    def __post_init__(self) -> None:
        # Garbage at first, as unwritten memory is.
        self.kv = [[7919 * b + i for i in range(self.block_size)] for b in range(self.num_blocks)]
        self.random = random.Random(self.seed)

    def call(self, method: str, *args: Any) -> Handle:
        assert method == "step"
        step = StepInput.from_wire(args[0])
        assert step.step_id == len(self.steps)
        assert len(self.unread) < self.depth
        self.steps.append(step)
        self._apply(step)
        return self._run(step)

    def _apply(self, step: StepInput) -> None:
        removed = np.frombuffer(step.removed, np.int32).tolist()
        for handle in self.unread:
            in_flight = set(handle.touched.values())
            assert not in_flight & set(removed), "a row is given away before its output is read"
        for request_id in removed:
            del self.rows[request_id]
        for new in step.new:
            assert new.request_id not in self.rows
            tokens: list[int] = np.frombuffer(new.token_ids, np.int32).tolist()
            length = len(tokens)
            assert 0 <= new.num_computed < length <= new.token_limit <= self.max_model_len
            blocks = np.frombuffer(new.block_ids, np.int32).tolist()
            # What an earlier request left in the row of the table.
            tokens += [self.random.randrange(VOCAB) for _ in range(self.max_model_len - length)]
            row = DeviceRow(new, tokens, length, length, new.num_computed, blocks)
            self.rows[new.request_id] = row
        for request_id, packed in step.new_blocks:
            self.rows[request_id].blocks += np.frombuffer(packed, np.int32).tolist()
        assert not step.sampled_ids, "sampled ids never travel"
        assert len(self.rows) <= self.depth * self.max_num_seqs
        if step.batch is None:
            request_ids = [request_id for request_id, _ in self.batches[-1]]
            assert all(self.rows[r].is_decoding for r in request_ids), "not the same batch"
            self.batches.append(self.batches[-1])
        else:
            pairs = np.frombuffer(step.batch, np.int32).reshape(-1, 2).tolist()
            self.batches.append([(request_id, count) for request_id, count in pairs])

    def _run(self, step: StepInput) -> Handle:
        batch = self.batches[-1]
        assert batch, "a step with nothing to do was sent"
        assert len({request_id for request_id, _ in batch}) == len(batch) <= self.max_num_seqs
        num_tokens = sum(count for _, count in batch)
        assert num_tokens <= self.max_num_batched_tokens
        self.num_computed += num_tokens
        decodes = [self.rows[request_id].is_decoding for request_id, _ in batch]
        assert decodes == sorted(decodes, reverse=True), "decodes come first"
        query_lens = {count for request_id, count in batch if self.rows[request_id].is_decoding}
        assert query_lens <= {1} or query_lens == {1 + self.num_drafts}, query_lens
        writers: dict[int, int] = {}
        who: list[int] = []
        ids: list[int] = []
        extras: dict[int, RequestExtras] = {}
        for request_id, count in batch:
            row = self.rows[request_id]
            if row.is_decoding:
                found = self._verify(row, count, writers)
            else:
                found = self._prefill(row, count, writers)
            if not found:
                continue
            self._propose(row)
            who += [request_id] * len(found)
            ids += found
            if row.new.sampling.logprobs >= 0:
                extras[request_id] = _logprobs([i for i in found if i >= 0], row.total)
        touched = {
            block: request_id for request_id, _ in batch for block in self.rows[request_id].blocks
        }
        output = StepOutput(step.step_id, _int32(who), _int32(ids), extras or None)
        self.unread.append(Handle(self, output, touched | writers))
        return self.unread[-1]

    def _verify(self, row: DeviceRow, query_len: int, writers: dict[int, int]) -> list[int]:
        """Return the places' ids: accepted ones, then REJECTED or NOT_MEANT."""
        base, total, limit = row.computed, row.total, row.new.token_limit
        assert base == total - 1
        inputs, sampled = [], []
        for offset in range(query_len):
            position = base + offset
            token = row.last_sampled if offset == 0 else row.tokens[min(position, limit - 1)]
            if position >= limit:  # slot -1, token 0: nothing is written
                token, value = 0, 0
            else:
                value = self._write(row, position, token, writers)
            inputs.append(token)
            sampled.append(draw(value, row.new.sampling.seed))
        matched = 0
        most = min(query_len - 1, row.num_drafts)
        while matched < most and sampled[matched] == inputs[matched + 1]:
            matched += 1
        num_new = max(0, min(matched + 1, limit - total))
        row.tokens[total : total + num_new] = sampled[:num_new]
        if num_new:
            row.last_sampled = sampled[num_new - 1]
        row.total += num_new
        row.computed += num_new
        rest = range(num_new, query_len)
        no_ids = [NOT_MEANT if place - 1 >= row.num_drafts else REJECTED for place in rest]
        return sampled[:num_new] + no_ids

    def _prefill(self, row: DeviceRow, count: int, writers: dict[int, int]) -> list[int]:
        """Return the first id, if this chunk is the last."""
        assert 1 <= count <= row.prefill_len - row.computed
        value = 0
        for position in range(row.computed, row.computed + count):
            value = self._write(row, position, row.tokens[position], writers)
        row.computed += count
        if not row.is_decoding:
            return []
        assert row.total < row.new.token_limit
        row.last_sampled = draw(value, row.new.sampling.seed)
        row.tokens[row.total] = row.last_sampled
        row.total += 1
        return [row.last_sampled]

    def _write(self, row: DeviceRow, position: int, token: int, writers: dict[int, int]) -> int:
        """Write a position's KV and return it."""
        request_id = row.new.request_id
        assert position < row.new.token_limit, "written past the limit"
        assert position < len(row.blocks) * self.block_size, "a position has no block"
        before = 0
        if position:
            block, offset = self._slot(row, position - 1)
            assert writers.get(block, request_id) == request_id, "read in the step that writes it"
            before = self.kv[block][offset]
        block, offset = self._slot(row, position)
        for handle in self.unread:
            other = handle.touched.get(block, request_id)
            assert other == request_id, f"block {block} is written while a step in flight uses it"
        for other_row in self.rows.values():
            assert other_row is row or block not in other_row.blocks, f"shared {block} is written"
        value = self.kv[block][offset] = chain(before, token)
        writers[block] = request_id
        return value

    def _slot(self, row: DeviceRow, position: int) -> tuple[int, int]:
        return row.blocks[position // self.block_size], position % self.block_size

    def _propose(self, row: DeviceRow) -> None:
        """Write drafts behind the row's tokens: some right ones, then wrong ones, then what is."""
        block, offset = self._slot(row, row.computed - 1)
        value = self.kv[block][offset]
        token, is_right = row.last_sampled, True
        row.num_drafts = self.random.choice((self.num_drafts, self.random.randint(0, 1)))
        for place in range(row.total, min(row.total + row.num_drafts, self.max_model_len)):
            value = chain(value, token)
            is_right = is_right and self.random.random() < self.share
            right = draw(value, row.new.sampling.seed)
            token = right if is_right else (right + 1 + self.random.randrange(VOCAB - 1)) % VOCAB
            row.tokens[place] = token


def _int32(values: list[int]) -> Int32:
    return np.array(values, dtype=np.int32)


def _logprobs(ids: list[int], total: int) -> RequestExtras:
    """Return extras that name their ids and their places."""
    array = np.array(ids, np.int64).reshape(-1, 1)
    places = np.arange(total - len(ids), total, dtype=np.int32)
    values = places.astype(np.float32).reshape(-1, 1)
    return RequestExtras(logprobs=TokenLogprobs(array, values, places))
