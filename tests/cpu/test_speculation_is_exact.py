"""Whatever the drafts are, what comes out has the target's distribution: plain decoding's own ids.

A toy target, whose logits depend on the last token, is decoded through the kernels' references:
inputs, draw, acceptance. Drafts are as bad as they can be, draw with the target's own noise or with
other noise. Chi-square over 16 cells has 15 degrees of freedom: it passes 69.8 once in 10^8 times.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from nanorunner.kernels.accept_drafts import accept_drafts_reference
from nanorunner.kernels.prepare_inputs import prepare_decode_inputs_reference
from nanorunner.kernels.sample import gumbel_argmax_reference
from nanorunner.kernels.state_tables import InputBuffers, StateTables
from nanorunner.kernels.write_drafts import write_drafts_reference

pytestmark = pytest.mark.beside

CHI_SQUARE_LIMIT = 69.8
NUM_TRIALS = 200_000
NUM_IDS = 16
FULL_VOCABULARY = 151_936
FIRST = 2  # where the first id that is decoded stands; before it a prompt's one token and START
START = 5  # every request's newest token at the beginning
OTHER_SEEDS = 1 << 40
MAX_LEN = 24
MAX_LOGITS = 1 << 18  # drawn from at a time: they and their noise stay in cache


class Trials(NamedTuple):
    """Requests that differ in their seed alone; trial i is row i."""

    state: StateTables
    seed: torch.Tensor  # [n] int64
    temperature: float = 1.0


def begin(num_trials: int, temperature: float = 1.0) -> Trials:
    """Return trials that have sampled START and nothing more, without drafts."""
    state = StateTables(
        token_ids=torch.full((num_trials, MAX_LEN), START, dtype=torch.int32),
        num_computed=torch.full((num_trials,), FIRST - 1, dtype=torch.int32),
        total_len=torch.full((num_trials,), FIRST, dtype=torch.int32),
        prefill_len=torch.full((num_trials,), 1, dtype=torch.int32),
        last_sampled=torch.full((num_trials,), START, dtype=torch.int64),
        block_tables=torch.zeros(num_trials, 1, dtype=torch.int32),
        num_drafts=torch.zeros(num_trials, dtype=torch.int32),
        token_limit=torch.full((num_trials,), MAX_LEN, dtype=torch.int32),
    )
    return Trials(state, torch.arange(num_trials) + 12345, temperature)


def draw(
    logits: torch.Tensor,
    after: torch.Tensor,
    temperature: float,
    seed: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Return ids [n] drawn from logits[after], where logits are [ids, ids]."""
    ids = torch.empty_like(after)
    heat = torch.full((len(seed),), temperature)
    size = max(1, MAX_LOGITS // logits.shape[1])
    for first in range(0, len(seed), size):
        part = slice(first, first + size)
        arguments = logits[after[part]], heat[part], seed[part], positions[part]
        ids[part] = gumbel_argmax_reference(*arguments)[1]
    return ids


def step(trials: Trials, target: torch.Tensor, query_len: int, rows: torch.Tensor) -> None:
    """Run one step of the rows (-1: nobody), query_len places each; target [ids, ids]: logits."""
    num_places = len(rows) * query_len
    header = torch.tensor([num_places, num_places, num_places if query_len > 1 else 0, query_len])
    mapping = rows.repeat_interleave(query_len).int()
    offsets = torch.arange(query_len, dtype=torch.int32).repeat(len(rows))
    empty = torch.zeros(num_places, dtype=torch.int64)
    loc = torch.zeros(num_places + 1, dtype=torch.int32)
    out = InputBuffers(
        empty.clone(), empty.clone(), loc, empty.int(), empty.clone(), empty.int()[:, None]
    )
    prepare_decode_inputs_reference(header, mapping, trials.state, out, 256, offsets)
    live = (mapping >= 0).nonzero()[:, 0]
    seed = trials.seed[mapping[live].long()]
    sampled = torch.zeros(num_places, dtype=torch.int64)
    inputs, positions = out.input_ids[live], out.positions[live]
    sampled[live] = draw(target, inputs, trials.temperature, seed, positions)
    ring, counter = torch.zeros(1, num_places, dtype=torch.int64), torch.zeros(1).long()
    accepted = torch.empty(num_places, dtype=torch.int32)
    accept_drafts_reference(header, mapping, loc, sampled, trials.state, ring, counter, accepted)


def drafts_of(logits: torch.Tensor, trials: Trials, seed: torch.Tensor) -> torch.Tensor:
    """Return the first drafts [n] that a model with these logits [ids] draws with these seeds."""
    start = torch.zeros_like(seed)
    return draw(logits[None], start, trials.temperature, seed, start + FIRST - 1)


def propose(trials: Trials, ids: torch.Tensor, index: int) -> None:
    """Write ids [n] as draft `index` of every trial."""
    num_trials = len(ids)
    mapping = torch.arange(num_trials, dtype=torch.int32)
    write_drafts_reference(torch.tensor([num_trials, 0]), mapping, ids, index, trials.state)


def chi_square(ids: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return the statistic of ids [n] against the probabilities of each of them."""
    expected = probabilities * len(ids)
    seen = torch.bincount(ids, minlength=len(expected)).double()
    return float(((seen - expected) ** 2 / expected).sum())


def random_target(num_ids: int, spread: float, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(num_ids, num_ids, generator=generator) * spread


@pytest.mark.parametrize("has_same_noise", [True, False])
def test_adversarial_drafts_bias_nothing(has_same_noise: bool) -> None:
    """Draft logits are the negated target's; two ids come out, in one step or in two."""
    target = random_target(NUM_IDS, 1.0, 1)
    trials = begin(NUM_TRIALS)
    rows = torch.arange(NUM_TRIALS)
    seed = trials.seed if has_same_noise else trials.seed + OTHER_SEEDS
    propose(trials, drafts_of(-target[START], trials, seed), 0)
    step(trials, target, 2, rows)
    has_two = trials.state.total_len == FIRST + 2
    assert 0 < int(has_two.sum()) < NUM_TRIALS
    step(trials, target, 1, rows.where(~has_two, -1))
    assert bool((trials.state.total_len == FIRST + 2).all())

    first, second = trials.state.token_ids[:, FIRST : FIRST + 2].long().T
    p = target.double().softmax(dim=-1)
    at_first, at_second = chi_square(first, p[START]), chi_square(second, p[START] @ p)
    accepted = float(has_two.double().mean())
    print(f"chi-square {at_first:.1f}, {at_second:.1f}; accepted {accepted:.4f}")
    assert at_first < CHI_SQUARE_LIMIT
    assert at_second < CHI_SQUARE_LIMIT
    if not has_same_noise:  # then a draft is right as often as two independent draws are equal
        chance = float((p[START] * (-target[START].double()).softmax(dim=-1)).sum())
        assert abs(accepted - chance) < 5 * math.sqrt(chance / NUM_TRIALS)

    some = 10_000
    plain = begin(some)
    for _ in range(2):
        step(plain, target, 1, torch.arange(some))
    ids = trials.state.token_ids[:some, : FIRST + 2]
    assert torch.equal(ids, plain.state.token_ids[:, : FIRST + 2]), "not the ids of plain decoding"


def test_the_statistic_sees_a_bias_that_shared_noise_makes() -> None:
    """Rejection sampling whose resample uses its draft's noise again: what must never be built."""
    target = random_target(NUM_IDS, 1.0, 1)[START]
    generator = torch.Generator().manual_seed(2)
    noise = -torch.empty(NUM_TRIALS, NUM_IDS).exponential_(generator=generator).log()
    p, q = target.softmax(dim=-1), (-target).softmax(dim=-1)
    draft = (-target + noise).argmax(dim=-1)
    is_accepted = torch.rand(NUM_TRIALS, generator=generator) < (p / q)[draft]
    again = ((p - q).clamp(min=0).log() + noise).argmax(dim=-1)
    ids = torch.where(is_accepted, draft, again)
    assert chi_square(ids, target.double().softmax(dim=-1)) > 10 * CHI_SQUARE_LIMIT


@pytest.mark.parametrize("distance", [0.2, 0.7, 2.0])
def test_a_draft_drawn_with_the_same_noise_is_right_as_often_as_coupling_promises(
    distance: float,
) -> None:
    """At least (1 - TV) / (1 + TV) (Daliri, Musco, Suresh, 2024); no coupling passes 1 - TV."""
    num_trials = 40_000
    target = random_target(NUM_IDS, 1.5, 3)
    draft = target[START] + random_target(NUM_IDS, distance, 4)[0]
    trials = begin(num_trials)
    propose(trials, drafts_of(draft, trials, trials.seed), 0)
    step(trials, target, 2, torch.arange(num_trials))
    rate = float((trials.state.total_len == FIRST + 2).double().mean())
    p, q = target[START].double().softmax(dim=-1), draft.double().softmax(dim=-1)
    distance = float((p - q).abs().sum() / 2)
    least, most = (1 - distance) / (1 + distance), 1 - distance
    print(f"TV {distance:.3f}: accepted {rate:.4f}, promised {least:.4f}, 1 - TV {most:.4f}")
    slack = 4 * math.sqrt(0.25 / num_trials)
    assert least - slack <= rate <= most + slack


def test_a_whole_vocabulary_keeps_its_distribution() -> None:
    """151,936 ids in 16 cells of about equal weight; the second id where the draft was right, too.

    The target is the same after every token, so that what acceptance selects can be held against
    it: the id behind an accepted draft must not lean. Some 200 ids are likely, the others less and
    less so, all over the vocabulary.
    """
    num_trials = 400
    generator = torch.Generator().manual_seed(5)
    rank = torch.randperm(FULL_VOCABULARY, generator=generator)
    target = -8 * (1 + rank / 200).log()
    draft = target + torch.randn(FULL_VOCABULARY, generator=generator) * 0.7
    p = target.double().softmax(dim=-1)
    order = rank.argsort()
    cell = torch.empty(FULL_VOCABULARY, dtype=torch.int64)
    cell[order] = ((p[order].cumsum(0) - p[order] / 2) * 16).long()
    weights = torch.zeros(16, dtype=torch.float64).index_add_(0, cell, p)
    assert bool((weights > 0.04).all())

    trials = begin(num_trials)
    propose(trials, drafts_of(draft, trials, trials.seed), 0)
    step(trials, target.expand(FULL_VOCABULARY, -1), 2, torch.arange(num_trials))
    first, second = trials.state.token_ids[:, FIRST : FIRST + 2].long().T
    has_two = trials.state.total_len == FIRST + 2
    assert int(has_two.sum()) > num_trials // 4
    at_first = chi_square(cell[first], weights)
    at_second = chi_square(cell[second[has_two]], weights)
    rate = float(has_two.double().mean())
    distance = float((p - draft.double().softmax(dim=-1)).abs().sum() / 2)
    print(
        f"chi-square {at_first:.1f}, {at_second:.1f}; accepted {rate:.3f}, "
        f"promised {(1 - distance) / (1 + distance):.3f}, 1 - TV {1 - distance:.3f}"
    )
    assert at_first < CHI_SQUARE_LIMIT
    assert at_second < CHI_SQUARE_LIMIT
    slack = 4 * math.sqrt(0.25 / num_trials)
    assert rate >= (1 - distance) / (1 + distance) - slack


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_drafts", [1, 4, 16])
def test_right_drafts_bring_one_id_more_and_wrong_ones_bring_one(
    num_drafts: int, temperature: float
) -> None:
    target, num_trials = random_target(NUM_IDS, 2.0, 6), 50
    plain = begin(num_trials, temperature)
    for _ in range(num_drafts + 1):
        step(plain, target, 1, torch.arange(num_trials))
    end = FIRST + num_drafts + 1
    assert bool((plain.state.total_len == end).all())
    for shift, num_new in ((0, num_drafts + 1), (1, 1)):
        trials = begin(num_trials, temperature)
        for index in range(num_drafts):
            ids = plain.state.token_ids[:, FIRST + index].long()
            propose(trials, (ids + shift) % NUM_IDS, index)
        step(trials, target, num_drafts + 1, torch.arange(num_trials))
        assert trials.state.total_len.tolist() == [FIRST + num_new] * num_trials
        ids, expected = trials.state.token_ids, plain.state.token_ids
        assert torch.equal(ids[:, : FIRST + num_new], expected[:, : FIRST + num_new])
