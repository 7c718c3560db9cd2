"""scripts/bench_engine.py runs on a toy, counts what came out and ends in one line of JSON."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_bench(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a toy model with a hard limit."""
    command = ["scripts/bench_engine.py", "--model", "tiny-qwen3", "--device", "cpu"]
    return subprocess.run(
        [sys.executable, *command, *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # works in a clone that is not installed too
    )


def test_the_result_is_one_json_line_that_says_how_to_repeat_it(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "result.json"
    flags = ("--loads", "smoke", "--no-warm-up", "--max-model-len", "64", "--out", str(out))
    done = run_bench(*flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads(out.read_text())
    load = result["loads"]["smoke"]
    assert (load["requests"], load["input_tokens"], load["output_tokens"]) == (2, 16, 8)
    assert len(load["seconds"]) == 3
    # both figures are rounded: to 0.1 ms, and to a tenth of a token
    rates = [8 / (sorted(load["seconds"])[1] + error) for error in (0.0001, -0.0001)]
    assert rates[0] - 0.1 < load["output_tokens_per_s"] < rates[1] + 0.1
    assert load["scheduler"]["prefill_tokens"] == 3 * 16
    assert result["config"]["prefix_cache"] is False
    assert result["versions"]["torch"]
    assert result["command"].startswith("python scripts/bench_engine.py --model tiny-qwen3")


def test_an_unknown_load_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    with pytest.raises(SystemExit) as refused:
        importlib.import_module("bench_engine").main(["--loads", "b2"])
    assert refused.value.code == 2
    captured = capsys.readouterr()
    assert "load 'b2': use some of" in captured.err
    assert captured.out == ""
