"""Both runners and a peer do the same work in a comparison, and their greedy ids are the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanorunner.bench.arrivals import all_at_once
from nanorunner.bench.cli import main, parser_of
from nanorunner.bench.driver import Clock, PassRecord, Request, run_pass
from nanorunner.bench.job import set_job
from nanorunner.bench.measuring_flags import sampling_params
from nanorunner.bench.peer import measure
from nanorunner.bench.peer_engines import HfEngine, VllmEngine, vllm_settings
from nanorunner.bench.result_files import read_folder
from nanorunner.config import make_config
from nanorunner.llm import LLM
from nanorunner.presets import load_preset
from nanorunner.resolve import resolve
from nanorunner.sampling_params import SamplingParams
from nanorunner.toy_model import make_toy_model

FLAGS = "--device cpu --max-num-seqs 4 --max-model-len 64 --workload sharegpt --num-requests 3"


def test_two_runners_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "compare.json"
    flags = f"--model tiny-qwen3 --load-format dummy {FLAGS} --length-scale 0.02 --rounds 1"
    words = ["compare", "v1", "v2", *flags.split(), "--repeat", "2", "--out", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "outputs of v2: 3 of 3 requests have the ids of v1 (100.0%)" in printed.out
    summary = json.loads(printed.out.splitlines()[-1])
    assert summary["differences"]["async_depth"] == {"v1": 1, "v2": 2}
    assert summary["ratios"]["v2"]["output_tokens_per_s"]["median"] > 0
    assert summary["problems"] == []
    records = read_folder(tmp_path).records
    assert [record.settings["side"] for record in records] == ["v1", "v2"]
    assert all(len(each.metrics["output_tokens_per_s"].values) == 2 for each in records)


def test_transformers_makes_the_ids_of_nanorunner_also_from_padded_batches(tmp_path: Path) -> None:
    folder = make_toy_model(tmp_path / "toy", load_preset("tiny-qwen3"))
    settings: dict[str, Any] = {"device": "cpu", "max_num_seqs": 2, "skip_tokenizer_init": True}
    resolved = resolve(make_config({"model": str(folder), **settings}))
    args = parser_of("throughput").parse(
        [*FLAGS.split(), "--length-scale", "0.04", "--repeat", "1", "--warm-up", "0"]
    )
    job = set_job(args, resolved)
    assert len({len(prompt) for prompt in job.workload.prompts}) == 3  # so something is padded
    # what a model's file asks generate() for is not what our side was asked for
    (folder / "generation_config.json").write_text('{"repetition_penalty": 9.0, "eos_token_id": 1}')
    engine = HfEngine(resolved, str(folder))  # batches of 2: one of two, one of one
    result = measure(engine.serve, job, resolved, args)
    with LLM(str(folder), **settings) as llm:
        requests = job.requests(sampling_params(args), 0)
        outputs = llm.generate(
            [{"prompt_token_ids": request.prompt_ids} for request in requests],
            [request.params for request in requests],
            use_tqdm=False,
        )
    assert result["output_ids"] == [output.token_ids for output in outputs]
    metrics = result["repeats"][0]
    assert 0 < metrics["ttft_ms_p50"] <= metrics["e2e_ms_p50"] <= metrics["duration_s"] * 1000
    assert result["workload"]["digest"] == job.describe(sampling_params(args))["digest"]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_peer_with_a_prefix_cache_gets_new_ids_each_pass_as_our_sides_do(
    prefix_cache: bool,
) -> None:
    toy = {"model": "tiny-qwen3", "load_format": "dummy", "device": "cpu"}
    resolved = resolve(make_config({**toy, "prefix_cache": prefix_cache}))
    words = "--workload fixed --num-requests 2 --input-len 5 --output-len 1 --repeat 2 --warm-up 1"
    args = parser_of("throughput").parse(words.split())
    job = set_job(args, resolved)
    _, engine = make_vllm()
    passes: list[list[list[int]]] = []

    def serve(requests: Sequence[Request], time_limit_s: float) -> PassRecord:
        passes.append([request.prompt_ids for request in requests])
        return run_pass(engine, requests, all_at_once(2), Clock(0.0), time_limit_s)

    measure(serve, job, resolved, args)
    params = sampling_params(args)
    numbers = (0, 1, 2) if prefix_cache else (0, 0, 0)
    assert passes == [[r.prompt_ids for r in job.requests(params, number)] for number in numbers]
    assert (passes[0] == passes[1]) is not prefix_cache


class SmallVllm:
    """As much of vLLM's engine as ours uses; a request's ids count on from its prompt's last."""

    def __init__(self) -> None:
        self.running: dict[str, list[int]] = {}
        self.left: dict[str, int] = {}
        self.seen: list[SimpleNamespace] = []

    def add_request(self, request_id: str, prompt: dict[str, Any], params: Any) -> None:
        self.running[request_id] = list(prompt["prompt_token_ids"])
        self.left[request_id] = params.max_tokens
        self.seen.append(params)

    def step(self) -> list[SimpleNamespace]:
        outputs = []
        for request_id, ids in list(self.running.items()):
            ids.append(ids[-1] + 1)
            self.left[request_id] -= 1
            is_done = self.left[request_id] == 0
            if is_done:
                del self.running[request_id]
            reason = "length" if is_done else None
            completion = SimpleNamespace(token_ids=[ids[-1]], finish_reason=reason)
            outputs.append(
                SimpleNamespace(request_id=request_id, outputs=[completion], finished=is_done)
            )
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def abort_request(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            del self.running[request_id]


def make_vllm() -> tuple[SmallVllm, VllmEngine]:
    small = SmallVllm()
    kinds = SimpleNamespace(DELTA="delta")
    package = SimpleNamespace(
        SamplingParams=SimpleNamespace, sampling_params=SimpleNamespace(RequestOutputKind=kinds)
    )
    return small, VllmEngine(SimpleNamespace(llm_engine=small), package)


def test_vllm_is_driven_as_our_engine_is() -> None:
    small, engine = make_vllm()
    requests = [
        Request(
            [first],
            SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, seed=7),
        )
        for first, length, temperature in ((10, 3, 0.0), (20, 1, 0.6), (30, 2, 0.6))
    ]
    for _ in range(2):  # ids of requests go on: a second pass is not the first one's
        record = run_pass(engine, requests, all_at_once(3), Clock(0.0), 100.0)
        assert [each.token_ids for each in record.requests] == [[11, 12, 13], [21], [31, 32]]
        assert all(each.finish_reason == "length" for each in record.requests)
    assert {params.seed for params in small.seen} == {None}, "such rows take its slower sampler"
    assert {params.detokenize for params in small.seen} == {False}
    engine.add_request([1], requests[0].params)
    engine.abort_all()
    assert not engine.has_unfinished()


def test_vllm_gets_what_our_settings_mean() -> None:
    resolved = resolve(
        make_config({"model": "tiny-qwen3", "load_format": "dummy", "max_num_seqs": 3})
    )
    settings = vllm_settings(resolved, "/folder", 99)
    assert settings["load_format"] == "dummy"
    assert settings["max_num_seqs"] == 3
    assert settings["max_model_len"] == 99
    assert settings["enable_prefix_caching"] is True
    assert settings["compilation_config"] == {"cudagraph_capture_sizes": [1, 2, 3]}
