"""Runner v2's steps of nobody: what it runs before the first request comes.

    warm_up        each kind of step once, so that serving compiles nothing; drafting with them
    widest_step    the most memory that a step can take, for profile.py to measure

Their rows are -1, nobody: the kernels read and write no KV and no state for those.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

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
        for num_reqs in capture_sizes(min(most, config.max_num_seqs)):
            idle_step(runner, num_reqs, 1, is_decode=False)
    if runner.model.has_few_rows and config.max_query_len > 1:
        for num_reqs, num_chunks in new_verify_steps(runner):
            verify_nothing(runner, num_reqs, num_chunks, is_decode=False)
    runner.states.touch()
    runner.writer.apply()
    _exercise(runner, num_rows=2)


def new_verify_steps(runner: ModelRunner) -> Iterator[tuple[int, int]]:
    """Yield the (groups, one-token chunks) of eager steps that launch projections of a new kind.

    A group has max_query_len places and a chunk one, so steps have row counts between those of the
    plain steps and of the graphs, and the tables may have tiles of their own for them.
    """
    query_len, max_num_seqs = runner.config.max_query_len, runner.config.max_num_seqs
    model, drafting = runner.model, None
    if runner.proposer is not None and not runner.has_graphs:  # with graphs it has its own
        drafting = runner.proposer.decoder
    seen: set[tuple[object, ...]] = set()
    for size in capture_sizes(max_num_seqs):
        seen.add((model, *model.compiled_for(size)))
        if runner.has_graphs:
            seen.add((model, *model.compiled_for(size * query_len)))
    for rows in range(query_len, max_num_seqs * query_len + 1):
        num_reqs, num_chunks = divmod(rows, query_len)  # the fewest requests of so many rows
        leaders = num_reqs + num_chunks
        if leaders > max_num_seqs:
            continue
        passes = {(model, *model.compiled_for(rows))}
        if drafting is not None:  # its first pass has two places a request
            passes |= {(drafting, *drafting.compiled_for(n)) for n in (leaders, 2 * leaders)}
        if not passes <= seen:
            seen |= passes
            yield num_reqs, num_chunks


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
def verify_nothing(
    runner: ModelRunner, num_reqs: int, num_chunks: int = 0, *, is_decode: bool
) -> None:
    """Run a step that verifies the drafts of num_reqs requests of nobody.

    Beside them are chunks of one token, the last of their prompts; not in a decode.
    """
    is_verified = np.arange(num_reqs + num_chunks) < num_reqs
    counts = np.where(is_verified, runner.config.max_query_len, 1)
    rows = np.full(len(counts), -1, np.int64)
    places = lay_out(rows, counts, np.ones(len(counts), np.bool_), is_verified)
    runner.inputs.send(places)
    if is_decode:
        runner.decode_body(Descriptor(num_reqs, PLAIN, places.query_len))
    else:
        runner.mixed_step(places, max_seq_len=runner.config.max_model_len)


@torch.inference_mode()
def _exercise(runner: ModelRunner, num_rows: int, *, is_widest: bool = False) -> None:
    exercise_sampler(runner.sampler, runner.group, runner.dtype, num_rows, is_widest=is_widest)
