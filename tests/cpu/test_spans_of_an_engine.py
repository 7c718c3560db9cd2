"""The spans of whole engines on the toy: nested, named, complete; none where none are wanted."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from nanorunner import LLM, SamplingParams
from nanorunner.bench.cli import main as bench
from nanorunner.cli import main as nanorunner
from nanorunner.step_times import step_times, whole_steps
from nanorunner.workers.rank_counters import RankCounters
from nanorunner.workers.spans import (
    ACK,
    ALL_REDUCE,
    CPU,
    EXCHANGE,
    FORWARD,
    MEANINGS,
    NAMES,
    RECEIVE,
    RUN,
    SAMPLE,
    SCHEDULE,
    SEND,
    UPDATE,
    WIRE,
    RankSpans,
    SpanTable,
)
from nanorunner.workers.trace_file import file_name

TOY: dict[str, Any] = {
    "model": "tiny-qwen3",
    "load_format": "dummy",
    "device": "cpu",
    "num_blocks": 16,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "prefix_cache": False,
}
NUM_LAYERS = 3
WORDS = ["--model", "tiny-qwen3", "--load-format", "dummy", "--device", "cpu", "--runner", "v2"]
START_METHODS = 5  # load_model, profile, allocate_kv, capture, and spans: are the clocks one?


class Run(NamedTuple):
    """What an engine said before it was closed, and where its trace is."""

    tp: int
    num_steps: int
    spans: list[RankSpans]
    counters: list[RankCounters]
    folder: Path


@pytest.fixture(scope="module", params=["v1 at tp 1", "v2 at tp 1", "v1 at tp 2", "v2 at tp 2"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    runner, _, _, tp = request.param.split()
    folder = tmp_path_factory.mktemp("traces") / "new"
    with LLM(runner=runner, tp=int(tp), trace=folder, **TOY) as llm:
        generate(llm)
        num_steps = llm.engine.stats.steps
        spans = llm.engine.spans()
        counters = llm.engine.counters()
    return Run(int(tp), num_steps, spans, counters, folder)


def generate(llm: LLM) -> list[list[int]]:
    """Serve six requests in a batch of four at most; return their ids."""
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.8, seed=3)
    prompts = [{"prompt_token_ids": list(range(3, 20 + number))} for number in range(6)]
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def rows(table: SpanTable, *names: int) -> list[tuple[int, ...]]:
    """Return the spans of these names, all if none is given, as tuples."""
    found = zip(*(column.tolist() for column in table), strict=True)
    return [row for row in found if not names or row[0] in names]


def test_spans_are_known_and_nest_and_none_is_lost(run: Run) -> None:
    assert [each.rank for each in run.spans] == list(range(run.tp))
    for each in run.spans:
        table = each.table()
        assert each.num_lost == 0
        assert each.anchors == ()  # a CPU has no other clock
        assert set(table.kind.tolist()) == {CPU}
        assert set(table.name.tolist()) <= set(range(len(NAMES)))
        assert (table.begin <= table.end).all()
        assert (table.end <= each.taken_ns).all()
        # the outer ones first; whoever begins inside another one ends inside it
        open_ends: list[int] = []
        for _, _, begin, end, _, _ in sorted(rows(table), key=lambda row: (row[2], -row[3])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def test_every_step_has_its_parts_on_every_rank(run: Run) -> None:
    for each in run.spans:
        table = each.table()
        for name in (FORWARD, SAMPLE):
            assert sorted(row[4] for row in rows(table, name)) == list(range(run.num_steps))
        for name in (SCHEDULE, UPDATE):
            steps = [row[4] for row in rows(table, name) if row[4] >= 0]
            assert steps == (list(range(run.num_steps)) if each.rank == 0 else [])
        sums = Counter(row[4] for row in rows(table, ALL_REDUCE))
        # two a layer and the embedding's, where there is somebody to add up with
        expected = 0 if run.tp == 1 else 2 * NUM_LAYERS + 1
        assert all(sums[step] == expected for step in range(run.num_steps))
        exchanged = {row[4] for row in rows(table, EXCHANGE)}
        assert exchanged == (set() if run.tp == 1 else set(range(run.num_steps)))
    facts = run.spans[0].facts()
    assert facts.step.tolist() == list(range(run.num_steps))
    assert int(facts.num_tokens.sum()) == sum(range(17, 23)) + 6 * 4
    assert int(facts.num_logits.sum()) == 6 * 5
    assert set(facts.num_all_reduces.tolist()) == {0 if run.tp == 1 else 2 * NUM_LAYERS + 1}


def test_a_step_is_made_up_of_its_parts(run: Run) -> None:
    steps = step_times(run.spans[0])
    assert steps["num_steps"] == len(whole_steps(run.spans[0])) == run.num_steps
    assert sum(part["share"] for part in steps["parts"].values()) == pytest.approx(1, abs=1e-6)
    mean_us = sum(part["mean_us"] for part in steps["parts"].values())
    assert mean_us == pytest.approx(steps["step_us"]["mean"])
    # LLM.generate and the engine's own books are little beside a step
    assert min(_unnamed_shares(run.spans[0].table())) < 0.05
    assert steps["gpu_idle_share"] is None


def _unnamed_shares(table: SpanTable) -> list[float]:
    """Return which share of the time between two updates' ends lies in no lap.

    Other programs may take the core in there, so a single large one tells nothing. What no lap
    covers is large in all.
    """
    spans = sorted(row[2:4] for row in rows(table) if row[0] not in (SEND, RECEIVE, ACK, RUN))
    ends = sorted(row[3] for row in rows(table, UPDATE))
    shares = []
    for first, last in pairwise(ends):
        covered, reached = 0, first
        for begin, end in spans:
            begin, end = max(begin, reached), min(end, last)
            covered += max(end - begin, 0)
            reached = max(reached, end)
        shares.append(1 - covered / (last - first))
    return shares


def test_every_rank_got_every_frame_in_its_turn(run: Run) -> None:
    if run.tp == 1:
        assert rows(run.spans[0].table(), SEND, RECEIVE, ACK, RUN) == []
        assert {row[5] for row in rows(run.spans[0].table())} == {0}
        return
    sent = {row[5]: row for row in rows(run.spans[0].table(), SEND)}
    # every step, and each call before and after them
    assert sorted(sent) == list(range(1, START_METHODS + run.num_steps + 2))
    of_steps = {row[4] for row in sent.values() if row[4] >= 0}
    assert of_steps == set(range(run.num_steps))
    for each in run.spans[1:]:
        table = each.table()
        received = {row[5]: row for row in rows(table, RECEIVE)}
        acked = {row[5]: row for row in rows(table, ACK)}
        ran = {row[5]: row for row in rows(table, RUN)}
        assert sorted(received) == sorted(acked) == sorted(sent)
        assert sorted(ran) == sorted(sent)[:-1]  # the last one put this list together
        for frame, (_, _, begin, end, _, _) in received.items():
            assert sent[frame][2] < begin <= acked[frame][2] <= end  # one clock
            if frame in ran:
                assert end <= ran[frame][2]
                assert ran[frame][4] == sent[frame][4]  # of the same step
    # on rank 0 a frame is sent within the wire's lap
    for _, _, begin, end, step, frame in rows(run.spans[0].table(), WIRE):
        if frame and sent[frame][2] >= begin:
            assert (sent[frame][4], sent[frame][3] <= end) == (step, True)


def test_every_rank_leaves_a_trace_that_says_what_it_is(run: Run) -> None:
    assert sorted(path.name for path in run.folder.iterdir()) == [
        file_name(rank) for rank in range(run.tp)
    ]
    for each in run.spans:
        lines = (run.folder / file_name(each.rank)).read_text().splitlines()
        head, *others = map(json.loads, lines)
        assert (head["schema"], head["rank"], head["tp"]) == (1, each.rank, run.tp)
        assert head["names"] == MEANINGS
        assert head["clock"]["name"] == "clock_gettime(CLOCK_MONOTONIC)"
        assert (head["num_lost"], head["clock"]["gpu_anchors"]) == (0, [])
        assert head["machine"]["versions"]["torch"]
        assert "commit" in head
        assert head["config"]["trace"] == str(run.folder)
        spans = [line for line in others if "name" in line]
        table = each.table()
        # what the wire brought, and the calls after it
        assert len(spans) >= len(table.name)
        for span, name, begin, end, step in zip(
            spans, table.name, table.begin, table.end, table.step, strict=False
        ):
            assert (span["name"], span["kind"]) == (NAMES[name], "cpu")
            assert (span["begin"], span["end"], span.get("step", -1)) == (begin, end, step)
        facts = [line for line in others if "name" not in line]
        assert len(facts) == (run.num_steps if each.rank == 0 else 0)


def test_every_ranks_counters_reach_rank_0(run: Run) -> None:
    assert len(run.counters) == run.tp
    for counters in run.counters:
        # on a CPU runner v1 has no graphs to count, and v2 counts eager steps
        assert counters.graph_steps in ({}, {"eager": run.num_steps})
        assert counters.padded_rows == 0
        assert counters.gpu_peak_bytes is None


def test_without_the_settings_nothing_is_recorded_and_the_ids_are_the_same(tmp_path: Path) -> None:
    with LLM(runner="v2", **TOY) as plain, LLM(runner="v2", trace=tmp_path, **TOY) as traced:
        assert generate(plain) == generate(traced)
        assert plain.engine._recorder is None
        with pytest.raises(ValueError, match="records no spans; start it with step_times or trace"):
            plain.engine.spans()
        assert list(tmp_path.iterdir()) == []  # until it closes
    assert [path.name for path in tmp_path.iterdir()] == [file_name(0)]


def test_an_earlier_trace_makes_room_for_a_new_one_and_other_files_stay(tmp_path: Path) -> None:
    for name in (file_name(0), file_name(7), "notes.txt"):
        (tmp_path / name).write_text("old")
    LLM(runner="v1", trace=str(tmp_path), **TOY).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", file_name(0)]
    assert (tmp_path / file_name(0)).read_text() != "old"
    with pytest.raises(ValueError, match=r"notes.txt: .*; name a folder that can be written to"):
        LLM(runner="v1", trace=tmp_path / "notes.txt", **TOY)


def test_a_trace_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    llm = LLM(runner="v2", trace=folder, **TOY)
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        llm.close()
    llm.close()
    assert list(tmp_path.iterdir()) == []


def test_bench_stacks_the_step_and_holds_it_against_the_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["latency", "--batch", "2", "--input-len", "20", "--output-len", "9", "--repeat", "2"]
    limits = ["--bandwidth", "10", "--tflops", "0.05"]
    assert bench([*words, *WORDS, "-q", "--step-times", *limits]) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    steps = result["steps"]
    assert steps["num_steps"] == result["counters"]["scheduler"]["steps"] == 18
    assert {part["kind"] for part in steps["parts"].values()} == {"cpu"}
    assert sum(part["share"] for part in steps["parts"].values()) == pytest.approx(1)
    # every step lies within its repeat, and the interpreter alone takes longer than 50 us for one
    measured_s = sum(repeat["duration_s"] for repeat in result["repeats"])
    assert 18 * 50e-6 < 18 * steps["step_us"]["mean"] / 1e6 <= measured_s
    prediction = steps["prediction"]
    assert prediction["tokens_a_step"] == pytest.approx((2 * 20 + 8 * 2) / 9)
    assert prediction["mbu"] == pytest.approx(
        prediction["bytes_a_step"] / (prediction["measured_us"] * 1e-6 * 10e9)
    )
    assert prediction["mfu"] == pytest.approx(
        prediction["operations_a_step"] / (prediction["measured_us"] * 1e-6 * 0.05e12)
    )
    assert 0 < prediction["bound_us"] < prediction["measured_us"]
    for text in ("where a step's time goes: 18 steps", "\nforward ", "MBU", "limit of a step"):
        assert text in printed
    assert bench([*words, *WORDS, *limits]) == 2
    assert "--bandwidth: means nothing without --step-times" in capsys.readouterr().err


def test_run_prints_the_table_beside_the_answer_and_leaves_the_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "trace"
    words = [*WORDS, "--prompt-ids", "1,2,3", "--max-tokens", "3", "--ignore-eos", "-q"]
    assert nanorunner([*words, "--step-times", "--trace", str(folder)]) == 0
    printed = capsys.readouterr()
    assert "where a step's time goes: 3 steps" in printed.err
    assert "forward" not in printed.out
    assert np.array([len(line) for line in (folder / file_name(0)).open()]).min() > 2
