"""The draft model of a rank: what it drafts, whose KV it keeps, and what it must leave alone.

Toy models in float32. A draft model that is the target itself must guess everything right, with any
temperature, for it draws with the same noise; and its KV must be the target's.
"""

from __future__ import annotations

import logging
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from runner_steps import NAN, RunnerSteps, packed, request

from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.presets import load_preset
from nanorunner.toy_model import make_toy_model
from nanorunner.workers.kv_cache import block_bytes

pytestmark = pytest.mark.beside

NUM_DRAFTS = 3
HEATS = (0.0, 1.0, 0.7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = load_preset("tiny-qwen3") | {"max_position_embeddings": 600}
    return make_toy_model(tmp_path_factory.mktemp("target"), fields)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = load_preset("tiny-llama") | {"max_position_embeddings": 600}
    return make_toy_model(tmp_path_factory.mktemp("draft"), fields, seed=1)


@pytest.fixture
def steps(folder: Path) -> RunnerSteps:
    """Return a runner that drafts with its own model."""
    return RunnerSteps(folder, folder, NUM_DRAFTS)


def prompt(length: int) -> list[int]:
    random = Random(length)
    return [random.randrange(3, 1000) for _ in range(length)]


def plain_ids(
    folder: Path, tokens: list[int], count: int, request_id: int = 1, temperature: float = 0.0
) -> list[int]:
    """Return what the model alone says after tokens."""
    plain = RunnerSteps(folder)
    first = request(request_id, tokens, [0, 1, 2], temperature=temperature)
    plain.step({request_id: len(tokens)}, new=(first,))
    plain.decode((request_id,), count - 1)
    return plain.ids[request_id]


def test_a_model_that_drafts_for_itself_is_always_right(folder: Path, steps: RunnerSteps) -> None:
    lengths = (250, 1, 256)  # the first one's drafts cross into its second block
    new = tuple(
        request(i, prompt(n), [2 * i, 2 * i + 1], temperature=heat)
        for i, (n, heat) in enumerate(zip(lengths, HEATS, strict=True))
    )
    steps.step(dict(enumerate(lengths)), new=new)
    given = steps.decode((0, 1, 2), 4)
    assert all(min(ids) >= 0 for got in given for ids in got.values()), "a draft was rejected"
    for i, (n, heat) in enumerate(zip(lengths, HEATS, strict=True)):
        assert len(steps.ids[i]) == 1 + 4 * (1 + NUM_DRAFTS)
        assert steps.ids[i] == plain_ids(folder, prompt(n), 17, i, heat)
        steps.check_draft_kv(i)


def test_where_prompts_join_the_draft_model_keeps_to_the_launch_for_prompts(
    folder: Path, steps: RunnerSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plans for decodes are compiled for as many places as it drafts for, not as verify."""
    heard: list[tuple[int, int]] = []
    decoder = steps.draft_model.decoder
    forward = decoder.forward

    def listen(ids: Any, positions: Any, batch: AttentionBatch, *caches: Any) -> Any:
        heard.append((batch.max_query_len, batch.num_decodes))
        return forward(ids, positions, batch, *caches)

    steps.step({1: 30}, new=(request(1, prompt(30), [0]),))
    monkeypatch.setattr(decoder, "forward", listen)
    steps.step({1: 1 + NUM_DRAFTS, 2: 20}, new=(request(2, prompt(20), [1]),))
    assert heard[0] == (20, 0)
    assert steps.ids[1] == plain_ids(folder, prompt(30), len(steps.ids[1]))


def test_the_drafts_are_the_draft_models_own_continuation(folder: Path, other: Path) -> None:
    steps = RunnerSteps(folder, other, NUM_DRAFTS)
    tokens = prompt(30)
    steps.step({1: 30}, new=(request(1, tokens, [3]),))
    for _ in range(3):
        known = tokens + steps.ids[1]
        assert steps.drafts(1) == plain_ids(other, known, NUM_DRAFTS)
        steps.decode((1,), 1)
    assert steps.ids[1] == plain_ids(folder, tokens, len(steps.ids[1]))


@pytest.mark.parametrize("num_right", range(NUM_DRAFTS + 1))
def test_however_many_drafts_are_right_the_kv_has_no_gap(
    steps: RunnerSteps, num_right: int
) -> None:
    steps.step({1: 249}, new=(request(1, prompt(249), [4, 1]),))
    for _ in range(4):
        if num_right < NUM_DRAFTS:
            steps.spoil_draft(1, num_right)
        before = len(steps.ids[1])
        steps.decode((1,), 1)
        assert len(steps.ids[1]) == before + num_right + 1
        steps.check_draft_kv(1)


def test_a_prompt_in_chunks_beside_a_decode_leaves_no_gap(steps: RunnerSteps) -> None:
    steps.step({1: 20}, new=(request(1, prompt(20), [0]),))
    new = request(2, prompt(270), [3, 5])
    for count in (1, 255, 1, 12, 1):  # a chunk of one token, up to the block's end, its first slot
        is_first = 2 not in steps.runner.states.rows
        steps.step({1: steps.query_len, 2: count}, new=(new,) if is_first else ())
        steps.check_draft_kv(1)
    steps.check_draft_kv(2)
    given = steps.decode((1, 2), 2)
    assert all(min(ids) >= 0 for got in given for ids in got.values()), "a draft was rejected"
    steps.check_draft_kv(2)


def test_plain_decodes_leave_one_draft_and_no_gap(folder: Path, steps: RunnerSteps) -> None:
    steps.step({1: 254}, new=(request(1, prompt(254), [2, 7]),))
    for _ in range(5):
        steps.step({1: 1})
        assert len(steps.drafts(1)) == 1
        steps.check_draft_kv(1)
    given = steps.decode((1,), 3)
    assert all(min(got[1]) >= 0 for got in given[1:]), "a draft was rejected"
    steps.check_draft_kv(1)
    assert steps.ids[1] == plain_ids(folder, prompt(254), len(steps.ids[1]))


def test_a_block_from_the_prefix_cache_holds_the_draft_models_kv_too(steps: RunnerSteps) -> None:
    tokens = prompt(280)
    steps.step({1: 280}, new=(request(1, tokens, [6, 2]),))
    steps.decode((1,), 1)
    # what is left of its other block is another's by now
    later = request(2, tokens[:270], [6, 7], num_computed=256)
    steps.step({2: 14}, new=(later,), removed=(1,))
    given = steps.decode((2,), 3)
    assert all(min(got[2]) >= 0 for got in given), "a draft was rejected"
    steps.check_draft_kv(2)


def test_who_comes_back_from_a_preemption_goes_on_as_before(
    folder: Path, steps: RunnerSteps
) -> None:
    tokens = prompt(40)
    steps.step({1: 40}, new=(request(1, tokens, [0], temperature=1.0),))
    steps.decode((1,), 1)
    known = tokens + steps.ids[1]
    steps.draft_model.kv_cache.fill_(NAN)
    back = request(1, known, [5], temperature=1.0)._replace(prompt_len=40)
    steps.step({1: len(known)}, new=(back,), removed=(1,))
    given = steps.decode((1,), 2)
    assert all(min(got[1]) >= 0 for got in given), "a draft was rejected"
    assert steps.ids[1] == plain_ids(folder, tokens, len(steps.ids[1]), temperature=1.0)


def test_nothing_is_read_or_written_from_a_requests_limit_on(
    folder: Path, steps: RunnerSteps
) -> None:
    limit = 258  # the third and last output token is the second one of a block
    new = request(1, prompt(255), [0, 1], limit=limit), request(2, prompt(9), [4])
    steps.step({1: 255, 2: 9}, new=new)
    untouched = steps.tables.token_ids[steps.row(1), limit:].clone()
    assert len(steps.drafts(1)) == limit - 256
    steps.decode((1, 2), 4)
    assert steps.ids[1] == plain_ids(folder, prompt(255), limit - 255)
    assert steps.drafts(1) == []
    assert torch.equal(steps.tables.token_ids[steps.row(1), limit:], untouched)
    behind = steps.draft_model.kv_cache[:, :, 1, limit - 256 :]
    assert bool(behind.isnan().all()), "the cache was full of NaN, and stays so where no token is"
    # its neighbour goes on as if it were alone
    assert steps.ids[2] == plain_ids(folder, prompt(9), 17, 2)


def test_a_chain_that_outruns_its_blocks_leaves_others_alone_and_no_gap(
    folder: Path, steps: RunnerSteps
) -> None:
    tokens = prompt(256)
    expected = plain_ids(folder, tokens, 18, 2)
    new = request(1, prompt(20), [0]), request(2, tokens, [3])
    steps.step({1: 20}, new=new[:1])
    others = steps.draft_model.kv_cache[:, :, 0].clone()
    steps.step({2: 256}, new=new[1:])  # its next block in the table is 0, which is not its own
    now = steps.draft_model.kv_cache[:, :, 0]
    torch.testing.assert_close(now, others, rtol=0, atol=0, equal_nan=True)
    # the row's last owner may have said the same: no draft is meant here, but these are right
    steps.tables.token_ids[steps.row(2), 257:260] = torch.tensor(expected[1:4])
    steps.propose(1)
    steps.step({2: steps.query_len}, new_blocks=((2, packed(5)),))
    steps.check_draft_kv(2)
    steps.decode((2,), 3)
    steps.check_draft_kv(2)
    assert steps.ids[2] == expected[: len(steps.ids[2])]


def test_a_bucket_may_be_wider_than_the_batch(steps: RunnerSteps) -> None:
    """As a graph's is, which is padded."""
    steps.step({1: 20}, new=(request(1, prompt(20), [3]),))
    drafts, rows = steps.drafts(1), steps.tables.token_ids.clone()
    steps.tables.token_ids[steps.row(1), 21:] = 0
    kv = steps.draft_model.kv_cache.clone()
    steps.propose(4)
    assert steps.drafts(1) == drafts
    assert torch.equal(steps.tables.token_ids, rows)
    torch.testing.assert_close(steps.draft_model.kv_cache, kv, equal_nan=True)


def test_a_block_counts_with_the_kv_of_both_models(
    folder: Path, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nanorunner")
    room = RunnerSteps(folder, other, NUM_DRAFTS).room
    qwen3, llama = block_bytes(3, 2, 32, 4), block_bytes(3, 1, 16, 4)
    assert room.block_bytes == qwen3 + llama
    mib = [f"{size / 2**20:.2f} MiB" for size in (qwen3, llama, qwen3 + llama)]
    assert all(text in caplog.text for text in mib)
