"""Measure each kernel on one GPU: microseconds, bytes, share of the memory's speed.

    python scripts/bench_kernels.py [--heads 16/8x128,32/8x128] [--only decode] [--plans] [--out F]

A kernel is launched over many sets of buffers, together larger than the L2 cache, captured in one
CUDA graph; the time is that of the median replay, divided by the launches. So it holds the device's
own start of a kernel, and no host time. Bytes are what must cross the memory at least once; the
share is of 4.48 TB/s, which a read-only stream reaches on an H200. Small activations (a row of a
batch of one) lie in L2 in a real step too; their share says little, their microseconds do.

--plans tries the other tile shapes of attention as well, and prints each case's best beside the
one that serving uses. The last line of stdout is the whole result as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from triton.runtime.errors import OutOfResources

from nanorunner.flags import Parser
from nanorunner.kernels.attention import paged_attention
from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.decode_attention import DecodePlan, decode_attention
from nanorunner.kernels.prefill_attention import PrefillPlan, prefill_attention
from nanorunner.kernels.rms_norm import add_rms_norm
from nanorunner.kernels.rope_kv_write import qk_norm_rope_kv_write
from nanorunner.kernels.silu_mul import silu_mul

if TYPE_CHECKING:
    from scripts.bench_engine import describe_machine, write
else:  # a script's own folder is where Python looks first; it is no package
    from bench_engine import describe_machine, write

READ_BYTES_PER_S = 4.48e12  # measured on an H200 with a read-only stream
L2_BYTES = 60e6  # an H200's
MAX_SETS = 48
MAX_KV_BYTES = 60e9
REPLAYS = 7
BLOCK_TOKENS = 256
KINDS = ("norm", "silu", "rope", "decode", "prefill")
FORMAT = "{:<34} {:>9} {:>9} {:>7} {:>7} {:>8}  {}"
DECODE_PLANS = [
    DecodePlan(splits, tile, warps, stages)
    for splits, tile, warps, stages in product(
        (1, 2, 4, 8, 16, 32, 64), (32, 64, 128), (1, 2, 4), (2, 3, 4)
    )
]
PREFILL_PLANS = [
    PrefillPlan(*shape) for shape in product((16, 64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
]

Launch = Callable[[], object]
Timer = Callable[[int], float]  # replays -> microseconds of a launch


class Case(NamedTuple):
    """One measurement: a launch for each set of buffers, and what a launch moves and computes."""

    name: str
    launches: list[Launch]
    num_bytes: float
    flops: float = 0.0
    replan: Callable[[Any], list[Launch]] | None = None  # the same launches under another plan
    plans: tuple[Any, ...] = ()


def graph_us(launches: list[Launch]) -> float:
    """Return microseconds a launch, from replays of a graph that holds them all."""
    measure = graph_timer(launches)
    measure(2)
    return measure(REPLAYS)


def graph_timer(launches: list[Launch]) -> Timer:
    """Return what replays a graph of the launches so often: the median us of one of them."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    event: Any = partial(torch.cuda.Event, enable_timing=True)
    begin, end = event(), event()

    def measure(replays: int) -> float:
        times: list[float] = []
        for _ in range(replays):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times) * 1e3 / len(launches)

    return measure


def num_sets(num_bytes: float) -> int:
    """Return how many sets of buffers make a cold L2, at least 4."""
    return max(4, min(MAX_SETS, int(3 * L2_BYTES / num_bytes) + 1))


def row_cases(heads: tuple[int, int, int], kinds: set[str]) -> Iterator[Case]:
    """Yield the kernels that go row by row, for the widths of a Qwen3 of these heads."""
    num_heads, num_kv_heads, head_dim = heads
    hidden = num_heads * head_dim // (2 if num_heads == 16 else 1)  # Qwen3-0.6B has half
    for n in (1, 8, 64, 256, 8192):
        if "norm" in kinds:
            num_bytes = 4 * n * hidden * 2
            x, residual, weight = random_sets(num_bytes, (n, hidden), (n, hidden), (hidden,))
            launches: list[Launch] = [
                partial(add_rms_norm, *buffers, 1e-6)
                for buffers in zip(x, residual, weight, strict=True)
            ]
            yield Case(f"add_rms_norm {n} x {hidden}", launches, num_bytes)
        if "silu" in kinds:
            num_bytes = 3 * n * 3 * hidden * 2
            (gate_up,) = random_sets(num_bytes, (n, 6 * hidden))
            yield Case(
                f"silu_mul {n} x {3 * hidden}", [partial(silu_mul, x) for x in gate_up], num_bytes
            )
        if "rope" in kinds:
            yield rope_case(n, num_heads, num_kv_heads, head_dim)


