"""Which waiting requests start in this step: first come, first started, while all fits.

A request starts only if blocks for its whole known context are free, hits on free cached blocks
included, and a reserve stays behind. Without the first rule two long prompts evict each other's
chunks for ever; without the second a request that just fits is preempted a few steps later.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from nanorunner.request import Request
from nanorunner.roster import Roster
from nanorunner.running_table import Rows
from nanorunner.scheduler_stats import SchedulerStats
from nanorunner.step_plan import StepPlan
from nanorunner.workers.messages import NewRequest

# A running request that fills its last block within so many tokens counts as about to need one.
SOON_TOKENS = 32
RESERVE_PERCENT = 1


def admit(roster: Roster, plan: StepPlan, max_num_seqs: int, stats: SchedulerStats) -> None:
    """Start waiting requests in this step and schedule their first chunks."""
    room = max_num_seqs - len(roster.decoding) - len(roster.prefilling) - len(plan.completed)
    if not roster.waiting or room <= 0 or plan.budget == 0:
        return
    running: Rows = np.concatenate((roster.running(), plan.completed)).astype(np.int64)
    num_soon = _num_soon(roster, running)
    watermark = -(-roster.blocks.num_blocks * RESERVE_PERCENT // 100)
    is_idle = not running.size
    for request in list(islice(roster.waiting.values(), max_num_seqs)):
        if room == 0 or plan.budget == 0:
            break
        if not roster.pools.has_room(request):
            # Those behind it may need nothing of the pools; it is first when some is given back.
            stats.waits_for_pool += 1
            continue
        hits, next_digest = roster.match(request)
        if next_digest is not None and next_digest in plan.writing:
            # The next step can hit that block: equal prompts prefill their prefix once.
            stats.waits_for_prefix += 1
            continue
        needed = roster.num_blocks_for(len(request.token_ids)) - len(hits)
        charged = needed + roster.blocks.num_free_among(hits)
        # Nothing is held back when nothing runs: what fits the empty pool must start.
        reserve = 0 if is_idle else max(watermark, num_soon)
        if charged + reserve > roster.blocks.num_free:
            break
        row = _start(roster, plan, request, hits)
        stats.admissions += 1
        stats.cached_tokens += len(hits) * roster.block_size
        num_soon += _num_soon(roster, np.array([row]))
        room -= 1
        is_idle = False


def add_chunk(roster: Roster, plan: StepPlan, row: int) -> None:
    """Schedule the row's next known tokens, as many as the budget allows."""
    table, size = roster.table, roster.block_size
    start, known = int(table.computed[row]), int(table.known[row])
    count = min(known - start, plan.budget)
    end = start + count
    plan.budget -= count
    plan.num_prefill_tokens += count
    plan.chunks.append((row, count))
    table.computed[row] = end
    plan.writing.update(table.request(row).digests[start // size : -(-end // size)])
    if end == known:
        plan.completed.append(row)


def _start(roster: Roster, plan: StepPlan, request: Request, hits: list[int]) -> int:
    token_ids = request.token_ids.tobytes()
    row = roster.start(request, hits)
    plan.new.append(
        NewRequest(
            request_id=request.request_id,
            token_ids=token_ids,
            prompt_len=request.prompt_len,
            num_computed=len(hits) * roster.block_size,
            block_ids=np.array(request.blocks, dtype=np.int32).tobytes(),
            sampling=request.sampling,
            pooling=request.pooling,
            # The ranks alone know how many drafts come true, so they must know where to stop.
            token_limit=request.limit if roster.table.stride > 1 else 0,
        )
    )
    add_chunk(roster, plan, row)
    if roster.table.computed[row] < roster.table.known[row]:
        roster.prefilling.append(row)
    return row


def _num_soon(roster: Roster, rows: Rows) -> int:
    """How many of these rows will need another block within SOON_TOKENS tokens."""
    table = roster.table
    block_end = table.block_end[rows]
    # The longer of the two is the row's length, whether it prefills or decodes.
    length = np.maximum(table.known[rows], table.computed[rows] + 1)
    # The last id of a request needs no KV, hence the 1.
    is_soon = (block_end - length < SOON_TOKENS) & (table.limit[rows] > block_end + 1)
    return int(np.count_nonzero(is_soon))
