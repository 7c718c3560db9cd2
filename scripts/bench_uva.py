"""Prompt tokens in pinned host memory, read by kernels, against a table in GPU memory.

    python scripts/bench_uva.py [--out result.json]

The state table's token ids can be gigabytes, so they lie on the host and kernels read them over
the bus (kernels/uva.py); where that does not work, the table is in GPU memory. Timed for both, in
microseconds: staging and writing new prompts (a copy and a kernel), and making a step's inputs out
of them, for steps of one long and of many short prompts. The last line of stdout is JSON.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch

from nanorunner.flags import Parser
from nanorunner.kernels.prepare_inputs import prepare_mixed_inputs
from nanorunner.kernels.uva import uva_zeros
from nanorunner.workers import request_states
from nanorunner.workers.device import Device
from nanorunner.workers.messages import BLOCK_SIZE
from nanorunner.workers.places import Places
from nanorunner.workers.request_states import RequestStates
from nanorunner.workers.staged_tensor import StagedWriter
from nanorunner.workers.step_inputs import StepInputs

if TYPE_CHECKING:
    from scripts.bench_engine import describe_machine, write
else:  # a script's own folder is where Python looks first; it is no package
    from bench_engine import describe_machine, write

NUM_ROWS, MAX_LEN, TIMEOUT_S = 1024, 16_384, 60.0
CASES = [(1, 16_384), (8, 2048), (64, 256), (64, 1)]  # prompts of a step, tokens each
REPEATS = 50
DEVICE = torch.device("cuda", 0)
TABLES: dict[str, Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor]] = {
    "host": uva_zeros,
    "gpu": lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device),
}


def median_us(launch: Callable[[], object]) -> float:
    """Return the median of launches timed one by one on the device."""
    place, times = Device("cuda", 0), list[float]()
    for _ in range(REPEATS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        launch()
        end.record()
        place.finish(TIMEOUT_S)
        times.append(begin.elapsed_time(end) * 1e3)
    return round(statistics.median(times[3:]), 2)


def stage(states: RequestStates, writer: StagedWriter, num_reqs: int, length: int) -> None:
    """Write num_reqs prompts into the table, as new requests do."""
    ids = np.arange(length, dtype=np.int32).tobytes()
    for row in range(num_reqs):
        states._token_ids.stage(row, 0, ids)
    writer.apply()


def measure(place: str, num_reqs: int, length: int) -> dict[str, float]:
    """Return the microseconds of both parts for one place of the table."""
    writer = StagedWriter(DEVICE, 2, timeout_s=TIMEOUT_S)
    with patch.object(request_states, "uva_zeros", TABLES[place]):
        states = RequestStates(NUM_ROWS, MAX_LEN, writer, DEVICE)
    inputs = StepInputs(num_reqs, num_reqs * length, MAX_LEN, 2, DEVICE)
    rows = np.arange(num_reqs)
    counts, samples = np.full(num_reqs, length), np.ones(num_reqs, np.bool_)
    write_us = median_us(partial(stage, states, writer, num_reqs, length))
    states.tables.total_len.fill_(length)
    states.tables.prefill_len.fill_(length)
    inputs.send(Places(rows, counts, samples))
    prepare = partial(
        prepare_mixed_inputs,
        inputs.header,
        inputs.idx_mapping,
        inputs.logits_places,
        states.tables,
        inputs.mixed_buffers(num_reqs, num_reqs * length),
        inputs.logits_rows(num_reqs),
        length,
        BLOCK_SIZE,
    )
    return {"write_us": write_us, "prepare_us": median_us(prepare)}


def main(argv: list[str]) -> int:
    """Return the exit code: 2 for wrong flags."""
    parser = Parser(prog="bench_uva.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU here; these are measurements of one")
    result: dict[str, Any] = {
        "command": shlex.join(["scripts/bench_uva.py", *argv]),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "cases": [],
    }
    for num_reqs, length in CASES:
        case: dict[str, Any] = {"num_reqs": num_reqs, "tokens": length}
        for place in TABLES:
            case[place] = measure(place, num_reqs, length)
        print(f"{num_reqs} x {length}: {case['host']} on the host, {case['gpu']} on the GPU")
        result["cases"].append(case)
        write(result, args.out)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
