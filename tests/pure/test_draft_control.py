"""Drafts are used where they pay: a controller among simulated costs, against the better way.

A loss is what the controller's choices take beyond the better way's time for as many ids, both by
the costs that the simulation has, without the noise that the controller sees.
"""

from __future__ import annotations

import logging
import random
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from nanorunner.draft_control import DraftController

pytestmark = pytest.mark.beside

K = 4
NUM_STEPS = 5000
PLAIN_S = 0.01
Phases = Callable[[int], float]  # of the number of a step


@dataclass
class Costs:
    """Seconds and acceptance as they are; the controller sees them through noise."""

    verify: float  # times a plain step
    acceptance: Phases  # of each draft, if the one before it was accepted
    noise: float = 0.1  # standard deviation of a step's time
    growth: float = 0.0  # from the first step to the last, as contexts become longer

    def step_s(self, is_drafting: bool, step: int) -> float:
        now_s = PLAIN_S * (1 + self.growth * step / NUM_STEPS)
        return now_s * (self.verify if is_drafting else 1.0)

    def mean_ids(self, is_drafting: bool, step: int) -> float:
        share = self.acceptance(step)
        return 1.0 + sum(share**place for place in range(1, K + 1)) * is_drafting


@dataclass
class Outcome:
    """Seconds: taken, and what each way and the better one of each moment take for these ids."""

    taken_s: float = 0.0
    plain_s: float = 0.0
    drafting_s: float = 0.0
    best_s: float = 0.0
    num_plain: int = 0


