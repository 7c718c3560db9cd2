"""Projections of few rows on a GPU: real shapes and plans, and launches that overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_decode_cases import fused_case
from kernel_cases import normal
from slow_producer import slow_copy

from nanorunner.kernels.few_rows import (
    add_norm_gate_up_silu,
    add_norm_gate_up_silu_reference,
    add_norm_linear,
    add_norm_linear_reference,
    linear_few,
    serves,
)
from nanorunner.kernels.few_rows_plans import CUBLAS, DOT, ROWS, FewRowsPlan
from nanorunner.kernels.few_rows_triton import AnyPlan
from nanorunner.kernels.fused_decode import fused_decode
from nanorunner.kernels.medium_rows_plans import TILES, MediumRowsPlan

EPS = 1e-6
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 8e-3}
PLANS = {
    "by rule or table": None,
    "whole rows": FewRowsPlan(ROWS, 4, 4096, 1, 8),
    "rows in chunks": FewRowsPlan(ROWS, 8, 1024, 1, 8),
    "dot in one step": FewRowsPlan(DOT, 16, 2048, 1, 8),
    "dot in steps": FewRowsPlan(DOT, 16, 128, 1, 4),
    "dot of 8 rows a program": FewRowsPlan(DOT, 8, 256, 1, 4),
    "dot, norm apart": FewRowsPlan(DOT, 32, 128, 1, 4, is_fused=False),
    "dot in 4 shares": FewRowsPlan(DOT, 16, 128, 4, 4),
    "library": FewRowsPlan(CUBLAS, is_fused=False),
    "tiles": MediumRowsPlan(TILES, 16, 64, 128, 1, 4, 5, is_swapped=True),
    "tiles in long pieces": MediumRowsPlan(TILES, 16, 128, 256, 1, 4, 3, is_swapped=True),
    "tiles in 2 shares": MediumRowsPlan(TILES, 16, 64, 256, 2, 4, 2, is_swapped=True),
    "tiles, held": MediumRowsPlan(TILES, 16, 64, 256, 4, 8, 1, is_swapped=True),
    "tiles, x first": MediumRowsPlan(TILES, 16, 32, 128, 1, 4, 4),
}


# Matrix instructions have no full float32: no plan by rule or table is a dot of it.
PAIRS = [
    pytest.param(plan, dtype, id=f"{name}, {dtype}")
    for name, plan in PLANS.items()
    for dtype in TOLERANCE
    if plan is None or plan.kind not in (DOT, TILES) or dtype != torch.float32
]


@pytest.mark.parametrize(("plan", "dtype"), PAIRS)
@pytest.mark.parametrize(("out", "num_in"), [(2048, 1024), (1001, 1030)])
def test_every_plan_equals_pytorch(
    out: int, num_in: int, plan: AnyPlan | None, dtype: torch.dtype
) -> None:
    weight = (normal(2 * out, num_in) * num_in**-0.5).to(dtype)
    gain, bias = normal(num_in, dtype=dtype), normal(2 * out, dtype=dtype)
    limits: dict[str, Any] = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for rows in (1, 3) if plan is not None and plan.kind == ROWS else (1, 7, 16):
        assert serves(rows, weight)
        x, residual = normal(rows, num_in, dtype=dtype), normal(rows, num_in + 1, dtype=dtype)
        arguments = (x, residual[:, :num_in], gain, EPS, weight, bias)
        actual = add_norm_linear(*arguments, plan)
        expected = add_norm_linear_reference(*arguments)
        torch.testing.assert_close(actual[0], expected[0], **limits)
        assert torch.equal(actual[1], expected[1])
        actual = add_norm_gate_up_silu(*arguments, plan)
        expected = add_norm_gate_up_silu_reference(*arguments)
        torch.testing.assert_close(actual[0], expected[0], **limits)
        assert torch.equal(actual[1], expected[1])
        plain = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(linear_few(x, weight, bias, plan), plain, **limits)


class Chain:
    """Two layers whose kernels all overlap, with a slow producer before each of them."""

    def __init__(self, rows: int, plan: AnyPlan | None) -> None:
        self.plan = plan
        self.cases = [
            fused_case([513 + 100 * i for i in range(rows)], (16, 8, 128), torch.bfloat16)
            for _ in range(2)
        ]
        shapes = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
        self.weights = [
            [(normal(*shape) * shape[1] ** -0.5).bfloat16().roll(i, 0) for shape in shapes]
            for i in range(2)
        ]
        self.gain = normal(1024, dtype=torch.bfloat16)
        self.x, self.late = (torch.zeros(rows, 1024).cuda().bfloat16() for _ in range(2))
        self.late_qkv = torch.zeros(rows, 4096).cuda().bfloat16()

    def run(self, source: torch.Tensor, *, in_turn: bool = False) -> torch.Tensor:
        """Return the chain's output for a source; in_turn lets each kernel end first."""

        def done() -> None:
            if in_turn:
                torch.cuda.synchronize()

        x, residual = slow_copy(source, self.x), source
        for (qkv, o, gate_up, down), case in zip(self.weights, self.cases, strict=True):
            done()
            h, residual = add_norm_linear(x, residual, self.gain, EPS, qkv, None, self.plan)
            done()
            # It reads KV early, so the qkv projection comes right before.
            attended = fused_decode(**(case.arguments | {"qkv": h}))
            done()
            x = linear_few(attended.view(len(source), -1), o, None, self.plan)
            done()
            x = slow_copy(x, self.late)
            done()
            norm = (self.gain, EPS)
            h, residual = add_norm_gate_up_silu(x, residual, *norm, gate_up, None, self.plan)
            done()
            x = slow_copy(linear_few(h, down, None, self.plan), self.x)
        done()
        return x.clone()


@pytest.mark.limit(120)
@pytest.mark.parametrize(
    ("rows", "name"),
    [
        (1, None),
        (3, None),
        (16, None),
        (16, "tiles"),
        (7, "tiles in 2 shares"),
        (16, "tiles, held"),
    ],
)
def test_a_thousand_replays_of_overlapping_kernels_never_differ(
    rows: int, name: str | None
) -> None:
    chain = Chain(rows, None if name is None else PLANS[name])
    sources = [normal(rows, 1024 + i, dtype=torch.bfloat16)[:, :1024].contiguous() for i in (0, 1)]
    expected = [chain.run(source, in_turn=True) for source in sources]
    graphs, outputs = [], []
    for source in sources:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.append(chain.run(source))
        graphs.append(graph)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(1000):
        graphs[turn % 2].replay()
        wrong += (outputs[turn % 2] != expected[turn % 2]).any()
    assert not expected[0].isnan().any()
    assert not torch.equal(*expected)
    assert int(wrong) == 0
