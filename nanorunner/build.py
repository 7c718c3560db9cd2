"""Put an engine together: start the ranks, load, size the KV cache, capture, schedule.

    Resolved -> Ranks -> load_model -> profile -> allocate_kv(minimum) -> capture -> Engine

The four stages are calls on the wire like any other, so every rank makes them in the same order.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from nanorunner.check_shards import check_shards
from nanorunner.draft_control import DraftController
from nanorunner.engine import Engine
from nanorunner.launch import Ranks
from nanorunner.resolve import Resolved
from nanorunner.scheduler import Scheduler
from nanorunner.tap import open_tap
from nanorunner.trace import open_trace
from nanorunner.workers.messages import BLOCK_SIZE, KvRoom, RunnerConfig

GIB = 1 << 30

logger = logging.getLogger("nanorunner")


def build_engine(resolved: Resolved, eos_ids: frozenset[int] = frozenset()) -> Engine:
    """Return a running engine; eos_ids are the tokenizer's, the model's own are added.

    Raises ValueError when no KV block fits, RankDied when a rank does, with check_ranks
    RankCheckFailed for a wrong weight; no process is left then.
    """
    runner_config, config = resolved.runner_config, resolved.config
    begin = time.perf_counter()
    if config.trace is not None:
        runner_config = replace(runner_config, trace=open_trace(config))
    ranks = Ranks(runner_config, tap=open_tap(config))
    try:
        started = time.perf_counter()
        ranks.call_all("load_model")
        if config.check_ranks:
            check_shards(ranks)
        loaded = time.perf_counter()
        num_blocks = _agree_on_blocks(ranks.call_all("profile"), runner_config)
        profiled = time.perf_counter()
        ranks.call_all("allocate_kv", num_blocks)
        ranks.call_all("capture")
        captured = time.perf_counter()
        engine = Engine(
            Scheduler(
                max_num_seqs=runner_config.max_num_seqs,
                max_num_batched_tokens=runner_config.max_num_batched_tokens,
                max_model_len=runner_config.max_model_len,
                num_blocks=num_blocks,
                vocab_size=runner_config.model.vocab_size,
                eos_token_ids=eos_ids | _model_eos_ids(resolved),
                prefix_cache=config.prefix_cache,
                depth=runner_config.async_depth,
                send_sampled_ids=runner_config.runner == "v1",
                **_speculation(resolved),
            ),
            ranks.call,
            vocab_size=runner_config.model.vocab_size,
            seed=config.seed,
            close=ranks.close,
            result=ranks.result,
            defer_interrupt=ranks.defer_interrupt,
            runner=runner_config.runner,
            counters=lambda: ranks.call_all("counters"),
            spans=lambda: ranks.call_all("spans"),
            recorder=ranks.recorder,
        )
        if runner_config.spans:
            engine.spans()  # raises now, not after a long run, if the ranks' clocks are not one
    except BaseException:
        ranks.close()
        raise
    logger.info(
        "ready in %.1f s (ranks %.1f, weights and kernels %.1f, profile %.1f, capture %.1f): "
        "%d KV blocks of %d tokens on each rank",
        time.perf_counter() - begin,
        started - begin,
        loaded - started,
        profiled - loaded,
        captured - profiled,
        num_blocks,
        BLOCK_SIZE,
    )
    return engine


def _speculation(resolved: Resolved) -> dict[str, Any]:
    """Return what the scheduler must know of speculation; nothing without it."""
    speculation = resolved.runner_config.speculation
    if speculation is None:
        return {}
    count = speculation.num_tokens
    controller = DraftController(count) if resolved.config.speculative_adaptive else None
    return {"num_speculative_tokens": count, "controller": controller}


def _agree_on_blocks(rooms: list[KvRoom], config: RunnerConfig) -> int:
    """Return the blocks that every rank has room for; ValueError when that is none."""
    rank = min(range(len(rooms)), key=lambda r: rooms[r].num_blocks)
    room = rooms[rank]
    if room.num_blocks < 1:
        raise ValueError(
            f"no room for the KV cache on rank {rank}: a block of {BLOCK_SIZE} tokens takes "
            f"{room.block_bytes / GIB:.3f} GiB and {max(room.room_bytes, 0) / GIB:.3f} GiB are "
            f"left; raise --gpu-memory-utilization ({config.gpu_memory_utilization:g}) or "
            f"--kv-cache-gib, or lower --max-num-seqs ({config.max_num_seqs}) or "
            f"--max-num-batched-tokens ({config.max_num_batched_tokens}); a warning above names "
            "memory that other programs have, if they do"
        )
    if room.num_blocks * BLOCK_SIZE < config.max_model_len:
        logger.warning(
            "the KV cache holds %d tokens, fewer than max_model_len %d: a request that needs more "
            "is refused or ends early",
            room.num_blocks * BLOCK_SIZE,
            config.max_model_len,
        )
    return room.num_blocks


def _model_eos_ids(resolved: Resolved) -> frozenset[int]:
    """Return the ids that the model's own files call the end; some list several."""
    ids: set[int] = set()
    for source in (resolved.source.generation_config, resolved.source.config_json):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            ids.add(value)
        elif isinstance(value, list):
            ids.update(value)
    return frozenset(ids)
