"""A short run of the race fuzzer: nothing is found, and a fault that is planted is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))  # its files import each other by their bare names

from scripts.race_fuzz import main  # noqa: E402


def fuzz(*flags: str) -> tuple[int, dict[str, Any]]:
    """Run the script on the CPU; return its exit code and its last line, which is JSON."""
    command = [sys.executable, "scripts/race_fuzz.py", "--device", "cpu", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # also where nothing is installed
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert result.stdout, result.stderr
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return result.returncode, report


@pytest.mark.beside
def test_asynchronous_steps_repeated_one_at_a_time_give_the_same_bits() -> None:
    code, report = fuzz("--steps", "300", "--seed", "2")
    assert (code, report["problem"], report["first_differences"]) == (0, "", [])
    assert report["same_memory_at_the_end"]
    assert report["steps_run"] >= 300
    assert all(report["events"].values()), report["events"]


def test_two_ranks_too() -> None:
    code, report = fuzz("--steps", "60", "--tp", "2")
    assert (code, report["problem"], report["first_differences"]) == (0, "", [])
    assert report["same_memory_at_the_end"]


@pytest.mark.beside
def test_a_token_that_was_lost_on_its_way_is_found() -> None:
    code, report = fuzz("--steps", "60", "--plant", "token")
    assert code == 1
    assert report["different_steps"] > 0
    assert report["first_differences"][0].startswith("step 4")
    assert not report["same_memory_at_the_end"]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("draft", "--steps", "80", "--seed", "2"), marks=pytest.mark.beside),
        ("ngram", "--steps", "40", "--tp", "2"),
    ],
    ids=["draft", "ngram, two ranks"],
)
def test_drafts_are_proposed_and_accepted_alike(flags: tuple[str, ...]) -> None:
    code, report = fuzz("--speculative", *flags)
    assert (code, report["problem"], report["first_differences"]) == (0, "", [])
    assert report["same_memory_at_the_end"]
    events = report["events"]
    for name in ("verify_steps", "drafts_accepted", "drafts_rejected", "changes_of_query_len"):
        assert events[name] > 0, events
    assert events["mixed_steps"] > 0
    assert events["verify_steps"] < report["steps_run"]


@pytest.mark.beside
def test_drafts_that_are_written_late_are_found() -> None:
    """A draft accepted or not is all that it changes: ids that come out are plain decoding's."""
    code, report = fuzz("--speculative", "draft", "--steps", "60", "--plant", "drafts")
    assert (code, report["problem"]) == (1, "")
    assert report["different_steps"] > 0
    assert report["first_differences"][0].startswith("step 4")
    assert not report["same_memory_at_the_end"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--plant", "drafts"], "--plant drafts: there are none; add --speculative ngram or draft"),
        (["--draft-model", "tiny-llama"], "tiny-llama: only with --speculative draft"),
    ],
)
def test_flags_that_would_be_ignored_are_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
