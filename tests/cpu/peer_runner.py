"""A runner without a model for peer all-reduces on GPUs: compares, soaks, and waits in vain."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peer_soak import Soak

from nanorunner.kernels.peer_all_reduce import (
    DTYPES,
    all_reduce_add_rms_norm,
    all_reduce_max,
    all_reduce_one_shot,
    all_reduce_two_shot,
    fits_add_rms_norm,
    one_shot_bytes,
    sum_in_rank_order,
    two_shot_bytes,
)
from nanorunner.kernels.peer_ring import CALL_SHARES, COUNTER, GIVE_UP_AFTER
from nanorunner.kernels.rms_norm import add_rms_norm
from nanorunner.workers.device import Download
from nanorunner.workers.distributed import Group
from nanorunner.workers.messages import RunnerConfig

CHECKS = frozenset({"compare", "compare_norms", "soak", "wait_in_vain"})
WITH_REPLY = CHECKS | {"pid", "forms", "compile", "close"}
METHODS = WITH_REPLY | {"meet_in_graph"}
EPS = 1e-6
SIZES_BYTES = (8, 24, 2048, 8192, 8200, 65536, 262152, 1 << 20)
NORM_SHAPES = ((1, 4096), (3, 1024), (32, 4096), (128, 2048))
CHUNK_REPLAYS = 1000
CHUNK_TIMEOUT_S = 60.0
GRAPH_CALLS = 72  # all-reduces of one decode step of a model with 36 layers


class PeerRunner:
    """Every method needs all ranks at once, and each says by itself what was wrong."""

    def __init__(self, rank: int, group: Group) -> None:
        self.rank = rank
        self.group = group

    def pid(self) -> int:
        return os.getpid()

    def forms(self) -> tuple[int, int] | None:
        """Return the sizes of the forms, None without peer memory."""
        peers = self.group.peers
        return None if peers is None else (peers.sizes.one_shot, peers.sizes.two_shot)

    def compile(self) -> None:
        """Make meet_in_graph's sum once: the first one of a dtype compiles the kernels."""
        x = torch.ones(4096, dtype=torch.bfloat16, device=self.group.device)
        Download(self.group.all_reduce(x).float()).result(60.0)

    def compare(self) -> list[str]:
        """Return how sums and maxima differ from the reference; [] when not by a bit."""
        assert self.group.peers is not None, "no peer memory"
        ring = self.group.peers.ring
        forms: list[tuple[str, int, Callable[[torch.Tensor], object]]] = [
            ("one shot", one_shot_bytes(ring), lambda x: all_reduce_one_shot(x, ring)),
            ("two shots", two_shot_bytes(ring), lambda x: all_reduce_two_shot(x, ring)),
            ("group", 1 << 30, self.group.all_reduce),
        ]
        problems = []
        for dtype in DTYPES:
            for num_bytes in SIZES_BYTES:
                parts = self._parts((num_bytes // dtype.itemsize,), dtype)
                expected = sum_in_rank_order(parts)
                for name, limit, form in forms:
                    for _ in range(3 if num_bytes <= limit else 0):
                        out = parts[self.rank].clone()
                        form(out)
                        problems += differences(f"{name}, {num_bytes} B", out, expected)
        for count in (1, 64, 1024):
            keys = [part.view(torch.int64) for part in self._parts((2 * count,), torch.float32)]
            expected = torch.stack(keys).amax(0)
            for run in (lambda x: all_reduce_max(x, ring), self.group.all_reduce_max):
                out = keys[self.rank].clone()
                run(out)
                problems += differences(f"maximum of {count}", out, expected)
        return problems

    def compare_norms(self) -> tuple[list[str], list[int]]:
        """Return how sums with a norm differ from their parts, and checksums of all the norms.

        Of the fused form wherever one shot takes the size, and of the group, whatever it chooses.
        """
        assert self.group.peers is not None, "no peer memory"
        ring = self.group.peers.ring
        problems, sums = [], []
        for dtype, shapes in ((torch.bfloat16, NORM_SHAPES), (torch.float16, NORM_SHAPES[:1])):
            for shape in shapes:
                parts = self._parts(shape, dtype)
                residual, weight = self._parts(shape, dtype, seed=50)[0], parts[0][0].abs()
                forms: list[tuple[str, Callable[..., torch.Tensor]]] = [
                    ("group", self.group.all_reduce_add_rms_norm)
                ]
                if parts[0].numel() * dtype.itemsize <= one_shot_bytes(ring):
                    fits = fits_add_rms_norm(parts[0], residual, weight, ring)
                    assert fits, f"{shape} is not for the fused form"
                    forms.append(("fused", partial(all_reduce_add_rms_norm, ring=ring)))
                summed = residual.clone()
                expected = add_rms_norm(sum_in_rank_order(parts), summed, weight, EPS)
                for name, form in forms:
                    its_residual = residual.clone()
                    out = form(parts[self.rank].clone(), its_residual, weight, EPS)
                    problems += differences(f"residual, {name}, {shape}", its_residual, summed)
                    error = float((out.float() - expected.float()).abs().max())
                    if not torch.allclose(out, expected, rtol=1e-2, atol=1e-3):
                        problems.append(f"norm, {name}, {shape}, {dtype}: off by {error}")
                    sums.append(zlib.crc32(out.view(torch.uint8).cpu().numpy().tobytes()))
        return problems, sums

    def soak(self, replays: int) -> dict[str, Any]:
        """Replay a graph of all forms, its ranks skewed at random; return errors by call."""
        assert self.group.peers is not None, "no peer memory"
        peers = self.group.peers
        soak = Soak(self.rank, peers.ring)
        start = time.monotonic()
        for first in range(0, replays, CHUNK_REPLAYS):
            for _ in range(min(CHUNK_REPLAYS, replays - first)):
                soak.graph.replay()
            try:
                errors = Download(soak.errors).result(CHUNK_TIMEOUT_S)
            except TimeoutError as error:
                peers.abort()  # or the GPU would stay busy after this process has gone
                raise TimeoutError(f"replays {first} to {first + CHUNK_REPLAYS}: {error}") from None
            if errors.any():
                break
        return {
            "replays": int(soak.step),
            "errors": soak.named_errors(),
            "seconds": round(time.monotonic() - start, 1),
            "calls": float(peers.ring.table[COUNTER]) / CALL_SHARES,
        }

    def wait_in_vain(self, seconds: float) -> dict[str, Any]:
        """Let rank 0 give up by itself after so many seconds, the others never come."""
        assert self.group.peers is not None, "no peer memory"
        x = torch.ones(4096, dtype=torch.bfloat16, device=self.group.device)
        self.compile()
        if self.rank != 0:
            return {}
        self.group.peers.ring.table[GIVE_UP_AFTER] = int(seconds * 1e9)
        start = time.monotonic()
        for _ in range(2):
            self.group.all_reduce(x)
        Download(x.float()).result(30.0)  # NumPy has no bfloat16
        waited = time.monotonic() - start
        try:
            self.group.check()
        except RuntimeError as error:
            return {"waited": waited, "error": str(error)}
        return {"waited": waited, "error": ""}

    def meet_in_graph(self, late_rank: int, late_s: float) -> float:
        """Replay a graph of many all-reduces of ones; return the last sum."""
        x = torch.ones(4096, dtype=torch.bfloat16, device=self.group.device)
        for _ in range(2):
            self.group.all_reduce(x)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(GRAPH_CALLS):
                self.group.all_reduce(x.fill_(1))
        if self.rank == late_rank:
            time.sleep(late_s)
        graph.replay()
        return float(Download(x.float()).result(60.0)[-1])

    def close(self) -> None:
        self.group.close()

    def _parts(
        self, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1
    ) -> list[torch.Tensor]:
        """Return every rank's random part, the same lists on every rank."""
        parts = []
        for rank in range(self.group.tp):
            generator = torch.Generator(self.group.device).manual_seed(1000 * seed + rank)
            x = torch.randn(shape, generator=generator, device=self.group.device)
            parts.append(x.to(dtype))
        return parts


def differences(name: str, out: torch.Tensor, expected: torch.Tensor) -> list[str]:
    """Return where out is not expected, bit for bit, as a list of at most one line."""
    wrong = (out != expected).flatten().nonzero().flatten()
    if not len(wrong):
        return []
    first = int(wrong[0])
    got, wanted = out.flatten()[first].item(), expected.flatten()[first].item()
    return [
        f"{name}, {out.dtype}: {len(wrong)} of {out.numel()} differ, the first at {first}: "
        f"{got} instead of {wanted}"
    ]


def make_runner(config: RunnerConfig, rank: int, group: Group) -> PeerRunner:
    """Return the runner."""
    return PeerRunner(rank, group)
