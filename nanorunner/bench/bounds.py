"""The physical limit of a step: bytes and operations that no engine can spare, over the machine's.

    step_work  -> Work(num_bytes, num_operations)  of one step, all ranks together
    bound_s    -> seconds = max(bytes / bandwidth, operations / rate) / tp
    run_bound_s   the same for a batch's whole life: one prefill step, then its decode steps

    bytes       every weight once + K and V of each position that is read or written, once
    operations  2 x weights x tokens + 2 x vocabulary x hidden x logits rows
                + 4 x layers x heads x head_dim x attended positions

Left out, all of it small: norms, biases, activations, sampling, the all-reduce, KV heads that a
large tp copies. So the bound is always too quick, never too slow. It does not hold for a model that
fits in a cache between steps.
"""

from __future__ import annotations

from typing import NamedTuple

from nanorunner.resolve import kv_token_bytes, num_parameters
from nanorunner.workers.model_config import ITEM_BYTES, ModelConfig

FORMULA = (
    "limit of a step = max(bytes / bandwidth, operations / rate) / tp; bytes = every weight once "
    "+ K and V of every position read or written; operations = 2 x weights x tokens + attention"
)


class Limits(NamedTuple):
    """What one device can do at best; None where nobody has measured it."""

    bandwidth_bytes_per_s: float | None
    operations_per_s: float | None  # of 16-bit matrix products
    source: str  # where the two figures come from


# Measured on the device, a read-only stream and a large bf16 product: not the data sheet's.
KNOWN_LIMITS = {
    "NVIDIA H200": Limits(4.48e12, 788e12, "measured on H200: 4.48 TB/s read, 788 TFLOP/s bf16"),
}


class Work(NamedTuple):
    """What a step must move and compute, all ranks together."""

    num_bytes: int
    num_operations: int


def step_work(
    model: ModelConfig,
    dtype: str,
    *,
    num_tokens: int,
    kv_positions: int,
    attended: int,
    num_logits: int,
) -> Work:
    """Return the work of one step.

    num_tokens: positions computed. kv_positions: different cached positions that it touches, over
    all requests. attended: (query, key) pairs. num_logits: rows that go through the head.
    """
    head = model.vocab_size * model.hidden_size
    # of an untied input table a step reads a few rows only; a tied one is the head, counted once
    weights = num_parameters(model) - (0 if model.tie_word_embeddings else head)
    num_bytes = weights * ITEM_BYTES[dtype] + kv_positions * kv_token_bytes(model, dtype)
    num_operations = (
        2 * (weights - head) * num_tokens
        + 2 * head * num_logits
        + 4 * model.num_layers * model.num_heads * model.head_dim * attended
    )
    return Work(num_bytes, num_operations)


def decode_work(model: ModelConfig, dtype: str, batch: int, context: int) -> Work:
    """Return the work of one decode step of `batch` requests, each `context` positions long."""
    positions = batch * context
    return step_work(
        model,
        dtype,
        num_tokens=batch,
        kv_positions=positions,
        attended=positions,
        num_logits=batch,
    )


def prefill_work(model: ModelConfig, dtype: str, batch: int, length: int) -> Work:
    """Return the work of `batch` prompts of `length` tokens, computed in one step."""
    return step_work(
        model,
        dtype,
        num_tokens=batch * length,
        kv_positions=batch * length,
        attended=batch * length * (length + 1) // 2,
        num_logits=batch,
    )


def bound_s(work: Work, limits: Limits, tp: int = 1) -> float:
    """Return the least seconds that the work takes on tp devices; 0 when no limit is known."""
    seconds = 0.0
    if limits.bandwidth_bytes_per_s is not None:
        seconds = work.num_bytes / limits.bandwidth_bytes_per_s
    if limits.operations_per_s is not None:
        seconds = max(seconds, work.num_operations / limits.operations_per_s)
    return seconds / tp


def run_bound_s(
    model: ModelConfig,
    dtype: str,
    limits: Limits,
    *,
    batch: int,
    input_len: int,
    output_len: int,
    tp: int = 1,
) -> float:
    """Return the least seconds from a batch's arrival to its last token.

    The prefill gives the first token; the decode step of token i (i from 1) reads input_len + i
    positions a request.
    """
    seconds = bound_s(prefill_work(model, dtype, batch, input_len), limits, tp)
    for made in range(1, output_len):
        work = decode_work(model, dtype, batch, input_len + made)
        seconds += bound_s(work, limits, tp)
    return seconds


def limits_of(
    device_name: str,
    dtype: str,
    bandwidth_gb_per_s: float | None = None,
    tflop_per_s: float | None = None,
) -> Limits | None:
    """Return a device's limits: those given, else those known; None when there are neither."""
    if bandwidth_gb_per_s is not None or tflop_per_s is not None:
        return Limits(
            None if bandwidth_gb_per_s is None else bandwidth_gb_per_s * 1e9,
            None if tflop_per_s is None else tflop_per_s * 1e12,
            "as given",
        )
    known = KNOWN_LIMITS.get(device_name)
    if known is None or ITEM_BYTES[dtype] == 2:
        return known
    return known._replace(operations_per_s=None)  # the rate was measured with 16-bit numbers
