"""Runner v2 as race_fuzz.py runs it on every rank: late on purpose, or synchronous on purpose.

    make_delayed    before a step: perhaps a sleep (so the next frame is read late), perhaps a spin
                    kernel on the main stream or on the copy stream
    make_synced     after a step: wait for the device, then compare its tables with the CPU's mirror
    make_lost_token, make_unordered_copy, make_late_drafts
                    make_delayed with a fault planted: must be found

Each starts from a KV cache full of NaN, and counts its rows after every step. With speculation a
draft model and its own cache are treated alike.
"""

from __future__ import annotations

import hashlib
import time
from random import Random
from typing import Any

import torch

from nanorunner.workers.device import Device
from nanorunner.workers.distributed import Group
from nanorunner.workers.draft_model import DraftModel
from nanorunner.workers.messages import METHODS, METHODS_WITH_REPLY, KvRoom, RunnerConfig
from nanorunner.workers.model_runner import ModelRunner
from nanorunner.workers.request_rows import Int64
from nanorunner.workers.step_output import PendingStep

FUZZ_METHODS = METHODS | {"digest"}
FUZZ_METHODS_WITH_REPLY = METHODS_WITH_REPLY | {"digest"}
LONGEST_SLEEP_S = 0.002  # longer than a step, so that depth 2 runs dry and fills again
LONGEST_SPIN_CYCLES = 4_000_000  # about 2 ms
SLEEP_SHARE, MAIN_SPIN_SHARE, COPY_SPIN_SHARE = 0.05, 0.05, 0.1  # of all steps
FIRST_FAULTY_STEP = 40


class FuzzRunner:
    """A ModelRunner with something before and after each step; the stages are its own."""

    def __init__(self, config: RunnerConfig, rank: int, group: Group) -> None:
        self.inner = ModelRunner(config, rank, group, Device(config.device, rank))
        self.num_steps = 0
        self._timeout_s = config.step_timeout_s

    def load_model(self) -> None:
        """As ModelRunner."""
        self.inner.load_model()

    def profile(self) -> KvRoom:
        """As ModelRunner."""
        return self.inner.profile()

    def allocate_kv(self, num_blocks: int) -> None:
        """As ModelRunner, and every slot that is read before it was written will show."""
        self.inner.allocate_kv(num_blocks)
        for cache in self._caches():
            cache.fill_(float("nan"))

    def capture(self) -> None:
        """As ModelRunner."""
        self.inner.capture()

    def step(self, wire: tuple[Any, ...]) -> PendingStep | None:
        """As ModelRunner; AssertionError when a row is lost or held twice."""
        self.before()
        handle = self.inner.step(wire)
        self.num_steps += 1
        self.after()
        rows = self.inner.states.rows
        owned, free = list(rows._row_of.values()), rows._free
        assert sorted(owned + free) == list(range(rows.num_rows)), "a row is lost or held twice"
        return handle

    def before(self) -> None:
        """Disturb."""

    def after(self) -> None:
        """Check."""

    def digest(self) -> str:
        """Return a hash of all that the steps have written.

        KV caches, the state table (with speculation the drafts in it and their numbers too), and
        the counts behind the penalties.
        """
        self.inner.device.finish(self._timeout_s)
        sums = hashlib.sha256()
        tables = [table for table in self.inner.states.tables if table is not None]
        sampling = self.inner.sampling
        counts = (sampling.prompt_bits, sampling.output_counts)
        for tensor in (*self._caches(), *tables, *counts):
            flat = tensor.contiguous().view(-1).view(torch.uint8).cpu()
            sums.update(flat.numpy().tobytes())
        return sums.hexdigest()

    def close(self) -> None:
        """As ModelRunner."""
        self.inner.close()

    def _caches(self) -> list[torch.Tensor]:
        """Return the KV caches: the target's, and the draft model's if there is one."""
        proposer = self.inner.proposer
        drafting = [proposer.kv_cache] if isinstance(proposer, DraftModel) else []
        return [self.inner.kv_cache, *drafting]


class DelayedRunner(FuzzRunner):
    """Asynchronous, with random delays of this rank's own."""

    def __init__(self, config: RunnerConfig, rank: int, group: Group) -> None:
        super().__init__(config, rank, group)
        self._random = Random(config.seed * 1009 + rank)

    def before(self) -> None:
        """Perhaps sleep, perhaps keep a stream busy."""
        random = self._random
        if random.random() < SLEEP_SHARE:
            time.sleep(random.uniform(0, LONGEST_SLEEP_S))
        if not self.inner.device.is_cuda:
            return
        if random.random() < MAIN_SPIN_SHARE:
            torch.cuda._sleep(random.randrange(LONGEST_SPIN_CYCLES))  # type: ignore[no-untyped-call]
        if random.random() < COPY_SPIN_SHARE:
            with torch.cuda.stream(self.inner.outputs._copy_stream):
                torch.cuda._sleep(random.randrange(LONGEST_SPIN_CYCLES))  # type: ignore[no-untyped-call]


