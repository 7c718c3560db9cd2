"""Find cuBLAS's fastest kernel for each product of a decoder, and keep a table of them.

    python scripts/tune_products.py [--models 0.6b,8b] [--tp 1,2] [--rows 64,128,192,256]

The library picks a kernel for a product by a rule of its own (kernels/cublas_lt.py). Here what it
has is timed: its suggestions and every tile, then the best tiles in clusters of processors, then
the best of all with splits of the columns and the library's options. A product is timed in a CUDA
graph of launches over weights that are together larger than the L2 cache; the fastest once more
beside the library's own choice, in turn, and checked against float64. The best goes to
configs/kernels/ (or --table), where kernels/product_plans.py finds it; entries of other shapes and
rows stay.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from nanorunner.bench.measuring_flags import counts_above_0
from nanorunner.flags import Parser
from nanorunner.kernels.cublas_lt import IN_FLOAT32, Algorithm, Launch, library_version
from nanorunner.kernels.few_rows_plans import FOLDER, Key
from nanorunner.kernels.product_plans import (
    PRODUCT,
    OwnChoice,
    ProductPlan,
    load_products,
    table_name,
)

if TYPE_CHECKING:
    from scripts.bench_engine import describe_machine, write
    from scripts.bench_kernels import READ_BYTES_PER_S, Timer, graph_timer, num_sets
    from scripts.cublas_kernels import Kernels
    from scripts.tune_check import excess, projection_truth
    from scripts.tune_models import MODELS, OPTIONS, layer_shapes
    from scripts.tune_race import measured, write_table
else:  # a script's own folder is where Python looks first; it is no package
    from bench_engine import describe_machine, write
    from bench_kernels import READ_BYTES_PER_S, Timer, graph_timer, num_sets
    from cublas_kernels import Kernels
    from tune_check import excess, projection_truth
    from tune_models import MODELS, OPTIONS, layer_shapes
    from tune_race import measured, write_table

ROWS = (256, 192, 128, 64, 224, 160, 96, 240, 208, 176, 144, 112, 80)
# cublasLt.h's numbers: one processor, then 2 x 1, 4 x 1, 1 x 2. Larger ones are left to the
# library's suggestions, among which one has won once.
ALONE, *TOGETHER = range(2, 6)
SPLITS = (2, 3, 4, 6, 8)
CLUSTERED, WIDENED = 12, 6  # so many of the best go on
FINALISTS = 5
QUICK, THOROUGH = 2, 8  # replays
LEAST_GAIN = 0.01  # of cuBLAS's own choice: what two runs of one measurement differ by
VOCABULARY = 151936  # Qwen3's, the head's rows
MOST_HEAD_ROWS = 256  # a step samples once for each request

Shape = tuple[int, int]  # out, in


class Search:
    """One product's kernels and what they took."""

    def __init__(self, shape: Shape, rows: int) -> None:
        num_out, num_in = shape
        self.rows, self.shape = rows, shape
        count = num_sets(2 * num_out * num_in)
        self.weights = [torch.randn(shape, **OPTIONS).mul_(num_in**-0.5) for _ in range(count)]
        self.x = torch.randn((rows, num_in), **OPTIONS)
        device_index = torch.cuda.current_device()
        self.product = Kernels(rows, num_out, num_in, torch.bfloat16, device_index)
        self.times: dict[Algorithm, float] = {}  # us, from QUICK replays

    def run(self) -> dict[str, Any]:
        """Time all kernels; return the line of the best one."""
        suggestions = self.product.suggestions()
        self.try_all(suggestions)
        self.try_all(self.tiles(suggestions))
        self.try_all(a._replace(cluster=c) for a in self.best(CLUSTERED) for c in TOGETHER)
        self.try_all(self.widened())
        own = partial(F.linear, self.x)
        own_timer = graph_timer([partial(own, weight) for weight in self.weights])
        truth = projection_truth(self.x, self.weights[0])
        finals = []
        for algorithm in self.best(len(self.times)):
            launch = self.product.bind(algorithm)
            assert launch is not None, "it has been timed"
            share = excess(launch(self.x, self.weights[0]), truth)
            if share > 1.0:
                print(f"WRONG by {share:.3g} bounds: {self.shape} rows {self.rows} {algorithm}")
                continue
            finals.append((algorithm, self.timer_of(launch)))
            if len(finals) == FINALISTS:
                break
        turns = [(own_timer(THOROUGH), *(t(THOROUGH) for _, t in finals)) for _ in range(3)]
        own_us, *final_us = (statistics.median(times) for times in zip(*turns, strict=True))
        times = dict(zip((algorithm for algorithm, _ in finals), final_us, strict=True))
        best = min(times, key=lambda algorithm: times[algorithm], default=None)
        num_out, num_in = self.shape
        return {
            "out": num_out,
            "in": num_in,
            "rows": self.rows,
            "floor_us": round(2 * num_out * num_in / READ_BYTES_PER_S * 1e6, 2),
            "own_us": round(own_us, 2),
            "us": round(own_us if best is None else times[best], 2),
            "timed": len(self.times),
            "library": library_version(),
            "algorithm": None if best is None else best._asdict(),
            "finals": [[round(us, 2), *algorithm] for algorithm, us in times.items()],
        }

    def try_all(self, algorithms: Iterable[Algorithm]) -> None:
        """Time those that the library accepts and that were not yet timed."""
        for algorithm in algorithms:
            if algorithm in self.times:
                continue
            launch = self.product.bind(algorithm)
            if launch is not None:
                self.times[algorithm] = self.timer_of(launch)(QUICK)

    def best(self, count: int) -> list[Algorithm]:
        """Return the fastest so far."""
        return sorted(self.times, key=lambda algorithm: self.times[algorithm])[:count]

    def tiles(self, suggestions: list[Algorithm]) -> Iterator[Algorithm]:
        """Yield each suggested algorithm with all its tiles, and nothing else."""
        seen = {(a.id, a.stages, a.inner): a for a in suggestions}
        for example in seen.values():
            plain = example._replace(cluster=ALONE, splits=1, reduction=0, swizzle=0, custom=0)
            for tile in self.product.tiles(example.id):
                yield plain._replace(tile=tile)

    def widened(self) -> Iterator[Algorithm]:
        """Yield the best so far with splits, and with each option of the library."""
        for best in self.best(WIDENED):
            for splits in SPLITS:
                yield best._replace(splits=splits, reduction=IN_FLOAT32)
            for custom in range(self.product.most_custom(best.id) + 1):
                yield best._replace(custom=custom)
            yield best._replace(swizzle=1)

    def timer_of(self, launch: Launch) -> Timer:
        """Return what times a kernel over all weights."""
        return graph_timer([partial(launch, self.x, weight) for weight in self.weights])


