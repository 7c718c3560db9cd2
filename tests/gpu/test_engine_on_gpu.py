"""On GPUs the engine gives transformers' tokens, with graphs and without, on one rank and more.

Tiny random models in float32, greedy, the Triton attention backend. transformers runs on the CPU:
no kernel of ours and none of the GPU's takes part in the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import MOST_RANKS, RANK_COUNTS
from transformers import AutoModelForCausalLM

from nanorunner import LLM, SamplingParams
from nanorunner.presets import load_preset, preset_for_ranks
from nanorunner.toy_model import make_toy_model

pytestmark = pytest.mark.limit(300)

NUM_TOKENS = 24
PROMPT_LENS = [1, 5, 17, 40, 200, 255, 256, 300]
FAMILIES = ["tiny-llama", "tiny-qwen2", "tiny-qwen3"]

Ids = list[list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return (folder, prompts, transformers' greedy ids) of one family."""
    return make_model(tmp_path_factory.mktemp(request.param), load_preset(request.param))


@pytest.fixture(scope="module", params=FAMILIES)
def split_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the same of one with a query head for every rank there may be, and few KV heads."""
    folder = tmp_path_factory.mktemp(f"{request.param}-split")
    return make_model(folder, preset_for_ranks(request.param, MOST_RANKS))


def make_model(folder: Path, shapes: dict[str, Any]) -> tuple[Path, Ids, Ids]:
    """Write a model; return it with prompts and the greedy ids that transformers gives them."""
    fields = shapes | {"dtype": "float32", "max_position_embeddings": 1024}
    make_toy_model(folder, fields)
    generator = torch.Generator().manual_seed(1)
    prompts: Ids = [
        torch.randint(3, fields["vocab_size"], (n,), generator=generator).tolist()
        for n in PROMPT_LENS
    ]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference.generation_config.eos_token_id = None
    ids: Ids = []
    for prompt in prompts:
        with torch.inference_mode():
            output = reference.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS
            )
        ids.append(output[0, len(prompt) :].tolist())
    return folder, prompts, ids


def generate(folder: Path, prompts: Ids, **settings: Any) -> Ids:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    given: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 12, "skip_tokenizer_init": True}
    if "num_blocks" not in settings:
        given["kv_cache_gib"] = 0.5
    with LLM(folder, **(given | settings)) as llm:
        requests: Sequence[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [o.token_ids for o in llm.generate(requests, params, use_tqdm=False)]


RUNNERS = ["v1", "v2"]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_greedy_ids_equal_transformers(model: Any, runner: str, enforce_eager: bool) -> None:
    folder, prompts, ids = model
    settings = {"attention_backend": "triton", "enforce_eager": enforce_eager, "runner": runner}
    assert generate(folder, prompts, **settings) == ids


@pytest.mark.parametrize("runner", RUNNERS)
def test_chunked_prefill_and_small_pools_change_nothing(model: Any, runner: str) -> None:
    folder, prompts, ids = model
    small = {"max_num_batched_tokens": 48, "num_blocks": 5, "max_num_seqs": 6}
    assert generate(folder, prompts, runner=runner, **small) == ids


@pytest.mark.parametrize("tp", RANK_COUNTS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_several_ranks_give_the_ids_of_one(split_model: Any, runner: str, tp: int) -> None:
    folder, prompts, ids = split_model
    assert generate(folder, prompts, runner=runner) == ids
    assert generate(folder, prompts, tp=tp, runner=runner) == ids


def test_a_steady_step_of_v2_waits_for_nothing(tmp_path: Path) -> None:
    """100 steps with additions, ends, block boundaries and preemptions, under "error" mode."""
    fields = load_preset("tiny-qwen3") | {"max_position_embeddings": 1024}
    folder = make_toy_model(tmp_path, fields)
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "runner": "v2"}
    with LLM(folder, max_num_seqs=4, num_blocks=5, max_model_len=600, **settings) as llm:
        # four that outgrow their first block together, later than admission looks ahead
        for length in (200, 198, 196, 194, 100, 60):
            params = SamplingParams(temperature=0.7, seed=1, max_tokens=90, ignore_eos=True)
            llm.engine.add_request(list(range(3, 3 + length)), params)
        for _ in range(20):
            llm.engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for number in range(100):
                if number % 10 == 0:
                    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
                    llm.engine.add_request(list(range(5, 5 + 30 * (number // 10 + 1))), params)
                llm.engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        stats = llm.engine.stats
        assert stats.preemptions > 0
        assert stats.num_ended >= 2


def test_a_second_engine_gets_as_many_blocks_as_the_first(tmp_path: Path) -> None:
    fields = load_preset("tiny-qwen3") | {"max_position_embeddings": 4096}
    folder = make_toy_model(tmp_path, fields)
    counts = []
    for _ in range(2):
        with LLM(
            folder, max_num_seqs=4, gpu_memory_utilization=0.2, skip_tokenizer_init=True
        ) as llm:
            counts.append(llm.engine.scheduler.roster.blocks.num_blocks)
    assert counts[0] == counts[1] > 0
