"""A step that reads a prompt is no decode for a graph, also when it holds one token a request.

On a CPU an object that serves every decode takes the graphs' place: it runs what a graph would
have captured, and returns what a replay returns. Hidden states are lost in it, as in a graph.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from body_graphs import Steps, request

from nanorunner.workers.full_sampling import FullSampling
from nanorunner.workers.messages import StepOutput, TokenLogprobs

PROMPT = [5, 6, 7, 8, 9, 10, 11]
PLAIN_SAMPLING = FullSampling(temperature=0.0)
READ = PLAIN_SAMPLING._replace(prompt_logprobs=2)


@pytest.fixture
def both() -> Iterator[tuple[Steps, Steps]]:
    """Yield a runner whose decodes are served by graphs, and one without any."""
    runners = Steps(has_graphs=True), Steps(has_graphs=False)
    yield runners
    for steps in runners:
        steps.runner.close()


def prompt_logprobs(output: StepOutput, request_id: int) -> TokenLogprobs:
    assert output.extras is not None, "nothing came beside the ids"
    found = output.extras[request_id].prompt_logprobs
    assert found is not None
    return found


def assert_same(one: TokenLogprobs, other: TokenLogprobs) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.ranks.tolist() == other.ranks.tolist()
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_a_prompt_of_one_token_has_its_logprobs_in_its_only_step(both: tuple[Steps, Steps]) -> None:
    for steps in both:
        output = steps.run((1, 1), new=(request(1, PROMPT[:1], READ),))
        assert output.request_ids.tolist() == [1]
        assert prompt_logprobs(output, 1).token_ids.shape == (0, 3)
    # from then on it is a decode like any other
    first, second = (steps.run((1, 1)) for steps in both)
    assert first.extras is second.extras is None
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert [steps.num_replays for steps in both] == [1, 0]


def test_a_last_chunk_of_one_token_brings_the_whole_prompts_logprobs(
    both: tuple[Steps, Steps],
) -> None:
    _, eager = both
    whole = eager.run((9, len(PROMPT)), new=(request(7, PROMPT, READ)._replace(request_id=9),))
    for steps in both:
        begun = steps.run((1, len(PROMPT) - 1), new=(request(1, PROMPT, READ),))
        assert (begun.token_ids.tolist(), begun.extras) == ([], None)
        ended = steps.run((1, 1))
        assert_same(prompt_logprobs(ended, 1), prompt_logprobs(whole, 9))
        assert ended.token_ids.tolist() == whole.token_ids.tolist()
        assert steps.num_replays == 0


def test_beside_decodes_the_last_token_of_a_prompt_is_still_read(both: tuple[Steps, Steps]) -> None:
    graphs, _ = both
    found = []
    for steps in both:
        steps.run((1, 2), new=(request(1, PROMPT[:2], PLAIN_SAMPLING),))
        steps.run((1, 1))
        steps.run((1, 1), (2, 6), new=(request(2, PROMPT, READ),))
        before = steps.num_replays
        ended = steps.run((1, 1), (2, 1))
        assert steps.num_replays == before, "a graph served a step that reads a prompt"
        after = steps.run((1, 1), (2, 1))
        found.append((ended, after))
    (one, one_after), (two, two_after) = found
    assert_same(prompt_logprobs(one, 2), prompt_logprobs(two, 2))
    assert one.token_ids.tolist() == two.token_ids.tolist()
    assert one_after.token_ids.tolist() == two_after.token_ids.tolist()
    assert graphs.num_replays == 2


def test_an_unread_prompts_last_token_is_served_by_a_graph(both: tuple[Steps, Steps]) -> None:
    """Which shows that the graphs' place is taken by something that would take the others too."""
    graphs, eager = both
    for steps in both:
        steps.run((1, 6), new=(request(1, PROMPT, PLAIN_SAMPLING),))
    assert graphs.run((1, 1)).token_ids.tolist() == eager.run((1, 1)).token_ids.tolist()
    assert graphs.num_replays == 1