def rope_case(n: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Case:
    """Return the case of q/k norm, rotation and KV write for n tokens."""
    width = (num_heads + 2 * num_kv_heads) * head_dim
    num_bytes = 2 * n * (2 * (num_heads + num_kv_heads) + 3 * num_kv_heads) * head_dim
    num_blocks = -(-n // BLOCK_TOKENS)
    shape = (num_blocks, BLOCK_TOKENS, num_kv_heads, head_dim)
    qkv, k_cache, v_cache = random_sets(num_bytes, (n, width), shape, shape)
    angle = torch.rand((n, head_dim), device="cuda")
    norm = torch.ones(head_dim, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(n, device="cuda")
    sizes = (num_heads, num_kv_heads, head_dim)
    launches: list[Launch] = [
        partial(qk_norm_rope_kv_write, x, rows, angle, rows, k, v, *sizes, norm, norm, 1e-6)
        for x, k, v in zip(qkv, k_cache, v_cache, strict=True)
    ]
    return Case(f"qk_norm_rope_kv_write {n}", launches, num_bytes)


def random_sets(num_bytes: float, *shapes: tuple[int, ...]) -> list[list[torch.Tensor]]:
    """Return for each shape as many random tensors as there are sets of buffers."""
    return [
        [
            torch.randn(shape, dtype=torch.bfloat16, device="cuda")
            for _ in range(num_sets(num_bytes))
        ]
        for shape in shapes
    ]


def attention_case(name: str, requests: list[tuple[int, int]], heads: tuple[int, int, int]) -> Case:
    """Return the case of (query_len, seq_len) requests over a shuffled pool."""
    num_heads, num_kv_heads, head_dim = heads
    query_lens, seq_lens = (list(lens) for lens in zip(*requests, strict=True))
    kv_bytes = 4 * sum(seq_lens) * num_kv_heads * head_dim
    num_tokens, num_reqs = sum(query_lens), len(requests)
    blocks = [-(-length // BLOCK_TOKENS) for length in seq_lens]
    pool_bytes = 4 * sum(blocks) * BLOCK_TOKENS * num_kv_heads * head_dim
    sets = max(1, min(num_sets(kv_bytes), int(MAX_KV_BYTES / pool_bytes)))
    shape = (sets, 2, sum(blocks), BLOCK_TOKENS, num_kv_heads, head_dim)
    kv = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    tables = torch.zeros((num_reqs, max(blocks)), dtype=torch.int32)
    order = torch.randperm(sum(blocks), dtype=torch.int32)
    for i, count in enumerate(blocks):
        tables[i, :count], order = order[:count], order[count:]
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn((num_tokens, width), dtype=torch.bfloat16, device="cuda")
    q = qkv[:, : num_heads * head_dim].view(num_tokens, num_heads, head_dim)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    batch = AttentionBatch(
        starts.cuda(),
        torch.tensor(seq_lens, dtype=torch.int32, device="cuda"),
        tables.cuda(),
        torch.full((num_tokens,), -1, device="cuda"),
        max(query_lens),
        max(seq_lens),
    )
    scale = head_dim**-0.5
    is_decode = max(query_lens) == 1
    function: Callable[..., torch.Tensor] = decode_attention if is_decode else prefill_attention

    def replan(plan: Any) -> list[Launch]:
        return [partial(function, q, k, v, batch, scale, plan) for k, v in kv]

    launches: list[Launch] = [
        partial(paged_attention, q, k, v, batch, scale, "triton") for k, v in kv
    ]
    seen = sum(m * n - m * (m - 1) / 2 for m, n in requests)  # (query, visible key) pairs
    num_bytes = kv_bytes + 4 * num_tokens * num_heads * head_dim
    plans: tuple[Any, ...] = tuple(PREFILL_PLANS)
    if is_decode:
        programs = num_reqs * num_kv_heads
        plans = tuple(
            plan
            for plan in DECODE_PLANS
            if plan.num_splits == 1 or 64 <= programs * plan.num_splits <= 4096
        )
    return Case(name, launches, num_bytes, 4 * seen * num_heads * head_dim, replan, plans)


def attention_cases(heads: tuple[int, int, int], kinds: set[str]) -> Iterator[Case]:
    """Yield decodes of equal and of ragged lengths, prompts, and a mixed batch."""
    draw = random.Random(0)
    if "decode" in kinds:
        for num_reqs, length in product((1, 8, 64, 256), (512, 1024, 4096)):
            yield attention_case(f"decode {num_reqs} x {length}", [(1, length)] * num_reqs, heads)
        yield attention_case("decode 8 x 8192", [(1, 8192)] * 8, heads)
        ragged = [(1, draw.randint(100, 2048)) for _ in range(256)]
        yield attention_case("decode 256 x 100-2048", ragged, heads)
    if "prefill" in kinds:
        yield attention_case("prefill 1 x 512", [(512, 512)], heads)
        yield attention_case("prefill 4 x 2048", [(2048, 2048)] * 4, heads)
        yield attention_case("prefill 1 x 8192", [(8192, 8192)], heads)
        yield attention_case("chunk 2048 after 6144", [(2048, 8192)], heads)
        mixed = [(1, draw.randint(100, 2048)) for _ in range(255)]
        yield attention_case("mixed 255 decodes + 512", [*mixed, (512, 512)], heads)


def best_plan(case: Case) -> dict[str, Any]:
    """Return the fastest plan and its microseconds; plans that do not fit the GPU are left out."""
    assert case.replan is not None, "only attention has plans"
    times: dict[Any, float] = {}
    for plan in case.plans:
        try:
            times[plan] = graph_us(case.replan(plan))
        except OutOfResources:
            torch.cuda.synchronize()
    best = min(times, key=lambda plan: times[plan])
    return {"best_plan": list(best), "best_us": round(times[best], 2)}


def measure(case: Case, has_plans: bool) -> dict[str, Any]:
    """Measure one case, print its row and return it."""
    microseconds = graph_us(case.launches)
    row: dict[str, Any] = {
        "name": case.name,
        "us": round(microseconds, 2),
        "mbytes": round(case.num_bytes / 1e6, 3),
        "tb_per_s": round(case.num_bytes / microseconds / 1e6, 3),
        "share": round(case.num_bytes / microseconds * 1e6 / READ_BYTES_PER_S, 3),
        "tflops": round(case.flops / microseconds / 1e6, 1),
    }
    note = ""
    if has_plans and case.replan is not None:
        row |= best_plan(case)
        note = f"best {row['best_us']} us with {tuple(row['best_plan'])}"
    cells = [row[name] for name in ("name", "us", "mbytes", "tb_per_s", "share", "tflops")]
    print(FORMAT.format(*cells, note), flush=True)
    return row


def parse_heads(text: str) -> tuple[int, int, int]:
    """Return (Hq, Hk, head_dim) of "16/8x128"; raises ValueError for anything else."""
    try:
        num_heads, rest = text.split("/")
        num_kv_heads, head_dim = rest.split("x")
        return int(num_heads), int(num_kv_heads), int(head_dim)
    except ValueError:
        raise ValueError(
            f"heads {text!r}: write query heads/KV heads x head dim, 16/8x128"
        ) from None


def run(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Measure every case and return the result; raises ValueError for wrong values."""
    kinds = set(args.only.split(","))
    if not kinds <= set(KINDS):
        raise ValueError(f"only {args.only}: choose from {', '.join(KINDS)}")
    all_heads = [parse_heads(text) for text in args.heads.split(",")]
    if not torch.cuda.is_available():
        raise ValueError("no CUDA GPU here; these are measurements of one")
    result: dict[str, Any] = {
        "command": shlex.join(["scripts/bench_kernels.py", *argv]),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "rows": [],
    }
    for heads in all_heads:
        text = f"{heads[0]}/{heads[1]}x{heads[2]}"
        print(FORMAT.format(f"heads {text}, bfloat16", "us", "MB", "TB/s", "share", "TFLOP/s", ""))
        for cases in (row_cases(heads, kinds), attention_cases(heads, kinds)):
            for case in cases:
                result["rows"].append({"heads": text, **measure(case, args.plans)})
                write(result, args.out)
    return result


def main(argv: list[str]) -> int:
    """Return the exit code: 2 for wrong flags."""
    parser = Parser(prog="bench_kernels.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--heads", default="16/8x128,32/8x128", help="query heads/KV heads x dim")
    parser.add_argument("--only", default=",".join(KINDS), help="which kernels")
    parser.add_argument("--plans", action="store_true", help="try other attention tiles (minutes)")
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    args = parser.parse_args(argv)
    try:
        result = run(args, argv)
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
