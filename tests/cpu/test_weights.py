"""Every file and tensor named exists, every parameter is filled once, or the load fails by name."""

from __future__ import annotations

import json
import logging
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from decoder_harness import Ranks, ThreadGroup, runner_config
from safetensors.torch import load_file, save_file

from nanorunner.presets import load_preset
from nanorunner.toy_model import make_toy_model
from nanorunner.workers.architectures import parse
from nanorunner.workers.checkpoint import check_checkpoint, read_headers
from nanorunner.workers.model_config import ModelConfig
from nanorunner.workers.models.decoder import Decoder
from nanorunner.workers.shards import Span
from nanorunner.workers.weights import checkpoint_reader, dummy_reader, fill

PRESET = "tiny-llama"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_toy_model(tmp_path / "toy", load_preset(PRESET))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_toy_model(tmp_path / "toy", load_preset(PRESET), max_shard_size="200KB")


def model_of(folder: Path) -> ModelConfig:
    return parse(json.loads((folder / "config.json").read_text()))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter that the CPU may have packed as an ordinary tensor."""
    return tensor.to_dense() if tensor.is_mkldnn else tensor


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace (or with None remove) tensors of model.safetensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        tensors.pop(key, None)
        if tensor is not None:
            tensors[key] = tensor
    save_file(tensors, path)


def test_a_sharded_and_a_single_file_load_the_same_weights(folder: Path, tmp_path: Path) -> None:
    other = make_toy_model(tmp_path / "other", load_preset(PRESET), max_shard_size="200KB")
    assert len(list(other.glob("*.safetensors"))) > 2
    loaded = []
    for source in (folder, other):
        check_checkpoint(source, model_of(source))
        config = runner_config(
            model_of(source), 2, checkpoint=str(source), load_format="safetensors"
        )
        loaded.append([d.parameters for d in Ranks(config).decoders])
    for one, two in zip(*loaded, strict=True):
        assert list(one) == list(two)
        assert all(torch.equal(plain(one[name]), plain(two[name])) for name in one)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    name = "model-00002-of-00005.safetensors"
    (sharded / name).unlink()
    with pytest.raises(ValueError, match=f"1 of 5 files named in .* are missing: {name}"):
        check_checkpoint(sharded, model_of(sharded))


def test_a_tensor_that_the_index_promises_must_be_in_its_file(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00005.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"00001-of-00005.safetensors: holds no model.norm.weight"):
        read_headers(sharded)


def test_an_index_may_not_point_out_of_its_folder(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"model.norm.weight": "../x.safetensors"}}))
    with pytest.raises(ValueError, match=r"names '\.\./x.safetensors', which is not a file of its"):
        read_headers(sharded)


def test_a_second_complete_copy_is_reported_and_not_loaded(
    sharded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = {"lm_head.weight": torch.zeros(3)}
    save_file(copy, sharded / "consolidated.safetensors")
    with caplog.at_level(logging.WARNING):
        check_checkpoint(sharded, model_of(sharded))
    assert "files that are not used: consolidated.safetensors" in caplog.text


def test_a_folder_without_weights_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"neither model.safetensors nor .*pytorch_model.bin"):
        read_headers(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        read_headers(tmp_path / "nowhere")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_file_cut_short_is_refused(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="cut short"):
        check_checkpoint(folder, model_of(folder))


def test_missing_tensors_are_named(folder: Path) -> None:
    rewrite(folder, model__layers__1__self_attn__k_proj__bias=None)
    with pytest.raises(
        ValueError, match=r"1 of 51 tensors .* missing: model.layers.1.self_attn.k_p"
    ):
        check_checkpoint(folder, model_of(folder))


def test_a_wrong_shape_is_named(folder: Path) -> None:
    rewrite(folder, model__norm__weight=torch.ones(65))
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \[65\], .* asks for \[64\]"):
        check_checkpoint(folder, model_of(folder))


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.int32, "I32")]
)
def test_a_quantised_tensor_is_named(folder: Path, dtype: torch.dtype, name: str) -> None:
    rewrite(folder, model__norm__weight=torch.ones(64).to(dtype))
    with pytest.raises(ValueError, match=f"model.norm.weight is {name}; only F32, BF16, F16"):
        check_checkpoint(folder, model_of(folder))


def test_unused_tensors_are_reported_but_not_the_harmless_ones(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    with caplog.at_level(logging.WARNING):
        check_checkpoint(folder, model_of(folder))
    assert caplog.text == ""
    rewrite(folder, model__vision__weight=torch.ones(8))
    with caplog.at_level(logging.WARNING):
        check_checkpoint(folder, model_of(folder))
    assert "1 tensors are not used: model.vision.weight" in caplog.text


def test_the_flag_decides_whether_the_head_is_tied(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    untied = model_of(folder)
    tied = replace(untied, tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING):
        check_checkpoint(folder, tied)
    assert "lm_head.weight is not used" in caplog.text
    loaded = [
        Ranks(runner_config(m, 1, checkpoint=str(folder), load_format="safetensors")).decoders[0]
        for m in (tied, untied)
    ]
    assert torch.equal(plain(loaded[0].lm_head), loaded[0].embed)
    assert not torch.equal(plain(loaded[1].lm_head), loaded[1].embed)
    assert torch.equal(loaded[0].embed, loaded[1].embed)

    rewrite(folder, lm_head__weight=None)
    check_checkpoint(folder, tied)
    with pytest.raises(ValueError, match=r"lm_head.weight \(config.json says tie_word_embeddings"):
        check_checkpoint(folder, untied)


def test_a_rank_reads_its_slices_alone(folder: Path) -> None:
    with ExitStack() as stack:
        read = checkpoint_reader(folder, stack)
        box = (Span(10, 20), Span(3, 7))
        whole = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        assert torch.equal(read("model.embed_tokens.weight", box), whole[10:20, 3:7])
        with pytest.raises(ValueError, match=r"no\.such is missing"):
            read("no.such", box)


def test_dummy_norms_are_one_and_the_rest_depends_on_seed_and_name() -> None:
    model = parse(load_preset(PRESET))
    device = torch.device("cpu")
    box = (Span(0, 64), Span(0, 64))
    read, again, other = (dummy_reader(model, s, torch.float32, device) for s in (1, 1, 2))
    assert torch.equal(read("model.norm.weight", box[:1]), torch.ones(64))
    key, sibling = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
    assert torch.equal(read(key, box), again(key, box))
    assert not torch.equal(read(key, box), other(key, box))
    assert not torch.equal(read(key, box), read(sibling, box))
    assert read(key, box).std().item() == pytest.approx(0.02, rel=0.1)


def test_weights_are_cast_to_the_model_dtype(folder: Path) -> None:
    config = runner_config(
        model_of(folder), 1, checkpoint=str(folder), load_format="safetensors", dtype="bfloat16"
    )
    parameters = Ranks(config).decoders[0].parameters
    wide = {name for name, tensor in parameters.items() if tensor.dtype != torch.bfloat16}
    assert all(name.endswith("norm") for name in wide)  # the CPU multiplies them in float32


def test_every_parameter_is_written_whole_and_progress_counts_each_once(folder: Path) -> None:
    model = model_of(folder)
    decoder = Decoder(
        model,
        tp=1,
        rank=0,
        dtype=torch.float32,
        device=torch.device("cpu"),
        group=ThreadGroup(0, [torch.empty(0)], threading.Barrier(1)),
    )
    assert decoder.lm_head is not decoder.embed
    for parameter in decoder.parameters.values():
        parameter.fill_(torch.nan)  # no value that a skipped element could hide behind
    seen: list[tuple[int, int]] = []
    with ExitStack() as stack:
        read = checkpoint_reader(folder, stack)
        fill(decoder, read, progress=lambda done, total: seen.append((done, total)))
    assert not any(tensor.isnan().any() for tensor in decoder.parameters.values())
    assert seen == [(i, len(decoder.parameters)) for i in range(1, len(decoder.parameters) + 1)]


def test_a_tied_head_is_the_embeddings_storage_until_the_cpu_packs_it() -> None:
    decoder = Decoder(
        parse(load_preset("tiny-qwen3")),
        tp=1,
        rank=0,
        dtype=torch.float32,
        device=torch.device("cpu"),
        group=ThreadGroup(0, [torch.empty(0)], threading.Barrier(1)),
    )
    assert decoder.lm_head is decoder.embed


def test_an_unknown_load_format_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="load_format gguf: use safetensors or dummy"):
        Ranks(runner_config(model_of(folder), 1, load_format="gguf"))
