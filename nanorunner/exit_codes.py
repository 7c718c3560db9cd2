"""What the command line's exit codes mean."""

from __future__ import annotations

OK = 0
REQUEST_FAILED = 1
REFUSED = 2  # before any process was started
RANK_DIED = 3
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
