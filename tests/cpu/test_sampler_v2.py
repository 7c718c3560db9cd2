"""The full sampler: a row depends on itself alone, and every rank gets the same ids, at tp 1 to 3.

Ranks are threads over the CPU references (sampler_v2_harness.py).
"""

from __future__ import annotations

import importlib
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from sampler_v2_harness import Rank, Ranks

from nanorunner.workers import sampler_v2
from nanorunner.workers.full_sampling import FullSampling, Need
from nanorunner.workers.sampler import Sampler
from nanorunner.workers.sampler_warm_up import exercise_sampler
from nanorunner.workers.sampling_state import NoFreeSlot

pytestmark = pytest.mark.beside

TPS = pytest.mark.parametrize("tp", [1, 2, 3])
VOCAB = 203

# Every kind of row, each with a seed of its own.
KINDS = {
    "greedy": FullSampling(temperature=0.0),
    "plain": FullSampling(temperature=0.9, seed=11),
    "top_k": FullSampling(top_k=12, seed=12),
    "top_p": FullSampling(temperature=1.2, top_p=0.8, seed=13),
    "top_k_top_p": FullSampling(top_k=30, top_p=0.7, seed=14),
    "min_p": FullSampling(temperature=1.5, min_p=0.05, seed=15),
    "min_p_top_p": FullSampling(min_p=0.02, top_p=0.9, seed=16),
    "penalties": FullSampling(
        repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2, seed=17
    ),
    "greedy_penalties": FullSampling(temperature=0, top_k=5, repetition_penalty=3.0),
    "bias": FullSampling(logit_bias=((3, 2.5), (150, 3.0)), seed=18),
    "allowed": FullSampling(allowed_token_ids=(5, 80, 160, 202), seed=19),
    "min_tokens": FullSampling(min_tokens=3, stop_ids=(0, 100, 201), seed=20),
    "bad_words": FullSampling(bad_words=((7,), (4, 9), (4, 200)), seed=21),
    "logprobs": FullSampling(logprobs=4, seed=22),
    "all": FullSampling(
        temperature=0.7,
        top_k=50,
        top_p=0.95,
        min_p=0.001,
        repetition_penalty=1.1,
        logit_bias=((60, 1.0),),
        bad_words=((9,),),
        min_tokens=2,
        stop_ids=(1,),
        seed=23,
    ),
}


def all_kinds(tp: int) -> Ranks:
    ranks = Ranks(tp, VOCAB)
    for row, sampling in enumerate(KINDS.values()):
        ranks.add(row, sampling, prompt=[1, 2, 3 + row], output=[4])
    return ranks


