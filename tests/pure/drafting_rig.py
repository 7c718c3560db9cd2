"""An engine on a device whose drafts the test chooses, and a scheduler whose outputs it writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from fake_runner import VOCAB
from speculating_device import SpeculatingDevice

from nanorunner.draft_control import DraftController
from nanorunner.engine import Engine
from nanorunner.request import RequestUpdate
from nanorunner.sampling_params import SamplingParams
from nanorunner.scheduler import Scheduler
from nanorunner.step_plan import ScheduledStep
from nanorunner.workers.messages import Int32, RequestExtras, StepOutput

BLOCK = 4
PROMPT = [1, 2, 3]
NO_EOS: frozenset[int] = frozenset()


class Rig:
    """An engine on a device whose drafts are right with the given share."""

    def __init__(
        self,
        *,
        num_drafts: int = 4,
        depth: int = 1,
        num_blocks: int = 64,
        max_num_seqs: int = 4,
        eos: frozenset[int] = NO_EOS,
        prefix_cache: bool = False,
        share: float = 1.0,
    ) -> None:
        self.device = SpeculatingDevice(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            max_model_len=100,
            num_drafts=num_drafts,
            depth=depth,
            share=share,
        )
        self.scheduler = make_scheduler(
            num_drafts=num_drafts,
            depth=depth,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            eos=eos,
            prefix_cache=prefix_cache,
        )
        self.engine = Engine(self.scheduler, self.device.call, vocab_size=VOCAB)
        self.stats = self.scheduler.stats
        self.updates: list[RequestUpdate] = []

    def add(self, prompt: list[int], max_tokens: int) -> int:
        return self.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, seed=1))

    def finish(self, most_steps: int = 200) -> None:
        while self.engine.has_unfinished():
            assert most_steps > 0, "it never ends"
            most_steps -= 1
            self.updates += self.engine.step()
            self.scheduler.check_integrity()

    def output(self, request_id: int) -> list[int]:
        updates = [update for update in self.updates if update.request_id == request_id]
        return [token_id for update in updates for token_id in update.new_ids]


def make_scheduler(
    *,
    num_drafts: int = 4,
    depth: int = 1,
    num_blocks: int = 64,
    max_num_seqs: int = 4,
    eos: frozenset[int] = NO_EOS,
    prefix_cache: bool = False,
    controller: DraftController | None = None,
) -> Scheduler:
    return Scheduler(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=100,
        num_blocks=num_blocks,
        vocab_size=VOCAB,
        eos_token_ids=eos,
        prefix_cache=prefix_cache,
        depth=depth,
        send_sampled_ids=False,
        block_size=BLOCK,
        num_speculative_tokens=num_drafts,
        controller=controller,
    )


class Told(DraftController):
    """Takes as many rows as it is told."""

    wanted = 5

    def query_len(self, num_decodes: int) -> int:
        return self.wanted


class ByHand:
    """A scheduler whose outputs the test writes itself; every request's prompt is PROMPT."""

    def __init__(self, num_requests: int = 1, *, max_tokens: int = 20, depth: int = 1) -> None:
        self.told = Told(4)
        self.scheduler = make_scheduler(depth=depth, eos=frozenset({7}), controller=self.told)
        self.engine = Engine(self.scheduler, lambda *_: None, vocab_size=VOCAB)
        self.params = SamplingParams(max_tokens=max_tokens, seed=1, min_tokens=4)
        self.ids = [self.engine.add_request(PROMPT, self.params) for _ in range(num_requests)]
        self.read(self.step(), [1] * num_requests)

    def step(self) -> ScheduledStep:
        step = self.scheduler.schedule()
        assert step is not None
        return step

    def read(
        self,
        step: ScheduledStep,
        ids: Sequence[int],
        extras: dict[int, RequestExtras] | None = None,
    ) -> list[RequestUpdate]:
        sampled: Int32 = np.array(ids, np.int32)
        output = StepOutput(step.step_input.step_id, step.sample_ids, sampled, extras)
        updates = self.scheduler.update(output)
        self.scheduler.check_integrity()
        return updates


def pairs(step: ScheduledStep) -> list[list[int]]:
    assert step.step_input.batch is not None
    found: list[list[int]] = np.frombuffer(step.step_input.batch, np.int32).reshape(-1, 2).tolist()
    return found