class SimulatedClock:
    """Goes on when it is told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def simulate(costs: Costs, num_decodes: int, *, depth: int = 2, seed: int = 0) -> Outcome:
    clock = SimulatedClock()
    controller = DraftController(K, clock)
    dice = random.Random(seed)
    in_flight: deque[tuple[int, int, float, int]] = deque()
    outcome = Outcome()
    for step in range(NUM_STEPS):
        query_len = controller.query_len(num_decodes)
        is_drafting = query_len > 1
        num_ids = num_decodes
        if is_drafting:  # all drafts up to the first that is not accepted
            reached = [costs.acceptance(step) ** place for place in range(1, K + 1)]
            at_most = [*(1 - share for share in reached), 1.0]
            num_ids += sum(dice.choices(range(K + 1), cum_weights=at_most, k=num_decodes))
        seconds = costs.step_s(is_drafting, step) * max(0.2, dice.gauss(1, costs.noise))
        in_flight.append((step, query_len, seconds, num_ids))
        count(outcome, costs, step, is_drafting)
        if len(in_flight) == depth:
            read, its_query_len, its_seconds, its_ids = in_flight.popleft()
            clock.now_s += its_seconds
            controller.step_read(read, num_decodes, its_query_len, its_ids)
    return outcome


def count(outcome: Outcome, costs: Costs, step: int, is_drafting: bool) -> None:
    ids = costs.mean_ids(is_drafting, step)
    plain_s = ids * costs.step_s(False, step)
    drafting_s = ids * costs.step_s(True, step) / costs.mean_ids(True, step)
    outcome.taken_s += costs.step_s(is_drafting, step)
    outcome.plain_s += plain_s
    outcome.drafting_s += drafting_s
    outcome.best_s += min(plain_s, drafting_s)
    outcome.num_plain += not is_drafting


def always(share: float) -> Phases:
    return lambda _: share


def then(first: float, second: float) -> Phases:
    return lambda step: first if step < NUM_STEPS // 2 else second


@pytest.mark.parametrize("num_decodes", [1, 8, 64])
@pytest.mark.parametrize(
    ("verify", "share"), [(1.3, 0.8), (1.4, 0.5), (2.0, 0.9)], ids=["2.6x", "1.4x", "2.0x"]
)
def test_where_drafts_win_nearly_all_of_the_gain_is_kept(
    num_decodes: int, verify: float, share: float
) -> None:
    outcome = simulate(Costs(verify, always(share)), num_decodes)
    gain, kept = outcome.plain_s - outcome.drafting_s, outcome.plain_s - outcome.taken_s
    assert kept >= 0.97 * gain > 0


def test_a_gain_of_a_tenth_is_kept_in_a_large_batch() -> None:
    outcome = simulate(Costs(1.9375 / 1.1, always(0.5)), 64)
    gain, kept = outcome.plain_s - outcome.drafting_s, outcome.plain_s - outcome.taken_s
    assert kept >= 0.97 * gain > 0


@pytest.mark.parametrize("num_decodes", [1, 8, 64])
@pytest.mark.parametrize(
    ("verify", "share"),
    [(1.3, 0.0), (3.0, 0.05), (2.2, 0.5), (1.9375 / 0.95, 0.5), (1.9375, 0.5), (1.1, 0.03)],
    ids=["useless", "dear", "a tenth", "a twentieth", "tie", "cheap"],
)
def test_where_drafts_lose_little_is_lost(num_decodes: int, verify: float, share: float) -> None:
    for seed in range(2):
        outcome = simulate(Costs(verify, always(share)), num_decodes, seed=seed)
        assert outcome.taken_s <= 1.03 * outcome.best_s


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("num_decodes", [1, 8, 64])
@pytest.mark.parametrize("shares", [(0.8, 0.0), (0.7, 0.2)])
def test_a_drop_of_acceptance_is_seen_in_time(
    num_decodes: int, shares: tuple[float, float], depth: int
) -> None:
    outcome = simulate(Costs(1.5, then(*shares)), num_decodes, depth=depth)
    # the better way is another one after the drop
    assert outcome.taken_s <= 1.03 * outcome.best_s
    assert outcome.best_s < 0.95 * min(outcome.plain_s, outcome.drafting_s)


@pytest.mark.parametrize("num_decodes", [1, 64])
def test_drafts_that_become_good_are_found_by_a_probe(num_decodes: int) -> None:
    outcome = simulate(Costs(1.5, then(0.0, 0.8)), num_decodes)
    assert outcome.taken_s <= 1.03 * min(outcome.plain_s, outcome.drafting_s)
    # some hundred steps late: what a probe may cost says how rare they are
    assert outcome.num_plain < 0.7 * NUM_STEPS


@pytest.mark.parametrize(("verify", "wins"), [(1.5, True), (2.2, False)])
def test_contexts_that_grow_make_nothing_that_is_remembered_look_better(
    verify: float, wins: bool
) -> None:
    outcome = simulate(Costs(verify, always(0.5), growth=4.0), 16)
    assert outcome.taken_s <= 1.02 * outcome.best_s
    assert (outcome.drafting_s < outcome.plain_s) == wins


def test_without_noise_it_is_the_same_every_time_and_probes_are_rare() -> None:
    outcomes = [simulate(Costs(1.3, always(0.8), noise=0.0), 8) for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    assert 0 < outcomes[0].num_plain <= NUM_STEPS // 60 + 16


def test_each_change_is_logged_once_with_the_figures(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nanorunner"):
        simulate(Costs(1.5, then(0.9, 0.0), noise=0.0), 8)
    (message,) = [record.getMessage() for record in caplog.records]
    found = re.fullmatch(
        r"speculation for batches of 5 to 8: off; a request had ([\d.]+) ids/s with 4 drafts, "
        r"100\.0 without",
        message,
    )
    assert found is not None
    assert 66 < float(found[1]) < 100, "what it has come down to since the drop"


def test_a_near_tie_is_not_a_reason_to_change_all_the_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "nanorunner"):
        for seed in range(4):
            simulate(Costs(1.9375, always(0.5)), 8, seed=seed)
    assert len(caplog.records) <= 4 * 6


def feed(controller: DraftController, clock: SimulatedClock, seconds: float, **step: int) -> None:
    clock.now_s += seconds
    controller.step_read(**step)


class Heard(DraftController):
    """Keeps what it observes."""

    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__(K, clock)
        self.heard: list[tuple[int, int, float, int]] = []

    def observe(self, num_decodes: int, query_len: int, seconds: float, num_new_ids: int) -> None:
        self.heard.append((num_decodes, query_len, round(seconds, 6), num_new_ids))
        super().observe(num_decodes, query_len, seconds, num_new_ids)


def test_only_the_time_between_two_pure_decode_steps_of_one_kind_counts() -> None:
    clock = SimulatedClock()
    controller = Heard(clock)
    steps = [(0, 0, 1), (1, 3, 1), (2, 3, 1), (3, 3, 5), (4, 3, 5), (5, 0, 5), (6, 3, 5), (7, 3, 5)]
    for step_id, num_decodes, query_len in steps:
        feed(
            controller,
            clock,
            1.0 + step_id,
            step_id=step_id,
            num_decodes=num_decodes,
            query_len=query_len,
            num_new_ids=num_decodes,
        )
    assert controller.heard == [(3, 1, 3.0, 3), (3, 5, 5.0, 3), (3, 5, 8.0, 3)]


def test_a_pause_of_the_caller_decides_nothing() -> None:
    clock = SimulatedClock()
    controller = DraftController(K, clock)
    num_plain = 0
    for step in range(400):
        query_len = controller.query_len(1)
        num_plain += query_len == 1
        # drafts take as long and bring twice the ids; whoever reads the ids takes a long break
        pause_s = 60.0 if step in (100, 101, 300) else 0.0
        feed(
            controller,
            clock,
            PLAIN_S + pause_s,
            step_id=step,
            num_decodes=1,
            query_len=query_len,
            num_new_ids=2 if query_len > 1 else 1,
        )
    assert num_plain <= 12, "more than the first probe"


def test_a_step_whose_requests_had_all_ended_is_no_measurement() -> None:
    controller = DraftController(K)
    for _ in range(200):
        controller.observe(2, controller.query_len(2), 0.01, 0)
    assert controller.query_len(2) == 1 + K


def test_probes_end_even_if_no_step_is_ever_measured() -> None:
    clock = SimulatedClock()
    controller = DraftController(K, clock)
    for step in range(40):
        feed(
            controller,
            clock,
            PLAIN_S,
            step_id=step,
            num_decodes=4,
            query_len=1 + K,
            num_new_ids=9,
        )
    # from here on each step has prompts in it
    asked = [controller.query_len(4) for _ in range(2000)]
    assert 0 < asked[:250].count(1) <= 130
    assert set(asked[257:]) == {1}  # nothing is measured: no drafts until something is


@pytest.mark.parametrize("every", [1, 2])
def test_without_two_pure_decode_steps_in_turn_there_are_no_drafts_for_long(every: int) -> None:
    """Prompts in every step, or in every second one: what drafts bring is never seen."""
    clock = SimulatedClock()
    controller = DraftController(K, clock)
    num_drafting = 0
    for step in range(NUM_STEPS):
        query_len = controller.query_len(8)
        num_drafting += query_len > 1
        clock.now_s += PLAIN_S
        controller.step_read(step, 8 if step % every else 0, query_len, 8)
    assert num_drafting <= 256
    for step in range(NUM_STEPS, NUM_STEPS + 20):  # the prompts have ended
        query_len = controller.query_len(8)
        clock.now_s += PLAIN_S
        controller.step_read(step, 8, query_len, 8)
    assert controller.query_len(8) > 1


def test_a_new_batch_size_begins_as_the_nearest_one_does() -> None:
    controller = DraftController(K)
    for _ in range(300):
        query_len = controller.query_len(64)
        controller.observe(64, query_len, 0.03 if query_len > 1 else 0.01, 64)
    assert controller.query_len(64) == 1
    assert controller.query_len(100) == 1
    assert controller.query_len(1) == 1


def test_no_drafts_need_no_controller() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens 0"):
        DraftController(0)
