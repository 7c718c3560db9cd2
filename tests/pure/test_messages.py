"""A StepInput survives the wire unchanged, and a steady step is as small as the wire needs."""

from __future__ import annotations

import pickle

import numpy as np

from nanorunner.workers.full_sampling import FullSampling
from nanorunner.workers.messages import NewRequest, StepInput


def ids(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def test_a_step_input_comes_back_from_the_wire_as_it_was() -> None:
    new = NewRequest(7, ids(1, 2, 3), 3, 0, ids(5), FullSampling(0.5, 20, 0.9, seed=2**62 + 1))
    pooled = NewRequest(8, ids(1, 2), 2, 0, ids(6), FullSampling(), "mean")
    limited = NewRequest(9, ids(1, 2), 2, 0, ids(6), FullSampling(), token_limit=20)
    news = (new, pooled, limited)
    step = StepInput(4, ids(1, 2), news, ((3, ids(9)),), ids(3, 1, 7, 3), ids(11, 12))
    wire = pickle.loads(pickle.dumps(step.to_wire()))
    assert StepInput.from_wire(wire) == step
    assert type(StepInput.from_wire(wire).new[0].sampling) is FullSampling


def test_a_request_without_a_token_limit_has_no_place_for_one_on_the_wire() -> None:
    new = NewRequest(9, ids(1, 2), 2, 0, ids(6), FullSampling())
    sizes = []
    for request in (new, new._replace(token_limit=20)):
        (packed,) = StepInput(0, b"", (request,), (), None, b"").to_wire()[2]
        sizes.append(len(packed))
    assert sizes == [7, 8]


def test_a_steady_step_of_256_requests_is_small() -> None:
    unchanged = StepInput(1000, b"", (), (), None, b"")
    assert len(pickle.dumps(["step", unchanged.to_wire()], pickle.HIGHEST_PROTOCOL)) < 128
    with_ids = unchanged._replace(sampled_ids=ids(*range(256)))
    assert len(pickle.dumps(["step", with_ids.to_wire()], pickle.HIGHEST_PROTOCOL)) < 4096
