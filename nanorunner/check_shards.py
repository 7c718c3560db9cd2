"""Find the rank that holds a wrong slice: every rank's weights against the checkpoint's own bytes.

    every rank   checksums() -> CRC-32 of each parameter in its memory, and of each slice in it
    rank 0       cuts the checkpoint by the shard map, proves that the cuts tile it, and compares

Nothing else can find it. After an all-reduce all ranks hold the same sum, however wrong a share of
it was; so what --check-ranks compares at run time (workers/check_ranks.py) stays equal, and the
only sign would be a worse text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import TYPE_CHECKING

from nanorunner.launch import Ranks
from nanorunner.workers.messages import RunnerConfig
from nanorunner.workers.rank_agreement import RankCheckFailed
from nanorunner.workers.shard_checksums import TIED_HEAD, Checksums, checksum, index_of
from nanorunner.workers.shards import Span
from nanorunner.workers.weight_plan import Piece, checkpoint_shapes
from nanorunner.workshop.shard_map import Entry, Share, shard_map, with_checksums

if TYPE_CHECKING:  # the wire alone needs no torch
    import torch

    from nanorunner.workers.weights import ReadSlice

TENSORS_KEPT = 3  # q, k and v, which one parameter holds
MOST_NAMED = 4  # wrong parameters in the error; the others are counted

logger = logging.getLogger("nanorunner")


def check_shards(ranks: Ranks) -> None:
    """Compare the weights of every rank with the checkpoint; for after load_model.

    Raises RankCheckFailed that names rank, layer and tensor of what is wrong; the engine can go on
    then, but will write nonsense.
    """
    begin = time.perf_counter()
    wrong = wrong_shards(ranks.call_all("checksums"), ranks.config)
    if wrong:
        others = f"; and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise RankCheckFailed(
            f"weights that are not what the shard map gives the rank: "
            f"{'; '.join(wrong[:MOST_NAMED])}{others}"
        )
    source = ranks.config.checkpoint or f"random weights of seed {ranks.config.seed}"
    logger.info(
        "check-ranks: the weights of all %d ranks are their slices of %s, byte for byte (%.1f s)",
        ranks.config.tp,
        source,
        time.perf_counter() - begin,
    )


def wrong_shards(found: Sequence[Mapping[str, Checksums]], config: RunnerConfig) -> list[str]:
    """Return a sentence for each parameter whose bytes are not those that the shard map gives.

    found: each rank's checksums, in rank order.
    """
    wrong: list[str] = []
    with ExitStack() as stack:
        read = _reader(config, stack)
        entries = shard_map(config.model, config.tp)
        for entry in with_checksums(entries, config.model, read, wrong):
            for share in entry.shares:
                wrong += _share_errors(entry, share, found[share.rank], read)
    return wrong


def _share_errors(
    entry: Entry, share: Share, found: Mapping[str, Checksums], read: ReadSlice
) -> Iterator[str]:
    """Yield what is wrong with one rank's part of one parameter."""
    where = f"rank {share.rank}, {entry.name}"
    mine = found.get(entry.name)
    if mine is None:
        yield f"{where}: the rank has no such parameter"
        return
    if mine.whole != share.checksum:
        yield f"{where}: {_what(entry, share, mine, read)}"
    head = found.get(TIED_HEAD)
    if entry.name == "embed" and head is not None and head.whole != share.checksum:
        yield f"rank {share.rank}, {TIED_HEAD}: its copy of embed differs"


def _what(entry: Entry, share: Share, mine: Checksums, read: ReadSlice) -> str:
    """Return which slices of a wrong parameter differ, and whose they are if another rank's."""
    pieces = share.parameter.pieces
    if len(mine.pieces) != len(pieces):
        return f"it has {len(mine.pieces)} slices of the checkpoint instead of {len(pieces)}"
    differing = [
        (piece, found)
        for piece, found in zip(pieces, mine.pieces, strict=True)
        if found != checksum(read(piece.key, piece.source))
    ]
    if not differing:
        return "its padding is not zero"
    return ", ".join(_slice(piece, found, entry, share, read) for piece, found in differing)


def _slice(piece: Piece, found: int, entry: Entry, share: Share, read: ReadSlice) -> str:
    """Return one wrong slice in words."""
    dims = ("rows", "columns")
    spans = zip(dims, piece.source, strict=False)
    box = ", ".join(f"{name} {span.start}..{span.stop - 1}" for name, span in spans)
    for other in entry.shares:
        for its in other.parameter.pieces:
            is_another = other.rank != share.rank and its.key == piece.key
            if is_another and found == checksum(read(its.key, its.source)):
                return f"{piece.key} ({box}) is rank {other.rank}'s slice"
    return f"{piece.key} ({box}) differs"


def _reader(config: RunnerConfig, stack: ExitStack) -> ReadSlice:
    """Return a reader of the checkpoint as the ranks hold it: in their dtype, in host memory.

    It reads whole tensors and cuts them itself, where the loader asks the file for its slices.
    """
    import torch

    from nanorunner.workers.weights import checkpoint_reader, dummy_reader

    dtype: torch.dtype = getattr(torch, config.dtype)
    if config.load_format == "dummy":
        # drawn where the ranks draw: a GPU's generator gives other numbers than a CPU's
        read = dummy_reader(config.model, config.seed, dtype, torch.device(config.device))
    else:
        read = checkpoint_reader(config.checkpoint, stack)
    shapes = checkpoint_shapes(config.model)

    @lru_cache(maxsize=TENSORS_KEPT)
    def whole(key: str) -> torch.Tensor:
        return read(key, tuple(Span(0, size) for size in shapes[key])).to("cpu", dtype)

    return lambda key, box: whole(key)[index_of(box)]
