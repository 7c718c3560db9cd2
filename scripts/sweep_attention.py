"""Time plans of decode attention on this GPU: requests of one length, and of many.

    python scripts/sweep_attention.py [--heads 16,8,128] [--seconds 60] --out result.json

Each case is a batch of decodes in one layer, in a CUDA graph over several caches, so that the L2
cache is cold: rotation and attention as two launches (apart) and as one (fused), by every plan
worth a look. A plan without a least share (the last field is 0) cuts every request alike, into one
share where the batch is large; one with a least share cuts long requests alone
(kernels/decode_attention.py). A line a plan, uniform and ragged batches beside each other.
"""

from __future__ import annotations

import argparse
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

from nanorunner.flags import Parser
from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.decode_attention import (
    LEAST_SHARE,
    SPLITS,
    DecodePlan,
    decode_attention,
    plan_decode,
)
from nanorunner.kernels.fused_decode import fused_decode
from nanorunner.kernels.rope_kv_write import qk_norm_rope_kv_write
from nanorunner.kernels.triton_support import num_processors

if TYPE_CHECKING:
    from scripts.bench_engine import describe_machine, write
    from scripts.bench_kernels import READ_BYTES_PER_S, Launch, graph_us
else:  # a script's own folder is where Python looks first; it is no package
    from bench_engine import describe_machine, write
    from bench_kernels import READ_BYTES_PER_S, Launch, graph_us

BLOCK_TOKENS, MAX_LEN = 256, 4096
SHORTEST, LONGEST = 150, 1900  # of a ragged batch
NUM_CACHES = 3
EPS, SCALE = 1e-6, 0.1
RAGGED, UNIFORM = 0, 720
BATCHES = (256, 128, 64, 32, 16, 8, 1)  # requests: the most wanted first
FEW = (8, 16, 32)  # splits for few requests
FORMS = ("apart", "fused", "fused early")
TILES = ((32, 1, 2), (32, 1, 3), (64, 2, 2), (64, 2, 3), (64, 4, 3))  # tokens, warps, stages
OPTIONS: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}


class Layer(NamedTuple):
    """One layer's inputs: a batch of decodes and a cache of its own."""

    qkv: torch.Tensor
    positions: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: AttentionBatch


def lengths_of(num_reqs: int, length: int) -> list[int]:
    """Return the requests' lengths, the same ones on every call."""
    chosen = random.Random(num_reqs)
    return [length or chosen.randint(SHORTEST, LONGEST) for _ in range(num_reqs)]


def make_layer(lengths: list[int], heads: tuple[int, int, int]) -> Layer:
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
    qkv = torch.randn((len(lengths), (num_heads + 2 * num_kv_heads) * head_dim), **OPTIONS)
    shape = (sum(counts), BLOCK_TOKENS, num_kv_heads, head_dim)
    k_cache, v_cache = torch.randn(shape, **OPTIONS), torch.randn(shape, **OPTIONS)
    return Layer(qkv, last.cuda(), k_cache, v_cache, batch)


