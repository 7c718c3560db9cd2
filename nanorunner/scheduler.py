"""Who runs in the next step, and how many tokens each: one budget, decodes first.

    add() -> waiting --admission--> prefilling --last chunk--> decoding --> ended
                ^                        |                        |
                +------- preemption, the newest request first ----+

schedule() fills one step in this order: a token for every decoding request, chunks for prompts
that are on their way, then new prompts, all in the same batch, until the budget is used. update()
takes in what a step sampled and returns an update for each request that has something to tell; a
quiet one has only its last, with its whole output, so a step makes no object for it before.

With depth 2 a step is scheduled while the one before it is unread: the ids it continues from exist
on the devices only, so here a request's `computed` runs ahead of its `known`. A stop found late
then drops one sampled id; an end by length is foreseen.

With speculation a step may hold q = 1 + K positions of each decode: its newest token and K drafts,
of which the device accepts as many as come true. Until it is read, `computed` is the most that may
have been computed, and `sure` the least that will be known (running_table.py, speculation.py).

Rows and blocks return when the last step that contains the request has been read. When blocks are
short and a step is unread, schedule() returns None: reading it may free some. So a preempted
request never has ids in flight.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from nanorunner.admission import add_chunk, admit
from nanorunner.block_manager import BlockManager
from nanorunner.draft_control import DraftController
from nanorunner.request import NO_ROW, Request, RequestUpdate
from nanorunner.request_updates import tell
from nanorunner.roster import NO_ROWS, Roster
from nanorunner.running_table import NO_IDS, Rows, RunningTable
from nanorunner.sampled_ids import SampledIds, place_ids
from nanorunner.scheduler_stats import SchedulerStats
from nanorunner.speculation import DraftBooks, check_drafts
from nanorunner.step_plan import ScheduledStep, StepPlan
from nanorunner.workers.messages import BLOCK_SIZE, Int32, StepInput, StepOutput


class Scheduler:
    """Decides each step; owns the requests, their rows and the KV blocks.

    Raises ValueError for settings under which some request could starve.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_blocks: int,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        prefix_cache: bool = True,
        depth: int = 1,
        send_sampled_ids: bool = True,
        block_size: int = BLOCK_SIZE,
        num_speculative_tokens: int = 0,
        controller: DraftController | None = None,
    ) -> None:
        if max_num_seqs < 1 or max_model_len < 2 or depth < 1:
            raise ValueError(
                f"max_num_seqs {max_num_seqs}, max_model_len {max_model_len}, depth {depth}: "
                f"use at least 1, 2 and 1"
            )
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {max_num_batched_tokens} is less than max_num_seqs "
                f"{max_num_seqs}: a step could not hold one token of each; raise the first or "
                f"lower the second"
            )
        check_drafts(num_speculative_tokens, max_num_seqs, max_num_batched_tokens, send_sampled_ids)
        if send_sampled_ids and depth > 1:
            raise ValueError(
                f"depth {depth}: runner v1 gets its sampled ids from rank 0, so its depth is 1"
            )
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.depth = depth
        self.eos_token_ids = eos_token_ids
        self.stats = SchedulerStats()
        # Each unread step may hold max_num_seqs rows that have ended beside those that go on.
        stride = 1 + num_speculative_tokens
        table = RunningTable(depth * max_num_seqs, max_model_len, block_size, stride)
        self.roster = Roster(table, BlockManager(num_blocks), prefix_cache)
        self.drafts = DraftBooks(num_speculative_tokens, controller, self.stats)
        self._send_sampled_ids = send_sampled_ids
        self._ids = SampledIds(vocab_size, eos_token_ids)
        self._unread: deque[ScheduledStep] = deque()
        self._next_step_id = 0
        # The last step's rows, if all were decodes, with their tokens each and the sample_ids. The
        # roster replaces its decoding rows when any of them changes: same array, same batch.
        self._last_decodes: Rows | None = None
        self._last_query_len = 1
        self._last_decode_ids: Int32 = NO_IDS
        self._sampled_bytes = b""  # for the next StepInput, runner v1
        self._failed: list[RequestUpdate] = []

    # What the engine asks.

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self.roster.waiting)

    @property
    def num_running(self) -> int:
        """Requests with a row that have not ended."""
        return len(self.roster.requests) - len(self.roster.waiting)

    @property
    def num_unread(self) -> int:
        """Steps that were scheduled and whose output update() has not seen."""
        return len(self._unread)

    def request_ids(self) -> list[int]:
        """The ids of all requests that wait or run."""
        return list(self.roster.requests)

    def has_request(self, request_id: int) -> bool:
        """Whether the request waits or runs."""
        return request_id in self.roster.requests

    def num_output_tokens(self, request: Request) -> int:
        """How many generated ids of this request the host has."""
        is_waiting = request.row == NO_ROW
        known = len(request.token_ids) if is_waiting else int(self.roster.table.known[request.row])
        return known - request.prompt_len

    def check_prompt_fits(self, prompt_len: int, least_output: int = 1) -> None:
        """Raise ValueError, naming the numbers, if such a prompt could never run.

        least_output: ids that it must have room for; an embedding has none.
        """
        most = self.max_model_len - least_output
        if prompt_len > most:
            raise ValueError(
                f"prompt: {prompt_len} tokens, but prompt and output together may have "
                f"{self.max_model_len} (max_model_len); use at most {most}"
            )
        needed, present = self.roster.num_blocks_for(prompt_len), self.roster.blocks.num_blocks
        if needed > present:
            raise ValueError(
                f"prompt: {prompt_len} tokens need {needed} KV blocks of {self.roster.block_size}, "
                f"but the KV cache has {present}; shorten the prompt or enlarge the KV cache"
            )

    def add(self, request: Request) -> None:
        """Queue a request; ValueError as in check_prompt_fits, with nothing queued."""
        self.check_prompt_fits(request.prompt_len, 0 if request.pooling else 1)
        assert not (request.is_quiet and request.brings_extras), "each step's extras are told"
        self._ids.add(request)
        self.roster.add(request)

    def end(self, request_id: int) -> bool:
        """Take a request out, wherever it is; False if it is not there (any more)."""
        request = self.roster.requests.get(request_id)
        if request is None:
            return False
        self._end(request)
        self.roster.forget_ended()
        return True

    def take_failed(self) -> list[RequestUpdate]:
        """Return, once, the requests that schedule() had to end."""
        failed, self._failed = self._failed, []
        return failed

    # One step leaves.

    def schedule(self) -> ScheduledStep | None:
        """Return the next step, or None when nothing can run (before older steps are read)."""
        assert len(self._unread) < self.depth, f"{len(self._unread)} steps are unread"
        roster = self.roster
        num_decodes = len(roster.decoding)
        plan = StepPlan(self.max_num_batched_tokens)
        if roster.table.stride > 1:
            plan.query_len = self.drafts.query_len(num_decodes)
        due = roster.due()
        if due.size:
            if not self._grow_decodes(plan, due):
                return None
            if len(roster.decoding) < num_decodes:  # some had to make room
                due = due[roster.table.alive[due]]
        plan.budget -= len(roster.decoding) * plan.query_len
        self._continue_prefills(plan)
        # Blocks that a preemption freed belong to those who were short of them.
        if not plan.has_preempted:
            admit(roster, plan, self.max_num_seqs, self.stats)
        if not roster.decoding.size and not plan.chunks:
            return None
        return self._seal(plan, due)

    def _grow_decodes(self, plan: StepPlan, due: Rows) -> bool:
        """Give blocks to each decode that would outgrow its own; False: read a step first."""
        roster, num_free = self.roster, self.roster.blocks.num_free
        needy, num_missing = roster.needy(due, plan.query_len)
        if plan.query_len > 1 and num_missing > num_free:
            # Drafts are worth no wait and no preemption, and nobody ends for want of their blocks.
            plan.query_len = 1
            needy, num_missing = roster.needy(due, 1)
        if num_missing > num_free:
            if self._unread:
                return False
            needy = self._make_room(plan, needy)
        for row in needy.tolist():
            plan.new_blocks.append(roster.grow(row, plan.query_len))
        return True

    def _make_room(self, plan: StepPlan, needy: Rows) -> Rows:
        """Preempt the newest requests until the rest of `needy` can grow; return that rest."""
        roster, table, present = self.roster, self.roster.table, self.roster.blocks.num_blocks
        while needy.size > roster.blocks.num_free:
            too_long = needy[table.block_end[needy] >= present * roster.block_size]
            if too_long.size:
                # Preempting would not help it: it would come back to the same wall for ever.
                request = table.request(int(too_long[0]))
                reason = (
                    f"error: the next token needs {present + 1} KV blocks of "
                    f"{roster.block_size}, but the KV cache has {present}"
                )
                untold = table.output_ids(request.row) if request.is_quiet else []
                self._failed.append(RequestUpdate(request.request_id, untold, reason))
                self._end(request)
            else:
                # The oldest is never taken while another is left, so someone always finishes.
                running = roster.running()
                roster.preempt(int(running[np.argmax(table.request_id[running])]))
                plan.has_preempted = True
                self.stats.preemptions += 1
            roster.forget_ended()
            needy = needy[table.alive[needy]]
        return needy

    def _continue_prefills(self, plan: StepPlan) -> None:
        """Schedule the next chunks of prompts on their way, the first started first."""
        for row in self.roster.prefilling:
            if plan.budget == 0:
                break
            add_chunk(self.roster, plan, row)
        if plan.completed:
            left = self.roster.prefilling
            self.roster.prefilling = [row for row in left if row not in plan.completed]

    def _seal(self, plan: StepPlan, due: Rows) -> ScheduledStep:
        """Advance every row in the batch and return the finished step; due: among its decodes."""
        roster, table = self.roster, self.roster.table
        rows = sample_rows = decodes = roster.decoding
        pooled_rows = NO_ROWS
        query_len, num_decodes = plan.query_len, len(decodes)
        is_same_batch = (
            not plan.chunks and decodes is self._last_decodes and query_len == self._last_query_len
        )
        table.computed[decodes] += query_len
        if plan.chunks:
            chunk_rows = np.array([row for row, _ in plan.chunks], dtype=np.int64)
            rows = np.concatenate((decodes, chunk_rows))
            is_pooled = np.array([bool(table.request(row).pooling) for row in plan.completed], bool)
            completed = np.array(plan.completed, dtype=np.int64)
            sample_rows = np.concatenate((decodes, completed[~is_pooled]))
            pooled_rows = completed[is_pooled]
            due = np.concatenate((due, chunk_rows))
        if table.stride > 1:
            table.sure[sample_rows] += 1
        table.last_step[rows] = self._next_step_id
        sample_ids = self._last_decode_ids
        if not is_same_batch:
            sample_ids = table.request_id[sample_rows]
            if query_len > 1:
                sample_ids = place_ids(sample_ids, num_decodes, query_len)
        self._last_decodes, self._last_query_len = None if plan.chunks else rows, query_len
        self._last_decode_ids = sample_ids
        removed, roster.removed = roster.removed, []
        sampled_ids, self._sampled_bytes = self._sampled_bytes, b""
        step_input = StepInput(
            step_id=self._next_step_id,
            removed=np.array(removed, dtype=np.int32).tobytes() if removed else b"",
            new=tuple(plan.new),
            new_blocks=tuple(plan.new_blocks),
            batch=None if is_same_batch else plan.pack_batch(table.request_id[rows]),
            sampled_ids=sampled_ids,
        )
        self._next_step_id += 1

        roster.decoding = roster.longest_first(sample_rows) if plan.completed else sample_rows
        # A row whose sample will reach its limit is foreseen to end: it is not launched again.
        if due.size and np.count_nonzero(table.sure_ids(due) >= table.limit[due]):
            going = roster.decoding
            roster.decoding = going[table.sure_ids(going) < table.limit[going]]
        # Last, so that a block is visible from the next step on, whose reads follow its writes.
        published = roster.publish_ready(due) if due.size else []
        step = ScheduledStep(
            step_input,
            rows,
            sample_rows,
            sample_ids,
            pooled_rows,
            published,
            query_len,
            num_decodes,
        )
        self._unread.append(step)
        used_blocks = roster.blocks.num_blocks - roster.blocks.num_free
        self.stats.count_step(num_decodes, query_len, plan.num_prefill_tokens, used_blocks)
        return step

    def withdraw(self, step: ScheduledStep) -> None:
        """Take back what a step published, because it was not enqueued or failed."""
        for block in step.published:
            self.roster.blocks.withdraw(block)

    # One step comes back.

    def update(self, output: StepOutput) -> list[RequestUpdate]:
        """Take in the oldest unread step's output; return what it has to tell of live requests.

        Raises RuntimeError when the runner answered another step or other requests.
        """
        roster, table = self.roster, self.roster.table
        step = self._unread.popleft()
        new_ids = self._ids.check(step, output, table)
        table.last_read = step.step_input.step_id
        rows, num_decodes = step.sample_rows, step.num_decodes
        if self._send_sampled_ids:
            self._sampled_bytes = new_ids.tobytes()
        if roster.leaving:  # else all that were in the step are alive
            alive = table.alive[rows]
            self.stats.dropped_ids += int(np.count_nonzero(new_ids[~alive] >= 0))
            rows, new_ids = rows[alive], new_ids[alive]
            num_decodes = int(np.count_nonzero(alive[:num_decodes]))

        counts: Rows | None = None  # of the ids that each row keeps; None: one
        if step.query_len > 1:
            counts, stopped = self.drafts.settle(table, self._ids, rows, new_ids, num_decodes)
            is_full = table.extend(rows, new_ids, counts) >= table.limit[rows]
            if np.count_nonzero(table.sure[rows] >= table.limit[rows]):
                # With what is in flight these reach their limit, now that so many were accepted.
                going = roster.decoding
                roster.decoding = going[table.sure[going] < table.limit[going]]
        else:
            stopped = self._ids.stopped(table, rows, new_ids)
            is_full = table.append(rows, new_ids) >= table.limit[rows]
        reasons: dict[int, str] = {}  # of the rows whose request ends, "stop" before "length"
        if np.count_nonzero(is_full):
            reasons = dict.fromkeys(rows[is_full].tolist(), "length")
        for row in stopped:
            reasons[row] = "stop"
        if self.drafts.controller is not None:
            self.drafts.note_read(step, len(rows) if counts is None else int(counts.sum()))

        updates = tell(table, rows, new_ids, counts, reasons, output.extras)
        for row in reasons:
            self._end(table.request(row))
        if step.pooled_rows.size:
            updates += self._end_pooled(step, output)
        if reasons or step.pooled_rows.size:
            roster.forget_ended()
        roster.release_read()
        return updates

    def _end_pooled(self, step: ScheduledStep, output: StepOutput) -> list[RequestUpdate]:
        """End the requests whose embedding this step has brought."""
        updates = []
        for row in step.pooled_rows[self.roster.table.alive[step.pooled_rows]].tolist():
            request = self.roster.table.request(row)
            extras = (output.extras or {}).get(request.request_id)
            if extras is None or extras.embedding is None:
                raise RuntimeError(f"request {request.request_id}: its embedding did not come")
            self._end(request)
            updates.append(RequestUpdate(request.request_id, [], "stop", extras))
        return updates

    def _end(self, request: Request) -> None:
        self.roster.end(request)
        self.stats.num_ended += 1

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row and block is held by exactly its owners."""
        self.roster.check_integrity()
        assert len(self.roster.running()) <= self.max_num_seqs, "too many requests run"
        self.roster.table.check_bounds(self.roster.decoding, is_exact=not self._unread)
