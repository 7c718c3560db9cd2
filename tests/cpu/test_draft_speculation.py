"""An engine with a draft model gives each request the ids of plain decoding, as fast as it drafts.

Toy models in float32 on the CPU: the target drafts for itself, which is always right, or another
model does, which is right by chance. Requests come together, in chunks, are preempted, share what
is cached, at every depth and on two ranks.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from nanorunner import LLM, SamplingParams
from nanorunner.presets import load_preset
from nanorunner.scheduler_stats import SchedulerStats
from nanorunner.toy_model import make_toy_model

Ids = list[list[int]]
NUM_TOKENS = 24
PROMPT_LENS = (250, 3, 256, 249, 17, 1, 90, 300)
VARIANTS: dict[str, dict[str, Any]] = {
    "together": {},
    "depth 1": {"async_depth": 1},
    "depth 3": {"async_depth": 3, "max_num_reqs": 24},
    "in chunks": {"max_num_batched_tokens": 48},
    "preempted": {"num_blocks": 4, "max_num_seqs": 4},
    "preempted, in chunks": {"num_blocks": 4, "max_num_seqs": 4, "max_num_batched_tokens": 48},
    "cached": {"prefix_cache": True},
    "one draft": {"num_speculative_tokens": 1},
    "two ranks": {"tp": 2},
    "adaptive": {"speculative_adaptive": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = load_preset("tiny-qwen3") | {"max_position_embeddings": 700}
    return make_toy_model(tmp_path_factory.mktemp("target"), fields)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = load_preset("tiny-llama") | {"max_position_embeddings": 700}
    return make_toy_model(tmp_path_factory.mktemp("draft"), fields, seed=1)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Ids:
    ids, _ = generate(folder)
    return ids


def make_llm(folder: Path, draft: Path | None = None, **settings: Any) -> LLM:
    """Return the toy with a small pool and no cache, unless settings say otherwise."""
    small: dict[str, Any] = {"max_num_seqs": 8, "num_blocks": 24, "prefix_cache": False}
    fixed = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32"}
    if draft is not None:
        small |= {"speculative": "draft", "draft_model": str(draft), "num_speculative_tokens": 3}
        small["speculative_adaptive"] = False
    return LLM(folder, max_model_len=611, **{**fixed, **small, **settings})


def generate(
    folder: Path, draft: Path | None = None, rounds: int = 1, **settings: Any
) -> tuple[Ids, SchedulerStats]:
    """Return the ids that each request gets, the same in every round, and the engine's counts."""
    random = Random(0)
    prompts = [[random.randrange(3, 500) for _ in range(length)] for length in PROMPT_LENS]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "seed": 2, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.3},
    ]
    params = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **kind) for kind in kinds * 2]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    with make_llm(folder, draft, **settings) as llm:
        said = [llm.generate(requests, params, use_tqdm=False) for _ in range(rounds)]
        ids = [[output.token_ids for output in outputs] for outputs in said]
        assert all(each == ids[0] for each in ids)
        llm.engine.scheduler.check_integrity()
        return ids[0], llm.engine.stats


@pytest.mark.parametrize("name", VARIANTS)
def test_the_ids_are_those_of_plain_decoding(
    folder: Path, other: Path, plain: Ids, name: str
) -> None:
    rounds = 2 if name == "cached" else 1
    ids, stats = generate(folder, other, rounds, **VARIANTS[name])
    assert ids == plain
    assert 0 < stats.drafts_accepted < stats.drafts_meant
    assert (stats.preemptions > 0) == ("preempted" in name)
    assert stats.mixed_steps > 0 or "chunks" not in name
    assert (stats.cached_tokens > 0) == (name == "cached")


def test_a_target_that_drafts_for_itself_accepts_every_draft(folder: Path) -> None:
    params = [
        SamplingParams(temperature=heat, seed=5, max_tokens=41, ignore_eos=True)
        for heat in (0.0, 1.0, 1.0)
    ]
    prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (7, 60, 100)]
    said, steps, meant, accepted = [], [], [], []
    for settings in ({}, {"draft": folder}, {"draft": folder, "tp": 2}):
        with make_llm(folder, **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            said.append([output.token_ids for output in outputs])
            stats = llm.engine.stats
            steps.append(stats.steps)
            meant.append(stats.drafts_meant)
            accepted.append(stats.drafts_accepted)
    assert said[0] == said[1] == said[2]
    assert accepted[:2] == meant[:2] == [0, 3 * 30]
    assert steps[:2] == [41, 1 + 10 + 1]  # one more was on its way when the last id came
    # the draft model is whole on each rank, while the target's sums are of two parts
    assert accepted[2] > 0.9 * meant[2] > 0
