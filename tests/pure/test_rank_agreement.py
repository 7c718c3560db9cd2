"""Rank 0's judgement of the digests: what must be equal, what must not, and the words for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanorunner.presets import load_preset
from nanorunner.workers.architectures import parse
from nanorunner.workers.rank_agreement import (
    FINAL,
    FLAT,
    GATED,
    INPUTS,
    LOGITS,
    PARTS,
    REDUCED,
    WIDTH,
    Column,
    Judge,
    Place,
    RankCheckFailed,
)

MODEL = replace(parse(load_preset("tiny-llama")), num_kv_heads=4, num_heads=8, num_layers=3)
SHARING = replace(MODEL, num_kv_heads=1)
STEP = 7
O_OF_1 = Place(REDUCED, projections=6, all_reduces=4, others=0)  # layer 0 has made 4 of them
DOWN_OF_1 = Place(REDUCED, projections=8, all_reduces=5, others=0)


def row(place: Place, *digests: int, layout: int = 5) -> list[int]:
    values = [place.pack(), layout, *digests]
    return values + [0] * (WIDTH - len(values))


def error_of(judge: Judge, columns: list[Column], rows: list[list[int]]) -> str:
    with pytest.raises(RankCheckFailed) as caught:
        judge.judge(STEP, columns, rows)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def make_judge(tp: int, model: object = MODEL) -> Judge:
    judge = Judge(model, tp)  # type: ignore[arg-type]
    judge.begin()
    return judge


@pytest.mark.parametrize(
    "place", [O_OF_1, Place(INPUTS, 0, 0, 0), Place(FINAL, 4 * 126, 253, 0), Place(5, 9, 9, 999)]
)
def test_a_place_survives_its_packing(place: Place) -> None:
    assert Place.unpack(place.pack()) == place
    assert -(2**63) <= place.pack() < 2**63


def test_a_place_is_named_as_the_shard_map_names_its_parameter() -> None:
    assert Place(REDUCED, 0, 1, 0).text(3) == "the all-reduce of embed"
    assert O_OF_1.text(3) == "the all-reduce of layers.1.o"
    assert DOWN_OF_1.text(3) == "the all-reduce of layers.1.down"
    assert Place(REDUCED, 8, 5, 2).text(3) == "all-reduce 2 outside the model's forward"


def test_equal_rows_raise_nothing() -> None:
    columns = [Column("the residual"), Column("q", "q"), Column("k", "k")]
    make_judge(3).judge(STEP, columns, [row(O_OF_1, 9, 100 + rank, rank + 1) for rank in range(3)])


def test_a_rank_with_another_value_is_named_with_place_and_step() -> None:
    judge = make_judge(3)
    judge.judge(STEP, [Column("its norm")], [row(O_OF_1, 9)] * 3)
    text = error_of(judge, [Column("its norm")], [row(DOWN_OF_1, v) for v in (9, -1, 9)])
    assert text.startswith("step 7, after the all-reduce of layers.1.down: its norm: ranks 0 and")
    assert "ranks 0 and 2 hold 0000000000000009, rank 1 holds ffffffffffffffff" in text
    assert "all was equal after the all-reduce of layers.1.o" in text


def test_a_new_step_forgets_the_places_of_the_last_one() -> None:
    judge = make_judge(2)
    judge.judge(STEP, [Column("its norm")], [row(O_OF_1, 9)] * 2)
    judge.begin()
    text = error_of(judge, [Column("ids")], [row(Place(INPUTS, 0, 0, 0), v) for v in (1, 2)])
    assert "all was equal after the step's beginning" in text


def test_a_rank_that_left_an_all_reduce_out_is_named() -> None:
    text = error_of(make_judge(2), [Column("x")], [row(O_OF_1, 9), row(DOWN_OF_1, 9)])
    assert "rank 1 is after the all-reduce of layers.1.down instead" in text
    assert "after the all-reduce of layers.1.o" in text


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (DOWN_OF_1._replace(all_reduces=4), "1 all-reduce(s) were left out on every rank"),
        (DOWN_OF_1._replace(all_reduces=6), "too many were made on every rank"),
        (Place(FINAL, 12, 6, 0), "1 all-reduce(s) were left out"),
    ],
)
def test_an_all_reduce_that_no_rank_made_is_missed(place: Place, words: str) -> None:
    assert words in error_of(make_judge(2), [Column("x")], [row(place, 9)] * 2)


def test_other_shapes_are_no_equal_values() -> None:
    rows = [row(O_OF_1, 9), row(O_OF_1, 9, layout=6)]
    assert "rank 1 holds tensors of another shape" in error_of(make_judge(2), [Column("x")], rows)


@pytest.mark.parametrize("part", ["q", "k", "v", "gate", "up", GATED])
def test_ranks_with_one_value_in_different_slices_are_named(part: str) -> None:
    text = error_of(make_judge(2), [Column(part, part)], [row(O_OF_1, 9)] * 2)
    assert f"layer 1, {part}: ranks 0 and 1 hold the same bits" in text
    assert "different slices" in text
    # one value all over tells nothing: all-zero weights, or NaN from the start
    make_judge(2).judge(STEP, [Column(part, part)], [row(O_OF_1, FLAT)] * 2)


def test_equal_logits_are_named_by_their_ids() -> None:
    text = error_of(make_judge(2), [Column("local logits", LOGITS)], [row(O_OF_1, 9)] * 2)
    half = -(-MODEL.vocab_size // 2)
    assert f"ids 0..{half - 1} and ids {half}..{MODEL.vocab_size - 1}" in text


def test_ranks_that_share_a_kv_head_must_agree_on_it() -> None:
    judge = make_judge(3, SHARING)
    columns = [Column("q", "q"), Column("k", "k")]
    judge.judge(STEP, columns, [row(O_OF_1, rank + 1, 9) for rank in range(3)])
    text = error_of(judge, columns, [row(O_OF_1, rank + 1, 9 + (rank == 2)) for rank in range(3)])
    assert "layer 1, k: ranks 0 and 2 hold different bits" in text
    assert text.endswith("the same slice: KV heads 0..0")


def test_a_rank_that_holds_padding_alone_is_compared_with_nobody() -> None:
    # 3 KV heads on 4 ranks: the last one has none
    judge = make_judge(4, replace(MODEL, num_kv_heads=3, num_heads=9))
    judge.judge(STEP, [Column("k", "k")], [row(O_OF_1, value) for value in (1, 2, 3, 3)])


def test_values_that_the_checkpoint_repeats_are_told_and_left_alone() -> None:
    judge = make_judge(2)
    digests = [[10 * rank + 1000 * i for i in range(3 * len(PARTS) + 1)] for rank in range(2)]
    places = {(1, "k"): 6, (1, "gate"): 8, (1, "up"): 9}
    for place in places.values():
        digests[1][place] = digests[0][place]
    told = judge.find_alike(digests)
    assert told == [f"layer {layer}, {part}: ranks 0 and 1" for layer, part in places]
    for part in ("k", "gate", "up", GATED):
        judge.judge(STEP, [Column(part, part)], [row(O_OF_1, 9)] * 2)
    for part in ("q", "v"):
        assert part in error_of(judge, [Column(part, part)], [row(O_OF_1, 9)] * 2)
    other_layer = Place(REDUCED, projections=2, all_reduces=2, others=0)
    assert "layer 0, k" in error_of(judge, [Column("k", "k")], [row(other_layer, 9)] * 2)
