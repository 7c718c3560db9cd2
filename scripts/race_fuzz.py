"""Look for races in runner v2: a hostile asynchronous run, then the same steps one at a time.

    python scripts/race_fuzz.py --steps 20000 --tp 2|4|8 [--seed S] [--model tiny-qwen3]
                                [--speculative ngram|draft]

First run: random requests come, end, are aborted and preempted (a small pool), prompts in chunks
and from the prefix cache, sampling of every kind, `depth` steps in flight, and random delays on
every rank: sleeps, and on GPUs spin kernels on either stream (fuzz_runner.py). Blocks and rows are
counted after each step. Second run: fresh ranks get the recorded StepInputs, each followed by a
device synchronisation. Whatever a step read too early or too late shows as a difference: every
output, and all of KV cache and state tables at the end, must be the same bits.

With --speculative the steps verify drafts, or do not, as chance says (fuzz_drafting.py): what comes
back includes which drafts were accepted, and the memory compared the drafts themselves.

A preset with fewer query heads than ranks gets twice as many, or more; "num_heads" says how many.

--plant runs a fault instead, which must be found. The last line is JSON; the exit code is 0 when
nothing was found and, in a run of 1,000 steps or more, every kind of event occurred.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanorunner.config import make_config
from nanorunner.engine import Engine
from nanorunner.flags import Parser
from nanorunner.launch import Ranks
from nanorunner.presets import load_preset, preset_for_ranks, preset_names
from nanorunner.resolve import resolve
from nanorunner.sampling_params import SamplingParams
from nanorunner.scheduler import Scheduler
from nanorunner.speculative import METHODS, OFF
from nanorunner.workers.messages import RunnerConfig, StepHandle, StepOutput

if TYPE_CHECKING:
    from scripts import fuzz_drafting
    from scripts.fuzz_runner import FUZZ_METHODS, FUZZ_METHODS_WITH_REPLY
else:  # a script's own folder is where Python looks first; it is no package
    import fuzz_drafting
    from fuzz_runner import FUZZ_METHODS, FUZZ_METHODS_WITH_REPLY

PLANTS = {
    "": "make_delayed",
    "token": "make_lost_token",
    "copy": "make_unordered_copy",
    "drafts": "make_late_drafts",
}
SMALL: dict[str, Any] = {
    "runner": "v2",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 700,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,  # most prompts come in chunks
    "num_blocks": 7,  # some requests need three: they preempt each other
}
MOST_REQUESTS = 14
LONG_RUN = 1000  # steps in which every event is sure to occur
SHARED_LENS = (256, 300, 520)  # beginnings that prompts have in common
EVENTS = (
    "added",
    "aborted",
    "finished",
    "stopped",
    "preemptions",
    "cached_tokens",
    "mixed_steps",
    "dropped_ids",
)
# Sampling of every kind; requests take them at random.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 1.0},
    {"temperature": 0.7, "seed": 2**63 + 7},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.9, "min_tokens": 3},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.8, "seed": -5},
    {"temperature": 1.0, "min_p": 0.05, "logprobs": 0},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "top_k": 100},
    {"temperature": 0.9, "logit_bias": {5: 3.0, 6: -100.0}, "bad_words": ((7,), (8, 9))},
    {"temperature": 1.0, "prompt_logprobs": 1},
]


class Recorder:
    """Stands between engine and ranks: keeps what every step was told and what it brought."""

    def __init__(self, ranks: Ranks) -> None:
        self.wires: list[tuple[Any, ...]] = []
        self.outputs: list[Any] = []
        self._ranks = ranks

    def call(self, method: str, *args: Any) -> Any:
        """As Ranks.call."""
        if method == "step":
            self.wires.append(args[0])
        return self._ranks.call(method, *args)

    def result(self, handle: StepHandle) -> StepOutput:
        """As Ranks.result; steps are read in the order in which they were sent."""
        output = self._ranks.result(handle)
        self.outputs.append(freeze(output))
        return output


def freeze(value: Any) -> Any:
    """Return a value whose == compares every bit of every array in it."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: freeze(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(freeze(item) for item in value)
    return value


