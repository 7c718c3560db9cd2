"""The fused kernels of a decode beside the launches that they replace; scripts/tune.py runs this.

decode: a whole decoder layer of random weights and KV, one layer after another as in a step, in
three forms: as separate launches; with add_norm_linear and the like around them; and with
fused_decode as well, under several plans. head: lm_head_sample beside F.linear and sample_keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from triton.errors import TritonError

from nanorunner.kernels.decode_attention import DecodePlan, decode_attention
from nanorunner.kernels.few_rows import (
    add_norm_gate_up_silu,
    add_norm_linear,
    linear_few,
    serves,
)
from nanorunner.kernels.fused_decode import fused_decode, plan_fused
from nanorunner.kernels.lm_head_sample import HeadPlan, lm_head_sample, plan_head
from nanorunner.kernels.rms_norm import add_rms_norm
from nanorunner.kernels.rope_kv_write import qk_norm_rope_kv_write
from nanorunner.kernels.sample_keys import sample_keys
from nanorunner.kernels.silu_mul import silu_mul
from nanorunner.kernels.triton_support import num_processors

if TYPE_CHECKING:
    from scripts.bench_kernels import READ_BYTES_PER_S, graph_us
    from scripts.tune_models import BLOCK_TOKENS, EPS, OPTIONS, decode_batch
else:  # a script's own folder is where Python looks first; it is no package
    from bench_kernels import READ_BYTES_PER_S, graph_us
    from tune_models import BLOCK_TOKENS, EPS, OPTIONS, decode_batch

# A candidate that does not compile, fit or run: named, and left out.
FAILURES = (TritonError, RuntimeError)
VOCAB = 151936
MAX_KV_BYTES = 8e9
# hidden, query heads, KV heads, head dim, intermediate: Qwen3-0.6B and Qwen3-8B on one rank
SIZES = {"0.6b": (1024, 16, 8, 128, 3072), "8b": (4096, 32, 8, 128, 12288)}
LENGTHS = (512, 1024, 4096)
BATCHES = (1, 8, 16, 64)

Attention = tuple[DecodePlan | None, bool]  # of fused_decode; a plan of None: two launches


def attentions(num_reqs: int, heads: tuple[int, int, int]) -> list[Attention]:
    """Return the plans of fused_decode worth a measurement, the default first."""
    default = plan_fused(num_reqs, *heads, 2, num_processors(torch.device("cuda")))
    if num_reqs == 1:
        shapes = [(16, 64, 4, 2), (64, 64, 4, 2), (32, 32, 2, 2), (32, 128, 8, 2)]
    elif num_reqs <= 16:
        shapes = [(4, 64, 4, 3), (16, 64, 4, 2), (8, 32, 2, 3)]
    else:
        shapes = [(1, 64, 4, 3), (1, 32, 2, 3), (2, 64, 4, 2)]
    plans = [default, *(DecodePlan(*shape) for shape in shapes)]
    pairs = [(default, False), *((plan, True) for plan in dict.fromkeys(plans))]
    return list(dict.fromkeys(pairs))


class Layer(NamedTuple):
    """One layer's weights and KV."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor


