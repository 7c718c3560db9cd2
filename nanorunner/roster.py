"""Every request that has not ended, and what it holds: its place in the queue, its row, its blocks.

    waiting     no row, no blocks; in the order in which they will start
    prefilling  a row, blocks for all its known ids; some of them are not computed yet
    decoding    a row; takes one token in each step
    leaving     has a row and blocks, but takes no further step: it has ended, or its last id is
                in flight. Both return when the last step that contains it has been read.

The scheduler decides who moves; this file keeps rows, blocks and published prefixes true.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

import numpy as np

from nanorunner.block_manager import BlockManager
from nanorunner.prefix_cache import extend_digests
from nanorunner.request import NO_ROW, Request
from nanorunner.running_table import Rows, RunningTable
from nanorunner.sampler_pools import SamplerPools

NO_ROWS: Rows = np.empty(0, dtype=np.int64)


class Roster:
    """The books of one scheduler, on rank 0's host."""

    def __init__(self, table: RunningTable, blocks: BlockManager, prefix_cache: bool) -> None:
        self.table = table
        self.blocks = blocks
        self.block_size = table.block_size
        self.pools = SamplerPools(table.stride)
        self.has_prefix_cache = prefix_cache
        self.requests: dict[int, Request] = {}  # all but those that have ended
        self.waiting: OrderedDict[int, Request] = OrderedDict()
        self.prefilling: list[int] = []
        # The longest first. Replaced, never changed in place: steps in flight keep it.
        self.decoding: Rows = NO_ROWS
        self.leaving: list[int] = []  # rows that have ended, but are in a step in flight
        self.removed: list[int] = []  # request ids that the ranks must still be told to drop

    def running(self) -> Rows:
        """The rows of all requests that take further steps."""
        rows: Rows = np.concatenate((self.decoding, self.prefilling)).astype(np.int64)
        return rows

    def longest_first(self, rows: Rows) -> Rows:
        """Return the rows by how long their requests are.

        Attention takes a batch in its order: what is read longest should be begun first, or it is
        still being read when all others have ended (kernels/decode_attention.py). Decodes grow
        together, so a batch stays in this order until others join it; with speculation nearly so,
        for some accept more drafts than others.
        """
        longest_first: Rows = rows[np.argsort(-self.table.computed[rows], kind="stable")]
        return longest_first

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue."""
        self.requests[request.request_id] = request
        self.waiting[request.request_id] = request

    def match(self, request: Request) -> tuple[list[int], bytes | None]:
        """Return the cached blocks of a waiting request's prefix, and the next block's digest.

        The digest is None when no further block could be hit.
        """
        if not self.has_prefix_cache:
            return [], None
        length, size = len(request.token_ids), self.block_size
        extend_digests(request.digests, request.token_ids, length // size, size)
        if request.reads_whole_prompt:
            return [], None
        # At least one token must be computed: its logits are what the request samples from.
        most = (length - 1) // size
        hits = self.blocks.prefix_cache.match(request.digests, most)
        return hits, request.digests[len(hits)] if len(hits) < most else None

    def start(self, request: Request, hits: list[int]) -> int:
        """Give a waiting request blocks for all its known ids and a row; return the row."""
        needed = self.num_blocks_for(len(request.token_ids)) - len(hits)
        # Hits first: take() may otherwise hand out the very blocks that were hit.
        self.blocks.share(hits)
        request.blocks = hits + self.blocks.take(needed)
        del self.waiting[request.request_id]
        self.pools.take(request)
        return self.table.occupy(request, len(hits) * self.block_size, self.has_prefix_cache)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many positions."""
        return -(-num_tokens // self.block_size)

    def needy(self, rows: Rows, query_len: int) -> tuple[Rows, int]:
        """Return which of the rows need blocks for a step of query_len positions each, how many.

        Nothing is ever written from a row's limit on, so that needs no room.
        """
        table = self.table
        end = table.computed[rows] + query_len
        if table.stride > 1:  # else it never passes the limit
            end = np.minimum(end, table.limit[rows])
        is_needy = end > table.block_end[rows]
        needy = rows[is_needy]
        if query_len == 1:
            return needy, needy.size
        num_missing = end[is_needy] - table.block_end[needy]
        return needy, int((-(-num_missing // self.block_size)).sum())

    def grow(self, row: int, query_len: int) -> tuple[int, bytes]:
        """Give a needy row the blocks for that; return its request's id and the block ids."""
        table, request = self.table, self.table.request(row)
        count = 1
        if query_len > 1:
            end = min(table.computed.item(row) + query_len, table.limit.item(row))
            count = self.num_blocks_for(end) - len(request.blocks)
        blocks = self.blocks.take(count)
        request.blocks += blocks
        table.block_end[row] = len(request.blocks) * self.block_size
        table.set_due(row)
        # an array of Python's own: for a block or two a quarter of what numpy's takes
        return request.request_id, array("i", blocks).tobytes()

    def due(self) -> Rows:
        """The decoding rows that need a look before and after the next step."""
        is_due = self.table.computed[self.decoding] >= self.table.due_at[self.decoding]
        return self.decoding[is_due] if np.count_nonzero(is_due) else NO_ROWS

    def publish_ready(self, rows: Rows) -> list[int]:
        """Publish, and return, these rows' blocks that are full, enqueued and of known ids.

        Each row is in the step just made, so `computed`, even as the most that it can be, serves:
        that step begins at the newest id at the latest, so all known ids of a decoding row have
        their KV behind it, and what drafts leave behind them is in no block of known ids alone.
        """
        table, size = self.table, self.block_size
        settled = np.minimum(table.known[rows], table.computed[rows])
        published: list[int] = []
        for row in rows[settled >= table.publish_end[rows]].tolist():
            request = table.request(row)
            first = table.publish_end.item(row) // size - 1
            full = min(table.known.item(row), table.computed.item(row)) // size
            extend_digests(request.digests, table.ids(row), full, size)
            for index in range(first, full):
                block = request.blocks[index]
                if self.blocks.prefix_cache.publish(block, request.digests[index]):
                    published.append(block)
            table.publish_end[row] = (full + 1) * size
            table.set_due(row)
        return published

    def end(self, request: Request) -> None:
        """Take a request out; its row and blocks stay while a step in flight reads them.

        The caller drops it from decoding and prefilling with forget_ended(), once for many.
        """
        del self.requests[request.request_id]
        row = request.row
        if row == NO_ROW:
            del self.waiting[request.request_id]
            return
        self.table.alive[row] = False
        if self.table.is_unread(row):
            self.leaving.append(row)
        else:
            self._release(row)

    def preempt(self, row: int) -> None:
        """Send a running request to the head of the queue; it computes all again later."""
        request = self.table.request(row)
        request.token_ids = self.table.ids(row).copy()
        self._release(row)
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)

    def forget_ended(self) -> None:
        """Drop the rows that are not alive from decoding and prefilling."""
        alive = self.table.alive
        keep = alive[self.decoding]
        if not keep.all():
            self.decoding = self.decoding[keep]
        if self.prefilling:
            self.prefilling = [row for row in self.prefilling if alive[row]]

    def release_read(self) -> None:
        """Release the rows that have ended and that no step in flight contains any more."""
        if not self.leaving:
            return
        leaving, self.leaving = self.leaving, []
        for row in leaving:
            if self.table.is_unread(row):
                self.leaving.append(row)
            else:
                self._release(row)

    def _release(self, row: int) -> None:
        request = self.table.vacate(row)
        # Only now: a rank gives the row of a request that it drops to the next one at once, and
        # checks that no output comes for a row's former owner.
        self.removed.append(request.request_id)
        self.pools.give_back(request)
        self.blocks.release(request.blocks)
        request.blocks = []

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row and block is held by exactly its owners."""
        table = self.table
        held = [request for request in table.requests if request is not None]
        assert len(held) + table.num_free == table.num_rows, "a row is lost"
        self.blocks.check_integrity([request.blocks for request in held])
        going = self.running().tolist()
        assert len(set(going)) == len(going), "a row is both decoding and prefilling"
        assert all(table.alive[row] for row in going), "a row that has ended goes on"
        for request in held:
            row = request.row
            assert table.requests[row] is request, f"row {row} is another request's"
            has_ended = request.request_id not in self.requests
            assert bool(table.alive[row]) != has_ended, f"row {row} ended, or has not"
            assert (row in self.leaving) == has_ended, f"row {row} leaves, or does not"
            assert table.due_at[row] == table.when_due(row), f"row {row} is looked at too late"
            assert row in going or table.is_unread(row), f"row {row} is held for nothing"
