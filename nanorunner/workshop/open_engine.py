"""A small engine whose inside may be looked at: its scheduler, its ranks, each step as it leaves.

    start_engine(config) -> OpenEngine(engine, scheduler, ranks)
    engine.step(): scheduler.schedule() -> on_step(StepInput) -> every rank's step -> update

build.py makes the same parts for users, and hides them behind the engine. Here on_step hears of
each step after its blocks were decided and before any rank runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from nanorunner.check_shards import check_shards
from nanorunner.engine import Engine
from nanorunner.launch import RUNNER, Ranks
from nanorunner.scheduler import Scheduler
from nanorunner.workers.messages import (
    METHODS,
    METHODS_WITH_REPLY,
    RunnerConfig,
    StepHandle,
    StepInput,
)


@dataclass(frozen=True)
class OpenEngine:
    """A running engine and its parts; close it, or use `with`."""

    engine: Engine
    scheduler: Scheduler
    ranks: Ranks
    num_blocks: int

    def __enter__(self) -> OpenEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.engine.close()


def start_engine(
    config: RunnerConfig,
    *,
    prefix_cache: bool = True,
    runner: str = RUNNER,
    methods: frozenset[str] = METHODS,
    methods_with_reply: frozenset[str] = METHODS_WITH_REPLY,
    on_step: Callable[[StepInput], None] | None = None,
) -> OpenEngine:
    """Start the ranks, load, size the KV cache, capture, schedule; on_step hears of each step.

    runner and methods as Ranks has them. Raises RankDied and ValueError as build_engine() does; no
    process is left then.
    """
    ranks = Ranks(config, runner, methods=methods, methods_with_reply=methods_with_reply)

    def call(method: str, *args: Any) -> StepHandle:
        if on_step is not None:
            on_step(StepInput.from_wire(args[0]))
        handle: StepHandle = ranks.call(method, *args)
        return handle

    try:
        ranks.call_all("load_model")
        if config.check_ranks:
            check_shards(ranks)
        num_blocks = min(room.num_blocks for room in ranks.call_all("profile"))
        ranks.call_all("allocate_kv", num_blocks)
        ranks.call_all("capture")
        scheduler = Scheduler(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            num_blocks=num_blocks,
            vocab_size=config.model.vocab_size,
            prefix_cache=prefix_cache,
            depth=config.async_depth,
            send_sampled_ids=config.runner == "v1",
        )
        engine = Engine(
            scheduler,
            call,
            vocab_size=config.model.vocab_size,
            seed=config.seed,
            close=ranks.close,
            result=ranks.result,
            defer_interrupt=ranks.defer_interrupt,
            runner=config.runner,
        )
    except BaseException:
        ranks.close()
        raise
    return OpenEngine(engine, scheduler, ranks, num_blocks)
