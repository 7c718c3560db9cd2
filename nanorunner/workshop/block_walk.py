"""A real run, one step at a time, with questions answered in between.

    Walk(config).add(prompt ids) ...; step() -> Step; where(3, 299), pool(), tables(), rows()

blocks.py is the command around it. What is told comes from the scheduler's own books and, for K, V
and runner v2's rows, from rank 0's tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import numpy as np

from nanorunner.request import NO_ROW, Request
from nanorunner.sampling_params import SamplingParams
from nanorunner.workers.messages import BLOCK_SIZE, RunnerConfig, StepInput
from nanorunner.workshop.block_events import (
    Snapshot,
    planned_events,
    read_events,
    take_snapshot,
)
from nanorunner.workshop.open_engine import start_engine

NUM_VALUES = 4  # of a K or V that are shown
CELLS = 12  # blocks in one line of the pool


Batch = list[tuple[int, int]]  # (sequence, tokens) in batch order


class Step(NamedTuple):
    """What one call of engine.step() did; with depth 2 it plans one step and reads an older one."""

    number: int
    batches: list[Batch]  # of each step planned: with depth 2 the first call plans two
    events: list[str]


class Place(NamedTuple):
    """Where one token's K and V lie."""

    logical: int  # the block of its sequence, counted from 0
    block: int  # the physical block
    offset: int
    slot: int
    is_written: bool  # a step that writes it has been enqueued


