"""What a rank says of the weights that it holds: a checksum of each parameter and of each slice.

    every rank   shard_checksums(decoder)   of what lies in its memory, padding included
    rank 0       the same from the checkpoint's own slices (nanorunner/check_shards.py)

The numbers are of the plain weights in the model's dtype, whatever a CPU has packed them into.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple

from nanorunner.workers.weight_plan import Box, weight_plan

if TYPE_CHECKING:  # the shard map's plan alone needs no torch
    import torch

    from nanorunner.workers.models.decoder import Decoder

TIED_HEAD = "tied lm_head"  # where it is a second copy of the embedding; no parameter's name


class Checksums(NamedTuple):
    """CRC-32 of one parameter's bytes on one rank."""

    whole: int  # padding included
    pieces: tuple[int, ...]  # of each checkpoint slice in it, in the plan's order


def shard_checksums(decoder: Decoder) -> dict[str, Checksums]:
    """Return the checksums of every parameter of this rank, and of a tied head's own copy."""
    found = {}
    for parameter in weight_plan(decoder.model, decoder.tp, decoder.rank):
        local = plain_weight(decoder.parameters[parameter.name], decoder.dtype)
        pieces = tuple(checksum(local[index_of(piece.target)]) for piece in parameter.pieces)
        found[parameter.name] = Checksums(checksum(local), pieces)
    if decoder.model.tie_word_embeddings and decoder.lm_head is not decoder.embed:
        head = plain_weight(decoder.lm_head, decoder.dtype)
        found[TIED_HEAD] = Checksums(checksum(head), ())
    return found


def plain_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight as the loader wrote it, in host memory.

    A CPU packs projections and widens norms (Decoder.pack_for_cpu); both ways back are exact.
    """
    plain = weight.to_dense() if weight.is_mkldnn else weight
    return plain.to("cpu", dtype)


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes, row by row; the tensor is in host memory."""
    import torch

    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def index_of(box: Box) -> tuple[slice, ...]:
    """Return the box of a plan as an index."""
    return tuple(slice(span.start, span.stop) for span in box)
