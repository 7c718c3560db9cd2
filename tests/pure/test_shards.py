"""Every head, MLP column and vocabulary id is computed exactly once over the ranks, at any tp."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorunner.presets import load_preset, preset_names
from nanorunner.workers.architectures import parse
from nanorunner.workers.model_config import ModelConfig
from nanorunner.workers.shards import check_tp, even_shard, head_shard
from nanorunner.workers.weight_plan import checkpoint_shapes, tiling_errors, weight_plan


@st.composite
def heads_and_tp(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw (query heads, KV heads, tp) with any tp that is allowed."""
    num_kv_heads = draw(st.integers(1, 12))
    num_heads = num_kv_heads * draw(st.integers(1, 9))
    return num_heads, num_kv_heads, draw(st.integers(1, num_heads))


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Draw a small model of any family, with every kind of bias and odd sizes."""
    num_kv_heads = draw(st.integers(1, 4))
    has_attention_bias = draw(st.booleans())
    return replace(
        parse(load_preset("tiny-qwen3")),
        num_layers=1,
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([2, 4, 6])),
        hidden_size=draw(st.integers(1, 9)),
        intermediate_size=draw(st.integers(1, 23)),
        vocab_size=draw(st.integers(1, 23)),
        tie_word_embeddings=draw(st.booleans()),
        qkv_bias=has_attention_bias or draw(st.booleans()),
        o_bias=has_attention_bias,
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )


@given(heads_and_tp())
@settings(max_examples=300)
def test_every_query_head_is_on_one_rank_beside_its_own_kv_head(case: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, tp = case
    shards = [head_shard(num_heads, num_kv_heads, tp, rank) for rank in range(tp)]
    heads = [h for s in shards for h in range(*s.heads)]
    assert heads == list(range(num_heads))
    for shard in shards:
        assert shard.local_heads % shard.local_kv_heads == 0
        local_group = shard.local_heads // shard.local_kv_heads
        for local_head, head in enumerate(range(*shard.heads)):
            # Attention finds a local query head's KV head by this division alone.
            kv_head = shard.kv_heads.start + local_head // local_group
            assert kv_head == head // (num_heads // num_kv_heads)
            assert kv_head < shard.kv_heads.stop


@given(heads_and_tp())
@settings(max_examples=300)
def test_every_kv_head_has_one_owner_and_every_rank_the_same_shape(
    case: tuple[int, int, int],
) -> None:
    num_heads, num_kv_heads, tp = case
    shards = [head_shard(num_heads, num_kv_heads, tp, rank) for rank in range(tp)]
    owned = [h for s in shards if not s.is_kv_copy for h in range(*s.kv_heads)]
    assert owned == list(range(num_kv_heads))
    assert len({(s.local_heads, s.local_kv_heads) for s in shards}) == 1
    for shard in shards:
        assert shard.heads.size <= shard.local_heads
        assert shard.kv_heads.size <= shard.local_kv_heads


@given(st.integers(1, 10_000), st.integers(1, 70))
def test_every_column_or_id_is_on_one_rank(size: int, tp: int) -> None:
    shards = [even_shard(size, tp, rank) for rank in range(tp)]
    assert [i for s in shards for i in range(*s.span)] == list(range(size))
    assert {s.local_size for s in shards} == {-(-size // tp)}


@given(models())
@settings(max_examples=60)
def test_the_slices_tile_every_checkpoint_tensor_once_at_every_tp(model: ModelConfig) -> None:
    for tp in range(1, model.num_heads + 1):
        assert tiling_errors(model, tp) == []
        shapes = [[(p.name, p.shape) for p in weight_plan(model, tp, r)] for r in range(1, tp)]
        assert all(shape == shapes[0] for shape in shapes)  # rank 0 alone has o and down biases


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_tiled_at_every_tp(name: str) -> None:
    model = replace(parse(load_preset(name)), num_layers=1)
    for tp in range(1, model.num_heads + 1):
        assert tiling_errors(model, tp) == []


def test_the_proof_notices_a_wrong_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanorunner.workers import weight_plan as module

    model = replace(parse(load_preset("tiny-llama")), num_layers=1)
    right = module.weight_plan

    def lacks_the_last_piece(model: ModelConfig, tp: int, rank: int) -> list[module.LocalParameter]:
        plan = right(model, tp, rank)
        return [*plan[:-1], plan[-1]._replace(pieces=())] if rank == 1 else plan

    monkeypatch.setattr(module, "weight_plan", lacks_the_last_piece)
    assert tiling_errors(model, 2) == ["lm_head.weight: 32128 of 64192 elements are on some rank"]


def test_smollm2_pads_as_the_drawing_says() -> None:
    shards = [head_shard(9, 3, 2, rank) for rank in range(2)]
    assert [tuple(s.heads) for s in shards] == [(0, 6), (6, 9)]
    assert [tuple(s.kv_heads) for s in shards] == [(0, 2), (2, 3)]
    assert head_shard(9, 3, 4, 3).heads.size == 0  # rank 3 of 4 idles in attention


def test_biases_of_row_parallel_layers_are_on_rank_0_alone() -> None:
    model = parse(load_preset("tiny-llama"))
    names = [{p.name for p in weight_plan(model, 2, rank)} for rank in range(2)]
    assert names[0] - names[1] == {
        f"layers.{layer}.{name}" for layer in range(3) for name in ("o_bias", "down_bias")
    }


def test_a_tied_model_has_no_head_of_its_own() -> None:
    tied = parse(load_preset("tiny-qwen3"))
    untied = replace(tied, tie_word_embeddings=False)
    assert "lm_head.weight" not in checkpoint_shapes(tied)
    assert set(checkpoint_shapes(untied)) - set(checkpoint_shapes(tied)) == {"lm_head.weight"}


@pytest.mark.parametrize("tp", [0, -1, 17])
def test_a_tp_without_a_head_for_each_rank_is_refused(tp: int) -> None:
    with pytest.raises(ValueError, match=rf"tp {tp}: the model has 16 query heads; use 1 to 16"):
        check_tp(tp, 16)