class Walk:
    """One engine, its sequences by number. close() it, or use `with`."""

    def __init__(self, config: RunnerConfig, *, prefix_cache: bool = True) -> None:
        self.config = config
        self._open = start_engine(config, prefix_cache=prefix_cache, on_step=self._planned)
        self.scheduler = self._open.scheduler
        self.engine = self._open.engine
        self.runner = self._open.ranks.runner  # rank 0's
        self.num_steps = 0
        self.reasons: dict[int, str] = {}  # of the sequences that have ended
        self._snapshot = take_snapshot(self.scheduler)
        self._batch: Batch = []  # of the last step planned
        self._batches: list[Batch] = []  # of the steps planned since step() began
        self._events: list[str] = []

    def __enter__(self) -> Walk:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the ranks."""
        self.engine.close()

    def add(self, prompt_ids: Sequence[int], max_tokens: int) -> int:
        """Queue a prompt, greedy, and return its sequence's number."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        sequence = self.engine.add_request(prompt_ids, params)
        self._snapshot = take_snapshot(self.scheduler)
        return sequence

    def abort(self, sequence: int) -> list[str]:
        """End a sequence now and return what that did to its blocks."""
        self._request(sequence)
        self.engine.abort(sequence)
        self.reasons[sequence] = "abort"
        return self._moved_on(read_events(self._snapshot, take_snapshot(self.scheduler), {}))

    def step(self) -> Step | None:
        """Run one step of the engine; None when every sequence has ended."""
        if not self.engine.has_unfinished():
            return None
        self._events, self._batches = [], []
        for update in self.engine.step():
            if update.finish_reason is not None:
                self.reasons[update.request_id] = update.finish_reason
        after = take_snapshot(self.scheduler)
        events = self._events + read_events(self._snapshot, after, self.reasons)
        self._snapshot = after
        self.num_steps += 1
        return Step(self.num_steps, self._batches, events)

    def _planned(self, step: StepInput) -> None:
        """Hear of a step that leaves: its blocks are decided, nothing is computed."""
        after = take_snapshot(self.scheduler)
        self._events += planned_events(self._snapshot, after, step)
        self._snapshot = after
        if step.batch is None:
            self._batch = [(sequence, 1) for sequence, _ in self._batch]
        else:
            pairs = np.frombuffer(step.batch, np.int32).reshape(-1, 2).tolist()
            self._batch = [(sequence, count) for sequence, count in pairs]
        self._batches.append(self._batch)

    def _moved_on(self, events: list[str]) -> list[str]:
        self._snapshot = take_snapshot(self.scheduler)
        return events

    # Questions.

    def place(self, sequence: int, token: int) -> Place:
        """Return where a token's K and V lie; ValueError says why they lie nowhere."""
        request = self._request(sequence)
        if request.row == NO_ROW:
            raise ValueError(f"sequence {sequence} waits: it holds no block, and no K or V")
        table = self.scheduler.roster.table
        known, computed = int(table.known[request.row]), int(table.computed[request.row])
        length = max(known, computed)
        if not 0 <= token < length:
            raise ValueError(f"token {token}: sequence {sequence} has tokens 0 to {length - 1}")
        logical, offset = divmod(token, BLOCK_SIZE)
        if logical >= len(request.blocks):
            raise ValueError(
                f"token {token} of sequence {sequence} has no block yet: the step that computes it "
                f"takes one"
            )
        block = request.blocks[logical]
        return Place(logical, block, offset, block * BLOCK_SIZE + offset, token < computed)

    def where(self, sequence: int, token: int) -> list[str]:
        """Return the way from a token to its slot, in words."""
        place = self.place(sequence, token)
        blocks = self._request(sequence).blocks
        others = [str(user) for user in self._snapshot.users(place.block) if user != sequence]
        shared = f", which {', '.join(others)} shares" if len(others) == 1 else ""
        if len(others) > 1:
            shared = f", which {' and '.join(others)} share"
        lines = [
            f"token {token} of sequence {sequence}",
            f"  logical block {token} // {BLOCK_SIZE} = {place.logical}, "
            f"offset {token} % {BLOCK_SIZE} = {place.offset}",
            f"  block table {blocks} -> physical block {place.block}{shared}",
            f"  slot {place.block} * {BLOCK_SIZE} + {place.offset} = {place.slot}",
        ]
        if not place.is_written:
            return [
                *lines,
                "  K and V: not there yet, the step that computes them is still to come",
            ]
        for index, name in enumerate("KV"):
            values = self.runner.kv_cache[index, 0, place.block, place.offset].flatten()
            shown = " ".join(f"{value:.4f}" for value in values[:NUM_VALUES].float().tolist())
            lines.append(
                f"  {name} of layer 0 on rank 0: kv[{index}, 0, {place.block}, {place.offset}] = "
                f"{shown} ... ({len(values)} numbers)"
            )
        return lines

    def pool(self) -> list[str]:
        """Return the pool, block by block, and its totals."""
        snapshot = self._snapshot
        cells = [_cell(block, snapshot) for block in range(snapshot.num_blocks)]
        width = max(map(len, [*cells, str(snapshot.num_blocks)]))
        lines = []
        for start in range(0, len(cells), CELLS):
            some = range(start, min(start + CELLS, len(cells)))
            lines.append("block  " + " ".join(f"{block:>{width}}" for block in some))
            lines.append("       " + " ".join(f"{cells[block]:>{width}}" for block in some))
        num_used = len(snapshot.used)
        num_cached = len(snapshot.published - snapshot.used)
        lines.append(
            f"used {num_used} + free {snapshot.num_free} ({num_cached} with content kept) = "
            f"{snapshot.num_blocks};  . free, (kept) free with content kept, * may be shared"
        )
        return lines

    def tables(self) -> list[str]:
        """Return each sequence's state, length and block table."""
        roster, lines = self.scheduler.roster, []
        for request in roster.requests.values():
            if request.row == NO_ROW:
                state, length, computed = "waiting", len(request.token_ids), 0
            else:
                state = "prefilling" if request.row in roster.prefilling else "decoding"
                length = int(roster.table.known[request.row])
                computed = int(roster.table.computed[request.row])
            lines.append(
                f"sequence {request.request_id}: {state}, {length} tokens, K and V of {computed}, "
                f"block table {request.blocks}"
            )
        gone = [f"{sequence} ({reason})" for sequence, reason in sorted(self.reasons.items())]
        return [*lines, f"ended: {', '.join(gone) or 'none'}"]

    def block(self, block: int) -> list[str]:
        """Return who uses one block, and for which tokens."""
        snapshot = self._snapshot
        if not 0 <= block < snapshot.num_blocks:
            raise ValueError(f"block {block}: there are 0 to {snapshot.num_blocks - 1}")
        users = snapshot.users(block)
        if not users:
            kept = block in snapshot.published
            return [f"block {block}: free{', content kept for a later prompt' if kept else ''}"]
        lines = [f"block {block}: slots {block * BLOCK_SIZE} to {(block + 1) * BLOCK_SIZE - 1}"]
        for sequence in users:
            first = snapshot.tables[sequence].index(block) * BLOCK_SIZE
            lines.append(f"  sequence {sequence}: tokens {first} to {first + BLOCK_SIZE - 1}")
        return lines

    def rows(self) -> list[str]:
        """Return runner v2's state table and idx_mapping as they are on rank 0's device."""
        if self.config.runner != "v2":
            raise ValueError("rows: runner v1 has no state table; start with --runner v2")
        states, inputs = self.runner.states, self.runner.inputs
        tables = states.tables
        lines = ["row  sequence  owner  num_computed  total_len  last_sampled  block table"]
        row_of = {
            sequence: states.rows.row_of(sequence)
            for sequence in range(self._next_number())
            if sequence in states.rows
        }
        for sequence, row in row_of.items():
            num_blocks = -(-int(tables.num_computed[row]) // BLOCK_SIZE)
            blocks = tables.block_tables[row, :num_blocks].tolist()
            is_over = sequence not in self._snapshot.tables
            lines.append(
                f"{row:>3}  {sequence:>8}  {states.rows.generation(row):>5}  "
                f"{int(tables.num_computed[row]):>12}  {int(tables.total_len[row]):>9}  "
                f"{int(tables.last_sampled[row]):>12}  {blocks}"
                f"{'  runs no more; the next frame tells the ranks' if is_over else ''}"
            )
        num_reqs = int(inputs.header[0])
        mapping = inputs.idx_mapping[:num_reqs].tolist()
        lines.append(f"idx_mapping of the last step: place in the batch -> row: {mapping}")
        free = sorted(set(range(states.rows.num_rows)) - set(row_of.values()))
        return [*lines, f"free rows: {', '.join(map(str, free)) or 'none'}; last freed, first used"]

    def _next_number(self) -> int:
        """Return one more than the highest sequence that there has been."""
        known = [*self.scheduler.roster.requests, *self.reasons]
        return max(known, default=-1) + 1

    def _request(self, sequence: int) -> Request:
        """Return a sequence that has not ended; ValueError says which there are."""
        request = self.scheduler.roster.requests.get(sequence)
        if request is not None:
            return request
        if sequence in self.reasons:
            raise ValueError(f"sequence {sequence} has ended ({self.reasons[sequence]})")
        there = ", ".join(map(str, self.scheduler.roster.requests)) or "none"
        raise ValueError(f"sequence {sequence}: no such sequence; these are there: {there}")


def _cell(block: int, snapshot: Snapshot) -> str:
    users = snapshot.users(block)
    if users:
        return ",".join(map(str, users)) + ("*" if block in snapshot.published else "")
    return "(kept)" if block in snapshot.published else "."
