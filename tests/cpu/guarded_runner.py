"""Runner v2 in which a step that waits for the GPU, or copies from pageable memory, is an error.

Ranks import this file by its name: start_engine() below starts them with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanorunner.config import make_config
from nanorunner.engine import Engine
from nanorunner.launch import Ranks
from nanorunner.resolve import resolve
from nanorunner.scheduler import Scheduler
from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group
from nanorunner.workers.messages import METHODS, METHODS_WITH_REPLY, RunnerConfig
from nanorunner.workers.model_runner import ModelRunner
from nanorunner.workers.step_output import PendingStep

FIRST_GUARDED, NUM_GUARDED = 20, 100
REPORT = "num_guarded"


class RefusePageable(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, a copy between CPU and GPU that is not asynchronous from or to pinned memory raises.

    RuntimeError names the operation. A CPU number (no dimensions) that a kernel takes as an
    argument is no copy.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if not isinstance(result, torch.Tensor):
            return result
        names = [argument.name for argument in func._schema.arguments]
        values = dict(zip(names, args, strict=False)) | kwargs
        is_asynchronous = bool(values.get("non_blocking", False))
        for source in given:
            if source.device.type == result.device.type or source.dim() == 0:
                continue
            host = source if source.device.type == "cpu" else result
            if not (is_asynchronous and host.is_pinned()):
                pinned = "pinned" if host.is_pinned() else "pageable"
                raise RuntimeError(
                    f"{func}: a copy from {source.device} to {result.device}, "
                    f"non_blocking={is_asynchronous}, {pinned} memory"
                )
        return result


class GuardedRunner(ModelRunner):
    """Steps FIRST_GUARDED to FIRST_GUARDED + NUM_GUARDED - 1 run under both guards."""

    num_steps = 0
    num_steps_guarded = 0

    def step(self, wire: tuple[Any, ...]) -> PendingStep | None:
        """As ModelRunner; RuntimeError when it waits or copies from pageable memory."""
        self.num_steps += 1
        if not FIRST_GUARDED <= self.num_steps < FIRST_GUARDED + NUM_GUARDED:
            return super().step(wire)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with RefusePageable():
                handle = super().step(wire)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.num_steps_guarded += 1
        return handle

    def num_guarded(self) -> tuple[int, dict[str, int]]:
        """Return how many steps were guarded, and how all were dispatched."""
        return self.num_steps_guarded, dict(self.graphs.dispatched)


def make_runner(config: RunnerConfig, rank: int, group: Group) -> GuardedRunner:
    """Return a rank's GuardedRunner."""
    return GuardedRunner(config, rank, group, Device(config.device, rank))


def start_engine(tp: int, **settings: Any) -> tuple[Engine, Ranks]:
    """Return an engine on guarded ranks; close() of the ranks ends both."""
    fixed = {"runner": "v2", "load_format": "dummy", "skip_tokenizer_init": True, "tp": tp}
    config = resolve(make_config(fixed | settings)).runner_config
    assert config.num_blocks is not None, "the tests choose the pool"
    ranks = Ranks(
        config,
        "guarded_runner:make_runner",
        methods=METHODS | {REPORT},
        methods_with_reply=METHODS_WITH_REPLY | {REPORT},
    )
    try:
        for stage in ("load_model", "profile"):
            ranks.call_all(stage)
        ranks.call_all("allocate_kv", config.num_blocks)
        ranks.call_all("capture")
    except BaseException:
        ranks.close()
        raise
    scheduler = Scheduler(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        num_blocks=config.num_blocks,
        vocab_size=config.model.vocab_size,
        depth=config.async_depth,
        send_sampled_ids=False,
        num_speculative_tokens=config.max_query_len - 1,
    )
    vocab_size = config.model.vocab_size
    return Engine(scheduler, ranks.call, vocab_size=vocab_size, result=ranks.result), ranks
