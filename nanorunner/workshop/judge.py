"""The program that examines a learner's file: a process of its own, so that it may hang or crash.

    python -m nanorunner.workshop.judge ack my_ack.py 7

check.py starts it and ends it after a while. 7 is a socket: check.py has put a nonce on it, and the
verdict goes back behind that nonce: 0 when every sentence holds, 1 when one does not, 2 when the
file cannot be examined. An exit code would not do: the learner's own code can leave with any.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from nanorunner.exit_codes import OK, REFUSED, REQUEST_FAILED
from nanorunner.workshop.code_exercises import examine, load_functions, where

NONCE_BYTES = 16
NONCE_LIMIT_S = 10.0  # it was sent before this program was started


def main() -> int:
    """Examine the file and send the verdict."""
    name, file, fd = sys.argv[1:]
    with socket.socket(fileno=int(fd)) as verdict:
        verdict.settimeout(NONCE_LIMIT_S)
        nonce = verdict.recv(NONCE_BYTES)  # first: nothing of the learner's has run yet
        code = _examine(name, Path(file))
        verdict.sendall(nonce + bytes([code]))
    return code


def _examine(name: str, file: Path) -> int:
    """Print each sentence as it is found to hold; stop at the first that does not."""
    try:
        functions = load_functions(name, file)
    except SystemExit as error:
        print(f"{file}: ends the process when it is imported: {where(error)}", flush=True)
        return REFUSED
    except Exception as error:  # whatever a file can raise when it is imported
        text = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        print(text, flush=True)
        return REFUSED
    for finding in examine(name, functions):
        if finding.problem:
            print(f"  not yet  {finding.sentence}\n           {finding.problem}", flush=True)
            return REQUEST_FAILED
        print(f"  ok       {finding.sentence}", flush=True)
    return OK


if __name__ == "__main__":
    sys.exit(main())
