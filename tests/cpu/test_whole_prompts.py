"""Which steps attend by torch's FlashAttention 2, in both runners; a recorder stands in for it.

The operator needs a GPU (tests/gpu/test_whole_prompts.py); its arguments are checked here too.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner_steps import RunnerSteps, packed, request

from nanorunner.config import make_config
from nanorunner.kernels import self_attention
from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.whole_prompt_attention import (
    are_whole_prompts,
    takes,
    whole_prompt_attention,
)
from nanorunner.presets import load_preset
from nanorunner.resolve import resolve
from nanorunner.toy_model import make_toy_model
from nanorunner.workers import model_runner_v1
from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group
from nanorunner.workers.messages import StepInput

# name -> (computed, tokens) of each request, and whether torch's kernel attends
RULE: dict[str, tuple[list[tuple[int, int]], bool]] = {
    "one prompt": ([(0, 512)], True),
    "a prompt as long as a tile": ([(0, 128)], True),
    "a prompt that fills no tile": ([(0, 127)], False),
    "many prompts that fill no tile": ([(0, 100)] * 80, False),
    "equal prompts": ([(0, 1024)] * 8, True),
    "prompts of 100 to 1024": ([(0, n) for n in range(100, 1025, 100)], True),
    "a prompt of one token beside others": ([(0, 1), (0, 300), (0, 200)], True),
    "the first chunk of a prompt": ([(0, 8192)], True),
    "a later chunk": ([(8192, 512)], False),
    "a cached prefix": ([(256, 512)], False),
    "whole prompts beside a cached prefix": ([(0, 512), (0, 512), (256, 512)], False),
    "whole prompts beside a decode": ([(700, 1), (0, 512)], False),
    "decodes": ([(700, 1), (20, 1)], False),
    "a quarter of the programs has work": ([(0, 1024), *[(0, 0)] * 3], True),
    "less than a quarter has": ([(0, 1024), *[(0, 0)] * 4], False),
    "a long prompt among very short ones": ([(0, 20)] * 100 + [(0, 4096)], False),
}


@pytest.mark.parametrize("name", RULE)
def test_the_rule(name: str) -> None:
    requests, expected = RULE[name]
    computed, counts = (np.array(values) for values in zip(*requests, strict=True))
    assert are_whole_prompts(computed, counts) is expected


def test_the_widths_that_it_takes() -> None:
    assert [n for n in (8, 16, 64, 80, 96, 128, 256, 264, 10, 100) if takes(n)] == [
        8, 16, 64, 80, 96, 128, 256,
    ]  # fmt: skip


def test_this_torch_takes_the_operator_s_arguments_and_gives_contiguous_rows() -> None:
    names = [x.name for x in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    assert names[:10] == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p",
        "is_causal", "return_debug_mask",
    ]  # fmt: skip
    qkv = torch.empty((300, 32 * 128), dtype=torch.bfloat16, device="meta")
    q, k, v = torch.split_with_sizes(qkv.view(300, 32, 128), [16, 8, 8], dim=1)
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    batch = AttentionBatch(starts, starts[1:], starts[:0], starts[:0], 200, 200)
    out = whole_prompt_attention(q, k, v, batch, 0.1)
    assert out.shape == (300, 16, 128)
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = load_preset("tiny-qwen3") | {"max_position_embeddings": 700}
    return make_toy_model(tmp_path_factory.mktemp("toy"), fields)


class Recorder:
    """whole_prompt_attention for a CPU; it keeps the lengths of each call's requests."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> torch.Tensor:
        spans = list(pairwise(batch.query_start_loc.tolist()))
        self.calls.append([end - start for start, end in spans])
        assert batch.max_query_len == max(self.calls[-1])
        assert spans[-1][1] == len(q) == len(k) == len(v), "a token that belongs to nobody"
        outputs = []
        for start, end in spans:
            one_q, one_k, one_v = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                one_q, one_k, one_v, is_causal=True, scale=scale, enable_gqa=True
            )
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

    def take(self, num_layers: int) -> list[list[int]]:
        """Return the lengths of each step since the last time, and forget them."""
        steps = self.calls[::num_layers]
        assert self.calls == [step for step in steps for _ in range(num_layers)]
        self.calls = []
        return steps


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(self_attention, "whole_prompt_attention", recorder)
    return recorder


def prompt(length: int) -> list[int]:
    return [3 + 7 * length % 90 + i % 400 for i in range(length)]


