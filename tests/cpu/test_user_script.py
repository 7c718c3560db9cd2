"""A user's first script: no main guard, no close(), tp 2. It answers, ends, and leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
MARK = "NANORUNNER_TEST_MARK"  # in the environment, which ranks inherit: how orphans are found
SETTLE_S = 50.0  # mostly a few milliseconds

START = """
from nanorunner import LLM, SamplingParams
llm = LLM("tiny-llama", load_format="dummy", device="cpu", tp=2, max_model_len=64)
params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
print(llm.generate([1, 2, 3], params, use_tqdm=False)[0].token_ids)
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Feed a script to a new interpreter, every warning shown; fail if a process outlives it."""
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, "-W", "default", "-"],
        input=script,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=ROOT,
        env={**os.environ, MARK: mark},
    )
    deadline = time.monotonic() + SETTLE_S
    while left := marked_processes(mark):
        assert time.monotonic() < deadline, f"left: {left}"
        time.sleep(0.05)
    return done


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return the live processes that were started with this mark, orphans included."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended meanwhile, or another user's
    return found


def test_it_answers_and_its_error_output_is_empty() -> None:
    done = run(START)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split(",")) == 3
    # the warning "leaked shared_memory objects" of a resource tracker would stand here
    assert not [line for line in done.stderr.splitlines() if "nanorunner" not in line.lower()]


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    ],
)
def test_however_it_ends_the_ranks_end_with_it(end: str, code: int, words: str) -> None:
    done = run(START + end)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
