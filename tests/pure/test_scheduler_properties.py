"""Whatever is asked in whatever order, every request gets the ids it would get alone.

Chunked = whole, preempted = not, cached = cold, depth 2 = depth 1, quiet = told id by id; and after
every step rows and blocks are conserved, the budget is kept, no decode is left out and the longest
stand first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from fake_runner import VOCAB, FakeRunner, run_alone
from hypothesis import given, settings
from scheduler_scripts import play, prompts, scripts_of

from nanorunner.engine import Engine
from nanorunner.sampling_params import SamplingParams
from nanorunner.scheduler import Scheduler

pytestmark = pytest.mark.beside

BLOCK = 4
EOS = frozenset({7, 11})
NORMAL = (None, "stop", "length")


@dataclass
class Asked:
    """A request of the test and what has come of it."""

    prompt: list[int]
    params: SamplingParams
    is_quiet: bool
    output: list[int] = field(default_factory=list)
    reason: str | None = None
    was_cut: bool = False  # by abort() or finish()


@dataclass
class Rig:
    """An engine on a fake runner, checked after every step."""

    num_blocks: int
    max_num_seqs: int
    budget: int
    depth: int
    is_v1: bool
    prefix_cache: bool
    max_model_len: int
    asked: dict[int, Asked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runner = FakeRunner(
            self.num_blocks, BLOCK, self.max_num_seqs, self.budget, self.is_v1, self.depth
        )
        self.scheduler = Scheduler(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            vocab_size=VOCAB,
            eos_token_ids=EOS,
            prefix_cache=self.prefix_cache,
            depth=self.depth,
            send_sampled_ids=self.is_v1,
            block_size=BLOCK,
        )
        self.engine = Engine(self.scheduler, self.runner.call, vocab_size=VOCAB)

    def add(self, prompt: list[int], params: SamplingParams, is_quiet: bool) -> int | None:
        needed = -(-len(prompt) // BLOCK)
        fits = len(prompt) < self.max_model_len and needed <= self.num_blocks
        try:
            request_id = self.engine.add_request(prompt, params, quiet=is_quiet)
        except ValueError:
            assert not fits
            return None
        assert fits
        self.asked[request_id] = Asked(prompt, params, is_quiet)
        return request_id

    def step(self) -> None:
        roster, stats = self.scheduler.roster, self.scheduler.stats
        decoding = set(roster.table.request_id[roster.decoding].tolist())
        num_steps, num_preemptions = len(self.runner.batches), stats.preemptions
        updates = self.engine.step()
        self.scheduler.check_integrity()
        lengths = roster.table.computed[roster.decoding]
        assert (np.diff(lengths) <= 0).all(), "a longer request decodes behind a shorter one"
        ran = self.runner.batches[num_steps:]
        has_failed = any(update.finish_reason not in NORMAL for update in updates)
        if ran and stats.preemptions == num_preemptions and not has_failed:
            assert decoding <= set(ran[0]), "a decode was left out"
        for update in updates:
            asked = self.asked[update.request_id]
            assert asked.reason is None, "an update after the end"
            assert update.finish_reason or not asked.is_quiet, "a quiet request told too much"
            asked.output += update.new_ids
            asked.reason = update.finish_reason

    def cut(self, request_id: int, by_abort: bool) -> None:
        asked = self.asked[request_id]
        if by_abort:
            was_live = self.engine.abort(request_id)
        else:
            was_live = self.engine.finish(request_id, len(asked.output), "stop")
        assert was_live == (asked.reason is None)
        if was_live:
            asked.reason = "cut"
        self.scheduler.check_integrity()

    def finish(self) -> None:
        for _ in range(5000):
            if not self.engine.has_unfinished():
                break
            self.step()
        assert not self.engine.has_unfinished(), "it never ends"
        blocks, table = self.scheduler.roster.blocks, self.scheduler.roster.table
        assert blocks.num_free == blocks.num_blocks
        assert table.num_free == table.num_rows
        assert self.runner.num_computed == self.scheduler.stats.scheduled_tokens
        for asked in self.asked.values():
            self._check_end(asked)

    def _check_end(self, asked: Asked) -> None:
        params = asked.params
        limit = min(params.max_tokens, self.max_model_len - len(asked.prompt))
        eos = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else EOS)
        alone = run_alone(asked.prompt, params.seed or 0, limit, eos)
        if asked.reason == "cut":
            assert asked.output == alone[: len(asked.output)]
        elif asked.reason is not None and asked.reason.startswith("error"):
            assert asked.output == alone[: len(asked.output)]
            assert len(asked.prompt) + len(asked.output) == self.num_blocks * BLOCK + 1
        else:
            assert asked.output == alone
            assert asked.reason == ("stop" if alone[-1] in eos else "length")


@st.composite
def rigs(draw: st.DrawFn) -> Rig:
    is_v1 = draw(st.booleans())
    max_num_seqs = draw(st.integers(1, 6))
    return Rig(
        num_blocks=draw(st.integers(2, 24)),
        max_num_seqs=max_num_seqs,
        budget=draw(st.integers(max_num_seqs, 40)),
        depth=1 if is_v1 else draw(st.integers(1, 3)),
        is_v1=is_v1,
        prefix_cache=draw(st.booleans()),
        max_model_len=draw(st.sampled_from([12, 40, 200])),
    )


params = st.builds(
    lambda max_tokens, seed, ignore_eos, stop_ids: SamplingParams(
        max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos, stop_token_ids=stop_ids
    ),
    st.integers(1, 40),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([(), (), (3,), (5, 13, 17, 23)]),
)


@given(rig=rigs(), script=scripts_of(params))
@settings(max_examples=300, derandomize=True)
def test_every_request_gets_the_ids_it_would_get_alone(rig: Rig, script: list[object]) -> None:
    play(rig, script)


@given(
    rig=rigs(), some=st.lists(st.tuples(prompts, params, st.booleans()), min_size=4, max_size=14)
)
@settings(max_examples=200, derandomize=True)
def test_requests_added_together_end_as_if_alone(
    rig: Rig, some: list[tuple[list[int], SamplingParams, bool]]
) -> None:
    for prompt, its_params, is_quiet in some:
        rig.add(prompt, its_params, is_quiet)
    rig.finish()
