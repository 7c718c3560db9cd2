"""Counts as people write them: 512, 4k (4,000), 4K (4,096), 1.5M."""

from __future__ import annotations

import re

FACTORS = {"": 1, "k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}


def parse_count(text: str) -> int:
    """Return a whole number of tokens or requests; ValueError with the forms that work."""
    match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)([kmKM]?)", text.strip().replace("_", ""))
    value = float(match[1]) * FACTORS[match[2]] if match else 0.5
    if value != int(value):
        raise ValueError(f"{text!r} is not a count; write 512, 4k (4,000) or 4K (4,096)")
    return int(value)
