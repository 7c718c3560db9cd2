"""A race of plans for each shape: compiled ahead, checked, timed; scripts/tune.py runs these.

    Race.run     every shape's plans to a pool of compiling processes; each shape whose plans are
                 compiled is measured at once; when the time is over, the rest is left out

What a race is about (kernels/few_rows.py, kernels/medium_rows.py) is in its fields. A plan that is
wrong, or does not compile, fit or run, is named and left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import yaml
from triton.runtime.jit import JITFunction

from nanorunner.kernels.few_rows_plans import Fields, Key, table_entry

if TYPE_CHECKING:
    from scripts.bench_kernels import READ_BYTES_PER_S, graph_us, num_sets
    from scripts.tune_check import excess
    from scripts.tune_fused import FAILURES
    from scripts.tune_models import Shape
else:  # a script's own folder is where Python looks first; it is no package
    from bench_kernels import READ_BYTES_PER_S, graph_us, num_sets
    from tune_check import excess
    from tune_fused import FAILURES
    from tune_models import Shape

COMPILE_TIMEOUT_S = 30.0
FORMAT = "{:<5} {:>5} {:>5} {:>4} {:>5} {:>7}  {}"

Plan = TypeVar("Plan", bound=Hashable)
Kept = TypeVar("Kept", bound=Fields)
Other = TypeVar("Other", bound=Hashable, contravariant=True)


class Problem(Protocol[Other]):
    """One projection with inputs on the GPU."""

    @property
    def weights(self) -> list[torch.Tensor]:
        """Together larger than the L2 cache."""

    def launch(self, weight: torch.Tensor, plan: Other) -> torch.Tensor:
        """Run the projection once; it may write to its inputs."""

    def first(self, plan: Other) -> torch.Tensor:
        """Return what the first weight gives, from inputs as they were made."""

    def truth(self) -> torch.Tensor:
        """Return what first() should, in float64."""


class Result(NamedTuple):
    """The best plan of a shape, and a line of every plan's time."""

    key: Key
    plan: Any
    us: float
    line: dict[str, Any]


@dataclass(frozen=True)
class Race(Generic[Plan]):
    """What to measure. The functions of compiling processes must be found by their module."""

    baseline: Plan  # what serves without a table; always measured, first
    candidates: Callable[[str, int, int, int], list[Plan]]  # op, rows, out, in
    compile_plan: Callable[[str, int, int, int, Plan], None]  # launches it; nothing runs
    # op, plan, out, in, rows: what enters a plan's kernels; shapes that agree in it share them
    compiled_for: Callable[[str, Plan, int, int, int], object]
    problem: Callable[[str, int, int, int, int], Problem[Plan]]  # op, rows, out, in, sets
    text: Callable[[Plan], str]

    def run(
        self, shapes: Iterator[tuple[Shape, int]], pool: ProcessPoolExecutor, end_s: float
    ) -> Iterator[Result]:
        """Yield the best plan of each (shape, rows), in the order in which they are compiled."""
        futures: dict[object, Future[None]] = {}
        work: list[tuple[Shape, int, dict[Plan, Future[None]]]] = []
        for shape, rows in shapes:
            op, num_out, num_in = shape
            compiled = {}
            for plan in self.candidates(op, rows, num_out, num_in):
                same = self.compiled_for(op, plan, num_out, num_in, rows)
                if same not in futures:
                    futures[same] = pool.submit(self.compile_plan, op, rows, num_out, num_in, plan)
                compiled[plan] = futures[same]
            work.append((shape, rows, compiled))
        print(f"{len(work)} shapes, {len(futures)} kernels to compile", flush=True)
        print(FORMAT.format("op", "out", "in", "rows", "floor", "without", "best two (us)"))
        for shape, rows, plans in as_compiled(work, end_s):
            found = self.best_of(shape, rows, plans)
            if found is not None:
                yield found

    def best_of(self, shape: Shape, rows: int, plans: list[Plan]) -> Result | None:
        """Measure a shape's plans and print a line; None when too few of them run."""
        op, num_out, num_in = shape
        num_bytes = num_out * num_in * 2
        case = self.problem(op, rows, num_out, num_in, num_sets(num_bytes))
        truth = case.truth()
        times: dict[Plan, float] = {}
        for plan in plans:
            try:
                share = excess(case.first(plan), truth)
                if share > 1.0:
                    print(f"WRONG by {share:.3g} bounds: {shape} rows {rows} {plan}", flush=True)
                    continue
                launches = [partial(case.launch, weight, plan) for weight in case.weights]
                times[plan] = graph_us(list(launches))
            except FAILURES as failure:
                print(f"left out: {shape} {rows} {plan}: {str(failure)[:90]}", flush=True)
                torch.cuda.synchronize()
        if self.baseline not in times or len(times) < 2:
            return None
        order = sorted(times, key=lambda plan: times[plan])
        floor_us = num_bytes / READ_BYTES_PER_S * 1e6
        baseline_us = times[self.baseline]
        cells = (op, num_out, num_in, rows, f"{floor_us:.1f}", f"{baseline_us:.1f}")
        texts = [f"{times[plan]:.2f} {self.text(plan)}" for plan in order[:2]]
        print(FORMAT.format(*cells, "  ".join(texts)), flush=True)
        line = {
            "op": op,
            "out": num_out,
            "in": num_in,
            "rows": rows,
            "floor_us": round(floor_us, 2),
            "baseline_us": round(baseline_us, 2),
            "plans": [[*_fields(plan), round(times[plan], 2)] for plan in order],
        }
        return Result((*shape, rows), order[0], times[order[0]], line)


