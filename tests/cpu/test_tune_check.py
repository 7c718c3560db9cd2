"""The check of scripts/tune.py passes what rounding explains and finds every lost tile."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import normal

from nanorunner.kernels.few_rows import add_norm_gate_up_silu_reference, add_norm_linear_reference
from nanorunner.kernels.linear import linear
from scripts.tune_check import excess, projection_truth

EPS = 1e-6
ROWS = 8


class Case:
    """One projection in bfloat16: its inputs, and its results by the model's own rounding."""

    def __init__(self, op: str, num_out: int, num_in: int, scale: float = 1.0) -> None:
        bfloat16 = torch.bfloat16
        self.op = op
        self.x, self.residual = normal(ROWS, num_in), normal(ROWS, num_in + 1)[:, 1:]
        self.x, self.residual = self.x.to(bfloat16), self.residual.to(bfloat16)
        self.gain = normal(num_in).abs().to(bfloat16)
        self.weight = (normal(num_out, num_in) * scale * num_in**-0.5).to(bfloat16)
        if op == "plain":
            self.truth = projection_truth(self.x, self.weight)
        else:
            norm = (self.residual, self.gain, EPS)
            self.truth = projection_truth(self.x, self.weight, *norm, is_gated=op == "gated")

    def result(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what the reference makes of a weight."""
        if self.op == "plain":
            return linear(self.x, weight)
        reference = (
            add_norm_gate_up_silu_reference if self.op == "gated" else add_norm_linear_reference
        )
        return reference(self.x, self.residual, self.gain, EPS, weight)[0]

    def excess_without(self, rows: slice, columns: slice) -> float:
        """Return the excess of a result that leaves out a part of the weight."""
        weight = self.weight.clone()
        weight[rows, columns] = 0
        return excess(self.result(weight), self.truth)


@pytest.mark.parametrize("op", ["norm", "gated", "plain"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
def test_rounding_is_allowed_at_every_size_of_the_values(op: str, scale: float) -> None:
    case = Case(op, 2048, 1024, scale)
    right = case.result(case.weight)
    assert excess(right, case.truth) <= 1.0
    assert excess(right * 1.04, case.truth) > 1.0, "a bound that allows 4 % checks nothing"


@pytest.mark.parametrize("op", ["norm", "gated", "plain"])
def test_a_dropped_tile_is_found(op: str) -> None:
    case = Case(op, 512, 1024)
    everything = slice(None)
    assert case.excess_without(everything, slice(992, 1024)) > 1.0, "the last 32 columns"
    assert case.excess_without(everything, slice(0, 256)) > 5.0, "a step of 256 columns"
    assert case.excess_without(slice(240, 256), everything) > 5.0, "the weights of a program"


def test_32_dropped_columns_of_12288_are_found() -> None:
    case = Case("plain", 512, 12288)
    assert case.excess_without(slice(None), slice(12256, 12288)) > 1.0


def test_a_share_that_is_added_twice_or_never_written_is_found() -> None:
    case = Case("plain", 64, 1024)
    twice = case.weight.clone()
    twice[:, :512] *= 2
    assert excess(case.result(twice), case.truth) > 5.0
    never = case.result(case.weight)
    never[3, 60] = torch.nan
    assert excess(never, case.truth) == math.inf
