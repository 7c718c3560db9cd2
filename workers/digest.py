"""A tensor's bits in one number, made where the tensor lies, so that ranks can compare them.

    words [rows, columns]                                    the tensor's bits as integers
    digest = sum over i, j of words[i, j] * r[i] * c[j]      modulo 2**64

The weights r and c are odd numbers of 64 bits, made up from their index. An odd factor loses no
bit, so a change of one element always shows; changes of several elements cancel each other in one
case of 2**32 or more. Any dtype, NaN and -0.0 included, and no order of sums: all is integers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

CHUNK_WORDS = 1 << 20  # as int64 they take 8 MiB at a time: profile() has kept 64 MiB free
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes an element
LEAST_WEIGHTS = 4096


class Digester:
    """Makes digests on one device; equal tensors have equal ones, on any rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._row_weights, self._column_weights = _weights(LEAST_WEIGHTS, device)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the digest [] int64 of a tensor of one or two dimensions, on its device."""
        words = _as_words(tensor)
        num_rows, num_columns = words.shape
        self._make_room(max(num_rows, num_columns))
        of_rows, of_columns = self._row_weights, self._column_weights[:num_columns]
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        rows_a_chunk = max(1, CHUNK_WORDS // max(1, num_columns))
        for start in range(0, num_rows, rows_a_chunk):
            part = words[start : start + rows_a_chunk].to(torch.int64)
            sums = (part * of_columns).sum(dim=1)
            total += (sums * of_rows[start : start + len(part)]).sum()
        return total

    def zero_if_flat(self, digest: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Return the digest, or 0 when all elements of the tensor are one value, bit for bit."""
        words = _as_words(tensor)
        if words.numel() == 0:
            return torch.zeros_like(digest)
        return digest.masked_fill((words == words[:1, :1]).all(), 0)

    def _make_room(self, count: int) -> None:
        if count > len(self._row_weights):
            count = max(count, 2 * len(self._row_weights))
            self._row_weights, self._column_weights = _weights(count, self._device)


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers [rows, columns]; a view."""
    words = tensor.view(WORDS[tensor.element_size()])
    return words[None] if words.dim() == 1 else words


def _weights(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return odd int64 numbers for rows and for columns, [count] each: splitmix64 of an index."""
    index: npt.NDArray[np.uint64] = np.arange(1, 2 * count + 1, dtype=np.uint64)
    mixed = index * np.uint64(0x9E3779B97F4A7C15)  # arrays of integers wrap
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    # even places and odd ones, so that a larger count begins with the same numbers
    pairs = torch.from_numpy(odd.view(np.int64).reshape(count, 2)).to(device)
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
