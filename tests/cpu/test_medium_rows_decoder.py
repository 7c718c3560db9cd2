"""A decode of 2 to 256 rows gives the same logits with tiles as on every other step's road."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from decoder_harness import Ranks, runner_config

from nanorunner.kernels.few_rows_triton import Norm, project_triton
from nanorunner.kernels.medium_rows import gate_up_silu, linear_add_norm, linear_medium
from nanorunner.kernels.medium_rows_plans import TILES, MediumRowsPlan
from nanorunner.presets import load_preset
from nanorunner.workers.architectures import parse

pytestmark = pytest.mark.beside

ROWS = 20
INTERPRETER = threading.Lock()  # the ranks are threads here, and it serves one at a time
MODEL = load_preset("tiny-qwen3") | {"attention_bias": True, "num_hidden_layers": 2}
PLANS = (
    MediumRowsPlan(TILES, 32, 64, 64),
    MediumRowsPlan(TILES, 32, 128, 32, 2),
    MediumRowsPlan(TILES, 32, 48, 32, 2),
)


def decode(ranks: Ranks, rows: int) -> torch.Tensor:
    """Return the logits of requests of one token each, a block each."""
    return ranks.step([[3 * i + 1] for i in range(rows)], [0] * rows, [[i] for i in range(rows)])


def new_ranks(tp: int, **attributes: Any) -> Ranks:
    """Return the same model on tp ranks, with such attributes of the decoders."""
    ranks = Ranks(runner_config(parse(MODEL), tp, seed=3), num_blocks=ROWS)
    for decoder in ranks.decoders:
        for name, value in attributes.items():
            assert hasattr(decoder, name)
            setattr(decoder, name, value)
    return ranks


def with_plan(function: Callable[..., torch.Tensor], plan: MediumRowsPlan) -> Any:
    """Return a projection that takes this plan, and the packed weights of a CPU."""

    def project(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        with INTERPRETER:
            return function(x, weight.to_dense() if weight.is_mkldnn else weight, *rest, plan=plan)

    return project


@pytest.mark.parametrize("tp", [1, 2])
def test_without_tiles_it_is_the_same_to_the_bit(tp: int) -> None:
    expected = decode(new_ranks(tp), ROWS)
    road = new_ranks(tp, has_few_rows=True, max_medium_rows=ROWS)
    assert torch.equal(decode(road, ROWS), expected)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_with_tiles_the_logits_are_the_same(tp: int, plan: MediumRowsPlan) -> None:
    expected = decode(new_ranks(tp), ROWS)
    tiles = {
        "linear_medium": with_plan(linear_medium, plan),
        "linear_add_norm": with_plan(linear_add_norm, plan),
        "gate_up_silu": with_plan(gate_up_silu, plan),
    }
    road = new_ranks(tp, has_few_rows=True, max_medium_rows=ROWS, **tiles)
    actual = decode(road, ROWS)
    assert expected.std() > 0.05, "logits near zero would agree whatever the model did"
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_with_tiles_few_rows_give_the_same_logits(tp: int, num_splits: int) -> None:
    rows = 5
    plan = MediumRowsPlan(TILES, 16, 64, 32, num_splits, is_swapped=True)

    def project(
        x: torch.Tensor, norm: Norm | None, weight: torch.Tensor, bias: Any, is_gated: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = weight.to_dense() if weight.is_mkldnn else weight
        with INTERPRETER:
            return project_triton(x, weight, bias, plan, norm=norm, is_gated=is_gated)

    def plain(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return project(x, None, weight, bias, False)[0]

    def normed(x: torch.Tensor, *places: Any, is_gated: bool = False) -> Any:
        *norm, weight, bias = places
        return project(x, Norm(*norm), weight, bias, is_gated)

    expected = decode(new_ranks(tp), rows)
    road = new_ranks(
        tp,
        has_few_rows=True,
        max_medium_rows=ROWS,
        linear_few=plain,
        add_norm_linear=normed,
        add_norm_gate_up_silu=partial(normed, is_gated=True),
    )
    torch.testing.assert_close(decode(road, rows), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "max_medium_rows", "is_taken"),
    [(20, 20, True), (20, 19, False), (17, 256, True), (16, 256, False)],
)
def test_only_as_many_rows_as_were_measured_take_it(
    rows: int, max_medium_rows: int, is_taken: bool
) -> None:
    taken = []

    def watched(*args: Any) -> torch.Tensor:
        taken.append(len(args[0]))
        return linear_medium(*args)

    attributes = {"has_few_rows": True, "max_medium_rows": max_medium_rows}
    decode(new_ranks(1, linear_medium=watched, **attributes), rows)
    assert taken == ([rows] * 2 if is_taken else []), "the qkv of two layers"


def test_a_decoder_without_a_gpu_has_no_such_road() -> None:
    assert new_ranks(1).decoders[0].max_medium_rows == 0
