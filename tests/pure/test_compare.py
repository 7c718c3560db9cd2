"""A comparison says no more than its rounds show, and names whatever forbids a conclusion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_stub import result as stub_result

from nanorunner.bench.cli import main
from nanorunner.bench.compare import Rounds, conclude, flags_of_all, measure
from nanorunner.bench.sides import parse_sides
from nanorunner.bench.verdicts import absent, agreement, differences, fell_back, ratios, unfair

STUB = Path(__file__).parent / "sweep_stub.py"
IDS = st.lists(st.integers(0, 2), max_size=5)


def result(value: float, tpot_ms: float = 1.0, **config: Any) -> dict[str, Any]:
    """Return a result with a rate, a latency and what a verdict looks at."""
    values = {"output_tokens_per_s": value, "tpot_ms_p50": tpot_ms}
    return {
        **stub_result(value),
        "repeats": [values],
        "samples": [dict.fromkeys(values, 1)],
        "metrics": {name: {"median": each} for name, each in values.items()},
        "config": {
            "runner": "v1",
            "device": "cuda",
            "dtype": "float32",
            "load_format": "safetensors",
            "enforce_eager": False,
            "graph_sizes": [1, 2, 4],
            **config,
        },
        "counters": {
            "scheduler": {"steps": 100, "mixed_steps": 8, "prefill_steps": 2},
            "graphs": {"dispatched": {"plain 4": 90, "eager": 10}},
        },
        "workload": {"digest": "same", "sampling": {"temperature": 0.0}},
        "output_ids": [[1, 2, 3], [4, 5, 6]],
    }


def test_a_planted_slow_down_is_found_and_noise_is_not() -> None:
    noise = (1.0, 1.02, 0.99, 1.01, 0.98, 1.0)
    first = [result(100 * each, 5 * each) for each in noise]
    slower = [result(100 / 1.2 * each, 5 * 1.2 * each) for each in reversed(noise)]
    found = ratios(first, slower)
    assert found["output_tokens_per_s"].verdict == "worse"
    assert found["output_tokens_per_s"].median == pytest.approx(1 / 1.2, rel=0.05)
    assert found["tpot_ms_p50"].verdict == "worse"  # a latency: more is worse
    assert ratios(slower, first)["tpot_ms_p50"].verdict == "better"
    same = [result(100 * each) for each in (1.02, 0.99, 1.0, 1.0, 1.0, 0.99)]
    assert ratios(first, same)["output_tokens_per_s"].verdict == "no clear difference"
    # of three rounds all lie on one side in a quarter of the comparisons of equals
    few = ratios(first[:3], slower[:3])
    assert few["output_tokens_per_s"].verdict == "lower in all 3 rounds"
    assert few["tpot_ms_p50"].verdict == "higher in all 3 rounds"
    alone = ratios(first[:1], slower[:1])["output_tokens_per_s"]
    assert alone.verdict == "one round"  # which shows no spread


@given(a=st.lists(IDS, max_size=4), data=st.data())
def test_agreement_counts_what_is_equal_up_to_the_first_difference(
    a: list[list[int]], data: st.DataObject
) -> None:
    b = [data.draw(st.one_of(st.just(row), IDS)) for row in a]
    found = agreement(a, b)
    assert found.equal_requests == sum(x == y for x, y in zip(a, b, strict=True))
    assert found.share == (found.equal_requests / len(a) if a else 1.0)
    assert agreement(a, a).tokens_before_a_difference == sum(map(len, a))
    for index, place in found.first_differences:
        assert a[index][:place] == b[index][:place]
        assert a[index][place : place + 1] != b[index][place : place + 1]
    assert found.tokens_before_a_difference <= found.tokens


def test_a_fall_back_is_named() -> None:
    good = result(1.0)
    asked = {"runner": "v1", "dtype": "float32", "attention_backend": "auto", "tp": None}
    assert fell_back(good, asked) == []
    assert fell_back(good, {"runner": "v2"}) == ["runner: asked for v2, ran with v1"]
    good["counters"]["graphs"]["dispatched"] = {"plain 4": 60, "eager": 40}
    assert fell_back(good, asked) == ["30 of 90 decode steps ran eager"]
    good["counters"]["graphs"]["dispatched"] = {"plain 4": 60, "layers 64": 10, "eager": 30}
    assert fell_back(good, asked) == ["30 of 90 decode steps ran eager"], "layers serve prompts"
    assert fell_back(result(1.0, graph_sizes=[]), asked) == ["no CUDA graphs were captured"]
    assert fell_back(result(1.0, graph_sizes=[], enforce_eager=True), asked) == []
    assert fell_back(result(1.0, graph_sizes=[], device="cpu"), asked) == []


def test_differences_are_listed_and_only_decisive_ones_are_unfair() -> None:
    results = {
        "v1": [result(1.0, async_depth=1, max_num_seqs=8)],
        "v2": [result(1.0, async_depth=2, max_num_seqs=16)],
    }
    found = differences(results)
    assert found == {
        "async_depth": {"v1": 1, "v2": 2},
        "max_num_seqs": {"v1": 8, "v2": 16},
    }
    assert unfair(found, []) == ["max_num_seqs"]
    assert unfair(found, ["max_num_seqs"]) == []  # the person asked for it
    results["v2"][0]["workload"]["digest"] = "other"
    assert unfair(differences(results), ["max_num_seqs"]) == ["workload"]
    del results["v2"][0]["config"]["max_num_seqs"]  # as a peer that has no such setting
    assert set(differences(results)) == {"async_depth", "workload"}
    assert absent(results) == {"v2": ["max_num_seqs"]}


def test_a_conclusion_needs_equal_ids_in_float32_and_prints_the_share_in_16_bits() -> None:
    sides = parse_sides(["v1", "v2"])

    def compare(dtype: str, least: float | None) -> dict[str, Any]:
        ours, theirs = result(1.0, dtype=dtype), result(1.0, dtype=dtype, runner="v2")
        theirs["output_ids"] = [[1, 2, 3], [4, 0, 6]]
        rounds = {"v1": ([ours], ""), "v2": ([theirs], "")}
        return conclude(sides, {k: Rounds(*v) for k, v in rounds.items()}, {}, least)

    strict = compare("float32", None)
    assert strict["agreement"]["v2"]["share"] == 0.5
    assert "ids of 1 of 2 requests" in strict["problems"][0]
    loose = compare("bfloat16", None)
    assert loose["agreement"]["v2"]["share"] == 0.5
    assert loose["problems"] == []
    assert compare("bfloat16", 0.6)["problems"]
    assert all("output_ids" not in side["result"] for side in loose["sides"])


def test_every_round_is_looked_at_not_the_first_alone() -> None:
    sides = parse_sides(["v1", "v2"])
    ours = [result(1.0), result(1.0)]
    theirs = [result(1.0, runner="v2"), result(1.0, runner="v2", max_num_seqs=4)]
    theirs[1]["output_ids"] = [[1, 2, 3], [4, 0, 6]]
    theirs[1]["counters"]["graphs"]["dispatched"] = {"plain 4": 60, "eager": 40}
    for its, number in ((ours, 8), (theirs, 8)):
        its[0]["config"]["max_num_seqs"] = number
    ours[1]["config"]["max_num_seqs"] = 8
    measured = {"v1": Rounds(ours, ""), "v2": Rounds(theirs, "")}
    found = conclude(sides, measured, {}, None)
    assert found["differences"]["max_num_seqs"] == {"v1": 8, "v2": {"by_round": [8, 4]}}
    assert (found["agreement"]["v2"]["share"], found["agreement"]["v2"]["round"]) == (0.5, 2)
    assert found["problems"] == [
        "v2 fell back in round 2: 30 of 90 decode steps ran eager",
        "not the same on all sides: max_num_seqs",
        "v2: the ids of 1 of 2 requests are the first side's in round 2; at least 100% must be",
    ]


def test_one_side_is_no_comparison(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["compare", "v1", "vllm", "hf"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "nanorunner: compare v1 vllm hf: only v1 can run here (vllm is not installed, "
        "transformers is not installed); install it, or name another side\n"
    )


def test_a_side_that_fails_is_a_problem_and_the_others_go_on(tmp_path: Path) -> None:
    sides = parse_sides(["v1", "v2"])

    def command(side: Any, out: Path) -> list[str]:
        mode = "fail" if side.label == "v2" else "good"
        return ["python", str(STUB), "--mode", mode, "--out", str(out)]

    measured = measure(sides, command, rounds=2, timeout_s=100)
    assert [len(measured[name].results) for name in ("v1", "v2")] == [2, 0]
    assert measured["v1"].problem == ""
    assert measured["v2"].problem.splitlines()[0] == "v2: exit code 3"
    assert "ValueError: planted" in measured["v2"].problem


REFUSED = [
    (["v1"], "name two sides"),
    (["v1", "v3"], "side 'v3'; use one of hf, v1, v2, vllm"),
    (["v1", "v1"], "side 'v1': given twice"),
    (["vllm", "v1"], "side 'vllm': the first one"),
    (["v1", "hf:tp=2"], "a peer has no settings"),
    (["v1", "v2:async_depth"], "write v2:SETTING=VALUE"),
    (["v1", "v2:runner=v1"], "the side is the runner"),
    (["v1", "v2:async_dept=1"], "unknown setting 'async_dept'"),
    (["v1", "v2", "--runner", "v2"], "--runner v2: name the runners as sides"),
    (["v1:async_depth=2", "v2"], "async_depth 2"),
    (["v1", "v2", "--trace", "x"], "trace x: every process would write there"),
    (["v1", "v2", "--out", f"{__file__}/x.json"], "x.json: cannot be written: File exists"),
    (["v1", "v2", "--out", str(STUB.parent)], "is a folder"),
    (["v1", "vllm", "--min-p", "0.1"], "--min-p 0.1: side vllm is not given it"),
    (["v1", "hf", "--repetition-penalty", "1.1"], "--repetition-penalty 1.1: side hf"),
    (["v1", "hf", "--presence-penalty", "1"], "--presence-penalty 1.0: side hf"),
    (["v1", "hf", "--frequency-penalty", "1"], "--frequency-penalty 1.0: side hf"),
    (["v1", "hf", "--logprobs", "1"], "--logprobs 1: side hf"),
]


@pytest.mark.parametrize(("words", "reason"), REFUSED)
def test_a_comparison_that_cannot_be_made_is_refused_first(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *words]) == 2
    assert reason in capsys.readouterr().err


def test_every_side_gets_the_same_flags() -> None:
    argv = "v1 v2:async_depth=1 hf --tp 2 --rounds 4 --out x.json --repeat 2 -q --seed 3"
    flags = flags_of_all(argv.split(), 3)
    assert flags == ["--tp", "2", "--repeat", "2", "--seed", "3"]
    known = ["--tp", "--repeat", "--seed", "--async-depth"]
    commands = [
        " ".join(side.command(flags, known, Path("out"))) for side in parse_sides(argv.split()[:3])
    ]
    ending = "--keep-ids --quiet --out out"
    start = "python -m nanorunner bench throughput --runner"
    assert commands == [
        f"{start} v1 {' '.join(flags)} {ending}",
        f"{start} v2 {' '.join(flags)} --async-depth 1 {ending}",
        f"python -m nanorunner.bench.peer hf {' '.join(flags)} {ending}",
    ]
    with pytest.raises(ValueError, match="name the sides first"):
        flags_of_all(["--tp", "2", "v1", "v2"], 2)
