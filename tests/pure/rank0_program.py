"""A program that a test kills: it starts ranks, says what it does, and does it for ever.

It has no `if __name__ == "__main__"`, as a user's first script has none.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time

import rank_harness

logging.basicConfig(format="%(levelname)s %(message)s")


def say(what: str, **more: object) -> None:
    print(json.dumps({"what": what, **more}), flush=True)


phase = sys.argv[1]
say("starting")
if phase == "spawn":  # say so while the processes start, not after
    threading.Timer(0.03, say, [phase]).start()
ranks = rank_harness.start_ranks(3)
say("ready", pids=ranks.call_all("pid"))
try:
    while phase == "step":
        ranks.call("sleep", 0.001)
        ranks.call_all("echo", 1)
    while phase == "burn":
        ranks.call_all("burn", 1)
    if phase == "interrupt":
        try:
            ranks.call("stay")
        except KeyboardInterrupt:
            say("interrupted", echo=ranks.call_all("echo", 2))
    while phase == "idle":
        time.sleep(1)
finally:
    ranks.close()
say("end")
