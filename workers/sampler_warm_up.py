"""Every stage of the full sampler once, over zeros: its kernels compile, its peak memory shows.

Triton compiles at first launch, seconds in which a rank looks hung, so a runner calls this before
the first request; with as many rows as a step may have, it is the widest step of the sampler.
"""

from __future__ import annotations

import numpy as np
import torch

from nanorunner.kernels.logprobs import chunk_rows, logprobs
from nanorunner.kernels.token_counts import count_prompt
from nanorunner.workers.full_sampling import EDITS, Need
from nanorunner.workers.sampler_v2 import SamplerGroup, SamplerV2
from nanorunner.workers.sampling_state import Int64

NUM_TOP = 20  # best tokens reported in the exercise


def exercise_sampler(
    sampler: SamplerV2,
    group: SamplerGroup,
    dtype: torch.dtype,
    num_rows: int,
    *,
    is_widest: bool = False,
) -> None:
    """Run all stages on num_rows rows (2 or more) of zeros; every rank must take part.

    is_widest: log-probabilities of a whole chunk of rows too, as many as are ever made at once.
    Before the first request only: penalty slot 0 is cleared.
    """
    state = sampler.state
    device = state.output_counts.device
    logits = torch.zeros(num_rows, state.local_vocab, dtype=dtype, device=device)
    rows: Int64 = np.zeros(num_rows, np.int64)
    mapping = torch.zeros(num_rows, dtype=torch.int32, device=device)
    positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
    filters = Need.TOP_K_TOP_P
    ids = sampler.sample_plain(logits, mapping, positions)
    for stages in (filters, filters | Need.MIN_P, Need.MIN_P, EDITS, EDITS | filters | Need.MIN_P):
        for num_special in (num_rows, num_rows - 1):
            needs = np.zeros(num_rows, np.int32)
            needs[:num_special] = stages
            ids = sampler.sample(logits, mapping, positions, rows, needs)
    # an edited row with top-k and without min-p; and the update that follows a step
    needs[0] = EDITS | filters
    needs[1:] = filters
    ids = sampler.sample(logits, mapping, positions, rows, needs)
    sampler.count_sampled(ids, torch.full_like(mapping, -1), positions, needs)

    zeros = torch.zeros(state.num_rows, 1, dtype=torch.int32, device=device)
    count_prompt(
        zeros,
        mapping[:1],
        zeros[:, 0],
        zeros[:, 0],
        zeros[:, 0],
        1,
        state.prompt_bits,
        state.output_counts,
    )
    some = logits[:2]
    if is_widest:
        del logits
        chunk = chunk_rows(state.local_vocab * group.tp, dtype.itemsize)
        some = torch.zeros(chunk, state.local_vocab, dtype=dtype, device=device)
    logprobs(group.all_gather(some, dim=-1), ids[:1].expand(len(some)).contiguous(), NUM_TOP)
