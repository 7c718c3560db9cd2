"""Compile what speculation adds for Hopper, as compile_kernels.py does; a JSON line each.

PYTHONPATH=.:tests/cpu python tests/cpu/compile_speculation.py
"""

from __future__ import annotations

import os

import torch
from compile_kernels import compile_instead
from state_cases import buffers, int32, logits_rows, state_of, with_limits

from nanorunner.kernels.accept_drafts import accept_drafts_triton
from nanorunner.kernels.ngram_drafts import ngram_drafts_triton
from nanorunner.kernels.penalties import DraftTokens, apply_penalties_triton
from nanorunner.kernels.prepare_inputs import (
    prepare_decode_inputs_triton,
    prepare_mixed_inputs_triton,
)
from nanorunner.kernels.write_drafts import write_drafts_triton

BLOCK_SIZE, MAX_BLOCKS, MAX_LEN, ROWS = 256, 16, 4096, 8


def launch_all() -> None:
    """Call every launcher, with and without what may be None."""
    state = with_limits(state_of({}, ROWS, MAX_LEN, MAX_BLOCKS), [MAX_LEN] * ROWS)
    out, logits = buffers(4, 4, MAX_BLOCKS), logits_rows(4)
    header, rows, offsets = int32([4, 4, 4, 2]), int32([0, 0, 1, 1]), int32([0, 1, 0, 1])
    ids = torch.zeros(4, dtype=torch.int64)
    ring, counter = torch.zeros(4, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for given in (None, offsets):
        prepare_decode_inputs_triton(header, rows, state, out, BLOCK_SIZE, given)
        prepare_mixed_inputs_triton(header, rows, rows, state, out, logits, 1, BLOCK_SIZE, given)
        write_drafts_triton(header, rows, ids, 3, state, given)
        ngram_drafts_triton(header, rows, state, 15, 2, 4, given)
    for places in (None, rows):
        loc = out.query_start_loc
        accept_drafts_triton(header, rows, loc, ids, state, ring, counter, rows.clone(), places)
    one = torch.ones(ROWS)
    pool = torch.zeros(2, 1200, dtype=torch.int32), torch.zeros(2, 38_000, dtype=torch.int32)
    history = DraftTokens(state.token_ids, state.total_len, ids, 38_000)
    for drafts in (None, history):
        line = torch.zeros(4, 38_000)
        apply_penalties_triton(line, rows, int32([0] * ROWS), one, one, one, *pool, drafts)


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ, "the interpreter compiles nothing"
    compile_instead(90)
    launch_all()
