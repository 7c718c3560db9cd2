"""Ranks that share one GPU give one rank's ids, with --check-ranks too, and none is left behind."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import gloo_runner
import pytest
import torch
from rank_harness import make_config, state

from nanorunner import LLM, SamplingParams
from nanorunner.errors import RankDied
from nanorunner.launch import Ranks
from nanorunner.presets import load_preset
from nanorunner.toy_model import make_toy_model
from nanorunner.workers.rank_agreement import RankCheckFailed
from nanorunner.workshop.fault_lab import lab_config
from nanorunner.workshop.open_engine import start_engine

pytestmark = pytest.mark.limit(300)

DETECTION_S = 5.0
NUM_IDS = 12
PROMPT_LENS = [1, 5, 40, 255, 256, 300]

Ids = list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ids]:
    """Return the folder of a tiny random model in float32, and prompts for it."""
    fields = load_preset("tiny-qwen3") | {"dtype": "float32", "max_position_embeddings": 1024}
    folder = make_toy_model(tmp_path_factory.mktemp("model"), fields)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, fields["vocab_size"], (length,), generator=generator).tolist()
        for length in PROMPT_LENS
    ]
    return folder, prompts


def generate(model: tuple[Path, Ids], **settings: Any) -> Ids:
    folder, prompts = model
    given: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "skip_tokenizer_init": True}
    params = SamplingParams(temperature=0, max_tokens=NUM_IDS, ignore_eos=True)
    with LLM(folder, **(given | {"kv_cache_gib": 0.25} | settings)) as llm:
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [output.token_ids for output in llm.generate(requests, params, use_tqdm=False)]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_two_ranks_on_one_gpu_give_the_ids_of_one(
    model: tuple[Path, Ids], runner: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = generate(model, runner=runner)
    with caplog.at_level(logging.INFO, "nanorunner"):
        assert generate(model, runner=runner, tp=2, share_gpu=True) == expected
    log = "\n".join(record.getMessage() for record in caplog.records)
    assert "--share-gpu: all 2 ranks work on GPU 0" in log
    assert "all-reduce gloo, through host memory" in log
    assert "CUDA graphs off: --share-gpu" in log


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_ranks_agree_in_every_step(model: tuple[Path, Ids], runner: str) -> None:
    """All of the decode's roads on a GPU: few rows folded, and prompts packed."""
    checked = generate(model, runner=runner, tp=3, share_gpu=True, check_ranks=True)
    assert checked == generate(model, runner=runner)


def test_more_ranks_than_gpus_stay_refused(model: tuple[Path, Ids]) -> None:
    with pytest.raises(ValueError, match=r"one is needed for each rank.*--share-gpu"):
        LLM(model[0], tp=torch.cuda.device_count() + 1, skip_tokenizer_init=True)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_rank_that_drifts_on_the_gpu_is_named(
    runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANT", "final 4")
    config = lab_config(
        2,
        runner=runner,
        async_depth=1 if runner == "v1" else 2,
        device="cuda",
        attention_backend="triton",
        share_gpu=True,
        check_ranks=True,
    )
    with start_engine(config, runner="planted_runner:make_runner") as opened:
        engine = opened.engine
        params = SamplingParams(temperature=0, max_tokens=NUM_IDS, ignore_eos=True)
        engine.add_request(list(range(3, 20)), params)

        def run() -> None:
            while engine.has_unfinished():
                engine.step()

        with pytest.raises(RankCheckFailed, match=r"the final norm: rank 0 holds"):
            run()


def test_a_killed_rank_frees_rank_0() -> None:
    ranks = Ranks(
        make_config(2, device="cuda", share_gpu=True),
        "gloo_runner:make_runner",
        methods=gloo_runner.METHODS,
        methods_with_reply=gloo_runner.WITH_REPLY,
    )
    try:
        assert [ranks.call("meet", 1 << 20) for _ in range(20)] == [3.0] * 20
        pid = ranks.call_all("pid")[1]
        threading.Timer(0.5, os.kill, [pid, signal.SIGKILL]).start()
        start = time.monotonic()
        with pytest.raises(RankDied, match=r"rank 1 .* was killed by SIGKILL"):
            ranks.call("meet_late", 1, 600.0)
        assert time.monotonic() - start < 0.5 + DETECTION_S
    finally:
        ranks.close()
    assert state(pid) == ""
