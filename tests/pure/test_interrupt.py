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


def test_a_standing_handler_holds_in_the_blocks_and_lets_through_between_them() -> None:
    defer = DeferInterrupt()
    done = []

    def run(where: str) -> None:
        with defer.standing(), defer.standing():
            with defer:
                done.append("block")
            if where == "between":
                signal.raise_signal(signal.SIGINT)
            with defer:
                if where == "twice":
                    signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
                done.append("held")
            done.append("never")

    expected = {"between": ["block"], "in": ["block", "held"], "twice": ["block"]}
    for where in expected:
        with pytest.raises(KeyboardInterrupt):
            run(where)
        assert done == expected[where]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "not put back"
        done.clear()


def test_a_standing_handler_goes_when_an_error_ends_the_loop() -> None:
    defer = DeferInterrupt()

    def run() -> None:
        with defer.standing(), defer:
            signal.raise_signal(signal.SIGINT)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with defer:
        pass


def test_an_interrupt_while_the_handler_is_put_in_place_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defer = DeferInterrupt()
    install = defer._install

    def install_and_interrupt() -> None:
        install()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(defer, "_install", install_and_interrupt)
    done = []
    with pytest.raises(KeyboardInterrupt), defer.standing():
        done.append("never")
    with pytest.raises(KeyboardInterrupt), defer:
        done.append("held")
    assert done == ["held"]


def test_an_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with DeferInterrupt():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)
    with DeferInterrupt().standing():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_may_use_it() -> None:
    defer = DeferInterrupt()
    entered = []

    def enter() -> None:
        with defer.standing(), defer:
            entered.append(1)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(20)
    assert entered == [1]
