"""scripts/bench_cpu.py measures both sides, agrees on the ids and ends in one line of JSON."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.beside

ROOT = Path(__file__).parents[2]


def run_bench(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a hard limit."""
    return subprocess.run(
        [sys.executable, "scripts/bench_cpu.py", *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_the_result_holds_every_repeat_and_the_ratio(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "result.json"
    flags = ["--batches", "2", "--repeats", "2", "--prompt-tokens", "8", "--new-tokens", "3"]
    done = run_bench(*flags, "--out", str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads(out.read_text())
    assert {(row["engine"], row["dtype"]) for row in result["rows"]} == {
        (engine, dtype)
        for engine in ("nanorunner", "transformers")
        for dtype in ("float32", "bfloat16")
    }
    assert all(len(row["seconds"]) == 2 for row in result["rows"])
    (summary,) = result["summary"]
    best = {
        engine: max(r["tokens_per_s"] for r in result["rows"] if r["engine"] == engine)
        for engine in ("nanorunner", "transformers")
    }
    assert abs(summary["ratio"] - best["nanorunner"] / best["transformers"]) < 0.01


def test_a_wrong_flag_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    main = importlib.import_module("bench_cpu").main
    with pytest.raises(SystemExit) as refused:
        main(["--batches", "1,x"])
    assert refused.value.code == 2
    assert "'x': use a whole number above 0" in capsys.readouterr().err
