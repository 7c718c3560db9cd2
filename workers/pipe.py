"""The way back: each rank has one socket to rank 0, for milestones, replies and errors.

    4 bytes, little-endian: length | pickle of a Message

Rank 0 reads many of these at once and must never wait for one of them: a rank that was stopped in
the middle of a message would hold up the news of all others. So it reads what is there, and Inbox
puts the pieces together. End of file tells either side that the other has died.
"""

from __future__ import annotations

import pickle
import socket
from typing import Any, NamedTuple

READ_BYTES = 65536


class Message(NamedTuple):
    """What one side says to the other."""

    frame: int  # the call that it answers; 0 before the first call
    kind: str  # start: rank 0's only message | ready | ok | error
    value: Any  # error: (time.monotonic() of it, traceback)


class Inbox:
    """Rank 0's end of one rank's pipe."""

    def __init__(self, pipe: socket.socket) -> None:
        pipe.setblocking(False)
        self._pipe = pipe
        self._data = bytearray()

    def read(self) -> tuple[list[Message], bool]:
        """Return the messages that are complete by now, and whether the other end is still open."""
        is_open = True
        while True:
            try:
                piece = self._pipe.recv(READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                piece = b""
            if not piece:
                is_open = False
                break
            self._data += piece
        return list(self._complete()), is_open

    def _complete(self) -> list[Message]:
        messages = []
        while (end := 4 + int.from_bytes(self._data[:4], "little")) <= len(self._data):
            messages.append(pickle.loads(bytes(self._data[4:end])))
            del self._data[:end]
        return messages


def send(pipe: socket.socket, message: Message) -> None:
    """Send one message over a blocking socket; OSError when the other end has gone."""
    data = pickle.dumps(message, protocol=5)
    pipe.sendall(len(data).to_bytes(4, "little") + data)


def receive(pipe: socket.socket) -> Message:
    """Return the next message of a blocking socket; EOFError when the other end has gone."""
    message: Message = pickle.loads(_exactly(pipe, int.from_bytes(_exactly(pipe, 4), "little")))
    return message


def _exactly(pipe: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = pipe.recv(num_bytes - len(data))
        if not piece:
            raise EOFError(f"the pipe ended after {len(data)} of {num_bytes} bytes")
        data += piece
    return data
