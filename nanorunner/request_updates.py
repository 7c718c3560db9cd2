"""What a step that has been read has to tell of its requests.

A quiet request tells only its end, with its whole output, so a step of quiet requests makes no
object for any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import repeat

import numpy as np

from nanorunner.request import RequestUpdate
from nanorunner.running_table import Rows, RunningTable
from nanorunner.workers.messages import Int32, RequestExtras, TokenLogprobs

# Without a Python call: 256 of those would cost more than all the rest of a step.
_make_update: Callable[[tuple[object, ...]], RequestUpdate] = partial(tuple.__new__, RequestUpdate)


def tell(
    table: RunningTable,
    rows: Rows,
    new_ids: Int32,
    counts: Rows | None,
    reasons: dict[int, str],
    extras: dict[int, RequestExtras] | None,
) -> list[RequestUpdate]:
    """Return an update for each row that ends, with its reason, and for each not quiet.

    new_ids [n], or [n, q] with the counts [n] of those that a row keeps; the table has them.
    """
    is_quiet = table.is_quiet[rows]
    num_quiet = int(np.count_nonzero(is_quiet))
    updates: list[RequestUpdate] = []
    if num_quiet < len(rows):
        if num_quiet:
            rows, new_ids = rows[~is_quiet], new_ids[~is_quiet]
            counts = None if counts is None else counts[~is_quiet]
        ids, lists = table.request_id[rows].tolist(), _lists(new_ids, counts)
        why = map(reasons.get, rows.tolist()) if reasons else repeat(None, len(ids))
        more = map(extras.get, ids) if extras else repeat(None, len(ids))
        if extras and counts is not None:
            more = map(_cut, more, counts.tolist())
        updates = list(map(_make_update, zip(ids, lists, why, more, strict=True)))
    if num_quiet:
        for row, reason in reasons.items():
            if table.is_quiet[row]:
                request_id = int(table.request_id[row])
                updates.append(RequestUpdate(request_id, table.output_ids(row), reason))
    return updates


def _lists(new_ids: Int32, counts: Rows | None) -> list[list[int]]:
    """Return each row's ids."""
    if counts is None:
        return [[new_id] for new_id in new_ids.tolist()]
    groups = zip(new_ids.tolist(), counts.tolist(), strict=True)
    return [group[:count] for group, count in groups]


def _cut(extras: RequestExtras | None, count: int) -> RequestExtras | None:
    """Return the extras without log-probabilities of ids behind a stop."""
    if extras is None or extras.logprobs is None or len(extras.logprobs.ranks) <= count:
        return extras
    token_ids, logprobs, ranks = extras.logprobs
    kept = TokenLogprobs(token_ids[:count], logprobs[:count], ranks[:count])
    return extras._replace(logprobs=kept)
