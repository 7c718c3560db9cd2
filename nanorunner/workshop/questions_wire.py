"""Two questions about the wire whose answers are found by trying: nobody has stored them.

They take a second, so they run only when they are answered.
"""

from __future__ import annotations

import subprocess
import sys

from nanorunner.workshop.question import Answer, Question, Setting
from nanorunner.workshop.sandbox_channel import POLICIES, Race, policy_channel, race

NUM_CALLS = 200
LETTERS = "abc"
OPTIONS = dict(zip(LETTERS, POLICIES, strict=True))
EVENT_PATIENCE_S = 1.0  # set() takes microseconds when it returns at all
START_PATIENCE_S = 20.0
EVENT_TEXT = (
    "Rank 2 waits for a multiprocessing.Event, idle, and is killed by SIGKILL. Does rank 0's "
    "event.set() return: yes or no?"
)
EVENT_HINT = "set() of that class waits until each sleeper has woken up. Can this one?"
ACK_TEXT = (
    f"The wire holds one frame. When may rank 0 overwrite it so that no call is ever lost: "
    f"{', '.join(f'{letter}) {policy}' for letter, policy in OPTIONS.items())}?"
)
ACK_HINT = "Whose copy would be torn if one rank were slower than the others?"


def when_to_overwrite(setting: Setting) -> Question:
    """Try each rule on a quick and a slow reader; the one that loses nothing is right."""
    results = {policy: race(policy_channel(policy), num_calls=NUM_CALLS) for policy in POLICIES}
    lost = {policy: _num_lost(races) for policy, races in results.items()}
    safe = [letter for letter, policy in OPTIONS.items() if lost[policy] == 0]
    told = "; ".join(f"{policy}: {number}" for policy, number in lost.items())
    # who waits for more cannot lose more: if the strictest rule lost calls, readers came too late
    if LETTERS[-1] not in safe:
        raise OSError(
            f"the experiment could not be made here: of {NUM_CALLS} calls were lost or torn "
            f"{told}; is the machine very busy?"
        )
    slips: dict[Answer, str] = {
        letter: f"Just tried with {NUM_CALLS} calls: {policy}, {lost[policy]} were lost or torn."
        for letter, policy in OPTIONS.items()
        if lost[policy]
    }
    return Question(
        text=ACK_TEXT,
        answer=safe[-1],  # the strictest; a laxer one may be lucky once
        hint=ACK_HINT,
        why=f"just tried with {NUM_CALLS} calls and two readers; lost or torn {told}",
        slips=slips,
        options=OPTIONS,
    )


def event_after_a_kill(setting: Setting) -> Question:
    """Kill a process that waits for an Event, and see whether set() returns."""
    returns = event_set_returns()
    return Question(
        text=EVENT_TEXT,
        answer="yes" if returns else "no",
        hint=EVENT_HINT,
        why=f"just tried: {'it returned' if returns else 'it did not'} within "
        f"{EVENT_PATIENCE_S:g} s; so workers/event.py uses a semaphore, whose post never waits",
    )


def event_set_returns() -> bool:
    """Return whether Event.set() came back after its waiter was killed (event_trap.py)."""
    program = subprocess.Popen(
        [sys.executable, "-m", "nanorunner.workshop.event_trap"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        if program.stdout.readline().strip() != "killed":
            raise OSError("the experiment could not be made here: no waiter was killed")
        program.wait(EVENT_PATIENCE_S)
    except subprocess.TimeoutExpired:
        return False
    finally:
        program.kill()
        program.wait(START_PATIENCE_S)
        if program.stdout is not None:
            program.stdout.close()
    return True


def _num_lost(races: list[Race]) -> int:
    return sum(result.num_lost(NUM_CALLS) + len(result.errors) for result in races)
