"""gumbel_argmax in Triton, run by the interpreter, returns what the reference returns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_cases import on_device

from nanorunner.kernels import sample
from nanorunner.kernels.sample import gumbel_argmax_reference

pytestmark = pytest.mark.beside

gumbel_argmax_triton = on_device(sample.gumbel_argmax_triton)
Draw = Callable[..., tuple[torch.Tensor, torch.Tensor]]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _settings(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return temperature (every third row greedy), seed and position of num_rows rows."""
    rows = torch.arange(num_rows)
    temperature = torch.tensor([0.0, 0.6, 1.3]).repeat(num_rows)[:num_rows]
    return temperature, rows * 0x1234_5678_9ABC - 5, rows * 1000


@pytest.mark.parametrize("num_ids", [1, 999, 1024, 4097])
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_draws_the_ids_of_the_reference(num_ids: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(6, num_ids, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    expected_values, expected_ids = gumbel_argmax_reference(logits, *_settings(6), 70_000)
    values, ids = gumbel_argmax_triton(logits, *_settings(6), 70_000)
    assert ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(values, expected_values, rtol=1e-6, atol=1e-6)


def test_a_row_stride_and_a_zero_stride_are_followed() -> None:
    wide = torch.randn(4, 700, generator=torch.Generator().manual_seed(1))
    for logits in (wide[:, 100:600], wide[:1, :500].expand(4, -1)):
        expected = gumbel_argmax_reference(logits.contiguous(), *_settings(4))[1]
        assert gumbel_argmax_triton(logits, *_settings(4))[1].tolist() == expected.tolist()
        assert gumbel_argmax_reference(logits, *_settings(4))[1].tolist() == expected.tolist()


def test_no_rows_give_no_ids() -> None:
    values, ids = gumbel_argmax_triton(torch.empty(0, 50), *_settings(0))
    assert (values.shape, ids.shape) == ((0,), (0,))


@pytest.mark.parametrize("draw", [gumbel_argmax_reference, gumbel_argmax_triton])
class TestBoth:
    """What must hold for the reference and for Triton alike."""

    def test_equal_logits_give_the_lowest_id(self, draw: Draw) -> None:
        logits = torch.zeros(2, 3000)
        logits[0, [2999, 1500, 77]] = 4.0
        logits[1, [2048, 1023, 1024]] = 4.0
        zeros = torch.zeros(2, dtype=torch.int64)
        values, ids = draw(logits, torch.zeros(2), zeros, zeros)
        assert ids.tolist() == [77, 1023]
        assert values.tolist() == [4.0, 4.0]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_row_of_nans_gives_an_id_in_range(self, draw: Draw, temperature: float) -> None:
        zeros = torch.zeros(2, dtype=torch.int64)
        logits = torch.full((2, 999), float("nan"))
        logits[1] = float("-inf")
        ids = draw(logits, torch.full((2,), temperature), zeros, zeros)[1]
        assert ids.tolist() == [0, 0]

    @pytest.mark.parametrize("temperature", [0.0, 1.0, 1e30])
    def test_only_a_finite_logit_is_ever_drawn(self, draw: Draw, temperature: float) -> None:
        logits = torch.full((8, 2100), float("-inf"))
        logits[:, ::7] = float("nan")
        logits[:, 1777] = -50.0
        positions = torch.arange(8)
        ids = draw(logits, torch.full((8,), temperature), positions * 0, positions)[1]
        assert ids.tolist() == [1777] * 8

    def test_a_tiny_temperature_is_greedy_and_never_infinite(self, draw: Draw) -> None:
        logits = torch.tensor([[60.0, 61.0, 60.5]]).expand(3, -1)
        zeros = torch.zeros(3, dtype=torch.int64)
        temperature = torch.tensor([1e-38, 1e-12, 1e-6])
        assert draw(logits, temperature, zeros, zeros)[1].tolist() == [1, 1, 1]

    def test_the_best_of_the_shards_is_the_best_of_the_whole(self, draw: Draw) -> None:
        logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(2))
        logits[3] = 0.25  # a row of ties
        padded = torch.nn.functional.pad(logits, (0, 2), value=float("-inf"))
        whole = draw(logits, *_settings(6))[1]
        shards = [draw(padded[:, s : s + 334], *_settings(6), s) for s in (0, 334, 668)]
        values, ids = (torch.stack(parts) for parts in zip(*shards, strict=True))
        candidates = torch.where(values == values.amax(0), ids, 2**62)
        assert candidates.amin(0).tolist() == whole.tolist()
