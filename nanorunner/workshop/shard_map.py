"""Which slice of which checkpoint tensor each rank holds, and the proof that nothing is lost.

    weight_plan(model, tp, rank) of every rank -> Entry for each parameter -> Share of each rank
    the checkpoint's file                      -> each share's checksum, and the proof

The proof works on bytes. Each rank's parameter is filled as the loader fills it; then every tensor
of the checkpoint is put together again from the ranks' parameters and compared with the file.
shards.py prints what is found here; check_shards.py finds a wrong shard by the checksums.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from nanorunner.workers.model_config import ModelConfig
from nanorunner.workers.shard_checksums import checksum
from nanorunner.workers.weight_plan import (
    Box,
    LocalParameter,
    Piece,
    checkpoint_shapes,
    weight_plan,
)

if TYPE_CHECKING:
    import torch

    from nanorunner.workers.weights import ReadSlice

COLUMN, ROW, VOCABULARY = "column-parallel", "row-parallel", "vocabulary-parallel"
WHOLE, RANK_0 = "whole on every rank", "whole on rank 0 alone"
VOCABULARY_NAMES = ("embed", "lm_head")
# After these the ranks hold partial results: decoder.py adds them up, one all-reduce each.
PARTIAL_NAMES = ("embed", "o", "down")


class Share(NamedTuple):
    """One rank's part of one parameter."""

    rank: int
    parameter: LocalParameter
    checksum: int | None = None  # CRC-32 of its bytes, padding included; None: no weights read

    def num_bytes(self, item_bytes: int) -> int:
        """Return what it takes, padding included."""
        return math.prod(self.parameter.shape) * item_bytes

    def padding_bytes(self, item_bytes: int) -> int:
        """Return how much of that is zeros that no checkpoint holds."""
        return self.parameter.num_padded * item_bytes


class Entry(NamedTuple):
    """One parameter over all ranks."""

    name: str
    whole_shape: tuple[int, ...]  # its checkpoint tensors, one behind the other along dim 0
    split: str  # COLUMN | ROW | VOCABULARY | WHOLE | RANK_0
    all_reduce: int  # number in a step of the all-reduce that follows; 0: none does
    shares: tuple[Share, ...]  # of the ranks that have it


def shard_map(model: ModelConfig, tp: int) -> list[Entry]:
    """Return every parameter in layer order; ValueError when tp exceeds the query heads."""
    plans = [{p.name: p for p in weight_plan(model, tp, rank)} for rank in range(tp)]
    shapes = checkpoint_shapes(model)
    numbers = all_reduce_numbers(model, tp)
    entries = []
    for name in plans[0]:  # rank 0 has every parameter; others lack the biases added once
        held = [(rank, plan[name]) for rank, plan in enumerate(plans) if name in plan]
        shares = tuple(Share(rank, parameter) for rank, parameter in held)
        keys = dict.fromkeys(piece.key for share in shares for piece in share.parameter.pieces)
        rows = sum(shapes[key][0] for key in keys)
        first = next(iter(keys))
        whole_shape = (rows, *shapes[first][1:])
        split = _split(name, shares, shapes, tp)
        entries.append(Entry(name, whole_shape, split, numbers.get(name, 0), shares))
    return entries


def all_reduce_numbers(model: ModelConfig, tp: int) -> dict[str, int]:
    """Return parameter -> number of the all-reduce after it in one step; nothing at tp 1."""
    if tp == 1:
        return {}
    names = [parameter.name for parameter in weight_plan(model, tp, 0)]
    partial = [name for name in names if name.rpartition(".")[2] in PARTIAL_NAMES]
    return {name: number for number, name in enumerate(partial, start=1)}


def chosen(entries: list[Entry], pattern: str) -> list[Entry]:
    """Return the entries whose name, or the name of a checkpoint tensor in it, fits the pattern.

    Patterns are shell patterns (layers.*.o). Raises ValueError when nothing fits.
    """
    found = [
        entry
        for entry in entries
        if any(fnmatch.fnmatchcase(name, pattern) for name in (entry.name, *keys_of(entry)))
    ]
    if not found:
        raise ValueError(
            f"--tensor {pattern}: no parameter has that name; use one as {entries[1].name}, a "
            f"checkpoint tensor's as {keys_of(entries[0])[0]}, or a pattern as 'layers.*.o'"
        )
    return found


