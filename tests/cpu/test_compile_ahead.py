"""A rehearsal compiles on threads what is launched later; a failed one ends the start.

Kernels are loaded by one thread at a time, yet their launchers are built in C at the same time. A
launcher here is a file with a kernel's name, which Triton has built, keeps and finds as a real one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
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
READ_AFTER_S = 0.1  # long enough for another thread's load, if it were not kept out


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
        "asked": 3,
        "rehearsed": ["_rms_norm_kernel", "_silu_mul_kernel", "hopper_prefill_kernel"],
        "launched_meanwhile": [],
        "compiled_later": 0,
        "launched_later": 3,
    }


def ask(compilers: Compilers, name: str, compile_kernel: Callable[[], Any]) -> None:
    """Ask for a kernel as Triton does at a launch."""
    mode = triton.runtime._async_compile.active_mode.get()
    arguments = [name, compile_kernel, lambda kernel: None]
    if "cleanup_fn" in mode.submit.__code__.co_varnames:  # since Triton 3.9
        arguments.append(lambda future: None)
    mode.submit(*arguments)


class Launchers:
    """Stands for the C compiler (as a user's own), and for CPython where it loads what that built.

    CPython writes a module that it loads again into the one that has the name by then.
    """

    def __init__(self, at_once: int) -> None:
        self.built: list[str] = []
        self.num_loading = self.most_loading = 0
        self.is_loading = threading.Event()  # or has been
        self._all_build = threading.Barrier(at_once, timeout=LIMIT_S)
        self._module = SimpleNamespace(launch="")

    def build(self, name: str, source: str, folder: str, *lists: list[str]) -> str:
        """Return the path of what is built; only when so many threads build at once."""
        text = Path(source).read_text()
        self.built.append(text)
        if name == "launcher":
            self._all_build.wait()
        if text == "bad":
            raise ValueError("no such header")
        built = Path(folder, "built")
        built.write_text(text)
        return str(built)

    def load(self, name: str, path: str) -> SimpleNamespace:
        if name != "launcher":
            return SimpleNamespace()
        self.num_loading += 1
        self.most_loading = max(self.most_loading, self.num_loading)
        self.is_loading.set()
        self._module.launch = Path(path).read_text()
        time.sleep(READ_AFTER_S)  # before who has called this reads from it
        self.num_loading -= 1
        return self._module


class KernelWithLauncher:
    """A kernel that is loaded as in Triton 3.6."""

    def __init__(self, name: str) -> None:
        self.name, self.launch = name, ""

    @property
    def run(self) -> str:
        module = triton.runtime.build.compile_module_from_src(src=self.name, name="launcher")
        self.launch = module.launch
        return self.launch


def returning(kernel: KernelWithLauncher) -> Callable[[], KernelWithLauncher]:
    return lambda: kernel


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launchers:
    stand_in = Launchers(at_once=2)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.build, "impl", stand_in.build)
    monkeypatch.setattr(triton.runtime.build, "_load_module_from_path", stand_in.load)
    return stand_in


def test_no_two_threads_load_at_once_while_launchers_are_built_at_once(
    launchers: Launchers,
) -> None:
    kernels = [KernelWithLauncher(name) for name in ("a", "a", "b", "b")]
    before = triton.runtime.build._build
    with compile_ahead(CPU, len(kernels), timeout_s=LIMIT_S) as compilers:
        for number, kernel in enumerate(kernels):
            ask(compilers, f"variant {number}", returning(kernel))
    assert launchers.most_loading == 1
    assert [kernel.launch for kernel in kernels] == ["a", "a", "b", "b"]
    assert sorted(launchers.built) == ["a", "b"], "one for all variants of a kernel"
    assert triton.runtime.build._build is before


def test_a_launcher_that_cannot_be_built_is_raised_and_keeps_no_other_from_loading(
    launchers: Launchers,
) -> None:
    good, bad = KernelWithLauncher("good"), KernelWithLauncher("bad")
    before = triton.runtime.build._build

    def start() -> None:
        with compile_ahead(CPU, 2, timeout_s=LIMIT_S) as compilers:
            for kernel in (bad, good):
                ask(compilers, kernel.name, returning(kernel))
            compilers.futures[1].result(LIMIT_S)

    with pytest.raises(ValueError, match="no such header"):
        start()
    assert (good.launch, bad.launch) == ("good", "")
    assert triton.runtime.build._build is before


def test_what_a_thread_builds_that_loads_no_kernel_ends_no_other_threads_turn(
    launchers: Launchers,
) -> None:
    kernels = [KernelWithLauncher(name) for name in ("a", "b")]
    with compile_ahead(CPU, len(kernels), timeout_s=LIMIT_S) as compilers:
        for kernel in kernels:
            ask(compilers, kernel.name, returning(kernel))
        assert launchers.is_loading.wait(LIMIT_S)
        triton.runtime.build.compile_module_from_src(src="", name="driver")
    assert launchers.most_loading == 1
    assert [kernel.launch for kernel in kernels] == ["a", "b"]


def test_starts_that_overlap_put_tritons_compiler_back() -> None:
    before = triton.runtime.build._build
    first, second = (ahead._loading_while_c_compiles() for _ in range(2))
    with ExitStack() as later:
        with first:
            later.enter_context(second)
        assert triton.runtime.build._build is before
    assert triton.runtime.build._build is before


def test_a_turn_that_another_thread_keeps_ends_the_start_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ahead, "TURN_TIMEOUT_S", 0.1)

    def start() -> None:
        with ahead._TURN_TO_LOAD, compile_ahead(CPU, 1, timeout_s=LIMIT_S) as compilers:
            ask(compilers, "a", lambda: Kernel("a", []))

    with pytest.raises(TimeoutError, match=r"waits to be loaded, for 0\.1 s"):
        start()


def test_who_does_not_get_its_turn_back_ends_no_other_threads_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn = ahead._Turn()
    monkeypatch.setattr(ahead, "TURN_TIMEOUT_S", 0.1)

    def lose() -> None:
        with turn, turn.left_to_others():
            keeper = threading.Thread(target=turn.__enter__)
            keeper.start()
            keeper.join(LIMIT_S)

    with pytest.raises(TimeoutError, match="waits to be loaded"):
        lose()
    with pytest.raises(TimeoutError, match="waits to be loaded"), turn:
        pass


def test_a_triton_that_builds_nothing_in_c_needs_no_function_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(triton.runtime.build, "_build")
    loaded: list[str] = []
    with compile_ahead(CPU, 1, timeout_s=LIMIT_S) as compilers:
        ask(compilers, "a", lambda: Kernel("a", loaded))
    assert loaded == ["a"]
    assert not hasattr(triton.runtime.build, "_build")


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
