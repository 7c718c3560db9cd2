"""Spans of a GPU: inside captured graphs too, on the CPU's clock, without changing an id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_cases import RANK_COUNTS, dummy_model

from nanorunner import LLM, SamplingParams
from nanorunner.step_times import step_times
from nanorunner.workers.span_recording import graph_event_problem
from nanorunner.workers.spans import (
    ALL_REDUCE,
    CPU,
    FORWARD,
    GPU,
    GRAPH,
    PREPARE,
    SAMPLE,
    SCHEDULE,
    STAGE,
    WAIT,
    RankSpans,
    SpanTable,
)

pytestmark = pytest.mark.limit(300)

MAIN_STREAM = (STAGE, PREPARE, FORWARD, SAMPLE, GRAPH)
TOLERANCE_NS = 100_000  # of the anchors on a machine that does other things beside


def serve(model: str, **settings: Any) -> tuple[list[list[int]], list[RankSpans], dict[str, int]]:
    """Return the ids, the spans and how the decodes were run."""
    fixed = {"load_format": "dummy", "device": "cuda", "skip_tokenizer_init": True}
    sizes = {"max_num_seqs": 8, "num_blocks": 32, "max_model_len": 600}
    kinds = [SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.8, seed=1)] * 5
    with LLM(model, **fixed, **sizes, **settings) as llm:
        prompts = [{"prompt_token_ids": list(range(3, 40 + 20 * n))} for n in range(5)]
        outputs = llm.generate(prompts, kinds, use_tqdm=False)
        spans = llm.engine.spans() if settings.get("step_times") else []
        steps = llm.engine.counters()[0].graph_steps
    return [output.token_ids for output in outputs], spans, steps


def chosen(table: SpanTable, kind: int, *names: int) -> SpanTable:
    """Return the spans of a kind with one of the names, by their begin."""
    mask = (table.kind == kind) & np.isin(table.name, names)
    order = np.argsort(table.begin[mask], kind="stable")
    return SpanTable(*(column[mask][order] for column in table))


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("tp", [1, *RANK_COUNTS])
def test_the_parts_of_a_graph_are_seen_or_it_is_said_why_not(
    tp: int, runner: str, tmp_path: Path
) -> None:
    model = dummy_model(tp, "tiny-qwen3", tmp_path)
    plain_ids, _, _ = serve(model, tp=tp, runner=runner)
    ids, spans, graph_steps = serve(model, tp=tp, runner=runner, step_times=True)
    assert len(spans) == tp
    assert ids == plain_ids
    num_graph_steps = sum(
        n for name, n in graph_steps.items() if not name.startswith(("eager", "layers"))
    )
    assert num_graph_steps > 50, graph_steps
    problem = graph_event_problem()
    for each in spans:
        table = each.table()
        assert each.num_lost == 0
        assert len(each.anchors) >= 2  # at the start, and when the spans were asked for
        gpu = chosen(table, GPU, *MAIN_STREAM)
        num_steps = int(gpu.step.max()) + 1
        steps = {name: set(gpu.step[gpu.name == name].tolist()) for name in MAIN_STREAM}
        if problem:
            assert len(steps[GRAPH]) == num_graph_steps
            assert any(problem in note for note in each.notes)
        else:
            assert steps[FORWARD] == set(range(num_steps))
            assert steps[SAMPLE] == set(range(num_steps))
            assert not steps[GRAPH]
            if runner == "v2":
                assert steps[PREPARE] == set(range(num_steps))
        # one stream: nothing overlaps, and the steps come one after the other
        assert (gpu.begin[1:] >= gpu.end[:-1] - 1000).all()
        assert (np.diff(gpu.step) >= 0).all()
        assert (gpu.end >= gpu.begin).all()
        if tp > 1:
            timed = chosen(table, GPU, ALL_REDUCE)
            assert set(timed.step.tolist()) == (steps[FORWARD] if not problem else set())
            assert (timed.end > timed.begin).all()
    check_order(spans[0].table())


def check_order(table: SpanTable) -> None:
    """The GPU begins a step after it was planned, and has ended it when its output was read."""
    gpu = chosen(table, GPU, *MAIN_STREAM)
    for name, bound in ((SCHEDULE, "begin"), (WAIT, "end")):
        cpu = chosen(table, CPU, name)
        for step in range(int(gpu.step.max()) + 1):
            of_step = gpu.step == step
            at = getattr(cpu, bound)[cpu.step == step]
            if bound == "begin":
                assert gpu.begin[of_step].min() >= at.min() - TOLERANCE_NS
            else:
                assert gpu.end[of_step].max() <= at.max() + TOLERANCE_NS


def test_the_gpus_parts_and_its_bubble_are_the_step() -> None:
    _, spans, _ = serve("tiny-qwen3", runner="v2", step_times=True)
    steps = step_times(spans[0])
    gpu = [part for part in steps["parts"].values() if part["kind"] == "gpu"]
    assert sum(part["share"] for part in gpu) == pytest.approx(1, abs=0.1)
    assert steps["gpu_idle_share"] is not None
    assert 0 <= steps["gpu_idle_share"] < 1
    assert steps["parts"]["bubble"]["kind"] == "gpu"
