"""Repetition, presence and frequency penalties, from what a request's tokens were.

    repetition   tokens of the prompt or the output: positive logits / r, the others * r
    frequency    - f * how often the output has the token
    presence     - q if the output has the token

A request that asks for one has a slot of a small pool: [slots, vocabulary] counters for every row
of the state table would take 600 MB. Each rank's pool covers its own shard of the vocabulary:

    prompt_bits    [slots, ceil(V / 32)] int32: bit id % 32 of word id // 32, id without the offset
    output_counts  [slots, V] int32

kernels/token_counts.py fills the pool.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.triton_support import jit, tl

TILE = 1024  # vocabulary ids a program


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    prompt_bits: torch.Tensor,
    output_counts: torch.Tensor,
) -> None:
    """Penalise logits [m, V] float32 in place.

    rows [m] int: of the state table, -1 for nobody. The state table says for each of its rows:
    slots [R] int32 (-1: no penalties), repetition, presence, frequency [R] float32.
    """
    function = apply_penalties_triton if logits.is_cuda else apply_penalties_reference
    function(logits, rows, slots, repetition, presence, frequency, prompt_bits, output_counts)


def apply_penalties_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    prompt_bits: torch.Tensor,
    output_counts: torch.Tensor,
) -> None:
    """Compute apply_penalties in plain PyTorch, a row at a time."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    for place, row in enumerate(rows.tolist()):
        slot = int(slots[row]) if row >= 0 else -1
        if slot < 0:
            continue
        count = output_counts[slot]
        in_prompt = (prompt_bits[slot][ids // 32] >> (ids % 32)) & 1
        line = logits[place]
        r = repetition[row]
        repeated = torch.where(line > 0, line / r, line * r)
        line = torch.where((in_prompt == 1) | (count > 0), repeated, line)
        logits[place] = line - frequency[row] * count - presence[row] * (count > 0)


def apply_penalties_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    prompt_bits: torch.Tensor,
    output_counts: torch.Tensor,
) -> None:
    """Compute apply_penalties in one launch."""
    num_rows, num_ids = logits.shape
    if num_rows == 0:
        return
    _penalise[(num_rows, -(-num_ids // TILE))](
        logits,
        rows,
        slots,
        repetition,
        presence,
        frequency,
        prompt_bits,
        output_counts,
        logits.stride(0),
        prompt_bits.stride(0),
        num_ids,
        TILE=TILE,
    )


@jit(tables=("rows",))
def _penalise(
    logits: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    prompt_bits: tl.tensor,
    output_counts: tl.tensor,
    row_stride: tl.tensor,
    bits_stride: tl.tensor,
    num_ids: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Program (place, tile): TILE ids of one row."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    slot = tl.load(slots + row, mask=row >= 0, other=-1).to(tl.int64)
    if slot >= 0:
        ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = ids < num_ids
        count = tl.load(output_counts + slot * num_ids + ids, mask=inside, other=0)
        word = tl.load(prompt_bits + slot * bits_stride + ids // 32, mask=inside, other=0)
        has_come = (((word >> (ids % 32)) & 1) == 1) | (count > 0)
        values = tl.load(logits + place * row_stride + ids, mask=inside, other=0.0)
        r = tl.load(repetition + row)
        repeated = tl.where(values > 0, tl.div_rn(values, r), values * r)
        values = tl.where(has_come, repeated, values)
        values -= tl.load(frequency + row) * count.to(tl.float32)
        values -= tl.where(count > 0, tl.load(presence + row), 0.0)
        tl.store(logits + place * row_stride + ids, values, mask=inside)
