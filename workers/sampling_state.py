"""The sampling settings of every row of the state table: on the device, and a copy on the CPU.

    add(row, sampling, ...)   host columns change; the cells that did are staged for the device
    writer.apply()            (the runner) they arrive, in front of the kernels that read them
    fill_slots(...)           penalty slots of the rows that came are counted up

Kernels find a request's settings by its row, so a decode that goes on needs nothing from the CPU.
The CPU answers from its own columns which rows of a batch are plain, and which need what: it never
looks at the device for that. Every rank holds the same; lists of ids are of the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nanorunner.kernels.sample import GREEDY_BELOW
from nanorunner.kernels.token_counts import count_prompt
from nanorunner.workers import full_sampling as limits
from nanorunner.workers.full_sampling import FullSampling, Need
from nanorunner.workers.staged_tensor import StagedWriter, StagedWriteTensor

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Upload = Callable[[npt.NDArray[np.generic]], torch.Tensor]

NO_SLOT = -1
FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
INT_COLUMNS = (
    "top_k",
    "slot",  # of the penalty pool
    "stop_from",  # prompt_len + min_tokens: the first position that may hold a stop id
    "num_allowed",
    "num_biases",
    "num_stop_ids",
    "num_words",
)
LISTS = {
    "allowed_ids": (limits.MAX_ALLOWED_IDS, torch.int32),
    "bias_ids": (limits.MAX_BIASES, torch.int32),
    "bias_values": (limits.MAX_BIASES, torch.float32),
    "stop_ids": (limits.MAX_STOP_IDS, torch.int32),
    "words": (limits.MAX_BAD_WORD_TOKENS, torch.int32),
    "word_ends": (limits.MAX_BAD_WORDS, torch.int32),
}


class NoFreeSlot(RuntimeError):
    """More active requests use penalties than the pool has slots; the scheduler must wait."""


class SamplingState:
    """The sampling table of one rank.

    The columns are the staged tables `writer` made: [R] on the device, at fixed addresses, as long
    as this object, last written by the writer's kernel. So are the lists [R, limit].

    prompt_bits, output_counts: the penalty pool (kernels/penalties.py). Owner: this object. Place:
    the device. A slot is valid from fill_slots() to its row's remove(). Last writer:
    kernels/token_counts.py, on the main stream.
    """

    def __init__(
        self,
        writer: StagedWriter,
        num_rows: int,
        local_vocab: int,
        vocab_offset: int,
        upload: Upload,
        device: torch.device,
        num_slots: int = limits.NUM_PENALTY_SLOTS,
    ) -> None:
        self.num_rows = num_rows
        self.local_vocab = local_vocab
        self.vocab_offset = vocab_offset
        self.num_slots = num_slots
        self.upload = upload
        self._tables: dict[str, StagedWriteTensor] = {}
        self._host: dict[str, npt.NDArray[Any]] = {}  # what the device's columns hold
        types = dict.fromkeys(FLOAT_COLUMNS, torch.float32) | dict.fromkeys(
            INT_COLUMNS, torch.int32
        )
        for name, dtype in (types | {"seed": torch.int64}).items():
            self._tables[name] = writer.table(f"sampling.{name}", (num_rows,), dtype)
            self._host[name] = np.zeros(num_rows, str(dtype).removeprefix("torch."))
        for name, (limit, dtype) in LISTS.items():
            self._tables[name] = writer.table(f"sampling.{name}", (num_rows, limit), dtype)

        words = -(-local_vocab // 32)
        self.prompt_bits = torch.zeros(num_slots, words, dtype=torch.int32, device=device)
        self.output_counts = torch.zeros(num_slots, local_vocab, dtype=torch.int32, device=device)
        self._free_slots = list(range(num_slots))
        self._rows_to_count: dict[int, int] = {}  # row -> prefill_len, since the last fill_slots
        self._needs: Int32 = np.zeros(num_rows, np.int32)
        self._num_logprobs: Int32 = np.full(num_rows, -1, np.int32)

    def column(self, name: str) -> torch.Tensor:
        """Return a column [R] or a list [R, limit] on the device; its address never changes."""
        return self._tables[name].tensor

    def add(self, row: int, sampling: FullSampling, prompt_len: int, prefill_len: int) -> None:
        """Give the row to a request that came, or came back: prefill_len counts its output too.

        The settings have passed check_full_sampling. Raises NoFreeSlot, with nothing changed, when
        the request uses penalties and the pool is empty.
        """
        slot = NO_SLOT
        if sampling.needs_penalty_slot:
            if not self._free_slots:
                raise NoFreeSlot(f"all {self.num_slots} penalty slots are taken")
            slot = self._free_slots.pop()
            self._rows_to_count[row] = prefill_len
        word_ends = np.cumsum([len(word) for word in sampling.bad_words])
        values = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition": sampling.repetition_penalty,
            "presence": sampling.presence_penalty,
            "frequency": sampling.frequency_penalty,
            "top_k": min(sampling.top_k, 2**31 - 1),
            "slot": slot,
            "stop_from": min(prompt_len + sampling.min_tokens, 2**31 - 1),
            "num_allowed": len(sampling.allowed_token_ids),
            "num_biases": len(sampling.logit_bias),
            "num_stop_ids": len(sampling.stop_ids) if sampling.min_tokens > 0 else 0,
            "num_words": len(sampling.bad_words),
            "seed": sampling.seed,
        }
        for name, value in values.items():
            self._set(name, row, value)
        self._tables["allowed_ids"].stage(row, 0, sampling.allowed_token_ids)
        self._tables["bias_ids"].stage(row, 0, [i for i, _ in sampling.logit_bias])
        self._tables["bias_values"].stage(row, 0, [b for _, b in sampling.logit_bias])
        if sampling.min_tokens > 0:
            self._tables["stop_ids"].stage(row, 0, sampling.stop_ids)
        self._tables["words"].stage(row, 0, [t for word in sampling.bad_words for t in word])
        self._tables["word_ends"].stage(row, 0, word_ends.astype(np.int32))
        self._needs[row] = sampling.needs(GREEDY_BELOW)
        self._num_logprobs[row] = sampling.logprobs

    def remove(self, row: int) -> None:
        """Take the row from its request; its penalty slot is free for the next add().

        Nothing is cleared on the device: no step reads a row that no request has.
        """
        slot = int(self._host["slot"][row])
        if slot != NO_SLOT and self._needs[row] & Need.PENALTIES:
            self._free_slots.append(slot)
        self._rows_to_count.pop(row, None)
        self._needs[row] = 0
        self._num_logprobs[row] = -1

    def fill_slots(
        self, token_ids: torch.Tensor, prompt_len: torch.Tensor, prefill_len: torch.Tensor
    ) -> None:
        """Count the tokens of the rows added since the last call; after the writer's apply().

        token_ids [R, max_model_len], prompt_len, prefill_len [R], all int32: the state table.
        """
        if not self._rows_to_count:
            return
        rows = np.fromiter(self._rows_to_count, np.int32)
        longest = max(self._rows_to_count.values())
        self._rows_to_count = {}
        count_prompt(
            token_ids,
            self.upload(rows),
            self.column("slot"),
            prompt_len,
            prefill_len,
            longest,
            self.prompt_bits,
            self.output_counts,
            self.vocab_offset,
        )

    def needs(self, rows: Int64, positions: Int64 | None = None) -> Int32:
        """Return the Need bits [n] of a batch's rows [n]; -1, nobody, needs nothing.

        positions [n]: of the input tokens, as far as the CPU knows, never too large: with them a
        request that has its min_tokens is plain again.
        """
        needs = np.where(rows >= 0, self._needs[rows], 0).astype(np.int32)
        if positions is not None:
            is_past = positions + 1 >= self._host["stop_from"][rows]
            needs[is_past] &= ~np.int32(Need.STOP_IDS)
        return needs

    def num_logprobs(self, rows: Int64) -> Int32:
        """Return how many best tokens each of rows [n] reports with an output token, -1 for none.

        0 reports the token's own log-probability alone.
        """
        return np.where(rows >= 0, self._num_logprobs[rows], -1).astype(np.int32)

    def max_words(self, rows: Int64) -> int:
        """Return the most bad words that any of rows [n] has, at least 1.

        So the warm-up, whose rows have none, launches the kernel that looks for them.
        """
        return int(self._host["num_words"][rows].max(initial=1))

    def _set(self, name: str, row: int, value: int | float) -> None:
        """Stage a cell of a column if the device has another value there."""
        column = self._host[name]
        before = column[row]
        column[row] = value
        if column[row] != before:
            self._tables[name].stage_elem(row, column[row].item())
