"""The inputs of a step, made on the device from the state table: the CPU never knows their values.

The CPU sends who is in the batch; how far each request has come, and which token it sampled last,
stands in device tables that the step before has advanced (kernels/advance_state.py).

    header          [>= 2] the number of requests and of tokens in this step (NUM_REQS, NUM_TOKENS)
    idx_mapping     [>= requests] batch place -> row of the state table, -1 for nobody
    token_ids       [R, max_model_len] int32, may be pinned host memory (kernels/uva.py)
    num_computed    [R] int32: tokens whose KV is written       prefill_len [R] int32: tokens that
    last_sampled    [R] int64: the newest output                the CPU knew when the request came
    block_tables    [R, max_blocks] int32

    row -> position = num_computed + 0, 1, ...   token = token_ids[row, position] inside the prefill,
                                                         else last_sampled[row]
           slot = block_tables[row, position // block size] * block size + position % block size

Outputs are fixed buffers, longer than the batch when a CUDA graph pads it. What lies behind the
batch is written too: query length 0, seq_len 0, slot -1, table row zero, token and position 0 (a
rotary embedding reads the position of a padded token). The counts come from `header` on the device,
so a captured launch serves every batch of its size. Offsets are 64-bit: row 2148 of a token table a
million wide lies beyond 2**31.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.triton_support import jit, next_power_of_two, tl
from nanorunner.workers.messages import BLOCK_SIZE

NUM_REQS, NUM_TOKENS = 0, 1  # places in the header
