"""Messages arrive whole however they were cut, and reading never waits."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanorunner.workers import pipe as pipes
from nanorunner.workers.pipe import Inbox, Message


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_messages_arrive_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    inbox = Inbox(ours)
    assert inbox.read() == ([], True)
    sent = [Message(number, "ok", "x" * number) for number in range(5)]
    for message in sent:
        pipes.send(theirs, message)
    assert inbox.read() == (sent, True)


@given(cuts=st.lists(st.integers(1, 80), max_size=8))
def test_a_message_may_come_in_any_pieces(cuts: list[int]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inbox = Inbox(ours)
        sent = [Message(1, "ok", list(range(10))), Message(2, "error", (0.5, "text"))]
        data = b""
        for message in sent:
            body = pickle.dumps(message, protocol=5)
            data += len(body).to_bytes(4, "little") + body
        received: list[Message] = []
        for cut in [*cuts, len(data)]:
            theirs.sendall(data[:cut])
            data = data[cut:]
            received += inbox.read()[0]
        assert received == sent


def test_what_was_sent_before_the_end_is_read_before_the_end(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    inbox = Inbox(ours)
    pipes.send(theirs, Message(3, "error", (1.0, "a traceback")))
    theirs.close()
    assert inbox.read() == ([Message(3, "error", (1.0, "a traceback"))], False)


def test_the_end_of_a_pipe_ends_a_waiting_receive(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    theirs.sendall(b"\x10\x00")
    theirs.close()
    with pytest.raises(EOFError, match="after 2 of 4 bytes"):
        pipes.receive(ours)