class SyncedRunner(FuzzRunner):
    """Nothing is in flight when a step returns, and the device's tables are the CPU's."""

    def after(self) -> None:
        """Wait for the device; AssertionError where its tables are not what the CPU expects."""
        self.inner.device.finish(self._timeout_s)
        states, rows = self.inner.states, self.inner._rows
        found = {}
        for name, mirror in (("num_computed", states.computed), ("total_len", states.total)):
            found[name] = getattr(states.tables, name).cpu().numpy()[rows]
            is_good = found[name] == mirror[rows]
            if self.inner.speculator is not None:  # the mirror is a lower bound
                is_good = found[name] >= mirror[rows]
            assert is_good.all(), f"{name}: device and CPU disagree"
        if self.inner.speculator is not None:
            self._check_drafts(rows, found["num_computed"], found["total_len"])

    def _check_drafts(self, rows: Int64, computed: Int64, total: Int64) -> None:
        """AssertionError unless decoding rows [n] are one token ahead, and drafts are ids."""
        config, tables = self.inner.config, self.inner.states.tables
        assert tables.num_drafts is not None, "a table without speculation"
        assert tables.token_limit is not None, "a table without speculation"
        is_decoding = computed >= self.inner.states.prefill_len[rows]
        is_ahead = computed == total - 1
        assert is_ahead[is_decoding].all(), "a decoding row has other than one uncomputed token"
        num_drafts, limit = tables.num_drafts.cpu().numpy(), tables.token_limit.cpu().numpy()
        assert (total <= limit[rows]).all(), "a row is past its token limit"
        is_count = (num_drafts >= 0) & (num_drafts < config.max_query_len)
        assert is_count.all(), "num_drafts is no number of drafts"
        ids = tables.token_ids.cpu().numpy()
        is_id = (ids >= 0) & (ids < config.model.vocab_size)
        assert is_id.all(), "a token or draft is no id of the vocabulary"


class LostTokenRunner(DelayedRunner):
    """A fault: one request continues from a token that it has not sampled."""

    def before(self) -> None:
        """Change every row's token once, then delay."""
        if self.num_steps == FIRST_FAULTY_STEP:
            self.inner.states.tables.last_sampled.bitwise_xor_(1)
        super().before()


class LateDraftsRunner(DelayedRunner):
    """A fault: a step reads the token table before its drafts have been written."""

    def __init__(self, config: RunnerConfig, rank: int, group: Group) -> None:
        super().__init__(config, rank, group)
        self._before_last_step = self.inner.states.tables.token_ids.clone()

    def before(self) -> None:
        """Put back what lay behind each row's tokens before the last step, then delay."""
        tables = self.inner.states.tables
        newest = tables.token_ids.clone()
        if self.num_steps >= FIRST_FAULTY_STEP:
            columns = torch.arange(newest.shape[1], device=newest.device)
            is_draft = columns >= tables.total_len[:, None]
            tables.token_ids.copy_(torch.where(is_draft, self._before_last_step, newest))
        self._before_last_step = newest
        super().before()


class UnorderedCopyRunner(DelayedRunner):
    """A fault: the copies do not wait for the kernels that write them."""

    def __init__(self, config: RunnerConfig, rank: int, group: Group) -> None:
        super().__init__(config, rank, group)
        self.inner.outputs._copy_stream.wait_event = lambda event: None


def make_delayed(config: RunnerConfig, rank: int, group: Group) -> FuzzRunner:
    """Return a DelayedRunner."""
    return DelayedRunner(config, rank, group)


def make_synced(config: RunnerConfig, rank: int, group: Group) -> FuzzRunner:
    """Return a SyncedRunner."""
    return SyncedRunner(config, rank, group)


def make_lost_token(config: RunnerConfig, rank: int, group: Group) -> FuzzRunner:
    """Return a LostTokenRunner."""
    return LostTokenRunner(config, rank, group)


def make_late_drafts(config: RunnerConfig, rank: int, group: Group) -> FuzzRunner:
    """Return a LateDraftsRunner."""
    return LateDraftsRunner(config, rank, group)


def make_unordered_copy(config: RunnerConfig, rank: int, group: Group) -> FuzzRunner:
    """Return an UnorderedCopyRunner."""
    return UnorderedCopyRunner(config, rank, group)
