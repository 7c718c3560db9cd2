"""Which recorder a rank gets: none, one of the CPU's spans, or one that times the GPU as well."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, cast

import torch

from nanorunner.workers.device import Device
from nanorunner.workers.gpu_clock import TimingEvent
from nanorunner.workers.gpu_spans import GpuSpans
from nanorunner.workers.messages import RunnerConfig
from nanorunner.workers.spans import MAX_SPANS, SPAN_WORDS, Nvtx, SpanRecorder, WordRing

logger = logging.getLogger("nanorunner")


def open_recorder(config: RunnerConfig, rank: int, device: Device) -> SpanRecorder | None:
    """Return this rank's recorder, None when its engine records no spans."""
    if not config.spans:
        return None
    if not device.is_cuda:
        return SpanRecorder(rank)
    problem = graph_event_problem()
    gpu = GpuSpans(
        WordRing(MAX_SPANS, SPAN_WORDS),
        _event,
        None if problem else partial(_event, external=True),
        graph_problem=problem,
        graph_copies=config.async_depth + 1,
        # attention's and the MLP's in each layer, and the embedding's
        all_reduces=2 * config.model.num_layers + 1 if config.tp > 1 else 0,
    )
    return SpanRecorder(rank, gpu, nvtx=None if config.trace is None else open_nvtx())


def open_nvtx() -> Nvtx | None:
    """Return torch.cuda.nvtx; None, and a line in the log, when this PyTorch was built without."""
    nvtx = cast(Nvtx, torch.cuda.nvtx)
    try:
        nvtx.mark("trace")
    except RuntimeError as error:
        logger.info("the trace has no NVTX ranges: %s", error)
        return None
    return nvtx


def graph_event_problem() -> str:
    """Return why this PyTorch cannot record timing events inside a graph, "" when it can."""
    try:
        _event(external=True)
    except TypeError:
        return f"PyTorch {torch.__version__} cannot record timing events inside a graph"
    return ""


def _event(**settings: bool) -> TimingEvent:
    event: Any = torch.cuda.Event(enable_timing=True, **settings)  # type: ignore[no-untyped-call]
    timing_event: TimingEvent = event
    return timing_event
