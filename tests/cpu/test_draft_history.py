"""A place behind drafts is sampled as if they were output: penalties, bad words, counts.

What a verify step does at each place is held against a plain decode that has come that far.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_cases import DEVICE
from state_cases import Request, int32, state_of, with_limits

from nanorunner.kernels.accept_drafts import accept_drafts_reference
from nanorunner.kernels.logit_edits import ban_bad_words_reference, ban_bad_words_triton
from nanorunner.kernels.penalties import (
    DraftTokens,
    apply_penalties,
    apply_penalties_reference,
    apply_penalties_triton,
)
from nanorunner.kernels.token_counts import count_sampled_reference, count_sampled_triton

NUM_IDS, MAX_LEN = 40, 16
Function = Callable[..., None]
PENALTIES = [apply_penalties_reference, apply_penalties_triton, apply_penalties]
COUNTS = [count_sampled_reference, count_sampled_triton]
BANS = [ban_bad_words_reference, ban_bad_words_triton]


def int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def pool_of(prompt: list[int], output: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompt_bits and output_counts of 2 slots; a request's are in slot 1, 0 is full."""
    bits = torch.full((2, -(-NUM_IDS // 32)), -1, dtype=torch.int32)
    counts = torch.full((2, NUM_IDS), 9, dtype=torch.int32)
    bits[1], counts[1] = 0, torch.bincount(torch.tensor(output), minlength=NUM_IDS)
    for new_id in prompt:
        bits[1, new_id // 32] |= 1 << new_id % 32
    return bits.to(DEVICE), counts.to(DEVICE)


@pytest.mark.parametrize("apply", PENALTIES)
def test_a_place_is_penalised_for_the_drafts_before_it(apply: Function) -> None:
    """Prompt 3, 4; output 5, 5, 6; drafts 7, 5, 7: of each place against a pool that had them."""
    prompt, output, drafts = [3, 4], [5, 5, 6], [7, 5, 7]
    logits = torch.randn(4, NUM_IDS, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    strengths = [torch.full((3,), value, device=DEVICE) for value in (1.7, 0.3, 0.2)]
    slots, rows = int32([0, -1, 1]), int32([2] * 4)
    expected = logits.clone()
    for j in range(4):
        pool = pool_of(prompt, output + drafts[:j])
        apply(expected[j : j + 1], rows[:1], slots, *strengths, *pool)

    token_ids = torch.full((3, MAX_LEN), 5, dtype=torch.int32, device=DEVICE)
    token_ids[2, :8] = int32(prompt + output + drafts)
    # two rows come from elsewhere: nobody, and one without penalties
    rows = int32([2, 2, -1, 2, 1, 2])
    history = DraftTokens(token_ids, int32([0, 0, 5]), int64([4, 5, 9, 6, 9, 7]))
    wide = torch.cat((logits[:2], logits[:1], logits[2:3], logits[:1], logits[3:]))
    apply(wide, rows, slots, *strengths, *pool_of(prompt, output), history)
    assert torch.equal(wide[[0, 1, 3, 5]], expected)
    assert torch.equal(wide[[2, 4]], logits[[0, 0]])


@pytest.mark.parametrize("apply", PENALTIES)
def test_each_shard_counts_the_drafts_that_it_holds(apply: Function) -> None:
    logits = torch.randn(3, NUM_IDS, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    strengths = [torch.full((3,), value, device=DEVICE) for value in (1.7, 0.3, 0.2)]
    settings = int32([2] * 3), int32([0, -1, 0]), *strengths
    bits = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(1, NUM_IDS, dtype=torch.int32, device=DEVICE)
    token_ids = torch.zeros(3, MAX_LEN, dtype=torch.int32, device=DEVICE)
    token_ids[2, 4:6] = int32([8, 31])
    history = DraftTokens(token_ids, int32([0, 0, 4]), int64([3, 4, 5]))
    whole = logits.clone()
    apply(whole, *settings, bits, counts, history)
    assert (whole != logits).sum(dim=1).tolist() == [0, 1, 2]
    for first in (0, 20):
        part = logits[:, first : first + 20].contiguous()
        pool = bits[:, :1].contiguous(), counts[:, :20].contiguous()
        apply(part, *settings, *pool, history._replace(vocab_offset=first))
        assert torch.equal(part, whole[:, first : first + 20])


@pytest.mark.parametrize("apply", PENALTIES)
def test_the_row_behind_a_full_one_lends_no_drafts(apply: Function) -> None:
    token_ids = torch.full((2, 8), 7, dtype=torch.int32, device=DEVICE)
    token_ids[0] = 6
    strengths = [torch.full((2,), value, device=DEVICE) for value in (1.0, 0.0, 1.0)]
    bits = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(1, NUM_IDS, dtype=torch.int32, device=DEVICE)
    logits = torch.zeros(1, NUM_IDS, device=DEVICE)
    history = DraftTokens(token_ids, int32([6, 0]), int64([12]))
    apply(logits, int32([0]), int32([0, -1]), *strengths, bits, counts, history)
    assert logits[0, 6:8].tolist() == [-2.0, 0.0]


@pytest.mark.parametrize("ban", BANS)
def test_a_word_that_drafts_have_begun_is_banned(ban: Function) -> None:
    """Words 5 7 9 and 7 8: after output 5 nothing; after draft 7 both go on; after draft 1 none."""
    token_ids = torch.zeros(2, MAX_LEN, dtype=torch.int32)
    token_ids[1, :5] = torch.tensor([2, 3, 5, 7, 1], dtype=torch.int32)
    token_ids = token_ids.to(DEVICE)
    words, ends = int32([0] * 8 + [5, 7, 9, 7, 8, 0, 0, 0]), int32([0] * 8 + [3, 5] + [0] * 6)
    logits = torch.zeros(3, 12, device=DEVICE)
    ban(
        logits,
        int32([1, 1, 1]),
        int64([2, 3, 4]),  # the place of the newest token, 5, and of its two drafts
        token_ids,
        int32([0, 2]),
        words.view(2, 8),
        ends.view(2, 8),
        int32([0, 2]),
        2,
    )
    banned = [line.isinf().nonzero()[:, 0].tolist() for line in logits]
    assert banned == [[], [8, 9], []]


@pytest.mark.parametrize("count", COUNTS)
def test_accepted_ids_are_counted_each_and_the_others_are_not(count: Function) -> None:
    """Row 0 accepts 7, 7, 7 and 8; row 1, without a slot, one; row 2 the one behind its prompt."""
    requests = {
        0: Request([1, 2, 3], 2, 2),
        1: Request([1, 2, 3], 2, 2),
        2: Request([1, 2, 3], 3, 0),
    }
    state = with_limits(state_of(requests, 3, MAX_LEN, 1), [MAX_LEN] * 3)
    state.token_ids[0, 3:6] = 7
    state.token_ids[1, 3:6] = 6
    assert state.num_drafts is not None
    state.num_drafts.fill_(3)
    rows = int32([0] * 4 + [1] * 4 + [2])
    sampled = int64([7, 7, 7, 8, 5, 6, 6, 6, 9])
    accepted = int32([77] * 12)
    accept_drafts_reference(
        int32([9, 11, 8, 4]),
        rows,
        int32([*range(9), 11, 11, 11]),
        sampled,
        state,
        int64([0] * 36).view(3, 12),
        int64([0]),
        accepted,
    )
    assert accepted.tolist() == [0, 0, 0, 0, 1, -1, -1, -1, 2, -1, -1, -1]
    counts = torch.zeros(2, NUM_IDS, dtype=torch.int32, device=DEVICE)
    # all 12, as a padded graph would: what lies behind the batch counts for nobody
    sampled = torch.cat((sampled, int64([7, 7, 7])))
    positions = int64([2, 3, 4, 5, 2, 3, 4, 5, 2, 9, 9, 9])
    count(sampled, accepted, positions, int32([1, -1, 0]), state.prefill_len, counts)
    assert counts.nonzero().tolist() == [[0, 9], [1, 7], [1, 8]]
    assert counts[[0, 1, 1], [9, 7, 8]].tolist() == [1, 3, 1]


@pytest.mark.parametrize("count", COUNTS)
def test_many_equal_ids_of_one_row_lose_none(count: Function) -> None:
    counts = torch.zeros(1, NUM_IDS, dtype=torch.int32, device=DEVICE)
    rows = int32([0 if place % 3 else -1 for place in range(3000)])
    positions = torch.arange(3000, device=DEVICE) + 5
    sampled = torch.arange(3000, device=DEVICE) % 2 + 12
    count(sampled, rows, positions, int32([0]), int32([3]), counts)
    assert counts[0, 12:14].tolist() == [1000, 1000]
    assert int(counts.sum()) == 2000
