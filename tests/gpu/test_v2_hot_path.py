"""A step of runner v2 waits for nothing: no synchronisation, no pageable copy, on any rank.

Requests come, end, cross block boundaries, are preempted and come back meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from guarded_runner import NUM_GUARDED, REPORT, GuardedRunner, RefusePageable, start_engine
from kernel_cases import RANK_COUNTS, dummy_model

from nanorunner import SamplingParams
from nanorunner.config import make_config
from nanorunner.resolve import resolve
from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group
from nanorunner.workers.full_sampling import FullSampling
from nanorunner.workers.messages import NewRequest, StepInput
from nanorunner.workers.step_output import PendingStep

pytestmark = pytest.mark.limit(300)

SPIN_CYCLES = 600_000_000  # 0.3 s at 2 GHz
KINDS: dict[str, list[dict[str, Any]]] = {
    "plain rows": [{"temperature": 0.0}, {"temperature": 0.7, "seed": 1}],
    "every sampler stage": [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
        {"temperature": 1.0, "min_p": 0.05, "logprobs": 2},
        {"temperature": 1.0, "repetition_penalty": 1.2, "min_tokens": 5},
        {"temperature": 0.8, "logit_bias": {5: 2.0}, "bad_words": ((7,), (8, 9))},
        {"temperature": 1.0, "prompt_logprobs": 1},
    ],
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tp", [1, *RANK_COUNTS])
def test_a_hundred_steps_synchronise_nothing_and_copy_from_pinned_memory_alone(
    tp: int, name: str, tmp_path: Path
) -> None:
    sizes = {"max_num_seqs": 4, "num_blocks": 5, "max_model_len": 600}
    model = dummy_model(tp, "tiny-qwen3", tmp_path)
    engine, ranks = start_engine(tp, model=model, max_num_batched_tokens=256, **sizes)
    kinds = KINDS[name]
    try:
        # four that outgrow their first block together, later than admission looks ahead
        for number, length in enumerate((200, 198, 196, 194, 100, 60)):
            params = SamplingParams(max_tokens=90, ignore_eos=True, **kinds[number % len(kinds)])
            engine.add_request(list(range(3, 3 + length)), params)
        for number in range(160):
            if number % 10 == 0:
                kind = kinds[number // 10 % len(kinds)]
                params = SamplingParams(max_tokens=20, ignore_eos=True, **kind)
                engine.add_request(list(range(5, 35 + 20 * (number // 10))), params)
            engine.step()
        stats = engine.stats
        assert stats.preemptions > 0
        assert stats.num_ended >= 4
        for num_guarded, dispatched in ranks.call_all(REPORT):
            assert num_guarded == NUM_GUARDED
            assert (
                sum(n for kind, n in dispatched.items() if not kind.startswith(("eager", "layers")))
                > 50
            ), dispatched
    finally:
        ranks.close()


def test_the_guard_refuses_every_copy_that_could_wait() -> None:
    source = torch.zeros(1000)
    target = torch.zeros(1000, device="cuda")
    pinned = torch.zeros(1000, pin_memory=True)
    with torch.inference_mode(), RefusePageable():
        target.copy_(pinned, non_blocking=True)
        pinned.copy_(target, non_blocking=True)
        target.add_(1).mul_(torch.tensor(2.0))
        pinned.to("cuda", non_blocking=True)
        wrongs: list[Callable[[], Any]] = [
            lambda: target.copy_(source),
            lambda: target.copy_(source, non_blocking=True),
            lambda: target.copy_(pinned),
            lambda: source.to("cuda"),
            lambda: source.cuda(),
            lambda: target.cpu(),
            lambda: source.copy_(target, non_blocking=True),
        ]
        for wrong in wrongs:
            with pytest.raises(RuntimeError, match=r"copy from"):
                wrong()


def test_a_steps_output_can_be_read_while_the_next_one_runs() -> None:
    runner = make_runner()
    try:
        prompt = np.arange(5, 25, dtype=np.int32)
        blocks = np.zeros(1, np.int32).tobytes()
        new = NewRequest(1, prompt.tobytes(), 20, 0, blocks, FullSampling(temperature=0.0))
        batch = np.array([1, 20], np.int32).tobytes()
        step(runner, 0, (new,), batch).result()
        one = np.array([1, 1], np.int32).tobytes()
        step(runner, 1, (), one).result()

        first = step(runner, 2, (), None)
        torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
        start = time.perf_counter()
        second = step(runner, 3, (), None)
        enqueued_s = time.perf_counter() - start
        assert len(first.result().token_ids) == 1
        read_s = time.perf_counter() - start
        assert len(second.result().token_ids) == 1
        whole_s = time.perf_counter() - start
        assert whole_s > 0.1, "the spin kernel is too short for this GPU"
        assert enqueued_s < whole_s / 4
        assert read_s < whole_s / 4
    finally:
        runner.close()


def make_runner() -> GuardedRunner:
    settings = {"model": "tiny-qwen3", "load_format": "dummy", "runner": "v2", "num_blocks": 2}
    config = resolve(make_config(settings | {"max_num_seqs": 2})).runner_config
    device = Device("cuda", 0)
    runner = GuardedRunner(config, 0, Group(None, 0, 1, device.torch_device, 60), device)
    runner.load_model()
    runner.profile()
    runner.allocate_kv(2)
    runner.capture()
    return runner


def step(
    runner: GuardedRunner, step_id: int, new: tuple[NewRequest, ...], batch: bytes | None
) -> PendingStep:
    handle = runner.step(StepInput(step_id, b"", new, (), batch, b"").to_wire())
    assert handle is not None, "rank 0 always gets a handle"
    return handle
