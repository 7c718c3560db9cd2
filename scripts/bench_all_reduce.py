"""Measure all-reduces inside CUDA graphs: peer memory against NCCL, by size, alone and with a norm.

    python scripts/bench_all_reduce.py --tp 2|4|8 [--sizes 2048,8192] [--hidden 4096] [--out FILE]

Starts its own ranks, one a GPU. A graph holds 50 calls behind each other; the time is that of the
median replay over 50, on the slowest rank. Sizes are of a bfloat16 tensor, in bytes. With the norm,
rows are --hidden wide, or the whole tensor is one row. `none` is for sizes that a form does not
take. workers/peer_reducer.py has the sizes that serving goes by; take them from this table.

The last line of stdout is the whole result as JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanorunner.config import make_config
from nanorunner.errors import RankDied
from nanorunner.flags import Parser
from nanorunner.kernels import peer_all_reduce as peer
from nanorunner.kernels.rms_norm import add_rms_norm
from nanorunner.launch import Ranks
from nanorunner.resolve import resolve
from nanorunner.workers.distributed import Group
from nanorunner.workers.messages import RunnerConfig
from nanorunner.workers.peer_reducer import MAX_RANKS

if TYPE_CHECKING:
    from scripts.bench_engine import describe_machine, write
else:  # a script's own folder is where Python looks first; it is no package
    from bench_engine import describe_machine, write

KIB = 1 << 10
SIZES = tuple(KIB << power for power in range(1, 11))
KEYS = (1, 64, 256)
CALLS = 50
REPLAYS = 11
WARM_UP_REPLAYS = 3
TIMEOUT_S = 30.0  # for all replays of one measurement
EPS = 1e-6
SUMS = ("nccl", "one shot", "two shots")
NORMS = ("nccl + norm", "one shot + norm", "fused")
MAXIMA = ("nccl max", "peer max")
WITH_REPLY = frozenset({"measure", "close"})
Launch = Callable[[], object]


class BenchRunner:
    """One rank: measures one form at one size, together with the others."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def measure(self, form: str, size: int, hidden: int) -> float | None:
        """Return microseconds a call of a form of SUMS, NORMS (bytes) or MAXIMA (keys)."""
        launch = self._launch(form, size, min(hidden, size // 2))
        return None if launch is None else self._graph_us(launch)

    def close(self) -> None:
        """Leave the group."""
        self.group.close()

    def _launch(self, form: str, size: int, hidden: int) -> Launch | None:
        """Return what to capture, None when the form does not take this size."""
        assert self.group.peers is not None, "--all-reduce peer gives peer memory or fails"
        ring = self.group.peers.ring
        if form in MAXIMA:
            keys = torch.zeros(size, dtype=torch.int64, device=self.group.device)
            return (
                partial(peer.all_reduce_max, keys, ring)
                if form == "peer max"
                else (partial(self._by_nccl, self.group.all_reduce_max, keys))
            )
        x = torch.zeros(
            (size // 2 // hidden, hidden), dtype=torch.bfloat16, device=self.group.device
        )
        residual, weight = torch.zeros_like(x), torch.ones_like(x[0])
        reduce: Launch | None = partial(self._by_nccl, self.group.all_reduce, x)
        if form.startswith("one shot"):
            fits = size <= peer.one_shot_bytes(ring)
            reduce = partial(peer.all_reduce_one_shot, x, ring) if fits else None
        elif form == "two shots":
            fits = size <= peer.two_shot_bytes(ring)
            reduce = partial(peer.all_reduce_two_shot, x, ring) if fits else None
        elif form == "fused":
            fits = peer.fits_add_rms_norm(x, residual, weight, ring)
            fused = partial(peer.all_reduce_add_rms_norm, x, residual, weight, EPS, ring)
            return fused if fits else None
        if form.endswith("+ norm") and reduce is not None:
            return partial(_both, reduce, partial(add_rms_norm, x, residual, weight, EPS))
        return reduce

    def _by_nccl(self, call: Callable[[torch.Tensor], object], x: torch.Tensor) -> None:
        quick, self.group._quick = self.group._quick, None
        call(x)
        self.group._quick = quick

    def _graph_us(self, launch: Launch) -> float:
        """Return the median replay's microseconds a call."""
        for _ in range(2):
            launch()
        graph = torch.cuda.CUDAGraph()
        # thread_local: the watcher's thread of rank 0 may touch the driver meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                launch()
        make_event: Any = partial(torch.cuda.Event, enable_timing=True)
        events = []
        for _ in range(WARM_UP_REPLAYS + REPLAYS):
            begin, end = make_event(), make_event()
            begin.record()
            graph.replay()
            end.record()
            events.append((begin, end))
        deadline = time.monotonic() + TIMEOUT_S
        while not events[-1][1].query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the replays have not ended within {TIMEOUT_S:g} s")
            time.sleep(1e-3)
        self.group.check()  # the time of a call that has given up is nobody's
        times: list[float] = [begin.elapsed_time(end) for begin, end in events[WARM_UP_REPLAYS:]]
        return statistics.median(times) * 1e3 / CALLS


def _both(first: Launch, second: Launch) -> None:
    first()
    second()


def make_runner(config: RunnerConfig, rank: int, group: Group) -> BenchRunner:
    """Return the runner of one rank."""
    return BenchRunner(group)


def table(
    ranks: Ranks, forms: tuple[str, ...], sizes: tuple[int, ...], unit: str, hidden: int
) -> list[dict[str, Any]]:
    """Measure forms at sizes, print the table and return its rows."""
    print(f"{unit:>10}" + "".join(f"{form:>17}" for form in forms), flush=True)
    rows = []
    for size in sizes:
        row: dict[str, Any] = {unit: size}
        for form in forms:
            times = ranks.call_all("measure", form, size, hidden)
            row[form] = None if None in times else round(max(times), 2)
        print(f"{size:>10}" + "".join(f"{row[form] or 'none':>17}" for form in forms), flush=True)
        rows.append(row)
    return rows


def run(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Measure everything and return the result; ValueError for what cannot be measured here."""
    sizes = tuple(int(size) for size in args.sizes.split(","))
    if any(size < 2 * KIB or size & (size - 1) for size in sizes):
        raise ValueError(f"sizes {args.sizes}: use powers of two from 2048 on")
    settings = {
        "model": "qwen3-0.6b",  # never loaded; it only must have a query head for each rank
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": "cuda",
        "all_reduce": "peer",
        "tp": args.tp,
        "start_timeout_s": 120.0,
    }
    if not 2 <= args.tp <= MAX_RANKS:
        raise ValueError(f"tp {args.tp}: an all-reduce over peer memory has 2 to {MAX_RANKS} ranks")
    config = resolve(make_config(settings)).runner_config
    result: dict[str, Any] = {
        "command": shlex.join(["scripts/bench_all_reduce.py", *argv]),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "tp": args.tp,
        "hidden": args.hidden,
        "unit": "us a call",
    }
    ranks = Ranks(
        config, "bench_all_reduce:make_runner", methods=WITH_REPLY, methods_with_reply=WITH_REPLY
    )
    try:
        for name, forms, its_sizes, unit in (
            ("sums", SUMS, sizes, "bytes"),
            ("norms", NORMS, sizes, "bytes"),
            ("maxima", MAXIMA, KEYS, "keys"),
        ):
            result[name] = table(ranks, forms, its_sizes, unit, args.hidden)
            write(result, args.out)
    finally:
        ranks.close()
    return result


def main(argv: list[str]) -> int:
    """Return the exit code: 2 for wrong flags, 3 when a rank died."""
    parser = Parser(prog="bench_all_reduce.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tp", type=int, default=2, help="ranks, one a GPU")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes of the tensors")
    parser.add_argument("--hidden", type=int, default=4096, help="numbers a row, for the norm")
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    args = parser.parse_args(argv)
    try:
        result = run(args, argv)
    except ValueError as error:
        parser.error(str(error))
    except RankDied as error:
        print(error, file=sys.stderr)
        return 3
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
