"""The folder of a trace: made ready before the ranks start, filled by each of them when it closes.

workers/trace_file.py writes the files; here stands what they say of the machine, and only rank 0
knows.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from nanorunner.bench.code_version import git_commit
from nanorunner.bench.provenance import describe_machine
from nanorunner.config import Config
from nanorunner.workers.messages import Trace
from nanorunner.workers.trace_file import file_name
from nanorunner.workshop.timeline import PAGE_NAME, TRACE_NAME


def open_trace(config: Config) -> Trace:
    """Make config.trace, take an earlier trace's files out, and return what the ranks are told.

    Raises ValueError when it is no folder that can be written to.
    """
    assert config.trace is not None, "only for an engine that writes a trace"
    folder = Path(config.trace).resolve()  # a rank's files go there wherever the caller goes
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # refused now rather than after a long run
        # of a run with more ranks some files would stay behind, and pictures of an earlier one
        for path in (*folder.glob(file_name("*")), folder / TRACE_NAME, folder / PAGE_NAME):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"trace {config.trace}: {os.strerror(error.errno or 0)}; name a folder that can be "
            f"written to"
        ) from error
    return Trace(
        str(folder),
        {
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": git_commit(),
            "machine": describe_machine(),
            "config": asdict(config),
        },
    )
