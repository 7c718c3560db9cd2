"""A runner without a model: the oracle of the scheduler's and the engine's tests.

Its "KV" of a position is a hash of all tokens up to that position, stored in the slot that the
block table names. The next id is drawn from the KV it reads back. So a wrong block, a missing or
stale write, a lost or doubled token changes the ids that come out, and most faults are caught by
name before that. Like a rank, it knows only what StepInputs told it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nanorunner.workers.full_sampling import MAX_LOGPROB_ENTRIES, NUM_PENALTY_SLOTS
from nanorunner.workers.messages import Int32, NewRequest, RequestExtras, StepInput, StepOutput

UInt64 = npt.NDArray[np.uint64]
MASK = 2**64 - 1
VOCAB = 50


def chain(before: int, token_id: int) -> int:
    """The hash of a prefix and one more token."""
    value = (before * 6364136223846793005 + token_id * 2 + 1442695040888963407) & MASK
    return value ^ (value >> 29)


def draw(prefix_hash: int, seed: int) -> int:
    """The fake model's next id after the prefix."""
    return chain(prefix_hash, seed & 0xFFFF) % VOCAB


def run_alone(prompt: list[int], seed: int, limit: int, eos: frozenset[int]) -> list[int]:
    """What one request gives when nothing else exists: ids up to the first EOS or `limit` ids."""
    prefix_hash = 0
    for token_id in prompt:
        prefix_hash = chain(prefix_hash, token_id)
    output: list[int] = []
    while len(output) < limit and not (output and output[-1] in eos):
        output.append(draw(prefix_hash, seed))
        prefix_hash = chain(prefix_hash, output[-1])
    return output


@dataclass
class FakeSequence:
    """What a rank knows of one request."""

    new: NewRequest
    tokens: list[int]
    hashes: list[int]  # of tokens[: i + 1]
    computed: int
    blocks: list[int]
    has_sampled: bool = False  # so it decodes

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.hashes.append(chain(self.hashes[-1] if self.hashes else 0, token_id))


@dataclass
class FakeHandle:
    """A step in flight."""

    runner: FakeRunner
    output: StepOutput
    touched: dict[int, set[int]]  # block -> requests that read or write it in this step

    def result(self) -> StepOutput:
        assert self.runner.unread[0] is self, "steps are read oldest first"
        self.runner.unread.pop(0)
        return self.output


