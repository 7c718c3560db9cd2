"""Prompt log-probabilities do not depend on the steps, chunks and shards a prompt was cut into."""

from __future__ import annotations

import pytest
import torch
from sampler_v2_harness import Rank, Ranks

from nanorunner.workers.prompt_logprobs import PromptLogprobs, PromptSpan

HIDDEN, VOCAB = 8, 50


class Prompts:
    """A head over random hidden states, and the sizes of the calls it got."""

    def __init__(self, tp: int, prompt_len: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.head = torch.randn(HIDDEN, VOCAB, generator=generator)
        self.hidden = torch.randn(prompt_len, HIDDEN, generator=generator)
        self.tokens = torch.randint(0, VOCAB, (4, prompt_len), generator=generator).int()
        self.calls: list[int] = []
        self.ranks = Ranks(tp, VOCAB)

    def run(
        self, spans: list[list[PromptSpan]], hidden: list[torch.Tensor]
    ) -> dict[int, list[torch.Tensor]]:
        """Return rank 0's results by request id after a step for each list of spans."""
        results: dict[int, dict[int, list[torch.Tensor]]] = {}

        def act(rank: Rank) -> torch.Tensor:
            def compute_logits(part: torch.Tensor) -> torch.Tensor:
                if rank.group.rank == 0:
                    self.calls.append(len(part))
                return rank.shard(part @ self.head)

            collector = PromptLogprobs(compute_logits, self.tokens, rank.local_vocab, rank.group)
            found = results.setdefault(rank.group.rank, {})
            for step, states in zip(spans, hidden, strict=True):
                for request_id, rows in collector.collect(states, step):
                    found[request_id] = list(rows)
            return torch.cat([rows[1].flatten() for rows in found.values()])

        self.ranks.each(act)
        return results[0]

    def expected(self, row: int, hidden: torch.Tensor) -> torch.Tensor:
        logprobs = (hidden @ self.head).log_softmax(-1)[:-1]
        targets = self.tokens[row, 1 : len(hidden)].long()
        return logprobs.gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_prompt_of_2500_takes_three_calls_of_the_head(tp: int) -> None:
    prompts = Prompts(tp, 2500)
    found = prompts.run([[PromptSpan(7, 2, 0, 2500, 0, 2500, 3)]], [prompts.hidden])
    assert prompts.calls == [1024, 1024, 452]
    ids, values, ranks = found[7]
    assert (ids.shape, values.shape, ranks.shape) == ((2499, 4), (2499, 4), (2499,))
    torch.testing.assert_close(values[:, 0], prompts.expected(2, prompts.hidden))
    best = (prompts.hidden[:-1] @ prompts.head).argmax(-1)
    assert torch.equal(ids[:, 1], best)
    assert torch.equal((ranks == 1), ids[:, 0] == best)


def test_a_prompt_in_several_steps_beside_others_gives_the_same() -> None:
    prompts = Prompts(2, 40)
    hidden = prompts.hidden
    whole = prompts.run([[PromptSpan(1, 0, 0, 40, 0, 40, 2)]], [hidden])[1]
    other = torch.zeros(3, HIDDEN)
    steps = [
        [PromptSpan(1, 0, 3, 15, 0, 40, 2), PromptSpan(2, 1, 18, 6, 0, 6, 0)],
        [PromptSpan(1, 0, 0, 1, 15, 40, 2)],
        [PromptSpan(1, 0, 0, 23, 16, 40, 2)],
        [PromptSpan(1, 0, 0, 1, 39, 40, 2)],
    ]
    states = [
        torch.cat([other, hidden[:15], hidden[:6]]),
        hidden[15:16],
        hidden[16:39],
        hidden[39:],
    ]
    found = prompts.run(steps, states)
    for one, two in zip(found[1], whole, strict=True):
        torch.testing.assert_close(one, two)
    torch.testing.assert_close(found[2][1][:, 0], prompts.expected(1, hidden[:6]))


def test_a_prompt_of_one_token_has_nothing_to_say() -> None:
    prompts = Prompts(1, 1)
    found = prompts.run([[PromptSpan(3, 0, 0, 1, 0, 1, 5)]], [prompts.hidden])
    assert [len(part) for part in found[3]] == [0, 0, 0]


def test_a_request_that_is_preempted_inside_its_prompt_begins_anew() -> None:
    prompts = Prompts(1, 10)
    rank = prompts.ranks.ranks[0]
    collector = PromptLogprobs(lambda h: h @ prompts.head, prompts.tokens, VOCAB, rank.group)
    assert collector.collect(prompts.hidden[:6], [PromptSpan(4, 0, 0, 6, 0, 10, 0)]) == []
    collector.drop(4)
    collector.drop(4)
    ((request_id, rows),) = collector.collect(prompts.hidden, [PromptSpan(4, 0, 0, 10, 0, 10, 0)])
    assert (request_id, len(rows.ranks)) == (4, 9)
