"""The faults that need a model are as the lab says; a good shard is not taken for a bad one."""

from __future__ import annotations

import time

import pytest

from nanorunner.check_shards import wrong_shards
from nanorunner.cli import main
from nanorunner.sampling_params import SamplingParams
from nanorunner.workshop import fault_model
from nanorunner.workshop.fault_lab import Lab, lab_config
from nanorunner.workshop.fault_processes import VICTIM
from nanorunner.workshop.fault_report import FaultReport
from nanorunner.workshop.faults import FAULTS
from nanorunner.workshop.open_engine import OpenEngine
from nanorunner.workshop.question import Setting
from nanorunner.workshop.questions_step import NEW_TOKENS, STAGES, frames

WITH_A_MODEL = {"kill-busy", "slow", "bad-shard"}
LATE_S = 0.8  # with each frame; longer than the lab waits before it kills
INSIDE = "rank 1 said that it is in the all-reduce "
NUM_SABOTAGES = 2  # calls of the fault "slow" itself: on and off


def test_a_rank_killed_in_an_all_reduce_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "kill-busy"]) == 0
    text = capsys.readouterr().out
    for words in ("was killed by SIGKILL", "(step)", "\n  took  ", "\n  so    as it must be"):
        assert words in text
    assert "left  no process, nothing in /dev/shm" in text


def test_a_rank_that_is_late_is_killed_inside_the_all_reduce_all_the_same() -> None:
    report = FaultReport("late", say=lambda text: None)
    with Lab(report) as lab:
        opened = lab.start_model(2)
        begin = time.monotonic()  # before the call: its answer sent, the next sleep begins
        opened.ranks.call_all("sabotage", VICTIM, "slow", LATE_S)
        fault_model.kill_busy(lab)
        seconds = time.monotonic() - begin
    assert not report.wrong
    assert [line for line in report.seen if line.startswith(INSIDE)]
    # late with the call to hang and with the step; only after that the lab's wait before the kill
    assert seconds >= 2 * LATE_S + fault_model.KILL_AFTER_S


def test_a_slow_rank_slows_all_and_a_bad_shard_is_named() -> None:
    """Both on one engine, of which the frames are counted: the answer of the first question."""
    report = FaultReport("two", say=lambda text: None)
    with Lab(report) as lab:
        fault_model.slow(lab)
        assert "no error" in report.seen[-1]
        (opened,) = lab.opened
        echo = opened.ranks.call_all("echo", b"")[1][2]  # the number of this call's own frame
        steps = opened.scheduler.stats.steps
        num_frames = echo - 1 - NUM_SABOTAGES
        assert num_frames == len(STAGES) + steps

        opened.engine.add_request([3, 4, 5], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
        while opened.engine.has_unfinished():
            opened.engine.step()
        assert opened.scheduler.stats.steps == steps + NEW_TOKENS
        assert opened.ranks.call_all("echo", b"")[1][2] == echo + NEW_TOKENS + 1

        fault_model.bad_shard(lab)
        assert "rank 1, layers.1.qkv: model.layers.1.self_attn.k_proj" in report.seen[-1]
    assert not report.wrong
    setting = Setting(model=lab_config(2).model, tp=2, runner="v2", dtype="float32", item_bytes=4)
    with_close = len(STAGES) + NEW_TOKENS + 1
    assert frames(setting).answer == with_close


def test_every_fault_is_played_by_some_test() -> None:
    from test_fault_lab import WITHOUT_A_MODEL

    assert {*WITHOUT_A_MODEL, *WITH_A_MODEL} == set(FAULTS)


def test_checksums_name_no_parameter_of_good_weights() -> None:
    with Lab(FaultReport("good", say=lambda text: None)) as lab:
        opened = lab.start_model(1)
        assert _wrong(opened) == []
        opened.ranks.call_all("sabotage", 0, "swap", 2.0)
        assert [line.partition(":")[0] for line in _wrong(opened)] == ["rank 0, layers.2.qkv"]
        opened.ranks.call_all("sabotage", 0, "swap", 2.0)
        assert _wrong(opened) == []


def _wrong(opened: OpenEngine) -> list[str]:
    return wrong_shards(opened.ranks.call_all("checksums"), opened.ranks.config)
