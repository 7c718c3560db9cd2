"""Runner v2 with an oracle for a proposer: bench_speculation.py tells it the drafts beforehand.

    teach({prompt: drafts})      before the requests come
    a request comes              its drafts, all of them, go into the token table behind its prompt

    token table   p p p p d d d D d d d ...      d right, D wrong: as often as it was told
                          ^ total_len

Drafts lie in the token table from total_len on, wherever that has come to. So a step finds its
drafts there without anything being launched: where one was wrong the accepted id replaces it, and
those behind it are as right as before, because what comes out is what plain decoding gives.

Every rank imports this file by its name and does the same.
"""

from __future__ import annotations

from typing import Any

from nanorunner.workers import runner_factory
from nanorunner.workers.distributed import Group
from nanorunner.workers.messages import (
    METHODS,
    METHODS_WITH_REPLY,
    NewRequest,
    Runner,
    RunnerConfig,
)
from nanorunner.workers.ngram_proposer import NgramProposer
from nanorunner.workers.proposer import Leaders
from nanorunner.workers.request_states import RequestStates

ORACLE_METHODS = METHODS | {"teach"}
ORACLE_METHODS_WITH_REPLY = METHODS_WITH_REPLY | {"teach"}
ID_BYTES = 4


class OracleProposer(NgramProposer):
    """Has no work left at the end of a step."""

    def propose(self, leaders: Leaders) -> None:
        """The drafts lie there already."""


class Oracle:
    """What one rank knows of the requests that will come, and puts into its token table."""

    def __init__(self, states: RequestStates) -> None:
        self._drafts: dict[bytes, bytes] = {}  # prompt -> what follows it, both int32
        self._states = states
        self._add = states.add

    def teach(self, drafts: dict[bytes, bytes]) -> None:
        """Know these prompts' drafts and forget all others."""
        self._drafts = drafts

    def add(self, new: NewRequest) -> int:
        """As RequestStates.add, with the drafts behind the tokens that are known."""
        row = self._add(new)
        prompt_bytes = ID_BYTES * new.prompt_len
        drafts = self._drafts.get(new.token_ids[:prompt_bytes], b"")
        known_bytes = len(new.token_ids) - prompt_bytes  # of its output, after a preemption
        start = len(new.token_ids) // ID_BYTES
        self._states._token_ids.stage(row, start, drafts[known_bytes:])
        return row


def make_runner(config: RunnerConfig, rank: int, group: Group) -> Runner:
    """Return runner v2 of an engine with ngram's settings, whose drafts an Oracle has."""
    runner: Any = runner_factory.make_runner(config, rank, group)
    tables, speculation = runner.states.tables, config.speculation
    assert speculation is not None, "an engine that speculates"
    assert tables.num_drafts is not None, "its table has a number of drafts"
    oracle = Oracle(runner.states)
    runner.states.add = oracle.add
    runner.speculator.proposer = OracleProposer(speculation, tables)
    tables.num_drafts.fill_(speculation.num_tokens)  # every row, for good
    runner.teach = oracle.teach
    oracle_runner: Runner = runner
    return oracle_runner