def compile_only() -> None:
    """In a compiling process: make every Triton launch compile, and launch nothing."""
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = run
    torch.empty(0, device="cuda")  # starts CUDA here, not in the first task


def as_compiled(
    work: list[tuple[Shape, int, dict[Plan, Future[None]]]], end_s: float
) -> Iterator[tuple[Shape, int, list[Plan]]]:
    """Yield each shape once its plans are compiled, with those that compiled, until end_s.

    When none becomes ready for COMPILE_TIMEOUT_S, the most wanted one goes with what it has.
    """
    waiting = list(work)
    ready_by_s = time.monotonic() + COMPILE_TIMEOUT_S
    while waiting:
        now_s = time.monotonic()
        if now_s > end_s:
            print(f"out of time; {len(waiting)} shapes were not measured", flush=True)
            return
        ready = [item for item in waiting if all(future.done() for future in item[2].values())]
        if not ready and now_s < ready_by_s:
            missing = [f for _, _, compiled in waiting for f in compiled.values() if not f.done()]
            wait(missing, timeout=min(end_s, ready_by_s) - now_s, return_when=FIRST_COMPLETED)
            continue
        item = (ready or waiting)[0]
        waiting.remove(item)
        shape, rows, compiled = item
        yield shape, rows, [plan for plan, future in compiled.items() if _is_good(plan, future)]
        ready_by_s = time.monotonic() + COMPILE_TIMEOUT_S


def _is_good(plan: object, future: Future[None]) -> bool:
    """Return whether a plan is compiled; one that is not is named."""
    if not future.done():
        print(f"not compiled in time: {plan}", flush=True)
        return False
    failure = future.exception()
    if failure is not None:
        print(f"left out: {plan}: {str(failure)[:90]}", flush=True)
    return failure is None


def _fields(plan: Any) -> tuple[Any, ...]:
    """Return a plan's values: it is a named tuple."""
    return tuple(plan)


def measured(path: Path, plans: dict[Key, Kept]) -> dict[Key, tuple[Kept, float]]:
    """Return a table's plans with the microseconds beside them in its file, 0 where there are none.

    So what write_table() writes again is what an earlier run measured.
    """
    entries = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    times = {
        (entry["op"], entry["out"], entry["in"], entry["rows"]): float(entry.get("us", 0.0))
        for entry in entries or []
    }
    return {key: (plan, times[key]) for key, plan in plans.items()}


def write_table(
    path: Path,
    table: Mapping[Key, tuple[Fields, float]],
    source: str,
    script: str = "scripts/tune.py",
) -> None:
    """Write every entry, sorted, with the microseconds that it measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [table_entry(key, *found) for key, found in sorted(table.items())]
    head = f"# Written by {script}; see {source}.\n"
    path.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
