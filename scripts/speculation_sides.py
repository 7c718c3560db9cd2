"""One engine of bench_speculation.py in a process of its own: a Job in, its passes out, both JSON.

    python scripts/speculation_sides.py JOB.json RESULT.json

    text      prompts of the repository's pages (check_speculation.py), greedy, to their own end
    oracle    random prompts and random weights; drafts that are right as often as the Job says

All sides of a run get the prompts and, as the truth, the ids of the first plain one.

The oracle's drafts are the ids of the plain engine, some of them replaced, and rounding must not
part the two engines: a verify step's kernels are not a plain step's, and with random weights two
logits are often equal in bfloat16. So these requests are drawn at so high a temperature (HOT) that
the noise of (seed, position) alone decides. A step does all the same for that.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from nanorunner import LLM, SamplingParams, build
from nanorunner.bench.code_version import git_commit
from nanorunner.bench.provenance import describe_machine
from nanorunner.bench.workloads import largest_id, uniform
from nanorunner.engine import Engine
from nanorunner.launch import Ranks

if TYPE_CHECKING:
    from scripts.check_speculation import make_prompts
    from scripts.oracle_runner import ORACLE_METHODS, ORACLE_METHODS_WITH_REPLY
    from scripts.speculation_passes import ORACLE, TASKS, Job, Pass
else:  # a script's own folder is where Python looks first; it is no package
    from check_speculation import make_prompts
    from oracle_runner import ORACLE_METHODS, ORACLE_METHODS_WITH_REPLY
    from speculation_passes import ORACLE, TASKS, Job, Pass

HOT = 1e4  # logits of random weights are some units apart, so here less than a thousandth
FIRST_BYTE_ID = 3  # ids below are often the model's own marks
PROMPT_SEED = 1

Prompts = list[list[int]]
Request = tuple[list[int], SamplingParams]
Int64 = npt.NDArray[np.int64]


class Served(NamedTuple):
    """What requests handed over together got, and when."""

    ids: Prompts  # by request
    times_s: list[float]  # [outputs] since they were handed over
    counts: Int64  # [outputs, requests] ids of each output

    def window(self) -> tuple[float, int, int]:
        """Return seconds, steps and ids from where all have an id to where the first one ends.

        Raises ValueError when no step lies between.
        """
        totals = self.counts.cumsum(axis=0)
        begun = int((totals > 0).all(axis=1).argmax())
        last = int((totals == totals[-1]).any(axis=1).argmax()) - 1
        if last <= begun:
            raise ValueError("num_tokens: no step without a beginning or an end; use more")
        seconds = self.times_s[last] - self.times_s[begun]
        return seconds, last - begun, int((totals[last] - totals[begun]).sum())


def serve(engine: Engine, requests: Sequence[Request]) -> Served:
    """Run requests to their end, all at once; RuntimeError when one fails."""
    begin_s = time.perf_counter()
    places = {engine.add_request(*request): place for place, request in enumerate(requests)}
    ids: Prompts = [[] for _ in requests]
    times_s, counts = [], []
    num_left = len(requests)
    with engine.stepping():
        while num_left:
            count = [0] * len(requests)
            for request_id, new_ids, reason, _ in engine.step():
                place = places[request_id]
                ids[place] += new_ids
                count[place] = len(new_ids)
                if reason is not None and reason not in ("stop", "length"):
                    raise RuntimeError(f"request {place}: {reason}")
                num_left -= reason is not None
            times_s.append(time.perf_counter() - begin_s)
            counts.append(count)
        while engine.has_unfinished():  # steps that left before the last end was known
            engine.step()
    return Served(ids, times_s, np.array(counts))


class Counts(NamedTuple):
    """What the engine has counted of drafts since its start."""

    meant: Int64  # [K]
    accepted: Int64  # [K]
    verified: int

    @classmethod
    def of(cls, engine: Engine) -> Counts:
        """Return a copy of the engine's own."""
        drafts = engine.scheduler.drafts.stats
        return cls(drafts.meant.copy(), drafts.accepted.copy(), engine.stats.verified_rows)

    def since(self, before: Counts) -> dict[str, Any]:
        """Return the fields of a Pass that began with `before`."""
        return {
            "meant": (self.meant - before.meant).tolist(),
            "accepted": (self.accepted - before.accepted).tolist(),
            "verified": self.verified - before.verified,
        }


def start(job: Job) -> LLM:
    """Return the job's engine, the oracle's with the oracle in every rank."""
    if job.side != ORACLE:
        return LLM(**job.settings)
    planted = partial(
        Ranks,
        runner="oracle_runner:make_runner",
        methods=ORACLE_METHODS,
        methods_with_reply=ORACLE_METHODS_WITH_REPLY,
    )
    with patch.object(build, "Ranks", planted):
        return LLM(**job.settings)


