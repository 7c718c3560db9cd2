"""Repetition, presence and frequency penalties, from what a request's tokens were.

    repetition   tokens of the prompt or the output: positive logits / r, the others * r
    frequency    - f * how often the output has the token
    presence     - q if the output has the token

A request that asks for one has a slot of a small pool: [slots, vocabulary] counters for every row
of the state table would take 600 MB. Each rank's pool covers its own shard of the vocabulary:

    prompt_bits    [slots, ceil(V / 32)] int32: bit id % 32 of word id // 32, id without the offset
    output_counts  [slots, V] int32

kernels/token_counts.py fills the pool.

A row of a step that verifies drafts comes after the drafts before it, which no pool knows yet: they
are output to this row alone. They lie in the token table, from total_len (before the step's ids are
accepted) up to the position of the row's input token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanorunner.kernels.triton_support import jit, tl

TILE = 1024  # vocabulary ids a program


class DraftTokens(NamedTuple):
    """Where the drafts before the rows of a verify step lie, and which ids a shard has."""

    token_ids: torch.Tensor  # [R, max_model_len] int32: the state table
    total_len: torch.Tensor  # [R] int32: the state table, before the step's ids are accepted
    positions: torch.Tensor  # [m] int64: of each row's input token
    vocab_offset: int = 0  # the first id of this shard


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    prompt_bits: torch.Tensor,
    output_counts: torch.Tensor,
    drafts: DraftTokens | None = None,
) -> None:
    """Penalise logits [m, V] float32 in place.

    rows [m] int: of the state table, -1 for nobody. The state table says for each of its rows:
    slots [R] int32 (-1: no penalties), repetition, presence, frequency [R] float32. drafts: given,
    the tokens at total_len to position of a row's table are output of the row too.
    """
    function = apply_penalties_triton if logits.is_cuda else apply_penalties_reference
    settings = rows, slots, repetition, presence, frequency, prompt_bits, output_counts
    function(logits, *settings, drafts)


def apply_penalties_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    prompt_bits: torch.Tensor,
    output_counts: torch.Tensor,
    drafts: DraftTokens | None = None,
) -> None:
    """Compute apply_penalties in plain PyTorch, a row at a time."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    for place, row in enumerate(rows.tolist()):
        slot = int(slots[row]) if row >= 0 else -1
        if slot < 0:
            continue
        count = output_counts[slot]
        if drafts is not None:
            first, end = int(drafts.total_len[row]), int(drafts.positions[place]) + 1
            before = drafts.token_ids[row, first:end] - drafts.vocab_offset
            before = before[(before >= 0) & (before < len(count))]
            count = count + torch.bincount(before, minlength=len(count))
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
    drafts: DraftTokens | None = None,
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
        rows if drafts is None else drafts.token_ids,  # these three are not read when None
        rows if drafts is None else drafts.total_len,
        rows if drafts is None else drafts.positions,
        logits.stride(0),
        prompt_bits.stride(0),
        0 if drafts is None else drafts.token_ids.stride(0),
        0 if drafts is None else drafts.token_ids.shape[1],
        num_ids,
        0 if drafts is None else drafts.vocab_offset,
        HAS_DRAFTS=drafts is not None,
        TILE=TILE,
    )


@jit(counts=("vocab_offset",), tables=("rows", "positions"))
def _penalise(
    logits: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    prompt_bits: tl.tensor,
    output_counts: tl.tensor,
    token_ids: tl.tensor,
    total_len: tl.tensor,
    positions: tl.tensor,
    row_stride: tl.tensor,
    bits_stride: tl.tensor,
    token_stride: tl.tensor,
    token_capacity: tl.tensor,
    num_ids: tl.tensor,
    vocab_offset: tl.tensor,
    HAS_DRAFTS: tl.constexpr,
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
        if HAS_DRAFTS:
            first = tl.load(total_len + row)
            end = tl.minimum(tl.load(positions + place).to(tl.int32) + 1, token_capacity)
            for at in range(first, end):
                draft = tl.load(token_ids + row * token_stride + at) - vocab_offset
                count += (ids == draft).to(tl.int32)
        word = tl.load(prompt_bits + slot * bits_stride + ids // 32, mask=inside, other=0)
        has_come = (((word >> (ids % 32)) & 1) == 1) | (count > 0)
        values = tl.load(logits + place * row_stride + ids, mask=inside, other=0.0)
        r = tl.load(repetition + row)
        repeated = tl.where(values > 0, tl.div_rn(values, r), values * r)
        values = tl.where(has_come, repeated, values)
        values -= tl.load(frequency + row) * count.to(tl.float32)
        values -= tl.where(count > 0, tl.load(presence + row), 0.0)
        tl.store(logits + place * row_stride + ids, values, mask=inside)
