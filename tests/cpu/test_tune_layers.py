"""The table of scripts/tune.py --only medium has what makes a layer quicker, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nanorunner.kernels.few_rows_plans import (
    FOLDER,
    GATED,
    NORM,
    PLAIN,
    FewRowsPlan,
    Key,
    read_table,
)
from nanorunner.kernels.medium_rows_plans import ADDED, LIBRARY, TILES, MediumRowsPlan
from nanorunner.kernels.product_plans import load_products

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))  # as for a script that runs there

from scripts import tune_layers  # noqa: E402
from scripts.tune_layers import (  # noqa: E402
    Layers,
    choose_plans,
    gains,
    layer_keys,
    ops_of,
    settle,
)
from scripts.tune_medium import alternatives, as_chosen  # noqa: E402
from scripts.tune_models import Model  # noqa: E402
from scripts.tune_race import Result, measured, write_table  # noqa: E402

pytestmark = pytest.mark.beside

OLD, NEW = MediumRowsPlan(TILES, 64), MediumRowsPlan(TILES, 128)


def line(name: str, tp: int, rows: int, share: float) -> dict[str, Any]:
    """Return a layer's line, its time with tiles being such a share of that without."""
    times = {"attention_us": 30.0, "baseline_us": 80.0, "table_us": 30.0 + 50.0 * share}
    return {"model": name, "tp": tp, "rows": rows, **times}


def results(keys: list[Key], plan: MediumRowsPlan = NEW) -> dict[Key, Result]:
    """Return what a race has found for projections."""
    return {key: Result(key, plan, 2.5, {"baseline_us": 3.5}) for key in keys}


def test_the_ops_of_a_layer_follow_its_ranks_and_its_rows() -> None:
    assert ops_of(1, 16) == ops_of(2, 2) == (NORM, PLAIN, GATED, PLAIN)
    assert ops_of(1, 17) == (PLAIN, ADDED, GATED, ADDED)
    assert ops_of(2, 256) == (PLAIN, PLAIN, GATED, PLAIN)
    assert layer_keys("8b", 2, 16)[2] == (GATED, 12288, 4096, 16)


def test_a_hundredth_of_the_projections_must_be_won() -> None:
    assert gains(line("8b", 1, 16, 0.989))
    assert not gains(line("8b", 1, 16, 0.991))
    assert not gains(line("8b", 1, 16, 1.1))


def test_the_entries_of_a_layer_that_gains_are_kept_and_those_of_one_that_does_not_go() -> None:
    won, lost = layer_keys("8b", 1, 16), layer_keys("8b", 1, 8)
    other = (PLAIN, 64, 64, 32)
    before = {other: (OLD, 7.25), won[0]: (OLD, 1.5), lost[0]: (OLD, 1.5)}
    lines = [line("8b", 1, 16, 0.9), line("8b", 1, 8, 0.995)]
    table = settle(before, results(won + lost), lines)
    assert table == {other: (OLD, 7.25)} | dict.fromkeys(won, (NEW, 2.5))
    assert before[won[0]] == (OLD, 1.5), "settled anew after each layer"


def test_a_layer_that_was_not_measured_keeps_what_it_had() -> None:
    keys = layer_keys("0.6b", 1, 64)
    before = {key: (OLD, 4.0) for key in keys}
    assert settle(before, results(keys), []) == before
    assert settle({}, results(keys), []) == {}, "found, but in no layer"


def test_an_entry_that_another_layer_needs_stays() -> None:
    # qkv of 1.7b on one rank has the shape of o of 8b on two, and at few rows another op.
    shared = (PLAIN, 4096, 2048, 64)
    first, second = layer_keys("1.7b", 1, 64), layer_keys("8b", 2, 64)
    assert set(first) & set(second) == {shared}
    lines = [line("1.7b", 1, 64, 0.9), line("8b", 2, 64, 1.0)]
    table = settle({}, results(first + second), lines)
    assert set(table) == set(first), "one gains, the other does not"
    before = {key: (OLD, 4.0) for key in first}
    table = settle(before, results(second), lines[1:])
    assert table == before, "the other has all its entries from before, as they were"
    del before[first[1]]
    assert shared not in settle(before, results(second), lines[1:]), "it never was kept"


def test_where_more_rows_have_tiles_the_library_gets_the_entry() -> None:
    few, many = layer_keys("0.6b", 1, 192), layer_keys("0.6b", 1, 256)
    lines = [line("0.6b", 1, 192, 1.0), line("0.6b", 1, 256, 0.9)]
    table = settle({}, results(few + many), lines)
    assert table == dict.fromkeys(few, (LIBRARY, 3.5)) | dict.fromkeys(many, (NEW, 2.5))
    lines[1] = line("0.6b", 1, 256, 1.0)
    assert settle(table, results(few + many), lines) == {}