class Step:
    """A decode of num_reqs requests of one length, through as many layers as make a cold cache."""

    def __init__(self, name: str, num_reqs: int, length: int, num_layers: int = 28) -> None:
        hidden, num_heads, num_kv_heads, head_dim, intermediate = SIZES[name]
        self.heads = (num_heads, num_kv_heads, head_dim)
        blocks = -(-length // BLOCK_TOKENS)
        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        cache = (num_reqs * blocks, BLOCK_TOKENS, num_kv_heads, head_dim)
        shapes = [
            (q_size + 2 * kv_size, hidden),
            (hidden, q_size),
            (2 * intermediate, hidden),
            (hidden, intermediate),
        ]
        kv_bytes = 4 * num_reqs * blocks * BLOCK_TOKENS * kv_size
        weight_bytes = 2 * sum(out * size for out, size in shapes)
        self.num_layers = max(2, min(num_layers, int(MAX_KV_BYTES / (kv_bytes + weight_bytes))))
        self.num_bytes = weight_bytes + 4 * num_reqs * length * kv_size
        self.layers = []
        for _ in range(self.num_layers):
            weights = [torch.randn(shape, **OPTIONS).mul_(shape[1] ** -0.5) for shape in shapes]
            caches = [torch.randn(cache, **OPTIONS) for _ in range(2)]
            self.layers.append(Layer._make(weights + caches))
        self.x, self.residual = (torch.randn((num_reqs, hidden), **OPTIONS) for _ in range(2))
        self.gain, self.head_gain = (torch.ones(size, **OPTIONS) for size in (hidden, head_dim))
        self.cos_sin = torch.rand((length, head_dim), device="cuda")
        self.positions = torch.full((num_reqs,), length - 1, device="cuda")
        tables = torch.randperm(num_reqs * blocks, device="cuda").int().view(num_reqs, blocks)
        self.batch = decode_batch(tables, length)

    def attend(self, layer: Layer, qkv: torch.Tensor, attention: Attention | None) -> torch.Tensor:
        """Run what lies between the qkv and the o projection."""
        plan, reads_early = attention or (None, False)
        num_reqs = qkv.shape[0]
        num_heads, _, head_dim = self.heads
        caches, gains = (layer.k_cache, layer.v_cache), (self.head_gain, self.head_gain)
        scale = head_dim**-0.5
        if attention is not None:
            out = fused_decode(
                qkv, self.positions, self.cos_sin, *caches, self.batch, *self.heads, *gains, EPS,
                scale, plan, reads_early,
            )  # fmt: skip
            return out.view(num_reqs, -1)
        slots = self.batch.slot_mapping
        qk_norm_rope_kv_write(
            qkv, self.positions, self.cos_sin, slots, *caches, *self.heads, *gains, EPS
        )
        q = qkv[:, : num_heads * head_dim].view(num_reqs, num_heads, head_dim)
        out = decode_attention(q, *caches, self.batch, scale, reads_early=True)
        return out.view(num_reqs, -1)

    def separate(self, layer: Layer, attention: Attention | None) -> torch.Tensor:
        """Run a layer as cuBLAS's projections and our elementwise kernels."""
        qkv = F.linear(add_rms_norm(self.x, self.residual, self.gain, EPS), layer.qkv)
        x = F.linear(self.attend(layer, qkv, attention), layer.o)
        h = F.linear(add_rms_norm(x, self.residual, self.gain, EPS), layer.gate_up)
        return F.linear(silu_mul(h), layer.down)

    def few(self, layer: Layer, attention: Attention | None) -> torch.Tensor:
        """Run a layer with the projections of kernels/few_rows.py."""
        qkv, residual = add_norm_linear(self.x, self.residual, self.gain, EPS, layer.qkv)
        x = linear_few(self.attend(layer, qkv, attention), layer.o)
        h, _ = add_norm_gate_up_silu(x, residual, self.gain, EPS, layer.gate_up)
        return linear_few(h, layer.down)

    def us(self, form: Callable[..., torch.Tensor], attention: Attention | None) -> float:
        """Return microseconds a layer."""
        return graph_us([partial(form, layer, attention) for layer in self.layers])


def warm_tasks(kind: str) -> list[tuple[Any, ...]]:
    """Return the arguments of warm() that compile what a kind of measurement launches."""
    if kind == "head":
        return [
            ("head", size[0], rows, plan)
            for size in SIZES.values()
            for rows in (1, 8, 16)
            for plan in head_plans(rows, size[0])
        ]
    return [
        ("decode", name, num_reqs, attention)
        for num_reqs in BATCHES
        for name in SIZES
        for attention in attentions(num_reqs, SIZES[name][1:4])
    ]


def warm(kind: str, *task: Any) -> None:
    """In a compiling process: compile one candidate, on small buffers of no meaning."""
    if kind == "head":
        hidden_size, rows, plan = task
        hidden = torch.empty((rows, hidden_size), **OPTIONS)
        head = torch.empty((VOCAB, hidden_size), **OPTIONS)
        lm_head_sample(hidden, head, *head_state(rows), plan=plan)
        return
    name, num_reqs, attention = task
    step = Step(name, num_reqs, BLOCK_TOKENS, num_layers=2)
    num_heads, num_kv_heads, head_dim = step.heads
    qkv = torch.empty((num_reqs, (num_heads + 2 * num_kv_heads) * head_dim), **OPTIONS)
    step.attend(step.layers[0], qkv, attention)


def decode_lines(end_s: float) -> Iterator[dict[str, Any]]:
    """Measure layers, print a line each and yield it, until the time is over."""
    print("us a layer: floor, separate launches, few_rows, few_rows and the best fused_decode")
    cases = [(n, length, name) for length in LENGTHS for n in BATCHES for name in SIZES]
    for num_reqs, length, name in cases:
        if time.monotonic() > end_s:
            print("out of time; the rest was not measured", flush=True)
            return
        step = Step(name, num_reqs, length)
        form = step.few if serves(num_reqs, step.layers[0].qkv) else step.separate
        separate_us = step.us(step.separate, None)
        few_us = separate_us if form == step.separate else step.us(form, None)
        fused: list[tuple[float, Any]] = []
        for attention in attentions(num_reqs, step.heads):
            if attention[0] is not None and time.monotonic() < end_s:
                try:
                    fused.append((round(step.us(form, attention), 2), attention))
                except FAILURES as failure:
                    print(f"left out: {attention}: {str(failure)[:90]}")
                    torch.cuda.synchronize()
        line = {
            "model": name,
            "num_reqs": num_reqs,
            "length": length,
            "floor_us": round(step.num_bytes / READ_BYTES_PER_S * 1e6, 2),
            "separate_us": round(separate_us, 2),
            "few_rows_us": round(few_us, 2),
            "fused": [[us, *(plan or ()), early] for us, (plan, early) in fused],
        }
        print(name, num_reqs, length, *list(line.values())[3:-1], best_of(fused), flush=True)
        yield line


def best_of(fused: list[tuple[float, Any]]) -> str:
    """Return the fastest of (microseconds, plan) in a few words."""
    if not fused:
        return "-"
    us, plan = min(fused, key=lambda pair: pair[0])
    return f"{us} {tuple(plan)}"


def head_plans(rows: int, hidden_size: int) -> list[HeadPlan]:
    """Return the plans of lm_head_sample worth a measurement, the default first."""
    if rows == 1:
        shapes = [(32, 512, 8, 1), (8, 1024, 4, 1), (16, 512, 8, 1), (32, 256, 4, 1)]
    else:
        shapes = [(32, 256, 4, 3), (64, 128, 8, 3), (128, 64, 8, 4), (32, 128, 4, 4)]
    plans = [plan_head(rows, hidden_size, 2), *(HeadPlan(*shape) for shape in shapes)]
    return list(dict.fromkeys(plans))


def head_state(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return idx_mapping, positions, temperature and seed of a batch that draws at 0.6."""
    mapping = torch.arange(rows, dtype=torch.int32, device="cuda")
    positions = torch.arange(rows, device="cuda")
    return mapping, positions, torch.full((rows,), 0.6, device="cuda"), positions * 77


def head_lines(end_s: float) -> Iterator[dict[str, Any]]:
    """Measure the head and the draw, print a line each and yield it, until the time is over."""
    print("us of the head: floor, F.linear and sample_keys, same keys, the best lm_head_sample")
    for name, size in SIZES.items():
        heads = [torch.randn((VOCAB, size[0]), **OPTIONS) for _ in range(4)]
        for rows in (1, 8, 16):
            if time.monotonic() > end_s:
                print("out of time; the rest was not measured", flush=True)
                return
            hidden, state = torch.randn((rows, size[0]), **OPTIONS).mul_(0.1), head_state(rows)

            def apart(
                head: torch.Tensor, hidden: torch.Tensor = hidden, state: Any = state
            ) -> torch.Tensor:
                return sample_keys(F.linear(hidden, head), *state)

            fused: list[tuple[float, HeadPlan]] = []
            for plan in head_plans(rows, size[0]):
                try:
                    launches = [
                        partial(lm_head_sample, hidden, h, *state, plan=plan) for h in heads
                    ]
                    fused.append((round(graph_us(list(launches)), 2), plan))
                except FAILURES as failure:
                    print(f"left out: {plan}: {str(failure)[:90]}")
                    torch.cuda.synchronize()
            same = apart(heads[0]) == lm_head_sample(hidden, heads[0], *state)
            line = {
                "model": name,
                "rows": rows,
                "floor_us": round(heads[0].numel() * 2 / READ_BYTES_PER_S * 1e6, 2),
                "separate_us": round(graph_us([partial(apart, head) for head in heads]), 2),
                "same_keys": f"{int(same.sum())}/{rows}",
                "fused": [[us, *plan] for us, plan in fused],
            }
            print(*list(line.values())[:-1], best_of(fused), flush=True)
            yield line
