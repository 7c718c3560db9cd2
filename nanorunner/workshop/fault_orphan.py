"""The program whose rank 0 the fault lab kills: it starts ranks, names them, and waits.

    python -m nanorunner.workshop.fault_orphan 0 | 1      1: with the toy model

fault_processes.orphan() runs it.
"""

from __future__ import annotations

import json
import os
import sys
import time

from nanorunner.workshop.fault_lab import MARK, Lab
from nanorunner.workshop.fault_report import FaultReport
from nanorunner.workshop.leftovers import marked_pids

TP = 2
WAIT_S = 120.0  # for the kill; then it ends by itself


def main() -> None:
    """Print the other ranks' processes as one line of JSON, then wait for the kill."""
    mark = os.environ[MARK]
    report = FaultReport("orphan", say=lambda text: None)
    with Lab(report, is_full=sys.argv[1] == "1") as lab:
        os.environ[MARK] = lab.mark = mark  # whoever started this looks for it
        lab.start(TP)
        print(json.dumps(sorted(marked_pids(MARK, mark) - {os.getpid()})), flush=True)
        time.sleep(WAIT_S)


if __name__ == "__main__":
    main()
