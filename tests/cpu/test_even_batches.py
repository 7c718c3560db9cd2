"""Runner v2 tells its graphs, and through them attention, whether the requests are even."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from body_graphs import BodyGraphs, Steps, request

from nanorunner.workers.full_sampling import FullSampling

SAMPLING = FullSampling(temperature=0.0)


@pytest.fixture
def steps() -> Iterator[Steps]:
    steps = Steps(has_graphs=True)
    yield steps
    steps.runner.close()


def decode_after(steps: Steps, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Prefill prompts, decode them twice; return what attention heard of it, step by step."""
    heard = steps.listen(monkeypatch)
    new = tuple(request(i, list(range(1, n + 1)), SAMPLING) for i, n in enumerate(lengths))
    steps.run(*enumerate(lengths), new=new)
    for _ in range(2):
        steps.run(*((i, 1) for i in range(len(lengths))))
    return [batch.is_even for batch in heard]


@pytest.mark.parametrize(
    ("lengths", "is_even"), [([50, 50, 50], True), ([50, 45, 55], True), ([50, 20, 5], False)]
)
def test_attention_hears_whether_decodes_are_even(
    steps: Steps, lengths: list[int], is_even: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # prompts are no matter of graphs: their step has the plan for ragged requests
    assert decode_after(steps, lengths, monkeypatch) == [False, is_even, is_even]
    graphs = steps.runner.graphs
    assert isinstance(graphs, BodyGraphs)
    assert [descriptor.is_even for descriptor in graphs.replayed] == [is_even, is_even]
