"""A program that counts the bytecodes of a steady step of LLM.generate and of a run that streams.

    python steady_generate_meter.py      prints {"generate": {"2": [counts]}, "stream": {...}}

Counted are the bytecodes that nanorunner's own files run between one engine step and the next,
without those of the ranks' rooms: a loop over the requests would show, however it is written.
Tracing slows Python down with all that a process has loaded, so the test starts it afresh.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from nanorunner import LLM, SamplingParams
from nanorunner.presets import load_preset
from nanorunner.prompts import Prompt
from nanorunner.toy_model import make_toy_model

FEW, MANY = 2, 24
PARAMS = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0)
STEADY = slice(8, 24)  # all prompts are read, nothing ends


def bytecodes_of_steady_steps(work: Callable[[], object]) -> set[int]:
    """Return how many bytecodes each steady step runs on rank 0's own account."""
    starts: list[int] = []
    count = 0

    def inside(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return inside

    def enter(frame: FrameType, event: str, value: Any) -> Any:
        name = str(frame.f_globals.get("__name__"))
        if not name.startswith("nanorunner.") or name.count(".") > 1:
            return None
        if (name, frame.f_code.co_name) == ("nanorunner.engine", "step"):
            starts.append(count)
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return inside

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(before)
    steps = [end - start for start, end in pairwise(starts)]
    assert len(steps) > STEADY.stop, "the requests ended too early"
    assert min(steps[STEADY]) > 100, "the meter is broken"
    return set(steps[STEADY])


def count(llm: LLM) -> dict[str, dict[int, list[int]]]:
    """Return the steady steps' counts by kind of run and number of prompts."""

    def generate(num_prompts: int) -> list[int]:
        prompts = [f"{number}" for number in range(num_prompts)]
        return sorted(bytecodes_of_steady_steps(lambda: llm.generate(prompts, PARAMS)))

    def stream(num_prompts: int) -> list[int]:
        prompts = [Prompt(f"{number}", None) for number in range(num_prompts)]
        answers = [llm.prepare(prompt, PARAMS) for prompt in prompts]
        return sorted(bytecodes_of_steady_steps(lambda: list(llm.run(answers))))

    return {
        "generate": {number: generate(number) for number in (FEW, MANY, 3 * MANY)},
        "stream": {number: stream(number) for number in (FEW, MANY)},
    }


def main() -> None:
    """Count with a toy model and print the JSON."""
    fields = {**load_preset("tiny-llama"), "vocab_size": 259}
    with tempfile.TemporaryDirectory() as folder:
        model = make_toy_model(Path(folder) / "toy", fields, has_tokenizer=True)
        # v2's references on a CPU make many calls, and each is traced.
        with LLM(model, device="cpu", runner="v1", max_num_seqs=MANY) as llm:
            print(json.dumps(count(llm)))


if __name__ == "__main__":
    main()
