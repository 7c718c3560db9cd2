"""Ctrl-C at a moment that can bear it.

Between the moment when a frame is sent and the end of rank 0's own share of that call, an exception
would leave the ranks one call ahead of rank 0 for good.

Python takes 15 us to put a signal handler in place and back, so a loop of steps does it once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class DeferInterrupt:
    """`with defer:` holds SIGINT back until the outermost such block has ended.

    A second SIGINT inside is not held back: whoever presses Ctrl-C twice wants out, and the engine
    must then be closed. Outside the main thread, where Python delivers no SIGINT, nothing happens.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._is_pending = False
        self._is_standing = False
        self._previous: signal._HANDLER = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth == 0 and not self._is_standing:
            self._install()
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth == 0:
            if not self._is_standing:
                self._put_back()
            is_pending, self._is_pending = self._is_pending, False
            if is_pending and error is None:
                signal.raise_signal(signal.SIGINT)

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Keep the handler in place for the blocks inside; between them SIGINT goes through.

        For a loop that nobody else's code runs in: nothing else may change the handler meanwhile.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or self._depth > 0 or self._is_standing:
            yield
            return
        self._install()
        try:
            self._is_standing = True
            self._raise_pending()
            yield
        finally:
            self._is_standing = False
            self._put_back()
            self._raise_pending()

    def _raise_pending(self) -> None:
        """Let a SIGINT through that came while the handler was put in place or back."""
        if self._is_pending:
            self._is_pending = False
            signal.raise_signal(signal.SIGINT)

    def _install(self) -> None:
        self._is_pending = False
        self._previous = signal.getsignal(signal.SIGINT)
        if callable(self._previous):  # else ignored, default, or set by C code: leave it
            signal.signal(signal.SIGINT, self._hold)

    def _put_back(self) -> None:
        if callable(self._previous):
            signal.signal(signal.SIGINT, self._previous)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        is_between = self._is_standing and self._depth == 0
        if callable(self._previous) and (is_between or self._is_pending):
            self._is_pending = False
            self._previous(number, frame)
        else:
            self._is_pending = True
