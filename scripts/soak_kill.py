"""Kill a real engine's ranks at every moment of its life, and check what the others do.

    python scripts/soak_kill.py [--trials 100] [--tp 2|4|8] [--json benchmarks/soak_kill.json]

One trial: start a program that runs a small random model, wait until it is in the chosen phase,
kill -9 rank 0, another rank or the whole process group. Without --tp it has 2 ranks, and 3 where
rank 2 is killed; with --tp the last rank is killed in its place. A trial is good when, within
5 s, rank 0 raises RankDied naming the victim and SIGKILL (or, where rank 0 was killed, every rank
has gone); when the same program then starts a second engine and gets its answer; and when no
process and no name in /dev/shm is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nanorunner.workshop.leftovers import marked_pids, rank_pid, shared_names, wait_until  # noqa: E402

PHASES = ("spawn", "load", "capture", "prefill", "decode", "idle")
VICTIMS = (1, 0, "last", "group")
LIMIT_S = 5.0  # bar: detection by rank 0, or the end of all ranks; --limit on a busy machine
START_LIMIT_S = 60.0  # a rank: on few cores they import one after the other
END_LIMIT_S = 50.0  # a rank, of a program that has said its last word
TAG = "NANORUNNER_SOAK_TAG"
STAGE_OF_PHASE = {"load": "load_model", "capture": "capture"}
LOAD_MODEL = "smollm2-135m"  # takes long enough to load that the kill comes in the middle
SMALL_MODEL, SMALL_MODEL_RANKS = "tiny-llama", 4  # which is also how many query heads it has


def main() -> None:
    """Run the trials; exit with 1 when one of them was not good."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="the bar")
    parser.add_argument(
        "--model",
        help=f"a preset, run with random weights; default: {SMALL_MODEL}, for more than "
        f"{SMALL_MODEL_RANKS} ranks {LOAD_MODEL}",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--drive", metavar="PHASE", help="internal: be the program that is killed")
    parser.add_argument(
        "--tp", type=int, help="ranks of every program; default: 2, or 3 if it must"
    )
    options = parser.parse_args()
    if options.tp is not None and options.tp < 2:
        parser.error(f"tp {options.tp}: there is no other rank to kill; use 2 or more")
    if options.model is None:
        is_small = options.tp is None or options.tp <= SMALL_MODEL_RANKS
        options.model = SMALL_MODEL if is_small else LOAD_MODEL
    if options.drive:
        drive(options.drive, options.tp, options.model)
        return
    delays = random.Random(options.seed)
    trials = []
    for number in range(options.trials):
        phase = PHASES[number % len(PHASES)]
        # six trials have every phase and every victim, twenty-four every pair of them
        victim = VICTIMS[(number + number // len(PHASES)) % len(VICTIMS)]
        delay_s = delays.uniform(0.0, 2.0 if phase == "spawn" else 0.4)
        trial = Trial(phase, victim, delay_s, options)
        result = trial.run()
        trials.append(result)
        print(
            f"{number + 1:4} {phase:8} {trial.victim!s:6} {result['seconds']:6.2f} s  "
            f"{result['problem'] or 'good'}",
            flush=True,
        )
    report = summarise(trials, options)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: value for key, value in report.items() if key != "trials"}))
    sys.exit(0 if report["good"] == len(trials) else 1)