class Traffic:
    """Random requests and random ends; what happened is counted in `events`."""

    def __init__(
        self, engine: Engine, seed: int, vocab_size: int, kinds: list[dict[str, Any]]
    ) -> None:
        self.events: Counter[str] = Counter()
        self._kinds = kinds
        self._engine = engine
        self._random = Random(seed)
        self._vocab_size = vocab_size
        self._num_ids: dict[int, int] = {}  # of every unfinished request
        self._shared = [self._ids(length) for length in SHARED_LENS]

    def turn(self) -> None:
        """Perhaps add, abort or finish some requests, then step; ValueError is the engine's own."""
        random = self._random
        if random.random() < 0.25 or not self._num_ids:
            kind = random.choice(("short", "shared", *["outgrows its block"] * 2))
            for _ in range(random.randint(1, 6)):
                if len(self._num_ids) < MOST_REQUESTS:
                    self._add(kind)
        if self._num_ids and random.random() < 0.015:
            self._end(lambda request_id: self._engine.abort(request_id), "aborted")
        if self._num_ids and random.random() < 0.01:
            kept = self._num_ids
            self._end(lambda i: self._engine.finish(i, kept[i], "stop"), "finished")
        self.step()

    def step(self) -> None:
        """Step, and see who has ended."""
        if not self._engine.has_unfinished():
            return
        for update in self._engine.step():
            if update.request_id not in self._num_ids:
                continue
            self._num_ids[update.request_id] += len(update.new_ids)
            if update.finish_reason is not None:
                self.events[f"ended: {update.finish_reason.partition(':')[0]}"] += 1
                self.events["stopped"] += update.finish_reason == "stop"
                del self._num_ids[update.request_id]
        self._engine.scheduler.check_integrity()

    def _add(self, kind: str) -> None:
        random = self._random
        prompt = self._ids(random.choice((1, 5, 30, 90, 255, 257)))
        max_tokens = random.choice((3, 10, 40))
        if kind == "shared":
            prompt = random.choice(self._shared) + prompt[:100]
        elif kind == "outgrows its block":  # later than admission looks ahead
            prompt, max_tokens = self._ids(random.randint(205, 222)), 90
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=random.random() < 0.4,
            **random.choice(self._kinds),
        )
        self._num_ids[self._engine.add_request(prompt, params)] = 0
        self.events["added"] += 1

    def _end(self, how: Callable[[int], bool], event: str) -> None:
        request_id = self._random.choice(list(self._num_ids))
        self.events[event] += how(request_id)
        del self._num_ids[request_id]

    def _ids(self, length: int) -> list[int]:
        return [self._random.randrange(3, self._vocab_size) for _ in range(length)]


def start(config: RunnerConfig, runner: str, num_blocks: int) -> Ranks:
    """Return ranks that are ready for their first step."""
    ranks = Ranks(
        config,
        f"fuzz_runner:{runner}",
        methods=FUZZ_METHODS,
        methods_with_reply=FUZZ_METHODS_WITH_REPLY,
    )
    try:
        for stage in ("load_model", "profile"):
            ranks.call_all(stage)
        ranks.call_all("allocate_kv", num_blocks)
        ranks.call_all("capture")
    except BaseException:
        ranks.close()
        raise
    return ranks


def record(
    config: RunnerConfig, seed: int, num_steps: int, plant: str
) -> tuple[Recorder, list[str], Counter[str]]:
    """Run the traffic; return what was recorded, each rank's digest, and what happened."""
    vocab_size, num_blocks = config.model.vocab_size, config.num_blocks
    assert num_blocks is not None, "the pool is small on purpose"
    controller, kinds = None, KINDS
    if config.speculation is not None:
        controller = fuzz_drafting.RandomDrafting(config.speculation.num_tokens, seed)
        kinds = KINDS + fuzz_drafting.FEW_IDS
    ranks = start(config, PLANTS[plant], num_blocks)
    try:
        recorder = Recorder(ranks)
        scheduler = Scheduler(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            num_blocks=num_blocks,
            vocab_size=vocab_size,
            eos_token_ids=frozenset(range(3, vocab_size, 150)),
            depth=config.async_depth,
            send_sampled_ids=False,
            num_speculative_tokens=config.max_query_len - 1,
            controller=controller,
        )
        engine = Engine(
            scheduler, recorder.call, vocab_size=vocab_size, seed=seed, result=recorder.result
        )
        traffic = Traffic(engine, seed, vocab_size, kinds)
        while len(recorder.wires) < num_steps:
            traffic.turn()
        engine.abort_all()
        while engine.has_unfinished():
            traffic.step()
        for name in ("preemptions", "cached_tokens", "mixed_steps", "dropped_ids"):
            traffic.events[name] = getattr(engine.stats, name)
        if controller is not None:
            traffic.events.update(fuzz_drafting.events_of(engine.stats, controller))
        return recorder, ranks.call_all("digest"), traffic.events
    finally:
        ranks.close()