def text_passes(llm: LLM, job: Job, texts: Sequence[str]) -> tuple[list[Pass], dict[str, Prompts]]:
    """Return each repeat's passes, one a task, and the ids of all prompts for each batch size."""
    params = SamplingParams(temperature=0, max_tokens=job.num_tokens)
    requests: list[Request] = []
    for text in texts:
        if job.byte_ids:
            ids = [FIRST_BYTE_ID + byte for byte in text.encode()]
        else:
            ids = llm.chat_ids([{"role": "user", "content": text}])
        requests.append((ids, params))
    passes, said = [], {}
    for batch_size in job.batch_sizes:
        serve(llm.engine, requests[:batch_size])  # the first of a size pays for what happens once
        for repeat in range(job.repeats):
            ids_of: dict[int, list[int]] = {}
            for index, task in enumerate(TASKS):
                of_task = list(range(index, len(requests), len(TASKS)))
                before, seconds = Counts.of(llm.engine), 0.0
                for first in range(0, len(of_task), batch_size):
                    group = of_task[first : first + batch_size]
                    served = serve(llm.engine, [requests[place] for place in group])
                    seconds += served.times_s[-1]
                    ids_of |= dict(zip(group, served.ids, strict=True))
                passes.append(
                    Pass(
                        batch_size=batch_size,
                        task=task,
                        requests=len(of_task),
                        output_tokens=sum(len(ids_of[place]) for place in of_task),
                        seconds=seconds,
                        **Counts.of(llm.engine).since(before),
                    )
                )
            if repeat == 0:
                said[str(batch_size)] = [ids_of[place] for place in range(len(requests))]
    return passes, said


def oracle_passes(
    llm: LLM, job: Job, answers: dict[str, Prompts]
) -> tuple[list[Pass], dict[str, Prompts]]:
    """Return the passes of random prompts, plain or with the oracle, and the ids of each batch.

    answers: the ids of the first plain side by batch size; it has none itself.
    """
    vocab_size = llm.resolved.runner_config.model.vocab_size
    passes: list[Pass] = []
    said: dict[str, Prompts] = {}
    for batch_size in job.batch_sizes:
        prompts, _ = uniform(
            batch_size, job.input_len, job.num_tokens, PROMPT_SEED, largest_id(vocab_size)
        )
        requests: list[Request] = []
        for place, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=HOT, seed=place, max_tokens=job.num_tokens, ignore_eos=True
            )
            requests.append((prompt, params))
        served = serve(llm.engine, requests)
        expected = said[str(batch_size)] = answers.get(str(batch_size), served.ids)
        for probability in (0.0, *job.probabilities) if job.side == ORACLE else (None,):
            for _ in range(job.repeats):
                if probability is not None:
                    key = [job.turn, len(passes)]
                    teach(llm, prompts, spoil(expected, probability, key, vocab_size))
                before = Counts.of(llm.engine)
                served = serve(llm.engine, requests)
                window_s, window_steps, window_ids = served.window()
                is_same = [one == other for one, other in zip(served.ids, expected, strict=True)]
                passes.append(
                    Pass(
                        batch_size=batch_size,
                        probability=probability,
                        requests=batch_size,
                        output_tokens=batch_size * job.num_tokens,
                        seconds=served.times_s[-1],
                        window_s=window_s,
                        window_steps=window_steps,
                        window_ids=window_ids,
                        same_ids=sum(is_same),
                        **Counts.of(llm.engine).since(before),
                    )
                )
    return passes, said


def spoil(ids: Prompts, probability: float, key: list[int], vocab_size: int) -> Prompts:
    """Return the ids, each right with this probability and another one otherwise.

    key: two numbers that decide which (Philox).
    """
    random = np.random.Generator(np.random.Philox(key=np.array(key, np.uint64)))
    drafts = []
    for right in map(np.array, ids):
        is_right = random.random(len(right)) < probability
        drafts.append(np.where(is_right, right, (right + 1) % vocab_size).tolist())
    return drafts


def teach(llm: LLM, prompts: Prompts, drafts: Prompts) -> None:
    """Tell every rank's oracle what to draft behind each prompt."""
    ranks: Ranks = llm.engine._call.__self__  # type: ignore[attr-defined]
    packed = {
        np.array(prompt, np.int32).tobytes(): np.array(ids, np.int32).tobytes()
        for prompt, ids in zip(prompts, drafts, strict=True)
    }
    ranks.call_all("teach", packed)


def main(argv: list[str]) -> int:
    """Run the job of the first file and write its result to the second."""
    job = Job(**json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    if job.first:
        first = json.loads(Path(job.first).read_text(encoding="utf-8"))
    else:
        first = {"texts": make_prompts(job.num_prompts) if job.num_prompts else [], "ids": {}}
    begin_s = time.perf_counter()
    with start(job) as llm:
        start_up_s = time.perf_counter() - begin_s
        if job.input_len:
            passes, ids = oracle_passes(llm, job, first["ids"])
        else:
            passes, ids = text_passes(llm, job, first["texts"])
        result = {
            "side": job.side,
            "turn": job.turn,
            "start_up_s": round(start_up_s, 2),
            "seconds": round(time.perf_counter() - begin_s, 2),
            "machine": describe_machine(),
            "commit": git_commit(),
            "config": asdict(llm.resolved.config),
            "passes": [asdict(one) for one in passes],
            "texts": first["texts"],
            "ids": ids,
        }
    Path(argv[1]).write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
