"""--check-ranks finds a rank that has drifted, names it, and takes no good rank for a bad one."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_distributed import on_ranks

from nanorunner.kernels.attention_batch import AttentionBatch
from nanorunner.kernels.rms_norm import add_rms_norm
from nanorunner.workers.check_ranks import RankCheck
from nanorunner.workers.checked_group import CheckedGroup
from nanorunner.workers.digest import CHUNK_WORDS, Digester
from nanorunner.workers.distributed import Group
from nanorunner.workers.messages import RunnerConfig
from nanorunner.workers.models.decoder import Decoder
from nanorunner.workers.rank_agreement import RankCheckFailed
from nanorunner.workers.weight_plan import Box
from nanorunner.workers.weights import ReadSlice, dummy_reader, fill
from nanorunner.workshop.fault_lab import lab_config
from nanorunner.workshop.fault_runner import swap_kv_heads

CPU = torch.device("cpu")
LAYER, VICTIM = 1, 1
STEP = 41
NUM_IDS = 6
PROMPT = list(range(3, 20))

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_changes_with_any_bit_and_with_nothing_else(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**62), 2**62, (5, 24), generator=generator)
    x = bits.view(dtype)[:, :21]  # a view with a stride, NaN among its values
    digester = Digester(CPU)
    expected = digester.of(x)
    assert torch.equal(digester.of(x.clone()), expected)
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for _ in range(200):
        row, column = (int(torch.randint(size, (), generator=generator)) for size in x.shape)
        bit = int(torch.randint(8 * dtype.itemsize - 1, (), generator=generator))
        other = x.clone()
        other.view(words)[row, column] ^= 1 << bit
        assert not torch.equal(digester.of(other), expected)
    assert not torch.equal(digester.of(x.roll(1, dims=0)), expected)
    assert not torch.equal(digester.of(x.roll(1, dims=1)), expected)
    square = x[:5, :5]
    assert not torch.equal(digester.of(square), digester.of(square.T))


def test_minus_zero_is_not_zero_and_a_large_tensor_is_taken_in_parts() -> None:
    digester = Digester(CPU)
    zero = torch.zeros(1, 3)
    assert not torch.equal(digester.of(zero), digester.of(-zero))
    large = torch.arange(3 * CHUNK_WORDS // 2, dtype=torch.int32).view(3, -1)
    other = large.clone()
    other[2, -1] += 1
    assert not torch.equal(digester.of(large), digester.of(other))
    one_column = torch.randn(5000, 1)
    assert torch.equal(digester.of(one_column), Digester(CPU).of(one_column))


def test_a_tensor_of_one_value_has_digest_0_where_that_tells_nothing() -> None:
    digester = Digester(CPU)
    nan = torch.full((2, 3), torch.nan)
    assert digester.zero_if_flat(digester.of(nan), nan) == 0
    nan[1, 2] = 1
    assert digester.zero_if_flat(digester.of(nan), nan) == digester.of(nan) != 0
    assert digester.of(torch.empty(0, 4)) == 0


class Trial:
    """One rank's decoder with the check on it, which runs a prompt and then a decode."""

    def __init__(
        self, config: RunnerConfig, group: Group, wrap: Callable[[ReadSlice], ReadSlice]
    ) -> None:
        self.config, self.group = config, group
        check = RankCheck(config, group)
        self.decoder = Decoder(
            config.model,
            tp=config.tp,
            rank=group.rank,
            dtype=torch.float32,
            device=CPU,
            group=CheckedGroup(group, check),
        )
        fill(self.decoder, wrap(dummy_reader(config.model, 0, torch.float32, CPU)))
        self.decoder.pack_for_cpu()
        check.watch(self.decoder)
        shape = (config.model.num_layers, 1, 256, self.decoder.local_kv_heads)
        self.caches = [list(torch.zeros(*shape, config.model.head_dim)) for _ in range(2)]
        self.step = check.watched(self.forward)
        self.first_id = 3

    @torch.inference_mode()
    def forward(self, wire: tuple[Any, ...]) -> torch.Tensor:
        """Run tokens wire[1] to wire[2] - 1 of a sequence."""
        begin, end = wire[1:]
        ids = torch.arange(begin, end) + self.first_id
        batch = AttentionBatch(
            query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            slot_mapping=torch.arange(begin, end),
            max_query_len=end - begin,
            max_seq_len=end,
        )
        hidden = self.decoder.forward(ids, torch.arange(begin, end), batch, *self.caches)
        logits = self.decoder.compute_logits(hidden[-1:])
        self.decoder.group.gather(logits)  # type: ignore[attr-defined]
        return hidden


