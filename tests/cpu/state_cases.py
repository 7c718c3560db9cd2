"""State tables and input buffers for tests of the input and state kernels, and their model.

Request is plain Python: one request's tokens and how far it has come. What no kernel may read is
poisoned: tokens past a request's end, blocks that it does not own, buffers of the last step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from kernel_cases import DEVICE

from nanorunner.kernels.state_tables import InputBuffers, LogitsRows, StateTables

POISON = -(10**6)  # as a token, a block or a length it cannot pass unseen


@dataclass
class Request:
    """One row of the state table."""

    tokens: list[int]
    prefill_len: int
    num_computed: int
    blocks: list[int] = field(default_factory=list)


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def state_of(
    requests: dict[int, Request], num_rows: int, max_len: int, max_blocks: int
) -> StateTables:
    """Return tables in which row r holds requests[r]; every other cell is poisoned."""
    state = StateTables(
        torch.full((num_rows, max_len), POISON, dtype=torch.int32),
        torch.full((num_rows,), POISON, dtype=torch.int32),
        torch.full((num_rows,), POISON, dtype=torch.int32),
        torch.full((num_rows,), POISON, dtype=torch.int32),
        torch.full((num_rows,), POISON, dtype=torch.int64),
        torch.full((num_rows, max_blocks), POISON, dtype=torch.int32),
    )
    for row, request in requests.items():
        known = torch.tensor(request.tokens, dtype=torch.int32)
        # A kernel must take an output from last_sampled; token_ids may lie across the bus.
        state.token_ids[row, : request.prefill_len] = known[: request.prefill_len]
        if len(request.tokens) > request.prefill_len:
            state.last_sampled[row] = request.tokens[-1]
        state.num_computed[row] = request.num_computed
        state.total_len[row] = len(request.tokens)
        state.prefill_len[row] = request.prefill_len
        state.block_tables[row, : len(request.blocks)] = torch.tensor(request.blocks)
    return StateTables(*(tensor.to(DEVICE) for tensor in state if tensor is not None))


def with_limits(state: StateTables, limits: list[int]) -> StateTables:
    """Return the tables of an engine that speculates, with no drafts; row r may have limits[r]."""
    return state._replace(num_drafts=int32([0] * len(limits)), token_limit=int32(limits))


def copy_of(state: StateTables, device: torch.device = DEVICE) -> StateTables:
    """Return tables of the same values in other memory."""
    tables = state._asdict().items()
    return state._replace(**{k: v.to(device, copy=True) for k, v in tables if v is not None})


def check_same(state: StateTables, expected: StateTables) -> None:
    """Fail unless all tables hold the same values."""
    for name, now, then in zip(StateTables._fields, state, expected, strict=True):
        if now is None or then is None:
            assert now is then, name
        else:
            assert torch.equal(now, then), name


def buffers(num_reqs: int, num_tokens: int, max_blocks: int) -> InputBuffers:
    """Return poisoned input buffers."""
    long, short = torch.int64, torch.int32
    return InputBuffers(
        torch.full((num_tokens,), POISON, dtype=long, device=DEVICE),
        torch.full((num_tokens,), POISON, dtype=long, device=DEVICE),
        torch.full((num_reqs + 1,), POISON, dtype=short, device=DEVICE),
        torch.full((num_reqs,), POISON, dtype=short, device=DEVICE),
        torch.full((num_tokens,), POISON, dtype=long, device=DEVICE),
        torch.full((num_reqs, max_blocks), POISON, dtype=short, device=DEVICE),
    )


def logits_rows(num_rows: int) -> LogitsRows:
    """Return poisoned logits rows."""
    return LogitsRows(
        torch.full((num_rows,), POISON, dtype=torch.int64, device=DEVICE),
        torch.full((num_rows,), POISON, dtype=torch.int32, device=DEVICE),
        torch.full((num_rows,), POISON, dtype=torch.int64, device=DEVICE),
    )


def expected_inputs(
    batch: list[tuple[Request | None, int]], num_reqs: int, num_tokens: int, block_size: int
) -> dict[str, list[int]]:
    """Return every token-shaped and request-shaped input of (request or nobody, tokens) pairs."""
    result: dict[str, list[int]] = {
        name: [] for name in ("input_ids", "positions", "slot_mapping", "seq_lens")
    }
    loc = [0]
    for request, query_len in batch:
        loc.append(loc[-1] + query_len)
        if request is None:
            result["input_ids"] += [0] * query_len
            result["positions"] += [0] * query_len
            result["slot_mapping"] += [-1] * query_len
            result["seq_lens"].append(0)
            continue
        for position in range(request.num_computed, request.num_computed + query_len):
            block, offset = divmod(position, block_size)
            result["input_ids"].append(request.tokens[position])
            result["positions"].append(position)
            result["slot_mapping"].append(request.blocks[block] * block_size + offset)
        result["seq_lens"].append(request.num_computed + query_len)
    for name, value in (("input_ids", 0), ("positions", 0), ("slot_mapping", -1)):
        result[name] += [value] * (num_tokens - loc[-1])
    result["seq_lens"] += [0] * (num_reqs - len(batch))
    result["query_start_loc"] = loc + [loc[-1]] * (num_reqs - len(batch))
    return result


def check_inputs(
    out: InputBuffers,
    batch: list[tuple[Request | None, int]],
    block_size: int,
) -> None:
    """Fail unless `out` holds the batch's inputs and neutral padding."""
    num_reqs, num_tokens = len(out.seq_lens), len(out.input_ids)
    for name, values in expected_inputs(batch, num_reqs, num_tokens, block_size).items():
        assert getattr(out, name).tolist() == values, name
    tables = out.block_tables.tolist()
    for i in range(num_reqs):
        request, query_len = batch[i] if i < len(batch) else (None, 0)
        if request is None:
            assert tables[i] == [0] * len(tables[i]), "a row of nobody is not zero"
        else:
            used = -(-(request.num_computed + query_len) // block_size)
            assert tables[i][:used] == request.blocks[:used]
