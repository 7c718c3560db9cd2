"""LLM answers in the prompts' order, in vLLM's forms, and streams the text that it returns."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from nanorunner import LLM, SamplingParams
from nanorunner.presets import load_preset
from nanorunner.prompts import Prompt
from nanorunner.toy_model import make_toy_model

PROMPTS = ["one", "a second prompt", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # as many ids as the tokenizer has, so that whatever the model says is text
    fields = {**load_preset("tiny-llama"), "vocab_size": 259}
    return make_toy_model(tmp_path_factory.mktemp("toy"), fields, has_tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", tensor_parallel_size=2, max_num_seqs=4) as llm:
        yield llm


def greedy(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **settings})


def test_results_come_in_the_prompts_order_however_they_finish(llm: LLM) -> None:
    lengths = [9, 1, 5]
    params = [greedy(max_tokens=length) for length in lengths]
    for _ in range(2):  # a second call must not get anything of the first
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [output.prompt for output in outputs] == PROMPTS
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
        assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert llm.generate([], use_tqdm=False) == []


def test_more_prompts_than_run_at_once_are_all_answered(llm: LLM) -> None:
    prompts = [[index + 3, 7] for index in range(11)]
    outputs = llm.generate(prompts, greedy(max_tokens=3), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(len(output.token_ids) == 3 for output in outputs)


def test_text_ids_and_dicts_are_the_same_prompt(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(PROMPTS[1])
    forms: list[Any] = [PROMPTS[1], ids, {"prompt": PROMPTS[1]}, {"prompt_token_ids": ids}]
    answers = [llm.generate(form, greedy(), use_tqdm=False)[0] for form in forms]
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    assert (
        answers[0].text == answers[0].outputs[0].text == llm.tokenizer.decode(answers[0].token_ids)
    )


def test_one_bad_params_among_the_prompts_is_named_and_nothing_is_queued(llm: LLM) -> None:
    good, bad = greedy(), greedy()
    bad.logit_bias["x"] = 1.0  # type: ignore[index]  # after it was checked itself
    with pytest.raises(ValueError, match=r"^prompts\[2\]: logit_bias .*: is dict, use a dict of"):
        llm.generate(PROMPTS, [good, good, bad], use_tqdm=False)
    with pytest.raises(ValueError, match=r"^prompts\[0\]: logit_bias "):
        llm.generate(PROMPTS, bad, use_tqdm=False)
    assert not llm.engine.has_unfinished()


def test_chat_answers_one_conversation_or_several(llm: LLM) -> None:
    hello = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(hello, greedy(), use_tqdm=False)
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(one.prompt_token_ids) == "user: hello\nassistant: "
    several = llm.chat([hello, hello], greedy(), use_tqdm=False)
    assert [output.token_ids for output in several] == [one.token_ids] * 2


def test_the_streamed_pieces_are_the_text(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], greedy(max_tokens=20), use_tqdm=False)[0].text
    assert "".join(llm.stream(PROMPTS[0], greedy(max_tokens=20))) == whole


def test_a_run_that_does_not_stream_brings_each_answer_once(llm: LLM) -> None:
    params = greedy(max_tokens=6)
    answers = [llm.prepare(Prompt(prompt, None), params) for prompt in PROMPTS]
    ended = list(llm.run(answers, streaming=False))
    assert sorted(map(id, ended)) == sorted(map(id, answers))
    expected = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [answer.output().outputs for answer in answers] == [o.outputs for o in expected]


def test_leaving_a_stream_early_ends_its_request_alone(llm: LLM) -> None:
    expected = llm.generate(PROMPTS[0], greedy(), use_tqdm=False)[0].token_ids
    stream = llm.stream(PROMPTS[1], greedy(max_tokens=500))
    next(stream)
    # another call goes through while the stream waits, and the stream goes on after it
    assert llm.generate(PROMPTS[0], greedy(), use_tqdm=False)[0].token_ids == expected
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_unfinished() or llm.engine.step() == []
    assert llm.generate(PROMPTS[0], greedy(), use_tqdm=False)[0].token_ids == expected


@contextmanager
def ctrl_c_after(num_steps: int, llm: LLM) -> Iterator[None]:
    """Press Ctrl-C when the block's work has made so many steps.

    The clock is this process's own CPU time, and this thread looks: neither can come too late, as
    another thread could.
    """
    last = llm.engine.stats.steps + num_steps

    def look(number: int, frame: FrameType | None) -> None:
        if llm.engine.stats.steps >= last:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_ctrl_c_ends_every_request_and_leaves_the_engine_usable(llm: LLM) -> None:
    expected = llm.generate(PROMPTS[0], greedy(), use_tqdm=False)[0].token_ids
    stream = llm.stream(PROMPTS[1], greedy(max_tokens=900))
    next(stream)
    with ctrl_c_after(5, llm), pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, greedy(max_tokens=900), use_tqdm=False)
    list(stream)  # ends instead of waiting for a request that is no more
    assert llm.generate(PROMPTS[0], greedy(), use_tqdm=False)[0].token_ids == expected


def test_a_stop_string_ends_text_and_ids_at_the_same_place(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], greedy(max_tokens=30), use_tqdm=False)[0]
    stop = next(char for char in whole.text[5:] if char.isprintable() and char != "\ufffd")
    (cut,) = llm.generate(PROMPTS[0], greedy(max_tokens=30, stop=stop), use_tqdm=False)
    completion = cut.outputs[0]
    assert completion.text == whole.text[: whole.text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
    assert len(completion.token_ids) < 30


def test_a_stop_id_ends_the_answer_and_is_its_last_id(llm: LLM) -> None:
    ids = llm.generate(PROMPTS[0], greedy(), use_tqdm=False)[0].token_ids
    (cut,) = llm.generate(PROMPTS[0], greedy(stop_token_ids=[ids[4]]), use_tqdm=False)
    assert cut.token_ids == ids[: ids.index(ids[4]) + 1]
    assert cut.finish_reason == "stop"


def test_a_closed_llm_says_so_and_another_one_starts(folder: Path) -> None:
    llm = LLM(folder, device="cpu")
    first = llm.generate(PROMPTS, greedy(), use_tqdm=False)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate(PROMPTS, greedy(), use_tqdm=False)
    with LLM(folder, device="cpu") as again:
        assert [output.token_ids for output in again.generate(PROMPTS, greedy())] == [
            output.token_ids for output in first
        ]


def test_without_a_tokenizer_ids_go_in_and_ids_come_out() -> None:
    with LLM("tiny-qwen3", load_format="dummy", skip_tokenizer_init=True, device="cpu") as llm:
        (output,) = llm.generate([dict(prompt_token_ids=[1, 2, 3])], greedy(), use_tqdm=False)
        assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (8, "")
        with pytest.raises(ValueError, match="a text prompt needs a tokenizer"):
            llm.generate("text", greedy())
        with pytest.raises(ValueError, match="stop strings need a tokenizer"):
            llm.generate([1, 2], greedy(stop="x"))
        with pytest.raises(ValueError, match="chat needs a tokenizer"):
            llm.chat([{"role": "user", "content": "hi"}])
