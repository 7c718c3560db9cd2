"""On a GPU a step's results are read when its kernels have run, not before, and nothing waits.

With the ring in host memory, which kernels write, and with a ring on the device that is copied
down, as where kernels cannot do that.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from nanorunner import LLM, SamplingParams
from nanorunner.workers import step_output
from nanorunner.workers.request_rows import RequestRows
from nanorunner.workers.step_extras import DeviceExtras
from nanorunner.workers.step_output import OutputRing, PendingStep

DEVICE = torch.device("cuda", 0)
SPIN_CYCLES = 200_000_000  # 0.1 s at 2 GHz
NUM_SLOTS = 4
PROBLEMS = ["", "this test says so"]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_results_are_those_of_kernels_that_have_yet_to_run(
    problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if problem:
        monkeypatch.setattr(step_output, "uva_problem", lambda device: problem)
    ring = OutputRing(NUM_SLOTS, 8, DEVICE)
    assert ring.ids.is_cuda
    table = RequestRows(2)
    request_ids = np.array([5, 6], np.int32)
    rows = np.array([table.add(5), table.add(6)], np.int64)
    owners = table, rows, table.generations(rows)
    ids = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    embedding = torch.zeros(1000, device=DEVICE)
    handles: list[PendingStep] = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    start = time.perf_counter()
    try:
        torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
        for step in range(NUM_SLOTS):
            ring.begin()
            ids.add_(1)
            ring.ids[step, :2].copy_(ids)
            extras = None
            if step % 2:
                extras = DeviceExtras([], [], [(6, embedding.add(step))])
            arrival = ring.finish(2, extras)
            handles.append(PendingStep(step, request_ids, ring, arrival, owners, 60.0, extras))
        enqueued_s = time.perf_counter() - start
        outputs = [handle.result() for handle in handles]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    whole_s = time.perf_counter() - start
    assert whole_s > 0.03, "the spin kernel is too short for this GPU"
    assert enqueued_s < whole_s / 2
    for step, output in enumerate(outputs):
        assert output.token_ids.tolist() == [step + 1, step + 1]
        if step % 2:
            assert output.extras is not None
            found = output.extras[6].embedding
            assert found is not None
            assert (found == step).all()
        else:
            assert output.extras is None


def test_an_engine_whose_kernels_cannot_write_host_memory_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"runner": "v2", "load_format": "dummy", "num_blocks": 8, "max_num_seqs": 4}
    asked = [SamplingParams(temperature=1.0, seed=n, max_tokens=20, logprobs=n) for n in range(3)]
    prompts = [list(range(3, 30 + n)) for n in range(3)]
    found = []
    for problem in PROBLEMS:
        if problem:
            monkeypatch.setattr(step_output, "uva_problem", lambda device, p=problem: p)
        with LLM("tiny-qwen3", **settings, skip_tokenizer_init=True) as llm:
            outputs = llm.generate(prompts, asked, use_tqdm=False)
        found.append([(o.token_ids, o.outputs[0].logprobs) for o in outputs])
    assert found[0] == found[1]