def test_a_table_that_is_written_again_keeps_its_microseconds(tmp_path: Path) -> None:
    path = tmp_path / "gpu.yaml"
    table = {(PLAIN, 64, 32, 24): (OLD, 3.75), (GATED, 64, 32, 8): (NEW, 12.5)}
    write_table(path, table, "a test")
    text = path.read_text()
    kept = measured(path, read_table(path, MediumRowsPlan))
    assert kept == table
    write_table(path, kept, "a test")
    assert path.read_text() == text
    assert measured(tmp_path / "none.yaml", {}) == {}


def test_the_tables_in_the_package_would_be_written_as_they_are(tmp_path: Path) -> None:
    for path in FOLDER.glob("*.yaml"):
        plans: dict[Key, Any]
        if path.stem.endswith("-products"):
            plans = {**load_products(path)}
        else:
            make: Any = MediumRowsPlan if path.stem.endswith("-medium") else FewRowsPlan
            plans = read_table(path, make)
        again = tmp_path / path.name
        write_table(again, measured(path, plans), "a test")
        entries = path.read_text().splitlines()[1:]
        assert again.read_text().splitlines()[1:] == entries


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("rows", [4, 33])
def test_a_layer_of_tiles_computes_what_one_without_does(
    tp: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_layers, "OPTIONS", {"dtype": torch.float32, "device": "cpu"})
    monkeypatch.setattr(tune_layers, "num_sets", lambda num_bytes: 1)
    monkeypatch.setitem(vars(tune_layers)["MODELS"], "tiny", Model(64, 4, 2, 16, 96))
    layers = Layers("tiny", tp, rows)
    tiles = MediumRowsPlan(TILES, 16 if rows == 4 else 64, 64, 32, is_swapped=True)
    residual = layers.residual.clone()
    expected = layers.run(layers.sets[0], [LIBRARY] * 4)
    layers.residual.copy_(residual)
    actual = layers.run(layers.sets[0], [tiles] * 4)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert F.mse_loss(actual, torch.zeros_like(actual)) > 1e-3


def test_a_layer_attends_to_all_that_its_requests_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where V is the same everywhere, attention gives it back, whatever the weights."""
    monkeypatch.setattr(tune_layers, "OPTIONS", {"dtype": torch.float32, "device": "cpu"})
    monkeypatch.setattr(tune_layers, "num_sets", lambda num_bytes: 1)
    monkeypatch.setitem(vars(tune_layers)["MODELS"], "tiny", Model(64, 4, 2, 16, 96))
    layers = Layers("tiny", 1, 3)
    layer = layers.sets[0]
    layer.v_cache.fill_(2.0)
    qkv = torch.randn(3, 8 * 16)
    qkv[:, 6 * 16 :] = 2.0  # the new token's
    out = layers.attend(qkv, layer, reads_early=False)
    torch.testing.assert_close(out, torch.full((3, 64), 2.0))
    layer.v_cache[: len(layer.v_cache) // 3] = 3.0  # the first request's blocks
    qkv[0, 6 * 16 :] = 3.0
    out = layers.attend(qkv, layer, reads_early=False)
    torch.testing.assert_close(out, torch.tensor([[3.0], [2.0], [2.0]]).expand(3, 64))


class TimedLayers:
    """Stands in for layers on a GPU: a layer takes the sum of its plans' times, and o what it has.

    Behind attention o is quicker with tiles than alone.
    """

    def __init__(self) -> None:
        self.tried: list[list[int]] = []

    def us(self, plans: list[MediumRowsPlan]) -> float:
        self.tried.append([plan.row_tile for plan in plans])
        o_us = {LIBRARY: 14.0, NEW: 9.0}.get(plans[1], 20.0)
        return 40.0 + o_us + sum(plan.row_tile for plan in plans[::2]) / 1000


def test_a_layer_chooses_what_it_is_quicker_with() -> None:
    layers: Any = TimedLayers()
    small = MediumRowsPlan(TILES, 16)
    chosen = choose_plans(layers, [[OLD], [LIBRARY, OLD, NEW], [NEW, small], [LIBRARY]])
    assert chosen == [OLD, NEW, NEW, LIBRARY], "a change of less than 0.3 % is none"
    assert len(layers.tried) == 4


def test_a_layer_tries_the_best_alone_the_library_and_the_next_best() -> None:
    key = (ADDED, 64, 32, 64)
    plans = [MediumRowsPlan(TILES, 64, out_tile) for out_tile in (16, 32, 64, 128, 256)]
    lines = [[*plan, 2.0 + i] for i, plan in enumerate(plans)]
    lines.insert(1, [*LIBRARY, 2.5])
    found = {key: Result(key, plans[0], 2.0, {"plans": lines})}
    assert alternatives(key, found, {}) == [plans[0], LIBRARY, *plans[1:3]]
    assert as_chosen(found[key], plans[2])[1:3] == (plans[2], 4.0)
    assert as_chosen(found[key], LIBRARY)[1:3] == (LIBRARY, 2.5)
    lines.insert(0, lines.pop(1))
    assert alternatives(key, found, {}) == [LIBRARY, *plans[:3]]
    assert alternatives(key, {}, {key: (OLD, 7.0)}) == [OLD, LIBRARY]
    assert alternatives(key, {}, {}) == [LIBRARY]
