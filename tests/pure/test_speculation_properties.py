"""With drafts, right or wrong, every request gets the ids it would get alone, and in time.

Whatever is accepted: rows and blocks are conserved after every step, nothing is written past a
request's limit or its blocks, the bounds hold on both sides, and everyone ends.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from fake_runner import VOCAB, run_alone
from hypothesis import given, settings
from scheduler_scripts import play, prompts, scripts_of
from speculating_device import SpeculatingDevice

from nanorunner.draft_control import DraftController
from nanorunner.engine import Engine
from nanorunner.request import NO_ROW
from nanorunner.sampling_params import SamplingParams
from nanorunner.scheduler import Scheduler

pytestmark = pytest.mark.beside

EOS = frozenset({7, 11})
NORMAL = (None, "stop", "length")


class Dice(DraftController):
    """Changes its mind as it likes."""

    def __init__(self, num_speculative_tokens: int, seed: int) -> None:
        super().__init__(num_speculative_tokens)
        self._random = random.Random(seed)

    def query_len(self, num_decodes: int) -> int:
        return super().query_len(num_decodes) if self._random.random() < 0.6 else 1


@dataclass
class Asked:
    """A request of the test and what has come of it."""

    prompt: list[int]
    params: SamplingParams
    is_quiet: bool
    output: list[int] = field(default_factory=list)
    logprob_ids: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    reason: str | None = None


@dataclass
class Rig:
    """An engine on a device that speculates, checked after every step."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    spare_budget: int
    depth: int
    num_drafts: int
    changes: bool  # q from step to step
    prefix_cache: bool
    max_model_len: int
    share: float
    seed: int
    asked: dict[int, Asked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        budget = self.max_num_seqs * (1 + self.num_drafts) + self.spare_budget
        self.device = SpeculatingDevice(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=self.max_model_len,
            num_drafts=self.num_drafts,
            depth=self.depth,
            share=self.share,
            seed=self.seed,
        )
        self.scheduler = Scheduler(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            vocab_size=VOCAB,
            eos_token_ids=EOS,
            prefix_cache=self.prefix_cache,
            depth=self.depth,
            send_sampled_ids=False,
            block_size=self.block_size,
            num_speculative_tokens=self.num_drafts,
            controller=Dice(self.num_drafts, self.seed) if self.changes else None,
        )
        self.engine = Engine(self.scheduler, self.device.call, vocab_size=VOCAB)

    def add(self, prompt: list[int], params: SamplingParams, is_quiet: bool) -> None:
        needed = -(-len(prompt) // self.block_size)
        if len(prompt) < self.max_model_len and needed <= self.num_blocks:
            request_id = self.engine.add_request(prompt, params, quiet=is_quiet)
            told_at_once = is_quiet and params.logprobs is None
            self.asked[request_id] = Asked(prompt, params, told_at_once)

    def step(self) -> None:
        roster, stats = self.scheduler.roster, self.scheduler.stats
        decoding = set(roster.table.request_id[roster.decoding].tolist())
        num_steps, num_preemptions = len(self.device.batches), stats.preemptions
        updates = self.engine.step()
        self.scheduler.check_integrity()
        self._check_bounds()
        ran = self.device.batches[num_steps:]
        has_failed = any(update.finish_reason not in NORMAL for update in updates)
        if ran and stats.preemptions == num_preemptions and not has_failed:
            assert decoding <= {request_id for request_id, _ in ran[0]}, "a decode was left out"
        for update in updates:
            asked = self.asked[update.request_id]
            assert asked.reason is None, "an update after the end"
            assert update.new_ids or update.finish_reason, "an update that tells nothing"
            assert update.finish_reason or not asked.is_quiet, "a quiet request told too much"
            asked.output += update.new_ids
            asked.reason = update.finish_reason
            if update.extras is not None:
                logprobs = update.extras.logprobs
                assert logprobs is not None
                asked.logprob_ids += logprobs.token_ids[:, 0].tolist()
                asked.places += logprobs.ranks.tolist()

    def _check_bounds(self) -> None:
        """The device has run every step in flight, so it is what the bounds are about."""
        table = self.scheduler.roster.table
        for row in self.scheduler.roster.decoding.tolist():
            truth = self.device.rows[int(table.request_id[row])]
            assert table.known[row] <= truth.total <= table.limit[row]
            assert truth.computed <= table.computed[row], "the upper bound is too low"
            assert table.sure[row] <= truth.total, "more is sure than is true"

    def cut(self, request_id: int, by_abort: bool) -> None:
        asked = self.asked[request_id]
        if by_abort:
            was_live = self.engine.abort(request_id)
        else:
            was_live = self.engine.finish(request_id, len(asked.output), "stop")
        assert was_live == (asked.reason is None)
        asked.reason = asked.reason or "cut"
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
        assert all(r.row == NO_ROW for r in self.scheduler.roster.requests.values())
        stats = self.scheduler.stats
        assert self.device.num_computed == stats.scheduled_tokens
        assert stats.drafts_accepted <= stats.drafts_meant
        assert stats.drafts_meant <= stats.verified_rows * self.num_drafts
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
            # exactly as far as without speculation
            room = self.num_blocks * self.block_size
            assert len(asked.prompt) + len(asked.output) == room + 1
        else:
            assert asked.output == alone
            assert asked.reason == ("stop" if alone[-1] in eos else "length")
        if params.logprobs is not None:
            assert asked.logprob_ids == asked.output
            begin = len(asked.prompt)
            assert asked.places == list(range(begin, begin + len(asked.output)))


@st.composite
def rigs(draw: st.DrawFn) -> Rig:
    return Rig(
        num_blocks=draw(st.integers(2, 24)),
        block_size=draw(st.sampled_from([2, 4, 5])),
        max_num_seqs=draw(st.integers(1, 6)),
        spare_budget=draw(st.integers(0, 20)),
        depth=draw(st.integers(1, 3)),
        num_drafts=draw(st.integers(1, 6)),
        changes=draw(st.booleans()),
        prefix_cache=draw(st.booleans()),
        max_model_len=draw(st.sampled_from([12, 40, 200])),
        share=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        seed=draw(st.integers(0, 1000)),
    )


params = st.builds(
    lambda max_tokens, seed, ignore_eos, stop_ids, logprobs: SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        ignore_eos=ignore_eos,
        stop_token_ids=stop_ids,
        logprobs=logprobs,
    ),
    st.integers(1, 40),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([(), (), (3,), (5, 13, 17, 23)]),
    st.sampled_from([None, None, 0]),
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