def run_v2(steps: RunnerSteps) -> None:
    """Run whole prompts, decodes, a prompt beside them, two chunks, and a cached prefix."""
    whole = (request(1, prompt(200), [0]), request(2, prompt(140), [1]))
    steps.step({1: 200, 2: 140}, new=whole)
    steps.decode((1, 2), 2)
    steps.step(dict.fromkeys((1, 2), steps.query_len) | {3: 150}, (request(3, prompt(150), [2]),))
    steps.step({4: 160}, new=(request(4, prompt(300), [3, 4]),), removed=(1, 2, 3))
    steps.step({4: 140})
    cached = request(5, prompt(300)[:256] + [9] * 200, [3, 5], num_computed=256)
    steps.step({5: 200}, new=(cached,), removed=(4,))


def test_v2_takes_it_where_every_request_begins_and_gets_the_same_ids(
    folder: Path, recorder: Recorder
) -> None:
    plain, mixed = RunnerSteps(folder), RunnerSteps(folder)
    run_v2(plain)
    assert recorder.calls == [], "no engine takes it unless it is told to"
    mixed.runner.config = replace(mixed.runner.config, flash_prompts=True)
    run_v2(mixed)
    assert recorder.take(mixed.runner.config.model.num_layers) == [[200, 140], [160]]
    assert mixed.ids == plain.ids
    assert len(plain.ids) == 5


def test_a_step_that_measures_memory_takes_it_too(folder: Path, recorder: Recorder) -> None:
    steps = RunnerSteps(folder)
    steps.runner.config = replace(steps.runner.config, flash_prompts=True)
    steps.runner.widest_step()
    calls = recorder.take(steps.runner.config.model.num_layers)
    assert [sum(step) for step in calls] == [600 * 4]


def test_a_draft_model_that_follows_takes_it_if_its_heads_fit(
    folder: Path, tmp_path: Path, recorder: Recorder
) -> None:
    num_layers = load_preset("tiny-qwen3")["num_hidden_layers"]
    narrow = load_preset("tiny-qwen3") | {"head_dim": 10, "max_position_embeddings": 700}
    for draft, num_models in ((folder, 2), (make_toy_model(tmp_path, narrow), 1)):
        steps = RunnerSteps(folder, draft)
        steps.runner.config = replace(steps.runner.config, flash_prompts=True)
        steps.step({1: 200}, new=(request(1, prompt(200), [0]),))
        assert recorder.take(num_layers) == [[200]] * num_models
        steps.decode((1,), 3)
        if draft is folder:
            steps.check_draft_kv(1)
        assert recorder.calls == []


def test_v1_takes_it_under_the_same_rule(folder: Path, recorder: Recorder) -> None:
    ids: list[list[list[int]]] = []
    for flash_prompts in (False, True):
        runner = make_v1(folder, flash_prompts=flash_prompts)
        ids.append(run_v1(runner))
        if not flash_prompts:
            assert recorder.calls == []
    num_layers = runner.config.model.num_layers
    assert recorder.take(num_layers) == [[200, 140], [160]]
    assert ids[0] == ids[1]
    runner.widest_step()
    assert [sum(step) for step in recorder.take(num_layers)] == [600 * 4]


def make_v1(folder: Path, *, flash_prompts: bool) -> model_runner_v1.ModelRunner:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "runner": "v1"}
    settings |= {"num_blocks": 8, "max_num_seqs": 4, "max_model_len": 600}
    config = resolve(make_config({"model": str(folder)} | settings)).runner_config
    device = Device("cpu", 0)
    group = Group(None, 0, 1, device.torch_device, timeout_s=10)
    runner = model_runner_v1.ModelRunner(
        replace(config, flash_prompts=flash_prompts), 0, group, device
    )
    runner.load_model()
    runner.allocate_kv(8)
    return runner


def run_v1(runner: model_runner_v1.ModelRunner) -> list[list[int]]:
    """Run whole prompts, a decode, a prompt beside them and two chunks; return each step's ids."""
    first = (request(1, prompt(200), [0]), request(2, prompt(140), [1]))
    second, third = (request(3, prompt(150), [2]),), (request(4, prompt(300), [3, 4]),)
    steps = [
        ((), first, {1: 200, 2: 140}),
        ((), (), {1: 1, 2: 1}),
        ((), second, {1: 1, 2: 1, 3: 150}),
        ((1, 2, 3), third, {4: 160}),
        ((), (), {4: 140}),
    ]
    ids: list[list[int]] = []
    for number, (removed, new, batch) in enumerate(steps):
        pairs = packed(*(value for pair in batch.items() for value in pair))
        sampled = packed(*ids[-1]) if ids else b""
        handle = runner.step(StepInput(number, packed(*removed), new, (), pairs, sampled).to_wire())
        assert handle is not None, "rank 0 always gets a handle"
        ids.append(handle.result().token_ids.tolist())
    return ids
