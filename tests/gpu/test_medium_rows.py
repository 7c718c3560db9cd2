"""Projections of 17 to 256 rows on a GPU: real shapes and plans, and launches that overlap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_decode_cases import fused_case
from kernel_cases import normal
from slow_producer import slow_copy

from nanorunner.kernels.few_rows_plans import CUBLAS, PLAIN, table_entry
from nanorunner.kernels.fused_decode import fused_decode
from nanorunner.kernels.medium_rows import (
    gate_up_silu,
    gate_up_silu_reference,
    linear_add_norm,
    linear_add_norm_reference,
    linear_medium,
)
from nanorunner.kernels.medium_rows_plans import (
    LIBRARY,
    TILES,
    MediumRowsPlan,
    most_medium_rows,
    plan_medium_rows,
    table_name,
)

EPS = 1e-6
TOLERANCE = {torch.bfloat16: 6e-2, torch.float16: 8e-3}
PLANS = {
    "steps, fetched early": MediumRowsPlan(TILES, 64, 32, 128, 1, 4, 4),
    "steps, not early": MediumRowsPlan(TILES, 64, 64, 64, 1, 4, 6, is_early=False),
    "steps, swapped": MediumRowsPlan(TILES, 32, 64, 128, 1, 4, 4, is_swapped=True),
    "tiles of 32 rows": MediumRowsPlan(TILES, 32, 64, 128, 2, 4, 3),
    "held": MediumRowsPlan(TILES, 64, 64, 256, 4, 4, 1),
    "held, swapped": MediumRowsPlan(TILES, 64, 64, 512, 2, 4, 1, is_swapped=True),
    "held by 8 warps": MediumRowsPlan(TILES, 128, 64, 512, 2, 8, 1),
    "whole rows held": MediumRowsPlan(TILES, 64, 32, 1024, 1, 8, 1),
    "8 shares": MediumRowsPlan(TILES, 128, 128, 64, 8, 8, 2),
    "large tiles": MediumRowsPlan(TILES, 128, 256, 64, 1, 8, 4),
    "side tile": MediumRowsPlan(TILES, 64, 192, 64, 1, 4, 6),
    "side tile, 8 warps": MediumRowsPlan(TILES, 128, 192, 64, 1, 8, 5),
    "side tile of 16": MediumRowsPlan(TILES, 64, 48, 128, 2, 4, 4, is_early=False),
    "side tile, swapped": MediumRowsPlan(TILES, 64, 192, 64, 2, 8, 4, is_swapped=True),
    "side tile held": MediumRowsPlan(TILES, 64, 96, 256, 4, 8, 1),
}


EVEN, RAGGED = (2048, 1024), (1001, 1006)
# Every plan once; each other matter with plans that differ in it, since compiling is what it takes.
RUNS = [(name, torch.bfloat16, EVEN) for name in PLANS]
RUNS += [(name, torch.float16, EVEN) for name in ("steps, fetched early", "held, swapped")]
RUNS += [
    (name, torch.bfloat16, RAGGED)
    for name in (
        "steps, fetched early",
        "steps, swapped",
        "tiles of 32 rows",
        "held",
        "side tile of 16",
        "side tile held",
    )
]


@pytest.mark.parametrize(("name", "dtype", "shape"), RUNS)
def test_every_plan_equals_pytorch(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    plan, (out, num_in) = PLANS[name], shape
    weight = (normal(2 * out, num_in) * num_in**-0.5).to(dtype)
    gain, bias = normal(2 * out, dtype=dtype), normal(2 * out + 1, dtype=dtype)[1:]
    limits: dict[str, Any] = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for rows in (17, 33, 64, 100, 128, 200, 256):
        x = normal(rows, num_in + 16, dtype=dtype)[:, :num_in]
        linear = F.linear(x, weight, bias)
        torch.testing.assert_close(linear_medium(x, weight, bias, plan), linear, **limits)
        gated = gate_up_silu_reference(x, weight, bias)
        torch.testing.assert_close(gate_up_silu(x, weight, bias, plan), gated, **limits)
        residual = normal(rows, 2 * out, dtype=dtype)
        expected_residual = residual.clone()
        normed = linear_add_norm(x, weight, bias, residual, gain, EPS, plan)
        expected = linear_add_norm_reference(x, weight, bias, expected_residual, gain, EPS)
        torch.testing.assert_close(normed, expected, **limits)
        torch.testing.assert_close(residual, expected_residual, **limits)


def test_the_table_decides_and_a_shape_without_an_entry_is_the_librarys(tmp_path: Path) -> None:
    x, weight = normal(48, 256).bfloat16(), normal(512, 256).bfloat16()
    plan = MediumRowsPlan(TILES, 64, 64, 128, 2)
    entries = [((PLAIN, 512, 256, 64), plan), ((PLAIN, 512, 256, 96), MediumRowsPlan(CUBLAS))]
    (tmp_path / table_name(weight.device)).write_text(
        "".join(table_entry(*entry, 1.0) + "\n" for entry in entries)
    )
    chosen = [plan_medium_rows(PLAIN, rows, weight, tmp_path).kind for rows in (16, 17, 64, 65, 97)]
    assert chosen == [CUBLAS, TILES, TILES, CUBLAS, CUBLAS]
    assert most_medium_rows([(PLAIN, weight), (PLAIN, weight[:, :128])], tmp_path) == 64
    assert plan_medium_rows(PLAIN, 48, weight[:, :128], tmp_path) == LIBRARY, "not contiguous"
    assert plan_medium_rows(PLAIN, 48, weight.float(), tmp_path) == LIBRARY
    assert plan_medium_rows(PLAIN, 48, weight) == LIBRARY, "no such shape was measured"
    assert torch.equal(linear_medium(x, weight), F.linear(x, weight))


# qkv, o, gate_up and down of Qwen3-0.6B: each kind of plan before and after each other kernel.
CHAINS = {
    17: (
        MediumRowsPlan(TILES, 32, 64, 128, 1, 4, 4, is_swapped=True),
        MediumRowsPlan(TILES, 64, 64, 256, 8, 4, 1),
        MediumRowsPlan(TILES, 32, 64, 128, 1, 4, 4),
        MediumRowsPlan(TILES, 32, 64, 512, 6, 4, 1, is_swapped=True),
    ),
    64: (
        MediumRowsPlan(TILES, 64, 32, 1024, 1, 8, 1),
        MediumRowsPlan(TILES, 64, 64, 64, 8, 4, 4),
        MediumRowsPlan(TILES, 64, 128, 512, 2, 8, 1),
        MediumRowsPlan(CUBLAS),
    ),
    128: (
        MediumRowsPlan(TILES, 128, 128, 256, 4, 8, 1),
        MediumRowsPlan(TILES, 64, 64, 512, 4, 4, 1),
        MediumRowsPlan(TILES, 128, 64, 128, 1, 4, 3),
        MediumRowsPlan(TILES, 128, 64, 512, 6, 8, 1),
    ),
    96: (
        MediumRowsPlan(TILES, 64, 48, 128, 1, 4, 4),
        MediumRowsPlan(TILES, 64, 192, 64, 8, 8, 4),
        MediumRowsPlan(TILES, 128, 96, 128, 1, 8, 3),
        MediumRowsPlan(TILES, 64, 96, 512, 6, 8, 1),
    ),
}


class Chain:
    """Two layers whose kernels all overlap, with a slow producer before some of them."""

    def __init__(self, rows: int) -> None:
        self.plans = CHAINS[rows]
        self.cases = [
            fused_case([250 + 3 * i for i in range(rows)], (16, 8, 128), torch.bfloat16)
            for _ in range(2)
        ]
        shapes = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
        self.weights = [
            [(normal(*shape) * shape[1] ** -0.5).bfloat16().roll(i, 0) for shape in shapes]
            for i in range(2)
        ]
        self.gain = normal(1024, dtype=torch.bfloat16)
        self.x, self.late = (torch.zeros(rows, 1024).cuda().bfloat16() for _ in range(2))

    def run(self, source: torch.Tensor, *, in_turn: bool = False) -> torch.Tensor:
        """Return the chain's output for a source; in_turn lets each kernel end first."""

        def done() -> None:
            if in_turn:
                torch.cuda.synchronize()

        residual = source.clone()
        x = slow_copy(source, self.x)
        plans = self.plans
        for (qkv, o, gate_up, down), case in zip(self.weights, self.cases, strict=True):
            done()
            h = linear_medium(x, qkv, None, plans[0])
            done()
            attended = fused_decode(**(case.arguments | {"qkv": h}), reads_early=False)
            done()
            attended = attended.view(len(source), -1)
            x = linear_add_norm(attended, o, None, residual, self.gain, EPS, plans[1])
            done()
            x = slow_copy(x, self.late)
            done()
            h = gate_up_silu(x, gate_up, None, plans[2])
            done()
            x = linear_add_norm(h, down, None, residual, self.gain, EPS, plans[3])
        done()
        return torch.cat([x, residual])


@pytest.mark.limit(120)
@pytest.mark.parametrize("rows", CHAINS)
def test_a_thousand_replays_of_overlapping_kernels_never_differ(rows: int) -> None:
    chain = Chain(rows)
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
