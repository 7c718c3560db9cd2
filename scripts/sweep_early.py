"""Time a decode's attention behind the qkv projection, with and without early fetches.

    python scripts/sweep_early.py [--models 0.6b,8b] [--batches 1,8,16,64] [--seconds 60]

While the projection computes, a program of kernels/fused_decode.py may fetch the first tokens of
its share to L2. So each attention here follows what precedes it in a step: add_norm_linear for few
rows, else what kernels/medium_rows.py takes (a table's tiles, or the vendor's library). A case is a
CUDA graph of such pairs, each over weights and KV of its own, so that the L2 cache is cold; a line
a plan has the microseconds of a pair. Plans differ in what a program does before its wait: nothing,
the default, more tokens to L2, more of the share in registers; or in the depth of the pipeline.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nanorunner.flags import Parser
from nanorunner.kernels.compile_ahead import compile_ahead, threads_of_rank
from nanorunner.kernels.decode_attention import DecodePlan
from nanorunner.kernels.few_rows import add_norm_linear
from nanorunner.kernels.few_rows_plans import MAX_ROWS
from nanorunner.kernels.fused_decode import plan_fused
from nanorunner.kernels.medium_rows import linear_medium
from nanorunner.kernels.triton_support import num_processors

if TYPE_CHECKING:
    from scripts.bench_engine import describe_machine, write
    from scripts.bench_kernels import READ_BYTES_PER_S, Launch, graph_us, num_sets
    from scripts.sweep_attention import (
        EPS,
        MAX_LEN,
        OPTIONS,
        UNIFORM,
        Layer,
        launch,
        lengths_of,
        make_layer,
    )
    from scripts.tune_fused import FAILURES, SIZES
else:  # a script's own folder is where Python looks first; it is no package
    from bench_engine import describe_machine, write
    from bench_kernels import READ_BYTES_PER_S, Launch, graph_us, num_sets
    from sweep_attention import (
        EPS,
        MAX_LEN,
        OPTIONS,
        UNIFORM,
        Layer,
        launch,
        lengths_of,
        make_layer,
    )
    from tune_fused import FAILURES, SIZES

BATCHES = [8, 64, 16, 1, 32, 24, 4, 2]  # requests: the most wanted first
COMPILE_TIMEOUT_S = 60.0
PLAN = "splits, tile, warps, stages, least share, early tokens, held tiles"


def early_plans(num_reqs: int, heads: tuple[int, int, int]) -> list[DecodePlan]:
    """Return plans that fetch nothing to L2, the default, more; or hold more, or pipeline more."""
    default = plan_fused(num_reqs, *heads, 2, num_processors(torch.device("cuda")))
    plans = [default._replace(early_tokens=0), default]
    plans += [default._replace(early_tokens=tokens) for tokens in (32, 64, 128)]
    if num_reqs <= MAX_ROWS:
        held = default._replace(held_tiles=2)
        plans += [held, held._replace(num_warps=4), default._replace(num_stages=3)]
    elif default.num_splits > 1:
        plans += [DecodePlan(1, 64, 2, 2, early_tokens=tokens) for tokens in (0, 32, 64, 128)]
    return list(dict.fromkeys(plans))


class Behind(NamedTuple):
    """A batch's layers, each with its own qkv projection; together larger than the L2 cache."""

    heads: tuple[int, int, int]
    x: torch.Tensor  # [requests, hidden]
    gain: torch.Tensor  # [hidden]
    weights: list[torch.Tensor]
    layers: list[Layer]
    tables: tuple[torch.Tensor, torch.Tensor]
    num_bytes: int  # that a layer must read

    def project(self, weight: torch.Tensor) -> torch.Tensor:
        """Return qkv, from the kernel that makes it in a step of so many rows."""
        if len(self.x) <= MAX_ROWS:
            return add_norm_linear(self.x, self.x, self.gain, EPS, weight)[0]
        return linear_medium(self.x, weight)

    def run(self, plan: DecodePlan, weight: torch.Tensor, layer: Layer) -> None:
        """Run a projection and the attention behind it."""
        form = "fused early" if len(self.x) <= MAX_ROWS else "fused"
        own = layer._replace(qkv=self.project(weight))
        launch(form, plan, own, self.heads, self.tables)

    def launches(self, plan: DecodePlan) -> list[Launch]:
        """Return all layers' launches under a plan."""
        pairs = zip(self.weights, self.layers, strict=True)
        return [partial(self.run, plan, *pair) for pair in pairs]


