"""Ctrl-C is held back while a call is on its way, and never lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from nanorunner.interrupt import DeferInterrupt


@pytest.fixture(autouse=True)
def _python_handler() -> Iterator[None]:
    """Give every test Python's own handler, whatever the test run was started with."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "not put back"
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_comes_after_the_outermost_block() -> None:
    defer = DeferInterrupt()
    done = []

    def run() -> None:
        with defer:
            with defer:
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("never")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done == ["inner", "outer"]


def test_a_second_interrupt_is_not_held_back() -> None:
    defer = DeferInterrupt()
    done = []

    def run() -> None:
        with defer:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert not done
    with defer:
        pass


def test_without_an_interrupt_nothing_happens_however_often() -> None:
    defer = DeferInterrupt()
    for _ in range(100):
        with defer:
            pass


def test_an_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with DeferInterrupt():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_may_use_it() -> None:
    defer = DeferInterrupt()
    entered = []

    def enter() -> None:
        with defer:
            entered.append(1)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(20)
    assert entered == [1]
