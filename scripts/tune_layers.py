"""Whole layers with tiles and without, and which entries their times are worth.

A layer as in a decode of requests that know CONTEXT tokens each, attention included: behind it a
kernel of ours is on the device, and fetches its weight, before attention has ended, where the
library's begins cold. At more than one rank an add + norm stands where the all-reduce would; up to
16 rows nothing, for there the all-reduce is the same with tiles and without.

So a shape's best plan, measured alone, may be another in a layer. choose_plans() begins with the
best of each and tries, one projection after the other, what else was fast. A kernel of our own is
worth its place only where a layer is quicker with it: settle() keeps what takes LEAST_GAIN of the
projections' time away.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nanorunner.kernels.few_rows import add_norm_gate_up_silu, add_norm_linear, linear_few
from nanorunner.kernels.few_rows_plans import GATED, MAX_ROWS, PLAIN, Key
from nanorunner.kernels.medium_rows import gate_up_silu, linear_add_norm, linear_medium
from nanorunner.kernels.medium_rows_plans import ADDED, LIBRARY, MediumRowsPlan, choose
from nanorunner.kernels.rms_norm import add_rms_norm
from nanorunner.kernels.self_attention import (
    AttentionPlan,
    HeadShape,
    plan_attention,
    self_attention,
)

if TYPE_CHECKING:
    from scripts import tune_few
    from scripts.bench_kernels import READ_BYTES_PER_S, graph_us, num_sets
    from scripts.tune_few import baseline
    from scripts.tune_models import (
        BLOCK_TOKENS,
        EPS,
        MODELS,
        OPTIONS,
        decode_batch,
        layer_shapes,
    )
    from scripts.tune_race import Result
else:  # a script's own folder is where Python looks first; it is no package
    import tune_few
    from bench_kernels import READ_BYTES_PER_S, graph_us, num_sets
    from tune_few import baseline
    from tune_models import BLOCK_TOKENS, EPS, MODELS, OPTIONS, decode_batch, layer_shapes
    from tune_race import Result

LEAST_GAIN = 0.01  # of the projections' time: what two runs of one measurement differ by
CHANGE = 0.003  # of a layer's time, from which on another plan takes a place
PASSES = 3  # of a layer's final times, in turn
CONTEXT = 720  # tokens of each request
MAX_SEQ_LEN = 4096  # what a captured graph must reckon with
TPS = (1, 2, 4, 8)  # whose layers may need an entry
HEADS = ("model", "tp", "rows", "floor", "attention", "without", "table")
FORMAT = "{:<6} {:>3} {:>5} {:>7} {:>9} {:>9} {:>8}"

Table = dict[Key, tuple[MediumRowsPlan, float]]  # with microseconds


def ops_of(tp: int, rows: int) -> tuple[str, str, str, str]:
    """Return what qkv, o, gate_up and down are on one of so many ranks (decoder.py)."""
    if rows <= MAX_ROWS:
        return tune_few.ops_of(tp, rows)
    after = ADDED if tp == 1 else PLAIN
    return PLAIN, after, GATED, after


def layer_keys(name: str, tp: int, rows: int) -> list[Key]:
    """Return the keys of a layer's four projections."""
    places = zip(ops_of(tp, rows), layer_shapes(MODELS[name], tp), strict=True)
    return [(op, *shape, rows) for op, shape in places]


class LayerSet(NamedTuple):
    """What one layer reads: its four weights, and K and V of every request."""

    weights: list[torch.Tensor]
    k_cache: torch.Tensor  # [blocks, BLOCK_TOKENS, num_kv_heads, head_dim]
    v_cache: torch.Tensor


