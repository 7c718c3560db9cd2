"""Examines the slot mapping exercise: the inputs of a decode step out of a state table."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from nanorunner.kernels.prepare_inputs import prepare_decode_inputs
from nanorunner.kernels.state_tables import NUM_REQS, InputBuffers, StateTables
from nanorunner.workers.messages import BLOCK_SIZE
from nanorunner.workshop.code_exercises import Finding, Functions

NUM_ROWS, MAX_LEN, MAX_BLOCKS = 8, 4 * BLOCK_SIZE, 4
TOKEN, TABLE = 299, [5, 10]
JUNK = -(10**6)  # what a buffer holds before the step


def examine(functions: Functions) -> Iterator[Finding]:
    """Yield what holds of the learner's function."""
    prepare = functions["prepare_decode_inputs"]
    state = _state()
    state.num_computed[0], state.prefill_len[0] = TOKEN, TOKEN
    state.block_tables[0, : len(TABLE)] = torch.tensor(TABLE)
    yield Finding(
        f"token {TOKEN} with block table {TABLE} goes to its slot",
        _problem(prepare, state, [0], bucket=1),
    )
    state = _state()
    yield Finding(
        "idx_mapping picks the rows, in whatever order",
        _problem(prepare, state, [6, 0, 3], bucket=3),
    )
    yield Finding(
        "a place that is padding, or nobody's, gets slot -1 and length 0",
        _problem(prepare, state, [2, -1, 5], bucket=6),
    )
    yield Finding(
        "a place past the row's blocks gets slot -1",
        _problem(prepare, _state(num_computed=MAX_LEN), [1, 2], bucket=2),
    )


def _state(num_computed: int | None = None) -> StateTables:
    """Return a state table with tokens and blocks in every row."""
    numbers = random.Random(0)

    def ints(*shape: int, most: int) -> torch.Tensor:
        count = int(torch.tensor(shape).prod())
        return torch.tensor([numbers.randrange(most) for _ in range(count)]).reshape(shape)

    computed = ints(NUM_ROWS, most=MAX_LEN - 1).int()
    if num_computed is not None:
        computed[:] = num_computed
    return StateTables(
        token_ids=ints(NUM_ROWS, MAX_LEN, most=1000).int(),
        num_computed=computed,
        total_len=computed + 1,
        # some rows are at their prompt's last token, some past it
        prefill_len=computed + ints(NUM_ROWS, most=2).int(),
        last_sampled=ints(NUM_ROWS, most=1000),
        block_tables=ints(NUM_ROWS, MAX_BLOCKS, most=100).int(),
    )


def _problem(prepare: object, state: StateTables, mapping: list[int], bucket: int) -> str:
    """Return the first buffer that differs from the project's."""
    assert callable(prepare)
    mine, own = _buffers(bucket), _buffers(bucket)
    header = torch.zeros(4, dtype=torch.int32)
    header[NUM_REQS] = len(mapping)
    places = torch.tensor(mapping + [-1] * (bucket - len(mapping)), dtype=torch.int32)
    prepare(header, places, state, mine, BLOCK_SIZE)
    prepare_decode_inputs(header, places, state, own, BLOCK_SIZE)
    for name in ("slot_mapping", "positions", "input_ids", "seq_lens", "query_start_loc"):
        got, wanted = getattr(mine, name).tolist(), getattr(own, name).tolist()
        if got != wanted:
            return f"{name} is {got}, not {wanted}"
    for place, length in enumerate(own.seq_lens.tolist()):
        num_blocks = min(-(-length // BLOCK_SIZE), MAX_BLOCKS)
        got, wanted = (b.block_tables[place, :num_blocks].tolist() for b in (mine, own))
        if got != wanted:
            return f"block_tables[{place}] is {got}, not {wanted}"
    return ""


def _buffers(bucket: int) -> InputBuffers:
    def junk(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, JUNK, dtype=dtype)

    return InputBuffers(
        input_ids=junk(bucket, dtype=torch.int64),
        positions=junk(bucket, dtype=torch.int64),
        query_start_loc=junk(bucket + 1, dtype=torch.int32),
        seq_lens=junk(bucket, dtype=torch.int32),
        slot_mapping=junk(bucket, dtype=torch.int64),
        block_tables=junk(bucket, MAX_BLOCKS, dtype=torch.int32),
    )
