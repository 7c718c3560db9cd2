"""Fused decode attention on a GPU: every head shape, dtype and plan equals the two steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fused_decode_cases import assert_cache, fused_case
from kernel_cases import num_unequal_replays
from slow_producer import slow_copy

from nanorunner.kernels.decode_attention import DecodePlan, decode_attention
from nanorunner.kernels.fused_decode import fused_decode, fused_decode_reference
from nanorunner.kernels.join_shares import share_counters
from nanorunner.kernels.rope_kv_write import qk_norm_rope_kv_write

HEADS = {
    "16/8x128": (16, 8, 128),
    "32/8x128": (32, 8, 128),
    "14/2x64": (14, 2, 64),
    "9/3x64": (9, 3, 64),
    "32/32x80": (32, 32, 80),
    "12/12x96": (12, 12, 96),
    "16/4x256": (16, 4, 256),
    "71/1x64": (71, 1, 64),
}
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
LENGTHS = [1, 2, 64, 65, 255, 256, 257, 513, 1900]


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        *((heads, torch.bfloat16) for heads in HEADS.values()),
        *((HEADS["9/3x64"], dtype) for dtype in (torch.float32, torch.float16)),
    ],
    ids=str,
)
def test_ragged_decodes_equal_the_two_steps(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    for num_reqs in (1, 7, 64):
        lengths = [LENGTHS[(3 * i + num_reqs) % 9] for i in range(num_reqs)]
        case = fused_case(lengths, heads, dtype, padded_requests=2, has_norm=num_reqs != 7)
        other = case.copy()
        expected = fused_decode_reference(**other.arguments)
        tolerance = TOLERANCE[dtype]
        for reads_early in (False, True):
            actual = fused_decode(**case.arguments, reads_early=reads_early)
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
            assert not actual[num_reqs:].any()
            assert_cache(case, other, tolerance)


def test_a_replayed_graph_follows_lengths_that_grow() -> None:
    case = fused_case([300, 40, 1000], (16, 8, 128), torch.bfloat16)
    fused_decode(**case.arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_decode(**case.arguments)
    for _ in range(5):
        graph.replay()
        expected = fused_decode_reference(**case.copy().arguments)
        torch.testing.assert_close(out, expected, rtol=4e-2, atol=4e-2)
        case.batch.seq_lens.add_(1)
        case.positions.add_(1)
        case.batch.slot_mapping.add_(1)


@pytest.mark.parametrize("name", ["16/8x128", "14/2x64", "16/4x256", "71/1x64"])
def test_a_thousand_replays_of_split_layers_are_equal_to_the_bit(name: str) -> None:
    """The parts are joined in every layer while the next layer's programs already start.

    Each layer has a cache of its own, so it may read early although the layer before is not late.
    """
    plans = [
        DecodePlan(4, 32, 4, 2, 512),
        DecodePlan(8, 32, 4, 2, 256),
        DecodePlan(16, 32, 4, 2),
        DecodePlan(32, 32, 4, 2),
        DecodePlan(2, 32, 4, 2),
    ]
    layers = []
    for i, plan in enumerate(plans):
        lengths = [LENGTHS[(5 * i + 2 * j) % 9] for j in range(40)]
        layers.append((fused_case(lengths, HEADS[name], torch.bfloat16, padded_requests=3), plan))
    expected = [fused_decode_reference(**case.copy().arguments) for case, _ in layers]
    for case, plan in layers:
        fused_decode(**case.arguments, plan=plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [fused_decode(**case.arguments, plan=plan) for case, plan in layers]
    graph.replay()
    first = [out.clone() for out in outs]
    for actual, wanted in zip(first, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=4e-2, atol=4e-2)
        assert not actual[40:].any()
    assert num_unequal_replays(graph, outs, first) == 0


@pytest.mark.parametrize(("num_reqs", "max_seq_len"), [(100, 4096), (200, 0)])
def test_layers_behind_late_producers_are_equal_to_the_bit(num_reqs: int, max_seq_len: int) -> None:
    """Rotation and attention of a full device, as self_attention launches them, a thousand times.

    What comes before a layer is late, and each kernel starts while the one before it runs.
    """
    layers = []
    for i in range(2):
        lengths = [LENGTHS[(5 * i + 2 * j) % 9] for j in range(num_reqs - 1)] + [2500]
        case = fused_case(lengths, HEADS["16/8x128"], torch.bfloat16, padded_requests=3)
        # contiguous: the producer copies memory as it lies
        qkv, batch = case.qkv.contiguous(), case.batch._replace(max_seq_len=max_seq_len)
        case = replace(case, qkv=qkv, batch=batch)
        layers.append((case, case.qkv.clone()))
    expected = [fused_decode_reference(**case.copy().arguments) for case, _ in layers]

    def run() -> list[torch.Tensor]:
        outs = []
        for case, source in layers:
            slow_copy(source, case.qkv)
            arguments = dict(case.arguments)
            batch, scale = arguments.pop("batch"), arguments.pop("scale")
            caches = arguments["k_cache"], arguments["v_cache"]
            qk_norm_rope_kv_write(**arguments, slot_mapping=batch.slot_mapping)
            q = case.qkv[:, : 16 * 128].view(-1, 16, 128)
            outs.append(decode_attention(q, *caches, batch, scale, reads_early=True))
        return outs

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    graph.replay()
    first = [out.clone() for out in outs]
    for actual, wanted in zip(first, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=4e-2, atol=4e-2)
        assert not actual[num_reqs:].any()
    assert num_unequal_replays(graph, outs, first) == 0


@pytest.mark.parametrize("is_even", [False, True])
def test_every_plan_of_the_medium_sizes_equals_the_two_steps(is_even: bool) -> None:
    for num_reqs in (20, 45, 90):
        lengths = [LENGTHS[(2 * i) % 9] for i in range(num_reqs)]
        case = fused_case(lengths, HEADS["16/8x128"], torch.bfloat16, padded_requests=1)
        case = replace(case, batch=case.batch._replace(is_even=is_even))
        other = case.copy()
        expected = fused_decode_reference(**other.arguments)
        actual = fused_decode(**case.arguments)
        torch.testing.assert_close(actual, expected, rtol=4e-2, atol=4e-2)
        assert_cache(case, other, 4e-2)


def test_counters_are_never_made_while_a_graph_is_captured() -> None:
    device = torch.zeros(1, device="cuda").device
    too_many = share_counters(device, 1).numel() + 1
    with (
        pytest.raises(RuntimeError, match="run a batch of this size once"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        share_counters(device, too_many)
    assert share_counters(device, 1).numel() < too_many
