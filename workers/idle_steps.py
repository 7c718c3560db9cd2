"""Runner v2's steps of nobody: what it runs before the first request comes.

    warm_up        each kind of step once, so that serving compiles nothing; drafting with them
    widest_step    the most memory that a step can take, for profile.py to measure

Their rows are -1, nobody: the kernels read and write no KV and no state for those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from nanorunner.kernels import lm_head_sample
from nanorunner.kernels.few_rows_plans import MAX_ROWS
from nanorunner.workers.cuda_graphs import PLAIN, Descriptor, capture_sizes
from nanorunner.workers.full_sampling import MAX_LOGPROB_ENTRIES
from nanorunner.workers.places import Places, lay_out
from nanorunner.workers.sampler_warm_up import exercise_sampler

if TYPE_CHECKING:
    from nanorunner.workers.model_runner import ModelRunner

LOGPROB_ENTRY_BYTES = 12  # an int64 id and a float32 value


def warm_up(runner: ModelRunner) -> None:
    """Run every kind of step on rows that nobody owns, and the kernels between steps."""
    config = runner.config
    query_len = min(32, config.max_model_len, config.max_num_batched_tokens)
    for count, is_decode in ((query_len, False), (1, False), (1, True)):
        idle_step(runner, 1, count, is_decode=is_decode)
    if config.max_query_len > 1:
        for is_decode in (False, True):
            verify_nothing(runner, 1, is_decode=is_decode)
    if runner.model.has_few_rows and not runner.has_graphs:  # graphs run these before capture
        most = max(MAX_ROWS, runner.model.max_medium_rows)
        drafting = None if runner.proposer is None else runner.proposer.decoder
        if drafting is not None:  # which draws by lm_head_sample in eager steps too
            most = max(most, drafting.max_medium_rows, lm_head_sample.MAX_ROWS)
        for num_reqs in capture_sizes(min(most, config.max_num_seqs)):
            idle_step(runner, num_reqs, 1, is_decode=False)
            if config.max_query_len > 1:
                verify_nothing(runner, num_reqs, is_decode=False)
    runner.states.touch()
    runner.writer.apply()
    _exercise(runner, num_rows=2)


def widest_step(runner: ModelRunner) -> None:
    """Run the largest prefill, then the largest sampler batch, with full log-probability pools.

    The pools are what steps in flight may hold beside the next one's working memory.
    """
    config = runner.config
    pool_bytes = (config.async_depth + 1) * MAX_LOGPROB_ENTRIES * LOGPROB_ENTRY_BYTES
    pools = torch.empty(pool_bytes, dtype=torch.uint8, device=runner.device.torch_device)
    query_len = min(config.max_num_batched_tokens, config.max_model_len)
    num_reqs = min(config.max_num_seqs, max(1, config.max_num_batched_tokens // query_len))
    idle_step(runner, num_reqs, query_len, is_decode=False)
    idle_step(runner, config.max_num_seqs, 1, is_decode=False)
    if config.max_query_len > 1:
        verify_nothing(runner, config.max_num_seqs, is_decode=False)
    num_places = config.max_num_seqs * config.max_query_len
    _exercise(runner, num_rows=max(2, num_places), is_widest=True)
    del pools


@torch.inference_mode()
def idle_step(runner: ModelRunner, num_reqs: int, query_len: int, *, is_decode: bool) -> None:
    """Run a step of num_reqs requests, query_len tokens each, that belong to nobody.

    With speculation they get drafts.
    """
    rows = np.full(num_reqs, -1, np.int64)
    counts = np.full(num_reqs, query_len, np.int64)
    samples = np.ones(num_reqs, np.bool_)
    places = Places(rows, counts, samples, leaders=rows)
    runner.inputs.send(places)
    if is_decode:
        runner.decode_body(Descriptor(num_reqs, PLAIN))
    else:
        runner.mixed_step(places, max_seq_len=query_len)


@torch.inference_mode()
def verify_nothing(runner: ModelRunner, num_reqs: int, *, is_decode: bool) -> None:
    """Run a step that verifies the drafts of num_reqs requests of nobody."""
    query_len, everyone = runner.config.max_query_len, np.ones(num_reqs, np.bool_)
    rows = np.full(num_reqs, -1, np.int64)
    places = lay_out(rows, np.full(num_reqs, query_len, np.int64), everyone, everyone)
    runner.inputs.send(places)
    if is_decode:
        runner.decode_body(Descriptor(num_reqs, PLAIN, query_len))
    else:
        runner.mixed_step(places, max_seq_len=runner.config.max_model_len)


@torch.inference_mode()
def _exercise(runner: ModelRunner, num_rows: int, *, is_widest: bool = False) -> None:
    exercise_sampler(runner.sampler, runner.group, runner.dtype, num_rows, is_widest=is_widest)
