"""The full sampler on a GPU: the CPU's results, no synchronisation, and the time of top-k/top-p."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nanorunner.kernels.logprobs import (
    row_statistics_reference,
    row_statistics_triton,
    top_keys_reference,
    top_keys_triton,
)
from nanorunner.kernels.sample_keys import sample_keys, sample_keys_reference
from nanorunner.kernels.token_keys import key_ids, token_keys
from nanorunner.kernels.top_k_top_p_triton import top_k_top_p_cut, top_k_top_p_cut_reference
from nanorunner.workers.device import Device
from nanorunner.workers.full_sampling import FullSampling
from nanorunner.workers.sampler_v2 import SamplerV2
from nanorunner.workers.sampling_state import SamplingState
from nanorunner.workers.staged_tensor import StagedWriter

QWEN = 151_936


class Alone:
    """The group of one rank."""

    tp = 1

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return x


class Bench:
    """A sampler with its state on one device; the settings go round over the rows."""

    def __init__(self, kind: str, vocab: int, num_rows: int, settings: list[FullSampling]) -> None:
        self.device = Device(kind, 0)
        place = self.device.torch_device
        writer = StagedWriter(place, depth=2, debug=True)
        tokens = torch.randint(0, vocab, (num_rows, 64), generator=torch.Generator().manual_seed(1))
        token_ids = tokens.int().to(place)
        prompt_len, prefill_len = (
            torch.full((num_rows,), n, dtype=torch.int32, device=place) for n in (20, 30)
        )
        self.state = SamplingState(writer, num_rows, vocab, 0, self.device.upload, place, num_rows)
        self.sampler = SamplerV2(self.state, token_ids, prompt_len, prefill_len, Alone())
        for row in range(num_rows):
            self.state.add(row, settings[row % len(settings)]._replace(seed=row), 20, 30)
        writer.apply()
        self.state.fill_slots(token_ids, prompt_len, prefill_len)
        self.rows = np.arange(num_rows)
        self.mapping = torch.arange(num_rows, dtype=torch.int32, device=place)
        self.positions = torch.full((num_rows,), 29, device=place)
        self.needs = self.state.needs(self.rows)

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        return self.sampler.sample(logits, self.mapping, self.positions, self.rows, self.needs)

    def count(self, ids: torch.Tensor) -> None:
        self.sampler.count_sampled(ids, self.mapping, self.positions, self.needs)


KINDS = [
    FullSampling(temperature=0.0),
    FullSampling(temperature=0.9),
    FullSampling(top_k=12),
    FullSampling(temperature=1.2, top_p=0.8),
    FullSampling(top_k=20, top_p=0.95),
    FullSampling(temperature=1.5, min_p=0.05),
    FullSampling(min_p=0.02, top_p=0.9),
    FullSampling(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
    FullSampling(logit_bias=((3, 2.5), (150, 3.0))),
    FullSampling(allowed_token_ids=(5, 80, 160, 202)),
    FullSampling(min_tokens=30, stop_ids=(0, 100, 201)),
    FullSampling(bad_words=((7,), (4, 9), (4, 200))),
    FullSampling(logprobs=4),
]


def random_logits(num_rows: int, vocab: int, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab + num_rows)
    return torch.randn(num_rows, vocab, generator=generator) * spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [999, 4097, QWEN])
def test_keys_are_the_cpus(vocab: int, dtype: torch.dtype) -> None:
    logits = random_logits(7, vocab).to(dtype)
    heat = torch.tensor([0.0, 0.6, 1.0, 2.0, 0.0, 0.3, 1.5])
    rows, positions = torch.arange(7), torch.arange(7) * 777
    cut = token_keys(torch.full((7,), 2.0), torch.zeros(7, dtype=torch.int64))
    for one in (None, cut):
        expected = sample_keys_reference(logits, rows, positions, heat, rows - 3, 50, one)
        on_gpu = sample_keys(
            logits.cuda(),
            rows.cuda(),
            positions.cuda(),
            heat.cuda(),
            (rows - 3).cuda(),
            50,
            None if one is None else one.cuda(),
        )
        assert key_ids(on_gpu).tolist() == key_ids(expected).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "spread"), [(1, 1.0), (999, 1.0), (32_000, 0.01), (QWEN, 3.0)])
def test_cuts_are_the_cpus_and_do_not_depend_on_the_batch(
    vocab: int, spread: float, dtype: torch.dtype
) -> None:
    logits = random_logits(24, vocab, spread).to(dtype)
    logits[5] = 0
    logits[6] = logits[6].round()  # thousands of equal logits
    heat = torch.tensor([1.0, 0.7, 2.0, 0.0]).repeat(6)
    k = torch.tensor([0, 20, 1, 5000, 600, 0, 0, 40_000, 1000, 512, 513, 0]).repeat(2)
    p = torch.tensor([0.9, 0.95, 1.0, 0.5, 0.9999999, 0.3, 0.7, 1.0]).repeat(3)
    arguments = (logits.cuda(), heat.cuda(), k.cuda(), p.cuda())
    together = top_k_top_p_cut(*arguments)
    for _ in range(5):
        assert torch.equal(top_k_top_p_cut(*arguments), together)
    for row in range(24):
        part = top_k_top_p_cut(*(a[row : row + 1].clone() for a in arguments))
        assert int(part) == int(together[row])
    keys = token_keys(logits, torch.arange(vocab))
    expected = top_k_top_p_cut_reference(logits, heat, k, p)
    found, right = ((keys >= cut[:, None]).sum(-1) for cut in (together.cpu(), expected))
    # exp differs in its last bits, so the last ids that reach p may be a few more or fewer of many
    assert ((found - right).abs() <= 1 + right * 1e-4).all()
    only_k = p == 1
    assert torch.equal(found[only_k], right[only_k])


@pytest.mark.parametrize("vocab", [999, QWEN])
def test_log_probabilities_are_the_cpus(vocab: int) -> None:
    logits = random_logits(9, vocab).bfloat16()
    ids = torch.arange(9) * 100
    expected = row_statistics_reference(logits, ids)
    found = row_statistics_triton(logits.cuda(), ids.cuda())
    torch.testing.assert_close(found[0].cpu(), expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(found[1].cpu(), expected[1])
    assert torch.equal(found[2].cpu(), expected[2])
    for count in (1, 5, 600, vocab):
        on_gpu = top_keys_triton(logits.cuda(), count)
        assert torch.equal(on_gpu.cpu(), top_keys_reference(logits, count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1003, QWEN])
def test_every_kind_of_row_draws_what_the_cpu_draws(vocab: int, dtype: torch.dtype) -> None:
    num_rows = 3 * len(KINDS)
    here, there = (Bench(kind, vocab, num_rows, KINDS) for kind in ("cpu", "cuda"))
    logits = random_logits(num_rows, vocab).to(dtype)
    for _ in range(3):
        expected, found = here.draw(logits), there.draw(logits.cuda())
        # a near-tie, or the last id of a nucleus, may differ
        assert int((expected != found.cpu()).sum()) <= 1
        here.count(expected)
        there.count(expected.cuda())
    assert torch.equal(here.state.output_counts, there.state.output_counts.cpu())
    assert torch.equal(here.state.prompt_bits, there.state.prompt_bits.cpu())


def test_a_row_alone_draws_what_it_draws_beside_others() -> None:
    bench = Bench("cuda", QWEN, len(KINDS), KINDS)
    logits = random_logits(len(KINDS), QWEN).bfloat16().cuda()
    together = bench.draw(logits).tolist()
    for row in range(len(KINDS)):
        part = slice(row, row + 1)
        alone = bench.sampler.sample(
            logits[part],
            bench.mapping[part],
            bench.positions[part],
            bench.rows[part],
            bench.needs[part],
        )
        assert alone.tolist() == [together[row]]


def test_sampling_never_waits_for_the_device() -> None:
    bench = Bench("cuda", 4097, 2 * len(KINDS), KINDS)
    logits = random_logits(2 * len(KINDS), 4097).cuda()
    bench.count(bench.draw(logits))  # compiles
    bench.sampler.logprobs(logits, bench.draw(logits), bench.rows)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for end in range(len(KINDS), 2 * len(KINDS)):
            part = slice(0, end)
            bench.needs, rows = bench.state.needs(bench.rows[part]), bench.rows[part]
            mapping, positions = bench.mapping[part], bench.positions[part]
            ids = bench.sampler.sample(logits[part], mapping, positions, rows, bench.needs)
            bench.sampler.count_sampled(ids, mapping, positions, bench.needs)
            bench.sampler.logprobs(logits[part], ids, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_unlikely_tail_gets_its_share() -> None:
    """A head e^18 times as likely as each of 199,999 others: 500,000 draws, within 10 sigma."""
    counts = torch.full((200_000,), 2.0, dtype=torch.float64)
    counts[0] = round(math.exp(18))
    row = counts.log().float().cuda()
    heat, seed = torch.ones(1, device="cuda"), torch.tensor([7], device="cuda")
    tail = 0
    for start in range(0, 500_000, 50_000):
        positions = torch.arange(start, start + 50_000, device="cuda")
        nobody = torch.zeros(50_000, dtype=torch.int32, device="cuda")
        keys = sample_keys(row.expand(50_000, -1), nobody, positions, heat, seed)
        tail += int((key_ids(keys) != 0).sum())
    print(f"\ntail drawn {tail} times; expected 3027.5, sigma 54.9")
    assert 2479 <= tail <= 3576


def milliseconds(act: Callable[[], Any]) -> float:
    """Return the median GPU time of 30 calls."""
    for _ in range(5):
        act()
    times = []
    for _ in range(30):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        # the launches queue up behind this, so no gap between them is measured
        torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
        events[0].record()
        act()
        events[1].record()
        events[1].synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return float(np.median(times))


@pytest.mark.parametrize(("num_rows", "limit_ms"), [(64, 0.3), (256, 0.9)])
def test_top_k_and_top_p_cost_a_tenth_of_a_decode_step(num_rows: int, limit_ms: float) -> None:
    """What top_k 20, top_p 0.95 add to plain sampling, on every row of a Qwen vocabulary."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    logits = torch.randn(num_rows, QWEN, generator=generator, device="cuda") * 2.5
    logits = logits.bfloat16()
    plain = Bench("cuda", QWEN, num_rows, [FullSampling()])
    base = milliseconds(lambda: plain.draw(logits))
    for name, sampling in {
        "top_k 20, top_p 0.95": FullSampling(top_k=20, top_p=0.95),
        "top_p 0.95": FullSampling(top_p=0.95),
        "top_k 50": FullSampling(top_k=50),
        "min_p 0.05": FullSampling(min_p=0.05),
        "penalties": FullSampling(repetition_penalty=1.2),
    }.items():
        bench = Bench("cuda", QWEN, num_rows, [sampling])
        took = milliseconds(lambda bench=bench: bench.draw(logits))  # type: ignore[misc]
        print(f"\n{num_rows} rows: plain {base:.3f} ms, {name} {took:.3f} ms")
        if name == "top_k 20, top_p 0.95":
            assert took - base < limit_ms
    arguments = (
        logits,
        torch.ones(num_rows, device="cuda"),
        torch.full((num_rows,), 20, device="cuda"),
        torch.full((num_rows,), 0.95, device="cuda"),
    )
    print(f"the cut alone {milliseconds(lambda: top_k_top_p_cut(*arguments)):.3f} ms")
