"""Inputs of the kernel tests: hostile memory, ragged lengths, and an oracle of another make.

Every slot that no token was written to holds NaN, and every table entry past a request's length is
out of range, so a kernel that reads what it must not read cannot pass.

RANK_COUNTS and what follows from it are for the tests that start ranks with a GPU each.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.presets import preset_for_ranks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_TOKENS = 256
JUNK_BLOCK = 10**8
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MOST_RANKS = 8
# Values of a test's parameter: ranks with a GPU each. What this machine has too few for is skipped.
RANK_COUNTS = [
    pytest.param(
        count,
        marks=pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs"),
    )
    for count in (2, 4, MOST_RANKS)
]


class AttentionCase(NamedTuple):
    """One call of paged_attention."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: AttentionBatch
    scale: float


def attention_case(
    requests: list[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    padded_requests: int = 0,
    padded_tokens: int = 0,
) -> AttentionCase:
    """Return a case of (query_len, seq_len) requests and (Hq, Hk, head_dim) heads.

    Padded requests have lengths 0 and a table of junk; padded tokens follow the real ones.
    """
    num_heads, num_kv_heads, head_dim = heads
    query_lens = [query_len for query_len, _ in requests] + [0] * padded_requests
    seq_lens = [seq_len for _, seq_len in requests] + [0] * padded_requests
    max_blocks = max(1, *(-(-seq_len // BLOCK_TOKENS) for seq_len in seq_lens)) + 1
    num_blocks = len(requests) * max_blocks + 1
    generator = torch.Generator().manual_seed(len(requests) + head_dim)

    k_cache = poison((num_blocks, BLOCK_TOKENS, num_kv_heads, head_dim), dtype)
    v_cache = k_cache.clone()
    free = iter(torch.randperm(num_blocks, generator=generator).tolist())
    tables = torch.full((len(seq_lens), max_blocks), JUNK_BLOCK, dtype=torch.int32)
    for i, seq_len in enumerate(seq_lens):
        for j in range(-(-seq_len // BLOCK_TOKENS)):
            block = tables[i, j] = next(free)
            num_tokens = min(BLOCK_TOKENS, seq_len - j * BLOCK_TOKENS)
            for cache in (k_cache, v_cache):
                rows = torch.randn((num_tokens, num_kv_heads, head_dim), generator=generator)
                cache[block, :num_tokens] = rows.to(cache)

    num_tokens = sum(query_lens) + padded_tokens
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn((num_tokens, width), generator=generator).to(DEVICE, dtype)
    q = qkv[:, : num_heads * head_dim].view(num_tokens, num_heads, head_dim)
    starts = [0, *itertools.accumulate(query_lens)]
    batch = AttentionBatch(
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        tables.to(DEVICE),
        torch.full((num_tokens,), -1, device=DEVICE),  # attention reads no slot
        max(query_lens),
        max(seq_lens),
    )
    return AttentionCase(q, k_cache, v_cache, batch, head_dim**-0.5)


def expected_attention(case: AttentionCase) -> torch.Tensor:
    """Return the output in float64, one request and one plain softmax at a time."""
    out = torch.zeros(case.q.shape, dtype=torch.float64, device=case.q.device)
    group = case.q.shape[1] // case.k_cache.shape[2]
    starts = case.batch.query_start_loc.tolist()
    for i, seq_len in enumerate(case.batch.seq_lens.tolist()):
        start, end = starts[i], starts[i + 1]
        blocks = case.batch.block_tables[i, : -(-seq_len // BLOCK_TOKENS)].long()
        if end == start:
            continue
        k, v = (
            cache[blocks].flatten(0, 1)[:seq_len].double().repeat_interleave(group, dim=1)
            for cache in (case.k_cache, case.v_cache)
        )
        score = torch.einsum("qhd,khd->hqk", case.q[start:end].double(), k) * case.scale
        hidden = torch.ones(score.shape[1:], dtype=torch.bool, device=score.device)
        score = score.masked_fill(hidden.triu(seq_len - (end - start) + 1), -torch.inf)
        out[start:end] = torch.einsum("hqk,khd->qhd", score.softmax(dim=-1), v)
    return out


def check_attention(case: AttentionCase, out: torch.Tensor) -> None:
    """Fail unless out is the expected attention, zero in padded rows, contiguous, in q's dtype."""
    assert out.dtype == case.q.dtype
    assert out.is_contiguous()
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected_attention(case), rtol=0, atol=tolerance)
    assert not out[int(case.batch.query_start_loc[-1]) :].any(), "padded rows must be zero"


def on_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Triton launcher that takes and gives CPU tensors wherever its kernels run."""
    if DEVICE.type == "cpu":
        return launch

    @functools.wraps(launch)
    def call(*given: Any) -> Any:
        found = launch(*(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in given))
        return found.cpu() if isinstance(found, torch.Tensor) else tuple(x.cpu() for x in found)

    return call


def dummy_model(tp: int, preset: str, folder: Path) -> str:
    """Return a preset for so many ranks as a model to load with load_format dummy, in folder."""
    (folder / "config.json").write_text(json.dumps(preset_for_ranks(preset, tp)))
    return str(folder)


def forget_compiled() -> None:
    """Make every Triton kernel compile again at its next launch, whatever earlier tests launched.

    Triton's cache on the disk stays, so that takes milliseconds a kernel.
    """
    import triton

    for kernel in [x for x in gc.get_objects() if isinstance(x, triton.JITFunction)]:
        kernel.device_caches.clear()


def num_unequal_replays(
    graph: torch.cuda.CUDAGraph, outs: list[torch.Tensor], first: list[torch.Tensor]
) -> int:
    """Replay a graph a thousand times over poisoned outs; return how many elements ever differed.

    first: what one replay has written.
    """
    num_unequal = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        for out, same in zip(outs, first, strict=True):
            num_unequal += (out != same).sum()
    return int(num_unequal)


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return NaN memory; freed, it is what the next allocation of its size likely gets."""
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the same normal numbers for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def rope_arguments(
    heads: tuple[int, int, int], num_tokens: int, dtype: torch.dtype, has_norm: bool
) -> dict[str, Any]:
    """Return the arguments of one call: slots spread over 3 blocks, every third one padding."""
    num_heads, num_kv_heads, head_dim = heads
    angle = torch.arange(400.0)[:, None] * 10000 ** -(torch.arange(0, head_dim, 2) / head_dim)
    slots = torch.randperm(3 * 256, generator=torch.Generator().manual_seed(0))[:num_tokens]
    slots[::3] = -1
    return {
        "qkv": normal(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype),
        "positions": torch.arange(num_tokens, device=DEVICE) * 397 % 400,
        "cos_sin": torch.cat((angle.cos(), angle.sin()), dim=1).to(DEVICE),
        "slot_mapping": slots.to(DEVICE),
        "k_cache": poison((3, 256, num_kv_heads, head_dim), dtype),
        "v_cache": poison((3, 256, num_kv_heads, head_dim), dtype),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "q_norm": normal(head_dim, dtype=dtype) if has_norm else None,
        "k_norm": normal(head_dim + 1, dtype=dtype)[:-1] if has_norm else None,
        "eps": 1e-6,
    }