class Layers:
    """Some layers, together larger than the L2 cache."""

    def __init__(self, name: str, tp: int, rows: int) -> None:
        model = MODELS[name]
        self.tp, self.ops = tp, ops_of(tp, rows)
        self.shapes = layer_shapes(model, tp)
        self.heads = HeadShape(model.num_heads // tp, model.num_kv_heads // tp, model.head_dim)
        kv_bytes = 4 * rows * CONTEXT * self.heads.num_kv_heads * model.head_dim
        self.num_bytes = sum(2 * num_out * num_in for num_out, num_in in self.shapes) + kv_bytes
        blocks = rows * -(-CONTEXT // BLOCK_TOKENS)
        cache = (blocks, BLOCK_TOKENS, self.heads.num_kv_heads, model.head_dim)
        self.sets = [
            LayerSet(
                [torch.randn(shape, **OPTIONS).mul_(shape[1] ** -0.5) for shape in self.shapes],
                torch.randn(cache, **OPTIONS),
                torch.randn(cache, **OPTIONS),
            )
            for _ in range(num_sets(self.num_bytes))
        ]
        self.x, self.residual = (torch.randn((rows, model.hidden), **OPTIONS) for _ in range(2))
        self.gain = torch.ones(model.hidden, **OPTIONS)
        self.head_gain = torch.ones(model.head_dim, **OPTIONS)
        self.plan = even_decode(rows, model.head_dim, self.sets[0].k_cache)

    def run(self, layer: LayerSet, plans: Sequence[MediumRowsPlan]) -> torch.Tensor:
        """Run one layer as Decoder.decode_medium does, or decode_few, but for the all-reduces."""
        if len(self.x) <= MAX_ROWS:
            return self.run_few(layer, plans)
        qkv, o, gate_up, down = layer.weights
        h = linear_medium(self.x, qkv, None, plans[0])
        x = self.add(self.attend(h, layer, reads_early=False), o, plans[1])
        return self.add(gate_up_silu(x, gate_up, None, plans[2]), down, plans[3])

    def run_few(self, layer: LayerSet, plans: Sequence[MediumRowsPlan]) -> torch.Tensor:
        """run() of few rows."""
        qkv, o, gate_up, down = layer.weights
        places = zip(self.ops, layer.weights, plans, strict=True)
        chosen = [baseline(op, len(self.x), weight, plan) for op, weight, plan in places]
        h, total = add_norm_linear(self.x, self.residual, self.gain, EPS, qkv, None, chosen[0])
        x = linear_few(self.attend(h, layer, reads_early=True), o, None, chosen[1])
        h, _ = add_norm_gate_up_silu(x, total, self.gain, EPS, gate_up, None, chosen[2])
        return linear_few(h, down, None, chosen[3])

    def attend(self, qkv: torch.Tensor, layer: LayerSet, *, reads_early: bool) -> torch.Tensor:
        """Run attention, and what is in front of it."""
        return self_attention(
            qkv, self.plan, layer.k_cache, layer.v_cache, self.heads,
            self.head_gain, self.head_gain, EPS, reads_early,
        )  # fmt: skip

    def add(self, x: torch.Tensor, weight: torch.Tensor, plan: MediumRowsPlan) -> torch.Tensor:
        """Run o or down, and the add + norm behind it."""
        if self.tp == 1:
            return linear_add_norm(x, weight, None, self.residual, self.gain, EPS, plan)
        x = linear_medium(x, weight, None, plan)
        return add_rms_norm(x, self.residual, self.gain, EPS)

    def us(self, plans: Sequence[MediumRowsPlan]) -> float:
        """Return microseconds a layer."""
        return graph_us([partial(self.run, layer, plans) for layer in self.sets])

    def attention_us(self) -> float:
        """Return microseconds of attention alone."""
        qkv = torch.randn((len(self.x), self.shapes[0][0]), **OPTIONS)
        return graph_us([partial(self.attend, qkv, each, reads_early=False) for each in self.sets])


def even_decode(rows: int, head_dim: int, k_cache: torch.Tensor) -> AttentionPlan:
    """Return a decode of requests that have CONTEXT tokens with this one, each in its own blocks.

    Rotation by no angle: what it turns by is no matter of speed.
    """
    device = k_cache.device
    tables = torch.arange(len(k_cache), dtype=torch.int32, device=device).view(rows, -1)
    batch = decode_batch(tables, CONTEXT)._replace(max_seq_len=MAX_SEQ_LEN, is_even=True)
    half = torch.ones((CONTEXT, head_dim // 2), device=device)
    cos_sin = torch.cat((half, torch.zeros_like(half)), dim=1)
    positions = torch.full((rows,), CONTEXT - 1, device=device)
    backend = "triton" if k_cache.is_cuda else "torch"
    return plan_attention(positions, cos_sin, batch, backend, k_cache)


def choose_plans(
    layers: Layers, alternatives: Sequence[Sequence[MediumRowsPlan]]
) -> list[MediumRowsPlan]:
    """Return the plan of each projection: the first, or what makes the layer quicker than it."""
    chosen = [plans[0] for plans in alternatives]
    best_us = layers.us(chosen)
    for place, plans in enumerate(alternatives):
        for plan in plans[1:]:
            other = [*chosen[:place], plan, *chosen[place + 1 :]]
            us = layers.us(other)
            if us < (1 - CHANGE) * best_us:
                chosen, best_us = other, us
    return chosen


def layer_line(
    name: str, tp: int, rows: int, alternatives: Sequence[Sequence[MediumRowsPlan]]
) -> tuple[dict[str, Any], list[MediumRowsPlan]]:
    """Return a line of a layer's times without tiles and with the best plans, and these.

    alternatives: of each projection, the best when measured alone first.
    """
    layers = Layers(name, tp, rows)
    chosen = choose_plans(layers, alternatives)
    without, with_plans = zip(
        *((layers.us([LIBRARY] * len(chosen)), layers.us(chosen)) for _ in range(PASSES)),
        strict=True,
    )
    line = {
        "model": name,
        "tp": tp,
        "rows": rows,
        "floor_us": round(layers.num_bytes / READ_BYTES_PER_S * 1e6, 2),
        "attention_us": round(layers.attention_us(), 2),
        "baseline_us": round(statistics.median(without), 2),
        "table_us": round(statistics.median(with_plans), 2),
    }
    return line, chosen


def gains(line: dict[str, Any]) -> bool:
    """Return whether a layer is quicker with its plans by as much as they must bring."""
    least_us = LEAST_GAIN * (line["baseline_us"] - line["attention_us"])
    return bool(line["table_us"] <= line["baseline_us"] - least_us)


def settle(before: Table, found: dict[Key, Result], lines: Iterable[dict[str, Any]]) -> Table:
    """Return the table: what was before, and what was found for the layers that gain by it.

    The entries of a layer that does not gain go, unless another layer needs them at these rows: one
    that gains, or one that was not measured now but has an entry for each of its projections. Where
    the tiles of the next more rows would take over, the library gets the entry.
    """
    table = dict(before)
    verdicts = {(line["model"], line["tp"], line["rows"]): gains(line) for line in lines}
    needed: set[Key] = set()
    for layer, is_gain in verdicts.items():
        if is_gain:
            needed.update(layer_keys(*layer))
            table |= {
                key: (found[key].plan, found[key].us) for key in layer_keys(*layer) if key in found
            }
    for layer in product(MODELS, TPS, {rows for _, _, rows in verdicts}):
        keys = layer_keys(*layer)
        if layer not in verdicts and all(key in before for key in keys):
            needed.update(keys)
    lost = {key for layer, is_gain in verdicts.items() if not is_gain for key in layer_keys(*layer)}
    for key in sorted(lost - needed, key=lambda key: -key[3]):  # the most rows first
        table.pop(key, None)
        if choose({other: plan for other, (plan, _) in table.items()}, key) != LIBRARY:
            us = found[key].line["baseline_us"] if key in found else 0.0
            table[key] = (LIBRARY, us)
    return table
