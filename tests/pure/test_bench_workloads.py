"""The benchmark's workloads never change: their published totals and first ids are fixed here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load_script(name: str) -> ModuleType:
    """Import a file of scripts/, which is no package."""
    path = Path(__file__).parents[2] / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


workloads = load_script("bench_workloads")
VOCAB = 151_936


def test_the_nano_load_is_the_one_whose_results_are_published() -> None:
    load = workloads.make_workload("nano", VOCAB)
    assert len(load.prompts) == len(load.output_lens) == 256
    assert (load.num_input_tokens, sum(load.output_lens)) == (142_827, 133_966)
    assert max(len(p) + n for p, n in zip(*load, strict=True)) <= 2048


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("b1", (1, 128, 512)),
        ("b8", (8, 512, 512)),
        ("b64", (64, 512, 512)),
        ("b256", (256, 512, 512)),
        ("prefill", (64, 2048, 1)),
        ("long", (8, 8192, 512)),
    ],
)
def test_a_uniform_load_has_its_stated_shape(name: str, shape: tuple[int, int, int]) -> None:
    load = workloads.make_workload(name, VOCAB)
    num_requests, input_len, output_len = shape
    assert [len(prompt) for prompt in load.prompts] == [input_len] * num_requests
    assert load.output_lens == [output_len] * num_requests
    assert load.prompts[0][:3] == [2201, 9325, 1033]  # what seed 1 gives on every Python


def test_ids_stay_inside_a_small_vocabulary() -> None:
    load = workloads.make_workload("b1", 517)
    assert 500 < max(load.prompts[0]) <= 516


def test_an_unknown_load_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match="load 'b2': use some of nano, b1"):
        workloads.make_workload("b2", VOCAB)
