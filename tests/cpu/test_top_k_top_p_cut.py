"""The search for a row's cut keeps what sorting the row keeps.

The reference is kernels/top_k_top_p.py, whose own tests say what top-k and top-p mean.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_cases import on_device

from nanorunner.kernels import top_k_top_p_triton
from nanorunner.kernels.min_p import min_p_floor_reference, min_p_floor_triton
from nanorunner.kernels.token_keys import KEEP_ALL, LOWEST_KEY, key_values, token_keys
from nanorunner.kernels.top_k_top_p_triton import top_k_top_p_cut_reference

pytestmark = pytest.mark.beside

Cut = Callable[..., torch.Tensor]
cut_triton = on_device(top_k_top_p_triton.top_k_top_p_cut_triton)
BOTH = pytest.mark.parametrize("find", [top_k_top_p_cut_reference, cut_triton])
INFINITY = float("inf")


def kept(find: Cut, logits: torch.Tensor, t: float, k: int, p: float) -> list[int]:
    """Return the ids that one row keeps."""
    arguments = torch.tensor([t]), torch.tensor([k]), torch.tensor([p])
    cut = find(logits[None], *arguments)
    reaches = token_keys(logits, torch.arange(len(logits))) >= cut
    return (reaches & (logits > -INFINITY)).nonzero()[:, 0].tolist()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink pool and lanes, so that small rows take every path of the search."""
    monkeypatch.setattr(top_k_top_p_triton, "CAPACITY", 16)
    monkeypatch.setattr(top_k_top_p_triton, "LANES", 128)


SHAPES = [(1, 1.0), (7, 1.0), (999, 0.01), (1024, 1.0), (4097, 4.0)]


