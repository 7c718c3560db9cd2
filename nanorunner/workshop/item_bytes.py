"""How many bytes a number takes, by its dtype's name, without torch.

resolve.py has the same table beside what needs torch; the workshop's lists answer at once.
"""

from __future__ import annotations

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
