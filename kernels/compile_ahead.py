"""Compile many Triton kernels at the same time, before the first of them runs.

Triton compiles a kernel when it is first launched, one after the other: half a second each, and an
engine has dozens. So a start rehearses: it makes all the launches that it will ever make, but they
only say what must be compiled, and threads do it. Triton's passes and its assembler run without
Python's lock, so threads are enough.

    with compile_ahead(device, threads, timeout_s) as compilers:
        with compilers.rehearsal():
            steps of nobody            launches compile, nothing runs; what PyTorch does is done
        load the weights               meanwhile
    all is compiled, and loaded onto the device

A rehearsal goes through the very code that will launch, so what it compiles is what is launched.

Compiling happens on all threads, loading on one at a time, and a thread that builds a launcher in C
(Triton 3.6: one a kernel, 0.1 s each) leaves its turn to load to the others:

    thread 1   compile a | C of a     | load a |  compile c ...
    thread 2   compile b   | C of b            | load b |
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from nanorunner.kernels.triton_support import compiling_only, triton

T = TypeVar("T")
STOP_WAIT_S = 10.0  # a kernel takes a second or two
TURN_TIMEOUT_S = 120.0  # loading takes milliseconds, and the threads in front are not many
EMPTY = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)
SELECTING = ("getitem", "setitem", "gather", "scatter", "index", "take", "embedding")


class _Harmless(TorchFunctionMode):
    """Inside, PyTorch reads nothing out of range, though kernels that do not run left no indices.

    New tensors are zero, and what selects elements selects the first: an index out of range would
    end the CUDA context.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if any(part in name for part in SELECTING):
            # the first argument may be what is written to; an embedding's is the index
            kept = 0 if "embedding" in name else 1
            args = (*args[:kept], *(_zeroed(value) for value in args[kept:]))
            kwargs = {key: _zeroed(value) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        return result.zero_() if func in EMPTY else result


def _zeroed(value: Any) -> Any:
    """Return integer tensors, also within a tuple, as zeros of their shape; all else as it is."""
    if isinstance(value, tuple):
        return tuple(map(_zeroed, value))
    is_tensor = isinstance(value, torch.Tensor)
    if not is_tensor or value.is_floating_point() or value.dtype == torch.bool:
        return value
    return torch.zeros_like(value)


class _Turn:
    """Whose turn it is to load a kernel: one thread's of the whole process.

    In Triton 3.6 each kernel has a launcher, a C module, and all of them have one name. Where
    CPython loads a file again (a kernel's next variant), it writes the functions of that file into
    whichever module has the name by then: another kernel's, from which a second thread may be about
    to read its launcher. It would launch with the wrong one, and if both take as many arguments,
    nothing would say so.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None  # whose turn it is; written with the lock held

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=TURN_TIMEOUT_S):
            raise TimeoutError(
                f"a compiled kernel waits to be loaded, for {TURN_TIMEOUT_S:g} s now: another "
                "thread does not end its turn"
            )
        self._thread = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        if self._thread != threading.get_ident():
            return  # it did not get its turn back in left_to_others()
        self._thread = None
        self._lock.release()

    @contextmanager
    def left_to_others(self) -> Iterator[None]:
        """Inside, this thread's turn is over; it has one again afterwards, if it had one."""
        if self._thread != threading.get_ident():
            yield  # not one that loads kernels: a driver's first use builds C as well
            return
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


# One for all starts, as the modules' names are, and a thread may outlive a start that failed.
_TURN_TO_LOAD = _Turn()


class _CompilesBeside:
    """Triton's C compiler for threads that leave their turn to load to others meanwhile."""

    def __init__(self, compile_c: Callable[..., Any]) -> None:
        self._compile_c = compile_c

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _TURN_TO_LOAD.left_to_others():
            return self._compile_c(*args, **kwargs)


@contextmanager
def _loading_while_c_compiles() -> Iterator[None]:
    """Inside, a thread that has its turn to load leaves it to others while C compiles for it.

    Wraps the function in which Triton runs the C compiler, or knobs.build.impl where a user has set
    it. That hook itself would not do: from it there is no way back to Triton's own compiler. A
    Triton without the function has nothing to wrap: since 3.7 one launcher serves all kernels.

    A start that overlaps another one leaves the wrapper to that, so what is put back is never a
    wrapper. Should the other end first, C compiles within the turn again: slower, not wrong.
    """
    build = triton.runtime.build
    compile_c = getattr(build, "_build", None)
    if compile_c is None or isinstance(compile_c, _CompilesBeside):
        yield
        return
    build._build = _CompilesBeside(compile_c)
    try:
        yield
    finally:
        build._build = compile_c


class Compilers(Executor):
    """Daemon threads that compile what rehearsals ask for; made by compile_ahead()."""

    def __init__(self, device: torch.device, num_threads: int) -> None:
        self.device = device
        self.num_threads = num_threads
        self.futures: list[Future[Any]] = []  # one a kernel
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by kernel
        self._threads = [
            threading.Thread(target=self._work, name="compile", daemon=True)
            for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside, this thread's launches of this project's kernels compile instead."""
        with _Harmless(), compiling_only():
            yield

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Return the future of a kernel; Triton calls this with what compiles it."""
        future: Future[T] = Future()
        self.futures.append(future)
        self._jobs.put((future, lambda: fn(*args, **kwargs)))
        return future

    def finish(self, timeout_s: float) -> None:
        """Wait for all; raises what one raised, or TimeoutError when they take too long."""
        late = wait(self.futures, timeout_s).not_done
        if late:
            raise TimeoutError(f"{len(late)} kernels are not compiled after {timeout_s:g} s")
        for future in self.futures:
            future.result()

    def stop(self) -> None:
        """End the threads after what they are at; futures that are not done fail.

        Waits for them, at most STOP_WAIT_S: Python's exit aborts when it meets one in the compiler.
        """
        for future in self.futures:
            with suppress(InvalidStateError):
                future.set_exception(InterruptedError("the start was given up"))
        for _ in range(self.num_threads):
            self._jobs.put(None)
        deadline = time.monotonic() + STOP_WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a thread begins at device 0
        while (job := self._jobs.get()) is not None:
            future, compile_kernel = job
            if future.done():
                continue  # given up
            try:
                kernel = compile_kernel()
                # Loads it, which in Triton 3.6 builds a launcher in C first: the same one for all
                # variants of a kernel, so one thread builds it and the others find it on disk.
                # The kernel's lock comes first: it is kept while the turn is left to others.
                with self._locks[kernel.name], _TURN_TO_LOAD:
                    _ = kernel.run
            except BaseException as error:
                outcome: Callable[[], None] = _bind(future.set_exception, error)
            else:
                outcome = _bind(future.set_result, kernel)
            with suppress(InvalidStateError):  # given up meanwhile
                outcome()


@contextmanager
def compile_ahead(device: torch.device, num_threads: int, timeout_s: float) -> Iterator[Compilers]:
    """Yield what rehearses; on leaving, every rehearsed kernel is compiled and loaded.

    Between the rehearsals and the end nothing may be launched that was not rehearsed. Raises on
    leaving what the compiler raised, or TimeoutError when it takes longer than timeout_s after the
    block; then no thread takes another kernel, and one that hangs in its last is a daemon.
    """
    compilers = Compilers(device, num_threads)
    try:
        # Errors are ours to raise: Triton would wait for the other kernels first, and for ever.
        with _loading_while_c_compiles(), triton.AsyncCompileMode(compilers, ignore_errors=True):
            try:
                yield compilers
                compilers.finish(timeout_s)
            finally:
                compilers.stop()
    finally:
        compilers.futures = []


def threads_of_rank(ranks: int) -> int:
    """Return how many threads one of so many ranks may compile with."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _bind(function: Callable[[Any], None], value: Any) -> Callable[[], None]:
    return lambda: function(value)
