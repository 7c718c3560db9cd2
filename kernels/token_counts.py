"""Which tokens a request has had, for its penalties: kept on the device, a slot of the pool each.

count_prompt fills a slot when a request comes (or comes back, with output already); count_sampled
adds each token that is sampled. Both run on the main stream, so the penalties of a step know all
steps before it, read by the host or not. kernels/penalties.py says what a slot looks like.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.triton_support import jit, tl

TILE = 1024  # tokens a program


def count_prompt(
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    prompt_len: torch.Tensor,
    prefill_len: torch.Tensor,
    max_prefill_len: int,
    prompt_bits: torch.Tensor,
    output_counts: torch.Tensor,
    vocab_offset: int = 0,
) -> None:
    """Clear and fill the slots of the requests that came: rows [m] of the state table.

    token_ids [R, max_model_len] int32, slots, prompt_len, prefill_len [R] int32: the state table.
    Tokens before prompt_len set bits; those from there to prefill_len, which a request brings back
    from a preemption, count as output. max_prefill_len: the longest of the rows' prefills.
    """
    if len(rows) == 0:
        return
    of_rows = slots[rows.long()].long()
    prompt_bits.index_fill_(0, of_rows, 0)
    output_counts.index_fill_(0, of_rows, 0)
    function = count_prompt_triton if prompt_bits.is_cuda else count_prompt_reference
    function(
        token_ids,
        rows,
        slots,
        prompt_len,
        prefill_len,
        max_prefill_len,
        prompt_bits,
        output_counts,
        vocab_offset,
    )


def count_prompt_reference(
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    prompt_len: torch.Tensor,
    prefill_len: torch.Tensor,
    max_prefill_len: int,
    prompt_bits: torch.Tensor,
    output_counts: torch.Tensor,
    vocab_offset: int = 0,
) -> None:
    """Fill cleared slots as count_prompt does, in plain PyTorch."""
    num_ids = output_counts.shape[1]
    bit = torch.arange(32, device=prompt_bits.device)
    for row in rows.tolist():
        slot, end = int(slots[row]), int(prompt_len[row])
        prompt = token_ids[row, :end].long() - vocab_offset
        is_in = torch.zeros(prompt_bits.shape[1] * 32, dtype=torch.int64, device=bit.device)
        is_in[prompt[(prompt >= 0) & (prompt < num_ids)]] = 1
        prompt_bits[slot] = (is_in.view(-1, 32) << bit).sum(dim=-1).int()
        output = token_ids[row, end : int(prefill_len[row])].long() - vocab_offset
        output = output[(output >= 0) & (output < num_ids)]
        output_counts[slot] = torch.bincount(output, minlength=num_ids).int()


def count_prompt_triton(
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    prompt_len: torch.Tensor,
    prefill_len: torch.Tensor,
    max_prefill_len: int,
    prompt_bits: torch.Tensor,
    output_counts: torch.Tensor,
    vocab_offset: int = 0,
) -> None:
    """Fill cleared slots as count_prompt does, in one launch."""
    _count_prompt[(len(rows), -(-max_prefill_len // TILE))](
        token_ids,
        rows,
        slots,
        prompt_len,
        prefill_len,
        prompt_bits,
        output_counts,
        token_ids.stride(0),
        prompt_bits.stride(0),
        output_counts.shape[1],
        vocab_offset,
        TILE=TILE,
    )


@jit(counts=("token_stride", "vocab_offset"), tables=("rows",))
def _count_prompt(
    token_ids: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    prompt_len: tl.tensor,
    prefill_len: tl.tensor,
    prompt_bits: tl.tensor,
    output_counts: tl.tensor,
    token_stride: tl.tensor,
    bits_stride: tl.tensor,
    num_ids: tl.tensor,
    vocab_offset: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Program (request, tile): TILE tokens of one row."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    prompt_end = tl.load(prompt_len + row)
    end = tl.load(prefill_len + row)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    ids = tl.load(token_ids + row * token_stride + place, mask=place < end, other=-1)
    ids = tl.where(ids >= 0, ids - vocab_offset, -1)
    is_ours = (ids >= 0) & (ids < num_ids)
    ids = tl.where(is_ours, ids, 0)
    in_prompt = is_ours & (place < prompt_end)
    words = prompt_bits + slot * bits_stride + ids // 32
    bit = tl.full((TILE,), 1, tl.int32) << (ids % 32)
    tl.atomic_or(words, bit, mask=in_prompt, sem="relaxed")
    counts = output_counts + slot * num_ids + ids
    tl.atomic_add(counts, 1, mask=is_ours & (place >= prompt_end), sem="relaxed")


def count_sampled(
    sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    prefill_len: torch.Tensor,
    output_counts: torch.Tensor,
    vocab_offset: int = 0,
) -> None:
    """Count the tokens of a step in the slots of the requests that have one.

    sampled [n] int64; idx_mapping [n]: rows of the state table, -1 for nobody; positions [n] int64:
    of each row's input token. A row still inside its prefill has sampled nothing real.
    """
    function = count_sampled_triton if sampled.is_cuda else count_sampled_reference
    function(sampled, idx_mapping, positions, slots, prefill_len, output_counts, vocab_offset)


def count_sampled_reference(
    sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    prefill_len: torch.Tensor,
    output_counts: torch.Tensor,
    vocab_offset: int = 0,
) -> None:
    """Compute count_sampled in plain PyTorch, on any device."""
    rows = idx_mapping.long().clamp(min=0)
    of_rows = slots[rows].long()
    ids = sampled - vocab_offset
    is_counted = (idx_mapping >= 0) & (of_rows >= 0) & (positions + 1 >= prefill_len[rows])
    is_counted &= (ids >= 0) & (ids < output_counts.shape[1])
    cells = of_rows.clamp(min=0) * output_counts.shape[1] + torch.where(is_counted, ids, 0)
    output_counts.view(-1).index_add_(0, cells, is_counted.int())


def count_sampled_triton(
    sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    prefill_len: torch.Tensor,
    output_counts: torch.Tensor,
    vocab_offset: int = 0,
) -> None:
    """Compute count_sampled in one launch."""
    num_rows = len(sampled)
    if num_rows == 0:
        return
    _count_sampled[(-(-num_rows // TILE),)](
        sampled,
        idx_mapping,
        positions,
        slots,
        prefill_len,
        output_counts,
        num_rows,
        output_counts.shape[1],
        vocab_offset,
        TILE=TILE,
    )


@jit(counts=("num_rows", "vocab_offset"), tables=("sampled", "idx_mapping", "positions"))
def _count_sampled(
    sampled: tl.tensor,
    idx_mapping: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    prefill_len: tl.tensor,
    output_counts: tl.tensor,
    num_rows: tl.tensor,
    num_ids: tl.tensor,
    vocab_offset: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Program (tile): a lane a row of the batch."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = place < num_rows
    row = tl.load(idx_mapping + place, mask=inside, other=-1).to(tl.int64)
    slot = tl.load(slots + row, mask=row >= 0, other=-1).to(tl.int64)
    has_slot = slot >= 0
    position = tl.load(positions + place, mask=has_slot, other=0)
    prefill_end = tl.load(prefill_len + row, mask=has_slot, other=0)
    ids = tl.load(sampled + place, mask=has_slot, other=-1) - vocab_offset
    is_counted = has_slot & (position + 1 >= prefill_end) & (ids >= 0) & (ids < num_ids)
    tl.atomic_add(output_counts + slot * num_ids + ids, 1, mask=is_counted, sem="relaxed")
