"""A line of JSON can ask for all that SamplingParams has, and gets all of it back."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import fields

import pytest

from nanorunner.cli import run_parser
from nanorunner.flags import sampling_params
from nanorunner.jsonl import LEAST_LOGPROB, error_row, read_rows, result_row
from nanorunner.logprobs import Logprob
from nanorunner.outputs import CompletionOutput, RequestOutput
from nanorunner.sampling_params import SamplingParams


def test_every_key_of_a_line_is_a_setting() -> None:
    asked = {
        "n": 2,
        "temperature": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -100, "6": 1.5},
        "allowed_token_ids": [5, 6],
        "bad_words": ["x", [1, 2]],
        "logprobs": 2,
        "prompt_logprobs": 0,
    }
    line = json.dumps({"prompt": "a", **asked}).encode()
    (row,) = read_rows([line], SamplingParams())
    assert row.error == ""
    assert row.params == SamplingParams(**asked)  # type: ignore[arg-type]


def test_a_wrong_setting_is_the_error_of_its_own_line() -> None:
    lines = [b'{"prompt": "a", "logit_bias": {"x": 1}}', b'{"prompt": "b", "min_p": "much"}', b"c"]
    errors = [row.error for row in read_rows(lines, SamplingParams())]
    assert "logit_bias" in errors[0]
    assert "min_p 'much': is str, use float" in errors[1]
    assert errors[2] == ""


def test_lines_that_hold_no_request_are_rows_of_their_own() -> None:
    spaces, deep = "\u3000\u00a0".encode(), b"[" * 100_000
    lines = [b"good", b" " + spaces + b"\n", deep, b'{"prompt": "good too"}', b"caf\xe9"]
    rows = read_rows(lines, SamplingParams())
    assert [row.prompt for row in rows if not row.error] == ["good", "good too"]
    errors = [row.error for row in rows if row.error]
    assert [text.split(";")[0].split(":")[0] for text in errors] == [
        "only spaces",
        "not a request",
        "not UTF-8 at byte 3",
    ]


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    lines = [b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 2}\n', b"b"]
    first, second = read_rows(lines, SamplingParams())
    assert first.params is not None
    assert (first.prompt, first.params.max_tokens, second.prompt) == ("a", 2, "b")


def test_an_id_of_half_a_character_is_written_in_ascii() -> None:
    (row,) = read_rows([b'{"prompt": "a", "id": "\\ud83d"}'], SamplingParams())
    line = error_row(row, "no")
    assert json.loads(line.encode()) == {"index": 0, "id": "\ud83d", "error": "no"}


def test_a_narrow_stdout_gets_json_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = read_rows([b"a"], SamplingParams())
    assert error_row(row, "caf\u00e9").isascii() is False
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    line = error_row(row, "caf\u00e9")
    assert line.isascii()
    assert json.loads(line) == {"index": 0, "error": "caf\u00e9"}


def test_completions_and_log_probabilities_are_written_as_plain_json() -> None:
    place = {7: Logprob(float("-inf"), 9, "a"), 8: Logprob(-0.5, 1)}
    completions = [
        CompletionOutput(index, "text", [7], "stop", logprobs=[place]) for index in range(2)
    ]
    output = RequestOutput(0, None, [1, 2], completions, prompt_logprobs=[None, place])
    (row,) = read_rows([b"x"], SamplingParams())
    found = json.loads(result_row(row, output), parse_constant=lambda name: name)
    expected = {
        "7": {"logprob": LEAST_LOGPROB, "rank": 9, "decoded_token": "a"},
        "8": {"logprob": -0.5, "rank": 1, "decoded_token": None},
    }
    assert found["logprobs"] == [expected]
    assert found["prompt_logprobs"] == [None, expected]
    assert [one["index"] for one in found["outputs"]] == [0, 1]
    assert found["outputs"][1]["logprobs"] == [expected]
    single = json.loads(result_row(row, RequestOutput(0, None, [1], completions[:1])))
    assert not {"outputs", "prompt_logprobs"} & set(single)


def test_every_setting_of_a_request_has_a_flag() -> None:
    words = "--min-p 0.1 --repetition-penalty 1.5 --presence-penalty 1 --frequency-penalty -1"
    words += " --logit-bias 5=-100 --logit-bias 6=2 --allowed-token-ids 5,6 --bad-word x"
    words += " --logprobs 2 --prompt-logprobs 1 --n 2 --temperature 1"
    params = sampling_params(run_parser().parse([*words.split(), "--bad-word", " y z"]))
    assert params.logit_bias == {5: -100, 6: 2}
    assert params.allowed_token_ids == (5, 6)
    assert params.bad_words == ("x", " y z")
    assert (params.n, params.logprobs, params.prompt_logprobs) == (2, 2, 1)
    flags = set(run_parser().long_flags())
    for field in fields(SamplingParams):
        flag = "--" + field.name.replace("_", "-")
        # --seed is the engine's; text is what the command line is for
        assert {flag, flag.removesuffix("s")} & flags or field.name == "detokenize", flag
