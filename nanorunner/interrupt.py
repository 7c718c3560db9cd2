"""Ctrl-C at a moment that can bear it.

Between the moment when a frame is sent and the end of rank 0's own share of that call, an exception
would leave the ranks one call ahead of rank 0 for good.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class DeferInterrupt:
    """`with defer:` holds SIGINT back until the outermost such block has ended.

    A second SIGINT inside is not held back: whoever presses Ctrl-C twice wants out, and the engine
    must then be closed. Outside the main thread, where Python delivers no SIGINT, nothing happens.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._is_pending = False
        self._previous: signal._HANDLER = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth += 1
        if self._depth == 1:
            self._is_pending = False
            self._previous = signal.getsignal(signal.SIGINT)
            if callable(self._previous):  # else ignored, default, or set by C code: leave it
                signal.signal(signal.SIGINT, self._hold)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth == 0 and callable(self._previous):
            signal.signal(signal.SIGINT, self._previous)
            if self._is_pending and error is None:
                signal.raise_signal(signal.SIGINT)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending and callable(self._previous):
            self._is_pending = False
            self._previous(number, frame)
        else:
            self._is_pending = True
