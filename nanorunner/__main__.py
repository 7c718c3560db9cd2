"""`python -m nanorunner`: the command line. Guarded, because spawned ranks import this file."""

from __future__ import annotations

import sys

from nanorunner.cli import main

if __name__ == "__main__":
    sys.exit(main())
