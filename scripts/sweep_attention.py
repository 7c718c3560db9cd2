"""Time plans of decode attention on this GPU: even requests, and ragged ones, the longest first.

    python scripts/sweep_attention.py [--models 0.6b,8b] [--batches 64,256] [--out FILE]

A case is a batch of decodes in one layer: the qkv projection, as a step has it in front, then
rotation and attention as two launches (apart) or as one (fused), by every plan worth a look. It
runs in a CUDA graph over several layers, so that the L2 cache is cold. A line a plan: microseconds
of even and of ragged requests. What a pair of kernels in a loop does not show is what a plan leaves
of its processor to the kernels behind it: an engine must confirm a winner (bench_engine.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
import sys
import time
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nanorunner.bench.measuring_flags import counts_above_0
from nanorunner.flags import Parser
from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.decode_attention import DecodePlan, decode_attention, is_full, plan_decode
from nanorunner.kernels.few_rows import add_norm_linear
from nanorunner.kernels.few_rows_plans import MAX_ROWS
from nanorunner.kernels.fused_decode import fused_decode, plan_fused
from nanorunner.kernels.medium_rows import linear_medium
from nanorunner.kernels.rope_kv_write import qk_norm_rope_kv_write
from nanorunner.kernels.triton_support import num_processors

if TYPE_CHECKING:
    from scripts.bench_engine import describe_machine, write
    from scripts.bench_kernels import READ_BYTES_PER_S, Launch, graph_us
    from scripts.tune_fused import SIZES
else:  # a script's own folder is where Python looks first; it is no package
    from bench_engine import describe_machine, write
    from bench_kernels import READ_BYTES_PER_S, Launch, graph_us
    from tune_fused import SIZES

BLOCK_TOKENS, MAX_LEN = 256, 4096
SHORTEST, LONGEST = 150, 1900  # of a ragged batch
NUM_LAYERS = 4
EPS, SCALE = 1e-6, 0.1
RAGGED, EVEN = 0, 720
BATCHES = [256, 128, 64, 32, 16, 8, 1]  # requests: the most wanted first
FEW_SPLITS = (4, 8, 16, 32)
TILES = ((32, 1, 3), (32, 2, 2), (64, 2, 2), (64, 4, 3), (128, 4, 2), (128, 8, 3))
OPTIONS: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}

Heads = tuple[int, int, int]  # query heads, KV heads, head_dim


class Layer(NamedTuple):
    """One layer's inputs: a weight, a batch of decodes and a cache of its own."""

    weight: torch.Tensor  # [qkv, hidden]
    positions: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: AttentionBatch


class Inputs(NamedTuple):
    """What all layers of a case share."""

    x: torch.Tensor  # [requests, hidden]
    gain: torch.Tensor  # [hidden]
    cos_sin: torch.Tensor  # [MAX_LEN, head_dim]
    norm: torch.Tensor  # [head_dim]
    heads: Heads


class Form(NamedTuple):
    """How a case is launched."""

    is_fused: bool
    plan: DecodePlan


def lengths_of(num_reqs: int, length: int) -> list[int]:
    """Return the requests' lengths, the same ones on every call, in the scheduler's order."""
    draw = random.Random(num_reqs)
    lengths = [length or draw.randint(SHORTEST, LONGEST) for _ in range(num_reqs)]
    return sorted(lengths, reverse=True)


