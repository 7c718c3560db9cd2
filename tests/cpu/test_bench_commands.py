"""`bench latency | throughput | load` on a toy: what they print and write, count and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanorunner.bench.cli import COMMANDS, main, parser_of
from nanorunner.bench.metrics import METRICS
from nanorunner.cli import main as nanorunner

TOY = ["--model", "tiny-qwen3", "--load-format", "dummy", "--device", "cpu", "--quiet"]
TOY += ["--max-num-seqs", "8", "--runner", "v2"]
SMALL = ["--workload", "fixed", "--num-requests", "6", "--input-len", "9", "--output-len", "4"]


def measure(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """Run a command in this process; return the JSON of its last line."""
    found = main([*words, *TOY])
    printed = capsys.readouterr()
    assert found == code, printed.err
    return json.loads(printed.out.splitlines()[-1])


def test_load_keeps_every_request_of_a_burst_and_says_what_it_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "folder" / "load.json"
    flags = ["--rate", "200", "--burstiness", "0.2", "--slo", "ttft=1e6,itl=1e6", "--repeat", "2"]
    flags += ["--num-requests", "30", "--length-scale", "0.05", "--keep-ids"]
    result = measure(capsys, "load", *flags, "--out", str(out))
    written = json.loads(out.read_text())
    ids = written.pop("output_ids")
    assert written == result
    assert list(out.parent.iterdir()) == [out]  # no draft is left

    workload, counters = result["workload"], result["counters"]
    assert (workload["name"], workload["requests"]) == ("sharegpt", 30)
    assert workload["arrivals"]["kind"] == "burst"
    assert workload["sampling"]["temperature"] == 0.0
    assert sum(map(len, ids)) == workload["output_tokens"]
    assert (counters["requests"], counters["finished"], counters["failed"]) == (60, 60, 0)
    assert counters["input_tokens"] == 2 * workload["input_tokens"]
    assert counters["output_tokens"] == 2 * workload["output_tokens"]
    # the warm-up pass is in no count: each of 2 x 30 requests was admitted once
    assert counters["scheduler"]["admissions"] == 60
    assert counters["scheduler"]["prefill_tokens"] == counters["input_tokens"]

    assert len(result["repeats"]) == result["metrics"]["ttft_ms_p50"]["repeats"] == 2
    for name, values in result["metrics"].items():
        assert values["unit"] == METRICS[name].unit
        assert values["min"] <= values["median"] <= values["max"]
    for repeat in result["repeats"]:
        # every request meets such limits
        assert repeat["goodput_requests_per_s"] == repeat["requests_per_s"]
        assert repeat["duration_s"] == pytest.approx(30 / repeat["requests_per_s"])
        assert repeat["ttft_ms_p50"] <= repeat["e2e_ms_p50"]
    assert result["metrics"]["ttft_ms_p50"]["samples"] == 30
    assert result["metrics"]["itl_ms_p50"]["samples"] == workload["output_tokens"] - 30
    assert result["config"]["prefix_cache"] is False
    assert result["config"]["runner"] == "v2"
    assert result["machine"]["versions"]["torch"]
    assert result["slo"] == {"ttft_ms": 1e6, "itl_ms": 1e6}
    assert result["outputs"]["equal"]
    assert result["command"].startswith("python -m nanorunner bench load --rate 200")


def test_the_ids_are_the_engines_own_and_the_same_in_both_runners(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = []
    for runner in ("v1", "v2"):
        out = tmp_path / f"{runner}.json"
        flags = [*SMALL, "--repeat", "1", "--warm-up", "0", "--keep-ids", "--out", str(out)]
        assert main(["throughput", *flags, *TOY, "--runner", runner]) == 0
        found.append(json.loads(out.read_text()))
    capsys.readouterr()
    v1, v2 = found
    assert [len(ids) for ids in v1["output_ids"]] == [4] * 6
    assert v1["output_ids"] == v2["output_ids"]
    assert v1["outputs"]["digests"] == v2["outputs"]["digests"]
    assert v1["workload"] == v2["workload"]
    assert v1["warm_up"] == {"passes": 0, "seconds": []}


def test_a_repeat_is_not_served_from_the_cache_that_the_last_one_filled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--batch", "2", "--input-len", "300", "--output-len", "2", "--prefix-cache"]
    result = measure(capsys, "latency", *flags, "--repeat", "2")
    assert result["config"]["prefix_cache"] is True
    assert result["counters"]["scheduler"]["cached_tokens"] == 0
    assert result["counters"]["prefix_hit_share"] == 0
    assert result["metrics"]["requests_per_s"]["samples"] == 2


def test_a_trace_with_ids_is_replayed_and_its_silence_skipped(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp_s": 7, "prompt_token_ids": [1, 2, 3], "output_len": 2},
        {"timestamp_s": 3607, "prompt_token_ids": [4], "output_len": 1},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--replay", str(path), "--max-idle", "0", "--repeat", "1", "--warm-up", "0"]
    result = measure(capsys, "load", *flags)
    assert result["workload"]["source"] == "trace.jsonl"
    assert result["counters"]["input_tokens"] == 4
    assert 3600 < result["metrics"]["duration_s"]["median"] < 3700
    assert 3500 < result["counters"]["skipped_idle_s"] <= 3600
    assert result["metrics"]["e2e_ms_p99"]["median"] < 60_000  # the silence is nobody's wait


def test_a_request_that_the_engine_ends_early_is_a_failure_that_counts_in_no_figure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # two blocks of 256 tokens: a request of 600 outgrows them half-way
    flags = ["--input-len", "500", "--output-len", "100", "--num-blocks", "2"]
    result = measure(capsys, "latency", *flags, "--repeat", "1", "--warm-up", "0", code=1)
    assert (result["counters"]["finished"], result["counters"]["failed"]) == (0, 1)
    assert result["metrics"]["requests_per_s"]["median"] == 0
    assert "ttft_ms_p50" not in result["metrics"]
    assert "error: the next token needs 3 KV blocks" in result["errors"][0]


def test_a_file_that_cannot_be_written_at_the_end_loses_no_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    words = ["latency", "--input-len", "3", "--output-len", "2", "--repeat", "1", "--warm-up", "0"]
    assert main([*words, *TOY, "--out", str(tmp_path / "x.json")]) == 1
    printed = capsys.readouterr()
    assert "No space left" in printed.err
    assert json.loads(printed.out.splitlines()[-1])["metrics"]["duration_s"]["median"] > 0


def test_steps_that_were_not_recorded_are_a_gap_and_lose_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise ValueError("no step was recorded")

    monkeypatch.setattr("nanorunner.bench.session.measured_steps", fail)
    flags = ["--input-len", "3", "--output-len", "2", "--repeat", "1", "--warm-up", "0"]
    result = measure(capsys, "latency", *flags, "--step-times")
    assert result["counters"]["not_counted"] == {"step times": "no step was recorded"}
    assert "steps" not in result


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["lod"], "unknown bench command 'lod'; did you mean load?"),
        (["load"], "say how requests arrive"),
        (
            ["load", "--rate", "4", "--concurrency", "2"],
            "--rate: means nothing for arrivals closed",
        ),
        (["load", "--arrivals", "burst", "--rate", "4"], "needs --burstiness"),
        (["load", "--arrivals", "posson"], "did you mean poisson?"),
        (["load", "--rate", "4", "--slo", "tpto=3"], "did you mean tpot?"),
        (["throughput", "--workload", "shargpt"], "did you mean sharegpt?"),
        (["throughput", "--workload", "b8", "--input-len", "3"], "--input-len: means nothing"),
        (["throughput", "--workload", "long"], "its longest request has 8704 tokens"),
        (["throughput", "--prompts", "none.jsonl"], "No such file"),
        (["latency", "--repeats", "3"], "unknown flag --repeats; did you mean --repeat?"),
        (["latency", "--runner", "v1", "--logprobs", "2"], "logprobs"),
        (["latency", "spam"], "unexpected 'spam'"),
        (["latency", "--out", f"{__file__}/x.json"], "x.json: cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line_before_a_start(
    words: list[str], refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = TOY[:-2] if "--runner" in words else TOY
    try:
        code = main([*words, *toy] if words[0] in COMMANDS else words)
    except SystemExit as error:
        code = int(str(error.code))
    printed = capsys.readouterr()
    assert code == 2
    assert refusal in printed.err
    assert printed.out == ""


def test_definitions_and_help_need_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert nanorunner(["bench", "--definitions"]) == 0
    text = capsys.readouterr().out
    assert "goodput_requests_per_s, requests/s: " in text
    with pytest.raises(SystemExit, match="0"):
        nanorunner(["bench", "load", "--definitions"])
    assert capsys.readouterr().out == text
    assert nanorunner(["bench"]) == 0
    overview = capsys.readouterr().out
    assert all(name in overview for name in COMMANDS)
    assert "--burstiness" in parser_of("load").long_flags()
