"""Whole prompts by the FlashAttention 2 inside torch: right by itself, and in an engine that waits
for nothing.

The engine's reference is transformers in float32 on a CPU. Its choices are looked up at the very
ids that the engine gave: in 16 bits two logits may lie closer together than rounding, and there
either id is right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from guarded_runner import RefusePageable
from kernel_cases import AttentionCase, attention_case, check_attention
from transformers import AutoModelForCausalLM

from nanorunner import LLM, SamplingParams
from nanorunner.config import make_config
from nanorunner.kernels import self_attention
from nanorunner.kernels.attention import paged_attention, paged_attention_reference
from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.whole_prompt_attention import MIN_CAPABILITY, whole_prompt_attention
from nanorunner.presets import load_preset
from nanorunner.resolve import resolve
from nanorunner.toy_model import make_toy_model
from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group
from nanorunner.workers.full_sampling import FullSampling
from nanorunner.workers.messages import NewRequest, StepInput
from nanorunner.workers.model_runner import ModelRunner

pytestmark = [
    pytest.mark.limit(300),
    pytest.mark.skipif(
        not torch.cuda.is_available()
        or torch.cuda.get_device_capability() < MIN_CAPABILITY
        or not torch.backends.cuda.is_flash_attention_available(),
        reason="needs compute 8.0 and a torch with FlashAttention 2",
    ),
]

HEADS = {
    "16/8x128": (16, 8, 128),
    "32/8x128": (32, 8, 128),
    "9/3x64": (9, 3, 64),
    "14/2x64": (14, 2, 64),
    "6/3x16": (6, 3, 16),
    "16/4x256": (16, 4, 256),
}
LENGTHS = [[300, 1, 128, 1025, 64, 5, 257], [512] * 16, [8192], [129]]
TIES = {"float16": 0.02, "bfloat16": 0.1}  # of logits that spread by 1; a CPU was seen at 0.001
NUM_TOKENS = 24
PROMPT_LENS = [130, 200, 255, 256, 300, 5, 1]

Ids = list[list[int]]


def step_heads(case: AttentionCase) -> tuple[torch.Tensor, ...]:
    """Return q, k, v of a case of whole prompts as views of qkv rows; k and v are the cache's."""
    rows = [case.q.flatten(1)]
    for cache in (case.k_cache, case.v_cache):
        requests = zip(case.batch.block_tables, case.batch.seq_lens.tolist(), strict=True)
        parts = [cache[table[: -(-n // 256)].long()].flatten(0, 1)[:n] for table, n in requests]
        rows.append(torch.cat(parts).flatten(1))
    qkv = torch.cat(rows, dim=1)
    sizes = [row.shape[1] // case.q.shape[2] for row in rows]
    return torch.split_with_sizes(qkv.view(len(qkv), -1, case.q.shape[2]), sizes, dim=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} prompts")
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
def test_it_equals_the_reference(
    heads: tuple[int, int, int], lengths: list[int], dtype: torch.dtype
) -> None:
    case = attention_case([(n, n) for n in lengths], heads, dtype)
    q, k, v = step_heads(case)
    out = whole_prompt_attention(q, k, v, case.batch, case.scale)
    if max(lengths) < 4000:  # above, the scores in float64 take many GB
        check_attention(case, out)
    assert out.is_contiguous()
    tensors = (case.q, case.k_cache, case.v_cache, case.batch, case.scale)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-3
    for expected in (paged_attention_reference(*tensors), paged_attention(*tensors, "triton")):
        torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)


def count_steps(monkeypatch: pytest.MonkeyPatch, steps: list[int]) -> None:
    """Append the number of prompts of each call, one a layer, to steps."""

    def count(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: AttentionBatch, scale: float
    ) -> torch.Tensor:
        steps.append(len(batch.seq_lens))
        return whole_prompt_attention(q, k, v, batch, scale)

    monkeypatch.setattr(self_attention, "whole_prompt_attention", count)


@pytest.mark.parametrize("dtype", TIES)
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("family", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_greedy_ids_are_those_of_transformers(
    family: str, runner: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = load_preset(family) | {"dtype": dtype, "max_position_embeddings": 1024}
    folder = make_toy_model(tmp_path, fields)
    generator = torch.Generator().manual_seed(1)
    prompts: Ids = [
        torch.randint(3, fields["vocab_size"], (n,), generator=generator).tolist()
        for n in PROMPT_LENS
    ]
    calls: list[int] = []
    count_steps(monkeypatch, calls)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for backend, num_prompts in (("triton+fa2", len(prompts)), ("triton", 0)):
        settings = {"attention_backend": backend, "runner": runner, "dtype": dtype}
        ids, served = generate(folder, prompts, calls, **settings)
        assert sum(served) == num_prompts * fields["num_hidden_layers"]
        for tokens, new in zip(prompts, ids, strict=True):
            with torch.inference_mode():
                logits = reference(torch.tensor([tokens + new[:-1]])).logits[0, len(tokens) - 1 :]
            chosen = logits.gather(1, torch.tensor(new)[:, None])[:, 0]
            assert float((logits.amax(dim=1) - chosen).max()) < TIES[dtype]


def generate(
    folder: Path, prompts: Ids, calls: list[int], **settings: Any
) -> tuple[Ids, list[int]]:
    """Return the ids, and what `calls` got while they were made; starting up makes calls too."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    given: dict[str, Any] = {"max_num_seqs": 12, "skip_tokenizer_init": True, "kv_cache_gib": 0.5}
    with LLM(folder, **(given | settings)) as llm:
        calls.clear()
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(requests, params, use_tqdm=False)
        return [output.token_ids for output in outputs], list(calls)


def test_a_step_of_it_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"model": "tiny-qwen3", "load_format": "dummy", "num_blocks": 8}
    resolved = resolve(
        make_config(settings | {"max_num_seqs": 4, "attention_backend": "triton+fa2"})
    )
    device = Device("cuda", 0)
    group = Group(None, 0, 1, device.torch_device, 60)
    runner = ModelRunner(resolved.runner_config, 0, group, device)
    calls: list[int] = []
    count_steps(monkeypatch, calls)
    runner.load_model()
    runner.profile()
    runner.allocate_kv(8)
    runner.capture()
    assert calls, "the widest step takes it, so that serving loads no kernel"
    try:
        calls.clear()
        handles = [runner.step(whole_prompts(0, 1, 2).to_wire())]
        torch.cuda.set_sync_debug_mode("error")
        with RefusePageable():
            handles.append(runner.step(whole_prompts(1, 3, 4, removed=(1, 2)).to_wire()))
        torch.cuda.set_sync_debug_mode("default")
        assert calls == [2] * 2 * resolved.runner_config.model.num_layers
        for handle in handles:
            assert handle is not None, "rank 0 always gets a handle"
            assert len(handle.result().token_ids) == 2
    finally:
        torch.cuda.set_sync_debug_mode("default")
        runner.close()


def whole_prompts(
    step_id: int, first: int, second: int, removed: tuple[int, ...] = ()
) -> StepInput:
    """Return a step of two new requests, of 300 and 140 tokens."""
    new = tuple(
        NewRequest(
            request_id,
            np.arange(5, 5 + length, dtype=np.int32).tobytes(),
            length,
            0,
            np.array(blocks, np.int32).tobytes(),
            FullSampling(temperature=0.0),
        )
        for request_id, length, blocks in ((first, 300, [0, 1]), (second, 140, [2]))
    )
    gone, batch = (np.array(x, np.int32).tobytes() for x in (removed, [first, 300, second, 140]))
    return StepInput(step_id, gone, new, (), batch, b"")
