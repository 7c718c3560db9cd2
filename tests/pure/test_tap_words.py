"""The tap's words are what the frames say: who decodes, which tokens are read, who leaves."""

from __future__ import annotations

import json
import re
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from scheduler_scripts import prompts
from test_scheduler_properties import Rig, params, rigs

from nanorunner.sampling_params import SamplingParams
from nanorunner.tap_words import MOST_NAMED, Words, argument_lines, arguments
from nanorunner.workers.full_sampling import FullSampling
from nanorunner.workers.messages import METHODS, NewRequest, StepInput

CHUNK = re.compile(r"prefill request (\d+): tokens? (\d+)(?:\.\.(\d+))?(?: of (\d+))?(.*)")
DECODES = re.compile(r"decode (\d+) requests?, one token( each)?(, the same batch)?")
MANY_CHUNKS = re.compile(r"prefill (\d+) requests, (\d+) tokens together")


def packed(*numbers: int) -> bytes:
    return np.array(numbers, np.int32).tobytes()


def new(
    request_id: int,
    length: int,
    blocks: tuple[int, ...],
    *,
    prompt_len: int | None = None,
    cached: int = 0,
    sampling: FullSampling | None = None,
    pooling: str = "",
) -> NewRequest:
    return NewRequest(
        request_id,
        packed(*range(length)),
        length if prompt_len is None else prompt_len,
        cached,
        packed(*blocks),
        FullSampling() if sampling is None else sampling,
        pooling,
    )


def step(
    batch: list[tuple[int, int]] | None = None,
    *,
    removed: tuple[int, ...] = (),
    new: tuple[NewRequest, ...] = (),
    new_blocks: tuple[tuple[int, bytes], ...] = (),
    sampled: tuple[int, ...] = (),
) -> tuple[Any, ...]:
    """Return a step as it crosses the wire."""
    pairs = None if batch is None else packed(*(number for pair in batch for number in pair))
    return StepInput(3, packed(*removed), new, new_blocks, pairs, packed(*sampled)).to_wire()


def said(*steps: tuple[Any, ...]) -> list[str]:
    words = Words()
    return [words.of("step", (wire,)) for wire in steps]


def test_the_life_of_some_requests() -> None:
    assert said(
        step([(91, 612)], new=(new(91, 612, (7, 12, 31)),)),
        step([(91, 1), (92, 300)], new=(new(92, 500, (4, 5)),)),
        step([(91, 1), (92, 200)]),
        step([(91, 1), (92, 1)], new_blocks=((91, packed(40)),)),
        step(None),
        step([(92, 1)], removed=(91,)),
    ) == [
        "prefill request 91: tokens 0..611, blocks 7 12 31",
        "decode 1 request, one token; prefill request 92: tokens 0..299 of 500, blocks 4 5",
        "decode 1 request, one token; prefill request 92: tokens 300..499",
        "decode 2 requests, one token each; request 91 gets block 40",
        "decode 2 requests, one token each, the same batch",
        "request 91 leaves; decode 1 request, one token",
    ]


def test_many_requests_are_counted_and_not_listed() -> None:
    ids = range(44)
    batch = [(request_id, 5) for request_id in ids]
    begin = step(batch, new=tuple(new(request_id, 5, (request_id,)) for request_id in ids))
    assert said(
        begin,
        step([(request_id, 1) for request_id in ids]),
        step(None, new_blocks=tuple((request_id, packed(50 + request_id)) for request_id in ids)),
        step([(2, 1)], removed=(0, 1, *range(3, 44))),
    ) == [
        "prefill 44 requests, 220 tokens together",
        "decode 44 requests, one token each",
        "decode 44 requests, one token each, the same batch; 44 requests get 44 blocks",
        "43 requests leave; decode 1 request, one token",
    ]


def test_cached_tokens_returns_and_embeddings_are_told() -> None:
    assert said(
        step([(5, 1)], new=(new(5, 257, (9, 10), cached=256),)),
        step([(6, 30)], new=(new(6, 30, (11,), prompt_len=20),), removed=(5,)),
        step([(7, 12)], new=(new(7, 12, tuple(range(10)), pooling="mean"),)),
    ) == [
        "prefill request 5: token 256, blocks 9 10, 256 tokens from the prefix cache",
        "request 5 leaves; prefill request 6: tokens 0..29, block 11, back after a preemption",
        "embed request 7: tokens 0..11, blocks 0 1 2 3 4 5 6 7 and 2 more",
    ]


def test_drafts_are_told_apart_from_tokens() -> None:
    begin = step([(1, 4), (2, 4)], new=(new(1, 4, (0,)), new(2, 4, (1,))))
    assert said(begin, step([(1, 5), (2, 5)]), step(None), step([(1, 2)], removed=(2,)))[1:] == [
        "decode 2 requests, one token and 4 drafts each",
        "decode 2 requests, one token and 4 drafts each, the same batch",
        "request 2 leaves; decode 1 request, one token and 1 draft",
    ]


