"""Edits of single logits: allowed ids, biases, stop ids that come too early, bad words.

    select_rows     the rows of a step that are edited, as float32 [m, V]; others stay untouched
                    a row with allowed ids: -inf everywhere else
    add_bias        + bias
    ban_stop_ids    -inf while the output is shorter than min_tokens
    ban_bad_words   -inf for the last id of a word whose beginning the output ends with

In this order, each a launch of its own: two edits may meet in one logit. V is this rank's shard of
the vocabulary, which begins at vocab_offset; ids of other shards are skipped. `rows` [m] are rows
of the state table, whose lists [R, limit] are filled by workers/sampling_state.py.
"""

from __future__ import annotations

import torch

from nanorunner.kernels.logit_edits_triton import (
    ADD,
    BAN,
    RESTORE,
    ban_bad_words_kernel,
    edit_ids_kernel,
    select_rows_kernel,
)

TILE = 1024  # vocabulary ids a program


def select_rows(
    logits: torch.Tensor,
    places: torch.Tensor,
    rows: torch.Tensor,
    allowed_ids: torch.Tensor,
    num_allowed: torch.Tensor,
    has_allowed: bool,
    vocab_offset: int = 0,
) -> torch.Tensor:
    """Return logits[places] as a new float32 tensor [m, V], -inf where an id is not allowed.

    places [m] int32: rows of logits [n, V]. allowed_ids [R, limit] int32, num_allowed [R] int32: 0
    allows every id. has_allowed: whether any of the rows has a list, which saves a launch.
    """
    function = select_rows_triton if logits.is_cuda else select_rows_reference
    return function(logits, places, rows, allowed_ids, num_allowed, has_allowed, vocab_offset)


def select_rows_reference(
    logits: torch.Tensor,
    places: torch.Tensor,
    rows: torch.Tensor,
    allowed_ids: torch.Tensor,
    num_allowed: torch.Tensor,
    has_allowed: bool,
    vocab_offset: int = 0,
) -> torch.Tensor:
    """Compute select_rows in plain PyTorch, on any device."""
    selected = logits[places.long()].float()
    for place, row in enumerate(rows.tolist()):
        count = int(num_allowed[row])
        if has_allowed and count > 0:
            ids = _in_shard(allowed_ids[row, :count], vocab_offset, logits.shape[1])
            kept = selected[place, ids]
            selected[place] = float("-inf")
            selected[place, ids] = kept
    return selected


def select_rows_triton(
    logits: torch.Tensor,
    places: torch.Tensor,
    rows: torch.Tensor,
    allowed_ids: torch.Tensor,
    num_allowed: torch.Tensor,
    has_allowed: bool,
    vocab_offset: int = 0,
) -> torch.Tensor:
    """Compute select_rows in one launch, or in two when there are allowed ids."""
    num_rows, num_ids = len(places), logits.shape[1]
    selected = torch.empty(num_rows, num_ids, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return selected
    select_rows_kernel[(num_rows, -(-num_ids // TILE))](
        logits, places, rows, num_allowed, selected, logits.stride(0), num_ids, TILE=TILE
    )
    if has_allowed:
        _edit_ids(
            selected, rows, allowed_ids, num_allowed, vocab_offset, RESTORE, logits, places=places
        )
    return selected


def add_bias(
    logits: torch.Tensor,
    rows: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    num_biases: torch.Tensor,
    vocab_offset: int = 0,
) -> None:
    """Add the rows' biases to logits [m, V] float32 in place.

    bias_ids [R, limit] int32, an id at most once a row; bias_values [R, limit] float32;
    num_biases [R] int32.
    """
    function = add_bias_triton if logits.is_cuda else add_bias_reference
    function(logits, rows, bias_ids, bias_values, num_biases, vocab_offset)


def add_bias_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    num_biases: torch.Tensor,
    vocab_offset: int = 0,
) -> None:
    """Compute add_bias in plain PyTorch, on any device."""
    for place, row in enumerate(rows.tolist()):
        ids = bias_ids[row, : int(num_biases[row])].long() - vocab_offset
        is_ours = (ids >= 0) & (ids < logits.shape[1])
        logits[place, ids[is_ours]] += bias_values[row, : len(ids)][is_ours]


def add_bias_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    num_biases: torch.Tensor,
    vocab_offset: int = 0,
) -> None:
    """Compute add_bias in one launch."""
    _edit_ids(logits, rows, bias_ids, num_biases, vocab_offset, ADD, bias_values)


def ban_stop_ids(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    stop_from: torch.Tensor,
    stop_ids: torch.Tensor,
    num_stop_ids: torch.Tensor,
    vocab_offset: int = 0,
) -> None:
    """Set the stop ids of rows that must go on to -inf in logits [m, V] float32.

    positions [m] int64: of the input token. stop_from [R] int32 = prompt_len + min_tokens: the
    first position that may hold a stop id; the token sampled now gets position + 1. stop_ids
    [R, limit] int32: every id that ends the request, EOS among them; num_stop_ids [R] int32.
    """
    function = ban_stop_ids_triton if logits.is_cuda else ban_stop_ids_reference
    function(logits, rows, positions, stop_from, stop_ids, num_stop_ids, vocab_offset)


def ban_stop_ids_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    stop_from: torch.Tensor,
    stop_ids: torch.Tensor,
    num_stop_ids: torch.Tensor,
    vocab_offset: int = 0,
) -> None:
    """Compute ban_stop_ids in plain PyTorch, on any device."""
    for place, row in enumerate(rows.tolist()):
        if int(positions[place]) + 1 < int(stop_from[row]):
            banned = stop_ids[row, : int(num_stop_ids[row])]
            logits[place, _in_shard(banned, vocab_offset, logits.shape[1])] = float("-inf")


