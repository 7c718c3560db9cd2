"""scripts/bench_speculation.py: the oracle's drafts are as right as it says, and text is measured.

Both runs use a toy on the CPU, whose times mean nothing; what is counted does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))  # its files import each other by their bare names

from scripts.bench_speculation import is_good, main  # noqa: E402
from scripts.speculation_passes import Pass, expected_ids, oracle_rows  # noqa: E402
from scripts.speculation_sides import Served, spoil  # noqa: E402

NUM_TOKENS, NUM_DRAFTS = 20, 3
TOY = ("--model", "tiny-qwen3", "--device", "cpu", "--rounds", "1", "--repeats", "1")


def run_bench(*flags: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run the script with a hard limit; return its result too, which is the last line."""
    done = subprocess.run(
        [sys.executable, "scripts/bench_speculation.py", *TOY, *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # works in a clone that is not installed too
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.stdout, done.stderr
    return done, json.loads(done.stdout.splitlines()[-1])


def accepted_by_place(is_right: list[bool]) -> list[int]:
    """Return how many drafts are accepted in each place of a request whose prompt brings an id."""
    counts, known = [0] * NUM_DRAFTS, 1
    while known < len(is_right):
        drafts = [*is_right[known : known + NUM_DRAFTS], False]
        new = min(drafts.index(False) + 1, len(is_right) - known)
        for place in range(new - 1):
            counts[place] += 1
        known += new
    return counts


def test_the_oracle_is_right_as_often_as_it_was_told(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "result.json"
    flags = ["--oracle", "0.6,1", "--batch-sizes", "2", "--tp", "2", "--limit", "100000"]
    flags += ["--num-tokens", str(NUM_TOKENS), "--num-speculative-tokens", str(NUM_DRAFTS)]
    done, result = run_bench(*flags, "--input-len", "8", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert result == json.loads(out.read_text())
    assert result["command"].startswith("python scripts/bench_speculation.py --model tiny-qwen3")
    assert result["machine"]["versions"]["torch"]
    plain, oracle = result["turns"]
    assert (plain["side"], oracle["side"]) == ("plain", "oracle")
    assert plain["config"]["speculative"] == "off"
    assert sum(one["verified"] for one in plain["passes"]) == 0
    for number, one in enumerate(oracle["passes"]):
        # which ids are wrong depends on nothing but the pass's number
        ids = [[0] * NUM_TOKENS] * one["batch_size"]
        drafts = np.array(spoil(ids, one["probability"], [0, number], vocab_size=1003))
        expected = [accepted_by_place(row) for row in (drafts == 0).tolist()]
        assert one["accepted"] == np.sum(expected, axis=0).tolist()
        assert one["same_ids"] == one["requests"]
    some, always = result["rows"]
    assert (some["probability"], always["probability"]) == (0.6, 1.0)
    assert 1 < some["ids_a_step"] < always["ids_a_step"] == 1 + NUM_DRAFTS
    assert some["acceptance"] < always["acceptance"] == [1.0] * NUM_DRAFTS


@pytest.mark.beside
def test_text_is_measured_a_task_at_a_time_with_and_without_drafts() -> None:
    flags = ["--byte-ids", "--load-format", "dummy", "--batch-sizes", "1,2", "--num-prompts", "8"]
    done, result = run_bench(*flags, "--num-tokens", "12")
    assert done.returncode == 0, done.stderr
    rows = {(row["batch_size"], row["task"], row["side"]): row for row in result["rows"]}
    assert len(rows) == 2 * 5 * 2
    plain, ngram = result["turns"]
    assert [one["requests"] for one in ngram["passes"]] == [2] * 8
    assert sum(one["verified"] for one in ngram["passes"]) > 0
    for one, other in zip(plain["passes"], ngram["passes"], strict=True):
        assert one["output_tokens"] == other["output_tokens"]
    for batch_size in (1, 2):
        row = rows[batch_size, "all", "ngram"]
        assert row["same_ids"] == rows[batch_size, "all", "plain"]["same_ids"] == 8
        passes = [one for one in ngram["passes"] if one["batch_size"] == batch_size]
        tokens, seconds = (
            sum(one[name] for one in passes) for name in ("output_tokens", "seconds")
        )
        assert row["tokens_per_s"] == pytest.approx(tokens / seconds, abs=0.06)
        assert len(row["acceptance"]) == 7


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--oracle", "0.5,0"], "'0.5,0': use numbers above 0 and up to 1"),
        (["--oracle", "0.5", "--byte-ids"], "--byte-ids: means nothing with --oracle"),
        (["--limit", "5"], "--limit: means nothing without --oracle"),
        (["--num-prompts", "8"], "4 tasks in batches of 8 need 32 or more"),
        (["--ways", "ngrm"], "did you mean ngram?"),
        (["--orcale", "1"], "unknown flag --orcale; did you mean --oracle?"),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_starts(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("num_drafts", [1, 4])
@pytest.mark.parametrize("probability", [0.0, 0.3, 0.9, 1.0])
def test_the_formula_is_the_mean_over_all_ways_to_be_right(
    probability: float, num_drafts: int
) -> None:
    mean = 0.0
    for is_right in product((True, False), repeat=num_drafts):
        weight = np.prod([probability if right else 1 - probability for right in is_right])
        mean += float(weight) * ([*is_right, False].index(False) + 1)
    assert expected_ids(probability, num_drafts) == pytest.approx(mean)
    if probability < 1:
        closed = (1 - probability ** (num_drafts + 1)) / (1 - probability)
        assert expected_ids(probability, num_drafts) == pytest.approx(closed)


def test_the_speed_up_is_compared_with_times_of_other_passes() -> None:
    def one(probability: float | None, steps: int, seconds: float, ids: int) -> Pass:
        counts: dict[str, Any] = {"meant": [8, 8], "accepted": [4, 2], "verified": 8}
        window: dict[str, Any] = {"window_s": seconds, "window_steps": steps, "window_ids": ids}
        sizes: dict[str, Any] = {"batch_size": 2, "requests": 2, "output_tokens": ids}
        return Pass(
            **sizes, seconds=seconds, probability=probability, same_ids=2, **counts, **window
        )

    plain = [one(None, 100, 1.0, 200)]  # 10 ms a step
    oracle = [one(0.0, 100, 1.25, 200), one(0.5, 100, 1.4, 350)]
    (row,) = oracle_rows(plain, oracle, num_drafts=2)
    assert (row["plain_step_ms"], row["verify_step_ms"]) == (10.0, 12.5)
    assert (row["expected_ids_a_step"], row["ids_a_step"]) == (1.75, 1.75)
    assert row["expected_speed_up"] == pytest.approx(1.75 / 1.25)
    assert row["speed_up"] == pytest.approx(350 / 1.4 / 200)
    assert row["difference_percent"] == pytest.approx(-10.71)
    args = Namespace(oracle=[0.5], limit=11.0)
    assert is_good(args, [row])
    assert not is_good(args, [row | {"same_ids": 1}])
    assert not is_good(Namespace(oracle=[0.5], limit=10.0), [row])


def test_a_window_begins_with_the_last_first_id_and_ends_before_the_first_last_one() -> None:
    counts = np.array([[1, 0], [1, 1], [2, 1], [1, 3], [3, 1], [0, 1]])
    times_s = [0.5, 1.0, 1.5, 2.5, 3.0, 4.0]
    assert Served([], times_s, counts).window() == (1.5, 2, 7)
    with pytest.raises(ValueError, match="use more"):
        Served([], times_s[:2], counts[:2]).window()


def test_wrong_drafts_are_drawn_by_a_key_and_never_right() -> None:
    ids = [list(range(500)), list(range(500))]
    drafts = np.array(spoil(ids, 0.7, [3, 4], vocab_size=500))
    is_right = drafts == np.array(ids)
    assert abs(is_right.mean() - 0.7) < 0.05  # over 3 standard errors
    assert (is_right[0] != is_right[1]).any()
    assert ((drafts >= 0) & (drafts < 500)).all()
    assert drafts.tolist() == spoil(ids, 0.7, [3, 4], vocab_size=500)
    assert drafts.tolist() != spoil(ids, 0.7, [3, 5], vocab_size=500)
    assert not (np.array(spoil(ids, 0.0, [0, 0], vocab_size=500)) == np.array(ids)).any()
