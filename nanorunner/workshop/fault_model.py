"""Faults that need a model: a rank killed in an all-reduce, a slow rank, a wrong shard."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path

from nanorunner.check_shards import wrong_shards
from nanorunner.errors import RankDied
from nanorunner.sampling_params import SamplingParams
from nanorunner.workshop.fault_lab import Lab
from nanorunner.workshop.fault_processes import DETECTION_S, START_S, VICTIM, WORK_S
from nanorunner.workshop.leftovers import wait_until
from nanorunner.workshop.open_engine import OpenEngine

PROMPT = list(range(3, 35))
HANG_S = 60.0  # far longer than the lab waits
KILL_AFTER_S = 0.3  # rank 1 is in the all-reduce; by then rank 0 waits in it, too
SLOW_S = 0.05
NUM_SLOW_STEPS = 8
NUM_COMPARED = 12
LAYER = 1
# Partial sums of float32 in another order: logits of the toy differ by less than this.
TOLERANCE = 1e-4


def kill_busy(lab: Lab) -> None:
    """SIGKILL rank 1 inside an all-reduce in which rank 0 waits for it."""
    opened = lab.start_model(2)
    pid = lab.pid_of_rank(VICTIM)
    with tempfile.TemporaryDirectory(prefix="nanorunner-lab-") as folder:
        sign = Path(folder) / "inside"  # rank 1 makes it
        opened.ranks.call_all("sabotage", VICTIM, "hang", HANG_S, str(sign))
        _kill_inside(lab, opened, pid, sign)


def _kill_inside(lab: Lab, opened: OpenEngine, pid: int, sign: Path) -> None:
    """Run a step, and kill rank 1 a while after its sign that it is inside the all-reduce."""
    inside_after: list[float] = []  # seconds from here to the sign
    problems: list[str] = []
    killed_at: list[float] = []
    is_over = threading.Event()

    def kill() -> None:
        try:
            seconds = wait_until(
                lambda: sign.exists() or is_over.is_set(), START_S, "rank 1's sign"
            )
            inside_after.append(seconds)
        except TimeoutError as error:
            problems.append(str(error))  # it is killed all the same: rank 0 waits for it
        if not is_over.wait(KILL_AFTER_S):
            killed_at.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    lab.report.did("rank 1 hangs in the next all-reduce; rank 0 begins a step and waits there too")
    killer.start()
    try:
        _generate(opened, num_tokens=1)
    except RankDied as died:
        seconds = time.monotonic() - (killed_at[0] if killed_at else time.monotonic())
        lab.report.must(bool(killed_at), "rank 1 died before it was killed")
        lab.report.must(not problems, f"rank 1 died outside the all-reduce: {problems}")
        for inside in inside_after:
            lab.report.saw(
                f"rank 1 said that it is in the all-reduce {inside:.2f} s after the call"
            )
        lab.report.did(f"sent SIGKILL to rank 1 (pid {pid}) {KILL_AFTER_S} s later")
        lab.report.saw(f"RankDied: {str(died).partition(chr(10))[0]}")
        lab.report.took(seconds, DETECTION_S, "from the kill to the report")
        lab.report.must((died.rank, died.pid) == (VICTIM, pid), "another rank is blamed")
        lab.report.must("SIGKILL" in died.cause, "the signal is not named")
        lab.report.must(died.method == "step", "the call is not named")
    else:
        lab.report.must(False, "no error came")
    finally:
        is_over.set()
        killer.join(WORK_S)


def slow(lab: Lab) -> None:
    """Rank 1 sleeps before each ack. No error: everybody waits for the slowest rank."""
    opened = lab.start_model(2)
    _generate(opened, NUM_SLOW_STEPS)
    normal_s = _seconds_a_step(opened, start=time.monotonic())
    start = time.monotonic()  # before the call: its answer sent, rank 1 sleeps for the next frame
    opened.ranks.call_all("sabotage", VICTIM, "slow", SLOW_S)
    lab.report.did(f"rank 1 sleeps {SLOW_S * 1e3:g} ms before it reads, and acks, a frame")
    slow_s = _seconds_a_step(opened, start)
    opened.ranks.call_all("sabotage", VICTIM, "slow", 0.0)
    lab.report.saw(f"before: {normal_s * 1e3:.1f} ms a step, {1 / normal_s:.0f} tokens/s")
    lab.report.saw(
        f"predicted: at least {SLOW_S * 1e3:g} ms a step, at most {1 / SLOW_S:.0f} tokens/s, for "
        f"the all-reduces wait for the slowest rank"
    )
    lab.report.saw(f"measured: {slow_s * 1e3:.1f} ms a step, {1 / slow_s:.0f} tokens/s; no error")
    lab.report.took(slow_s, WORK_S, "a step")
    lab.report.must(slow_s >= SLOW_S, "steps are quicker than the slowest rank")
    lab.report.must(not lab.log, f"a warning came: {lab.log[:1]}")


def bad_shard(lab: Lab) -> None:
    """Two KV heads of one layer are swapped on rank 1, as by a wrong offset in a loader."""
    alone = lab.start_model(1)
    ids, scores = _generate(alone, NUM_COMPARED)
    two = lab.start_model(2)
    good_ids, good_scores = _generate(two, NUM_COMPARED)
    lab.report.saw(f"good weights: tp 1 and tp 2 differ by {_distance(scores, good_scores):.1e}")
    lab.report.must(good_ids == ids, "tp 2 is wrong before anything was done")
    lab.report.must(_distance(scores, good_scores) < TOLERANCE, "tp 2 differs from tp 1")

    two.ranks.call_all("sabotage", VICTIM, "swap", float(LAYER))
    lab.report.did(f"swapped rank 1's two KV heads in layer {LAYER}")
    start = time.monotonic()
    bad_ids, bad_scores = _generate(two, NUM_COMPARED)
    lab.report.saw(f"tp 1 wrote {ids}")
    lab.report.saw(f"tp 2 wrote {bad_ids}: no error, ids as good as any")
    distance = _distance(scores, bad_scores)
    lab.report.saw(f"tp equality: log-probabilities differ by {distance:.1e}, so a shard is wrong")
    lab.report.must(distance > TOLERANCE, "the comparison did not notice")
    wrong = wrong_shards(two.ranks.call_all("checksums"), two.ranks.config)
    names = [sentence.partition(":")[0] for sentence in wrong]
    lab.report.saw(f"checksums against the shard map: {', '.join(names) or 'all equal'}")
    lab.report.saw(f"with --check-ranks the start would end with: {'; '.join(wrong)}")
    lab.report.took(time.monotonic() - start, WORK_S, "to run, compare and find it")
    expected = [f"rank {VICTIM}, layers.{LAYER}.qkv"]
    lab.report.must(names == expected, f"the checksums should name {expected}")
    tensors = all(f"{name}_proj.weight" in "".join(wrong) for name in "kv")
    lab.report.must(tensors, "they should name K's and V's tensors")


def _generate(opened: OpenEngine, num_tokens: int) -> tuple[list[int], list[float]]:
    """Return a greedy completion of PROMPT and the ids' log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
    opened.engine.add_request(PROMPT, params)
    ids: list[int] = []
    scores: list[float] = []
    while opened.engine.has_unfinished():
        for update in opened.engine.step():
            ids += update.new_ids
            extras = update.extras
            assert extras is not None and extras.logprobs is not None  # noqa: PT018
            scores.append(float(extras.logprobs.logprobs[0, 0]))
    return ids, scores


def _seconds_a_step(opened: OpenEngine, start: float) -> float:
    """Return the mean time of a step of one request, from `start` to its last id.

    Rank 1 sleeps once for each of its frames. All those sleeps lie behind `start` only if that was
    before the answer to whatever rank 1 did last; else this thread may come to the clock so late
    that a sleep is over, and the mean could be less than a sleep.
    """
    params = SamplingParams(temperature=0.0, max_tokens=NUM_SLOW_STEPS, ignore_eos=True)
    opened.engine.add_request(PROMPT, params)
    num_steps = 0
    while opened.engine.has_unfinished():
        num_steps += len(opened.engine.step())
    return (time.monotonic() - start) / num_steps


def _distance(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))