@pytest.mark.parametrize(("num_ids", "spread"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_search_keeps_what_the_sort_keeps(
    num_ids: int, spread: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_ids)
    logits = (torch.randn(8, num_ids, generator=generator) * spread).to(dtype)
    logits[3] = 0
    heat = torch.tensor([1.0, 0.7, 0.0, 2.0]).repeat(2)
    k = torch.tensor([0, 20, 1, 5000, 600, 0, -1, 40])
    p = torch.tensor([0.9, 0.95, 1.0, 0.5, 0.9999999, 0.3, 1.0, 0.8])
    keys = token_keys(logits, torch.arange(num_ids))
    counts = [
        (keys >= find(logits, heat, k, p)[:, None]).sum(-1)
        for find in (top_k_top_p_cut_reference, cut_triton)
    ]
    # exp differs in its last bits, so the last id that reaches p may be one more or one less
    assert int((counts[0] - counts[1]).abs().max()) <= 1
    assert counts[0][[1, 2, 6]].tolist() == counts[1][[1, 2, 6]].tolist()


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("seed", range(3))
def test_a_row_that_never_fits_the_pool_is_narrowed_down(seed: int) -> None:
    """40 kept of 700, with ties of up to hundreds, and a pool of 16."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(4, 700, generator=generator) * 3).mul(2**seed).round() / 2**seed
    k = torch.tensor([40, 300, 0, 13])
    p = torch.tensor([1.0, 0.7, 0.99, 0.999])
    keys = token_keys(logits, torch.arange(700))
    counts = [
        (keys >= find(logits, torch.ones(4), k, p)[:, None]).sum(-1)
        for find in (top_k_top_p_cut_reference, cut_triton)
    ]
    assert int((counts[0] - counts[1]).abs().max()) <= 1


@BOTH
def test_k_comes_first_and_p_counts_what_it_left(find: Cut) -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    assert kept(find, logits, 1, 2, 0.5) == [3]
    assert kept(find, logits, 1, 0, 0.5) == [2, 3]
    assert kept(find, logits, 1, 1, 0.8) == [3]


@BOTH
def test_p_counts_probabilities_after_the_temperature(find: Cut) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    assert kept(find, logits, 0.25, 0, 0.9) == [2]
    assert kept(find, logits, 1.0, 0, 0.9) == [1, 2]
    assert kept(find, logits, 4.0, 0, 0.9) == [0, 1, 2]


@BOTH
@pytest.mark.parametrize("k", [0, -1, 256, 100_000])
def test_k_that_is_off_or_beyond_the_vocabulary_keeps_every_id(find: Cut, k: int) -> None:
    logits = torch.randn(256, generator=torch.Generator().manual_seed(0))
    assert kept(find, logits, 1, k, 1.0) == list(range(256))


@BOTH
def test_p_just_under_one_keeps_every_id_of_a_flat_row(find: Cut) -> None:
    logits = torch.randn(32_000, generator=torch.Generator().manual_seed(0))
    assert len(kept(find, logits, 1, 0, 0.9999999)) == 32_000


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, on infinities
@BOTH
def test_k_of_one_and_a_tiny_p_keep_the_best_id(find: Cut) -> None:
    logits = torch.randn(2100, generator=torch.Generator().manual_seed(0))
    best = [int(logits.argmax())]
    assert kept(find, logits, 3, 1, 1.0) == best
    assert kept(find, logits, 3, 0, 1e-30) == best
    assert kept(find, logits, 1e-38, 0, 0.9) == best
    assert len(kept(find, logits, 1e30, 0, 0.5)) == 1050


@BOTH
def test_among_equal_logits_the_lower_ids_stay(find: Cut) -> None:
    assert kept(find, torch.zeros(3000), 1, 3, 1.0) == [0, 1, 2]
    assert kept(find, torch.zeros(1000), 1, 0, 0.0035) == [0, 1, 2, 3]
    logits = torch.zeros(9000)
    logits[::3] = 1.0
    assert kept(find, logits, 1, 100, 1.0) == list(range(0, 300, 3))


@BOTH
@pytest.mark.parametrize("filler", [-INFINITY, float("nan")])
def test_what_cannot_be_drawn_is_not_counted(find: Cut, filler: float) -> None:
    logits = torch.full((50,), filler)
    logits[17], logits[33] = 2.0, 1.0
    assert kept(find, logits, 1, 10, 0.99) == [17, 33]
    assert kept(find, logits, 1, 10, 0.5) == [17]
    assert kept(find, logits, 1, 1, 1.0) == [17]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, on infinities
@pytest.mark.parametrize("value", [-INFINITY, float("nan"), INFINITY])
def test_a_row_without_a_finite_best_still_ends_and_keeps_its_first_id(value: float) -> None:
    logits = torch.full((1, 50), value)
    cut = cut_triton(logits, torch.ones(1), torch.tensor([3]), torch.tensor([0.5]))
    assert int(token_keys(logits[0, 0], torch.tensor(0))) >= int(cut) >= LOWEST_KEY


def test_a_rows_cut_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, 1500, generator=generator)
    heat, k = torch.full((6,), 0.8), torch.tensor([0, 5, 700, 0, 50, 0])
    p = torch.tensor([0.9, 1.0, 0.6, 0.99, 0.3, 1.0])
    together = cut_triton(logits, heat, k, p)
    for row in range(6):
        part = slice(row, row + 1)
        alone = cut_triton(logits[part], heat[part], k[part], p[part])
        assert alone.tolist() == together[part].tolist()


@BOTH
def test_a_floor_leaves_fewer_tokens_for_k_and_p(find: Cut) -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    floor = token_keys(logits[0, 2], torch.tensor(2))[None]
    one = torch.ones(1)
    # 0.4 is 57 % of what the floor leaves, and 40 % of everything
    for k, p, expected in ((3, 1.0, [2, 3]), (1, 1.0, [3]), (0, 0.5, [3]), (0, 0.6, [2, 3])):
        cut = find(logits, one, torch.tensor([k]), torch.tensor([p]), floor)
        reaches = token_keys(logits[0], torch.arange(4)) >= cut
        assert reaches.nonzero()[:, 0].tolist() == expected


@pytest.mark.parametrize("floor_of", [min_p_floor_reference, on_device(min_p_floor_triton)])
class TestMinP:
    def test_a_tenth_of_the_best_probability(self, floor_of: Cut) -> None:
        logits = torch.tensor([0.0, -1.0, -3.0])
        keys = token_keys(logits, torch.arange(3))
        for heat, expected in ((1.0, [0, 1]), (0.25, [0]), (4.0, [0, 1, 2]), (0.0, [0])):
            floor = floor_of(keys[:1], torch.tensor([heat]), torch.tensor([0.1]))
            assert (keys >= floor).nonzero()[:, 0].tolist() == expected

    def test_equal_tokens_stay_or_go_together(self, floor_of: Cut) -> None:
        keys = token_keys(torch.zeros(200_000), torch.arange(200_000))
        floor = floor_of(keys[:1], torch.ones(1), torch.ones(1))
        assert bool((keys >= floor).all())
        assert key_values(floor).tolist() == [0.0]

    def test_off_is_no_floor_and_infinities_are_their_own(self, floor_of: Cut) -> None:
        best = token_keys(torch.tensor([3.0, INFINITY, -INFINITY]), torch.arange(3))
        floor = floor_of(best, torch.ones(3), torch.tensor([0.0, 0.5, 0.5]))
        assert int(floor[0]) == KEEP_ALL
        assert (floor[1:] <= best[1:]).all()
        assert key_values(floor[1:]).tolist() == [INFINITY, -INFINITY]