def replay(config: RunnerConfig, recorder: Recorder) -> tuple[list[str], list[str]]:
    """Run the recorded steps one at a time; return the differences and each rank's digest."""
    assert config.num_blocks is not None, "as recorded"
    ranks = start(config, "make_synced", config.num_blocks)
    differences: list[str] = []
    try:
        for step, (wire, before) in enumerate(zip(recorder.wires, recorder.outputs, strict=True)):
            now = freeze(ranks.result(ranks.call("step", wire)))
            if now != before:
                differences.append(f"step {step}: {_first_difference(before, now)}")
        return differences, ranks.call_all("digest")
    finally:
        ranks.close()


def _first_difference(before: Any, now: Any) -> str:
    if isinstance(before, tuple) and isinstance(now, tuple) and len(before) == len(now):
        for place, (one, other) in enumerate(zip(before, now, strict=True)):
            if one != other:
                return f"[{place}]{_first_difference(one, other)}"
    return f" {str(before)[:120]} then {str(now)[:120]}"


def with_enough_heads(model: str, tp: int, folder: str) -> str:
    """Return the model; of a preset too narrow for tp ranks, `folder` with a wider one's config."""
    if model not in preset_names() or tp <= load_preset(model)["num_attention_heads"]:
        return model
    fields = preset_for_ranks(model, tp)
    Path(folder, "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Record, replay and compare; return the report."""
    with tempfile.TemporaryDirectory() as folder:
        return _run(args, with_enough_heads(args.model, args.tp, folder))


def _run(args: argparse.Namespace, model: str) -> dict[str, Any]:
    settings = SMALL | {"model": model, "tp": args.tp, "device": args.device}
    settings |= {"dtype": args.dtype, "seed": args.seed, "async_depth": args.depth}
    # the fewest: a freed row is taken again at once
    settings |= {"max_num_reqs": max(args.depth, 2) * SMALL["max_num_seqs"]}
    settings |= fuzz_drafting.settings_of(args.speculative, args.draft_model, model)
    config = resolve(make_config(settings | {"enforce_eager": args.enforce_eager})).runner_config
    report: dict[str, Any] = {"fuzz": "race", "good": False} | vars(args)
    report |= {"num_heads": config.model.num_heads}
    report |= {"device": config.device, "dtype": config.dtype, "torch": torch.__version__}
    report |= {"python": platform.python_version(), "problem": ""}
    start_s = time.perf_counter()
    try:
        recorder, digests, events = record(config, args.seed, args.steps, args.plant)
        recorded_s = time.perf_counter()
        differences, digests_again = replay(config, recorder)
    except Exception as error:  # a planted fault, or a real one, may break either run
        report["problem"] = f"{type(error).__name__}: {error}"
        return report
    expected = EVENTS if args.speculative == OFF else EVENTS + fuzz_drafting.DRAFTING_EVENTS
    missing = [event for event in expected if not events[event] and args.steps >= LONG_RUN]
    report |= {
        "good": not differences and digests == digests_again and not missing,
        "steps_run": len(recorder.wires),
        "different_steps": len(differences),
        "first_differences": differences[:5],
        "same_memory_at_the_end": digests == digests_again,
        "events": dict(sorted(events.items())),
        "missing_events": missing,
        "record_s": round(recorded_s - start_s, 1),
        "replay_s": round(time.perf_counter() - recorded_s, 1),
    }
    return report


def main(argv: list[str]) -> int:
    """Print the report; return 0 when it is good."""
    parser = Parser(prog="race_fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny-qwen3", help="a preset, run with random weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--depth", type=int, default=2, help="steps in flight")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--plant", default="", choices=PLANTS, help="a fault that must be found")
    parser.add_argument("--speculative", default=OFF, choices=METHODS, help="verify drafts")
    parser.add_argument("--draft-model", help="a preset, for draft; default: --model's own")
    args = parser.parse(argv)
    if args.plant == "drafts" and args.speculative == OFF:
        parser.error("--plant drafts: there are none; add --speculative ngram or draft")
    if args.draft_model is not None and args.speculative != "draft":
        parser.error(f"--draft-model {args.draft_model}: only with --speculative draft")
    try:
        report = run(args)
    except ValueError as error:  # settings that cannot work; a run's own errors are in its report
        parser.error(str(error))
    for key, value in report.items():
        print(f"{key:24} {value}")
    print(json.dumps(report))
    return 0 if report["good"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
