"""Whole layers with tiles and without, and which entries their times are worth.

The projections of a layer one behind the other, as in a decode but without attention. At more than
one rank an add + norm stands where the all-reduce would; up to 16 rows nothing, for there the
all-reduce is the same with tiles and without.

A shape's best plan, measured alone, may gain nothing in a layer, and a kernel of our own is worth
its place only where it does. So settle() keeps what makes a layer at least LEAST_GAIN quicker.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from nanorunner.kernels.few_rows import add_norm_gate_up_silu, add_norm_linear, linear_few
from nanorunner.kernels.few_rows_plans import GATED, MAX_ROWS, PLAIN, Key
from nanorunner.kernels.medium_rows import gate_up_silu, linear_add_norm, linear_medium
from nanorunner.kernels.medium_rows_plans import ADDED, LIBRARY, MediumRowsPlan, choose
from nanorunner.kernels.rms_norm import add_rms_norm

if TYPE_CHECKING:
    from scripts import tune_few
    from scripts.bench_kernels import READ_BYTES_PER_S, graph_us, num_sets
    from scripts.tune_few import baseline
    from scripts.tune_models import EPS, MODELS, OPTIONS, layer_shapes
    from scripts.tune_race import Result
else:  # a script's own folder is where Python looks first; it is no package
    import tune_few
    from bench_kernels import READ_BYTES_PER_S, graph_us, num_sets
    from tune_few import baseline
    from tune_models import EPS, MODELS, OPTIONS, layer_shapes
    from tune_race import Result

LEAST_GAIN = 0.01  # of a layer's time: what two runs of one measurement differ by
TPS = (1, 2, 4, 8)  # whose layers may need an entry
HEADS = ("model", "tp", "rows", "floor", "without", "table")
FORMAT = "{:<6} {:>3} {:>5} {:>7} {:>9} {:>8}"

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


class Layers:
    """The projections of some layers, together larger than the L2 cache."""

    def __init__(self, name: str, tp: int, rows: int) -> None:
        model = MODELS[name]
        self.tp, self.ops = tp, ops_of(tp, rows)
        self.shapes = layer_shapes(model, tp)
        self.num_bytes = sum(2 * num_out * num_in for num_out, num_in in self.shapes)
        self.weights = [
            [torch.randn(shape, **OPTIONS).mul_(shape[1] ** -0.5) for shape in self.shapes]
            for _ in range(num_sets(self.num_bytes))
        ]
        self.x, self.residual = (torch.randn((rows, model.hidden), **OPTIONS) for _ in range(2))
        self.gain = torch.ones(model.hidden, **OPTIONS)

    def run(self, weights: list[torch.Tensor], plans: list[MediumRowsPlan]) -> torch.Tensor:
        """Run one layer; what the o projection reads is the front of qkv."""
        if len(self.x) <= MAX_ROWS:
            return self.run_few(weights, plans)
        qkv, o, gate_up, down = weights
        h = linear_medium(self.x, qkv, None, plans[0])
        x = self.add(h[:, : o.shape[1]], o, plans[1])
        return self.add(gate_up_silu(x, gate_up, None, plans[2]), down, plans[3])

    def run_few(self, weights: list[torch.Tensor], plans: list[MediumRowsPlan]) -> torch.Tensor:
        """Run one layer as Decoder.decode_few does, but for the all-reduces."""
        qkv, o, gate_up, down = weights
        places = zip(self.ops, weights, plans, strict=True)
        chosen = [baseline(op, len(self.x), weight, plan) for op, weight, plan in places]
        h, total = add_norm_linear(self.x, self.residual, self.gain, EPS, qkv, None, chosen[0])
        x = linear_few(h[:, : o.shape[1]], o, None, chosen[1])
        h, _ = add_norm_gate_up_silu(x, total, self.gain, EPS, gate_up, None, chosen[2])
        return linear_few(h, down, None, chosen[3])

    def add(self, x: torch.Tensor, weight: torch.Tensor, plan: MediumRowsPlan) -> torch.Tensor:
        """Run o or down, and the add + norm behind it."""
        if self.tp == 1:
            return linear_add_norm(x, weight, None, self.residual, self.gain, EPS, plan)
        x = linear_medium(x, weight, None, plan)
        return add_rms_norm(x, self.residual, self.gain, EPS)

    def us(self, plans: list[MediumRowsPlan]) -> float:
        """Return microseconds a layer."""
        return graph_us([partial(self.run, weights, plans) for weights in self.weights])


def layer_line(
    name: str, tp: int, rows: int, plans: dict[Key, MediumRowsPlan]
) -> tuple[dict[str, Any], list[MediumRowsPlan]]:
    """Return a line of a layer's times without tiles and with plans, and those that it took."""
    layers = Layers(name, tp, rows)
    chosen = [plans.get(key, LIBRARY) for key in layer_keys(name, tp, rows)]
    line = {
        "model": name,
        "tp": tp,
        "rows": rows,
        "floor_us": round(layers.num_bytes / READ_BYTES_PER_S * 1e6, 2),
        "baseline_us": round(layers.us([LIBRARY] * len(chosen)), 2),
        "table_us": round(layers.us(chosen), 2),
    }
    return line, chosen


def gains(line: dict[str, Any]) -> bool:
    """Return whether a layer is quicker with its plans by as much as they must bring."""
    return bool(line["table_us"] <= (1 - LEAST_GAIN) * line["baseline_us"])


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
