"""--check-ranks in a running engine: no other ids, a clean stop, and wrong weights at the start."""

from __future__ import annotations

import json

import pytest
from planted_runner import LAYER, VICTIM

from nanorunner.cli import main
from nanorunner.sampling_params import SamplingParams
from nanorunner.workers.messages import RunnerConfig
from nanorunner.workers.rank_agreement import RankCheckFailed
from nanorunner.workshop.fault_lab import lab_config
from nanorunner.workshop.open_engine import OpenEngine, start_engine

NUM_IDS = 6
PROMPT = list(range(3, 20))
PLANTED = "planted_runner:make_runner"


def generate(opened: OpenEngine) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_IDS, ignore_eos=True)
    opened.engine.add_request(PROMPT, params)
    ids: list[int] = []
    while opened.engine.has_unfinished():
        for update in opened.engine.step():
            ids += update.new_ids
    return ids


def config_of(tp: int, runner: str, *, check_ranks: bool = True) -> RunnerConfig:
    depth = 1 if runner == "v1" else 2
    return lab_config(tp, check_ranks=check_ranks, runner=runner, async_depth=depth)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_an_engine_gives_the_same_ids_and_stops_when_a_rank_drifts(
    runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_engine(config_of(1, runner, check_ranks=False)) as alone:
        expected = generate(alone)
    monkeypatch.setenv("PLANT", f"drift {NUM_IDS + 2}")  # in the second request's second step
    with start_engine(config_of(2, runner), runner=PLANTED) as opened:
        assert generate(opened) == expected
        with pytest.raises(RankCheckFailed) as caught:
            generate(opened)
    text = str(caught.value)
    assert text.startswith("step ")
    assert f"after the all-reduce of layers.{LAYER}.o: its norm: rank 0 holds" in text


def test_a_wrong_shard_ends_the_start_by_its_rank_layer_and_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PLANT", "shard")
    with pytest.raises(RankCheckFailed) as caught:
        start_engine(config_of(2, "v2"), runner=PLANTED)
    text = str(caught.value)
    name = f"rank {VICTIM}, layers.{LAYER}.qkv: "
    assert name in text
    for tensor in ("k_proj.weight", "v_proj.weight"):
        assert f"model.layers.{LAYER}.self_attn.{tensor} (rows 32..63, columns 0..63)" in text
    assert "q_proj" not in text


def test_the_flag_works_in_bench_and_stands_in_its_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "bench latency --model tiny-qwen3 --load-format dummy --tp 2 --check-ranks --repeat 1"
    sizes = "--warm-up 0 --input-len 8 --output-len 4 --max-model-len 64 --max-num-seqs 4"
    assert main([*words.split(), *sizes.split()]) == 0
    output = capsys.readouterr().out
    assert "--check-ranks: the ranks compare their values; not for comparison" in output
    assert json.loads(output.splitlines()[-1])["config"]["check_ranks"] is True
