"""A program that counts the memory blocks of a steady step, with quiet requests and with others.

    python steady_step_meter.py DEPTH      prints {"true": blocks, "false": blocks}: quiet or not

The memory blocks that Python has handed out are counted at every call and return inside the step,
so that one that is given back before the step ends counts too. Counting walks over all of Python's
memory, so it takes a process that has little: within a long test run it would take minutes.
"""

from __future__ import annotations

import gc
import json
import sys
from types import FrameType
from typing import Any

import numpy as np

from nanorunner.engine import Engine
from nanorunner.sampling_params import SamplingParams
from nanorunner.scheduler import Scheduler
from nanorunner.workers.messages import StepInput, StepOutput

VOCAB = 1000
EOS = 7
NUM_REQUESTS = 256
NUM_STEPS = 5  # the least of them counts: whatever else the process does is not the step's


def steady_engine(depth: int, quiet: bool) -> Engine:
    """Return an engine whose requests all decode, on a runner that always says the same."""
    scheduler = Scheduler(
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=8192,
        max_model_len=512,
        num_blocks=NUM_REQUESTS * 2,
        vocab_size=VOCAB,
        eos_token_ids=frozenset({EOS}),
        depth=depth,
        send_sampled_ids=depth == 1,
    )
    # Beyond the small numbers, which Python never makes anew.
    who = np.arange(NUM_REQUESTS, dtype=np.int32)
    ids = np.full(NUM_REQUESTS, VOCAB - 1, dtype=np.int32)
    engine = Engine(
        scheduler,
        lambda method, wire: StepInput.from_wire(wire).step_id,
        vocab_size=VOCAB,
        result=lambda step_id: StepOutput(step_id, who, ids),  # type: ignore[arg-type]
    )
    params = SamplingParams(max_tokens=200, stop_token_ids=(8,))
    for _ in range(NUM_REQUESTS):
        engine.add_request([1, 2, 3], params, quiet=quiet)
    return engine


def most_blocks(engine: Engine) -> int:
    """Return how many blocks the thriftiest of some steps holds at most beyond those before it."""
    most = before = 0

    def look(frame: FrameType, event: str, value: Any) -> None:
        nonlocal most
        most = max(most, sys.getallocatedblocks() - before)

    found = []
    for _ in range(NUM_STEPS):
        most, before = 0, sys.getallocatedblocks()
        sys.setprofile(look)
        engine.step()
        sys.setprofile(None)
        found.append(most)
    return min(found)


def count(depth: int, quiet: bool) -> int:
    """Return most_blocks() of an engine that has found its stride."""
    engine = steady_engine(depth, quiet)
    for _ in range(20):
        engine.step()
    blocks = most_blocks(engine)
    assert engine.scheduler.num_running == NUM_REQUESTS
    return blocks


if __name__ == "__main__":
    gc.disable()
    print(json.dumps({quiet: count(int(sys.argv[1]), quiet) for quiet in (True, False)}))
