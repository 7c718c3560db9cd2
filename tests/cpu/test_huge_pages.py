"""Asking for huge pages changes no value; neighbours are asked for together."""

from __future__ import annotations

import psutil
import pytest
import torch

from nanorunner.kernels.huge_pages import HUGE_PAGE, merge, span_of, use_huge_pages
from nanorunner.kernels.linear import can_pack, pack
from nanorunner.workers import kv_cache

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_filled", [True, False])
def test_values_and_addresses_stay(is_filled: bool) -> None:
    tensors = [torch.randn(1500, 1000), torch.randn(7), torch.randn(0)]
    if can_pack(CPU, torch.float32):
        tensors.append(pack(torch.randn(900, 700)))
    before = [(span_of(tensor), tensor.to_dense().clone()) for tensor in tensors]
    use_huge_pages(tensors, is_filled=is_filled)
    for tensor, (span, values) in zip(tensors, before, strict=True):
        assert span_of(tensor) == span
        assert torch.equal(tensor.to_dense(), values)


def test_a_span_is_as_long_as_its_tensor() -> None:
    weight = torch.randn(64, 64)
    start, end = span_of(weight)
    assert (start, end - start) == (weight.data_ptr(), 64 * 64 * 4)
    if can_pack(CPU, torch.float32):
        start, end = span_of(pack(weight))
        assert start > 0
        assert end - start >= 64 * 64 * 4


def test_neighbours_are_one_span_and_distant_ones_are_not() -> None:
    near, far = HUGE_PAGE - 1, HUGE_PAGE
    spans = [(5000 + near, 9000 + near), (0, 5000), (9000 + near + far, 9001 + near + far)]
    assert merge(spans) == [(0, 9000 + near), spans[-1]]
    assert merge([]) == []


def test_a_cache_takes_no_memory_before_it_is_used() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = kv_cache.allocate(32, 43, 12, 64, torch.float32, CPU)
    assert cache.nbytes > 2 << 30
    assert process.memory_info().rss - before < 64 << 20
