"""A steady step of LLM.generate costs rank 0's Python the same for two requests and for many.

Counted are the bytecodes that nanorunner's own files run between one engine step and the next,
without those of the ranks' rooms: a loop over the requests would show, however it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest

from nanorunner import LLM, SamplingParams
from nanorunner.presets import load_preset
from nanorunner.prompts import Prompt
from nanorunner.toy_model import make_toy_model

MANY = 24
PARAMS = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0)
STEADY = slice(8, 24)  # all prompts are read, nothing ends


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    fields = {**load_preset("tiny-llama"), "vocab_size": 259}
    folder = make_toy_model(tmp_path_factory.mktemp("toy"), fields, has_tokenizer=True)
    with LLM(folder, device="cpu", max_num_seqs=MANY) as llm:
        yield llm


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


def test_a_steady_step_of_generate_looks_at_no_request(llm: LLM) -> None:
    def generate(num_prompts: int) -> set[int]:
        prompts = [f"{number}" for number in range(num_prompts)]
        return bytecodes_of_steady_steps(lambda: llm.generate(prompts, PARAMS))

    assert generate(2) == generate(MANY)
    # one more question, whether there is room for those that wait, but none of each of them
    assert max(generate(3 * MANY)) < min(generate(MANY)) + MANY


def test_the_meter_sees_the_loop_of_a_run_that_streams(llm: LLM) -> None:
    def stream(num_prompts: int) -> set[int]:
        prompts = [Prompt(f"{number}", None) for number in range(num_prompts)]
        answers = [llm.prepare(prompt, PARAMS) for prompt in prompts]
        return bytecodes_of_steady_steps(lambda: list(llm.run(answers)))

    assert min(stream(MANY)) > max(stream(2)) + MANY
