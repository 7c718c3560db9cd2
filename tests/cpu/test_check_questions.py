"""Answers are computed for the model, the tp and the runner in use; a slip gets its own hint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanorunner.cli import main
from nanorunner.presets import load_preset
from nanorunner.workers.architectures import parse
from nanorunner.workshop import questions_wire
from nanorunner.workshop.question import Setting, judge, read_answer
from nanorunner.workshop.questions import QUESTIONS, TEXTS_OF_TRIALS, text_of
from nanorunner.workshop.sandbox_channel import Race

# Worked out by hand for Qwen3-0.6B in bfloat16: (question, tp, runner) -> answer.
QWEN3 = {
    (1, 1, "v2"): "0",
    (1, 4, "v2"): "13",
    (2, 4, "v2"): "8",
    (3, 4, "v2"): "2,603",
    (4, 1, "v2"): "29,360,128",
    (4, 4, "v2"): "7340032",
    (5, 1, "v2"): "36",
    (6, 4, "v2"): "[1024, 1024]",
    (7, 4, "v2"): "1024x512",
    (8, 4, "v1"): "57",
    (8, 4, "v2"): "58",
    (8, 1, "v2"): "0",
    (9, 4, "v2"): "175_104",
    (10, 4, "v1"): "75968",
    (10, 4, "v2"): "8",
    (11, 1, "v2"): "0.25 ms",
    (12, 4, "v2"): "3",
    (13, 4, "v1"): "0",
    (13, 4, "v2"): "0, 1, 2, 3",
    (14, 3, "v2"): "151,938",
    (15, 3, "v2"): "1",
    (15, 4, "v2"): "0",
}
# Slips that the hints are made for: the answer and words of its hint.
SLIPS: list[tuple[int, int, str, str]] = [
    (1, 4, "8", "before the first and after the last"),
    (1, 4, "14", "only an answer that an end-of-text ends"),
    (2, 4, "16", "query heads"),
    (3, 4, "299", "Which physical block does the table say"),
    (3, 4, "299.5", "logical block = token // 256"),
    (4, 4, "29360128", "the whole model's"),
    (4, 1, "58720256", "query heads"),
    (5, 1, "37", "Rounded up"),
    (7, 4, "256x2048", "cuts the rows"),
    (8, 4, "56", "the embedding"),
    (9, 4, "116736", "2 (p - 1) / p"),
    (10, 4, "75968", "gathers no logits"),
    (11, 1, "0.00025", "milliseconds"),
    (12, 4, "0", "fixed at capture"),
    (13, 4, "0", "its own shard"),
    (14, 3, "151936", "divide by tp"),
]


def setting(preset: str, tp: int, runner: str = "v2", **changes: Any) -> Setting:
    model = parse(load_preset(preset))
    settings = {"dtype": "bfloat16", "item_bytes": 2, **changes}
    return Setting(model=model, tp=tp, runner=runner, **settings)


@pytest.mark.parametrize(("case", "answer"), QWEN3.items())
def test_the_answers_for_qwen3_are_those_worked_out_by_hand(
    case: tuple[int, int, str], answer: str
) -> None:
    number, tp, runner = case
    is_right, told = judge(QUESTIONS[number](setting("qwen3-0.6b", tp, runner)), answer)
    assert is_right, told


@pytest.mark.parametrize(("number", "tp", "answer", "hint"), SLIPS)
def test_a_known_slip_gets_its_own_hint(number: int, tp: int, answer: str, hint: str) -> None:
    is_right, told = judge(QUESTIONS[number](setting("qwen3-0.6b", tp)), answer)
    assert not is_right
    assert hint in told


@pytest.mark.parametrize("preset", ["qwen3-0.6b", "smollm2-135m", "tiny-llama", "llama-3-8b"])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_every_question_can_be_asked_of_every_model_and_no_hint_tells_the_answer(
    preset: str, tp: int
) -> None:
    for runner in ("v1", "v2"):
        where = setting(preset, tp, runner)
        for number, ask in QUESTIONS.items():
            assert text_of(number, where)
            if number in TEXTS_OF_TRIALS:
                continue
            question = ask(where)
            answer = question.answer
            written = "x".join(map(str, answer)) if isinstance(answer, tuple) else str(answer)
            assert judge(question, written)[0]
            if isinstance(answer, int | float) and answer > 100:
                told = " ".join([question.hint, *question.slips.values()])
                assert f"{answer:,}" not in told
                assert f" {answer} " not in told


def test_the_answer_follows_model_tp_and_dtype() -> None:
    def of(preset: str, tp: int, **changes: Any) -> object:
        return QUESTIONS[4](setting(preset, tp, **changes)).answer

    assert of("smollm2-135m", 1) == 2 * 30 * 256 * 3 * 64 * 2
    assert of("smollm2-135m", 2) == 2 * 30 * 256 * 2 * 64 * 2
    assert of("smollm2-135m", 2, dtype="float32", item_bytes=4) == 2 * 30 * 256 * 2 * 64 * 4


def test_the_questions_of_the_wire_are_answered_by_trying() -> None:
    overwrite, event = QUESTIONS[16](setting("tiny-llama", 2)), QUESTIONS[17]
    assert judge(overwrite, "C")[0]
    is_right, told = judge(overwrite, "a")
    assert not is_right
    assert "Just tried with 200 calls: after set()" in told
    question = event(setting("tiny-llama", 2))
    assert question.answer == "no"
    assert not judge(question, "yes")[0]


def test_a_machine_too_busy_for_the_experiment_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even the strictest rule lost calls, so nothing can be said of the others."""
    monkeypatch.setattr(questions_wire, "race", lambda kind, num_calls: [Race(errors=["late"])])
    assert main(["check", "16", "c"]) == 2
    assert "the experiment could not be made here: of 200 calls" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["c", "C)", "(c)", "c) after every ack", "After every ack."])
