"""The contract across the wire: what rank 0 tells every rank each step, and what comes back.

Both sides import this file, so nothing here knows a scheduler or a model. A StepInput says only
what changed since the last step; it crosses as a bare tuple of ints and packed bytes (a dataclass
pickles to four times the size, and 256 string ids to 5.5 kB).

    engine.py -> StepInput.to_wire() -> channel.write_shm("step", wire) -> every rank's Runner.step
    Runner.step on rank 0 -> StepHandle.result() -> StepOutput -> scheduler.update()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from nanorunner.workers.full_sampling import FullSampling
from nanorunner.workers.model_config import ModelConfig
from nanorunner.workers.shard_checksums import Checksums
from nanorunner.workers.spans import RankSpans

if TYPE_CHECKING:  # it imports torch, which a rank without a group does without
    from nanorunner.workers.rank_counters import RankCounters

BLOCK_SIZE = 256  # token slots in one KV block, the card's figure

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
POOLINGS = ("last", "mean")


class NewRequest(NamedTuple):
    """A request's first appearance, or its return after a preemption."""

    request_id: int  # fits int32
    token_ids: bytes  # int32: the prompt, and after a preemption all it has generated so far
    prompt_len: int  # how many of token_ids the user gave
    num_computed: int  # tokens whose KV a prefix-cache hit already holds
    block_ids: bytes  # int32: the KV blocks that hold positions 0 and up
    sampling: FullSampling
    # Runner v2: one of POOLINGS asks for an embedding of the prompt instead of output tokens.
    pooling: str = ""
    token_limit: int = 0  # with speculation: tokens that it may have at most, output included


class StepInput(NamedTuple):
    """One step of the engine, as every rank must see it.

    Order of application: removed, then new, then new_blocks, then sampled_ids, then the batch.
    A request samples in this step when its scheduled tokens reach the end of its known tokens; one
    that is pooled has its embedding then.
    """

    step_id: int
    removed: bytes  # int32 request ids: finished, aborted or preempted since the last step
    new: tuple[NewRequest, ...]
    new_blocks: tuple[tuple[int, bytes], ...]  # (request id, int32 block ids to append)
    # int32 pairs (request id, tokens scheduled) in batch order, decodes first. A decode's tokens
    # are its newest one and the drafts behind it, as many for every decode of a step.
    # None: the same batch as the last step, which had decodes alone.
    batch: bytes | None
    # Runner v1 alone: int32 ids that rank 0 sampled in the last step, in the order in which that
    # step's sampling requests stood in its batch. Empty in v2, whose ranks have them on device.
    sampled_ids: bytes

    def to_wire(self) -> tuple[Any, ...]:
        """Return the bare tuple that is pickled."""
        new = tuple(
            # without speculation a request has no last field, so its bytes are what they were
            (*r[:5], r.sampling.trimmed(), *(r[6:] if r.token_limit else r[6:7]))
            for r in self.new
        )
        return (*self[:2], new, *self[3:])

    @classmethod
    def from_wire(cls, wire: tuple[Any, ...]) -> StepInput:
        """Return the StepInput that to_wire made `wire` from."""
        new = tuple(NewRequest(*(*r[:5], FullSampling(*r[5]), *r[6:])) for r in wire[2])
        return cls(wire[0], wire[1], new, *wire[3:])


class TokenLogprobs(NamedTuple):
    """Log-probabilities of m tokens that follow each other, and of the N likeliest in each place.

    They are those of the logits as the model gave them, before temperature and every other setting.
    """

    token_ids: Int64  # [m, N + 1]: the token itself, then the N likeliest, best first
    logprobs: Float32  # [m, N + 1]
    ranks: Int32  # [m] of the token itself: 1 is the likeliest


class RequestExtras(NamedTuple):
    """What a step brings one request beside its id, as far as it asked."""

    logprobs: TokenLogprobs | None = None  # of the step's ids: m = 1, more with speculation
    prompt_logprobs: TokenLogprobs | None = None  # m = prompt_len - 1: from the second token on
    embedding: Float32 | None = None  # [hidden]


class StepOutput(NamedTuple):
    """What one step sampled, in batch order, requests with an unfinished prompt left out.

    A request that verified drafts is there once for each of its places, one behind the other.
    """

    step_id: int
    request_ids: Int32  # [num_sampled]
    token_ids: Int32  # [num_sampled]; -1: a draft was not accepted, -2: nor was one proposed
    extras: dict[int, RequestExtras] | None = None  # by request id; None: nobody asked


