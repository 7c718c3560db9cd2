"""Several ranks on one GPU: never by itself, always said, refused by name where it cannot be.

What needs no GPU of it: how it is resolved, and the way through host memory on CPU tensors.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_distributed import on_ranks
from test_resolve import H200, LAPTOP, QWEN, T4

from nanorunner.bench.result import caveats
from nanorunner.config import make_config
from nanorunner.resolve import GIB, Resolved, resolve
from nanorunner.workers.distributed import Group
from nanorunner.workers.host_relay import HostRelay

ONE_GPU = replace(LAPTOP, gpus=(H200,), cuda_problem="")
SERVER = replace(ONE_GPU, gpus=(H200, H200))
SHARED = {**QWEN, "tp": 2, "share_gpu": True}
CPU = torch.device("cpu")


def notes_of(resolved: Resolved) -> str:
    return "\n".join(resolved.notes)


def test_more_ranks_than_gpus_are_refused_and_the_way_out_is_named() -> None:
    with pytest.raises(ValueError, match="tp 2: 1 GPU") as caught:
        resolve(make_config({**QWEN, "tp": 2}), ONE_GPU)
    assert "--share-gpu" in str(caught.value)
    assert "--device cpu" in str(caught.value)


def test_ranks_share_gpu_0_only_when_asked_and_the_log_says_so() -> None:
    resolved = resolve(make_config(SHARED), ONE_GPU)
    runner = resolved.runner_config
    assert (runner.device, runner.tp, runner.share_gpu) == ("cuda", 2, True)
    assert [runner.gpu_of(rank) for rank in range(2)] == [0, 0]
    notes = notes_of(resolved)
    assert "--share-gpu: all 2 ranks work on GPU 0, H200" in notes
    assert "all-reduce gloo, through host memory" in notes
    assert resolved.config.share_gpu

    alone = resolve(make_config({**QWEN, "tp": 2}), replace(ONE_GPU, gpus=(H200, H200)))
    assert not alone.runner_config.share_gpu
    assert [alone.runner_config.gpu_of(rank) for rank in range(2)] == [0, 1]


def test_there_are_no_graphs_and_the_log_says_why() -> None:
    resolved = resolve(make_config(SHARED), ONE_GPU)
    assert resolved.runner_config.enforce_eager
    assert "CUDA graphs off: --share-gpu sums in host memory" in notes_of(resolved)
    checked = resolve(make_config({**QWEN, "check_ranks": True, "tp": 2}), SERVER)
    assert checked.runner_config.enforce_eager
    assert "CUDA graphs off: --check-ranks looks between" in notes_of(checked)
    assert "check-ranks: weights and every step" in notes_of(checked)
    plain = resolve(make_config({**QWEN, "tp": 2}), SERVER)
    assert not plain.runner_config.enforce_eager


def test_it_is_refused_where_no_gpu_is_found() -> None:
    with pytest.raises(ValueError, match=r"share_gpu: no NVIDIA GPU was found.*leave it out"):
        resolve(make_config(SHARED), LAPTOP)


def test_memory_is_counted_for_all_ranks_on_the_one_gpu() -> None:
    resolved = resolve(make_config(SHARED), ONE_GPU)
    assert resolved.runner_config.kv_cache_bytes == GIB
    assert "of a shared GPU no rank can tell what is left" in notes_of(resolved)
    eight_b = {**SHARED, "model": "qwen3-8b", "dtype": "float16"}
    with pytest.raises(ValueError, match=r"the weights of 2 ranks take .*a smaller model"):
        resolve(make_config(eight_b), replace(ONE_GPU, gpus=(T4,)))


def test_the_kinds_of_other_gpus_do_not_matter() -> None:
    mixed = replace(ONE_GPU, gpus=(H200, T4))
    assert resolve(make_config(SHARED), mixed).runner_config.dtype == "bfloat16"


def test_a_result_s_table_says_that_ranks_shared_a_gpu() -> None:
    config = asdict(resolve(make_config(SHARED), ONE_GPU).config)
    assert caveats(config) == [
        "--share-gpu: 2 ranks on one GPU, over gloo; not for comparison",
    ]
    (line,) = caveats(config | {"share_gpu": False, "check_ranks": True})
    assert line.startswith("--check-ranks: ")
    assert caveats(asdict(resolve(make_config(QWEN), ONE_GPU).config)) == []


def relayed(group: Group) -> Group:
    """Put the relay between a group of CPU tensors and gloo."""
    group._group = HostRelay(group._group, CPU, timeout_s=60.0)
    return group


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_gathers_go_through_the_relay(dtype: torch.dtype) -> None:
    def body(group: Group) -> list[Any]:
        group = relayed(group)
        results: list[Any] = []
        for size in (4, 7, 2):  # the buffer grows, and is used in part
            x = torch.full((3, size), float(group.rank + 1), dtype=dtype)
            assert group.all_reduce(x) is x
            column = x.clone()[:, :1] * (group.rank + 1)
            results.append((x, group.all_gather(column), group.gather(column)))
        keys = torch.tensor([group.rank, -group.rank])
        results.append(group.all_reduce_max(keys).tolist())
        return results

    by_rank: list[Any] = on_ranks(3, body)
    for rank, (*sizes, maxima) in enumerate(by_rank):
        assert maxima == [2, 0]
        for size, (x, whole, parts) in zip((4, 7, 2), sizes, strict=True):
            assert torch.equal(x, torch.full((3, size), 6.0, dtype=dtype))
            assert whole.tolist() == [[6.0, 12.0, 18.0]] * 3
            assert (parts is None) == (rank != 0)
            if parts is not None:
                assert [part[0, 0].item() for part in parts] == [6.0, 12.0, 18.0]


def test_the_relay_reduces_views_too() -> None:
    def body(group: Group) -> torch.Tensor:
        whole = torch.zeros(4, 6)
        whole[:, ::2] = group.rank + 1
        sum_: Any = dist.ReduceOp.SUM
        options = dist.AllreduceOptions()
        options.reduceOp = sum_
        HostRelay(group._group, CPU, timeout_s=60.0).allreduce([whole[:, ::2]], options)
        return whole

    for whole in on_ranks(2, body):
        assert whole.tolist() == [[3.0, 0.0] * 3] * 4  # type: ignore[attr-defined]
