"""A spec becomes exactly its points, in an order that its seed decides; bad ones are named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanorunner.bench.environment import changes, driver_version, environment, gpu_names
from nanorunner.bench.points import (
    find_spec,
    flags_of,
    make_sweep,
    read_sweep,
    ready_sweeps,
    row_key,
    runs_of,
)

NAMES = st.sampled_from(["tp", "batch", "runner", "model", "seed", "num_blocks"])
VALUES = st.one_of(st.integers(0, 99), st.booleans(), st.sampled_from(["v1", "v2"]), st.none())


def spec(**changes: Any) -> dict[str, Any]:
    return {"command": "latency", **changes}


@given(
    vary=st.dictionaries(
        NAMES, st.lists(VALUES, min_size=1, max_size=3, unique_by=repr), max_size=3
    ),
    repeat=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_every_point_of_the_product_runs_once_a_repeat(
    vary: dict[str, list[Any]], repeat: int, seed: int
) -> None:
    sweep = make_sweep(spec(vary=vary, repeat=repeat, seed=seed), "it")
    size = 1
    for values in vary.values():
        size *= len(values)
    assert len(sweep.points) == size
    runs = runs_of(sweep, "commit")
    assert len({run.key for run in runs}) == len(runs) == size * repeat
    for number in range(repeat):  # each round holds every point, so a slow hour hits all of them
        part = runs[number * size : (number + 1) * size]
        assert sorted(run.point for run in part) == list(range(size))
        assert {run.repeat for run in part} == {number}
    assert runs == runs_of(sweep, "commit")


def test_the_order_is_shuffled_by_the_seed() -> None:
    orders = {
        seed: [
            run.point
            for run in runs_of(make_sweep(spec(vary={"tp": list(range(9))}, seed=seed), "it"), "")
        ]
        for seed in (0, 1)
    }
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


def test_listed_points_are_multiplied_with_what_is_varied() -> None:
    listed = [{"runner": "v1"}, {"runner": "v2", "async_depth": 1}]
    sweep = make_sweep(spec(base={"model": "m"}, points=listed, vary={"tp": [1, 2]}), "it")
    assert sweep.points == (
        {"model": "m", "runner": "v1", "tp": 1},
        {"model": "m", "runner": "v1", "tp": 2},
        {"model": "m", "runner": "v2", "async_depth": 1, "tp": 1},
        {"model": "m", "runner": "v2", "async_depth": 1, "tp": 2},
    )
    assert set(sweep.varied) == {"runner", "async_depth", "tp"}


def test_a_key_holds_whatever_decides_the_result() -> None:
    words, point = ("python", "x.py"), {"tp": 1, "batch": 8}
    key = row_key(words, point, 0, "abc")
    assert key == row_key(words, {"batch": 8, "tp": 1, "seed": None}, 0, "abc")
    others = [
        row_key(("python", "y.py"), point, 0, "abc"),
        row_key(words, {"tp": 2, "batch": 8}, 0, "abc"),
        row_key(words, {"tp": "1", "batch": 8}, 0, "abc"),
        row_key(words, point, 1, "abc"),
        row_key(words, point, 0, "abd"),
    ]
    assert len({key, *others}) == 6


def test_a_machine_is_known_by_its_gpus_and_versions(tmp_path: Path) -> None:
    for number in (0, 1):
        folder = tmp_path / "gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t NVIDIA H200\nIRQ: 7\n")
    words = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
    (tmp_path / "version").write_text(f"{words}\nGCC version: gcc 12.2.0 \n")
    assert gpu_names(tmp_path) == ["NVIDIA H200"] * 2
    assert driver_version(tmp_path) == "570.86.15"
    assert driver_version(tmp_path / "nowhere") is None
    here = environment()
    assert here["cpu"]
    assert changes(here, here) == ""
    other = {**here, "gpu": "NVIDIA H200", "torch": "0.1"}
    expected = f"gpu NVIDIA H200 -> {here['gpu'] or 'none'}, torch 0.1 -> {here['torch'] or 'none'}"
    assert changes(other, here) == expected


def test_settings_become_flags() -> None:
    known = ["--tp", "--enforce-eager", "--prefix-cache", "--no-prefix-cache", "--seed"]
    given_settings = {"tp": 2, "enforce_eager": True, "prefix_cache": False, "seed": None}
    assert flags_of(given_settings, known) == ["--tp", "2", "--enforce-eager", "--no-prefix-cache"]
    assert flags_of({"enforce_eager": False}, known) == []
    assert flags_of({"anything": 1.5}) == ["--anything", "1.5"]
    with pytest.raises(ValueError, match="unknown setting 'enforce_eagr'; did you mean enforce_ea"):
        flags_of({"enforce_eagr": True}, known)


def test_a_change_pins_or_varies_a_setting() -> None:
    its_spec = spec(base={"model": "a"}, vary={"tp": [1, 2, 4]})
    assert make_sweep(its_spec, "it", ["tp=2", "model=b"]).points == ({"model": "b", "tp": 2},)
    sweep = make_sweep(its_spec, "it", ["tp=[1, 2]", "runner=[v1, v2]"])
    assert (len(sweep.points), sweep.varied) == (4, ("tp", "runner"))


REFUSED: list[tuple[Any, str]] = [
    ([], "holds a list"),
    ({"vary": {"tp": [1]}}, "give one of command"),
    (spec(program=["x"]), "give one of command"),
    (spec(varies={}), "unknown key 'varies'; did you mean vary?"),
    (spec(vary={"tp": 2}), "vary.tp 2: write a list"),
    (spec(vary={"tp": []}), "vary.tp"),
    (spec(vary={"tp": [[1]]}), "vary.tp: is list"),
    (spec(vary={"tp": [1, 1]}), "points 0 and 1 are the same"),
    (spec(vary=[1]), "vary: is list"),
    (spec(base=[1]), "base: is list"),
    (spec(points={}), "points: is dict"),
    (spec(points=[1]), "points[0]: is int"),
    (spec(base={"out": "x"}), "base.out: a sweep gives --out itself"),
    (spec(repeat=0), "repeat 0: use 1 or more"),
    (spec(repeat=True), "repeat True"),
    (spec(repeat=1.5), "repeat 1.5: use a whole number"),
    (spec(timeout_s="1"), "timeout_s '1'"),
    ({"program": "x"}, "program 'x': write a list"),
]


@pytest.mark.parametrize(("bad", "words"), REFUSED)
def test_a_bad_spec_is_refused_by_its_key(bad: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make_sweep(bad, "it")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("vary: [")
    with pytest.raises(ValueError, match=r"bad\.yaml"):
        read_sweep(path)
    with pytest.raises(ValueError, match=r"did you mean smoke\?"):
        find_spec("smokey")


@pytest.mark.parametrize("name", ready_sweeps())
def test_a_ready_sweep_is_well_formed(name: str) -> None:
    sweep = read_sweep(find_spec(name))
    assert sweep.about
    assert len(sweep.points) > 1
    assert read_sweep(find_spec(f"configs/sweeps/{name}.yaml")) == sweep
