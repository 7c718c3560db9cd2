"""Which graph serves a batch, decided without a GPU: nothing is captured here."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanorunner.kernels.self_attention import HeadShape, differs_when_even
from nanorunner.workers import cuda_graphs
from nanorunner.workers.cuda_graphs import LOGITS, PLAIN, Descriptor, GraphManager

pytestmark = pytest.mark.beside


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> GraphManager:
    """All graphs of up to 100 requests and of verify steps of 5 places; 64 and 72 differ."""

    def capture_nothing(body: Any, pool: Any, recorder: Any) -> list[Any]:
        return [body]

    monkeypatch.setattr(cuda_graphs, "capture_graph", capture_nothing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    manager = GraphManager(
        100,
        is_enabled=True,
        max_query_len=5,
        differs_when_even=lambda num_reqs: 64 <= num_reqs < 80,
    )
    manager.capture(lambda descriptor: torch.empty(0))
    return manager


def test_even_requests_have_their_own_graph_where_attention_differs(manager: GraphManager) -> None:
    def serves(num_reqs: int, **options: Any) -> Descriptor | None:
        return manager.dispatch(num_reqs, is_decode=True, is_plain=True, **options)

    assert serves(60, is_even=True) == Descriptor(64, PLAIN, 1, True)
    assert serves(60, is_even=False) == Descriptor(64, PLAIN, 1, False)
    assert serves(70, is_even=True) == Descriptor(72, PLAIN, 1, True)
    assert serves(80, is_even=True) == Descriptor(80, PLAIN)
    assert serves(50, is_even=True) == Descriptor(56, PLAIN)
    assert serves(64, is_even=True, query_len=5) == Descriptor(64, PLAIN, 5)
    plain = manager.dispatch(64, is_decode=True, is_plain=False, is_even=True)
    assert plain == Descriptor(64, LOGITS, 1, True)
    assert manager.dispatched == Counter(
        {
            "plain 64 even": 1,
            "plain 64": 1,
            "plain 72 even": 1,
            "plain 80": 1,
            "plain 56": 1,
            "plain 64 x 5": 1,
            "logits 64 even": 1,
        }
    )
    assert manager.padded_rows == 4 + 4 + 2 + 6


def test_only_decodes_of_known_sizes_have_a_graph(manager: GraphManager) -> None:
    for num_reqs, options in (
        (64, {"is_decode": False}),
        (101, {"is_decode": True}),
        (100, {"is_decode": True, "query_len": 6}),
    ):
        assert manager.dispatch(num_reqs, is_plain=True, is_even=True, **options) is None
    assert not manager.dispatched, "what serves them instead is dispatch_layers()'s to count"


def test_a_step_that_a_prompt_joins_has_graphs_of_its_layers_up_to_a_length(
    manager: GraphManager,
) -> None:
    assert manager.dispatch_layers(100, 90) is None
    sizes = {64: 64, 65: 128, 10: 64}
    layers: Any = SimpleNamespace(size_for=sizes.get)
    manager.layers = layers
    assert manager.dispatch_layers(64, 60) == 64
    assert manager.dispatch_layers(65, 2) == 128
    assert manager.dispatch_layers(129, 100) is None
    assert manager.dispatch_layers(10, 1) is None, "the decoder's lean launches are fewer"
    assert manager.dispatched == Counter({"layers 64": 1, "layers 128": 1, "eager": 3})
    assert manager.padded_rows == 63


@pytest.mark.parametrize(
    ("num_reqs", "backend", "dtype", "expected"),
    [
        (41, "triton", torch.bfloat16, False),
        (42, "triton", torch.bfloat16, True),
        (48, "triton", torch.bfloat16, True),
        (98, "triton", torch.bfloat16, True),
        (99, "triton", torch.bfloat16, False),
        (64, "torch", torch.bfloat16, False),
        (64, "triton", torch.float32, False),
    ],
)
def test_attention_differs_between_few_requests_and_a_full_device(
    monkeypatch: pytest.MonkeyPatch, num_reqs: int, backend: str, dtype: torch.dtype, expected: bool
) -> None:
    monkeypatch.setattr("nanorunner.kernels.self_attention.num_processors", lambda device: 132)
    shape = HeadShape(16, 8, 128)
    assert differs_when_even(num_reqs, shape, backend, dtype, torch.device("cpu")) is expected
