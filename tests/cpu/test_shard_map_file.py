"""The shard map's proof reads the real file, agrees with the loader, and finds what is wrong."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nanorunner.cli import main
from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.presets import load_preset
from nanorunner.workers.architectures import parse
from nanorunner.workers.models.decoder import Decoder
from nanorunner.workers.shard_checksums import checksum
from nanorunner.workers.shards import Span
from nanorunner.workers.weight_plan import Box, checkpoint_shapes
from nanorunner.workers.weights import ReadSlice, checkpoint_reader, dummy_reader, fill
from nanorunner.workshop.sandbox_ranks import make_groups, run_ranks
from nanorunner.workshop.shard_map import (
    Entry,
    all_reduce_numbers,
    shard_map,
    with_checksums,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of random bfloat16 weights."""
    fields: dict[str, Any] = load_preset(request.param)
    model = parse(fields)
    read = dummy_reader(model, 1, torch.bfloat16, CPU)
    tensors = {
        key: read(key, tuple(Span(0, size) for size in shape)).contiguous()
        for key, shape in checkpoint_shapes(model).items()
    }
    path = tmp_path_factory.mktemp(request.param)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**fields, "dtype": "bfloat16"}))
    return path


def proved(folder: Path, tp: int, reader: Any = None) -> tuple[list[Entry], list[str]]:
    """Return the map with checksums, and the errors that the bytes gave."""
    model = parse(json.loads((folder / "config.json").read_text()))
    errors: list[str] = []
    with ExitStack() as stack:
        read: ReadSlice = checkpoint_reader(folder, stack)
        read = read if reader is None else reader(read)
        entries = list(with_checksums(shard_map(model, tp), model, read, errors))
    return entries, errors


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_the_slices_put_together_are_the_file_and_equal_what_the_loader_loads(
    folder: Path, tp: int
) -> None:
    entries, errors = proved(folder, tp)
    assert errors == []
    model = parse(json.loads((folder / "config.json").read_text()))
    group = make_groups(1)[0]
    with ExitStack() as stack:
        for rank in range(tp):
            decoder = Decoder(
                model, tp=tp, rank=rank, dtype=torch.bfloat16, device=CPU, group=group
            )
            fill(decoder, checkpoint_reader(folder, stack))
            told = {
                entry.name: share.checksum
                for entry in entries
                for share in entry.shares
                if share.rank == rank
            }
            assert told == {name: checksum(t) for name, t in decoder.parameters.items()}


def test_a_loader_that_reads_the_wrong_rows_is_caught(folder: Path) -> None:
    key = "model.layers.1.self_attn.q_proj.weight"

    def off_by_one(read: ReadSlice) -> ReadSlice:
        def wrong(wanted: str, box: Box) -> torch.Tensor:
            first = box[0]
            if wanted == key and first.start > 0:
                box = (Span(first.start - 1, first.stop - 1), *box[1:])
            return read(wanted, box)

        return wrong

    errors = proved(folder, 2, off_by_one)[1]
    assert errors == [f"{key}: put together again it is not what the file holds"]


def test_rows_that_two_ranks_hold_and_a_wrong_copy_are_caught(folder: Path) -> None:
    model = parse(json.loads((folder / "config.json").read_text()))
    entries = shard_map(model, 2)
    embed = entries[0]
    first, second = embed.shares
    twice = embed._replace(shares=(first, second._replace(parameter=first.parameter)))
    norm = next(entry for entry in entries if entry.name == "norm")
    errors: list[str] = []
    with ExitStack() as stack:
        read = checkpoint_reader(folder, stack)
        num_reads = 0

        def other_bytes_at_first(key: str, box: Box) -> torch.Tensor:
            nonlocal num_reads
            num_reads += key == "model.norm.weight"
            # the second read is rank 1's copy
            return read(key, box) + (key == "model.norm.weight" and num_reads == 2)

        list(with_checksums([twice, norm], model, other_bytes_at_first, errors))
    assert errors[0].startswith("model.embed_tokens.weight: its elements are on 0 to 2 ranks")
    assert errors[-1] == "rank 1, norm: its copy of model.norm.weight differs"


@pytest.mark.parametrize("tp", [1, 2])
def test_the_command_proves_it_from_the_file(
    folder: Path, tp: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["shards", "--model", str(folder), "--tp", str(tp), "--all"]) == 0
    text = capsys.readouterr().out
    assert "equal the checkpoint byte by byte; all padding is zero" in text
    assert "layers.2.down" in text
    entries, _ = proved(folder, tp)
    for share in entries[0].shares:
        assert f"crc {share.checksum:08x}" in text


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3"])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_all_reduces_of_a_step_are_those_that_a_forward_makes(preset: str, tp: int) -> None:
    model = parse(load_preset(preset))
    groups = make_groups(tp)

    def forward(rank: int) -> None:
        decoder = Decoder(
            model, tp=tp, rank=rank, dtype=torch.float32, device=CPU, group=groups[rank]
        )
        fill(decoder, dummy_reader(model, 0, torch.float32, CPU))
        shape = (model.num_layers, 1, 256, decoder.local_kv_heads, model.head_dim)
        batch = AttentionBatch(
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([1], dtype=torch.int32),
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            slot_mapping=torch.zeros(1, dtype=torch.int64),
            max_query_len=1,
            max_seq_len=1,
        )
        one = torch.zeros(1, dtype=torch.int64)
        caches = (list(torch.zeros(shape)), list(torch.zeros(shape)))
        decoder.forward(one, one, batch, *caches)

    run_ranks(tp, forward)
    counts = {group.num_all_reduces for group in groups}
    expected = len(all_reduce_numbers(model, tp))
    # at tp 1 the calls are made, and are the identity
    assert counts == ({expected} if tp > 1 else {2 * model.num_layers})