def random_logits(num_rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def chi_square(draws: list[int], probability: torch.Tensor) -> float:
    expected = probability.double() * len(draws)
    counts = torch.bincount(torch.tensor(draws), minlength=len(probability)).double()
    return float(((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum())


# ---- a row depends on itself alone -----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@TPS
def test_a_row_draws_the_same_alone_beside_any_other_and_in_any_order(
    tp: int, dtype: torch.dtype
) -> None:
    ranks = all_kinds(tp)
    rows = list(range(len(KINDS)))
    logits = random_logits(len(KINDS)).to(dtype)
    together = ranks.sample(logits, rows)
    assert ranks.sample(logits.flip(0), rows[::-1]) == together[::-1]
    for row in rows:
        alone = ranks.sample(logits[row : row + 1], [row])
        beside_top_p = ranks.sample(logits[[3, row]], [3, row])
        assert (alone[0], beside_top_p[1]) == (together[row], together[row])


def test_every_number_of_ranks_draws_the_same_ids() -> None:
    steps = [random_logits(len(KINDS), seed) for seed in range(4)]
    rows = list(range(len(KINDS)))
    histories = []
    for tp in (1, 2, 3, 4):
        ranks = all_kinds(tp)
        histories.append([ranks.step(logits, rows) for logits in steps])
    assert histories[1:] == histories[:1] * 3


def test_a_request_that_comes_back_from_a_preemption_goes_on_as_before() -> None:
    steps = [random_logits(len(KINDS), seed) for seed in range(6)]
    rows = list(range(len(KINDS)))
    whole, broken = all_kinds(2), all_kinds(2)
    expected = [whole.step(logits, rows) for logits in steps]
    found = [broken.step(logits, rows) for logits in steps[:3]]
    for row in rows:
        broken.remove(row)
    for row, sampling in reversed(list(enumerate(KINDS.values()))):
        output = [4, *(ids[row] for ids in found)]
        broken.add(row, sampling, prompt=[1, 2, 3 + row], output=output)
    found += [broken.step(logits, rows) for logits in steps[3:]]
    assert found == expected


@TPS
def test_rows_with_top_k_and_top_p_draw_what_runner_v1_draws(tp: int) -> None:
    names = ["greedy", "plain", "top_k", "top_p", "top_k_top_p"]
    asked = [KINDS[name] for name in names]
    logits = random_logits(5, seed=9)
    expected = Sampler()(
        logits,
        temperature=torch.tensor([s.temperature for s in asked]),
        top_k=torch.tensor([s.top_k for s in asked]),
        top_p=torch.tensor([s.top_p for s in asked]),
        seed=torch.tensor([s.seed for s in asked]),
        position=torch.full((5,), 3),
    )
    assert all_kinds(tp).sample(logits, [0, 1, 2, 3, 4]) == expected.tolist()


def test_the_triton_kernels_draw_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, by_reference = list(range(len(KINDS))), all_kinds(1)
    steps = [random_logits(len(KINDS), seed) for seed in (5, 6)]
    expected = [by_reference.step(logits, rows) for logits in steps]
    names = ["sample_keys", "min_p_floor", "top_k_top_p_cut", "select_rows", "add_bias"]
    names += ["ban_stop_ids", "apply_penalties", "ban_bad_words", "count_sampled"]
    for name in names:
        home = importlib.import_module(getattr(sampler_v2, name).__module__)
        monkeypatch.setattr(sampler_v2, name, getattr(home, f"{name}_triton"))
    by_triton = all_kinds(1)
    assert [by_triton.step(logits, rows) for logits in steps] == expected


def test_logits_are_not_changed_by_sampling() -> None:
    ranks, logits = all_kinds(1), random_logits(len(KINDS))
    before = logits.clone()
    ranks.sample(logits, list(range(len(KINDS))))
    assert torch.equal(logits, before)


def test_only_filtered_rows_are_gathered_and_plain_batches_never() -> None:
    ranks = all_kinds(2)
    calls = ranks.ranks[0].group.num_calls
    ranks.sample(random_logits(2), [0, 1])
    assert calls == {"max": 1, "gather": 0}
    ranks.sample(random_logits(4), [0, 7, 9, 12])  # edits alone
    assert calls == {"max": 2, "gather": 0}
    ranks.sample(random_logits(2), [5, 1])  # min-p: the maximum over the ranks
    assert calls == {"max": 4, "gather": 0}
    ranks.sample(random_logits(2), [3, 1])
    assert calls == {"max": 5, "gather": 1}


@TPS
def test_greedy_ties_go_to_the_lowest_id(tp: int) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [202, 100, 77]] = 3.0
    logits[2] = float("nan")
    assert all_kinds(tp).sample(logits, [0, 0, 0]) == [77, 0, 0]


# ---- what the settings mean ------------------------------------------------------------------


@TPS
def test_min_tokens_hold_back_a_forced_eos(tp: int) -> None:
    ranks = Ranks(tp, VOCAB)
    sampling = FullSampling(min_tokens=4, stop_ids=(150, 9), logit_bias=((9, 100.0),))
    ranks.add(0, sampling, prompt=[1, 2])
    output: list[int] = []
    while 9 not in output:
        output += ranks.step(torch.zeros(1, VOCAB), [0])
    assert len(output) == 5
    assert 150 not in output[:4]


@TPS
def test_a_bad_word_never_comes_and_its_beginning_may(tp: int) -> None:
    ranks = Ranks(tp, 6)
    ranks.add(0, FullSampling(bad_words=((5,), (1, 2), (1, 1, 3)), seed=3), prompt=[1])
    logits = torch.zeros(1, 6)
    logits[0, [1, 2, 3]] = 2.0
    output: list[int] = []
    for _ in range(60):
        output += ranks.step(logits, [0])
    pairs = list(pairwise(output))
    assert 5 not in output
    assert (1, 2) not in pairs
    assert (1, 1, 3) not in zip(output, output[1:], output[2:], strict=False)
    assert {(1, 1), (1, 3)} <= set(pairs)


@TPS
def test_a_strong_frequency_penalty_takes_every_token_in_turn(tp: int) -> None:
    ranks = Ranks(tp, 8)
    ranks.add(0, FullSampling(temperature=0.0, frequency_penalty=2.0))
    logits = torch.linspace(1, 0, 8)[None]
    assert [ranks.step(logits, [0])[0] for _ in range(10)] == [*range(8), 0, 1]


@TPS
def test_draws_follow_the_edited_and_filtered_distribution(tp: int) -> None:
    """3,000 draws with bias, temperature and top-k: chi-square below df + 10 sqrt(2 df)."""
    ranks = Ranks(tp, 12, num_rows=1)
    sampling = FullSampling(temperature=1.5, top_k=6, logit_bias=((10, 4.0), (2, -9.0)), seed=77)
    ranks.add(0, sampling)
    logits = torch.linspace(2, -1, 12)
    edited = logits.clone()
    edited[10] += 4.0
    edited[2] -= 9.0
    expected = torch.full((12,), float("-inf"))
    best = edited.topk(6).indices
    expected[best] = edited[best] / 1.5
    draws: list[int] = []
    for start in range(0, 3000, 50):
        # fifty positions of one request at once: only the position differs
        draws += ranks.sample(logits.expand(50, -1), [0] * 50, range(start, start + 50))
    assert set(draws) == set(best.tolist())
    assert chi_square(draws, expected.softmax(0)) < 5 + 10 * math.sqrt(10)


@TPS
def test_log_probabilities_are_those_of_the_raw_logits(tp: int) -> None:
    ranks = Ranks(tp, VOCAB)
    ranks.add(0, FullSampling(logprobs=2, temperature=0.5, top_k=1, logit_bias=((9, 50.0),)))
    ranks.add(1, FullSampling())
    ranks.add(2, FullSampling(logprobs=0))
    ranks.add(3, FullSampling(logprobs=VOCAB))
    logits = random_logits(4)
    ids = ranks.sample(logits, [0, 1, 2, 3])
    assert ids[0] == 9
    narrow, wide = ranks.logprobs(logits, ids, [0, 1, 2, 3])
    expected = logits.log_softmax(-1)
    assert narrow.places.tolist() == [0, 2]
    assert narrow.num_top.tolist() == [2, 0]
    found = narrow.logprobs
    best = logits.topk(2, dim=-1).indices
    assert found.token_ids.tolist() == [[ids[i], *best[i].tolist()] for i in (0, 2)]
    torch.testing.assert_close(found.logprobs, expected[[0, 2]].gather(1, found.token_ids))
    assert int(found.ranks[0]) == int((logits[0] >= logits[0, 9]).sum())
    assert wide.places.tolist() == [3]
    assert sorted(wide.logprobs.token_ids[0, 1 : VOCAB + 1].tolist()) == list(range(VOCAB))
    assert ranks.logprobs(logits[:1], ids[:1], [1]) == []


# ---- the sampling state ----------------------------------------------------------------------


def test_needs_say_which_rows_are_plain() -> None:
    state = all_kinds(1).ranks[0].state
    needs = state.needs(np.arange(len(KINDS)))
    names = list(KINDS)
    for name, expected in {
        "greedy": Need(0),
        "plain": Need(0),
        "top_p": Need.TOP_K_TOP_P,
        "min_p_top_p": Need.MIN_P | Need.TOP_K_TOP_P,
        "greedy_penalties": Need.PENALTIES,  # greedy takes the best token, which no filter drops
        "min_tokens": Need.STOP_IDS,
        "logprobs": Need.LOGPROBS,
    }.items():
        assert needs[names.index(name)] == expected
    assert state.needs(np.array([-1])).tolist() == [0]


def test_a_request_that_has_its_min_tokens_is_plain_again() -> None:
    ranks = Ranks(1, VOCAB)
    ranks.add(5, FullSampling(min_tokens=3, stop_ids=(1,)), prompt=[1, 2, 3, 4])
    state = ranks.ranks[0].state
    found = [int(state.needs(np.array([5]), np.array([p]))[0]) for p in (3, 4, 5, 6)]
    assert found == [Need.STOP_IDS] * 3 + [0]


def test_penalty_slots_are_few_and_come_back() -> None:
    ranks = Ranks(1, VOCAB, num_slots=2)
    penalised = FullSampling(presence_penalty=0.5)
    ranks.add(0, penalised)
    ranks.add(1, FullSampling())
    ranks.add(2, penalised)
    with pytest.raises(NoFreeSlot, match="all 2 penalty slots"):
        ranks.add(3, penalised)
    ranks.remove(1)
    with pytest.raises(NoFreeSlot):
        ranks.add(3, penalised)
    ranks.remove(0)
    ranks.add(3, penalised)
    ranks.remove(3)
    ranks.remove(2)
    ranks.remove(2)  # a second time does nothing
    ranks.add(0, penalised)
    ranks.add(4, penalised)
    with pytest.raises(NoFreeSlot):
        ranks.add(5, penalised)


def test_a_rows_new_owner_inherits_nothing() -> None:
    """Every kind of request takes the same row in turn and draws as on a fresh state."""
    used, logits = Ranks(1, VOCAB, num_slots=1), random_logits(1, seed=3)
    for sampling in [*KINDS.values(), *reversed(list(KINDS.values()))]:
        fresh = Ranks(1, VOCAB, num_slots=1)
        for ranks in (used, fresh):
            ranks.add(6, sampling, prompt=[1, 2, 3], output=[4])
        assert used.step(logits, [6]) == fresh.step(logits, [6])
        used.remove(6)


def test_only_settings_that_differ_from_the_rows_last_ones_are_sent() -> None:
    ranks = Ranks(1, VOCAB)
    writer = ranks.ranks[0].writer
    ranks.add(0, FullSampling(seed=5))
    launches = writer.num_launches
    ranks.remove(0)
    ranks.add(0, FullSampling(seed=5))
    assert writer.num_launches == launches


def test_the_exercise_of_all_stages_leaves_nothing_behind() -> None:
    ranks = Ranks(2, VOCAB)

    def act(rank: Rank) -> torch.Tensor:
        exercise_sampler(rank.sampler, rank.group, torch.bfloat16, 3)
        return rank.state.output_counts.sum() + rank.state.prompt_bits.sum()

    assert int(ranks.each(act)) == 0
    rows, logits = list(range(len(KINDS))), random_logits(len(KINDS))
    for row, sampling in enumerate(KINDS.values()):
        ranks.add(row, sampling, prompt=[1, 2, 3 + row], output=[4])
    assert ranks.sample(logits, rows) == all_kinds(1).sample(logits, rows)
