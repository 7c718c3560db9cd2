"""The head and the draw on a GPU: the keys of written logits, for every dtype and row count."""

from __future__ import annotations

import pytest
import torch

from nanorunner.kernels.lm_head_sample import HeadPlan, lm_head_sample, serves
from nanorunner.kernels.sample_keys import sample_keys
from nanorunner.kernels.token_keys import key_ids


def integers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return small whole numbers: their products and sums are exact in every order and dtype."""
    generator = torch.Generator(device="cuda").manual_seed(sum(shape))
    return torch.randint(-2, 3, shape, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("vocab", "hidden_size"), [(32_000, 1024), (5003, 576)])
def test_every_row_count_draws_the_tokens_of_written_logits(
    vocab: int, hidden_size: int, dtype: torch.dtype
) -> None:
    head = integers(vocab + 100, hidden_size, dtype=dtype)
    temperature = torch.tensor([0.0, 0.6, 3.0, 50.0], device="cuda")
    seed = torch.arange(4, device="cuda") * 0x1234_5678_9ABC - 5
    for rows in (1, 2, 3, 8, 15, 16):
        assert serves(rows, head)
        hidden = integers(rows, hidden_size, dtype=dtype)
        # Of several rows every fifth is nobody's (-1); a single one is somebody's.
        first = -1 if rows > 1 else 0
        mapping = torch.arange(rows, dtype=torch.int32, device="cuda") % 5 + first
        positions = torch.arange(rows, device="cuda") * 99
        arguments = (mapping, positions, temperature, seed, 70_000)
        # Exact in float32, rounded once: a library may round the shares of a 16-bit sum as well.
        logits = (hidden.float() @ head[:vocab].float().T).to(dtype)
        expected = sample_keys(logits, *arguments)
        plans = [None] if dtype == torch.float32 else [None, HeadPlan(32, 128, 4, 2)]
        for plan in plans:
            keys = lm_head_sample(hidden, head, *arguments, vocab, plan)
            assert key_ids(keys).tolist() == key_ids(expected).tolist()