def ban_stop_ids_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    stop_from: torch.Tensor,
    stop_ids: torch.Tensor,
    num_stop_ids: torch.Tensor,
    vocab_offset: int = 0,
) -> None:
    """Compute ban_stop_ids in one launch."""
    _edit_ids(
        logits,
        rows,
        stop_ids,
        num_stop_ids,
        vocab_offset,
        BAN,
        positions=positions,
        stop_from=stop_from,
    )


def ban_bad_words(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    words: torch.Tensor,
    word_ends: torch.Tensor,
    num_words: torch.Tensor,
    max_words: int,
    vocab_offset: int = 0,
) -> None:
    """Set the last id of each word that the output would complete to -inf in logits [m, V] float32.

    positions [m] int64: of the input token. token_ids [R, max_model_len], prompt_len [R] int32: the
    state table; a word's beginning is looked for in the output only, never in the prompt. words
    [R, limit] int32: a row's words one behind the other; word_ends [R, limit] int32: where each
    ends; num_words [R] int32; max_words: the most that any of the rows has.
    """
    function = ban_bad_words_triton if logits.is_cuda else ban_bad_words_reference
    function(
        logits,
        rows,
        positions,
        token_ids,
        prompt_len,
        words,
        word_ends,
        num_words,
        max_words,
        vocab_offset,
    )


def ban_bad_words_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    words: torch.Tensor,
    word_ends: torch.Tensor,
    num_words: torch.Tensor,
    max_words: int,
    vocab_offset: int = 0,
) -> None:
    """Compute ban_bad_words in plain Python lists."""
    for place, row in enumerate(rows.tolist()):
        output = token_ids[row, int(prompt_len[row]) : int(positions[place]) + 1].tolist()
        begin = 0
        for end in word_ends[row, : int(num_words[row])].tolist():
            *beginning, last = words[row, begin:end].tolist()
            begin = end
            if output[len(output) - len(beginning) :] == beginning:
                column = last - vocab_offset
                if 0 <= column < logits.shape[1]:
                    logits[place, column] = float("-inf")


def ban_bad_words_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    words: torch.Tensor,
    word_ends: torch.Tensor,
    num_words: torch.Tensor,
    max_words: int,
    vocab_offset: int = 0,
) -> None:
    """Compute ban_bad_words in one launch, a program a row and word."""
    if len(rows) == 0 or max_words == 0:
        return
    ban_bad_words_kernel[(len(rows), max_words)](
        logits,
        rows,
        positions,
        token_ids,
        prompt_len,
        words,
        word_ends,
        num_words,
        logits.stride(0),
        token_ids.stride(0),
        word_ends.shape[1],
        logits.shape[1],
        vocab_offset,
        LIMIT=words.shape[1],
    )


def _in_shard(ids: torch.Tensor, vocab_offset: int, num_ids: int) -> torch.Tensor:
    """Return the columns of those ids that a shard holds."""
    columns = ids.long() - vocab_offset
    return columns[(columns >= 0) & (columns < num_ids)]


def _edit_ids(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor,
    vocab_offset: int,
    action: int,
    source: torch.Tensor | None = None,
    *,
    places: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    stop_from: torch.Tensor | None = None,
) -> None:
    """Launch edit_ids_kernel; what an action does not read may be None."""
    if len(rows) == 0:
        return
    edit_ids_kernel[(len(rows),)](
        logits,
        rows,
        ids,
        counts,
        logits if source is None else source,
        rows if places is None else places,
        rows if positions is None else positions,
        counts if stop_from is None else stop_from,
        logits.stride(0),
        logits.stride(0) if source is None else source.stride(0),
        logits.shape[1],
        vocab_offset,
        ACTION=action,
        LIMIT=ids.shape[1],
    )
