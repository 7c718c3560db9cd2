"""Time steps in which a prompt joins decodes, with the layers' graphs and eagerly, in turn.

    python scripts/bench_mixed_steps.py [--model qwen3-8b] [--decodes 60] [--prompts 16,100,200]

One rank's runner without an engine around it (workers/layer_graphs.py says what is captured), on
random weights. Each step begins on an idle device: `host` is how long the runner took to enqueue
it, `all` until the device was done; milliseconds, medians. Without a GPU there are no graphs, and
eager steps alone. The last line of stdout is the whole result as JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanorunner.bench.measuring_flags import count_above_0, counts_above_0
from nanorunner.config import make_config
from nanorunner.flags import Parser
from nanorunner.resolve import resolve
from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group
from nanorunner.workers.full_sampling import FullSampling
from nanorunner.workers.messages import BLOCK_SIZE, NewRequest, StepInput
from nanorunner.workers.model_runner import ModelRunner

if TYPE_CHECKING:
    from scripts.bench_engine import describe_machine, write
else:  # a script's own folder is where Python looks first; it is no package
    from bench_engine import describe_machine, write

DECODE_LEN = 60  # ids that each decode knows at first; it has one block of the KV cache
WARM_STEPS, STEPS = 2, 5
TIMEOUT_S = 60.0


class Bench:
    """A runner with some requests that decode, and one more whose prompt joins them again."""

    def __init__(self, args: argparse.Namespace) -> None:
        longest = max(args.prompts)
        prompt_blocks = -(-longest // BLOCK_SIZE)
        settings = {
            "model": args.model,
            "load_format": "dummy",
            "runner": "v2",
            "dtype": args.dtype,
            "skip_tokenizer_init": True,
            "max_num_seqs": args.decodes + 1,
            "max_num_batched_tokens": args.decodes + longest,
            "max_model_len": max(longest, BLOCK_SIZE) + 1,
            "num_blocks": args.decodes + prompt_blocks,
        }
        resolved = resolve(make_config(settings))
        self.device = Device(resolved.config.device, 0)
        group = Group(None, 0, 1, self.device.torch_device, timeout_s=TIMEOUT_S)
        self.runner = ModelRunner(resolved.runner_config, 0, group, self.device)
        self.runner.load_model()
        self.runner.allocate_kv(args.decodes + prompt_blocks)
        self.runner.capture()
        self.layers = self.runner.graphs.layers
        self.decodes = [(number, 1) for number in range(args.decodes)]
        self.guest = args.decodes  # the request whose prompt joins
        self.guest_blocks = range(args.decodes, args.decodes + prompt_blocks)
        self.removed: tuple[int, ...] = ()
        self._number = 0
        for number, _ in self.decodes:
            self.step([(number, DECODE_LEN)], (new_request(number, DECODE_LEN, [number]),))

    def step(self, batch: list[tuple[int, int]], new: tuple[NewRequest, ...]) -> tuple[float, ...]:
        """Run one step; return (host, all), in milliseconds."""
        self._number += 1
        gone, pairs = (np.array(x, np.int32).tobytes() for x in (self.removed, batch))
        wire = StepInput(self._number, gone, new, (), pairs, b"").to_wire()
        self.device.finish(TIMEOUT_S)
        begin = time.perf_counter()
        self.runner.step(wire)
        host = time.perf_counter()
        self.device.finish(TIMEOUT_S)
        return (host - begin) * 1e3, (time.perf_counter() - begin) * 1e3

    def joined(self, length: int, *, has_layers: bool) -> tuple[float, ...]:
        """Return the medians of steps that a prompt of so many ids joins."""
        self.runner.graphs.layers = self.layers if has_layers else None
        times = []
        for _ in range(WARM_STEPS + STEPS):
            new = new_request(self.guest, length, self.guest_blocks)
            times.append(self.step([*self.decodes, (self.guest, length)], (new,)))
            self.removed = (self.guest,)
        pairs = zip(*times[WARM_STEPS:], strict=True)
        return tuple(round(statistics.median(part), 2) for part in pairs)


def new_request(number: int, length: int, blocks: Any) -> NewRequest:
    """Return a request of some prompt whose KV lies in the blocks."""
    ids = np.arange(5, 5 + length, dtype=np.int32) % 200
    table = np.array(blocks, np.int32).tobytes()
    sampling = FullSampling(temperature=0.6, seed=number)
    return NewRequest(number, ids.tobytes(), length, 0, table, sampling)


def run(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Measure every prompt; raises ValueError for wrong values."""
    most = (BLOCK_SIZE - DECODE_LEN) // (2 * (WARM_STEPS + STEPS))
    if len(args.prompts) > most:
        raise ValueError(f"{len(args.prompts)} prompts: use at most {most}")
    bench = Bench(args)
    has_layers = bench.layers is not None and bool(bench.layers.sizes)
    rows = []
    print("prompt  eager: host      all  captured: host     all   (ms)")
    for length in args.prompts:
        eager = bench.joined(length, has_layers=False)
        captured = bench.joined(length, has_layers=True) if has_layers else None
        rows.append({"prompt": length, "eager_ms": eager, "captured_ms": captured})
        print(f"{length:6}  {eager[0]:11.2f} {eager[1]:8.2f}", end="")
        print("" if captured is None else f"  {captured[0]:14.2f} {captured[1]:7.2f}", flush=True)
    bench.runner.close()
    return {
        "command": shlex.join(["scripts/bench_mixed_steps.py", *argv]),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "model": args.model,
        "decodes": args.decodes,
        "columns": ["host", "all"],
        "steps": rows,
    }


def main(argv: list[str]) -> int:
    """Return the exit code: 2 for wrong flags."""
    parser = Parser(prog="bench_mixed_steps.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="qwen3-0.6b", help="a preset")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--decodes", type=count_above_0, default=60)
    parser.add_argument(
        "--prompts", type=counts_above_0, default=[16, 100, 200, 300, 400, 500, 600, 800, 1000]
    )
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args(argv)
    try:
        result = run(args, argv)
    except ValueError as error:
        parser.error(str(error))
    write(result, args.out)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
