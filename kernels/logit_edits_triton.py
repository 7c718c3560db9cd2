"""The Triton kernels of logit_edits.py, which says what they do."""

from __future__ import annotations

from nanorunner.kernels.triton_support import jit, tl

RESTORE, ADD, BAN = 0, 1, 2  # what edit_ids_kernel does to the logits of a row's listed ids


@jit(tables=("places", "rows"))
def select_rows_kernel(
    logits: tl.tensor,
    places: tl.tensor,
    rows: tl.tensor,
    num_allowed: tl.tensor,
    selected: tl.tensor,
    row_stride: tl.tensor,
    num_ids: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Program (row, tile): copy TILE logits, or -inf where edit_ids_kernel restores some."""
    at = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < num_ids
    place = tl.load(places + at).to(tl.int64)
    num_open = tl.where(tl.load(num_allowed + tl.load(rows + at)) == 0, num_ids, 0)
    source = logits + place * row_stride + columns
    values = tl.load(source, mask=columns < num_open, other=float("-inf"))
    tl.store(selected + at * num_ids + columns, values.to(tl.float32), mask=inside)


@jit(counts=("vocab_offset",), tables=("rows", "places", "positions"))
def edit_ids_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    ids: tl.tensor,
    counts: tl.tensor,
    source: tl.tensor,
    places: tl.tensor,
    positions: tl.tensor,
    stop_from: tl.tensor,
    row_stride: tl.tensor,
    source_stride: tl.tensor,
    num_ids: tl.tensor,
    vocab_offset: tl.tensor,
    ACTION: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """Program (row): a lane an id of the row's list."""
    RESTORE: tl.constexpr = 0
    ADD: tl.constexpr = 1
    BAN: tl.constexpr = 2
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at).to(tl.int64)
    entry = tl.arange(0, LIMIT)
    count = tl.load(counts + row)
    if ACTION == BAN:
        must_go_on = tl.load(positions + at) + 1 < tl.load(stop_from + row)
        count = tl.where(must_go_on, count, 0)
    is_ours = entry < count
    columns = tl.load(ids + row * LIMIT + entry, mask=is_ours, other=-1) - vocab_offset
    is_ours = is_ours & (columns >= 0) & (columns < num_ids)
    target = logits + at * row_stride + columns
    if ACTION == RESTORE:
        place = tl.load(places + at).to(tl.int64)
        values = tl.load(source + place * source_stride + columns, mask=is_ours, other=0.0)
        tl.store(target, values.to(tl.float32), mask=is_ours)
    if ACTION == ADD:
        bias = tl.load(source + row * LIMIT + entry, mask=is_ours, other=0.0)
        tl.store(target, tl.load(target, mask=is_ours, other=0.0) + bias, mask=is_ours)
    if ACTION == BAN:
        tl.store(target, float("-inf"), mask=is_ours)


@jit(counts=("vocab_offset",), tables=("rows", "positions"))
def ban_bad_words_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    token_ids: tl.tensor,
    prompt_len: tl.tensor,
    words: tl.tensor,
    word_ends: tl.tensor,
    num_words: tl.tensor,
    row_stride: tl.tensor,
    token_stride: tl.tensor,
    max_words: tl.tensor,
    num_ids: tl.tensor,
    vocab_offset: tl.tensor,
    LIMIT: tl.constexpr,
) -> None:
    """Program (row, word): a lane a token of the word's beginning."""
    at = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    row = tl.load(rows + at).to(tl.int64)
    if word < tl.load(num_words + row):
        ends = word_ends + row * max_words + word
        begin = tl.load(ends - 1, mask=word > 0, other=0)
        last = tl.load(ends) - 1
        num_known = tl.load(positions + at) + 1
        num_output = num_known - tl.load(prompt_len + row)
        if last - begin <= num_output:
            lane = tl.arange(0, LIMIT)
            inside = lane < last - begin
            word_token = tl.load(words + row * LIMIT + begin + lane, mask=inside, other=0)
            place = row * token_stride + num_known - (last - begin) + lane
            token = tl.load(token_ids + place, mask=inside, other=0)
            num_different = tl.sum((word_token != token).to(tl.int32), axis=0)
            column = tl.load(words + row * LIMIT + last) - vocab_offset
            is_ours = (column >= 0) & (column < num_ids)
            if is_ours & (num_different == 0):
                tl.store(logits + at * row_stride + column, float("-inf"))
