"""Examines the staged-write exercise: packed ragged writes into several tables."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from nanorunner.kernels.staged_write import staged_write_reference
from nanorunner.workshop.code_exercises import Finding, Functions

SHAPES = ((6, 8), (4, 3), (5, 1))  # of the tables, in rows and words a row


class Write(NamedTuple):
    """One write, in words."""

    table: int
    row: int
    start: int
    values: list[int]


def examine(functions: Functions) -> Iterator[Finding]:
    """Yield what holds of the learner's function."""
    write = functions["staged_write"]
    one = [Write(0, 2, 3, [31, 32, 33])]
    yield Finding("one write lands in its row, from its start on", _problem(write, one))
    ragged = [Write(0, 0, 0, [1]), Write(0, 5, 2, [2, 3, 4, 5]), Write(0, 1, 7, [6])]
    yield Finding("writes of different lengths each take their own values", _problem(write, ragged))
    mixed = [Write(2, 4, 0, [7]), Write(1, 3, 0, [8, 9, 10]), Write(0, 3, 5, [11, 12])]
    yield Finding("each write goes to its own table", _problem(write, mixed))
    yield Finding("without a write nothing changes", _problem(write, []))
    numbers = random.Random(0)
    for _ in range(20):
        some = _random_writes(numbers)
        if problem := _problem(write, some):
            yield Finding("twenty random batches", problem)
            return
    yield Finding("twenty random batches")


def _problem(write: Callable[..., Any], writes: list[Write]) -> str:
    """Return how the tables differ from what the project's own write leaves."""
    mine, own = _tables(), _tables()
    places = torch.tensor([[0, words] for _, words in SHAPES])
    packed = _pack(writes)
    write(mine, places, packed.clone(), len(writes))
    staged_write_reference(own, places, packed, len(writes))
    for index, (got, wanted) in enumerate(zip(mine, own, strict=True)):
        if not torch.equal(got, wanted):
            word = int((got != wanted).nonzero()[0])
            row, column = divmod(word, SHAPES[index][1])
            return (
                f"table {index}, row {row}, word {column} is {int(got[word])}, not "
                f"{int(wanted[word])}, after {[tuple(w) for w in writes]}"
            )
    return ""


def _tables() -> list[torch.Tensor]:
    """Return the tables as the kernel sees them: flat, in 32-bit words."""
    return [torch.zeros(rows * words, dtype=torch.int32) for rows, words in SHAPES]


def _pack(writes: list[Write]) -> torch.Tensor:
    """Return the packed form of kernels/staged_write.py."""
    ends, total = [], 0
    for write in writes:
        total += len(write.values)
        ends.append(total)
    header = [[w.table for w in writes], [w.row for w in writes], [w.start for w in writes], ends]
    words = [word for line in header for word in line]
    words += [value for write in writes for value in write.values]
    return torch.tensor(words, dtype=torch.int32)


def _random_writes(numbers: random.Random) -> list[Write]:
    """Return writes to different rows, so that none overlaps another."""
    rows = [(table, row) for table, (count, _) in enumerate(SHAPES) for row in range(count)]
    writes = []
    for table, row in numbers.sample(rows, numbers.randrange(1, len(rows))):
        words = SHAPES[table][1]
        start = numbers.randrange(words)
        count = numbers.randrange(1, words - start + 1)
        writes.append(Write(table, row, start, [numbers.randrange(1, 1000) for _ in range(count)]))
    return writes
