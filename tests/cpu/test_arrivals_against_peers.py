"""scripts/bench_arrivals.py: every side gets the same requests, when they are due, and whole.

Times mean nothing here: a toy on the CPU, and as much of vLLM as the script uses.
"""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanorunner.bench.arrivals import Arrivals, open_loop
from nanorunner.bench.driver import Clock, Request, run_pass
from nanorunner.bench.peer_engines import PunctualVllm
from nanorunner.bench.workloads import WORKLOADS, Workload, ragged
from nanorunner.sampling_params import SamplingParams
from scripts import bench_arrivals

SHORT, WARM_UP = 3, 3 + 3  # requests of the tests' load, and those of the two warm-up passes
TOY = ("--model", "tiny-llama", "--device", "cpu", "--max-model-len", "64", "--rate", "500")


@pytest.fixture(autouse=True)
def a_short_nano(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make "nano" three requests of 2 to 9 ids in and out; keep the environment as it is."""
    for name, value in bench_arrivals.VLLM_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(WORKLOADS, "nano", lambda largest_id: ragged(SHORT, 2, 9, 0, largest_id))


class SmallVllm:
    """vLLM's LLMEngine: a request's ids lie in the queue, one an output, once it is added.

    num_held: nothing comes before so many requests are there.
    """

    def __init__(self, num_held: int = 0, num_missing: int = 0) -> None:
        self.engine_core = SimpleNamespace(outputs_queue=queue.Queue(), shutdown=self.shutdown)
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=16384, async_scheduling=True),
            compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4]),
        )
        self.added: list[tuple[str, list[int], Any]] = []
        self.unfinished: set[str] = set()
        self.num_shutdowns = 0
        self._held: list[Any] = []
        self._num_held, self._num_missing = num_held, num_missing

    def add_request(self, request_id: str, prompt: dict[str, Any], params: Any) -> None:
        self.added.append((request_id, prompt["prompt_token_ids"], params))
        self.unfinished.add(request_id)
        for left in range(params.max_tokens - self._num_missing, 0, -1):
            completion = SimpleNamespace(token_ids=[left], finish_reason="length")
            self._held.append(
                SimpleNamespace(request_id=request_id, outputs=[completion], finished=left == 1)
            )
        while len(self.added) >= self._num_held and self._held:
            self.engine_core.outputs_queue.put(self._held.pop(0))

    def step(self) -> list[Any]:
        output = self.engine_core.outputs_queue.get(timeout=10)
        if output.finished:
            self.unfinished.discard(output.request_id)
        return [output]

    def has_unfinished_requests(self) -> bool:
        return bool(self.unfinished)

    def abort_request(self, request_ids: Sequence[str]) -> None:
        self.unfinished -= set(request_ids)

    def shutdown(self, timeout: float) -> None:
        self.num_shutdowns += 1


def package(engine: SmallVllm, settings: dict[str, Any]) -> Any:
    """Return a package vllm whose LLM has this engine and leaves its arguments in `settings`."""

    def make_llm(**given: Any) -> Any:
        settings.update(given, shape=json.loads(Path(given["model"], "config.json").read_text()))
        return SimpleNamespace(llm_engine=engine)

    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    return SimpleNamespace(
        LLM=make_llm, SamplingParams=SimpleNamespace, sampling_params=kinds, __version__="0.25.0"
    )


def run(capsys: pytest.CaptureFixture[str], side: str, *flags: str) -> dict[str, Any]:
    """Run the script and return its result, which is the last line of stdout."""
    assert bench_arrivals.main([side, *TOY, *flags]) == 0
    printed = capsys.readouterr()
    assert f"nanorunner: {side}: repeat 1 of" in printed.err
    head, *rows, last = printed.out.splitlines()
    result: dict[str, Any] = json.loads(last)
    assert head.split() == list(result["repeats"][0])
    assert len(rows) == len(result["seeds"])
    return result


def test_both_runners_and_vllm_are_given_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, settings = SmallVllm(), dict[str, Any]()
    monkeypatch.setitem(sys.modules, "vllm", package(engine, settings))
    out = tmp_path / "folder" / "result.json"
    flags = ("--num-requests", "7", "--repeats", "2")
    results = {side: run(capsys, side, *flags, "--out", str(out)) for side in ("v1", "v2", "vllm")}
    assert json.loads(out.read_text()) == results["vllm"]
    prompts, lengths = ragged(SHORT, 2, 9, 0, 1002)
    again = [0, 1, 2, 0, 1, 2, 0]  # 7 of a load of 3
    for side, result in results.items():
        assert result["command"].startswith(f"python scripts/bench_arrivals.py {side} --model")
        assert result["versions"]["torch"]
        assert (result["rate_per_s"], result["seeds"]) == (500, [0, 1])
        assert result["workload"]["digest"] == results["v1"]["workload"]["digest"]
        for seed, repeat in enumerate(result["repeats"]):
            assert (repeat["seed"], repeat["finished_requests"]) == (seed, 7)
            assert repeat["output_tokens"] == sum(lengths[index] for index in again)
            due_s = open_loop("poisson", 7, 500, seed).due_s
            assert repeat["offered_per_s"] == pytest.approx(6 / due_s[-1], abs=1e-4)
            assert 0 < repeat["ttft_ms_p50"] <= repeat["ttft_ms_p95"] <= repeat["ttft_ms_p99"]
            assert 0 <= repeat["itl_ms_p50"] <= repeat["itl_ms_p95"] <= repeat["itl_ms_p99"]
            assert repeat["output_tokens_per_s"] > 0
    assert results["v1"]["config"]["runner"] == "v1"
    assert results["v2"]["config"]["max_num_batched_tokens"] == 8192
    measured = engine.added[-7:]
    assert [prompt for _, prompt, _ in measured] == [prompts[index] for index in again]
    assert [params.max_tokens for *_, params in measured] == [lengths[index] for index in again]
    assert {params.seed for *_, params in measured} == {None}
    assert {params.temperature for *_, params in measured} == {0.6}
    assert engine.num_shutdowns == 1


@pytest.mark.parametrize(("flags", "given"), [((), None), (("300",), 300)])
def test_vllm_has_its_own_tokens_of_a_step_unless_they_are_given(
    flags: tuple[str, ...],
    given: int | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, settings = SmallVllm(), dict[str, Any]()
    monkeypatch.setitem(sys.modules, "vllm", package(engine, settings))
    words = [word for value in flags for word in ("--max-num-batched-tokens", value)]
    config = run(capsys, "vllm", "--num-requests", str(SHORT), *words)["config"]
    assert settings.get("max_num_batched_tokens") == given
    assert "compilation_config" not in settings
    assert settings["shape"]["model_type"] == "llama"
    assert len(engine.added) == WARM_UP + SHORT
    shared: dict[str, Any] = {
        "max_num_seqs": 256,
        "max_model_len": 64,
        "gpu_memory_utilization": 0.85,
    }
    shared |= {"enable_prefix_caching": False, "load_format": "dummy"}
    assert {name: settings[name] for name in shared} == shared
    assert {name: config[name] for name in shared} == shared
    assert (config["vllm"], config["model"]) == ("0.25.0", "tiny-llama")
    # what the engine says that it uses, not what it was asked for
    assert (config["max_num_batched_tokens"], config["graph_sizes"]) == (16384, [1, 2, 4])


def test_vllm_gets_a_request_when_it_is_due_also_while_it_has_no_news() -> None:
    engine = SmallVllm(num_held=2)  # a step that waited for news would wait for ever
    punctual = PunctualVllm(SimpleNamespace(llm_engine=engine), package(engine, {}))
    params = SamplingParams(temperature=0.6, max_tokens=2, ignore_eos=True)
    arrivals, clock = Arrivals(kind="trace", due_s=(0.0, 0.02)), Clock(60.0)
    punctual.begin_pass(arrivals, clock)
    record = run_pass(punctual, [Request([1], params)] * 2, arrivals, clock, 60.0)
    assert [request.token_ids for request in record.requests] == [[2, 1], [2, 1]]
    assert record.requests[1].handover_s >= 0.02
    assert not punctual.has_unfinished()


@pytest.mark.parametrize(
    ("engine", "flags", "words"),
    [
        (
            SmallVllm(num_missing=1),
            ("--num-requests", "3"),
            "vllm: request 0 of 3: {} ids came out, {} were asked for; it ended with 'length'",
        ),
        (
            SmallVllm(num_held=100),
            ("--num-requests", "3", "--time-limit", "0.2"),
            "vllm: 0 of 3 requests have ended after",
        ),
    ],
    ids=["short", "late"],
)
def test_a_pass_that_is_not_whole_is_no_result(
    engine: SmallVllm,
    flags: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", package(engine, {}))
    assert bench_arrivals.main(["vllm", *TOY, *flags]) == 1
    printed = capsys.readouterr()
    first = ragged(SHORT, 2, 9, 0, 1002).output_lens[0]
    assert words.format(first - 1, first) in printed.err
    assert printed.out == ""
    assert engine.num_shutdowns == 1
    assert not engine.has_unfinished_requests()


def test_our_engine_is_held_to_the_time_limit_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Workload([[1, 2]], [50])
    monkeypatch.setitem(WORKLOADS, "nano", lambda largest_id: load)
    flags = ("--num-requests", "2", "--time-limit", "0.000001")
    assert bench_arrivals.main(["v2", *TOY, *flags]) == 1
    assert "nanorunner: v2: 0 of 2 requests have ended after" in capsys.readouterr().err


def test_a_peer_that_is_not_there_and_wrong_flags_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # what import takes for "not installed"
    assert bench_arrivals.main(["vllm", *TOY]) == 2
    assert "vllm" in capsys.readouterr().err
    for words in (["v3", "--rate", "1"], ["v2"], ["v2", "--rate", "0"], ["v2", *TOY, "--rpeats"]):
        with pytest.raises(SystemExit) as refused:
            bench_arrivals.main(words)
        assert refused.value.code == 2
    assert "did you mean --repeats?" in capsys.readouterr().err
