"""Edits of logits: penalties, biases, allowed ids, min_tokens, bad words; whole and in shards.

Every test runs the PyTorch reference and the Triton kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nanorunner.kernels import logit_edits, penalties, token_counts

INFINITY = float("inf")
Function = Callable[..., Any]
BOTH = pytest.mark.parametrize("kind", ["reference", "triton"])


def named(module: Any, name: str, kind: str) -> Function:
    function: Function = getattr(module, f"{name}_{kind}")
    return function


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def padded(values: list[int], limit: int = 8) -> torch.Tensor:
    """Return a list [1, limit] of the state table."""
    return torch.tensor([values + [0] * (limit - len(values))], dtype=torch.int32)


# ---- penalties -------------------------------------------------------------------------------


class Pool:
    """A penalty pool of 2 slots and a state table of 3 rows, for one shard."""

    def __init__(self, kind: str, num_ids: int, offset: int = 0) -> None:
        self.kind, self.offset = kind, offset
        self.prompt_bits = torch.full((2, -(-num_ids // 32)), 7, dtype=torch.int32)
        self.output_counts = torch.full((2, num_ids), 9, dtype=torch.int32)  # of an older owner
        self.slots = ints(-1, 1, 0)
        self.token_ids = torch.zeros(3, 3000, dtype=torch.int32)
        self.prompt_len, self.prefill_len = ints(0, 0, 0), ints(0, 0, 0)

    def come(self, row: int, prompt: list[int], output: list[int]) -> None:
        tokens = prompt + output
        self.token_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.prompt_len[row], self.prefill_len[row] = len(prompt), len(tokens)
        slot = int(self.slots[row])
        self.prompt_bits[slot], self.output_counts[slot] = 0, 0
        named(token_counts, "count_prompt", self.kind)(
            self.token_ids,
            ints(row),
            self.slots,
            self.prompt_len,
            self.prefill_len,
            len(tokens),
            self.prompt_bits,
            self.output_counts,
            self.offset,
        )

    def sampled(self, rows: list[int], ids: list[int], positions: list[int]) -> None:
        named(token_counts, "count_sampled", self.kind)(
            torch.tensor(ids),
            ints(*rows),
            torch.tensor(positions),
            self.slots,
            self.prefill_len,
            self.output_counts,
            self.offset,
        )

    def apply(self, logits: torch.Tensor, rows: list[int], *strengths: float) -> torch.Tensor:
        """Return logits with repetition, presence and frequency penalties, the same for all."""
        penalised = logits.clone()
        columns = [torch.full((3,), float(strength)) for strength in strengths]
        named(penalties, "apply_penalties", self.kind)(
            penalised, ints(*rows), self.slots, *columns, self.prompt_bits, self.output_counts
        )
        return penalised


@BOTH
def test_all_three_penalties_add_up(kind: str) -> None:
    pool = Pool(kind, 3)
    pool.come(1, [0], [1, 1])
    logits = torch.tensor([[2.0, -1.0, 0.5]])
    assert pool.apply(logits, [1], 2, 0.25, 0.5).tolist() == [[1.0, -3.25, 0.5]]


@BOTH
def test_a_resumed_request_counts_what_it_had_sampled_before(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 70, (2500,), generator=generator).tolist()
    whole, resumed = Pool(kind, 70), Pool(kind, 70)
    whole.come(1, tokens[:1300], [])
    for step, token in enumerate(tokens[1300:1310]):
        whole.sampled([1], [token], [1299 + step])
    resumed.come(1, tokens[:1300], tokens[1300:1310])
    assert torch.equal(whole.prompt_bits[1], resumed.prompt_bits[1])
    assert torch.equal(whole.output_counts[1], resumed.output_counts[1])
    assert int(whole.output_counts[1].sum()) == 10


@BOTH
def test_only_real_samples_of_rows_with_a_slot_are_counted(kind: str) -> None:
    pool = Pool(kind, 10)
    pool.come(1, [1, 2, 3, 4], [])
    pool.come(2, [5], [])
    # nobody, no slot, still inside its prompt, the first sample of a request
    pool.sampled([-1, 0, 1, 2], [3, 3, 3, 6], [5, 5, 2, 0])
    assert int(pool.output_counts[1].sum()) == 0
    assert pool.output_counts[0].nonzero().tolist() == [[6]]


@BOTH
def test_rows_without_a_slot_are_left_alone(kind: str) -> None:
    pool = Pool(kind, 1500)
    pool.come(1, list(range(1500)), [3, 3])
    logits = torch.randn(3, 1500, generator=torch.Generator().manual_seed(1))
    penalised = pool.apply(logits, [0, 1, -1], 1.5, 0.2, 0.1)
    assert torch.equal(penalised[[0, 2]], logits[[0, 2]])
    expected = torch.where(logits[1] > 0, logits[1] / 1.5, logits[1] * 1.5)
    expected[3] -= 2 * 0.1 + 0.2
    torch.testing.assert_close(penalised[1], expected)


@BOTH
def test_penalties_by_shards_are_those_of_the_whole(kind: str) -> None:
    whole = Pool(kind, 99)
    shards = [Pool(kind, 33, offset) for offset in (0, 33, 66)]
    logits = torch.randn(1, 99, generator=torch.Generator().manual_seed(2))
    for pool in (whole, *shards):
        pool.come(2, [0, 32, 33, 98], [65, 66])
        pool.sampled([2], [31], [5])
    parts = [
        pool.apply(logits[:, pool.offset : pool.offset + 33], [2], 1.3, 0.5, 0.7) for pool in shards
    ]
    assert torch.equal(torch.cat(parts, 1), whole.apply(logits, [2], 1.3, 0.5, 0.7))


@BOTH
def test_the_last_bit_of_a_word_is_a_token_like_the_others(kind: str) -> None:
    pool = Pool(kind, 64)
    pool.come(1, [31, 63], [])
    penalised = pool.apply(torch.ones(1, 64), [1], 2, 0, 0)
    assert (penalised == 0.5).nonzero()[:, 1].tolist() == [31, 63]


# ---- lists of ids ----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selected_rows_are_copies_and_allow_only_what_is_listed(
    kind: str, dtype: torch.dtype
) -> None:
    logits = torch.randn(4, 2100, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = logits.clone()
    lists = torch.cat([padded([2099, 3, 1024]), padded([])])
    edited = named(logit_edits, "select_rows", kind)(
        logits, ints(3, 1), ints(0, 1), lists, ints(3, 0), True
    )
    assert edited.dtype == torch.float32
    assert torch.equal(logits, before)
    assert torch.equal(edited[1], logits[1].float())
    assert edited[0].isfinite().nonzero()[:, 0].tolist() == [3, 1024, 2099]
    assert edited[0, 1024] == logits[3, 1024].float()


@BOTH
def test_lists_act_on_the_shard_that_holds_the_id(kind: str) -> None:
    ids, count, zero = padded([5, 12, 19]), ints(3), ints(0)
    biases = torch.tensor([[1.0, 2.0, 4.0, 0, 0, 0, 0, 0]])
    logits = torch.zeros(1, 8)
    allowed = named(logit_edits, "select_rows", kind)(logits, zero, zero, ids, count, True, 8)
    assert allowed.isfinite().nonzero()[:, 1].tolist() == [4]
    named(logit_edits, "add_bias", kind)(logits, zero, ids, biases, count, 8)
    assert logits.tolist() == [[0, 0, 0, 0, 2.0, 0, 0, 0]]
    until, position = ints(10), torch.tensor([5])
    named(logit_edits, "ban_stop_ids", kind)(logits, zero, position, until, ids, count, 16)
    assert logits.isinf().nonzero()[:, 1].tolist() == [3]


@BOTH
def test_stop_ids_may_come_once_the_output_has_min_tokens(kind: str) -> None:
    """A prompt of 6 and min_tokens 4: the input tokens at 5, 6, 7, 8 sample outputs 1 to 4."""
    logits = torch.zeros(6, 4)
    positions = torch.tensor([5, 6, 7, 8, 9, 10])
    named(logit_edits, "ban_stop_ids", kind)(
        logits, ints(0, 0, 0, 0, 0, 0), positions, ints(10), padded([1, 3]), ints(2)
    )
    assert logits.isinf().sum(-1).tolist() == [2, 2, 2, 2, 0, 0]


WORDS = [[7], [1, 2], [1, 2, 3], [4, 5], [9, 9]]


@BOTH
@pytest.mark.parametrize(
    ("prompt", "output", "banned"),
    [
        ([1, 2], [], [7]),  # the prompt's end begins no word
        ([1], [2], [7]),
        ([5], [1], [2, 7]),
        ([5], [1, 2], [3, 7]),
        ([5], [0, 1, 2], [3, 7]),
        ([9], [4, 0], [7]),
        ([0], [9, 4], [5, 7]),
        ([0], [9], [7, 9]),
    ],
)
def test_a_word_that_the_output_would_complete_is_banned(
    kind: str, prompt: list[int], output: list[int], banned: list[int]
) -> None:
    token_ids = torch.full((2, 32), 9, dtype=torch.int32)
    token_ids[1, : len(prompt + output)] = torch.tensor(prompt + output, dtype=torch.int32)
    flat, ends = [t for word in WORDS for t in word], [1, 3, 6, 8, 10]
    words = torch.cat([padded([], 16), padded(flat, 16)])
    word_ends = torch.cat([padded([]), padded(ends)])
    logits = torch.zeros(2, 10)
    named(logit_edits, "ban_bad_words", kind)(
        logits,
        ints(1, 0),
        torch.tensor([len(prompt + output) - 1, 3]),
        token_ids,
        ints(1, len(prompt)),
        words,
        word_ends,
        ints(0, 5),
        5,
    )
    assert logits[0].isinf().nonzero()[:, 0].tolist() == banned
    assert logits[1].isfinite().all()


@BOTH
def test_a_bad_word_is_banned_on_the_shard_of_its_last_id_alone(kind: str) -> None:
    arguments = (ints(0), torch.tensor([2]), padded([50, 60, 1]), ints(1))
    for offset, banned in ((0, []), (64, [6])):
        logits = torch.zeros(1, 64)
        words = padded([60, 1, 70], 16), padded([3]), ints(1)
        named(logit_edits, "ban_bad_words", kind)(logits, *arguments, *words, 1, offset)
        assert logits.isinf().nonzero()[:, 1].tolist() == banned