def test_an_option_is_named_by_its_letter_or_its_words(text: str) -> None:
    assert read_answer("a", text, questions_wire.OPTIONS) == "c"
    assert read_answer("a", "after set()", questions_wire.OPTIONS) == "a"
    with pytest.raises(ValueError, match="write one of a, b, c"):
        read_answer("a", "never", questions_wire.OPTIONS)


@pytest.mark.parametrize(
    ("like", "text", "expected"),
    [
        (1, "29,360,128", 29360128),
        (1, " 1_000 bytes", 1000),
        (1.0, "0.25 ms", 0.25),
        ((1, 2), "64 x 32", (64, 32)),
        (frozenset({0}), "ranks 1 and 0", frozenset({0, 1})),
        ("a", " B ", "b"),
    ],
)
def test_an_answer_may_be_written_in_several_ways(like: Any, text: str, expected: object) -> None:
    assert read_answer(like, text) == expected


@pytest.mark.parametrize(
    ("like", "text", "words"),
    [(1, "many", "a number"), ((1, 2), "7", "a shape"), (frozenset({0}), "all", "ranks")],
)
def test_what_is_no_answer_is_refused(like: Any, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"write {words}"):
        read_answer(like, text)


def test_the_command_lists_asks_and_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    qwen3 = ["--model", "qwen3-0.6b", "--tp", "1"]
    assert main(["check", *qwen3]) == 0
    text = capsys.readouterr().out
    for number in QUESTIONS:
        assert f"{number:>4}  {text_of(number, setting('qwen3-0.6b', 1))}" in text
    assert main(["check", "4", *qwen3]) == 0
    assert "qwen3-0.6b, tp 1, runner v2, bfloat16: 28 layers" in capsys.readouterr().out
    assert main(["check", "4", *qwen3, "29360128"]) == 0
    assert capsys.readouterr().out.startswith("right: 2 * 28 layers * 256 tokens * 8 KV head(s)")
    assert main(["check", "4", "7", *qwen3]) == 1
    assert capsys.readouterr().out.startswith("not yet. Hint: 2 (K and V)")
    assert main(["check", "4", "many", *qwen3]) == 2
    assert main(["check", "40", *qwen3]) == 2
    assert main(["check", "akc", *qwen3]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].endswith("'many': write a number")
    assert errors[1].endswith("exercise 40: the questions are 1 to 17")
    assert errors[2].endswith("unknown exercise 'akc'; did you mean ack?, or a number")
