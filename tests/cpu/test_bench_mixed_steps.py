"""scripts/bench_mixed_steps.py on a CPU: each prompt is timed, wrong values are met in words."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # its files import each other bare

from scripts.bench_mixed_steps import main

pytestmark = pytest.mark.beside


def test_every_prompt_is_timed_beside_decodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "steps.json"
    flags = ["--model", "tiny-qwen3", "--decodes", "3", "--prompts", "2,70", "--out", str(out)]
    assert main(flags) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert [step["prompt"] for step in result["steps"]] == [2, 70]
    for step in result["steps"]:
        host, everything = step["eager_ms"]
        assert 0 < host <= everything


def test_more_prompts_than_a_decodes_block_has_room_for_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = ",".join(map(str, range(1, 16)))
    with pytest.raises(SystemExit, match="2"):
        main(["--model", "tiny-qwen3", "--prompts", prompts])
    assert "15 prompts: use at most 14" in capsys.readouterr().err
