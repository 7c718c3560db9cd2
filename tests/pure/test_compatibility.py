"""One table says what each runner can do, and everything that speaks of it agrees."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from nanorunner.compatibility import TABLE, check_feature, check_params, markdown, missing, note
from nanorunner.config import CHOICES, Config, check
from nanorunner.sampling_params import SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
ASKED: dict[str, Any] = {
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {3: 1.0},
    "allowed_token_ids": (3,),
    "bad_words": ("x",),
    "logprobs": 0,
    "prompt_logprobs": 0,
}
NOT_OF_A_REQUEST = {"embed", "speculative", "async_depth"}


def test_every_setting_of_a_request_is_in_the_table_by_its_name() -> None:
    names = [feature.name for feature in TABLE]
    assert len(set(names)) == len(names)
    assert {field.name for field in fields(SamplingParams)} == set(names) - NOT_OF_A_REQUEST
    assert hasattr(Config, "async_depth")
    assert CHOICES["runner"] == ("v1", "v2")


def test_what_the_table_denies_is_refused_by_name_and_with_the_flag_to_change() -> None:
    assert set(missing("v1")) == set(ASKED) | NOT_OF_A_REQUEST
    assert missing("v2") == ()
    for name, value in ASKED.items():
        params = SamplingParams(**{name: value})
        check_params("v2", params)
        with pytest.raises(ValueError, match=rf"^{name} .*runner v1 has no {name}.*--runner v2"):
            check_params("v1", params)
    with pytest.raises(ValueError, match=r"embed: runner v1 has no embed; use --runner v2"):
        check_feature("v1", "embed")
    with pytest.raises(ValueError, match=r"async_depth 2: .*--runner v2"):
        check(Config(runner="v1", async_depth=2))


def test_what_the_table_grants_both_is_granted() -> None:
    everything = SamplingParams(
        n=2, top_k=5, top_p=0.5, seed=1, stop=("x",), stop_token_ids=(1,), min_tokens=2
    )
    for runner in CHOICES["runner"]:
        check_params(runner, everything)


def test_the_start_log_names_what_is_missing() -> None:
    assert "min_p" in note("v1")
    assert "--runner v2" in note("v1")
    assert "lacks nothing" in note("v2")


def test_the_page_has_the_table() -> None:
    found = re.search(r"<!-- table -->\n(.*)\n<!-- /table -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    assert found.group(1) == markdown()