def test_every_method_of_the_wire_has_words() -> None:
    words = Words()
    for method in METHODS - {"step"}:
        args = (64,) if method == "allocate_kv" else ()
        assert "(" not in words.of(method, args), f"{method}: add it to WORDS"
    assert words.of("allocate_kv", (64,)) == "64 KV blocks of 256 tokens on every rank"
    assert words.of("echo", (1, "a" * 99)) == f"echo(1, '{'a' * 59}...)"


def test_the_arguments_are_all_there_and_what_is_empty_is_not() -> None:
    sampling = FullSampling(temperature=0.5, top_k=20, seed=-3, stop_ids=(2, 9))
    wire = step(
        [(1, 1), (91, 20)],
        removed=(5, 6),
        new=(new(91, 20, (7, 12), sampling=sampling),),
        new_blocks=((1, packed(3, 4)),),
        sampled=(17,),
    )
    named = arguments("step", (wire,))
    assert named == {
        "step_id": 3,
        "removed": [5, 6],
        "new": [
            {
                "request": 91,
                "token_ids": list(range(20)),
                "prompt_len": 20,
                "num_computed": 0,
                "block_ids": [7, 12],
                "sampling": {"temperature": 0.5, "top_k": 20, "seed": -3, "stop_ids": (2, 9)},
            }
        ],
        "new_blocks": [[1, [3, 4]]],
        "sampled_ids": [17],
        "batch": [[1, 1], [91, 20]],
    }
    assert json.loads(json.dumps(named))["new"][0]["sampling"]["stop_ids"] == [2, 9]
    assert argument_lines(named) == [
        "step_id: 3",
        "removed: 5 6",
        "new request 91: token_ids 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 ... (20 in all), "
        "prompt_len 20, num_computed 0, block_ids 7 12, "
        "sampling temperature 0.5, top_k 20, seed -3, stop_ids [2, 9]",
        "new_blocks: request 1 gets 3 4",
        "sampled_ids: 17",
        "batch (request x tokens): 1 x 1, 91 x 20",
    ]
    steady = arguments("step", (step(None),))
    assert argument_lines(steady) == [
        "step_id: 3",
        "batch (request x tokens): the same as in the last step",
    ]
    assert arguments("allocate_kv", (64,)) == {"num_blocks": 64}
    assert arguments("capture", ()) == {}
    assert argument_lines({}) == []


@given(
    rig=rigs(), some=st.lists(st.tuples(prompts, params, st.booleans()), min_size=2, max_size=10)
)
@settings(max_examples=60, derandomize=True)
def test_whatever_is_scheduled_the_words_add_up(
    rig: Rig, some: list[tuple[list[int], SamplingParams, bool]]
) -> None:
    for prompt, its_params, is_quiet in some:
        rig.add(prompt, its_params, is_quiet)
    rig.finish()
    words = Words()
    num_tokens = 0
    next_token: dict[int, int] = {}  # of each request's stay
    for sent, batch in zip(rig.runner.steps, rig.runner.batches, strict=True):
        for arrived in sent.new:
            next_token[arrived.request_id] = arrived.num_computed
        told = words.of("step", (sent.to_wire(),)).split("; ")
        num_requests = 0
        for part in told:
            if found := DECODES.fullmatch(part):
                num_requests += int(found[1])
                num_tokens += int(found[1])
            elif found := MANY_CHUNKS.fullmatch(part):
                assert int(found[1]) > MOST_NAMED
                num_requests += int(found[1])
                num_tokens += int(found[2])
                next_token.clear()  # whose tokens they were is not told
            elif found := CHUNK.fullmatch(part):
                request_id, first = int(found[1]), int(found[2])
                last = first if found[3] is None else int(found[3])
                assert first == next_token.get(request_id, first), "a gap or an overlap"
                assert found[4] is None or last + 1 < int(found[4])
                next_token[request_id] = last + 1
                num_requests += 1
                num_tokens += last + 1 - first
            else:
                assert re.search(r"leaves?$|gets? ", part), part
        assert num_requests == len(batch)
    assert num_tokens == rig.runner.num_computed


@pytest.mark.parametrize("count", [1, 3])
def test_the_growth_of_few_requests_is_named(count: int) -> None:
    grown = tuple((request_id, packed(request_id + 10)) for request_id in range(count))
    begin = step([(i, 1) for i in range(count)], new=tuple(new(i, 1, (i,)) for i in range(count)))
    told = said(begin, step([(i, 1) for i in range(count)], new_blocks=grown))[1].split("; ")
    assert told[1:] == [f"request {i} gets block {i + 10}" for i in range(count)]
