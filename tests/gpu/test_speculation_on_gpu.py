"""On GPUs an engine that drafts gives plain decoding's ids; its steps wait and compile for nothing.

Tiny models in float32, where no two tokens are near each other: the kernels of a verify step are
not those of a plain one. Requests begin, end and cross block boundaries beside each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import triton
from guarded_runner import NUM_GUARDED, REPORT, start_engine
from kernel_cases import MOST_RANKS, RANK_COUNTS, dummy_model, forget_compiled

from nanorunner import LLM, SamplingParams
from nanorunner.presets import load_preset, preset_for_ranks
from nanorunner.scheduler_stats import SchedulerStats
from nanorunner.toy_model import make_toy_model

pytestmark = pytest.mark.limit(300)

Ids = list[list[int]]
NUM_TOKENS = 64
# The first four outgrow a block together, later than admission looks ahead.
PROMPT_LENS = (200, 198, 196, 194, 5, 1, 255, 256, 300)
METHODS = ("ngram", "draft", "itself")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = load_preset("tiny-qwen3") | {"max_position_embeddings": 1024}
    return make_toy_model(tmp_path_factory.mktemp("target"), fields)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = load_preset("tiny-llama") | {"max_position_embeddings": 1024}
    return make_toy_model(tmp_path_factory.mktemp("draft"), fields, seed=1)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Ids:
    with make_llm(folder) as llm:
        return generate(llm)


@pytest.fixture(scope="module")
def split_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a target with a query head for every rank there may be."""
    fields = preset_for_ranks("tiny-qwen3", MOST_RANKS) | {"max_position_embeddings": 1024}
    return make_toy_model(tmp_path_factory.mktemp("split"), fields)


@pytest.fixture(scope="module")
def split_plain(split_folder: Path) -> Ids:
    """Return its ids, of one rank."""
    with make_llm(split_folder) as llm:
        return generate(llm)


def speculating(method: str, folder: Path, other: Path) -> dict[str, Any]:
    """Return the settings of a way to draft."""
    common = {"num_speculative_tokens": 3, "speculative_adaptive": False}
    if method == "ngram":
        return common | {"speculative": "ngram", "ngram_min": 1}
    draft = str(folder if method == "itself" else other)
    return common | {"speculative": "draft", "draft_model": draft}


def make_llm(folder: Path, **settings: Any) -> LLM:
    fixed: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 12}
    pool = {"num_blocks": 64, "prefix_cache": False}
    return LLM(folder, attention_backend="triton", **(fixed | pool | settings))


def generate(llm: LLM) -> Ids:
    """Return the ids of prompts that repeat themselves, so that looking them up is of use."""
    prompts = [[length + place % 7 for place in range(length)] for length in PROMPT_LENS]
    requests: Sequence[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [
        SamplingParams(temperature=heat, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
        for heat in (0.0, 0.5, 0.0) * 3
    ]
    return [o.token_ids for o in llm.generate(requests, params, use_tqdm=False)]


def check_drafts(stats: SchedulerStats, method: str) -> None:
    """Fail unless drafts were verified, and as many were right as the method should have."""
    assert stats.verify_steps > 0
    share = stats.drafts_accepted / stats.drafts_meant
    assert share > 0.85 if method == "itself" else 0 < share < 1  # it is cut at a block's end


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_ids_are_those_of_plain_decoding(
    folder: Path, other: Path, plain: Ids, method: str, enforce_eager: bool
) -> None:
    settings = speculating(method, folder, other) | {"enforce_eager": enforce_eager}
    with make_llm(folder, **settings) as llm:
        assert generate(llm) == plain
        check_drafts(llm.engine.stats, method)
        steps = llm.engine.counters()[0].graph_steps
        has_graphs = any(name.endswith(" x 4") for name in steps)
        assert has_graphs != enforce_eager, steps


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "small",
    [{"max_num_batched_tokens": 48}, {"num_blocks": 8, "max_num_seqs": 8}],
    ids=["chunks", "a small pool"],
)
def test_chunks_and_preemptions_change_nothing(
    folder: Path, other: Path, plain: Ids, method: str, small: dict[str, int]
) -> None:
    with make_llm(folder, **speculating(method, folder, other) | small) as llm:
        assert generate(llm) == plain
        assert (llm.engine.stats.preemptions > 0) == ("num_blocks" in small)


@pytest.mark.parametrize("tp", RANK_COUNTS)
@pytest.mark.parametrize("method", METHODS)
def test_several_ranks_give_the_ids_of_one(
    split_folder: Path, other: Path, split_plain: Ids, method: str, tp: int
) -> None:
    with make_llm(split_folder, tp=tp, **speculating(method, split_folder, other)) as llm:
        assert generate(llm) == split_plain
        check_drafts(llm.engine.stats, method)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_serving_compiles_nothing(
    folder: Path, other: Path, method: str, enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = speculating(method, folder, other) | {"enforce_eager": enforce_eager}
    forget_compiled()
    with make_llm(folder, **settings) as llm:
        compiled: list[str] = []
        monkeypatch.setattr(
            triton.knobs.runtime,
            "jit_post_compile_hook",
            lambda fn, **facts: compiled.append(fn.name),
        )
        generate(llm)
        assert compiled == []


@pytest.mark.parametrize("tp", [1, *RANK_COUNTS])
@pytest.mark.parametrize(
    "settings",
    [
        {"speculative": "ngram", "ngram_min": 1},
        {"speculative": "draft", "draft_model": "tiny-qwen3"},
    ],
    ids=["ngram", "draft"],
)
def test_a_hundred_verify_steps_wait_for_nothing(
    settings: dict[str, Any], tp: int, tmp_path: Path
) -> None:
    sizes = {"max_num_seqs": 4, "num_blocks": 5, "max_model_len": 600, "num_speculative_tokens": 3}
    model = dummy_model(tp, "tiny-qwen3", tmp_path)
    engine, ranks = start_engine(tp, model=model, max_num_batched_tokens=256, **sizes, **settings)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 1},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
        {"temperature": 1.0, "repetition_penalty": 1.2, "logprobs": 1},
    ]
    lengths = [200, 198, 196, 194, *range(100, 250, 10)]  # the first four outgrow a block together
    try:
        for number in range(160):
            if number < 4 or number % 10 == 0:
                params = SamplingParams(max_tokens=90, ignore_eos=True, **kinds[number % 4])
                engine.add_request(list(range(5, 5 + lengths.pop(0))), params)
            engine.step()
        stats = engine.stats
        assert stats.verify_steps > 50
        assert stats.preemptions > 0
        assert stats.num_ended >= 4
        for num_guarded, dispatched in ranks.call_all(REPORT):
            assert num_guarded == NUM_GUARDED
            assert (
                sum(n for kind, n in dispatched.items() if not kind.startswith(("eager", "layers")))
                > 20
            ), dispatched
    finally:
        ranks.close()
