"""The limit of a step is the arithmetic of the model's shape, and it is a limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanorunner.bench.bounds import (
    KNOWN_LIMITS,
    Limits,
    Work,
    bound_s,
    decode_work,
    limits_of,
    prefill_work,
    run_bound_s,
)
from nanorunner.presets import load_preset
from nanorunner.workers.architectures import parse

QWEN = parse(load_preset("qwen3-0.6b"))
LAYER = 1024 * 128 * 2 * (16 + 8) + 3 * 1024 * 3072  # q, k, v, o and the three of the MLP
HEAD = 151936 * 1024
H200 = KNOWN_LIMITS["NVIDIA H200"]


def test_a_decode_step_reads_every_weight_and_every_cached_position_once() -> None:
    work = decode_work(QWEN, "bfloat16", batch=8, context=512)
    kv = 8 * 512 * 2 * 28 * 8 * 128
    assert work.num_bytes == 2 * (28 * LAYER + HEAD + kv)
    attention = 4 * 28 * 16 * 128 * 8 * 512
    assert work.num_operations == 2 * 8 * (28 * LAYER + HEAD) + attention
    # an untied input table is not read; the head is
    untied = decode_work(replace(QWEN, tie_word_embeddings=False), "bfloat16", 8, 512)
    assert untied == work


def test_a_prefill_step_computes_logits_for_last_tokens_alone() -> None:
    work = prefill_work(QWEN, "float32", batch=2, length=3)
    assert work.num_bytes == 4 * (28 * LAYER + HEAD + 2 * 3 * 2 * 28 * 8 * 128)
    attended = 2 * (1 + 2 + 3)
    assert work.num_operations == (2 * 6 * 28 * LAYER + 2 * 2 * HEAD + 4 * 28 * 16 * 128 * attended)


def test_the_bound_is_the_scarcer_of_bandwidth_and_rate() -> None:
    limits = Limits(10.0, 100.0, "")
    assert bound_s(Work(50, 50), limits) == 5.0
    assert bound_s(Work(50, 5000), limits) == 50.0
    assert bound_s(Work(50, 5000), limits, tp=2) == 25.0
    assert bound_s(Work(50, 5000), Limits(10.0, None, "")) == 5.0


def test_a_run_is_one_prefill_and_the_decode_steps_after_it() -> None:
    seconds = run_bound_s(QWEN, "bfloat16", H200, batch=4, input_len=7, output_len=3, tp=2)
    works = [
        prefill_work(QWEN, "bfloat16", 4, 7),
        decode_work(QWEN, "bfloat16", 4, 8),
        decode_work(QWEN, "bfloat16", 4, 9),
    ]
    assert seconds == pytest.approx(sum(bound_s(work, H200, 2) for work in works))


def test_limits_come_from_flags_or_from_a_measured_device() -> None:
    assert limits_of("NVIDIA H200", "bfloat16") == H200
    assert limits_of("NVIDIA H200", "float32") == H200._replace(operations_per_s=None)
    assert limits_of("", "float32") is None
    assert limits_of("NVIDIA H200", "bfloat16", bandwidth_gb_per_s=20) == (20e9, None, "as given")
    assert limits_of("", "float32", tflop_per_s=2) == (None, 2e12, "as given")