def trial(
    tp: int,
    plant: Callable[[Trial], None] = lambda trial: None,
    wrap: Callable[[ReadSlice], ReadSlice] = lambda read: read,
    *,
    num_kv_heads: int = 4,
    is_fused: bool = False,
) -> str:
    """Run two steps on tp ranks, with `plant` on the victim; return what rank 0 has found."""
    config = lab_config(tp, check_ranks=True)
    config = replace(config, model=replace(config.model, num_heads=8, num_kv_heads=num_kv_heads))

    def body(group: Group) -> str:
        try:
            one = Trial(config, group, wrap)
            one.decoder.has_few_rows = is_fused
            if group.rank == VICTIM:
                plant(one)
            num_first = 1 if is_fused else 5  # a prompt is no decode of few rows
            one.step((STEP, 0, num_first))
            one.step((STEP + 1, num_first, num_first + 1))
        except RankCheckFailed as error:
            return str(error)
        except RuntimeError:  # the others' collective, once rank 0 has left
            return "" if group.rank else traceback.format_exc()
        return ""

    found = str(on_ranks(tp, body)[0])
    assert "\n" not in found
    return found


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize(("tp", "num_kv_heads"), [(2, 4), (3, 4), (4, 1), (5, 2)])
def test_good_ranks_are_not_taken_for_bad_ones(tp: int, num_kv_heads: int, is_fused: bool) -> None:
    assert trial(tp, num_kv_heads=num_kv_heads, is_fused=is_fused) == ""


def drift(trial: Trial) -> None:
    norm = trial.decoder.layers[LAYER].post_norm
    norm[7] = torch.nextafter(norm[7], torch.tensor(2.0))


def tear(trial: Trial) -> None:
    group, num_calls = trial.group, 0
    all_reduce = group.all_reduce

    def torn(x: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        x = all_reduce(x)
        if num_calls == 5:  # the embedding's, two of layer 0, then o's and down's of layer 1
            x[0, 3] = 0
        return x

    group.all_reduce = torn  # type: ignore[method-assign]


def leave_out(trial: Trial) -> None:
    group: Any = trial.decoder.group
    all_reduce_add_rms_norm, num_calls = group.all_reduce_add_rms_norm, 0

    def left_out(*args: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        normed: torch.Tensor = (add_rms_norm if num_calls == 3 else all_reduce_add_rms_norm)(*args)
        return normed

    group.all_reduce_add_rms_norm = left_out


def read_other_ids(trial: Trial) -> None:
    trial.first_id += 1


def hold_rank_0s_heads(trial: Trial) -> None:
    config, decoder = trial.config, trial.decoder
    other = Decoder(
        config.model, tp=config.tp, rank=0, dtype=torch.float32, device=CPU, group=decoder.group
    )
    fill(other, dummy_reader(config.model, 0, torch.float32, CPU))
    other.pack_for_cpu()  # as its own: another kernel would give other last bits
    theirs = other.layers[LAYER]
    decoder.layers[LAYER] = replace(decoder.layers[LAYER], qkv=theirs.qkv, qkv_bias=theirs.qkv_bias)


def have_other_keys(trial: Trial) -> None:
    decoder = trial.decoder
    qkv = decoder.layers[LAYER].qkv
    qkv = (qkv.to_dense() if qkv.is_mkldnn else qkv).clone()
    qkv[decoder.local_heads * decoder.head_shape.head_dim] += 1  # the first row of k
    decoder.layers[LAYER] = replace(decoder.layers[LAYER], qkv=qkv)


FAULTS: list[tuple[Callable[[Trial], None], int, list[str]]] = [
    (drift, 3, ["step 41, after the all-reduce of layers.1.o: its norm: ranks 0 and 2 hold"]),
    (tear, 3, ["step 41, after the all-reduce of layers.1.down: the residual", "rank 1 holds"]),
    (
        leave_out,
        2,
        [
            "step 41, after the all-reduce of layers.1.o",
            "rank 1 is after the all-reduce of layers.1.down instead",
            "all were together is the all-reduce of layers.0.down",
        ],
    ),
    (read_other_ids, 2, ["step 41, after the step's inputs: input ids: rank 0 holds"]),
    (
        hold_rank_0s_heads,
        2,
        ["layer 1, q: ranks 0 and 1 hold the same bits", "query heads 0..3 and query heads 4..7"],
    ),
]


@pytest.mark.parametrize(("plant", "tp", "words"), FAULTS, ids=lambda value: str(value)[:30])
def test_a_planted_fault_is_named_with_place_and_ranks(
    plant: Callable[[Trial], None], tp: int, words: list[str]
) -> None:
    found = trial(tp, plant)
    for word in words:
        assert word in found


@pytest.mark.parametrize("is_fused", [False, True])
def test_ranks_that_share_a_kv_head_are_compared_in_it(is_fused: bool) -> None:
    found = trial(2, have_other_keys, num_kv_heads=1, is_fused=is_fused)
    assert found.startswith("step 41, after the all-reduce of layers.1.o: layer 1, k: ranks 0 and")
    assert found.endswith("the same slice: KV heads 0..0")


def test_a_wrong_shard_is_not_found_at_run_time_as_the_docstring_says() -> None:
    assert trial(2, lambda trial: swap_kv_heads(trial.decoder, LAYER)) == ""


def test_a_checkpoint_that_repeats_a_head_is_told_and_is_no_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def repeat(read: ReadSlice) -> ReadSlice:
        def one_head(key: str, box: Box) -> torch.Tensor:
            rows = read(key, box)
            if f"layers.{LAYER}.self_attn.k_proj" not in key:
                return rows
            return torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))

        return one_head

    with caplog.at_level(logging.WARNING, "nanorunner"):
        assert trial(2, wrap=repeat) == ""
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("not told apart: layer 1, k: ranks 0 and 1")
