"""A rehearsal compiles on threads what is launched later; a failed one ends the start."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from compiling_process import run_compiling

from nanorunner.kernels import compile_ahead as ahead
from nanorunner.kernels.compile_ahead import Compilers, compile_ahead
from nanorunner.kernels.triton_support import is_compiling_only
from nanorunner.workers.cuda_graphs import capture_graph

FOLDER = Path(__file__).parent
CPU = torch.device("cpu")
LIMIT_S = 60.0  # of what takes milliseconds


class Kernel:
    """What a compilation returns, to those who load it."""

    def __init__(self, name: str, loaded: list[str]) -> None:
        self.name, self._loaded = name, loaded

    @property
    def run(self) -> None:
        self._loaded.append(self.name)


def test_what_was_rehearsed_is_launched_later_without_compiling(tmp_path: Path) -> None:
    printed = run_compiling("compile_on_threads.py", cache=tmp_path, timeout_s=280)
    assert json.loads(printed) == {
        "asked": 2,
        "rehearsed": ["_rms_norm_kernel", "_silu_mul_kernel"],
        "launched_meanwhile": [],
        "compiled_later": 0,
        "launched_later": 2,
    }


def ask(compilers: Compilers, name: str, compile_kernel: Callable[[], Any]) -> None:
    """Ask for a kernel as Triton does at a launch."""
    mode = triton.runtime._async_compile.active_mode.get()
    arguments = [name, compile_kernel, lambda kernel: None]
    if "cleanup_fn" in mode.submit.__code__.co_varnames:  # since Triton 3.9
        arguments.append(lambda future: None)
    mode.submit(*arguments)


def test_kernels_compile_at_the_same_time_and_each_is_loaded() -> None:
    both = threading.Barrier(2, timeout=LIMIT_S)
    loaded: list[str] = []

    def compile_kernel() -> Kernel:
        both.wait()  # passes only when two are at it
        return Kernel("kernel", loaded)

    with compile_ahead(CPU, 2, timeout_s=LIMIT_S) as compilers:
        for name in ("a", "b"):
            ask(compilers, name, compile_kernel)
    assert loaded == ["kernel", "kernel"]


def test_a_kernel_that_does_not_compile_is_raised_and_the_next_start_is_free() -> None:
    def fail() -> None:
        raise ValueError("no such instruction")

    for _ in range(2):
        with (
            pytest.raises(ValueError, match="no such instruction"),
            compile_ahead(CPU, 1, timeout_s=LIMIT_S) as compilers,
        ):
            ask(compilers, "bad", fail)


def test_a_compiler_that_hangs_ends_the_start_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "STOP_WAIT_S", 0.1)
    release = threading.Event()

    def start() -> None:
        with compile_ahead(CPU, 1, timeout_s=0.1) as compilers:
            ask(compilers, "slow", lambda: release.wait(LIMIT_S))
            ask(compilers, "queued", lambda: release.wait(LIMIT_S))

    begin = time.monotonic()
    try:
        with pytest.raises(TimeoutError, match=r"2 kernels are not compiled after 0\.1 s"):
            start()
        assert time.monotonic() - begin < LIMIT_S, "it has waited for the compiler"
    finally:
        release.set()


def test_an_error_beside_the_rehearsal_stops_the_threads() -> None:
    before = set(threading.enumerate())  # of an earlier test one may be about to end

    def start() -> None:
        with compile_ahead(CPU, 2, timeout_s=LIMIT_S) as compilers:
            ask(compilers, "a", lambda: Kernel("a", []))
            raise OSError("no weights")

    with pytest.raises(OSError, match="weights"):
        start()
    assert set(threading.enumerate()) <= before


def test_a_rehearsal_selects_nothing_out_of_range_and_captures_nothing() -> None:
    table, ids = torch.ones(4, 3), torch.full((2,), 1 << 40)
    with compile_ahead(CPU, 1, timeout_s=LIMIT_S) as compilers:
        with compilers.rehearsal():
            assert is_compiling_only()
            torch.nn.functional.embedding(ids, table)
            assert table[ids].shape == (2, 3)
            table[ids] = 1.0
            table.gather(1, torch.full((4, 1), -5))
            assert not torch.empty(3).any()
            assert capture_graph(lambda: table, None, None) == []
        assert not is_compiling_only()
    with pytest.raises(IndexError):
        _ = table[ids]