def shapes_of(models: Iterable[str], tps: Iterable[int], rows: int) -> list[Shape]:
    """Return the (out, in) of the models' projections and heads on so many ranks, each once."""
    shapes: list[Shape] = []
    for tp in tps:
        for name in models:
            shapes += layer_shapes(MODELS[name], tp)
            if rows <= MOST_HEAD_ROWS:
                shapes.append((-(-VOCABULARY // tp), MODELS[name].hidden))
    return list(dict.fromkeys(shapes))


def entry_of(line: dict[str, Any]) -> tuple[ProductPlan, float]:
    """Return the plan that a search's line is worth, and its microseconds."""
    if line["us"] > (1 - LEAST_GAIN) * line["own_us"]:
        return OwnChoice(line["library"]), line["own_us"]
    return Algorithm(**line["algorithm"]), line["us"]


def run(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Search every shape, the table written after each; raises ValueError for wrong values."""
    unknown = set(args.models) - set(MODELS)
    if unknown:
        raise ValueError(f"models {', '.join(unknown)}: choose from {', '.join(MODELS)}")
    if not torch.cuda.is_available():
        raise ValueError("no CUDA GPU here; these are measurements of one")
    end_s = time.monotonic() + args.seconds
    path: Path = args.table or FOLDER / table_name(torch.device("cuda"))
    table = measured(path, load_products(path))
    result: dict[str, Any] = {
        "command": shlex.join(["scripts/tune_products.py", *argv]),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "products": [],
    }
    print(f"{'out':>6} {'in':>6} {'rows':>4} {'floor':>6} {'own':>7} {'best':>7}  (us)")
    cases = [(rows, shape) for rows in args.rows for shape in shapes_of(args.models, args.tp, rows)]
    for rows, shape in cases:
        if time.monotonic() > end_s:
            print("out of time; the rest was not measured, and its entries stay as they were")
            break
        line = Search(shape, rows).run()
        key: Key = (PRODUCT, *shape, rows)
        table[key] = entry_of(line)
        result["products"].append(line)
        num_out, num_in = shape
        print(
            f"{num_out:6} {num_in:6} {rows:4} {line['floor_us']:6.1f} {line['own_us']:7.2f} "
            f"{line['us']:7.2f}  of {line['timed']}: {line['algorithm']}",
            flush=True,
        )
        write_table(path, table, "kernels/product_plans.py", "scripts/tune_products.py")
        write(result, args.out)
    return result


def main(argv: list[str]) -> int:
    """Return the exit code: 2 for wrong flags."""
    parser = Parser(prog="tune_products.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=["0.6b", "8b"])
    parser.add_argument(
        "--tp", type=counts_above_0, default=[1, 2], help="split over so many ranks"
    )
    parser.add_argument(
        "--rows", type=counts_above_0, default=ROWS, help="rows of x, the most wanted first"
    )
    parser.add_argument("--seconds", type=float, default=190.0, help="stop after so long")
    parser.add_argument(
        "--table", type=Path, help="the table (default: in configs/kernels/, named by the GPU)"
    )
    parser.add_argument("--out", type=Path, help="write every measurement to this file, as JSON")
    args = parser.parse_args(argv)
    try:
        result = run(args, argv)
    except ValueError as error:
        parser.error(str(error))
    write(result, args.out)
    print(json.dumps({name: result[name] for name in ("command", "time", "machine")}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