class KvRoom(NamedTuple):
    """What one rank's profile found out about the KV cache."""

    num_blocks: int  # that fit; the engine takes the minimum over the ranks
    block_bytes: int  # of one block on this rank
    room_bytes: int  # left for all blocks


class StepHandle(Protocol):
    """A step that has been enqueued; it owns its buffers until result() has returned."""

    def result(self) -> StepOutput:
        """Wait for the step, at most the step timeout, and return what it sampled."""


class Runner(Protocol):
    """What every runner offers, the same on every rank. The stages run in this order."""

    def load_model(self) -> None:
        """Fill this rank's share of the weights."""

    def profile(self) -> KvRoom:
        """Return how many KV blocks this rank has room for, beside its widest step."""

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocate the KV cache; every rank gets the same number, the minimum over ranks."""

    def capture(self) -> None:
        """Compile kernels and capture graphs; writes no live state."""

    def step(self, wire: tuple[Any, ...]) -> StepHandle | None:
        """Run one step; rank 0 gets a handle, the other ranks None."""

    def counters(self) -> RankCounters:
        """Return what this rank has counted since its start."""

    def spans(self) -> RankSpans:
        """Return what this rank has recorded; only where RunnerConfig.spans is set."""

    def checksums(self) -> dict[str, Checksums]:
        """Return the checksums of the weights that this rank holds."""

    def close(self) -> None:
        """Free what this rank holds; a second call does nothing."""


# The methods a frame may name. Those with a reply send (frame, "ok", value) over the rank's pipe.
METHODS_WITH_REPLY = frozenset(
    {"load_model", "profile", "allocate_kv", "capture", "counters", "spans", "checksums", "close"}
)
METHODS = METHODS_WITH_REPLY | {"step"}


class Speculation(NamedTuple):
    """How drafts are made and how many, when a step verifies drafts (proposer.py)."""

    method: str  # ngram | draft
    num_tokens: int  # drafts of a request in a step
    ngram_min: int = 1  # ngram: the shortest and the longest suffix that is looked up
    ngram_max: int = 1
    draft: ModelConfig | None = None  # draft: the small model
    checkpoint: str = ""  # its folder; "" when load_format is dummy
    load_format: str = ""


class Trace(NamedTuple):
    """Where the ranks leave their traces when they close (trace_file.py)."""

    folder: str  # it is there
    head: dict[str, Any]  # what stands in the first line of each


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """All that a rank must know before its first frame; pickled once, when it is spawned."""

    model: ModelConfig
    checkpoint: str  # folder that holds the safetensors files; "" when load_format is dummy
    load_format: str  # safetensors | dummy
    runner: str  # v1 | v2
    async_depth: int  # steps in flight at most
    tp: int
    device: str  # cpu | cuda
    dtype: str  # float32 | bfloat16 | float16
    attention_backend: str  # torch | triton | flash_attn
    enforce_eager: bool  # no CUDA graphs
    max_num_seqs: int  # most requests in one step
    max_num_reqs: int  # rows of the state table: those that run, and those in steps still unread
    max_num_batched_tokens: int  # most tokens in one step
    max_model_len: int  # most tokens of one request, prompt and output together
    gpu_memory_utilization: float  # this instance's share of the whole GPU's memory
    kv_cache_bytes: int | None  # each rank's limit; None on a GPU means "what is left"
    num_blocks: int | None  # overrides the sizing, for tests and lessons
    seed: int
    step_timeout_s: float
    start_timeout_s: float
    all_reduce: str = "auto"  # of small tensors on GPUs: auto | nccl | peer
    batch_invariant: bool = False  # results never depend on who shares the batch, not by a bit
    spans: bool = False  # record where each step's time goes (spans.py)
    trace: Trace | None = None  # and write it down at the end
    tap: bool = False  # note when each frame is acked, for rank 0's tap (ack_stamps.py)
    check_ranks: bool = False  # compare the ranks' values in every step (check_ranks.py)
    share_gpu: bool = False  # every rank works on GPU 0, and they meet in host memory
    speculation: Speculation | None = None  # None: each decode step brings a request one token

    def gpu_of(self, rank: int) -> int:
        """Return the number of the GPU that a rank works on; of no use on a CPU."""
        return 0 if self.share_gpu else rank

    @property
    def max_query_len(self) -> int:
        """Places that a decoding request takes in a step at most: its newest token, its drafts."""
        return 1 if self.speculation is None else 1 + self.speculation.num_tokens
