"""--check-ranks and --share-gpu refuse, by name, what cannot go with them."""

from __future__ import annotations

from typing import Any

import pytest

from nanorunner.config import Config, make_config
from nanorunner.flags import Parser, add_engine_flags, engine_settings
from nanorunner.rank_rules import why_eager

REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"check_ranks": True}, ["check_ranks", "at tp 1", "--tp 2 or more"]),
    ({"check_ranks": True, "tp": 2, "step_times": True}, ["check_ranks with step_times"]),
    ({"check_ranks": True, "tp": 2, "trace": "there"}, ["check_ranks with trace there"]),
    (
        {"check_ranks": True, "tp": 2, "speculative": "draft", "draft_model": "tiny-llama"},
        ["check_ranks with speculative draft", "--speculative ngram or off"],
    ),
    ({"check_ranks": 2, "tp": 2}, ["check_ranks 2", "use bool"]),
    ({"share_gpu": True}, ["share_gpu", "at tp 1", "--tp 2 or more"]),
    ({"share_gpu": True, "tp": 2, "device": "cpu"}, ["share_gpu", "needs an NVIDIA GPU"]),
    ({"share_gpu": True, "tp": 2, "all_reduce": "peer"}, ["all_reduce peer", "use auto", "gloo"]),
    ({"share_gpu": True, "tp": 2, "all_reduce": "nccl"}, ["all_reduce nccl", "use auto", "gloo"]),
    ({"share_gpus": True}, ["unknown setting 'share_gpus'", "did you mean share_gpu?"]),
    ({"check_rank": True}, ["unknown setting 'check_rank'", "did you mean check_ranks?"]),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_go_together_is_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        make_config(settings)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_neither_is_ever_chosen_by_itself() -> None:
    assert (Config().check_ranks, Config().share_gpu) == (False, False)
    assert why_eager(make_config({"tp": 2})) == ""


def test_both_are_flags_and_each_is_a_reason_against_graphs() -> None:
    parser = Parser()
    add_engine_flags(parser)
    given = engine_settings(parser.parse(["--tp", "2", "--check-ranks", "--share-gpu"]))
    assert given == {"tp": 2, "check_ranks": True, "share_gpu": True}
    assert why_eager(make_config(given)).startswith("--check-ranks")
    assert why_eager(make_config({"tp": 2, "share_gpu": True})).startswith("--share-gpu")
