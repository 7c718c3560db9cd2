"""The tail of an error about an unknown name: the closest known one, or all of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "did you mean X?" for a likely slip of the pen, else "use one of A, B, C"."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return "use one of " + ", ".join(names)
