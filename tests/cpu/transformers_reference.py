"""transformers' logits, log-probabilities and hidden states, for whoever compares with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanorunner.logprobs import Logprob
from nanorunner.outputs import RequestOutput
from nanorunner.sampling_params import SamplingParams

TOLERANCE = 1e-4


class Reference:
    """transformers' own model."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        """Return [len(ids), vocabulary]; row p speaks of the token after position p."""
        logits: Tensor = self.model(torch.tensor([ids])).logits[0].float()
        return logits

    @torch.inference_mode()
    def hidden(self, ids: list[int]) -> Tensor:
        """Return the final hidden states [len(ids), hidden]."""
        states: Tensor = self.model.model(torch.tensor([ids])).last_hidden_state[0].float()
        return states


def check_place(found: dict[int, Logprob], token_id: int, logits: Tensor, num_top: int) -> None:
    """Compare one place's dict with a row of transformers' logits [vocabulary].

    Two neighbours closer than the tolerance may have changed their ranks.
    """
    expected = logits.log_softmax(-1)
    best = expected.sort(descending=True).values
    assert len(found) in (num_top, num_top + 1)
    assert next(iter(found)) == token_id
    for other, logprob in found.items():
        value = float(expected[other])
        assert logprob.logprob == pytest.approx(value, abs=TOLERANCE)
        assert float(best[logprob.rank - 1]) == pytest.approx(value, abs=TOLERANCE)
    ranks = {logprob.rank for token, logprob in found.items() if token != token_id}
    assert ranks | {found[token_id].rank} >= set(range(1, num_top + 1))


def check_logprobs(output: RequestOutput, asked: SamplingParams, reference: Reference) -> None:
    """Compare all log-probabilities of an output with transformers'."""
    prompt = output.prompt_token_ids
    for completion in output.outputs:
        logits = reference.logits(prompt + completion.token_ids)
        if asked.logprobs is None:
            assert completion.logprobs is None
            assert completion.cumulative_logprob is None
        else:
            num_top = logits.shape[1] if asked.logprobs == -1 else asked.logprobs
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(completion.token_ids)
            total = 0.0
            places = zip(completion.token_ids, completion.logprobs, strict=True)
            for place, (token_id, found) in enumerate(places):
                check_place(found, token_id, logits[len(prompt) + place - 1], num_top)
                total += found[token_id].logprob
            assert completion.cumulative_logprob == pytest.approx(total)
    if asked.prompt_logprobs is None:
        assert output.prompt_logprobs is None
        return
    found_of_prompt = output.prompt_logprobs
    assert found_of_prompt is not None
    assert len(found_of_prompt) == len(prompt)
    assert found_of_prompt[0] is None
    logits = reference.logits(prompt)
    for place in range(1, len(prompt)):
        of_place = found_of_prompt[place]
        assert of_place is not None
        check_place(of_place, prompt[place], logits[place - 1], asked.prompt_logprobs)
