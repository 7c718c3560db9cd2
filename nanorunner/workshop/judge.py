"""The program that examines a learner's file: a process of its own, so that it may hang or crash.

    python -m nanorunner.workshop.judge ack my_ack.py

check.py starts it and ends it after a while. Exit code 0: every sentence holds; 1: one does not; 2:
the file cannot be examined.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nanorunner.exit_codes import OK, REFUSED, REQUEST_FAILED
from nanorunner.workshop.code_exercises import examine, load_functions


def main() -> int:
    """Print each sentence as it is found to hold; stop at the first that does not."""
    name, file = sys.argv[1:]
    try:
        functions = load_functions(name, Path(file))
    except Exception as error:  # whatever a file can raise when it is imported
        print(f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else error)
        return REFUSED
    for finding in examine(name, functions):
        if finding.problem:
            print(f"  not yet  {finding.sentence}\n           {finding.problem}", flush=True)
            return REQUEST_FAILED
        print(f"  ok       {finding.sentence}", flush=True)
    return OK


if __name__ == "__main__":
    sys.exit(main())