@dataclass
class FakeRunner:
    """Runs steps at once, hands their outputs out later; raises AssertionError at any fault."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    is_v1: bool
    depth: int = 1
    sequences: dict[int, FakeSequence] = field(default_factory=dict)
    unread: list[FakeHandle] = field(default_factory=list)
    steps: list[StepInput] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)  # request ids of each step
    num_computed: int = 0
    num_sampled: int = 0

    def __post_init__(self) -> None:
        self.kv: UInt64 = np.zeros((self.num_blocks, self.block_size), dtype=np.uint64)
        self.batch: list[tuple[int, int]] = []
        self.sampled: list[tuple[FakeSequence, int]] = []  # v1: rank 0 owes us these ids

    def call(self, method: str, *args: Any) -> FakeHandle:
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
            in_flight = set().union(*handle.touched.values())
            assert not in_flight & set(removed), "a row is given away before its output is read"
        for request_id in removed:
            del self.sequences[request_id]
        for new in step.new:
            assert new.request_id not in self.sequences
            assert new.request_id not in removed, "removed and new in one step"
            tokens = np.frombuffer(new.token_ids, np.int32).tolist()
            blocks = np.frombuffer(new.block_ids, np.int32).tolist()
            assert 0 <= new.num_computed < len(tokens)
            assert new.prompt_len <= len(tokens)
            sequence = FakeSequence(new, [], [], new.num_computed, blocks)
            for token_id in tokens:
                sequence.append(token_id)
            self.sequences[new.request_id] = sequence
        for request_id, packed in step.new_blocks:
            self.sequences[request_id].blocks += np.frombuffer(packed, np.int32).tolist()
        self._take_sampled(np.frombuffer(step.sampled_ids, np.int32).tolist())
        # Runner v2's rows: those that run and those whose removal is not yet told.
        assert len(self.sequences) <= self.depth * self.max_num_seqs
        wishes = [(s.new.sampling, s.new.prompt_len) for s in self.sequences.values()]
        assert sum(w.needs_penalty_slot for w, _ in wishes) <= NUM_PENALTY_SLOTS
        assert sum(w.num_logprob_entries(n) for w, n in wishes) <= MAX_LOGPROB_ENTRIES
        self._check_blocks()
        if step.batch is None:
            assert all(count == 1 for _, count in self.batch)
        else:
            pairs = np.frombuffer(step.batch, np.int32).reshape(-1, 2).tolist()
            self.batch = [(request_id, count) for request_id, count in pairs]

    def _take_sampled(self, ids: list[int]) -> None:
        if not self.is_v1:
            assert not ids, "in v2 sampled ids never travel"
            return
        assert ids == [token_id for _, token_id in self.sampled]
        for sequence, token_id in self.sampled:
            sequence.append(token_id)
        self.sampled = []

    def _check_blocks(self) -> None:
        """A block in two tables holds the same prefix in both."""
        owner: dict[int, tuple[int, FakeSequence]] = {}
        for sequence in self.sequences.values():
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            for index, block in enumerate(sequence.blocks):
                assert 0 <= block < self.num_blocks
                if block in owner:
                    other_index, other = owner[block]
                    end = (index + 1) * self.block_size
                    assert index == other_index, "one block, two places"
                    assert sequence.tokens[:end] == other.tokens[:end], "one block, two contents"
                owner[block] = (index, sequence)

    def _run(self, step: StepInput) -> FakeHandle:
        request_ids = [request_id for request_id, _ in self.batch]
        assert self.batch, "a step with nothing to do was sent"
        assert len(set(request_ids)) == len(request_ids) <= self.max_num_seqs
        assert sum(count for _, count in self.batch) <= self.max_num_batched_tokens
        decodes = [self.sequences[request_id].has_sampled for request_id in request_ids]
        assert decodes == sorted(decodes, reverse=True), "decodes come first"
        self.batches.append(request_ids)
        written: set[int] = set()
        touched: dict[int, set[int]] = {}
        for request_id, count in self.batch:
            self._write(request_id, count, written, touched)
        # Read only after all writes, as attention runs after the KV write of its layer; so a
        # shared block that is still being written in this step is found by the next check.
        sampled: list[tuple[FakeSequence, int]] = []
        extras: dict[int, RequestExtras] = {}
        for request_id, _ in self.batch:
            sequence = self.sequences[request_id]
            self._read(sequence, written)
            if sequence.computed < len(sequence.tokens):
                continue
            if sequence.new.pooling:
                # an "embedding" that tells the whole prompt: the last of its hashes
                value = sequence.hashes[-1] % VOCAB
                extras[request_id] = RequestExtras(embedding=np.array([value], np.float32))
            else:
                next_id = draw(sequence.hashes[-1], sequence.new.sampling.seed)
                sampled.append((sequence, next_id))
                sequence.has_sampled = True
                self.num_sampled += 1
        if self.is_v1:
            self.sampled = sampled
        else:
            for sequence, token_id in sampled:
                sequence.append(token_id)
        ids: Int32 = np.array([token_id for _, token_id in sampled], dtype=np.int32)
        who: Int32 = np.array([s.new.request_id for s, _ in sampled], dtype=np.int32)
        handle = FakeHandle(self, StepOutput(step.step_id, who, ids, extras or None), touched)
        self.unread.append(handle)
        return handle

    def _write(
        self, request_id: int, count: int, written: set[int], touched: dict[int, set[int]]
    ) -> None:
        sequence = self.sequences[request_id]
        start, end = sequence.computed, sequence.computed + count
        assert count >= 1
        assert end <= len(sequence.tokens), "a token is computed that nobody knows"
        assert end <= len(sequence.blocks) * self.block_size, "a position has no block"
        for position in range(start, end):
            block = sequence.blocks[position // self.block_size]
            for handle in self.unread:
                others = handle.touched.get(block, set()) - {request_id}
                assert not others, f"block {block} is written while a step in flight uses it"
            assert not any(
                block in other.blocks for other in self.sequences.values() if other is not sequence
            ), f"shared block {block} is written"
            self.kv[block, position % self.block_size] = sequence.hashes[position]
            written.add(block)
        for block in sequence.blocks[: -(-end // self.block_size)]:
            touched.setdefault(block, set()).add(request_id)
        sequence.computed = end
        self.num_computed += count

    def _read(self, sequence: FakeSequence, written: set[int]) -> None:
        first = sequence.new.num_computed // self.block_size
        for block in sequence.blocks[:first]:
            assert block not in written, "a prefix is read in the step that writes it"
        kv = self.kv[sequence.blocks].reshape(-1)[: sequence.computed]
        expected = np.array(sequence.hashes[: sequence.computed], dtype=np.uint64)
        assert np.array_equal(kv, expected), "the KV is not this request's prefix"
