"""All-reduces over peer memory on GPUs: exact, unshaken by skew, and never waiting for ever.

NANORUNNER_SOAK_REPLAYS sets how often the skewed graph is replayed (16 all-reduces each time).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peer_runner
import pytest
from kernel_cases import RANK_COUNTS
from rank_harness import make_config, state

from nanorunner.errors import RankDied
from nanorunner.kernels.peer_ring import CALL_SHARES
from nanorunner.launch import Ranks

DETECTION_S = 5.0
SOAK_REPLAYS = int(os.environ.get("NANORUNNER_SOAK_REPLAYS", "100000"))
SECONDS_PER_REPLAY = 3e-3  # a limit: of 8 ranks mostly one spins before each of 16 calls

pytestmark = [pytest.mark.limit(300), pytest.mark.parametrize("tp", RANK_COUNTS)]


@contextmanager
def ranks_of(tp: int, **changes: Any) -> Iterator[Ranks]:
    settings = {"device": "cuda", "all_reduce": "peer", "start_timeout_s": 120.0}
    ranks = Ranks(
        make_config(tp, **(settings | changes)),
        "peer_runner:make_runner",
        methods=peer_runner.METHODS,
        methods_with_reply=peer_runner.WITH_REPLY,
    )
    try:
        yield ranks
    finally:
        ranks.close()


def test_every_form_gives_every_rank_the_bits_of_a_sum_in_rank_order(tp: int) -> None:
    with ranks_of(tp) as ranks:
        assert ranks.call_all("compare") == [[]] * tp


def test_the_fused_form_is_the_sum_followed_by_add_rms_norm_equal_on_all_ranks(tp: int) -> None:
    with ranks_of(tp) as ranks:
        results = ranks.call_all("compare_norms")
        assert [problems for problems, _ in results] == [[]] * tp
        sums = results[0][1]
        assert len(sums) > 0
        assert [its_sums for _, its_sums in results] == [sums] * tp


def test_nccl_alone_is_a_choice_and_auto_takes_peer_memory(tp: int) -> None:
    for choice, has_peers in (("nccl", False), ("auto", True)):
        with ranks_of(tp, all_reduce=choice) as ranks:
            assert [forms is not None for forms in ranks.call_all("forms")] == [has_peers] * tp
            assert ranks.call("meet_in_graph", 0, 0.0) == tp


def test_a_late_rank_is_waited_for(tp: int) -> None:
    with ranks_of(tp) as ranks:
        for late_rank in (0, tp - 1, 0):
            assert ranks.call("meet_in_graph", late_rank, 1.0) == tp


def test_a_killed_rank_frees_rank_0_and_a_new_engine_works_in_the_same_process(tp: int) -> None:
    victim = tp - 1
    for _ in range(3):
        with ranks_of(tp) as ranks:
            assert ranks.call("meet_in_graph", victim, 0.0) == tp
            pid = ranks.call_all("pid")[victim]
            threading.Timer(1.0, os.kill, [pid, signal.SIGKILL]).start()
            start = time.monotonic()
            with pytest.raises(RankDied, match=rf"rank {victim} .* was killed by SIGKILL"):
                ranks.call("meet_in_graph", victim, 600.0)
            assert time.monotonic() - start < 1.0 + DETECTION_S
        assert state(pid) == ""


def test_a_stopped_rank_ends_the_engine_after_the_timeout(tp: int) -> None:
    victim = tp - 1
    with ranks_of(tp, step_timeout_s=3.0) as ranks:
        ranks.call_all("compile")  # which may take longer than a step may
        ranks.call("meet_in_graph", victim, 0.0)
        os.kill(ranks.call_all("pid")[victim], signal.SIGSTOP)
        words = rf"rank {victim} .*did not finish in 3 s \(state T\)"
        with pytest.raises(RankDied, match=words):
            ranks.call("meet_in_graph", victim, 0.0)


def test_a_rank_that_waits_in_vain_gives_up_by_itself_and_says_so(tp: int) -> None:
    with ranks_of(tp) as ranks:
        result = ranks.call_all("wait_in_vain", 1.0)[0]
        assert 0.9 < result["waited"] < 3.0  # the second call does not wait again
        assert "waited in vain" in result["error"]


@pytest.mark.limit(120 + SOAK_REPLAYS * SECONDS_PER_REPLAY)
def test_skewed_replays_of_a_graph_are_all_exact(tp: int) -> None:
    limit_s = 100 + SOAK_REPLAYS * SECONDS_PER_REPLAY
    with ranks_of(tp, start_timeout_s=limit_s) as ranks:
        results = ranks.call_all("soak", SOAK_REPLAYS)
        print(results)
        for result in results:
            assert result["errors"] == {}
            assert result["replays"] == SOAK_REPLAYS + 1  # one before the capture
            assert result["calls"] == 16 * result["replays"]
    assert CALL_SHARES > 128, "a launch has at most as many programs"
