"""`--tap` and `--tap-json` on whole engines: a frame for each call that was made, and no other."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nanorunner import LLM, SamplingParams
from nanorunner.bench.cli import main as bench
from nanorunner.chat import Shell
from nanorunner.cli import main as nanorunner
from nanorunner.presets import load_preset
from nanorunner.tap import NO_FRAMES
from nanorunner.toy_model import make_toy_model

ROOT = Path(__file__).parents[2]
TOY: dict[str, Any] = {
    "model": "tiny-qwen3",
    "load_format": "dummy",
    "device": "cpu",
    "num_blocks": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "skip_tokenizer_init": True,
}
WORDS = ["--model", "tiny-qwen3", "--load-format", "dummy", "--device", "cpu", "--num-blocks", "8"]
WORDS += ["--max-num-seqs", "4", "--max-num-batched-tokens", "64"]  # a short profile
START = ["load_model", "profile", "allocate_kv", "capture"]
LINE = re.compile(r" *(\d+)  (\w+) +([\d,]+) +(-|\+\d+\.\d\d)  r1 (\d+\.\d{3}) +(\S.*)")


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["frame"] for row in rows] == list(range(1, len(rows) + 1))
    return rows


def check_times(rows: list[dict[str, Any]]) -> None:
    """Frames go out in order, and every rank acks each after it was sent, in order."""
    assert [row["sent_ns"] for row in rows] == sorted(row["sent_ns"] for row in rows)
    for rank in rows[0]["acked_ns"]:
        acked = [row["acked_ns"][rank] for row in rows]
        assert acked == sorted(acked)
        assert all(row["sent_ns"] < row["acked_ns"][rank] for row in rows)


def printed_frames(text: str) -> list[re.Match[str]]:
    return [found for line in text.splitlines() if (found := LINE.fullmatch(line))]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_there_are_as_many_frames_as_calls(tmp_path: Path, runner: str) -> None:
    path = tmp_path / "frames.jsonl"
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.8, seed=3)
    prompts = [{"prompt_token_ids": list(range(3, 40 + number))} for number in range(6)]
    with LLM(runner=runner, tp=2, tap_json=path, **TOY) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        num_steps = llm.engine.stats.steps
        prefilled = llm.engine.stats.prefill_tokens
        assert len(rows_of(path)) == len(START) + num_steps, "each is said when its step is read"
        llm.engine.counters()
    rows = rows_of(path)
    calls = [*START, *["step"] * num_steps, "counters", "close"]
    assert [row["method"] for row in rows] == calls
    assert all(list(row["acked_ns"]) == ["1"] for row in rows)
    check_times(rows)
    assert rows[2]["what"] == "16 KV blocks of 256 tokens on every rank"
    spans = re.findall(r"tokens? (\d+)(?:\.\.(\d+))?", " ".join(row["what"] for row in rows[4:-2]))
    assert sum(int(last or first) - int(first) + 1 for first, last in spans) == prefilled


def test_jsonl_lines_and_file_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "frames.jsonl"
    asked = "".join(
        json.dumps({"prompt_token_ids": [5, number], "max_tokens": 4}) + "\n" for number in (6, 7)
    )
    flags = ["--skip-tokenizer-init", "--ignore-eos", "--tp", "2", "--tap", "2", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "nanorunner", *WORDS, *flags, "--tap-json", str(path)],
        input=asked,
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(answer["token_ids"]) for answer in answers] == [4, 4], "stdout is the answers alone"
    rows, lines = rows_of(path), printed_frames(done.stderr)
    assert [row["method"] for row in rows] == [*START, *["step"] * 4, "close"]
    for row, line in zip(rows, lines, strict=True):
        number, method, num_bytes, since, acked_ms, what = line.groups()
        assert (int(number), method, what) == (row["frame"], row["method"], row["what"])
        assert int(num_bytes.replace(",", "")) == row["bytes"]
        assert float(acked_ms) == pytest.approx(
            (row["acked_ns"]["1"] - row["sent_ns"]) / 1e6, abs=0.0006
        )
        if row["frame"] == 1:
            assert since == "-"
        else:
            before = rows[row["frame"] - 2]["sent_ns"]
            assert float(since) == pytest.approx((row["sent_ns"] - before) / 1e6, abs=0.006)
    # the arguments: the same ids in the file and, in words, below the line
    first = rows[4]["arguments"]
    assert [new["token_ids"] for new in first["new"]] == [[5, 6], [5, 7]]
    assert [row["arguments"]["step_id"] for row in rows[4:8]] == [0, 1, 2, 3]
    assert rows[6]["arguments"]["batch"] is None
    assert "       new request 1: token_ids 5 7, prompt_len 2, " in done.stderr
    assert "       batch (request x tokens): 0 x 2, 1 x 2" in done.stderr
    assert "       num_blocks: 8" in done.stderr


def test_a_measurement_can_be_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "frames.jsonl"
    flags = ["--workload", "fixed", "--num-requests", "3", "--input-len", "9", "--output-len", "4"]
    flags += ["--repeat", "1", "--warm-up", "1", "--tp", "2", "-q"]
    assert bench(["throughput", *flags, *WORDS, "--tap", "--tap-json", str(path)]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    rows = rows_of(path)
    check_times(rows)
    counted = Counter(row["method"] for row in rows)
    # the pass that is measured, and as many steps to warm up; counters before and after
    num_steps = 2 * result["counters"]["scheduler"]["steps"]
    assert counted == Counter(START) + Counter(step=num_steps, counters=2, close=1)
    lines = printed_frames(captured.err)
    assert [line[6] for line in lines] == [row["what"] for row in rows]
    assert all("arguments" not in row for row in rows), "one level for both"
    assert (result["config"]["tap"], result["config"]["tap_json"]) == (1, str(path))


def test_a_chat_shows_the_frames_and_then_the_whole_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_toy_model(
        tmp_path, {**load_preset("tiny-llama"), "vocab_size": 259}, has_tokenizer=True
    )
    both = io.StringIO()  # a terminal shows the two as they come
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    small = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    with LLM(folder, device="cpu", tp=2, tap=1, **small) as llm:
        monkeypatch.setattr(sys, "stdout", both)
        monkeypatch.setattr(sys, "stderr", both)
        shell = Shell(llm, params, system=None, raw=False)
        shell.turn("hello")
        lines = both.getvalue().splitlines()
        answer = shell.messages[-1]["content"]
    frames = printed_frames("\n".join(lines[: llm.engine.stats.steps]))
    assert [frame[2] for frame in frames] == ["step"] * llm.engine.stats.steps
    assert frames[-1][6] == "decode 1 request, one token, the same batch"
    assert "\n".join(lines[len(frames) : -1]) == answer
    assert lines[-1].startswith("[6 tokens, first after ")


def test_at_tp_1_a_line_says_that_there_are_no_frames(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "frames.jsonl"
    flags = ["--prompt-ids", "5,6", "--max-tokens", "3", "--ignore-eos", "--skip-tokenizer-init"]
    assert nanorunner([*WORDS, *flags, "-q", "--tap", "--tap-json", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [NO_FRAMES]
    assert len(captured.out.strip().split(",")) == 3
    assert path.read_text() == ""


def test_a_file_that_cannot_be_written_is_refused_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "frames.jsonl"
    flags = ["--prompt-ids", "5,6", "--skip-tokenizer-init", "-q", "--tp", "2"]
    assert nanorunner([*WORDS, *flags, "--tap-json", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(f"nanorunner: tap_json {path}: No such file or directory")


@pytest.mark.parametrize("flags", [["--tap"], ["--tap-json", "frames.jsonl"]])
def test_commands_that_show_no_frames_say_so(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert nanorunner(["blocks", *WORDS, *flags]) == 2
    assert f"{flags[0]}: a walk shows blocks, not frames" in capsys.readouterr().err
    assert bench(["compare", "v1", "v2", *WORDS, *flags]) == 2
    assert "every process would write there; use it with" in capsys.readouterr().err
