"""An event that lives in shared memory and survives the death of whoever waits on it.

multiprocessing.Event.set() waits until each sleeper has woken, so it never returns once a sleeping
process has been killed or stopped. This one is a POSIX semaphore inside the segment itself: set()
waits for nobody, the semaphore has no name that a crash could leave behind, and no process owns it.

An Event is a hint. Whoever waits must look at the sequence number again after wait() returns, and
may trust only a number read after that: taking the semaphore is the memory barrier that makes the
writer's bytes visible on every CPU, and a bare word in shared memory is not.

    writer: store bytes, store sequence, set()
    reader: wait() -> (takes every token) -> read sequence -> read bytes
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time

EVENT_BYTES = 64  # a glibc or musl sem_t has 32; one cache line each
SLICE_S = 1.0  # longest sleep in the kernel, so that a jump of the wall clock costs no more

# PyDLL keeps the interpreter lock: right for calls of 0.2 us that never wait. CDLL gives it up.
_quick = ctypes.PyDLL(None)
_waiting = ctypes.CDLL(None, use_errno=True)
IS_X86 = platform.machine() in ("x86_64", "AMD64")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Event:
    """A wake-up for one waiter. wait() takes it, so the next wait() sleeps until the next set()."""

    def __init__(self, memory: memoryview, *, create: bool) -> None:
        """Use the first EVENT_BYTES of memory, 8-byte aligned; exactly one process creates."""
        # kept: its export stops the mapping from being closed under the semaphore
        self._export: ctypes.Array[ctypes.c_char] | None = (
            ctypes.c_char * EVENT_BYTES
        ).from_buffer(memory)
        self._semaphore = ctypes.c_void_p(ctypes.addressof(self._export))
        if create and _waiting.sem_init(self._semaphore, 1, 0) != 0:
            raise OSError(ctypes.get_errno(), "sem_init failed")

    def set(self) -> None:
        """Wake the waiter, now or at its next wait(). Never blocks, whatever the waiter is."""
        _quick.sem_post(self._semaphore)

    def clear(self) -> None:
        """Forget every set() so far. Only right before the sequence number is read again."""
        while _quick.sem_trywait(self._semaphore) == 0:
            pass

    def wait(self, timeout_s: float, spin_s: float = 0.0) -> bool:
        """Take the event; False when it was not set within timeout_s.

        Spins for up to spin_s first, giving up its core at every turn: a wake-up through the kernel
        costs 10 us and more, but a waiter that holds its core may be holding the writer's.
        """
        now = time.monotonic()
        deadline, spin_end = now + timeout_s, now + min(spin_s, timeout_s)
        while _quick.sem_trywait(self._semaphore) != 0:
            if time.monotonic() >= spin_end:
                if not self._sleep_until(deadline):
                    return False
                break
            os.sched_yield()
        self.clear()
        return True

    def close(self) -> None:
        """Let the memory go; the event must not be used again. A second call does nothing."""
        self._export = None

    def _sleep_until(self, deadline: float) -> bool:
        """Sleep in the kernel until the semaphore is taken (True) or the deadline has passed."""
        while (left_s := deadline - time.monotonic()) > 0:
            until = time.time() + min(left_s, SLICE_S)
            when = _Timespec(int(until), int(until % 1 * 1e9))
            if _waiting.sem_timedwait(self._semaphore, ctypes.byref(when)) == 0:
                return True
            # EINTR comes back here too, so that Python can run its signal handlers
            if (code := ctypes.get_errno()) not in (errno.ETIMEDOUT, errno.EINTR):
                raise OSError(code, f"sem_timedwait: {os.strerror(code)}")
        return False


class Fence:
    """A memory barrier: what was read before pass_() is read before anything after it is written.

    x86-64 keeps that order by itself; elsewhere we take a private semaphore that we just posted.
    """

    def __init__(self) -> None:
        self._event = None if IS_X86 else Event(memoryview(bytearray(EVENT_BYTES)), create=True)

    def pass_(self) -> None:
        """Order the memory accesses before this call and after it."""
        if self._event is not None:
            self._event.set()
            self._event.clear()
