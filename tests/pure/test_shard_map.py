"""The shard map says of every parameter how it is cut, and the command says so without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nanorunner.cli import WORKSHOP, main
from nanorunner.presets import load_preset, preset_names
from nanorunner.workers.architectures import parse
from nanorunner.workshop.cli import COMMANDS
from nanorunner.workshop.shard_map import (
    COLUMN,
    RANK_0,
    ROW,
    VOCABULARY,
    WHOLE,
    Entry,
    all_reduce_numbers,
    shard_map,
)

ROOT = Path(__file__).parents[2]
PLAN = ["shards", "--load-format", "dummy", "--model"]


def entries_of(preset: str, tp: int) -> dict[str, Entry]:
    return {entry.name: entry for entry in shard_map(parse(load_preset(preset)), tp)}


def test_the_command_line_knows_every_command_of_the_workshop() -> None:
    assert tuple(COMMANDS) == WORKSHOP


def test_each_kind_of_parameter_is_cut_its_own_way() -> None:
    entries = entries_of("tiny-llama", 2)
    kinds = {name: entry.split for name, entry in entries.items()}
    assert kinds["embed"] == kinds["lm_head"] == VOCABULARY
    for name in ("qkv", "qkv_bias", "gate_up", "gate_up_bias"):
        assert kinds[f"layers.0.{name}"] == COLUMN
    assert kinds["layers.0.o"] == kinds["layers.0.down"] == ROW
    assert kinds["layers.0.o_bias"] == kinds["layers.0.down_bias"] == RANK_0
    assert kinds["layers.0.input_norm"] == kinds["norm"] == WHOLE
    assert {entry.split for entry in entries_of("tiny-llama", 1).values()} == {WHOLE}


@pytest.mark.parametrize("preset", preset_names())
def test_the_bytes_of_all_ranks_are_the_models_and_what_is_padding_or_a_copy(preset: str) -> None:
    model = parse(load_preset(preset))
    whole = sum(s.num_bytes(1) for entry in shard_map(model, 1) for s in entry.shares)
    for tp in (2, 3, 4):
        shares = [share for entry in shard_map(model, tp) for share in entry.shares]
        held = sum(share.num_bytes(1) for share in shares)
        padding = sum(share.padding_bytes(1) for share in shares)
        copies = [p for s in shares for p in s.parameter.pieces if p.is_copy]
        copied = sum(_volume([span.size for span in piece.source]) for piece in copies)
        assert held - padding - copied == whole


def test_the_figures_of_qwen3_at_tp_4() -> None:
    entries = entries_of("qwen3-0.6b", 4)
    qkv, o = entries["layers.0.qkv"], entries["layers.0.o"]
    assert (qkv.whole_shape, qkv.shares[0].parameter.shape) == ((4096, 1024), (1024, 1024))
    assert (o.whole_shape, o.shares[0].parameter.shape) == ((1024, 2048), (1024, 512))
    assert len(all_reduce_numbers(parse(load_preset("qwen3-0.6b")), 4)) == 57
    assert entries["embed"].all_reduce == 1
    assert entries["layers.27.down"].all_reduce == 57


def test_the_printed_plan_shows_slices_padding_and_the_all_reduce(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*PLAN, "smollm2-135m", "--tp", "4"]) == 0
    text = capsys.readouterr().out
    assert "layers.0.qkv  [960, 576] -> 4 x [320, 576]  column-parallel" in text
    assert "q 192..383 (heads 3..5), k 64..127 (head 1), v 64..127 (head 1)" in text
    assert "rank 3  nothing: all padding" in text
    assert "row-parallel; then all-reduce 2 of 61" in text
    assert "KV cache 4/3 of tp 1's" in text
    assert "plan: each element of 272 tensors is on exactly one rank" in text
    assert "layers.1 to layers.29 are cut the same way" in text
    assert "layers.1." not in text


def test_one_tensor_is_found_by_its_name_in_the_checkpoint_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("layers.2.o", "model.layers.2.self_attn.o_proj.weight", "*.2.o"):
        assert main([*PLAN, "tiny-qwen2", "--tensor", name]) == 0
        text = capsys.readouterr().out
        assert text.count("-> 2 x") == 1
        assert "layers.2.o  [96, 96] -> 2 x [96, 64]" in text
    assert main([*PLAN, "tiny-qwen2", "--tensor", "layers.9.o"]) == 2
    assert "--tensor layers.9.o: no parameter" in capsys.readouterr().err


def test_json_has_every_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "tiny-qwen3", "--tp", "3", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["tp"], said["tiles"], said["errors"]) == (3, True, [])
    names = [parameter["name"] for parameter in said["parameters"]]
    assert names == list(entries_of("tiny-qwen3", 3))
    assert all(rank["checksum"] is None for p in said["parameters"] for rank in p["ranks"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([*PLAN, "tiny-llama", "--tp", "5"], "tp 5: the model has 4 query heads"),
        (["shards", "--model", "tiny-llama"], "add --load-format dummy"),
        ([*PLAN, "tiny-llama", "here"], "unexpected 'here'"),
        ([*PLAN, "tiny-llama", "--tensr", "o"], "did you mean --tensor?"),
        (["shard"], "did you mean shards?"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(words)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.count("\n") == 1
    assert expected in error


def test_a_plan_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; from nanorunner.cli import main; "
    program += f"sys.exit(main({[*PLAN, 'qwen3-0.6b']}))"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert "file: none was read" in result.stdout


def _volume(sizes: list[int]) -> int:
    volume = 1
    for size in sizes:
        volume *= size
    return volume