def launch(
    form: str,
    plan: DecodePlan,
    layer: Layer,
    heads: tuple[int, int, int],
    tables: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Run a layer's attention once; tables: the angles, and the gains of the q and k norms."""
    num_heads, _, head_dim = heads
    cos_sin, gain = tables
    qkv, positions, k_cache, v_cache, batch = layer
    if form == "apart":
        qk_norm_rope_kv_write(
            qkv, positions, cos_sin, batch.slot_mapping, k_cache, v_cache, *heads, gain, gain, EPS
        )
        q = qkv[:, : num_heads * head_dim].view(-1, num_heads, head_dim)
        decode_attention(q, k_cache, v_cache, batch, SCALE, plan)
    else:
        fused_decode(
            qkv, positions, cos_sin, k_cache, v_cache, batch, *heads, gain, gain, EPS, SCALE,
            plan, reads_early=form == "fused early",
        )  # fmt: skip


def plans_of(num_reqs: int, heads: tuple[int, int, int]) -> list[DecodePlan]:
    """Return the plans worth a measurement: without a least share, the one in use, others."""
    processors = num_processors(torch.device("cuda"))
    plans = [plan_decode(num_reqs, *heads, 2, processors, longest) for longest in (0, MAX_LEN)]
    if num_reqs < 16:
        plans += [DecodePlan(splits, *tile) for tile in ((64, 4, 2), (32, 2, 2)) for splits in FEW]
    else:
        splits, share = (SPLITS, LEAST_SHARE) if num_reqs >= 64 else (8, 512)
        plans += [DecodePlan(splits, *tile, share) for tile in TILES]
    return list(dict.fromkeys(plans))


def forms_of(num_reqs: int, plan: DecodePlan) -> list[str]:
    """Return the forms that differ: only few requests, all of them cut, are read early."""
    reads_early = num_reqs <= 16 and plan.num_splits > 1 and not plan.min_share
    return list(FORMS) if reads_early else list(FORMS[:2])


def measure(num_reqs: int, heads: tuple[int, int, int], end_s: float) -> dict[str, Any]:
    """Time every plan for a uniform and a ragged batch, print a line each, return all."""
    batches = [lengths_of(num_reqs, length) for length in (UNIFORM, RAGGED)]
    layers = [[make_layer(lengths, heads) for _ in range(NUM_CACHES)] for lengths in batches]
    tables = torch.rand((MAX_LEN, heads[2]), device="cuda"), torch.ones(heads[2], **OPTIONS)
    floors = [
        round(sum(lengths) * heads[1] * heads[2] * 4 / READ_BYTES_PER_S * 1e6, 2)
        for lengths in batches
    ]
    print(
        f"{num_reqs} requests: uniform {UNIFORM}, floor {floors[0]} us; "
        f"ragged {SHORTEST} to {LONGEST}, floor {floors[1]} us",
        flush=True,
    )
    in_use = plan_decode(num_reqs, *heads, 2, num_processors(torch.device("cuda")), MAX_LEN)
    times: list[list[Any]] = []
    for plan in plans_of(num_reqs, heads):
        texts: list[str] = []
        for form in forms_of(num_reqs, plan):
            found: list[float | None] = []
            for own in layers:
                if time.monotonic() < end_s:
                    launches: list[Launch] = [
                        partial(launch, form, plan, layer, heads, tables) for layer in own * 2
                    ]
                    found.append(round(graph_us(launches), 1))
                else:
                    found.append(None)  # out of time
            times.append([*plan, form, *found])
            texts.append(f"{form} " + " ".join(f"{us or '-':>6}" for us in found))
        mark = "*" if plan == in_use else " "
        print(f" {mark}{tuple(plan)!s:23} " + "  ".join(texts), flush=True)
    return {"num_reqs": num_reqs, "floors_us": floors, "times": times}


def main(argv: list[str]) -> int:
    """Return the exit code: 2 for wrong flags."""
    parser = Parser(prog="sweep_attention.py", description=(__doc__ or "").split("\n")[0])

    def numbers(text: str) -> tuple[int, int, int]:
        query, kv, dim = (int(part) for part in text.split(","))
        return query, kv, dim

    parser.add_argument("--heads", type=numbers, default=(16, 8, 128), help="query, KV, head dim")
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after so long")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args: argparse.Namespace = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU here; these are measurements of one")
    torch.manual_seed(0)
    end_s = time.monotonic() + args.seconds
    result: dict[str, Any] = {
        "command": shlex.join(["scripts/sweep_attention.py", *argv]),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "heads": args.heads,
        "columns": [*DecodePlan._fields, "form", "uniform_us", "ragged_us"],
        "cases": [],
    }
    print("plan (splits, tile, warps, stages, least share; * in use), form: us uniform, us ragged")
    for num_reqs in BATCHES:
        if time.monotonic() > end_s:
            print("out of time; the rest was not measured", flush=True)
            break
        result["cases"].append(measure(num_reqs, args.heads, end_s))
        write(result, args.out)
    print(json.dumps(result, separators=(",", ":")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
