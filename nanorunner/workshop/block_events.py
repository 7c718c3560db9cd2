"""What a moment of a run did to the KV blocks, in words: taken, shared, freed, preempted.

    Snapshot before, Snapshot after, and what caused the change  ->  a line for each event

Two moments change blocks: the scheduler plans a step (before any rank computes: a table says where
K and V will lie, not that they do), and a step's output is read (requests end).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nanorunner.scheduler import Scheduler
from nanorunner.workers.messages import BLOCK_SIZE, StepInput


class Snapshot(NamedTuple):
    """The scheduler's books at one moment."""

    tables: dict[int, list[int]]  # sequence -> its blocks, of all that hold some
    waiting: list[int]
    published: frozenset[int]  # blocks whose prefix a later prompt may hit
    num_blocks: int
    num_free: int  # as the block manager counts

    def users(self, block: int) -> list[int]:
        """Return the sequences whose table holds the block."""
        return [sequence for sequence, table in self.tables.items() if block in table]

    @property
    def used(self) -> set[int]:
        """The blocks in some table."""
        return {block for table in self.tables.values() for block in table}


def take_snapshot(scheduler: Scheduler) -> Snapshot:
    """Return the books as they are now, after the scheduler has checked them itself."""
    scheduler.check_integrity()
    roster = scheduler.roster
    held = [request for request in roster.table.requests if request is not None]
    num_blocks = roster.blocks.num_blocks
    cache = roster.blocks.prefix_cache
    return Snapshot(
        tables={request.request_id: list(request.blocks) for request in held},
        waiting=list(roster.waiting),
        published=frozenset(block for block in range(num_blocks) if block in cache),
        num_blocks=num_blocks,
        num_free=roster.blocks.num_free,
    )


def planned_events(before: Snapshot, after: Snapshot, step: StepInput) -> list[str]:
    """Return what planning one step did."""
    lines = []
    for sequence in before.tables:
        if sequence not in after.tables and sequence in after.waiting:
            freed = _freed(sequence, before, after)
            lines.append(f"sequence {sequence} is preempted, the newest: {freed}; it waits again")
    for new in step.new:
        lines.append(_start(new.request_id, new.num_computed, before, after))
    for sequence, packed in step.new_blocks:
        (block,) = np.frombuffer(packed, np.int32).tolist()
        first = after.tables[sequence].index(block) * BLOCK_SIZE
        lines.append(f"sequence {sequence} takes block {block}, for its tokens from {first} on")
    return [f"planned: {line}" for line in lines + _published(before, after)]


def read_events(before: Snapshot, after: Snapshot, reasons: dict[int, str]) -> list[str]:
    """Return what reading one step's output did; reasons: why sequences have ended so far."""
    lines = [
        f"sequence {sequence} has ended ({reasons.get(sequence, 'abort')}): "
        f"{_freed(sequence, before, after)}"
        for sequence in before.tables
        if sequence not in after.tables
    ]
    return [f"read: {line}" for line in lines + _published(before, after)]


def _start(sequence: int, num_computed: int, before: Snapshot, after: Snapshot) -> str:
    table = after.tables[sequence]
    num_shared = num_computed // BLOCK_SIZE
    text = f"sequence {sequence} starts: takes {_blocks(table[num_shared:])}"
    if not num_shared:
        return text
    others = sorted({user for block in table[:num_shared] for user in before.users(block)})
    whose = f"with {_sequences(others)}" if others else "from the prefix cache"
    return (
        f"{text}, shares {_blocks(table[:num_shared])} {whose}: {num_computed} tokens need no "
        f"computing"
    )


def _freed(sequence: int, before: Snapshot, after: Snapshot) -> str:
    """Return what became of the blocks of a sequence that holds none any more."""
    blank, cached, shared = [], [], []
    for block in before.tables[sequence]:
        if block in after.used and before.users(block) != [sequence]:
            shared.append(block)
        elif block in after.published:
            cached.append(block)
        else:
            blank.append(block)
    parts = [f"{_blocks(blank)} free"] if blank else []
    if cached:
        parts.append(f"{_blocks(cached)} free, content kept for a later prompt")
    if shared:
        users = sorted({user for block in shared for user in after.users(block)})
        parts.append(f"{_blocks(shared)} still used by {_sequences(users)}")
    return ", ".join(parts)


def _published(before: Snapshot, after: Snapshot) -> list[str]:
    lines = []
    if new := sorted(after.published - before.published):
        lines.append(f"{_blocks(new)} full: a later prompt with the same beginning may share it")
    if gone := sorted(before.published - after.published):
        lines.append(f"{_blocks(gone)} forgotten by the prefix cache: the room was needed")
    return lines


def _blocks(blocks: list[int]) -> str:
    return f"{'block' if len(blocks) == 1 else 'blocks'} {_list(blocks)}"


def _sequences(sequences: list[int]) -> str:
    return f"{'sequence' if len(sequences) == 1 else 'sequences'} {_list(sequences)}"


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