def make_layer(lengths: list[int], hidden: int, heads: Heads) -> Layer:
    """Return random inputs, the blocks of the requests in random order."""
    num_heads, num_kv_heads, head_dim = heads
    counts = [-(-length // BLOCK_TOKENS) for length in lengths]
    blocks = torch.split(torch.randperm(sum(counts)).int(), counts)
    tables = torch.zeros((len(lengths), MAX_LEN // BLOCK_TOKENS), dtype=torch.int32)
    for row, own in zip(tables, blocks, strict=True):
        row[: len(own)] = own
    last = torch.tensor(lengths) - 1
    slots = tables.gather(1, (last // BLOCK_TOKENS)[:, None])[:, 0].long() * BLOCK_TOKENS
    batch = AttentionBatch(
        query_start_loc=torch.arange(len(lengths) + 1, dtype=torch.int32, device="cuda"),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        block_tables=tables.cuda(),
        slot_mapping=(slots + last % BLOCK_TOKENS).cuda(),
        max_query_len=1,
        max_seq_len=MAX_LEN,
    )
    width = (num_heads + 2 * num_kv_heads) * head_dim
    weight = torch.randn((width, hidden), **OPTIONS).mul_(hidden**-0.5)
    shape = (sum(counts), BLOCK_TOKENS, num_kv_heads, head_dim)
    k_cache, v_cache = torch.randn(shape, **OPTIONS), torch.randn(shape, **OPTIONS)
    return Layer(weight, last.cuda(), k_cache, v_cache, batch)


def launch(form: Form, layer: Layer, inputs: Inputs) -> None:
    """Run a layer's qkv projection and attention once, as an engine does for so many rows."""
    weight, positions, k_cache, v_cache, batch = layer
    x, gain, cos_sin, norm, heads = inputs
    is_few = len(x) <= MAX_ROWS
    qkv = add_norm_linear(x, x, gain, EPS, weight)[0] if is_few else linear_medium(x, weight)
    if form.is_fused:
        fused_decode(
            qkv, positions, cos_sin, k_cache, v_cache, batch, *heads, norm, norm, EPS, SCALE,
            form.plan, reads_early=is_few,
        )  # fmt: skip
        return
    qk_norm_rope_kv_write(
        qkv, positions, cos_sin, batch.slot_mapping, k_cache, v_cache, *heads, norm, norm, EPS
    )
    num_heads, _, head_dim = heads
    q = qkv[:, : num_heads * head_dim].view(-1, num_heads, head_dim)
    decode_attention(q, k_cache, v_cache, batch, SCALE, form.plan, reads_early=True)


def forms_of(num_reqs: int, heads: Heads) -> list[Form]:
    """Return the forms worth a measurement, the one in use first."""
    processors = num_processors(torch.device("cuda"))
    if is_full(num_reqs, heads[1], processors):
        in_use = Form(False, plan_decode(num_reqs, *heads, 2, processors, MAX_LEN))
    else:
        in_use = Form(True, plan_fused(num_reqs, *heads, 2, processors, MAX_LEN))
    plans = [plan_fused(num_reqs, *heads, 2, processors, MAX_LEN, is_even=True)]  # of even requests
    plans += [DecodePlan(1, *tile, in_order=True) for tile in TILES]
    if num_reqs <= MAX_ROWS:
        plans += [DecodePlan(splits, *tile) for splits in FEW_SPLITS for tile in TILES]
    others = [Form(is_fused, plan) for plan in plans for is_fused in (True, False)]
    return list(dict.fromkeys([in_use, *others]))


def measure(num_reqs: int, name: str, end_s: float) -> dict[str, Any]:
    """Time every form for even and ragged requests, print a line each, return all."""
    hidden, num_heads, num_kv_heads, head_dim, _ = SIZES[name]
    heads = (num_heads, num_kv_heads, head_dim)
    batches = [lengths_of(num_reqs, length) for length in (EVEN, RAGGED)]
    layers = [[make_layer(each, hidden, heads) for _ in range(NUM_LAYERS)] for each in batches]
    inputs = Inputs(
        torch.randn((num_reqs, hidden), **OPTIONS),
        torch.ones(hidden, **OPTIONS),
        torch.rand((MAX_LEN, head_dim), device="cuda"),
        torch.ones(head_dim, **OPTIONS),
        heads,
    )
    weight_bytes = 2 * layers[0][0].weight.numel()
    floors = [
        round((weight_bytes + sum(each) * num_kv_heads * head_dim * 4) / READ_BYTES_PER_S * 1e6, 1)
        for each in batches
    ]
    print(
        f"{name}, {num_reqs} requests: of {EVEN}, floor {floors[0]} us; "
        f"of {SHORTEST} to {LONGEST}, floor {floors[1]} us",
        flush=True,
    )
    times: list[list[Any]] = []
    for number, form in enumerate(forms_of(num_reqs, heads)):
        if time.monotonic() > end_s:
            break
        found: list[float] = []
        for own in layers:
            launches: list[Launch] = [partial(launch, form, layer, inputs) for layer in own]
            found.append(round(graph_us(launches), 1))
        times.append([*form.plan, "fused" if form.is_fused else "apart", *found])
        mark, kind = " *"[number == 0], times[-1][-3]
        print(f" {mark}{tuple(form.plan)!s:32} {kind} {found[0]:>7} {found[1]:>7}", flush=True)
    return {"model": name, "num_reqs": num_reqs, "floors_us": floors, "times": times}


def main(argv: list[str]) -> int:
    """Return the exit code: 2 for wrong flags."""
    parser = Parser(prog="sweep_attention.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(SIZES))
    parser.add_argument("--batches", type=counts_above_0, default=BATCHES, help="requests")
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
        "command": shlex.join(["scripts/sweep_attention.py", *argv]),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "columns": [*DecodePlan._fields, "form", "even_us", "ragged_us"],
        "cases": [],
    }
    print(f"{', '.join(DecodePlan._fields)}, form (* in use): us of even, us of ragged requests")
    for num_reqs, name in itertools.product(args.batches, args.models):
        if time.monotonic() > end_s:
            print("out of time; the rest was not measured", flush=True)
            break
        result["cases"].append(measure(num_reqs, name, end_s))
        write(result, args.out)
    print(json.dumps(result, separators=(",", ":")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
