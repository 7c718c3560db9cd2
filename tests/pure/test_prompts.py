"""Prompts in any accepted form come out as one; the others are refused by their place."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from nanorunner.jsonl import error_row, read_rows, result_row
from nanorunner.outputs import CompletionOutput, RequestOutput
from nanorunner.prompts import Prompt, read_messages, read_params, read_prompts
from nanorunner.sampling_params import SamplingParams

TEXT, IDS = Prompt("a", None), Prompt(None, [1, 2])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", [TEXT]),
        ([1, 2], [IDS]),
        ((1, 2), [IDS]),
        (["a", "a"], [TEXT, TEXT]),
        ([[1, 2], [1, 2]], [IDS, IDS]),
        ({"prompt": "a"}, [TEXT]),
        ([{"prompt_token_ids": [1, 2]}, "a"], [IDS, TEXT]),
        ([], []),
    ],
)
def test_every_form_of_a_prompt_is_understood(given: Any, expected: list[Prompt]) -> None:
    assert read_prompts(given) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (7, ["prompts: is int", "use a string"]),
        (b"a", ["prompts: is bytes"]),
        (["a", 7.5], ["prompts[1]: is float"]),
        (["a", None], ["prompts[1]: is NoneType"]),
        ([1, "a"], ["token id 'a' at 1"]),
        ([[1, 2], [3.5]], ["prompts[1]: token id 3.5 at 0"]),
        ([1, True], ["token id True at 1"]),
        ([{"promt": "a"}], ["prompts[0]", "is not a prompt"]),
        ([{"prompt": 5}], ["prompts[0]", "is not a prompt"]),
        ([{"prompt_token_ids": "a"}], ["prompts[0]", "token ids are str"]),
        ([{"prompt": "a", "prompt_token_ids": [1]}], ["is not a prompt"]),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_place(given: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        read_prompts(given)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("odd", [True, 2.0, "a", None, np.True_, np.float32(1)])
@pytest.mark.parametrize("place", [0, 350, 699])
def test_one_element_that_is_no_whole_number_is_found_among_many(odd: Any, place: int) -> None:
    ids: list[Any] = list(range(700))
    ids[place] = odd
    with pytest.raises(ValueError, match=r"^prompts\[1\]: token id ") as caught:
        read_prompts([[1], {"prompt_token_ids": ids}])
    assert f"{odd!r} at {place}: use a whole number" in str(caught.value)


def test_ids_come_out_as_a_list_of_plain_ints_that_the_user_does_not_share() -> None:
    given = [1, 2]
    (plain,), (mixed,) = read_prompts([given]), read_prompts([[1, np.int64(2)]])
    given.append(3)
    for prompt in (plain, mixed):
        assert prompt.token_ids == [1, 2]
        assert {type(token_id) for token_id in prompt.token_ids} == {int}


def test_params_are_one_for_all_or_one_for_each() -> None:
    one, two = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert read_params(one, 2) == [one, one]
    assert read_params([one, two], 2) == [one, two]
    assert read_params(None, 1) == [SamplingParams()]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([SamplingParams()], "1 given for 2 prompts"),
        ([SamplingParams()] * 3, "3 given for 2 prompts"),
        ({"max_tokens": 3}, "is dict, use a SamplingParams"),
        ([{"max_tokens": 3}] * 2, "is list, use a SamplingParams"),
    ],
)
def test_a_list_of_params_never_drops_a_prompt(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_params(given, 2)


@pytest.mark.parametrize("given", [[], "hello", [{"role": "user"}], [{"content": "a"}], ["a"]])
def test_messages_without_role_and_text_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="messages"):
        read_messages(given)


def test_each_line_of_a_pipe_is_a_request() -> None:
    lines = [
        b'{"prompt": "a", "max_tokens": 3, "id": "x"}\n',
        b"\n",
        b"plain text\n",
        b'"quoted"\n',
        b'{"prompt_token_ids": [1, 2], "stop": "end"}',
        b'{"messages": [{"role": "user", "content": "a"}]}',
    ]
    rows = read_rows(lines, SamplingParams(max_tokens=9))
    assert [row.error for row in rows] == [""] * 5
    assert [row.index for row in rows] == [0, 1, 2, 3, 4]
    assert [row.prompt for row in rows] == ["a", "plain text", "quoted", None, None]
    assert [row.params.max_tokens for row in rows if row.params] == [3, 9, 9, 9, 9]
    assert rows[3].params is not None
    assert rows[3].params.stop == ("end",)
    assert rows[0].id == "x"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "a"', "not JSON"),
        (b'"unclosed', "not JSON"),
        (b"[1, 2]", "a JSON list is not a request"),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (b"{}", "no prompt: give one of"),
        (b'{"prompt": "a", "messages": []}', "prompt and messages: give one of"),
        (b'{"prompt": 5}', "prompt: is int, use a string"),
        (b'{"promt": "a"}', "unknown key 'promt'; did you mean prompt?"),
        (b'{"prompt": "a", "max_token": 5}', "did you mean max_tokens?"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens 0"),
        (b'{"prompt": "a", "max_tokens": 2.5}', "max_tokens 2.5: is float, use int"),
        (b'{"prompt": "a", "temperature": -1}', "temperature -1"),
        (b'{"prompt": "a", "temperature": "hot"}', "temperature 'hot': is str, use float"),
        (b'{"prompt": "a", "stop": [5]}', "stop"),
    ],
)
def test_a_bad_line_becomes_a_row_with_an_error(line: bytes, words: str) -> None:
    rows = read_rows([line, b'{"prompt": "good"}'], SamplingParams())
    assert words in rows[0].error
    assert json.loads(error_row(rows[0], rows[0].error)) == {"index": 0, "error": rows[0].error}
    assert rows[1].error == ""


def test_a_result_row_holds_what_a_program_needs() -> None:
    (row,) = read_rows([b'{"prompt": "a", "id": 7}'], SamplingParams())
    completion = CompletionOutput(0, "\u00e9\n", [4, 5], "length")
    line = result_row(row, RequestOutput(3, "a", [1], [completion]))
    assert "\n" not in line
    assert json.loads(line) == {
        "index": 0,
        "id": 7,
        "text": "\u00e9\n",
        "token_ids": [4, 5],
        "finish_reason": "length",
        "num_prompt_tokens": 1,
    }
