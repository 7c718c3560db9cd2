"""Runner v1 by itself, stage by stage: what it writes to the cache, and what it must not.

The pool is filled with NaN, so that a slot read before it was written, or written by a row that is
only padding, shows in the ids or in the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch

from nanorunner.config import make_config
from nanorunner.resolve import resolve
from nanorunner.workers.cuda_graphs import capture_sizes
from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group
from nanorunner.workers.full_sampling import FullSampling
from nanorunner.workers.messages import NewRequest, StepInput, StepOutput
from nanorunner.workers.model_runner_v1 import ModelRunner

GREEDY = FullSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
PROMPT = [5, 6, 7, 8, 9, 10, 11]


def packed(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def step(
    runner: ModelRunner, new: tuple[NewRequest, ...], batch: bytes | None, sampled_ids: bytes = b""
) -> StepOutput:
    """Run one step and return its output."""
    wire = StepInput(0, b"", new, (), batch, sampled_ids).to_wire()
    handle = runner.step(wire)
    assert handle is not None, "rank 0 always gets a handle"
    return handle.result()


def request(request_id: int, prompt: list[int], block_id: int) -> NewRequest:
    return NewRequest(request_id, packed(*prompt), len(prompt), 0, packed(block_id), GREEDY)


@pytest.fixture
def runner() -> Iterator[ModelRunner]:
    """Yield a runner through all four stages, its cache of four blocks full of NaN."""
    settings = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "num_blocks": 4}
    config = resolve(make_config({"model": "tiny-qwen3", **settings})).runner_config
    device = Device("cpu", 0)
    group = Group(None, 0, 1, device.torch_device, timeout_s=10)
    runner = ModelRunner(config, 0, group, device)
    runner.load_model()
    runner.profile()
    runner.allocate_kv(4)
    runner.kv_cache.fill_(float("nan"))
    runner.capture()
    yield runner
    runner.close()
    runner.close()  # a second call does nothing


def test_profile_and_capture_write_nothing(runner: ModelRunner) -> None:
    assert bool(runner.kv_cache.isnan().all())


def test_a_step_writes_its_own_slots_and_no_other(runner: ModelRunner) -> None:
    step(runner, (request(1, PROMPT, block_id=2),), packed(1, len(PROMPT)))
    written = ~runner.kv_cache.isnan()
    assert bool(written[:, :, 2, : len(PROMPT)].all())
    others = [0, 1, 3]
    assert not bool(written[:, :, others].any())
    assert not bool(written[:, :, 2, len(PROMPT) :].any())


def test_slots_that_nobody_wrote_change_no_id(runner: ModelRunner) -> None:
    ids = []
    for request_id, junk in ((1, float("nan")), (2, 0.0), (3, 1e30)):
        runner.kv_cache.fill_(junk)
        prompt = request(request_id, PROMPT, block_id=3)
        first = step(runner, (prompt,), packed(request_id, len(PROMPT))).token_ids
        second = step(runner, (), packed(request_id, 1), first.tobytes()).token_ids
        ids.append([int(first[0]), int(second[0])])
        runner.sequences.apply(StepInput(0, packed(request_id), (), (), b"", second.tobytes()))
    assert ids[0] == ids[1] == ids[2]


def test_an_unfinished_prompt_samples_nothing_and_its_end_what_the_whole_gives(
    runner: ModelRunner,
) -> None:
    both = (request(1, PROMPT, block_id=0), request(2, PROMPT, block_id=1))
    output = step(runner, both, packed(1, len(PROMPT), 2, 3))
    assert output.request_ids.tolist() == [1]
    whole = int(output.token_ids[0])
    output = step(runner, (), packed(1, 1, 2, len(PROMPT) - 3), packed(whole))
    assert output.request_ids.tolist() == [1, 2]
    assert int(output.token_ids[1]) == whole


def test_a_step_in_which_nobody_samples_has_an_empty_output(runner: ModelRunner) -> None:
    output = step(runner, (request(1, PROMPT, block_id=0),), packed(1, 3))
    assert (output.request_ids.tolist(), output.token_ids.tolist()) == ([], [])
    assert output.token_ids.dtype == np.int32
    assert torch.isfinite(runner.kv_cache[:, :, 0, :3]).all()


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 9, 12, 20, 97, 100, 256, 257, 500, 512])
def test_the_widest_legal_batch_has_a_graph_of_its_own(max_num_seqs: int) -> None:
    sizes = capture_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, max_num_seqs)
    # padding never doubles a batch, and costs at most 15 rows
    assert all(b - a <= min(a, 16) for a, b in pairwise(sizes))