def make_behind(num_reqs: int, size: tuple[int, int, int, int, int]) -> Behind:
    """Return requests of UNIFORM tokens and as many layers as make a cold cache."""
    hidden, num_heads, num_kv_heads, head_dim, _ = size
    heads = (num_heads, num_kv_heads, head_dim)
    shape = ((num_heads + 2 * num_kv_heads) * head_dim, hidden)
    num_bytes = 2 * shape[0] * hidden + 4 * num_reqs * UNIFORM * num_kv_heads * head_dim
    sets = range(num_sets(num_bytes))
    return Behind(
        heads,
        torch.randn((num_reqs, hidden), **OPTIONS),
        torch.ones(hidden, **OPTIONS),
        [torch.randn(shape, **OPTIONS).mul_(hidden**-0.5) for _ in sets],
        [make_layer(lengths_of(num_reqs, UNIFORM), heads) for _ in sets],
        (torch.rand((MAX_LEN, head_dim), device="cuda"), torch.ones(head_dim, **OPTIONS)),
        num_bytes,
    )


def rehearse(cases: list[Behind]) -> None:
    """Compile what all cases launch, at the same time."""
    device = torch.device("cuda", torch.cuda.current_device())
    with (
        compile_ahead(device, threads_of_rank(1), COMPILE_TIMEOUT_S) as compilers,
        compilers.rehearsal(),
    ):
        for case in cases:
            for plan in early_plans(len(case.x), case.heads):
                case.launches(plan)[0]()


def measure(case: Behind, end_s: float) -> dict[str, Any]:
    """Time projection and attention by every plan, print a line each, return all."""
    floor_us = round(case.num_bytes / READ_BYTES_PER_S * 1e6, 2)
    alone: list[Launch] = [partial(case.project, weight) for weight in case.weights]
    alone_us = round(graph_us(alone), 2)
    print(f"floor {floor_us}, the projection alone {alone_us}", flush=True)
    in_use = plan_fused(len(case.x), *case.heads, 2, num_processors(case.x.device))
    times: list[list[Any]] = []
    for plan in early_plans(len(case.x), case.heads):
        if time.monotonic() > end_s:
            break
        try:
            us = round(graph_us(case.launches(plan)), 2)
        except FAILURES as failure:
            print(f"left out: {plan}: {str(failure)[:90]}", flush=True)
            torch.cuda.synchronize()
            continue
        times.append([*plan, us])
        print(f" {'*' if plan == in_use else ' '}{tuple(plan)!s:28} {us:>7}", flush=True)
    return {"floor_us": floor_us, "projection_us": alone_us, "times": times}


def main(argv: list[str]) -> int:
    """Return the exit code: 2 for wrong flags."""
    parser = Parser(prog="sweep_early.py", description=(__doc__ or "").split("\n")[0])

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("--models", type=lambda text: text.split(","), default=list(SIZES))
    parser.add_argument("--batches", type=numbers, default=BATCHES, help="requests")
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after so long")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args: argparse.Namespace = parser.parse_args(argv)
    if not set(args.models) <= set(SIZES):
        parser.error(f"models {','.join(args.models)}: choose from {', '.join(SIZES)}")
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU here; these are measurements of one")
    torch.manual_seed(0)
    end_s = time.monotonic() + args.seconds
    result: dict[str, Any] = {
        "command": shlex.join(["scripts/sweep_early.py", *argv]),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "columns": [*DecodePlan._fields, "us"],
        "cases": [],
    }
    cases = [(name, n, make_behind(n, SIZES[name])) for n in args.batches for name in args.models]
    rehearse([case for _, _, case in cases])
    print(f"us of projection and attention; plan ({PLAN}; * in use)", flush=True)
    for name, num_reqs, case in cases:
        if time.monotonic() > end_s:
            print("out of time; the rest was not measured", flush=True)
            break
        print(f"{name}, {num_reqs} requests x {UNIFORM}: ", end="")
        result["cases"].append({"model": name, "num_reqs": num_reqs} | measure(case, end_s))
        write(result, args.out)
    print(json.dumps(result, separators=(",", ":")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
