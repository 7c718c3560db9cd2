"""scripts/find_slow_down.py slows what it says, and finds it in a result by the step breakdown."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.beside

ROOT = Path(__file__).parents[2]
DELAY_US = 50_000.0  # the toy's own forward takes about 1 ms
TOY = ["--model", "tiny-qwen3", "--load-format", "dummy", "--skip-tokenizer-init", "--device=cpu"]
FEW = ["--workload", "fixed", "--num-requests", "1", "--input-len", "4", "--output-len", "4"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("find_slow_down")


def result(**median_us: float) -> dict[str, Any]:
    """Return as much of a result as the step breakdown is."""
    return {"steps": {"parts": {name: {"median_us": us} for name, us in median_us.items()}}}


def test_the_part_that_grew_is_found_and_a_wait_is_none(script: Any) -> None:
    before = result(forward=500.0, sample=90.0, wait=400.0)
    after = result(forward=602.0, sample=95.0, wait=503.0, draft=300.0)
    assert script.grown_parts(before, after, 100.0) == {"forward": 102.0}
    assert script.grown_parts(before, before, 100.0) == {}
    assert script.grown_parts(after, before, 100.0) == {}


def test_a_slowed_forward_takes_at_least_the_planted_delay(script: Any, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    flags = ["--runner", "v2", "--step-times", "--quiet", "--repeat", "1", *TOY, *FEW]
    words = ["scripts/find_slow_down.py", script.SLOWED, str(DELAY_US), *flags, "--out", str(out)]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert script.forward_us(json.loads(out.read_text())) >= DELAY_US


@pytest.mark.parametrize("flags", [["--device=cuda"], ["--device", "cuda"]])
def test_the_delay_is_planted_on_the_device_that_the_flags_name(
    script: Any, flags: list[str]
) -> None:
    assert script.device_of(flags) == "cuda"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp", "2"], "--tp 2: only rank 0 would be slower"),
        (["--tensor-parallel-size=2"], "--tp 2: only rank 0 would be slower"),
        (["--rounds", "5"], "a verdict needs 6"),
        (["--stage", "sample"], "unknown flag --stage"),
    ],
)
def test_what_shows_nothing_is_refused_before_anything_starts(
    script: Any, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        script.main([*TOY, *flags])
    assert refused.value.code == 2
    assert words in capsys.readouterr().err