def keys_of(entry: Entry) -> list[str]:
    """Return the checkpoint tensors in an entry, in the order in which they are stacked."""
    return list(dict.fromkeys(p.key for share in entry.shares for p in share.parameter.pieces))


def with_checksums(
    entries: list[Entry], model: ModelConfig, read: ReadSlice, errors: list[str]
) -> Iterator[Entry]:
    """Yield each entry with its shares' checksums; append to `errors` what the bytes disprove.

    Memory: one entry's tensors at a time, twice.
    """
    shapes = checkpoint_shapes(model)
    for entry in entries:
        locals_ = _local_tensors(entry, read)
        for key in keys_of(entry):
            errors += _key_errors(key, entry, locals_, read(key, _whole_box(shapes[key])))
        for share, tensor in zip(entry.shares, locals_, strict=True):
            if _num_nonzero_outside(share.parameter, tensor):
                errors.append(f"rank {share.rank}, {entry.name}: its padding is not zero")
        shares = tuple(
            share._replace(checksum=checksum(tensor))
            for share, tensor in zip(entry.shares, locals_, strict=True)
        )
        yield entry._replace(shares=shares)


def _split(
    name: str, shares: tuple[Share, ...], shapes: dict[str, tuple[int, ...]], tp: int
) -> str:
    """Return how a parameter is dealt out, read off the slices that the plan gives the ranks."""
    if len(shares) < tp:
        return RANK_0
    dims = {
        dim
        for share in shares
        for piece in share.parameter.pieces
        for dim, span in enumerate(piece.source)
        if span.size < shapes[piece.key][dim]
    }
    if not dims:
        return WHOLE
    if name in VOCABULARY_NAMES:
        return VOCABULARY
    return ROW if dims == {1} else COLUMN


def _local_tensors(entry: Entry, read: ReadSlice) -> list[torch.Tensor]:
    """Return each rank's parameter, filled as weights.fill() fills it, in the file's dtype."""
    # here, not at the top: the plan alone needs no torch
    import torch

    slices = [
        [(piece, read(piece.key, piece.source)) for piece in share.parameter.pieces]
        for share in entry.shares
    ]
    dtypes = [tensor.dtype for pairs in slices for _, tensor in pairs]
    dtype = reduce(torch.promote_types, dtypes)
    filled = []
    for share, pairs in zip(entry.shares, slices, strict=True):
        local = torch.zeros(share.parameter.shape, dtype=dtype)
        for piece, tensor in pairs:
            local[_index(piece.target)] = tensor
        filled.append(local)
    return filled


def _key_errors(
    key: str, entry: Entry, locals_: list[torch.Tensor], whole: torch.Tensor
) -> list[str]:
    """Put one checkpoint tensor together again and return how it differs from the file's."""
    import torch

    again = torch.zeros_like(whole)
    covered = torch.zeros(whole.shape, dtype=torch.uint8)
    errors = []
    for share, local in zip(entry.shares, locals_, strict=True):
        for piece in share.parameter.pieces:
            if piece.key != key:
                continue
            mine = local[_index(piece.target)].to(whole.dtype)
            if not piece.is_copy:
                again[_index(piece.source)] = mine
                covered[_index(piece.source)] += 1
            elif not _is_equal(mine, whole[_index(piece.source)]):
                errors.append(f"rank {share.rank}, {entry.name}: its copy of {key} differs")
    if not bool((covered == 1).all()):
        times = f"{int(covered.min())} to {int(covered.max())}"
        errors.append(f"{key}: its elements are on {times} ranks, not each on exactly one")
    if not _is_equal(again, whole):
        errors.append(f"{key}: put together again it is not what the file holds")
    return errors


def _num_nonzero_outside(parameter: LocalParameter, local: torch.Tensor) -> int:
    """Return how many elements are not zero where no piece lies."""

    def count(piece: Piece) -> int:
        return int(local[_index(piece.target)].count_nonzero())

    return int(local.count_nonzero()) - sum(count(piece) for piece in parameter.pieces)


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes, NaN and the sign of zero included."""
    return bool((_bytes(a) == _bytes(b)).all())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _whole_box(shape: tuple[int, ...]) -> Box:
    from nanorunner.workers.shards import Span

    return tuple(Span(0, size) for size in shape)


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(span.start, span.stop) for span in box)