def summarise(trials: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the report: the figures, the versions, every trial."""
    import torch

    seconds = [trial["seconds"] for trial in trials]
    return {
        "soak": "kill",
        "good": sum(not trial["problem"] for trial in trials),
        "trials_run": len(trials),
        "seconds_median": round(statistics.median(seconds), 3),
        "seconds_max": max(seconds),
        "limit_s": options.limit,
        "model": options.model,
        "tp": options.tp,
        "seed": options.seed,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "trials": trials,
    }


class Trial:
    """One program, one kill."""

    def __init__(
        self, phase: str, victim: int | str, delay_s: float, options: argparse.Namespace
    ) -> None:
        self.phase, self.delay_s = phase, delay_s
        self.limit_s: float = options.limit
        self.tp: int = options.tp or (3 if victim == "last" else 2)
        self.victim = self.tp - 1 if victim == "last" else victim
        self.start_limit_s, self.end_limit_s = START_LIMIT_S * self.tp, END_LIMIT_S * self.tp
        self.tag = uuid.uuid4().hex
        self.names_before = shared_names()
        self.command = [sys.executable, __file__, "--drive", phase, "--tp", str(self.tp)]
        self.command += ["--model", options.model]

    def run(self) -> dict[str, Any]:
        """Run the trial and return its row; `problem` is empty when it was good."""
        self.program = subprocess.Popen(
            self.command,
            env={**os.environ, TAG: self.tag},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        problem, seconds, victim_pid = "", -1.0, 0
        try:
            self._read_until(self.phase)
            if self.phase == "spawn":
                wait_until(lambda: self._rank_pid(1), self.start_limit_s, "rank 1 to be started")
            time.sleep(self.delay_s)
            victim_pid = self._victim_pid()
            start = time.monotonic()
            if self.victim == "group":
                os.killpg(self.program.pid, signal.SIGKILL)
            else:
                os.kill(victim_pid, signal.SIGKILL)
            if self.victim in (0, "group"):
                wait_until(lambda: not self._pids(), self.limit_s, "all ranks to leave")
                seconds = time.monotonic() - start
            else:
                died = self._read_until("died")
                seconds = died["at"] - start
                self._check_report(died, victim_pid, seconds)
                self._read_until("restarted")
                self.program.communicate(timeout=self.end_limit_s)
            self._check_nothing_left()
        except (AssertionError, TimeoutError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        finally:
            for pid in self._pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.program.communicate(timeout=self.end_limit_s)
        return {
            "phase": self.phase,
            "victim": self.victim,
            "tp": self.tp,
            "delay_s": round(self.delay_s, 3),
            "seconds": round(seconds, 3),
            "problem": problem,
        }

    def _check_report(self, died: dict[str, Any], pid: int, seconds: float) -> None:
        assert (died["rank"], died["pid"]) == (self.victim, pid), f"it blames {died}"
        assert "SIGKILL" in died["cause"], f"it says {died['cause']!r}"
        assert seconds < self.limit_s, f"it took {seconds:.1f} s"

    def _check_nothing_left(self) -> None:
        wait_until(lambda: not self._pids(), self.limit_s, "every process to leave")
        new = shared_names() - self.names_before
        assert not new, f"left in /dev/shm: {sorted(new)}"

    def _read_until(self, what: str) -> dict[str, Any]:
        """Read the program's lines up to the one that says `what`."""
        assert self.program.stdout is not None
        for line in self.program.stdout:
            if line.startswith("{"):
                said: dict[str, Any] = json.loads(line)
                if said["what"] == what:
                    return said
                assert said["what"] != "failed", f"the program failed: {said['error']}"
        _, errors = self.program.communicate(timeout=self.end_limit_s)
        raise AssertionError(f"the program ended before {what!r}: {errors[-2000:]}")

    def _victim_pid(self) -> int:
        if self.victim in (0, "group"):
            return self.program.pid
        assert isinstance(self.victim, int)
        rank = self.victim
        wait_until(lambda: self._rank_pid(rank), self.start_limit_s, f"rank {rank} to be started")
        return self._rank_pid(rank)

    def _rank_pid(self, rank: int) -> int:
        """Return the process that is this rank now, 0 when there is none."""
        return rank_pid(self._pids(), rank)

    def _pids(self) -> set[int]:
        """Return the live processes that this trial has started, at any depth."""
        return marked_pids(TAG, self.tag)


def say(what: str, **more: object) -> None:
    """Tell the trial where this program is."""
    print(json.dumps({"what": what, **more}), flush=True)


def drive(phase: str, tp: int, model: str) -> None:
    """Be the program that is killed: stay in the phase, report the death, start again, end."""
    from nanorunner.errors import RankDied

    try:
        try:
            llm = _start(phase, tp, model)
            _stay(llm, phase)
        except RankDied as error:
            at = time.monotonic()
            say("died", at=at, rank=error.rank, pid=error.pid, cause=error.cause)
            if phase not in ("spawn", "load", "capture"):
                llm.close()
        with _start("", tp, model) as second:
            _complete(second, num_prompts=2, prompt_len=4, max_tokens=4)
            say("restarted")
    except Exception as error:
        say("failed", error=repr(error))
        raise


def _start(phase: str, tp: int, model: str) -> Any:
    """Return an LLM, having said when it comes to the phase; capture is repeated until killed."""
    from nanorunner import LLM
    from nanorunner.launch import Ranks

    call_all = Ranks.call_all

    def staying_call_all(self: Ranks, method: str, *args: Any) -> list[Any]:
        if method == STAGE_OF_PHASE.get(phase):
            say(phase)
            while method == "capture":
                call_all(self, method, *args)
        return call_all(self, method, *args)

    if phase == "spawn":
        say(phase)
    Ranks.call_all = staying_call_all  # type: ignore[method-assign]
    if phase == "load":
        model = LOAD_MODEL
    try:
        return LLM(
            model, load_format="dummy", skip_tokenizer_init=True, device="cpu", tp=tp, num_blocks=32
        )
    finally:
        Ranks.call_all = call_all  # type: ignore[method-assign]


def _stay(llm: Any, phase: str) -> None:
    """Do what the phase is about until an error ends it."""
    say(phase)
    while True:
        if phase == "prefill":
            _complete(llm, num_prompts=4, prompt_len=1000, max_tokens=1)
        elif phase == "decode":
            _complete(llm, num_prompts=8, prompt_len=4, max_tokens=200)
        else:
            time.sleep(1.0)
            _complete(llm, num_prompts=1, prompt_len=4, max_tokens=1)


def _complete(llm: Any, num_prompts: int, prompt_len: int, max_tokens: int) -> None:
    from nanorunner import SamplingParams

    ids = random.Random(time.monotonic_ns())
    prompts = [
        {"prompt_token_ids": [ids.randrange(3, 500) for _ in range(prompt_len)]}
        for _ in range(num_prompts)
    ]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == max_tokens for output in outputs)


if __name__ == "__main__":
    main()
